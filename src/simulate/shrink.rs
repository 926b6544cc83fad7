//! Worlds whose units have many ranks, by worlds whose units have few.
//!
//! A unit of i ranks is shrunk to i·λ ranks with shards of the same length. A pass over it has λ times
//! as many steps, each as long as before, and what does not depend on i stays. So the seconds of a pass
//! are a + b·λ, and two values of λ say what λ = 1 takes:
//!
//! ```text
//! window                 · λ     in positions, so that it spans the same part of the world
//! slow links, of double  latency · λ, bandwidth / λ: a chunk has a turn's time to cross one, and turns
//! rings                  are as much shorter. Sums of a window cross them at every step; then the
//!                        links stay as they are
//! slow links, shared     bandwidth · λ where all ranks of a node send over one at once: so many fewer
//!                        ranks share it
//! ```
//!
//! Where a window ends within a unit, longer units take no more time. Such a unit is cut to the reach
//! of the window first.

use super::choose::helps_balance;
use super::estimate::{Asked, Estimate, LONGEST_UNIT, Line, over_units, reach};
use super::machine::Machine;
use crate::error::Result;
use crate::mask::Window;
use crate::problem::{Pass, Problem};
use crate::schedule::Family;

/// Ranks of the units that are looked at instead.
const UNITS: [usize; 2] = [LONGEST_UNIT / 2, LONGEST_UNIT];

/// What a pass takes whose units of `unit` ranks are too long to be simulated.
pub(super) fn estimate(
    problem: &Problem,
    family: Family,
    unit: usize,
    asked: &Asked<'_>,
) -> Result<Estimate> {
    // A rank with all that it has to do with, on both sides.
    let wanted = reach(problem).map(|reach| (2 * reach + 1).max(LONGEST_UNIT));
    if let Some(wanted) = wanted.filter(|wanted| *wanted < unit) {
        return cut(problem, family, [unit, wanted], asked);
    }
    if unit <= LONGEST_UNIT {
        return over_units(problem, family, unit, asked);
    }
    let [less, more] = UNITS.map(|ranks| Shrunk::new(problem, family, [unit, ranks], asked));
    let many = more.estimate(asked)?;
    let few = less.estimate(&Asked { travels: many.travels, ..*asked })?;
    let further = (unit - UNITS[1]) as f64 / (UNITS[1] - UNITS[0]) as f64;
    let ranks = [&less.problem, &more.problem, problem].map(|problem| problem.world_size as f64);
    // In a ring one rank of each node sends to the next node, however many it has.
    let crossing = if family == Family::Ring { [1.0; 3] } else { ranks };
    Ok(Line { one: further, all: further, ranks, crossing }.through(&few, &many))
}

/// With as many units that have no more ranks than a window wants. Each rank sends as much as before,
/// but what crosses from unit to unit is the same in all.
fn cut(
    problem: &Problem,
    family: Family,
    [from, to]: [usize; 2],
    asked: &Asked<'_>,
) -> Result<Estimate> {
    let world_size = problem.world_size.div_ceil(from) * to;
    let mut machine = asked.machine.clone();
    machine.network.ranks_per_node = shortened(machine.network.ranks_per_node, [from, to]);
    let shorter = Problem { world_size, ..problem.clone() };
    let asked = Asked { machine: &machine, ..*asked };
    let mut found = estimate(&shorter, with_inner(family, to), to, &asked)?;
    let more = problem.world_size as f64 / world_size as f64;
    let sent = (found.sent.within + found.sent.between) as f64 * more;
    found.sent.within = (sent as u64).saturating_sub(found.sent.between);
    found.compute *= more;
    found.flops *= more;
    found.estimated = true;
    Ok(found)
}

fn with_inner(family: Family, ranks: usize) -> Family {
    match family {
        Family::DoubleRing { .. } => Family::DoubleRing { inner: ranks },
        flat => flat,
    }
}

/// The ranks of a node where units of `from` ranks get `to`.
fn shortened(ranks: usize, [from, to]: [usize; 2]) -> usize {
    ((ranks as f64 * to as f64 / from as f64).round() as usize).max(1)
}

/// A world with shorter units.
struct Shrunk {
    problem: Problem,
    family: Family,
    unit: usize,
    machine: Machine,
}

impl Shrunk {
    fn new(problem: &Problem, family: Family, units: [usize; 2], asked: &Asked<'_>) -> Shrunk {
        let [from, to] = units;
        let scale = to as f64 / from as f64;
        let scaled = |size: usize| (size as f64 * scale).round() as usize;
        let limit = |limit: Option<usize>| limit.map(scaled);
        let Window { left, right } = problem.window;
        let mut machine = asked.machine.clone();
        let network = &mut machine.network;
        network.ranks_per_node = shortened(network.ranks_per_node, units);
        let between = &mut network.between;
        match family {
            // All ranks of a node send over its link at once.
            Family::DoubleRing { .. } if network.shared && !steadily(problem, asked.pass) => {
                between.latency *= scale;
            }
            Family::DoubleRing { .. } if !steadily(problem, asked.pass) => {
                between.latency *= scale;
                between.bandwidth /= scale;
            }
            Family::Ring => {}
            // It is the ring where it helps nobody.
            Family::Balanced if !helps_balance(problem) => {}
            _ if network.shared => between.bandwidth *= scale,
            _ => {}
        }
        let problem = Problem {
            window: Window { left: limit(left), right: limit(right) },
            world_size: scaled(problem.world_size),
            ..problem.clone()
        };
        Shrunk { problem, family: with_inner(family, to), unit: to, machine }
    }

    fn estimate(&self, asked: &Asked<'_>) -> Result<Estimate> {
        let asked = Asked { machine: &self.machine, ..*asked };
        over_units(&self.problem, self.family, self.unit, &asked)
    }
}

/// Whether slow links of a double ring carry sums at every step, not only chunks once a turn.
fn steadily(problem: &Problem, pass: Pass) -> bool {
    let Window { left, right } = problem.window;
    let positions = problem.world_size * problem.q_len.max(problem.kv_len);
    let ends = |limit: Option<usize>| limit.is_some_and(|limit| limit < positions);
    pass == Pass::Backward && ends(left) && ends(right)
}
