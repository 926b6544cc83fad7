//! What a pass takes in worlds of any size, without a look at every rank.
//!
//! The clock's work grows with the square of the number of ranks, so it runs for few ranks only. A
//! large world is estimated from small ones along two lines:
//!
//! - **More units.** A unit is a node, or a group of ranks. With shards of equal length each further
//!   unit adds as many steps as the one before, so two numbers of units say what any number takes.
//! - **Longer units.** A unit of many ranks is shrunk to few, see [`super::shrink`]. What a pass takes
//!   grows evenly with the length of its units too.
//!
//! Where ranks exchange rows for heads, all ranks of a group do the same at the same time. One rank of
//! each group stands for its group.

use super::heads::{Volume, between_groups, held, volume};
use super::machine::{Link, Machine};
use super::method::{Method, predict};
use super::report::{Bytes, RankReport, Report};
use super::shrink;
use crate::error::Result;
use crate::layout::Layout;
use crate::problem::{Pass, Problem, Travels};
use crate::schedule::Family;

/// Most ranks that are simulated, if that is at least four units; twice as many in windows.
pub(super) const MOST: usize = 32;

/// Most ranks of a unit that is not shrunk.
pub(super) const LONGEST_UNIT: usize = 16;

/// Most ranks that are simulated where units are longer than that.
const MOST_IN_LONG_UNITS: usize = 4 * LONGEST_UNIT;

/// Most ranks that are ever simulated: in windows, with one unit more.
const MOST_SIMULATED: usize = 2 * MOST_IN_LONG_UNITS + LONGEST_UNIT;

/// What both passes take together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Seconds.
    pub seconds: f64,
    /// Seconds of them in which the rank that waits longest waits for messages.
    pub exposed: f64,
    /// Bytes that all ranks send.
    pub sent: Bytes,
    /// What travels in the backward pass, if anything does.
    pub backward: Option<Travels>,
    /// Worked out from smaller worlds.
    pub estimated: bool,
}

/// What one pass takes: the totals of a [`Report`], and one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Estimate {
    /// Which side travels, where one does.
    pub travels: Option<Travels>,
    /// Seconds until the last rank is through.
    pub seconds: f64,
    /// Seconds that the rank which waits longest waits for messages.
    pub exposed: f64,
    /// Seconds that all ranks compute.
    pub compute: f64,
    /// FLOPs of all ranks.
    pub flops: f64,
    /// What all ranks send.
    pub sent: Bytes,
    /// Most hops over links between nodes that any one rank starts.
    pub slow_hops: usize,
    /// The rank that computes longest.
    pub busiest: RankReport,
    /// Worked out from smaller worlds.
    pub estimated: bool,
}

/// What both passes of `problem` take together, by [`estimate`]. Without `backward`, the side travels
/// back that costs fewer bytes.
///
/// # Errors
/// As [`predict`] has them.
pub fn cost(
    problem: &Problem,
    method: Method,
    backward: Option<Travels>,
    machine: &Machine,
) -> Result<Cost> {
    let forward = estimate(problem, method, Pass::Forward, None, machine)?;
    let backward = estimate(problem, method, Pass::Backward, backward, machine)?;
    Ok(Cost {
        seconds: forward.seconds + backward.seconds,
        exposed: forward.exposed + backward.exposed,
        sent: Bytes {
            within: forward.sent.within + backward.sent.within,
            between: forward.sent.between + backward.sent.between,
        },
        backward: backward.travels,
        estimated: forward.estimated,
    })
}

/// What a pass of `problem` takes: by the clock for up to 32 ranks or four short units, for more by
/// the differences between smaller worlds of shards of the same length. Takes milliseconds, whatever
/// the number of ranks.
///
/// # Errors
/// As [`predict`] has them.
pub fn estimate(
    problem: &Problem,
    method: Method,
    pass: Pass,
    travels: Option<Travels>,
    machine: &Machine,
) -> Result<Estimate> {
    machine.validate()?;
    let world_size = problem.world_size;
    let asked = Asked { pass, travels, machine };
    match method {
        Method::Travel(family) => {
            family.validate(world_size)?;
            match unit(family, world_size, machine) {
                unit if unit > LONGEST_UNIT && world_size > MOST_IN_LONG_UNITS => {
                    shrink::estimate(problem, family, unit, &asked)
                }
                unit => over_units(problem, family, unit, &asked),
            }
        }
        Method::Heads { inner } if world_size > MOST => exchanging_heads(problem, inner, &asked),
        Method::Heads { .. } => asked.simulated(problem, method),
    }
}

/// What is asked of every world that is looked at.
#[derive(Clone, Copy)]
pub(super) struct Asked<'a> {
    pub pass: Pass,
    pub travels: Option<Travels>,
    pub machine: &'a Machine,
}

impl Asked<'_> {
    fn simulated(&self, problem: &Problem, method: Method) -> Result<Estimate> {
        debug_assert!(problem.world_size <= MOST_SIMULATED, "{} ranks", problem.world_size);
        predict(problem, method, self.pass, self.travels, self.machine, false).map(Estimate::of)
    }
}

