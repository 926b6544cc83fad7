//! Scripts: what each rank does, in seconds and bytes. The clock knows no more of a schedule.

use std::fmt;

use super::cost::{Costs, Halves, tile_flops};
use super::machine::{Class, Machine};
use super::report::{Bytes, RankReport};
use crate::problem::Problem;
use crate::schedule::{Chunk, Due, Exchange, Payload, Schedule, Transfer};

/// What one rank does in a pass: steps in order, each with computing and exchanges.
pub struct Script<'a> {
    rank: usize,
    machine: &'a Machine,
    pub(super) steps: Vec<ScriptStep>,
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

/// Which end of a message a rank has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Send,
    Receive,
}

/// What tells a message from other messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Label {
    /// Payload, owner, and start and end of the rows.
    Chunk(Payload, u32, [u32; 2]),
    /// Rows that this rank sends, outside of a schedule.
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
    /// The script of a rank with nothing to do, on a machine that [`Machine::validate`] accepts.
    pub fn new(rank: usize, machine: &'a Machine) -> Script<'a> {
        Script { rank, machine, steps: vec![], report: RankReport::default() }
    }

    /// The script of a schedule.
    pub(super) fn of(problem: &Problem, schedule: &Schedule, machine: &'a Machine) -> Script<'a> {
        let mut script = Script::new(schedule.rank, machine);
        script.follow(problem, schedule, |rank| rank);
        script
    }

    /// Adds the steps of a schedule of `problem`. `number` turns a rank of the schedule's ring into
    /// a rank of the network.
    pub fn follow(
        &mut self,
        problem: &Problem,
        schedule: &Schedule,
        number: impl Fn(usize) -> usize,
    ) {
        let costs = Costs::of(problem, schedule, &self.machine.kernels);
        let first = self.next();
        for step in &schedule.steps {
            let flops = |tile| tile_flops(problem, schedule.pass, tile);
            self.report.tiles += step.tiles.len();
            self.report.flops += step.tiles.iter().map(flops).sum::<f64>();
            self.begin(first + step.index, costs.step(step));
            for Exchange { sends, receives, due } in &step.exchanges {
                let due = match due {
                    Due::Begin(step) => Due::Begin(first + step),
                    Due::Fold(step) => Due::Fold(first + step),
                };
                let message = |end| {
                    let (number, costs) = (&number, &costs);
                    move |Transfer { chunk, peer, .. }: &Transfer| {
                        let bytes = costs.chunk(chunk);
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
    fn next(&self) -> usize {
        self.steps.last().map_or(0, |step| step.index + 1)
    }

    /// Adds a step in which the rank computes for `seconds`.
    pub fn compute(&mut self, seconds: f64) {
        self.begin(self.next(), Halves { before: seconds, after: 0.0 });
    }

    /// Adds a step in which the rank sends `bytes` to each rank of `to`, and receives as many from
    /// each rank of `from`. Nothing overlaps with it. Without any such rank there is no step.
    pub fn exchange(
        &mut self,
        to: impl Iterator<Item = usize>,
        from: impl Iterator<Item = usize>,
        bytes: u64,
    ) {
        let (index, rank) = (self.next(), self.rank);
        let sends = to.map(|peer| (End::Send, peer, bytes, Label::Rows(rank as u32)));
        let receives = from.map(|peer| (End::Receive, peer, bytes, Label::Rows(peer as u32)));
        let mut ends = sends.chain(receives).peekable();
        if ends.peek().is_some() {
            self.begin(index, Halves::default());
            self.post(Due::Begin(index + 1), ends);
        }
    }

    /// Adds a step.
    fn begin(&mut self, index: usize, work: Halves) {
        self.report.steps += 1;
        self.steps.push(ScriptStep { index, work, exchanges: vec![] });
    }

    /// Adds to the newest step messages that start together. Each has an end, a peer, bytes and a
    /// label.
    fn post(&mut self, due: Due, ends: impl Iterator<Item = (End, usize, u64, Label)>) {
        let mut messages: Vec<MessageEnd> = Vec::with_capacity(ends.size_hint().0);
        for (end, peer, bytes, label) in ends {
            let class = self.machine.network.class(self.rank, peer);
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
