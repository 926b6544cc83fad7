//! What a simulation finds.

use super::machine::Class;
use crate::problem::{Pass, Travels};

/// Bytes by the links that carry them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bytes {
    /// Between ranks of one node.
    pub within: u64,
    /// Between ranks of different nodes.
    pub between: u64,
}

impl Bytes {
    /// Adds bytes of one class.
    pub(super) fn add(&mut self, class: Class, bytes: u64) {
        match class {
            Class::Within => self.within += bytes,
            Class::Between => self.between += bytes,
        }
    }
}

/// What one rank does in a pass. Seconds in which it does not compute are `exposed`, `late`, or
/// those after its end.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RankReport {
    /// Steps with anything to do.
    pub steps: usize,
    /// Rectangles that it computes.
    pub tiles: usize,
    /// FLOPs of its tiles.
    pub flops: f64,
    /// Seconds of its tiles and merges.
    pub compute: f64,
    /// Seconds that it waits for messages that both sides have posted.
    pub exposed: f64,
    /// Seconds that it waits for a rank that has not come to the message yet.
    pub late: f64,
    /// When it is through, in seconds from the start.
    pub end: f64,
    /// What it sends.
    pub sent: Bytes,
    /// Chunks that it sends to other nodes, each hop of each chunk counted once.
    pub slow_hops: usize,
    /// Bytes of its buffers for what travels.
    pub buffer_bytes: u64,
}

/// What a rank does for a while.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activity {
    /// Computes tiles and merges.
    Compute,
    /// Waits for a message that is on its way.
    Exposed,
    /// Waits for a rank that has not posted its side of a message.
    Late,
    /// Sends.
    Send {
        /// To this rank.
        peer: usize,
        /// So many bytes.
        bytes: u64,
        /// Over such a link.
        class: Class,
    },
}

/// A stretch of a rank's time.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Whose.
    pub rank: usize,
    /// Index of the step that it belongs to.
    pub step: usize,
    /// What happens.
    pub activity: Activity,
    /// Seconds from the start of the pass.
    pub start: f64,
    /// Likewise.
    pub end: f64,
}

/// One pass of all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Which pass.
    pub pass: Pass,
    /// Which side travels, where one does.
    pub travels: Option<Travels>,
    /// Seconds until the last rank is through.
    pub seconds: f64,
    /// What each rank does.
    pub ranks: Vec<RankReport>,
    /// All of it, in the order of its end.
    pub timeline: Vec<Event>,
}

impl Report {
    /// The part of all ranks' time in which they do not compute.
    pub fn idle_share(&self) -> f64 {
        let compute: f64 = self.ranks.iter().map(|rank| rank.compute).sum();
        let all = self.seconds * self.ranks.len() as f64;
        if all > 0.0 { 1.0 - compute / all } else { 0.0 }
    }

    /// What all ranks send.
    pub fn sent(&self) -> Bytes {
        let add = |sum: Bytes, rank: &RankReport| Bytes {
            within: sum.within + rank.sent.within,
            between: sum.between + rank.sent.between,
        };
        self.ranks.iter().fold(Bytes::default(), add)
    }

    /// Seconds that the rank which waits longest waits for messages.
    pub fn exposed(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.exposed).fold(0.0, f64::max)
    }

    /// Most hops over links between nodes that any one rank starts.
    pub fn slow_hops(&self) -> usize {
        self.ranks.iter().map(|rank| rank.slow_hops).max().unwrap_or(0)
    }

    /// FLOPs of all ranks.
    pub fn flops(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.flops).sum()
    }
}