/// Ranks that are looked at as one.
fn unit(family: Family, world_size: usize, machine: &Machine) -> usize {
    match family {
        Family::DoubleRing { inner } => inner,
        _ if machine.network.ranks_per_node < world_size => machine.network.ranks_per_node,
        _ => 1,
    }
}

/// Estimates a world of units of `unit` ranks from two worlds with fewer such units.
pub(super) fn over_units(
    problem: &Problem,
    family: Family,
    unit: usize,
    asked: &Asked<'_>,
) -> Result<Estimate> {
    let world_size = problem.world_size;
    let units = (MOST / unit).max(4);
    let most = units * unit;
    // Beyond what a window reaches, further ranks add nothing but what they send themselves.
    let reach = reach(problem).map(|reach| (2 * reach.div_ceil(unit) + 1) * unit);
    let reach = reach.unwrap_or(world_size).min(world_size);
    let settles = reach < world_size && reach <= 2 * most;
    let [small, large] = if settles { [reach, reach + unit] } else { [units / 2 * unit, most] };
    if world_size <= most.max(large) {
        return asked.simulated(problem, Method::Travel(family));
    }
    let simulated = |world_size: usize, travels: Option<Travels>| {
        let problem = Problem { world_size, ..problem.clone() };
        Asked { travels, ..*asked }.simulated(&problem, Method::Travel(family))
    };
    let many = simulated(large, asked.travels)?;
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

/// How many ranks on each side a rank has to do with; none without a window.
pub(super) fn reach(problem: &Problem) -> Option<usize> {
    let Problem { window, layout, q_len, .. } = *problem;
    let (left, right) = (window.left?, window.right?);
    let rows = match layout {
        Layout::Contiguous => q_len,
        Layout::Zigzag => q_len / 2,
        Layout::Striped => return None,
    };
    Some(left.max(right).div_ceil(rows.max(1)).min(problem.world_size))
}

/// A line through two worlds, up to a larger one. What is said of one rank or of the whole pass lies
/// on it; so do the totals of all ranks, each divided by a size of its world.
pub(super) struct Line {
    /// How far beyond the second world, in distances of the two.
    pub one: f64,
    /// The same for totals.
    pub all: f64,
    /// What totals are divided by in the three worlds.
    pub ranks: [f64; 3],
    /// What the bytes between nodes are divided by.
    pub crossing: [f64; 3],
}

impl Line {
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
    /// What the clock says.
    fn of(report: Report) -> Estimate {
        let longer = |a: &RankReport, b: &RankReport| a.compute.total_cmp(&b.compute);
        let (exposed, flops) = (report.exposed(), report.flops());
        Estimate {
            travels: report.travels,
            seconds: report.seconds,
            exposed,
            compute: report.ranks.iter().map(|rank| rank.compute).sum(),
            flops,
            sent: report.sent(),
            slow_hops: report.slow_hops(),
            busiest: report.ranks.into_iter().max_by(longer).unwrap_or_default(),
            estimated: false,
        }
    }
}

/// A ring of groups, before and after which the ranks of each group exchange what they have: every
/// rank of a group an equal part with every other one.
fn exchanging_heads(problem: &Problem, inner: usize, asked: &Asked<'_>) -> Result<Estimate> {
    let local = between_groups(problem, inner)?;
    let network = &asked.machine.network;
    let node = network.ranks_per_node.min(inner);
    let sharing = if network.shared { node } else { 1 };
    // One rank of each group stands for all of them, with its part of a shared link.
    let mut groups = asked.machine.clone();
    groups.network.ranks_per_node = (network.ranks_per_node / inner).max(1);
    groups.network.between.bandwidth /= sharing as f64;
    let ring = Method::Travel(Family::Ring);
    let mut all = estimate(&local, ring, asked.pass, asked.travels, &groups)?;
    all.estimated = true;
    all.travels = all.travels.filter(|_| local.world_size > 1);
    all.compute *= inner as f64;
    all.flops *= inner as f64;
    all.sent.within *= inner as u64;
    all.sent.between *= inner as u64;
    all.busiest.steps += 2;
    all.busiest.buffer_bytes += held(problem, inner, asked.pass);
    let Volume { there, back } = volume(problem, inner, asked.pass);
    let peers = [node - 1, inner - node].map(|peers| peers as u64);
    for each in [there, back].map(|bytes| bytes / inner as u64) {
        let seconds = |peers: u64, sharing: usize, Link { latency, bandwidth }: Link| {
            let bytes = (peers * each) as f64 * sharing as f64;
            if peers > 0 { latency + bytes / bandwidth } else { 0.0 }
        };
        let within = seconds(peers[0], 1, network.within);
        let waits = within.max(seconds(peers[1], sharing, network.between));
        all.seconds += waits;
        all.exposed += waits;
        all.slow_hops += peers[1] as usize;
        all.sent.within += peers[0] * each * problem.world_size as u64;
        all.sent.between += peers[1] * each * problem.world_size as u64;
        let busiest = &mut all.busiest;
        busiest.exposed += waits;
        busiest.end += waits;
        busiest.slow_hops += peers[1] as usize;
        busiest.sent.within += peers[0] * each;
        busiest.sent.between += peers[1] * each;
    }
    Ok(all)
}
