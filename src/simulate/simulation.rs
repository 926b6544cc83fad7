//! The simulation: all ranks follow their scripts at once, on one clock.

use super::clock::Clock;
use super::machine::Machine;
use super::messages::Messages;
use super::report::{Activity, Event, RankReport, Report};
use super::script::{End, Script, ScriptExchange, ScriptStep};
use super::wires::{Forecast, Wires};
use crate::error::{Error, Result};
use crate::problem::{Pass, Problem, Travels};
use crate::schedule::{Due, Schedule};

/// Times the schedules of all ranks for one pass of `problem` on `machine`.
///
/// # Errors
/// [`Error::InvalidProblem`] for a machine that the simulator can't calculate with;
/// [`Error::BrokenSchedule`] if the schedules are not one for each rank, or if a message has no
/// receiver or no sender.
pub fn simulate(problem: &Problem, schedules: &[Schedule], machine: &Machine) -> Result<Report> {
    machine.validate()?;
    for (rank, schedule) in schedules.iter().enumerate() {
        if schedule.rank != rank || schedule.world_size != schedules.len() {
            let what = format!("expected rank {rank} of {} here", schedules.len());
            return Err(Error::BrokenSchedule { rank: schedule.rank, step: 0, what });
        }
    }
    let script = |schedule: &Schedule| Script::of(problem, schedule, machine);
    let scripts: Vec<Script> = schedules.iter().map(script).collect();
    let (pass, travels) = (schedules.first())
        .map_or((Pass::Forward, Travels::Keys), |schedule| (schedule.pass, schedule.travels));
    run(pass, Some(travels), &scripts, machine, true)
}

/// Times the scripts of all ranks, rank by rank, on the machine that they were made for. The report
/// names the pass and the side that travels, and has a timeline if `has_timeline`.
///
/// # Errors
/// [`Error::BrokenSchedule`] if a message has no receiver or no sender.
pub fn run(
    pass: Pass,
    travels: Option<Travels>,
    scripts: &[Script<'_>],
    machine: &Machine,
    has_timeline: bool,
) -> Result<Report> {
    let mut simulation = Simulation {
        machine,
        has_timeline,
        clock: Clock::new(),
        wires: Wires::new(&machine.network, scripts.len()),
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

/// What the clock waits for.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Signal {
    /// A rank has computed half a step.
    Computed(usize),
    /// The first byte of a message arrives.
    Flows(usize),
    /// The last byte of a message arrives, if the message still has this version.
    Arrives { message: usize, version: u64 },
}

/// How far a rank has come.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// Before the step with this place in its script, or at the end of the script.
    Begin(usize),
    /// Within the step, before it folds travelling accumulators.
    Fold(usize),
    /// Through.
    Over,
}

/// An exchange that is not complete.
struct InFlight {
    exchange: u64,
    due: Due,
    left: usize,
}

struct Rank<'a> {
    script: &'a Script<'a>,
    progress: Progress,
    /// The number of exchanges that the rank has started.
    exchanges: u64,
    in_flight: Vec<InFlight>,
    /// Since when the rank waits, if it waits.
    waiting: Option<f64>,
    report: RankReport,
}

struct Simulation<'a> {
    machine: &'a Machine,
    has_timeline: bool,
    clock: Clock<Signal>,
    wires: Wires<'a>,
    messages: Messages,
    ranks: Vec<Rank<'a>>,
    timeline: Vec<Event>,
}

impl<'a> Rank<'a> {
    fn new(script: &'a Script<'a>) -> Rank<'a> {
        Rank {
            script,
            progress: Progress::Begin(0),
            exchanges: 0,
            in_flight: vec![],
            waiting: None,
            report: script.report.clone(),
        }
    }

    fn step(&self) -> Option<&'a ScriptStep> {
        match self.progress {
            Progress::Begin(at) | Progress::Fold(at) => self.script.steps.get(at),
            Progress::Over => None,
        }
    }

    /// Index of the rank's step; of its last step once the rank is through.
    fn index(&self) -> usize {
        self.step().or(self.script.steps.last()).map_or(0, |step| step.index)
    }

    /// Whether all messages have come that the rank needs to go on.
    fn may_go_on(&self) -> bool {
        let now = match (self.progress, self.step()) {
            (Progress::Fold(_), Some(step)) => Due::Fold(step.index),
            (Progress::Begin(_), Some(step)) => Due::Begin(step.index),
            // At the end nothing may be in flight.
            _ => return self.in_flight.is_empty(),
        };
        !self.in_flight.iter().any(|exchange| exchange.due.reached_by(now))
    }
}

