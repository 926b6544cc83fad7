//! What ranks do, in seconds and bytes: all that the clock has to know of a schedule.

use std::fmt;
use std::ops::Range;

use super::cost::{Costs, Halves, tile_flops};
use super::machine::{Class, Network};
use super::messages::Side;
use super::report::RankReport;
use crate::schedule::{Chunk, Due, Exchange, Payload, Schedule, Transfer};

/// One rank's pass.
pub(super) struct Script<'a> {
    rank: usize,
    network: &'a Network,
    pub steps: Vec<Errand>,
    groups: Vec<Group>,
    parcels: Vec<Parcel>,
    /// As far as it is known beforehand.
    pub report: RankReport,
}

/// One step.
#[derive(Clone)]
pub(super) struct Errand {
    /// Number of the step, the same on all ranks.
    pub index: usize,
    pub work: Halves,
    groups: Range<usize>,
}

/// Messages that start together.
#[derive(Clone)]
pub(super) struct Group {
    pub due: Due,
    parcels: Range<usize>,
}

/// This rank's end of a message.
#[derive(Clone)]
pub(super) struct Parcel {
    pub bytes: u64,
    pub peer: u32,
    pub what: What,
    pub side: Side,
    pub class: Class,
}

/// What a message carries, as far as it takes to tell it from others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    Chunk(Payload, u32, [u32; 2]),
    /// Rows of this rank with heads of its receiver.
    Heads(u32),
}

impl What {
    fn chunk(Chunk { payload, owner, rows }: &Chunk) -> What {
        What::Chunk(*payload, *owner as u32, [rows.start as u32, rows.end as u32])
    }

    /// Are both the same hop of the same chunk, to one peer?
    fn shares_hop(self, other: What) -> bool {
        let chunk = |what| match what {
            What::Chunk(payload, owner, _) => Some((payload, owner)),
            What::Heads(_) => None,
        };
        chunk(self).is_some() && chunk(self) == chunk(other)
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            What::Chunk(payload, owner, [start, end]) => {
                let rows = start as usize..end as usize;
                Chunk { payload, owner: owner as usize, rows }.fmt(f)
            }
            What::Heads(rank) => write!(f, "heads of rank {rank}"),
        }
    }
}

impl<'a> Script<'a> {
    /// Of a rank with nothing to do.
    pub fn new(rank: usize, network: &'a Network) -> Script<'a> {
        let report = RankReport::default();
        Script { rank, network, steps: vec![], groups: vec![], parcels: vec![], report }
    }

    /// What a schedule says.
    pub fn of(costs: &Costs<'_>, schedule: &Schedule, network: &'a Network) -> Script<'a> {
        let mut script = Script::new(schedule.rank, network);
        script.follow(costs, schedule, |rank| rank);
        script
    }

    /// Adds the steps of a schedule; `number` is what a rank of its ring is called on this network.
    pub fn follow(
        &mut self,
        costs: &Costs<'_>,
        schedule: &Schedule,
        number: impl Fn(usize) -> usize,
    ) {
        let first = self.steps.last().map_or(0, |step| step.index + 1);
        let later = |due| match due {
            Due::Begin(step) => Due::Begin(first + step),
            Due::Fold(step) => Due::Fold(first + step),
        };
        for step in &schedule.steps {
            let flops = |tile| tile_flops(costs.problem, schedule.pass, tile);
            self.report.tiles += step.tiles.len();
            self.report.flops += step.tiles.iter().map(flops).sum::<f64>();
            self.begin(first + step.index, costs.step(schedule.pass, step));
            for Exchange { sends, receives, due } in &step.exchanges {
                let end = |side| {
                    let number = &number;
                    move |Transfer { chunk, peer, .. }: &Transfer| {
                        let bytes = costs.chunk(chunk, schedule.pass);
                        (side, number(*peer), bytes, What::chunk(chunk))
                    }
                };
                let sends = sends.iter().map(end(Side::Send));
                self.post(later(*due), sends.chain(receives.iter().map(end(Side::Receive))));
            }
        }
        self.report.buffer_bytes += costs.buffers(schedule);
    }

    /// Adds a step.
    pub fn begin(&mut self, index: usize, work: Halves) {
        self.report.steps += 1;
        self.steps.push(Errand { index, work, groups: self.groups.len()..self.groups.len() });
    }

    /// Adds messages that start together to the newest step: each end with the peer, the bytes and
    /// what it carries.
    pub fn post(&mut self, due: Due, ends: impl Iterator<Item = (Side, usize, u64, What)>) {
        let first = self.parcels.len();
        for (side, peer, bytes, what) in ends {
            let class = self.network.class(self.rank, peer);
            let peer = peer as u32;
            if side == Side::Send {
                self.report.sent.add(class, bytes);
                let same = |sent: &Parcel| sent.peer == peer && sent.what.shares_hop(what);
                let hops = class == Class::Between && !self.parcels[first..].iter().any(same);
                self.report.slow_hops += usize::from(hops);
            }
            self.parcels.push(Parcel { bytes, peer, what, side, class });
        }
        let parcels = first..self.parcels.len();
        if let Some(step) = self.steps.last_mut().filter(|_| !parcels.is_empty()) {
            self.groups.push(Group { due, parcels });
            step.groups.end = self.groups.len();
        }
    }

    /// The exchanges of a step, in order.
    pub fn groups(&self, step: &Errand) -> &[Group] {
        &self.groups[step.groups.clone()]
    }

    /// The messages of an exchange.
    pub fn parcels(&self, group: &Group) -> &[Parcel] {
        &self.parcels[group.parcels.clone()]
    }
}
