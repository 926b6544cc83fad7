//! What a simulation finds.

use serde::Serialize;
use std::ops::AddAssign;

use super::machine::Class;
use crate::problem::{Pass, Travels};

/// Bytes by the links that carry them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Bytes {
    /// Bytes between ranks of one node.
    pub within: u64,
    /// Bytes between ranks of different nodes.
    pub between: u64,
}

impl Bytes {
    /// Bytes over links of one class.
    pub(super) fn over(class: Class, bytes: u64) -> Bytes {
        match class {
            Class::Within => Bytes { within: bytes, between: 0 },
            Class::Between => Bytes { within: 0, between: bytes },
        }
    }

    /// The bytes of `times` ranks that send as much.
    pub(super) fn times(self, times: usize) -> Bytes {
        Bytes { within: self.within * times as u64, between: self.between * times as u64 }
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, more: Bytes) {
        self.within += more.within;
        self.between += more.between;
    }
}

/// What one rank does in a pass. Until its end, a rank computes, or waits for seconds that count as
/// `exposed` or `late`.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RankReport {
    /// Steps with anything to do.
    pub steps: usize,
    /// Rectangles that the rank computes.
    pub tiles: usize,
    /// FLOPs of its tiles.
    pub flops: f64,
    /// Seconds of its tiles and merges.
    pub compute: f64,
    /// Seconds that the rank waits for messages that both ends have posted.
    pub exposed: f64,
    /// Seconds that the rank waits for a peer that has not posted its end of a message.
    pub late: f64,
    /// When the rank is through, in seconds from the start.
    pub end: f64,
    /// Bytes that the rank sends.
    pub sent: Bytes,
    /// Hops of chunks to other nodes that the rank starts. All messages of a chunk to one rank
    /// count as one hop.
    pub slow_hops: usize,
    /// Bytes of the rank's buffers for travelling chunks.
    pub buffer_bytes: u64,
}

/// What a rank does for a while.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activity {
    /// Computes tiles and merges.
    Compute,
    /// Waits for a message that is on its way.
    Exposed,
    /// Waits for a rank that has not posted its end of a message.
    Late,
    /// Sends a message.
    Send {
        /// The receiver.
        peer: usize,
        /// The bytes of the message.
        bytes: u64,
        /// The link that the message takes.
        class: Class,
    },
}

/// A stretch of a rank's time.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// The rank.
    pub rank: usize,
    /// Index of the step that the event belongs to.
    pub step: usize,
    /// What the rank does.
    pub activity: Activity,
    /// When the event starts, in seconds from the start of the pass.
    pub start: f64,
    /// When the event ends, in seconds from the start of the pass.
    pub end: f64,
}

/// One pass of all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The pass.
    pub pass: Pass,
    /// The side that travels, if one does.
    pub travels: Option<Travels>,
    /// Seconds until the last rank is through.
    pub seconds: f64,
    /// What each rank does in total.
    pub ranks: Vec<RankReport>,
    /// What all ranks do, in the order in which it ends.
    pub timeline: Vec<Event>,
}

impl Report {
    /// The part of all ranks' time in which they do not compute.
    pub fn idle_share(&self) -> f64 {
        let all = self.seconds * self.ranks.len() as f64;
        if all > 0.0 { 1.0 - self.compute() / all } else { 0.0 }
    }

    /// Seconds that all ranks compute.
    pub fn compute(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.compute).sum()
    }

    /// Bytes that all ranks send.
    pub fn sent(&self) -> Bytes {
        let mut sent = Bytes::default();
        self.ranks.iter().for_each(|rank| sent += rank.sent);
        sent
    }

    /// Seconds that the rank which waits longest waits for messages.
    pub fn exposed(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.exposed).fold(0.0, f64::max)
    }

    /// The most hops over links between nodes that any rank starts.
    pub fn slow_hops(&self) -> usize {
        self.ranks.iter().map(|rank| rank.slow_hops).max().unwrap_or(0)
    }

    /// FLOPs of all ranks.
    pub fn flops(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.flops).sum()
    }
}

/// What one pass takes: the totals of a [`Report`], and one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Estimate {
    /// The side that travels, if one does.
    pub travels: Option<Travels>,
    /// Seconds until the last rank is through.
    pub seconds: f64,
    /// Seconds that the rank which waits longest waits for messages.
    pub exposed: f64,
    /// Seconds that all ranks compute.
    pub compute: f64,
    /// FLOPs of all ranks.
    pub flops: f64,
    /// Bytes that all ranks send.
    pub sent: Bytes,
    /// The most hops over links between nodes that any rank starts.
    pub slow_hops: usize,
    /// The rank that computes longest.
    pub busiest: RankReport,
    /// Whether smaller worlds gave the numbers.
    pub estimated: bool,
}

impl Estimate {
    /// The estimate that a simulation gives.
    pub(super) fn of(report: Report) -> Estimate {
        let longer = |a: &RankReport, b: &RankReport| a.compute.total_cmp(&b.compute);
        Estimate {
            travels: report.travels,
            seconds: report.seconds,
            exposed: report.exposed(),
            compute: report.compute(),
            flops: report.flops(),
            sent: report.sent(),
            slow_hops: report.slow_hops(),
            busiest: report.ranks.into_iter().max_by(longer).unwrap_or_default(),
            estimated: false,
        }
    }
}
