//! Lets all ranks walk their schedules at once.

use super::clock::Clock;
use super::cost::{Costs, Halves, tile_flops};
use super::machine::{Class, Machine};
use super::messages::{Messages, Post, Side};
use super::report::{Activity, Event, RankReport, Report};
use super::wires::{Forecast, Wires};
use crate::error::{Error, Result};
use crate::problem::{Pass, Problem, Travels};
use crate::schedule::{Due, Exchange, Schedule, Step};

/// Times the schedules of all ranks for one pass of `problem` on `machine`.
///
/// # Errors
/// [`Error::InvalidProblem`] for a machine that can't be calculated with, [`Error::BrokenSchedule`]
/// if the schedules are not one for each rank or if messages do not meet.
pub fn simulate(problem: &Problem, schedules: &[Schedule], machine: &Machine) -> Result<Report> {
    machine.validate()?;
    for (rank, schedule) in schedules.iter().enumerate() {
        if schedule.rank != rank || schedule.world_size != schedules.len() {
            let what = format!("expected rank {rank} of {} here", schedules.len());
            return Err(Error::BrokenSchedule { rank: schedule.rank, step: 0, what });
        }
    }
    let costs = Costs { problem, kernels: &machine.kernels };
    let mut simulation = Simulation {
        machine,
        clock: Clock::new(),
        wires: Wires::new(machine, schedules.len()),
        messages: Messages::new(schedules.len()),
        ranks: schedules.iter().map(|schedule| Rank::new(&costs, schedule)).collect(),
        timeline: Vec::new(),
        costs,
    };
    simulation.run()?;
    let (pass, travels) = (schedules.first())
        .map_or((Pass::Forward, Travels::Keys), |schedule| (schedule.pass, schedule.travels));
    let ranks: Vec<RankReport> = simulation.ranks.into_iter().map(|rank| rank.report).collect();
    let seconds = ranks.iter().map(|rank| rank.end).fold(0.0, f64::max);
    let mut timeline = simulation.timeline;
    timeline.sort_by(|a, b| a.end.total_cmp(&b.end));
    Ok(Report { pass, travels, seconds, ranks, timeline })
}

/// What may happen.
enum Happening {
    /// A rank has computed what it had to.
    Computed(usize),
    /// The first byte of a message arrives.
    Flows(usize),
    /// The last one does, if its speed has not changed since that was forecast.
    Arrives(Forecast),
}

/// Where a rank stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stand {
    /// Before the step with this place in its schedule, or at the end.
    Begin(usize),
    /// Within it, where accumulators that travel are wanted.
    Fold(usize),
    /// Through.
    Over,
}

/// An exchange that is not complete.
struct Flight {
    exchange: u64,
    due: Due,
    left: usize,
}

struct Rank<'a> {
    schedule: &'a Schedule,
    stand: Stand,
    exchanges: u64,
    flights: Vec<Flight>,
    /// Since when it waits, if it does.
    waiting: Option<f64>,
    /// Seconds of the rest of the step.
    rest: f64,
    report: RankReport,
}

struct Simulation<'a> {
    machine: &'a Machine,
    costs: Costs<'a>,
    clock: Clock<Happening>,
    wires: Wires,
    messages: Messages<'a>,
    ranks: Vec<Rank<'a>>,
    timeline: Vec<Event>,
}

impl<'a> Rank<'a> {
    fn new(costs: &Costs<'_>, schedule: &'a Schedule) -> Rank<'a> {
        let tiles = || schedule.steps.iter().flat_map(|step| &step.tiles);
        let flops = |tile| tile_flops(costs.problem, schedule.pass, tile);
        let report = RankReport {
            steps: schedule.steps.len(),
            tiles: tiles().count(),
            flops: tiles().map(flops).sum(),
            buffer_bytes: costs.buffers(schedule),
            ..RankReport::default()
        };
        Rank {
            schedule,
            stand: Stand::Begin(0),
            exchanges: 0,
            flights: vec![],
            waiting: None,
            rest: 0.0,
            report,
        }
    }

    fn step(&self) -> Option<&'a Step> {
        match self.stand {
            Stand::Begin(at) | Stand::Fold(at) => self.schedule.steps.get(at),
            Stand::Over => None,
        }
    }

    /// Index of the step that it is at, of the last one after that.
    fn index(&self) -> usize {
        self.step().or(self.schedule.steps.last()).map_or(0, |step| step.index)
    }

    /// Has everything come that must have, to go on?
    fn may_go_on(&self) -> bool {
        let now = match (self.stand, self.step()) {
            (Stand::Fold(_), Some(step)) => Due::Fold(step.index),
            (Stand::Begin(_), Some(step)) => Due::Begin(step.index),
            // At the end nothing may be on its way.
            _ => return self.flights.is_empty(),
        };
        !self.flights.iter().any(|flight| flight.due.reached_by(now))
    }
}

