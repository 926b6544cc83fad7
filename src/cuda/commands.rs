//! The command list of a ring: all work that the ring enqueues, before any of it is enqueued.
//!
//! The engine walks the schedule and appends commands in order, each on one of three queues, with
//! the regions that it reads and writes. So an error in a schedule or a buffer shows before the
//! first command is issued, and no neighbour waits for a rank that stopped half way.

use std::cell::{Cell, RefCell};

use burst_attention_kernels::backend::{Choice, Choices, Computation};

use super::driver::{Block, Copy};
use super::nccl::Group;
use super::region::{Queue, Use};

/// Blocks of memory that a rank exchanges with its peers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerBlocks {
    /// Each block that is sent, with the rank that receives it.
    pub sends: Vec<(usize, Block)>,
    /// Each block that is received, with the rank that sends it. None of these blocks has gaps.
    pub receives: Vec<(usize, Block)>,
}

/// The work of a command.
#[derive(Debug, Clone, PartialEq)]
pub enum Work {
    /// What a backend computes with.
    Compute(Computation),
    /// A copy within the device.
    Copy(Copy),
    /// Blocks to exchange with peers. Lowering turns them into messages or copies.
    Blocks(PeerBlocks),
    /// Messages to and from peers.
    Exchange(Group),
    /// The work that XLA enqueues before or after the ring. It may use all memory.
    Program,
}

/// One entry of a command list.
#[derive(Debug, Clone, PartialEq)]
pub struct Command {
    /// The queue that the command runs on.
    pub queue: Queue,
    /// The step of the ring.
    pub step: usize,
    /// The work.
    pub work: Work,
    /// The regions that the command uses. [`Work::Program`] uses all regions.
    pub uses: Vec<Use>,
}

/// Commands in order.
#[derive(Debug, Clone, PartialEq)]
pub struct CommandList {
    /// The commands, from the program before to the program after.
    pub commands: Vec<Command>,
    /// The bytes that they send, by the formula of
    /// [`Payload::row_bytes`](crate::schedule::Payload::row_bytes).
    pub bytes_sent: u64,
    /// The choices of backends.
    pub choices: Choices,
}

/// A command list under construction. The kernels and the transport of a rank share it.
#[derive(Debug, Default)]
pub struct CommandListBuilder {
    commands: RefCell<Vec<Command>>,
    choices: RefCell<Choices>,
    step: Cell<usize>,
}

impl CommandListBuilder {
    /// Begins a step of the schedule.
    pub fn begin(&self, step: usize) {
        self.step.set(step);
    }

    /// Appends a command of the current step.
    pub fn push(&self, queue: Queue, work: Work, uses: Vec<Use>) {
        self.commands.borrow_mut().push(Command { queue, step: self.step.get(), work, uses });
    }

    /// Notes the choice of a backend.
    pub fn note(&self, choice: Choice) {
        self.choices.borrow_mut().add(choice, 1);
    }

    /// Returns the index of the current step.
    pub fn step(&self) -> usize {
        self.step.get()
    }

    /// Returns the command list.
    pub fn finish(self, bytes_sent: u64) -> CommandList {
        let (commands, choices) = (self.commands.into_inner(), self.choices.into_inner());
        CommandList { commands, bytes_sent, choices }
    }
}
