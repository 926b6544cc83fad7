//! The queues of a rank, the regions of its memory, and the uses of those regions by commands.

use crate::schedule::{self, Due, Payload, Place};

/// Where a command runs. The commands of one queue run in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Queue {
    /// XLA's stream, for kernels.
    Compute,
    /// A stream of the executor, for exchanges from one step to the next.
    Exchange,
    /// Another stream of the executor, for exchanges that may take several steps, over the slow
    /// links of a double ring.
    Far,
}

impl Queue {
    /// All queues; `queue as usize` is an index into this array.
    pub const ALL: [Queue; 3] = [Queue::Compute, Queue::Exchange, Queue::Far];
    /// The queues of messages. Each has its own communicator.
    pub const OF_MESSAGES: [Queue; 2] = [Queue::Exchange, Queue::Far];

    /// Returns the queue of an exchange that starts at `step`.
    pub fn of(exchange: &schedule::Exchange, step: usize) -> Queue {
        let is_next = exchange.due.reached_by(Due::Fold(step + 1));
        if is_next { Queue::Exchange } else { Queue::Far }
    }
}

/// A part of one rank's memory. The order of commands is kept for each region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Region {
    /// The rank's own rows of a payload: inputs, outputs, accumulators.
    Home(Payload),
    /// A buffer for a chunk that travels.
    Slot(Payload, usize),
    /// Memory in which a queue packs blocks before it sends them.
    Staging(Queue),
    /// Memory in which launches keep which rows segments and masks as data let their rows see.
    Masks,
    /// Memory of a backend, for one tile.
    Scratch,
}

impl Region {
    /// Returns the region of a payload at a place.
    pub fn of(payload: Payload, place: Place) -> Region {
        match place {
            Place::Home => Region::Home(payload),
            Place::Slot(slot) => Region::Slot(payload, slot),
        }
    }
}

/// The use of a region by a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Use {
    /// The rank of the region; always 0 except in a virtual ring.
    pub rank: usize,
    /// The region.
    pub region: Region,
    /// Whether the command writes the region; otherwise the command only reads it.
    pub writes: bool,
}

/// Returns the use of a command that reads a region.
pub fn reads(region: Region) -> Use {
    Use { rank: 0, region, writes: false }
}

/// Returns the use of a command that writes a region.
pub fn writes(region: Region) -> Use {
    Use { rank: 0, region, writes: true }
}
