//! Schedules. A schedule lists the tiles that a rank computes at each step of a pass, and the
//! messages that the rank exchanges during the step.
//!
//! A schedule is data that pure functions make and [`crate::engine`] carries out. A [`Family`]
//! decides where chunks are at each step, its placements. The rest follows from the placements:
//! which rows each rank needs (`row_ranges.rs`), which slots hold them (`slots.rs`), what each rank
//! computes and sends (`builder.rs`), and how accumulators travel home (`accumulators.rs`).
//!
//! The exchanges of a step start before its tiles, and are in flight while the tiles run. Where a
//! tile or a message has only some of the query rows of a
//! [`StridedRange`](crate::layout::StridedRange), those rows keep to [`QUERY_GRAIN`].

mod accumulators;
mod builder;
mod cache;
mod check;
mod directions;
mod family;
mod geometry;
mod marks;
mod payload;
mod placement;
mod rank_pairs;
mod row_ranges;
mod rows;
mod slots;

pub use builder::{for_each_rank, ring, schedule};
pub use cache::cached;
pub use check::{Violation, check};
pub use family::Family;
pub use geometry::{QUERY_GRAIN, Rectangle, rectangles};
pub use payload::Payload;

use std::fmt;
use std::ops::Range;

pub(crate) use family::Crossing;
pub(crate) use rows::Rows;

use crate::mask::Band;
use crate::problem::{Pass, Problem, Travels};

/// Rows of one rank's shard.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Chunk {
    /// What the chunk holds.
    pub payload: Payload,
    /// The rank whose shard the chunk is part of.
    pub owner: usize,
    /// Local rows of the owner.
    pub rows: Range<usize>,
}

/// Where a chunk lies on a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// The rank's own shard: inputs, outputs and the accumulators of its own rows.
    Home,
    /// A buffer for travelling chunks. Each payload has its own numbers.
    Slot(usize),
}

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// The chunk that the message moves.
    pub chunk: Chunk,
    /// The rank at the other end.
    pub peer: usize,
    /// Where a send reads the chunk, or where a receive puts it.
    pub place: Place,
}

/// When an exchange must be complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// Before the tiles of step `.0` touch travelling accumulators: after
    /// [`crate::kernel::AttentionKernel::backward_begin`], before `backward_finish` and merges.
    Fold(usize),
    /// Before step `.0` begins.
    Begin(usize),
}

impl Due {
    /// Position on the clock of the ring; later moments are larger.
    pub(crate) fn moment(self) -> usize {
        match self {
            Due::Begin(step) => 2 * step,
            Due::Fold(step) => 2 * step + 1,
        }
    }

    /// Whether this moment has come at moment `now`.
    pub fn reached_by(self, now: Due) -> bool {
        self.moment() <= now.moment()
    }
}

/// Messages that start together as a step begins, as one group.
///
/// All ranks start the exchanges of a step in the order of their deadlines. An exchange whose
/// deadline is several steps away, as over the slow links of a double ring, stays under way while
/// the exchanges of the steps between start and complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exchange {
    /// Outgoing messages. Their rows are final, and nothing writes them until `due`.
    pub sends: Vec<Transfer>,
    /// Incoming messages. Nothing uses their places until `due`.
    pub receives: Vec<Transfer>,
    /// When all of the messages must be complete.
    pub due: Due,
}

/// Rows that a tile reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TileRows {
    /// The rank that owns the rows.
    pub owner: usize,
    /// Where the rows lie.
    pub place: Place,
    /// Local rows of the owner.
    pub rows: Range<usize>,
}

/// How a tile writes the accumulator of its query rows or its key rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accumulator {
    /// Where the accumulator lies.
    pub place: Place,
    /// Whether the buffer holds nothing for these rows yet, so that the tile overwrites them.
    pub first: bool,
    /// Whether no later tile or merge touches these rows, so that the kernel writes o and lse
    /// instead of the running state. Only tiles of the forward pass set it, for rows at home; see
    /// [`Merge::last`] for merges.
    pub last: bool,
}

