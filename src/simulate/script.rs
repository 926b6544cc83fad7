//! Scripts: what each rank does, in seconds and bytes. The clock knows no more of a schedule.

use std::fmt;

use super::cost::{Costs, Halves, tile_flops};
use super::machine::{Class, Network};
use super::messages::End;
use super::report::{Bytes, RankReport};
use crate::schedule::{Chunk, Due, Exchange, Payload, Schedule, Transfer};

/// One rank's pass.
pub(super) struct Script<'a> {
    rank: usize,
    network: &'a Network,
    pub steps: Vec<ScriptStep>,
    /// The totals that are known before the simulation.
    pub report: RankReport,
}

/// One step of a rank.
pub(super) struct ScriptStep {
    /// Number of the step, the same on all ranks.
    pub index: usize,
    pub work: Halves,
    /// Exchanges in order.
    pub exchanges: Vec<ScriptExchange>,
}

/// Messages that start together.
pub(super) struct ScriptExchange {
    pub due: Due,
    pub messages: Vec<MessageEnd>,
}

/// The rank's end of a message.
pub(super) struct MessageEnd {
    pub bytes: u64,
    pub peer: u32,
    pub label: Label,
    pub end: End,
    pub class: Class,
}

/// What tells a message from other messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Label {
    /// Payload, owner, and start and end of the rows.
    Chunk(Payload, u32, [u32; 2]),
    /// Rows of this rank, for methods that don't follow a schedule.
    Rows(u32),
}

impl Label {
    fn chunk(Chunk { payload, owner, rows }: &Chunk) -> Label {
        Label::Chunk(*payload, *owner as u32, [rows.start as u32, rows.end as u32])
    }

    /// Whether two messages to one peer are the same hop of the same chunk.
    fn shares_hop(self, other: Label) -> bool {
        match (self, other) {
            (Label::Chunk(payload, owner, _), Label::Chunk(other_payload, other_owner, _)) => {
                (payload, owner) == (other_payload, other_owner)
            }
            _ => false,
        }
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Label::Chunk(payload, owner, [start, end]) => {
                let rows = start as usize..end as usize;
                Chunk { payload, owner: owner as usize, rows }.fmt(f)
            }
            Label::Rows(rank) => write!(f, "rows of rank {rank}"),
        }
    }
}

impl<'a> Script<'a> {
    /// The script of a rank with nothing to do.
    pub fn new(rank: usize, network: &'a Network) -> Script<'a> {
        Script { rank, network, steps: vec![], report: RankReport::default() }
    }

    /// The script of a schedule.
    pub fn of(costs: &Costs<'_>, schedule: &Schedule, network: &'a Network) -> Script<'a> {
        let mut script = Script::new(schedule.rank, network);
        script.follow(costs, schedule, |rank| rank);
        script
    }

    /// Adds the steps of a schedule. `number` turns a rank of the schedule's ring into a rank of
    /// the network.
    pub fn follow(
        &mut self,
        costs: &Costs<'_>,
        schedule: &Schedule,
        number: impl Fn(usize) -> usize,
    ) {
        let first = self.next();
        for step in &schedule.steps {
            let flops = |tile| tile_flops(costs.problem, schedule.pass, tile);
            self.report.tiles += step.tiles.len();
            self.report.flops += step.tiles.iter().map(flops).sum::<f64>();
            self.begin(first + step.index, costs.step(schedule.pass, step));
            for Exchange { sends, receives, due } in &step.exchanges {
                let due = match due {
                    Due::Begin(step) => Due::Begin(first + step),
                    Due::Fold(step) => Due::Fold(first + step),
                };
                let message = |end| {
                    let number = &number;
                    move |Transfer { chunk, peer, .. }: &Transfer| {
                        let bytes = costs.chunk(chunk, schedule.pass);
                        (end, number(*peer), bytes, Label::chunk(chunk))
                    }
                };
                let sends = sends.iter().map(message(End::Send));
                self.post(due, sends.chain(receives.iter().map(message(End::Receive))));
            }
        }
        self.report.buffer_bytes += costs.buffers(schedule);
    }

    /// The number of the step that comes next.
    pub fn next(&self) -> usize {
        self.steps.last().map_or(0, |step| step.index + 1)
    }

    /// Adds a step in which the rank sends this many bytes to each of its peers, and receives as
    /// many from each. Nothing overlaps with it. Without peers there is no step.
    pub fn exchange(&mut self, peers: impl Iterator<Item = usize> + Clone, each: u64) {
        if peers.clone().next().is_none() {
            return;
        }
        let (index, rank) = (self.next(), self.rank);
        self.begin(index, Halves::default());
        let sends =
            peers.clone().map(move |peer| (End::Send, peer, each, Label::Rows(rank as u32)));
        let receives = peers.map(|peer| (End::Receive, peer, each, Label::Rows(peer as u32)));
        self.post(Due::Begin(index + 1), sends.chain(receives));
    }

    /// Adds a step.
    pub fn begin(&mut self, index: usize, work: Halves) {
        self.report.steps += 1;
        self.steps.push(ScriptStep { index, work, exchanges: vec![] });
    }

    /// Adds to the newest step messages that start together. Each has an end, a peer, bytes and a
    /// label.
    pub fn post(&mut self, due: Due, ends: impl Iterator<Item = (End, usize, u64, Label)>) {
        let mut messages: Vec<MessageEnd> = Vec::with_capacity(ends.size_hint().0);
        for (end, peer, bytes, label) in ends {
            let class = self.network.class(self.rank, peer);
            let peer = peer as u32;
            if end == End::Send {
                self.report.sent += Bytes::over(class, bytes);
                let same = |sent: &MessageEnd| sent.peer == peer && sent.label.shares_hop(label);
                let hops = class == Class::Between && !messages.iter().any(same);
                self.report.slow_hops += usize::from(hops);
            }
            messages.push(MessageEnd { bytes, peer, label, end, class });
        }
        if let Some(step) = self.steps.last_mut().filter(|_| !messages.is_empty()) {
            step.exchanges.push(ScriptExchange { due, messages });
        }
    }
}
