//! The kernels: one row each.

use crate::features::FeatureSet;
use crate::instances::Element;
use crate::record::{
    Argument, DELTA, FINISH, FORWARD, JOIN, KEY_GRADS, LINEAR_ATTEND, LINEAR_STATE, MERGE,
    QUERY_GRADS, SEGMENT_RANGES,
};

/// A kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kernel {
    /// Folds a rectangle of keys into the running softmax of its queries.
    Forward,
    /// Adds a rectangle's part to dk and dv; with [`FeatureSet::FUSED`] also to dq.
    KeyGrads,
    /// Adds a rectangle's part to dq.
    QueryGrads,
    /// Which rows the segments of a block's rows let it see.
    SegmentRanges,
    /// Per-row statistics for the backward pass.
    Delta,
    /// Adds two accumulators and casts.
    Finish,
    /// Adds an accumulator to another.
    Merge,
    /// Adds a running softmax state to another.
    Join,
    /// The states that parts of a sequence leave, in linear attention.
    LinearState,
    /// What tokens get in linear attention, given those states.
    LinearAttend,
}

/// What a kernel does, as far as tiles and checks depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Task {
    /// Softmax attention over pairs of tiles. Blocks keep queries, and keys come by.
    Queries,
    /// Softmax attention over pairs of tiles. Blocks keep keys, and queries come by.
    Keys,
    /// Linear attention.
    Linear,
    /// Something for each row.
    Rows,
}

/// What is known of a kernel.
#[derive(Debug)]
pub struct KernelSpec {
    /// The kernel.
    pub kernel: Kernel,
    /// Name of its function.
    pub name: &'static str,
    /// The module with its source.
    pub module: &'static str,
    /// Its arguments in order.
    pub arguments: &'static [Argument],
    /// What it does.
    pub task: Task,
    /// Whether it is for activations of a type. Otherwise its images are those of
    /// [`Element::Bf16`] alone.
    pub typed: bool,
    /// The sets of features that it has images for, smaller ones first.
    pub features: &'static [FeatureSet],
}

/// Sets of features that models use.
const PASS: &[FeatureSet] = KEY_PASS.split_at(6).0;

const KEY_PASS: &[FeatureSet] = &[
    FeatureSet::NONE,
    FeatureSet::WINDOW,
    FeatureSet::WINDOW.and(FeatureSet::SEGMENTS),
    FeatureSet::WINDOW.and(FeatureSet::SOFT_CAP),
    FeatureSet::WINDOW.and(FeatureSet::SLOPES),
    FeatureSet::ALL,
    FeatureSet::FUSED,
    FeatureSet::FUSED.and(FeatureSet::WINDOW).and(FeatureSet::SEGMENTS),
];

const fn spec(
    kernel: Kernel,
    (name, module): (&'static str, &'static str),
    arguments: &'static [Argument],
    task: Task,
) -> KernelSpec {
    let features = match task {
        Task::Queries => PASS,
        Task::Keys => KEY_PASS,
        Task::Linear | Task::Rows => &[FeatureSet::NONE],
    };
    let typed = !matches!(kernel, Kernel::Merge | Kernel::SegmentRanges);
    KernelSpec { kernel, name, module, arguments, task, typed, features }
}

/// All kernels, in the order of [`Kernel`].
static SPECS: [KernelSpec; Kernel::ALL.len()] = [
    spec(Kernel::Forward, ("attention_fwd", "forward"), FORWARD, Task::Queries),
    spec(Kernel::KeyGrads, ("attention_bwd_dkdv", "backward_keys"), KEY_GRADS, Task::Keys),
    spec(Kernel::QueryGrads, ("attention_bwd_dq", "backward_queries"), QUERY_GRADS, Task::Queries),
    spec(Kernel::SegmentRanges, ("segment_ranges", "segments"), SEGMENT_RANGES, Task::Rows),
    spec(Kernel::Delta, ("delta", "rows"), DELTA, Task::Rows),
    spec(Kernel::Finish, ("finish", "rows"), FINISH, Task::Rows),
    spec(Kernel::Merge, ("merge", "rows"), MERGE, Task::Rows),
    spec(Kernel::Join, ("join", "join"), JOIN, Task::Rows),
    spec(Kernel::LinearState, ("linear_state", "linear"), LINEAR_STATE, Task::Linear),
    spec(Kernel::LinearAttend, ("linear_attend", "linear"), LINEAR_ATTEND, Task::Linear),
];

impl Kernel {
    /// All kernels.
    pub const ALL: [Kernel; 10] = [
        Kernel::Forward,
        Kernel::KeyGrads,
        Kernel::QueryGrads,
        Kernel::SegmentRanges,
        Kernel::Delta,
        Kernel::Finish,
        Kernel::Merge,
        Kernel::Join,
        Kernel::LinearState,
        Kernel::LinearAttend,
    ];

    /// Those of softmax attention.
    pub const SOFTMAX: &[Kernel] = Kernel::ALL.split_at(8).0;

    /// What is known of it.
    pub fn spec(self) -> &'static KernelSpec {
        &SPECS[self as usize]
    }

    /// Name of its function.
    pub fn name(self) -> &'static str {
        self.spec().name
    }

    /// Its arguments in order.
    pub fn arguments(self) -> &'static [Argument] {
        self.spec().arguments
    }

    /// Whether it has a loop of matrix products.
    pub fn has_products(self) -> bool {
        self.spec().task != Task::Rows
    }

    /// Whether it is of linear attention.
    pub fn is_linear(self) -> bool {
        self.spec().task == Task::Linear
    }

    /// The types of activations that it has images for.
    pub fn elements(self) -> &'static [Element] {
        if self.spec().typed { &Element::ALL } else { &[Element::Bf16] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kernel_has_its_row() {
        assert!(Kernel::ALL.iter().all(|kernel| kernel.spec().kernel == *kernel));
    }
}