/// A rectangle of queries × keys to compute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tile {
    /// The query rows.
    pub queries: TileRows,
    /// The key rows. Without any, the tile only defines the state of its query rows.
    pub keys: TileRows,
    /// The allowed pairs, in local rows of the two owners.
    pub band: Band,
    /// The accumulator of the query rows. Forward: [`Payload::Partial`]; backward:
    /// [`Payload::QueryGrads`].
    pub query_state: Accumulator,
    /// The accumulator of the key rows in the backward pass, [`Payload::KeyGrads`]. The forward
    /// pass ignores it.
    pub key_state: Accumulator,
}

/// Adds an accumulator that came home to the accumulator at home.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Merge {
    /// The accumulator. Its owner is this rank.
    pub chunk: Chunk,
    /// The slot where the accumulator arrived.
    pub slot: usize,
    /// Whether no later tile or merge touches these rows, so that the kernel can write results: o
    /// and lse in the forward pass, gradients in the backward pass.
    pub last: bool,
}

/// One iteration of the ring on one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Number of the step, the same on all ranks. A rank's list leaves out its idle steps.
    pub index: usize,
    /// Empty accumulators that start here, each with its slot.
    pub opens: Vec<(Chunk, usize)>,
    /// Exchanges that start, in this order, as the step begins.
    pub exchanges: Vec<Exchange>,
    /// Tiles to compute, in this order.
    pub tiles: Vec<Tile>,
    /// Merges at the end of the step.
    pub merges: Vec<Merge>,
}

/// What one rank does from the first to the last step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// The rank that follows this schedule.
    pub rank: usize,
    /// Ranks in the ring.
    pub world_size: usize,
    /// The pass that the schedule is for.
    pub pass: Pass,
    /// The side that travels.
    pub travels: Travels,
    /// Steps, in order of their index.
    pub steps: Vec<Step>,
}

impl Accumulator {
    /// The accumulator at `place`, neither first nor last.
    fn at(place: Place) -> Accumulator {
        Accumulator { place, first: false, last: false }
    }
}

impl Tile {
    /// The tile's rows of `side`, with their accumulator.
    fn side(&self, side: Travels) -> (&TileRows, Accumulator) {
        match side {
            Travels::Keys => (&self.keys, self.key_state),
            Travels::Queries => (&self.queries, self.query_state),
        }
    }

    fn side_mut(&mut self, side: Travels) -> (&mut TileRows, &mut Accumulator) {
        match side {
            Travels::Keys => (&mut self.keys, &mut self.key_state),
            Travels::Queries => (&mut self.queries, &mut self.query_state),
        }
    }

    /// The same tile with these rows of `side`.
    fn with_rows(&self, side: Travels, rows: Range<usize>) -> Tile {
        let mut tile = self.clone();
        tile.side_mut(side).0.rows = rows;
        tile
    }
}

impl Step {
    fn new(index: usize) -> Step {
        Step { index, opens: vec![], exchanges: vec![], tiles: vec![], merges: vec![] }
    }

    fn is_idle(&self) -> bool {
        self.exchanges.is_empty() && self.tiles.is_empty() && self.merges.is_empty()
    }

    /// The exchange with this deadline; a new one if there is none.
    fn exchange(&mut self, due: Due) -> &mut Exchange {
        let known = self.exchanges.iter().position(|exchange| exchange.due == due);
        let index = known.unwrap_or_else(|| {
            self.exchanges.push(Exchange { sends: vec![], receives: vec![], due });
            self.exchanges.len() - 1
        });
        &mut self.exchanges[index]
    }
}

impl Schedule {
    /// All messages that this rank sends, in order.
    pub fn sends(&self) -> impl Iterator<Item = &Transfer> {
        self.steps.iter().flat_map(|step| &step.exchanges).flat_map(|exchange| &exchange.sends)
    }
}

/// Bytes that all ranks together send in one pass.
pub fn total_bytes(problem: &Problem, schedules: &[Schedule]) -> u64 {
    let sends = schedules.iter().flat_map(|s| s.sends().map(move |send| (&send.chunk, s.pass)));
    let bytes = |(chunk, pass): (&Chunk, Pass)| {
        (chunk.rows.len() * chunk.payload.row_bytes(problem, pass)) as u64
    };
    sends.map(bytes).sum()
}

impl fmt::Display for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}[{:?}] of rank {}", self.payload, self.rows, self.owner)
    }
}
