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
    /// Rows of this rank, with heads of the receiver.
    Heads(u32),
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
            Label::Heads(rank) => write!(f, "heads of rank {rank}"),
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
        let first = self.steps.last().map_or(0, |step| step.index + 1);
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