impl<'a> Simulation<'a> {
    fn run(&mut self) -> Result<()> {
        for rank in 0..self.ranks.len() {
            self.go_on(rank)?;
        }
        let mut forecasts = Vec::new();
        loop {
            self.wires.settle(self.clock.now(), &mut forecasts);
            for forecast in forecasts.drain(..) {
                self.clock.at(forecast.time, Happening::Arrives(forecast));
            }
            if !self.clock.pass() {
                break;
            }
            while let Some(happening) = self.clock.next_now() {
                self.happen(happening)?;
            }
        }
        self.all_over()
    }

    fn happen(&mut self, happening: Happening) -> Result<()> {
        match happening {
            Happening::Computed(rank) => self.go_on(rank),
            Happening::Flows(number) => {
                let Some(message) = self.messages.get(number) else { return Ok(()) };
                let Some([from, to]) = message.ends() else { return Ok(()) };
                let ports = Wires::ports(self.machine, self.ranks.len(), from.rank, to.rank);
                self.wires.join(number, ports, message.bytes, self.clock.now());
                Ok(())
            }
            Happening::Arrives(Forecast { message, version, .. }) => {
                match self.wires.is_current(message, version) {
                    true => self.arrive(message),
                    false => Ok(()),
                }
            }
        }
    }

    /// Lets a rank go on as far as no time passes.
    fn go_on(&mut self, rank: usize) -> Result<()> {
        while self.ranks[rank].stand != Stand::Over {
            let now = self.clock.now();
            if !self.ranks[rank].may_go_on() {
                self.ranks[rank].waiting = Some(now);
                return Ok(());
            }
            let seconds = self.next_part(rank)?;
            if seconds > 0.0 {
                self.ranks[rank].report.compute += seconds;
                self.clock.at(now + seconds, Happening::Computed(rank));
                return Ok(());
            }
        }
        Ok(())
    }

    /// Begins what comes next on a rank; returns how long it computes.
    fn next_part(&mut self, rank: usize) -> Result<f64> {
        let (now, stand) = (self.clock.now(), self.ranks[rank].stand);
        let (seconds, index) = match (stand, self.ranks[rank].step()) {
            (Stand::Begin(at), Some(step)) => {
                for exchange in &step.exchanges {
                    self.post(rank, step.index, exchange)?;
                }
                let Halves { before, after } =
                    self.costs.step(self.ranks[rank].schedule.pass, step);
                self.ranks[rank].rest = after;
                self.ranks[rank].stand = Stand::Fold(at);
                (before, step.index)
            }
            (Stand::Fold(at), Some(step)) => {
                self.ranks[rank].stand = Stand::Begin(at + 1);
                (self.ranks[rank].rest, step.index)
            }
            _ => {
                self.ranks[rank].stand = Stand::Over;
                self.ranks[rank].report.end = now;
                (0.0, 0)
            }
        };
        self.record(rank, index, Activity::Compute, now, now + seconds);
        Ok(seconds)
    }

