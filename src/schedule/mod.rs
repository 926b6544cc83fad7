//! Schedules: what a rank computes at each step of the ring and what it exchanges meanwhile.
//!
//! A schedule is data, made by a pure function; [`crate::engine`] walks it. A [`Family`] says where
//! chunks are at each step (`visits.rs`); all else follows from that: which rows are needed there
//! (`parts.rs`), where they lie (`slots.rs`), who computes and sends what (`tour.rs`), and how sums
//! come home (`followers.rs`).
//!
//! Within a step the exchanges start first, then the tiles are computed while they are in flight.
//! Where a tile or a message has only some rows of a layout's piece, queries keep to
//! [`QUERY_GRAIN`].

mod check;
mod family;
mod followers;
mod geometry;
mod held;
mod kept;
mod meetings;
mod parts;
mod positions;
mod rows;
mod slots;
mod state;
mod tour;
mod visits;
mod ways;

pub use check::{Violation, check};
pub use family::{Family, cheapest, choose_travels, each, ring, schedule, total_bytes};
pub use geometry::{QUERY_GRAIN, Rectangle, rectangles};
pub use kept::{Kept, kept};

use std::fmt;
use std::ops::Range;

pub(crate) use rows::Rows;

use crate::mask::Band;
use crate::problem::{Pass, Travels};

/// What a buffer holds. Rows are the owner's local rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Payload {
    /// Forward: q. Backward: q, dout, lse and delta.
    Queries,
    /// k and v.
    Keys,
    /// Running (acc, m, l) of the online softmax, float32.
    Partial,
    /// Running dq, float32.
    QueryGrads,
    /// Running dk and dv, float32.
    KeyGrads,
}

impl Payload {
    /// Accumulators are written by tiles; the others are only read.
    pub const fn is_accumulator(self) -> bool {
        matches!(self, Payload::Partial | Payload::QueryGrads | Payload::KeyGrads)
    }
}

/// A piece of the sequence with the rank it belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Chunk {
    /// What it holds.
    pub payload: Payload,
    /// The rank whose shard it is part of.
    pub owner: usize,
    /// Local rows of the owner.
    pub rows: Range<usize>,
}

/// Where a chunk lies on a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// The rank's own shard: inputs, outputs and the accumulators of its own rows.
    Home,
    /// A buffer for what travels, numbered for each payload.
    Slot(usize),
}

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// What is moved.
    pub chunk: Chunk,
    /// The rank at the other end.
    pub peer: usize,
    /// Where it is read (send) or where it lands (receive).
    pub place: Place,
}

/// When an exchange must be complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Due {
    /// Before the accumulators that tiles of step `.0` share with travellers are touched: after
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

    /// Is this moment reached when `now` is?
    pub fn reached_by(self, now: Due) -> bool {
        self.moment() <= now.moment()
    }
}

/// Messages that start together as a step begins, as one group. The exchanges of a step start in the
/// order of their deadlines, on all ranks. One whose deadline lies steps ahead, as over the slow
/// links of a double ring, is meant to be under way while those of the steps between come and go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exchange {
    /// Outgoing messages; what they read is final and stays untouched until `due`.
    pub sends: Vec<Transfer>,
    /// Incoming messages; where they land is not used until `due`.
    pub receives: Vec<Transfer>,
    /// When all of them must be complete.
    pub due: Due,
}

/// Read side of a tile: rows of a chunk and where it lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operand {
    /// Whose rows.
    pub owner: usize,
    /// Where they lie.
    pub place: Place,
    /// Which of the owner's local rows.
    pub rows: Range<usize>,
}

/// Write side of a tile: the accumulator of the tile's query rows or key rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    /// Where the accumulator lies.
    pub place: Place,
    /// Nothing was accumulated for these rows in this buffer: overwrite, don't read.
    pub first: bool,
    /// Forward pass, at home: no later tile or merge touches these rows, so the kernel writes o
    /// and lse instead of the running state. Set nowhere else; merges have [`Merge::last`].
    pub last: bool,
}

/// A rectangle of queries × keys to compute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tile {
    /// The query rows.
    pub queries: Operand,
    /// The key rows. May be empty: then the tile only defines the state of its query rows.
    pub keys: Operand,
    /// Which pairs are allowed, in local indices of the two owners.
    pub band: Band,
    /// Forward: [`Payload::Partial`]; backward: [`Payload::QueryGrads`].
    pub query_state: State,
    /// Backward only: [`Payload::KeyGrads`]; meaningless in the forward pass.
    pub key_state: State,
}

/// Adds an accumulator that came home to the one that stayed there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Merge {
    /// Whose: payload, owner (this rank) and rows.
    pub chunk: Chunk,
    /// The slot where it arrived.
    pub slot: usize,
    /// No later tile or merge touches these rows: results can be written, in the forward pass o
    /// and lse, in the backward pass gradients.
    pub last: bool,
}

/// One iteration of the ring on one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Number of the step, the same on all ranks; numbers of steps with nothing to do are absent.
    pub index: usize,
    /// Accumulators that start here, each in its slot, holding nothing yet.
    pub opens: Vec<(Chunk, usize)>,
    /// Started in this order as the step begins.
    pub exchanges: Vec<Exchange>,
    /// Computed in this order.
    pub tiles: Vec<Tile>,
    /// Done at the end of the step.
    pub merges: Vec<Merge>,
}

/// What one rank does from the first to the last step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// Whose schedule this is.
    pub rank: usize,
    /// Ranks in the ring.
    pub world_size: usize,
    /// Which pass.
    pub pass: Pass,
    /// Which side travels.
    pub travels: Travels,
    /// Steps, in order of their index.
    pub steps: Vec<Step>,
}

impl Step {
    fn new(index: usize) -> Step {
        Step { index, opens: vec![], exchanges: vec![], tiles: vec![], merges: vec![] }
    }

    fn is_idle(&self) -> bool {
        self.exchanges.is_empty() && self.tiles.is_empty() && self.merges.is_empty()
    }
}

impl Schedule {
    /// All messages this rank sends, in order.
    pub fn sends(&self) -> impl Iterator<Item = &Transfer> {
        self.steps.iter().flat_map(|step| &step.exchanges).flat_map(|exchange| &exchange.sends)
    }
}

impl fmt::Display for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?}[{}..{}] of rank {}",
            self.payload, self.rows.start, self.rows.end, self.owner
        )
    }
}
