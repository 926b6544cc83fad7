//! Estimates of large worlds, on a line through two small worlds.

use super::machine::Machine;
use super::method::{Method, predict};
use super::report::{Bytes, Estimate, RankReport};
use crate::error::Result;
use crate::layout::Layout;
use crate::problem::{Pass, Problem, Travels};
use crate::schedule::Family;

/// Most ranks of a simulation that has at least four node groups; in windows, twice as many.
pub(super) const MOST: usize = 32;

/// Most ranks of a node group that is not shrunk.
pub(super) const LONGEST_GROUP: usize = 16;

/// Most ranks of a simulation with longer node groups.
pub(super) const MOST_IN_LONG_GROUPS: usize = 4 * LONGEST_GROUP;

/// Most ranks of any simulation: in windows, with one node group more.
const MOST_SIMULATED: usize = 2 * MOST_IN_LONG_GROUPS + LONGEST_GROUP;

/// What all worlds of an estimate have in common.
#[derive(Clone, Copy)]
pub(super) struct Setting<'a> {
    pub pass: Pass,
    pub travels: Option<Travels>,
    pub machine: &'a Machine,
}

impl Setting<'_> {
    pub fn simulated(&self, problem: &Problem, method: Method) -> Result<Estimate> {
        debug_assert!(problem.world_size <= MOST_SIMULATED, "{} ranks", problem.world_size);
        predict(problem, method, self.pass, self.travels, self.machine, false).map(Estimate::of)
    }
}

/// Estimates a world of node groups of `group` ranks from two worlds with fewer such groups.
pub(super) fn over_node_groups(
    problem: &Problem,
    family: Family,
    group: usize,
    setting: &Setting<'_>,
) -> Result<Estimate> {
    let (world_size, method) = (problem.world_size, Method::Travel(family));
    let groups = (MOST / group).max(4);
    let most = groups * group;
    // Beyond the reach of a window, further ranks add only what they send themselves.
    let reach = reach(problem).map(|reach| (2 * reach.div_ceil(group) + 1) * group);
    let reach = reach.unwrap_or(world_size).min(world_size);
    let settles = reach < world_size && reach <= 2 * most;
    let [small, large] = if settles { [reach, reach + group] } else { [groups / 2 * group, most] };
    if world_size <= most.max(large) {
        return setting.simulated(problem, method);
    }
    let simulated = |world_size: usize, travels: Option<Travels>| {
        let problem = Problem { world_size, ..problem.clone() };
        Setting { travels, ..*setting }.simulated(&problem, method)
    };
    let many = simulated(large, setting.travels)?;
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