    fn post(&mut self, rank: usize, step: usize, exchange: &'a Exchange) -> Result<()> {
        let now = self.clock.now();
        let Exchange { sends, receives, due } = exchange;
        let number = self.ranks[rank].exchanges;
        self.ranks[rank].exchanges += 1;
        let left = sends.len() + receives.len();
        if left == 0 {
            return Ok(());
        }
        self.ranks[rank].flights.push(Flight { exchange: number, due: *due, left });
        let mut slow = Vec::new();
        let sides = [(Side::Send, sends), (Side::Receive, receives)];
        let mut posted = Vec::with_capacity(left);
        for (side, transfer) in sides.iter().flat_map(|(side, t)| t.iter().map(move |t| (*side, t)))
        {
            let (chunk, peer) = (&transfer.chunk, transfer.peer);
            let class = self.machine.network.class(rank, peer);
            let bytes = self.costs.chunk(chunk, self.ranks[rank].schedule.pass);
            if side == Side::Send {
                self.ranks[rank].report.sent.add(class, bytes);
                let hop = (chunk.payload, chunk.owner, peer);
                if class == Class::Between && !slow.contains(&hop) {
                    slow.push(hop);
                }
            }
            let post = Post { side, rank, peer, step, exchange: number, chunk, class, bytes };
            posted.push(self.messages.post(&post, now).map_err(|expected| {
                let what = format!("posts {chunk} where rank {peer} has {expected}");
                Error::BrokenSchedule { rank, step, what }
            })?);
        }
        self.ranks[rank].report.slow_hops += slow.len();
        self.start(&posted);
        Ok(())
    }

    /// Starts those of the messages that can be.
    fn start(&mut self, messages: &[usize]) {
        let now = self.clock.now();
        for &number in messages {
            if self.messages.try_start(number, now) {
                let class = self.messages.get(number).map_or(Class::Within, |m| m.class);
                let latency = self.machine.network.link(class).latency;
                self.clock.at(now + latency, Happening::Flows(number));
            }
        }
    }

    fn arrive(&mut self, number: usize) -> Result<()> {
        let now = self.clock.now();
        self.wires.leave(number);
        let mut next = Vec::new();
        let Some(message) = self.messages.finish(number, &mut next) else { return Ok(()) };
        let Some(ends) = message.ends() else { return Ok(()) };
        let (peer, bytes, class) = (ends[1].rank, message.bytes, message.class);
        let started = message.started.unwrap_or(now);
        let activity = Activity::Send { peer, bytes, class };
        self.record(ends[0].rank, ends[0].step, activity, started, now);
        self.start(&next);
        for end in ends {
            let flights = &mut self.ranks[end.rank].flights;
            if let Some(at) = flights.iter().position(|flight| flight.exchange == end.exchange) {
                flights[at].left -= 1;
                if flights[at].left == 0 {
                    flights.remove(at);
                }
            }
            self.wake(end.rank, message.posted)?;
        }
        Ok(())
    }

    /// Lets a rank go on that waited, if what it waited for is there: last came a message that both
    /// ends had posted at `posted`.
    fn wake(&mut self, rank: usize, posted: f64) -> Result<()> {
        let now = self.clock.now();
        let Some(since) = self.ranks[rank].waiting.filter(|_| self.ranks[rank].may_go_on()) else {
            return Ok(());
        };
        self.ranks[rank].waiting = None;
        let met = posted.clamp(since, now);
        let index = self.ranks[rank].index();
        self.ranks[rank].report.late += met - since;
        self.ranks[rank].report.exposed += now - met;
        self.record(rank, index, Activity::Late, since, met);
        self.record(rank, index, Activity::Exposed, met, now);
        self.go_on(rank)
    }

    fn record(&mut self, rank: usize, step: usize, activity: Activity, start: f64, end: f64) {
        if start < end {
            self.timeline.push(Event { rank, step, activity, start, end });
        }
    }

    /// Nothing more happens: every rank must be through.
    fn all_over(&self) -> Result<()> {
        let stuck = self.ranks.iter().position(|rank| rank.stand != Stand::Over);
        let Some(rank) = stuck else { return Ok(()) };
        let what = match self.messages.lonely() {
            Some((end, Side::Send, chunk)) => {
                format!("waits for ever; {chunk}, sent by rank {}, is not received", end.rank)
            }
            Some((end, Side::Receive, chunk)) => {
                format!("waits for ever; {chunk}, which rank {} expects, is not sent", end.rank)
            }
            None => "waits for ever: exchanges wait for each other".into(),
        };
        Err(Error::BrokenSchedule { rank, step: self.ranks[rank].index(), what })
    }
}
