//! The tape while it is written.

use std::cell::{Cell, RefCell};

use super::memory::Region;
use super::tape::{Op, Queue, Use, Work};

/// The tape that a rank's kernels and its transport share, and the step the engine is at.
#[derive(Debug, Default)]
pub struct Recording {
    ops: RefCell<Vec<Op>>,
    step: Cell<usize>,
}

impl Recording {
    /// Says at which step the engine is.
    pub fn begin(&self, step: usize) {
        self.step.set(step);
    }

    /// Appends an operation of the current step.
    pub fn push(&self, queue: Queue, work: Work, uses: Vec<Use>) {
        self.ops.borrow_mut().push(Op { queue, step: self.step.get(), work, uses });
    }

    /// Index of the current step.
    pub fn step(&self) -> usize {
        self.step.get()
    }

    /// What was appended.
    pub fn into_ops(self) -> Vec<Op> {
        self.ops.into_inner()
    }
}

/// That an operation reads a region.
pub fn reads(region: Region) -> Use {
    Use { rank: 0, region, writes: false }
}

/// That an operation writes a region.
pub fn writes(region: Region) -> Use {
    Use { rank: 0, region, writes: true }
}
