//! Lets all ranks walk their schedules at once.

use super::clock::Clock;
use super::cost::{Costs, Halves};
use super::machine::{Class, Machine};
use super::messages::{From, Messages, Side};
use super::report::{Activity, Event, RankReport, Report};
use super::script::{Errand, Group, Script};
use super::wires::{Forecast, Wires};
use crate::error::{Error, Result};
use crate::problem::{Pass, Problem, Travels};
use crate::schedule::{Due, Schedule};

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
    let script = |schedule: &Schedule| Script::of(&costs, schedule, &machine.network);
    let scripts: Vec<Script> = schedules.iter().map(script).collect();
    let (pass, travels) = (schedules.first())
        .map_or((Pass::Forward, Travels::Keys), |schedule| (schedule.pass, schedule.travels));
    run(pass, Some(travels), &scripts, machine, true)
}

/// Lets all ranks do what their scripts say, on a machine that is known to be valid; `tells` whether the report has a timeline.
pub(super) fn run(
    pass: Pass,
    travels: Option<Travels>,
    scripts: &[Script<'_>],
    machine: &Machine,
    tells: bool,
) -> Result<Report> {
    let mut simulation = Simulation {
        machine,
        tells,
        clock: Clock::new(),
        wires: Wires::new(machine, scripts.len()),
        messages: Messages::new(scripts.len()),
        ranks: scripts.iter().map(Rank::new).collect(),
        timeline: Vec::new(),
    };
    simulation.run()?;
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
    script: &'a Script<'a>,
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
    /// Whether there is a timeline.
    tells: bool,
    clock: Clock<Happening>,
    wires: Wires,
    messages: Messages,
    ranks: Vec<Rank<'a>>,
    timeline: Vec<Event>,
}

impl<'a> Rank<'a> {
    fn new(script: &'a Script<'a>) -> Rank<'a> {
        Rank {
            script,
            stand: Stand::Begin(0),
            exchanges: 0,
            flights: vec![],
            waiting: None,
            rest: 0.0,
            report: script.report.clone(),
        }
    }

    fn step(&self) -> Option<&'a Errand> {
        match self.stand {
            Stand::Begin(at) | Stand::Fold(at) => self.script.steps.get(at),
            Stand::Over => None,
        }
    }

    /// Index of the step that it is at, of the last one after that.
    fn index(&self) -> usize {
        self.step().or(self.script.steps.last()).map_or(0, |step| step.index)
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

impl Simulation<'_> {
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
                for group in self.ranks[rank].script.groups(step) {
                    self.post(rank, step.index, group)?;
                }
                let Halves { before, after } = step.work;
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

    fn post(&mut self, rank: usize, step: usize, group: &Group) -> Result<()> {
        let now = self.clock.now();
        let exchange = self.ranks[rank].exchanges;
        self.ranks[rank].exchanges += 1;
        let parcels = self.ranks[rank].script.parcels(group);
        self.ranks[rank].flights.push(Flight { exchange, due: group.due, left: parcels.len() });
        let from = From { rank, step, exchange };
        let mut posted = Vec::with_capacity(parcels.len());
        for parcel in parcels {
            posted.push(self.messages.post(&from, parcel, now).map_err(|expected| {
                let (what, peer) = (parcel.what, parcel.peer);
                let what = format!("posts {what} where rank {peer} has {expected}");
                Error::BrokenSchedule { rank, step, what }
            })?);
        }
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
        if self.tells && start < end {
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
