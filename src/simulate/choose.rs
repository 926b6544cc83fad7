//! Which schedule takes least time.

use super::estimate::{Cost, cost};
use super::machine::Machine;
use super::method::Method;
use crate::error::Result;
use crate::problem::{Problem, Travels};
use crate::schedule::Family;

/// A schedule that takes at most this much longer than the fastest is as good, because predictions
/// are no better.
const TIE: f64 = 1.03;

/// A schedule to choose from.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// The name that `attention` takes. The ring over two axes is a double ring.
    pub name: &'static str,
    /// What forward and backward pass take together, or why the schedule is out of the question.
    pub cost: std::result::Result<Cost, String>,
}

/// A choice, and the candidates it was made from.
#[derive(Debug, Clone)]
pub struct Choice {
    /// Index of the chosen candidate.
    pub chosen: usize,
    /// The reason, in one sentence.
    pub reason: String,
    /// All candidates.
    pub candidates: Vec<Candidate>,
}

/// Predicts the schedules of `problem` and chooses the one that takes least time, forward and
/// backward pass together. Schedules within 3% count as equal, and of equals it takes the ring.
///
/// `inner` is the length of the inner axis, if there are two. `refused` returns why a schedule is
/// not possible for other reasons.
///
/// # Errors
/// For a problem or a machine that the simulator can't calculate with.
pub fn choose(
    problem: &Problem,
    inner: Option<usize>,
    backward: Option<Travels>,
    machine: &Machine,
    refused: impl Fn(&str) -> Option<String>,
) -> Result<Choice> {
    // The ring is always possible.
    let family = inner.map_or(Family::Ring, |inner| Family::DoubleRing { inner });
    let ring = cost(problem, Method::Travel(family), backward, machine)?;
    let other = |(name, method): (&'static str, Method)| {
        let cost = match refused(name).or_else(|| pointless(problem, method)) {
            Some(reason) => Err(reason),
            None => cost(problem, method, backward, machine).map_err(|error| error.to_string()),
        };
        Candidate { name, cost }
    };
    let mut candidates = vec![Candidate { name: "ring", cost: Ok(ring) }];
    candidates.extend(others(problem, inner).into_iter().map(other));
    let seconds = candidates.iter().map(|candidate| Some(candidate.cost.as_ref().ok()?.seconds));
    let known = seconds.enumerate().filter_map(|(index, seconds)| Some((index, seconds?)));
    let best = known.min_by(|a, b| a.1.total_cmp(&b.1));
    let (best, least) = best.unwrap_or((0, ring.seconds));
    let ms = |seconds: f64| format!("{:.3} ms", 1e3 * seconds);
    let (name, ring, least_ms) = (candidates[best].name, ring.seconds, ms(least));
    let (chosen, reason) = if best == 0 {
        (0, format!("ring takes {least_ms}, the least of what is possible"))
    } else if ring <= TIE * least {
        (0, format!("ring takes {}, and {name}, which takes {least_ms}, saves no 3%", ms(ring)))
    } else {
        (best, format!("{name} takes {least_ms}, ring {}", ms(ring)))
    };
    Ok(Choice { chosen, reason, candidates })
}

/// All candidates except the ring.
fn others(problem: &Problem, inner: Option<usize>) -> Vec<(&'static str, Method)> {
    let axes = if inner.is_some() { 2 } else { 1 };
    let families = Family::ALL.into_iter().filter(|family| family.spec().auto_axes.contains(&axes));
    let families = families.map(|family| (family.name(), Method::Travel(family)));
    match inner {
        None => {
            families.chain([("ulysses", Method::Heads { inner: problem.world_size })]).collect()
        }
        Some(inner) => [("hybrid", Method::Heads { inner })].into_iter().chain(families).collect(),
    }
}

/// Returns why a method is the ring under another name, if it is.
fn pointless(problem: &Problem, method: Method) -> Option<String> {
    let Method::Travel(family) = method else { return None };
    (family.spec().same_as_ring)(problem).map(str::to_owned)
}
