//! Estimates of worlds whose node groups have many ranks, from worlds whose node groups have few.
//!
//! A node group of i ranks is shrunk to i·λ ranks with shards of the same length. A pass over it
//! has λ times as many steps, each as long as before, and some time that does not depend on i. So a
//! pass takes a + b·λ seconds, and two values of λ tell what λ = 1 takes. With λ, other numbers
//! change:
//!
//! - A **window** has λ times as many positions, so that it spans the same part of the world.
//! - The **slow links of a double ring** have λ times the latency and 1/λ of the bandwidth. A chunk
//!   has a turn's time to cross one, and turns are that much shorter. In a window accumulators
//!   cross them at every step, so they stay as they are.
//! - **Slow links that all ranks of a node share**, and over which all of them send at once, have λ
//!   times the bandwidth, because λ times as many ranks share them.
//!
//! Where a window ends within a node group, longer node groups take no more time. Such a group is
//! first cut to the reach of the window.

use super::line::{LONGEST_GROUP, Line, Setting, over_node_groups, reach};
use super::machine::Machine;
use super::report::Estimate;
use crate::error::Result;
use crate::mask::Window;
use crate::problem::{Pass, Problem};
use crate::schedule::{Crossing, Family};

/// Ranks of the two shrunk node groups.
const GROUPS: [usize; 2] = [LONGEST_GROUP / 2, LONGEST_GROUP];

/// Estimates a pass whose node groups of `group` ranks are too long to simulate.
pub(super) fn estimate(
    problem: &Problem,
    family: Family,
    group: usize,
    setting: &Setting<'_>,
) -> Result<Estimate> {
    // A rank with all ranks that it exchanges with, on both sides.
    let wanted = reach(problem).map(|reach| (2 * reach + 1).max(LONGEST_GROUP));
    if let Some(wanted) = wanted.filter(|wanted| *wanted < group) {
        return cut(problem, family, [group, wanted], setting);
    }
    if group <= LONGEST_GROUP {
        return over_node_groups(problem, family, group, setting);
    }
    let [less, more] = GROUPS.map(|ranks| Shrunk::new(problem, family, [group, ranks], setting));
    let many = more.estimate(setting)?;
    let few = less.estimate(&Setting { travels: many.travels, ..*setting })?;
    let further = (group - GROUPS[1]) as f64 / (GROUPS[1] - GROUPS[0]) as f64;
    let ranks = [&less.problem, &more.problem, problem].map(|problem| problem.world_size as f64);
    // One rank of each node sends to the next node, however many ranks a node has.
    let one_rank = family.crossing(problem) == Crossing::OneRank;
    let crossing = if one_rank { [1.0; 3] } else { ranks };
    Ok(Line { one: further, all: further, ranks, crossing }.through(&few, &many))
}

/// Estimates with node groups that have only the ranks that a window wants. Each rank sends as much
/// as before, but as many bytes cross from group to group in all.
fn cut(
    problem: &Problem,
    family: Family,
    groups: [usize; 2],
    setting: &Setting<'_>,
) -> Result<Estimate> {
    let [from, to] = groups;
    let world_size = problem.world_size.div_ceil(from) * to;
    let mut machine = setting.machine.clone();
    machine.network.ranks_per_node = shortened(machine.network.ranks_per_node, groups);
    let shorter = Problem { world_size, ..problem.clone() };
    let setting = Setting { machine: &machine, ..*setting };
    let mut found = estimate(&shorter, family.with_inner(to), to, &setting)?;
    let more = problem.world_size as f64 / world_size as f64;
    let sent = (found.sent.within + found.sent.between) as f64 * more;
    found.sent.within = (sent as u64).saturating_sub(found.sent.between);
    found.compute *= more;
    found.flops *= more;
    found.estimated = true;
    Ok(found)
}

/// Returns the ranks of a node where node groups of `from` ranks get `to`.
fn shortened(ranks: usize, [from, to]: [usize; 2]) -> usize {
    ((ranks as f64 * to as f64 / from as f64).round() as usize).max(1)
}

/// A world with shorter node groups.
struct Shrunk {
    problem: Problem,
    family: Family,
    group: usize,
    machine: Machine,
}

impl Shrunk {
    fn new(problem: &Problem, family: Family, groups: [usize; 2], setting: &Setting<'_>) -> Shrunk {
        let [from, to] = groups;
        let scale = to as f64 / from as f64;
        let scaled = |size: usize| (size as f64 * scale).round() as usize;
        let shorter = |limit: i64| (limit as f64 * scale).round() as i64;
        let Window { left, right } = problem.window;
        let mut machine = setting.machine.clone();
        let network = &mut machine.network;
        network.ranks_per_node = shortened(network.ranks_per_node, groups);
        let has_turns = family.crossing(problem) == Crossing::AllRanksInTurns;
        if has_turns && !crosses_every_step(problem, setting.pass) {
            network.between.latency *= scale;
            // On a shared link, fewer ranks make up for shorter turns.
            if !network.shared {
                network.between.bandwidth /= scale;
            }
        } else if network.shared && family.crossing(problem) != Crossing::OneRank {
            network.between.bandwidth *= scale;
        }
        let problem = Problem {
            window: Window { left: left.map(shorter), right: right.map(shorter) },
            world_size: scaled(problem.world_size),
            ..problem.clone()
        };
        Shrunk { problem, family: family.with_inner(to), group: to, machine }
    }

    fn estimate(&self, setting: &Setting<'_>) -> Result<Estimate> {
        let setting = Setting { machine: &self.machine, ..*setting };
        over_node_groups(&self.problem, self.family, self.group, &setting)
    }
}

/// Whether accumulators cross the slow links of a double ring at every step. Elsewhere only chunks
/// cross them, once a turn.
fn crosses_every_step(problem: &Problem, pass: Pass) -> bool {
    let Window { left, right } = problem.window;
    let positions = (problem.world_size * problem.q_len.max(problem.kv_len)) as i64;
    let ends = |limit: Option<i64>| limit.is_some_and(|limit| limit < positions);
    pass == Pass::Backward && ends(left) && ends(right)
}