impl Simulation<'_> {
    fn run(&mut self) -> Result<()> {
        (0..self.ranks.len()).try_for_each(|rank| self.advance(rank))?;
        loop {
            for Forecast { message, version, time } in self.wires.settle(self.clock.now()) {
                self.clock.at(time, Signal::Arrives { message, version });
            }
            if !self.clock.pass() {
                return self.check_over();
            }
            while let Some(signal) = self.clock.next_now() {
                self.handle(signal)?;
            }
        }
    }

    fn handle(&mut self, signal: Signal) -> Result<()> {
        match signal {
            Signal::Computed(rank) => return self.advance(rank),
            Signal::Flows(number) => {
                let Some(message) = self.messages.get(number) else { return Ok(()) };
                let Some([from, to]) = message.ends() else { return Ok(()) };
                let ranks = [from.rank, to.rank];
                self.wires.join(number, ranks, message.bytes, self.clock.now());
            }
            Signal::Arrives { message, version } => {
                if self.wires.is_current(message, version) {
                    return self.arrive(message);
                }
            }
        }
        Ok(())
    }

    /// Lets a rank go on as far as it comes without time passing.
    fn advance(&mut self, rank: usize) -> Result<()> {
        while self.ranks[rank].progress != Progress::Over {
            let now = self.clock.now();
            if !self.ranks[rank].may_go_on() {
                self.ranks[rank].waiting = Some(now);
                return Ok(());
            }
            let seconds = self.begin_half(rank)?;
            if seconds > 0.0 {
                self.ranks[rank].report.compute += seconds;
                self.clock.at(now + seconds, Signal::Computed(rank));
                return Ok(());
            }
        }
        Ok(())
    }

    /// Begins the next half of a step on a rank. Returns how long the rank computes.
    fn begin_half(&mut self, rank: usize) -> Result<f64> {
        let (now, progress) = (self.clock.now(), self.ranks[rank].progress);
        let (seconds, index) = match (progress, self.ranks[rank].step()) {
            (Progress::Begin(at), Some(step)) => {
                for exchange in &step.exchanges {
                    self.post(rank, step.index, exchange)?;
                }
                self.ranks[rank].progress = Progress::Fold(at);
                (step.work.before, step.index)
            }
            (Progress::Fold(at), Some(step)) => {
                self.ranks[rank].progress = Progress::Begin(at + 1);
                (step.work.after, step.index)
            }
            _ => {
                self.ranks[rank].progress = Progress::Over;
                self.ranks[rank].report.end = now;
                (0.0, 0)
            }
        };
        self.record(rank, index, Activity::Compute, now, now + seconds);
        Ok(seconds)
    }

    /// Posts a rank's ends of the messages of an exchange.
    fn post(&mut self, rank: usize, step: usize, exchange: &ScriptExchange) -> Result<()> {
        let now = self.clock.now();
        let number = self.ranks[rank].exchanges;
        self.ranks[rank].exchanges += 1;
        let ScriptExchange { due, messages } = exchange;
        let in_flight = InFlight { exchange: number, due: *due, left: messages.len() };
        self.ranks[rank].in_flight.push(in_flight);
        let mut posted = Vec::with_capacity(messages.len());
        for message in messages {
            let found = self.messages.post(rank, step, number, message, now);
            posted.push(found.map_err(|expected| {
                let (label, peer) = (message.label, message.peer);
                let what = format!("posts {label} where rank {peer} has {expected}");
                Error::BrokenSchedule { rank, step, what }
            })?);
        }
        self.start(&posted);
        Ok(())
    }

    /// Starts each of the messages that can start.
    fn start(&mut self, messages: &[usize]) {
        let now = self.clock.now();
        for &number in messages {
            if let Some(message) = self.messages.try_start(number, now) {
                let latency = self.machine.network.link(message.class).latency;
                self.clock.at(now + latency, Signal::Flows(number));
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
            let in_flight = &mut self.ranks[end.rank].in_flight;
            if let Some(at) = in_flight.iter().position(|flight| flight.exchange == end.exchange) {
                in_flight[at].left -= 1;
                if in_flight[at].left == 0 {
                    in_flight.remove(at);
                }
            }
            self.wake(end.rank, message.posted)?;
        }
        Ok(())
    }

    /// Resumes a waiting rank once its messages are complete. Both ends had posted the last of them
    /// at `posted`.
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
        self.advance(rank)
    }

    fn record(&mut self, rank: usize, step: usize, activity: Activity, start: f64, end: f64) {
        if self.has_timeline && start < end {
            self.timeline.push(Event { rank, step, activity, start, end });
        }
    }

    /// Checks, when nothing more happens, that every rank is through.
    fn check_over(&self) -> Result<()> {
        let stuck = self.ranks.iter().position(|rank| rank.progress != Progress::Over);
        let Some(rank) = stuck else { return Ok(()) };
        let what = match self.messages.unmatched() {
            Some((end, End::Send, chunk)) => {
                format!("waits for ever; {chunk}, sent by rank {}, is not received", end.rank)
            }
            Some((end, End::Receive, chunk)) => {
                format!("waits for ever; {chunk}, which rank {} expects, is not sent", end.rank)
            }
            None => "waits for ever: exchanges wait for each other".into(),
        };
        Err(Error::BrokenSchedule { rank, step: self.ranks[rank].index(), what })
    }
}
