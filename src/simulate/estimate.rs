//! What a pass takes in worlds of any size, without a simulation of every rank.
//!
//! The work of the clock grows with the square of the number of ranks, so it runs for few ranks
//! only. Small worlds give the estimate of a large one, along two lines:
//!
//! - **More units.** A unit is a node, or a group of ranks. With shards of equal length, each
//!   further unit adds as many steps as the one before. So two numbers of units tell what any
//!   number takes.
//! - **Longer units.** [`super::shrink`] shrinks a unit of many ranks to few. What a pass takes
//!   grows evenly with the length of its units, too.
//!
//! Where ranks exchange rows for heads, all ranks of a group do the same at the same time, so one
//! rank of each group stands for its group.

use super::heads::{between_groups, buffer_bytes, volume};
use super::machine::{Link, Machine};
use super::method::{Method, predict};
use super::report::{Bytes, RankReport, Report};
use super::shrink;
use crate::error::Result;
use crate::layout::Layout;
use crate::problem::{Pass, Problem, Travels};
use crate::schedule::Family;

/// Most ranks of a simulation that has at least four units; in windows, twice as many.
pub(super) const MOST: usize = 32;

/// Most ranks of a unit that is not shrunk.
pub(super) const LONGEST_UNIT: usize = 16;

/// Most ranks of a simulation with longer units.
const MOST_IN_LONG_UNITS: usize = 4 * LONGEST_UNIT;

/// Most ranks of any simulation: in windows, with one unit more.
const MOST_SIMULATED: usize = 2 * MOST_IN_LONG_UNITS + LONGEST_UNIT;

/// What both passes take together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Seconds.
    pub seconds: f64,
    /// Seconds in which the rank that waits longest waits for messages.
    pub exposed: f64,
    /// Bytes that all ranks send.
    pub sent: Bytes,
    /// The side that travels in the backward pass, if one does.
    pub backward: Option<Travels>,
    /// Whether smaller worlds gave the numbers.
    pub estimated: bool,
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

/// Returns what both passes of `problem` take together, by [`estimate`]. Without `backward`, the
/// side travels in the backward pass that costs fewer bytes.
///
/// # Errors
/// The errors of [`predict`].
pub fn cost(
    problem: &Problem,
    method: Method,
    backward: Option<Travels>,
    machine: &Machine,
) -> Result<Cost> {
    let forward = estimate(problem, method, Pass::Forward, None, machine)?;
    let backward = estimate(problem, method, Pass::Backward, backward, machine)?;
    let mut sent = forward.sent;
    sent += backward.sent;
    Ok(Cost {
        seconds: forward.seconds + backward.seconds,
        exposed: forward.exposed + backward.exposed,
        sent,
        backward: backward.travels,
        estimated: forward.estimated,
    })
}

/// Returns what a pass of `problem` takes: a simulation for up to 32 ranks or four short units, and
/// for more the line through smaller worlds with shards of the same length. It takes milliseconds,
/// whatever the number of ranks.
///
/// # Errors
/// The errors of [`predict`].
pub fn estimate(
    problem: &Problem,
    method: Method,
    pass: Pass,
    travels: Option<Travels>,
    machine: &Machine,
) -> Result<Estimate> {
    machine.validate()?;
    let world_size = problem.world_size;
    let run = Run { pass, travels, machine };
    match method {
        Method::Travel(family) => {
            family.validate(world_size)?;
            let node = machine.network.ranks_per_node;
            let unit = family.inner().unwrap_or(if node < world_size { node } else { 1 });
            match unit > LONGEST_UNIT && world_size > MOST_IN_LONG_UNITS {
                true => shrink::estimate(problem, family, unit, &run),
                false => over_units(problem, family, unit, &run),
            }
        }
        Method::Heads { inner } if world_size > MOST => exchanging_heads(problem, inner, &run),
        Method::Heads { .. } => run.simulated(problem, method),
    }
}

/// What all worlds of an estimate have in common.
#[derive(Clone, Copy)]
pub(super) struct Run<'a> {
    pub pass: Pass,
    pub travels: Option<Travels>,
    pub machine: &'a Machine,
}

impl Run<'_> {
    fn simulated(&self, problem: &Problem, method: Method) -> Result<Estimate> {
        debug_assert!(problem.world_size <= MOST_SIMULATED, "{} ranks", problem.world_size);
        predict(problem, method, self.pass, self.travels, self.machine, false).map(Estimate::of)
    }
}

/// Estimates a world of units of `unit` ranks from two worlds with fewer such units.
pub(super) fn over_units(
    problem: &Problem,
    family: Family,
    unit: usize,
    run: &Run<'_>,
) -> Result<Estimate> {
    let (world_size, method) = (problem.world_size, Method::Travel(family));
    let units = (MOST / unit).max(4);
    let most = units * unit;
    // Beyond the reach of a window, further ranks add only what they send themselves.
    let reach = reach(problem).map(|reach| (2 * reach.div_ceil(unit) + 1) * unit);
    let reach = reach.unwrap_or(world_size).min(world_size);
    let settles = reach < world_size && reach <= 2 * most;
    let [small, large] = if settles { [reach, reach + unit] } else { [units / 2 * unit, most] };
    if world_size <= most.max(large) {
        return run.simulated(problem, method);
    }
    let simulated = |world_size: usize, travels: Option<Travels>| {
        let problem = Problem { world_size, ..problem.clone() };
        Run { travels, ..*run }.simulated(&problem, method)
    };
    let many = simulated(large, run.travels)?;
    let few = simulated(small, many.travels)?;
    let further = |to: usize| (to - large) as f64 / (large - small) as f64;
    let line = if settles {
        Line { one: 0.0, all: further(world_size), ranks: [1.0; 3], crossing: [1.0; 3] }
    } else {
        let ranks = [small, large, world_size].map(|ranks| ranks as f64);
        Line { one: further(reach), all: further(reach), ranks, crossing: ranks }
    };
    Ok(line.through(&few, &many))
}

/// Returns how many ranks on each side a rank exchanges with; `None` without a window.
pub(super) fn reach(problem: &Problem) -> Option<usize> {
    let Problem { window, layout, q_len, .. } = *problem;
    let (left, right) = (window.left?, window.right?);
    let rows = match layout {
        Layout::Contiguous => q_len,
        Layout::Zigzag => q_len / 2,
        Layout::Striped => return None,
    };
    let furthest = left.unsigned_abs().max(right.unsigned_abs()) as usize;
    Some(furthest.div_ceil(rows.max(1)).min(problem.world_size))
}

/// A line through two worlds, up to a larger one. The numbers of one rank and of the whole pass lie
/// on it. The totals of all ranks do if each is divided by a size of its world.
pub(super) struct Line {
    /// How far the larger world is beyond the second, in distances of the two, for one rank.
    pub one: f64,
    /// How far it is for totals.
    pub all: f64,
    /// What divides totals in the three worlds.
    pub ranks: [f64; 3],
    /// What divides the bytes between nodes.
    pub crossing: [f64; 3],
}

impl Line {
    /// The larger world, on the line through two worlds.
    pub fn through(&self, few: &Estimate, many: &Estimate) -> Estimate {
        let line = |few: f64, many: f64, further: f64| (many + (many - few) * further).max(0.0);
        let one = |of: fn(&Estimate) -> f64| line(of(few), of(many), self.one);
        let all = |of: fn(&Estimate) -> f64, by: [f64; 3]| {
            line(of(few) / by[0], of(many) / by[1], self.all) * by[2]
        };
        Estimate {
            travels: many.travels,
            seconds: one(|found| found.seconds),
            exposed: one(|found| found.exposed),
            compute: all(|found| found.compute, self.ranks),
            flops: all(|found| found.flops, self.ranks),
            sent: Bytes {
                within: all(|found| found.sent.within as f64, self.ranks) as u64,
                between: all(|found| found.sent.between as f64, self.crossing) as u64,
            },
            slow_hops: one(|found| found.slow_hops as f64).round() as usize,
            busiest: RankReport {
                steps: one(|found| found.busiest.steps as f64).round() as usize,
                tiles: one(|found| found.busiest.tiles as f64).round() as usize,
                flops: one(|found| found.busiest.flops),
                compute: one(|found| found.busiest.compute),
                exposed: one(|found| found.busiest.exposed),
                late: one(|found| found.busiest.late),
                end: one(|found| found.busiest.end),
                sent: Bytes {
                    within: one(|found| found.busiest.sent.within as f64) as u64,
                    between: one(|found| found.busiest.sent.between as f64) as u64,
                },
                slow_hops: one(|found| found.busiest.slow_hops as f64).round() as usize,
                buffer_bytes: one(|found| found.busiest.buffer_bytes as f64) as u64,
            },
            estimated: true,
        }
    }
}

impl Estimate {
    /// The estimate that a simulation gives.
    fn of(report: Report) -> Estimate {
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

/// Estimates a ring of groups, before and after which each rank of a group exchanges an equal part
/// of its rows with every other rank of the group.
fn exchanging_heads(problem: &Problem, inner: usize, run: &Run<'_>) -> Result<Estimate> {
    let local = between_groups(problem, inner)?;
    let network = &run.machine.network;
    let node = network.ranks_per_node.min(inner);
    let sharing = if network.shared { node } else { 1 };
    // One rank of each group stands for its group, with its part of a shared link.
    let mut groups = run.machine.clone();
    groups.network.ranks_per_node = (network.ranks_per_node / inner).max(1);
    groups.network.between.bandwidth /= sharing as f64;
    let ring = Method::Travel(Family::Ring);
    let mut all = estimate(&local, ring, run.pass, run.travels, &groups)?;
    all.estimated = true;
    all.travels = all.travels.filter(|_| local.world_size > 1);
    all.compute *= inner as f64;
    all.flops *= inner as f64;
    all.sent = all.sent.times(inner);
    all.busiest.steps += 2;
    all.busiest.buffer_bytes += buffer_bytes(problem, inner, run.pass);
    let peers = [node - 1, inner - node].map(|peers| peers as u64);
    for each in volume(problem, inner, run.pass).map(|bytes| bytes / inner as u64) {
        let seconds = |peers: u64, sharing: usize, Link { latency, bandwidth }: Link| {
            let bytes = (peers * each) as f64 * sharing as f64;
            if peers > 0 { latency + bytes / bandwidth } else { 0.0 }
        };
        let within = seconds(peers[0], 1, network.within);
        let waits = within.max(seconds(peers[1], sharing, network.between));
        let sent = Bytes { within: peers[0] * each, between: peers[1] * each };
        all.seconds += waits;
        all.exposed += waits;
        all.slow_hops += peers[1] as usize;
        all.sent += sent.times(problem.world_size);
        all.busiest.exposed += waits;
        all.busiest.end += waits;
        all.busiest.slow_hops += peers[1] as usize;
        all.busiest.sent += sent;
    }
    Ok(all)
}
