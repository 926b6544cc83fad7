//! Which schedule takes least time.

use super::estimate::{Cost, cost};
use super::machine::Machine;
use super::method::Method;
use crate::error::Result;
use crate::layout::Layout;
use crate::problem::{Problem, Travels};
use crate::schedule::Family;

/// What takes no more than this much longer than the fastest is as good: predictions are no better.
const TIE: f64 = 1.03;

/// A schedule that may be chosen.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// As `attention` calls it; the ring over two axes is a double ring.
    pub name: &'static str,
    /// What forward and backward pass take together, or why it is out of the question.
    pub cost: std::result::Result<Cost, String>,
}

/// What was chosen, and from what.
#[derive(Debug, Clone)]
pub struct Choice {
    /// Index of the candidate.
    pub chosen: usize,
    /// Why, in one sentence.
    pub reason: String,
    /// All that were looked at.
    pub candidates: Vec<Candidate>,
}

/// Predicts all schedules of `problem` and chooses the one that takes least time, forward and
/// backward pass together; of equals, to 3%, the ring. `inner` is the length of the inner axis, if
/// there are two; `refused` says why a schedule can't be had for other reasons.
///
/// # Errors
/// For a problem or a machine that can't be calculated with.
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
        let predicted = || cost(problem, method, backward, machine);
        let cost = match refused(name).or_else(|| pointless(problem, method)) {
            Some(reason) => Err(reason),
            None => predicted().map_err(|error| error.to_string()),
        };
        Candidate { name, cost }
    };
    let mut candidates = vec![Candidate { name: "ring", cost: Ok(ring) }];
    candidates.extend(others(problem, inner).into_iter().map(other));
    let (mut best, mut least, ring) = (0, ring.seconds, ring.seconds);
    for (index, candidate) in candidates.iter().enumerate() {
        if let Some(cost) = candidate.cost.as_ref().ok().filter(|cost| cost.seconds < least) {
            (best, least) = (index, cost.seconds);
        }
    }
    let ms = |seconds: f64| format!("{:.3} ms", 1e3 * seconds);
    let name = candidates[best].name;
    let (chosen, reason) = if best == 0 {
        (0, format!("ring takes {}, the least of what is possible", ms(ring)))
    } else if ring <= TIE * least {
        let least = ms(least);
        (0, format!("ring takes {}, and {name}, which takes {least}, saves no 3%", ms(ring)))
    } else {
        (best, format!("{name} takes {}, ring {}", ms(least), ms(ring)))
    };
    Ok(Choice { chosen, reason, candidates })
}

/// All but the ring.
fn others(problem: &Problem, inner: Option<usize>) -> Vec<(&'static str, Method)> {
    let all_gather = ("all_gather", Method::Travel(Family::AllGather));
    match inner {
        None => vec![
            ("balanced", Method::Travel(Family::Balanced)),
            all_gather,
            ("ulysses", Method::Heads { inner: problem.world_size }),
        ],
        Some(inner) => vec![("hybrid", Method::Heads { inner }), all_gather],
    }
}

/// Why a method is the ring under another name.
fn pointless(problem: &Problem, method: Method) -> Option<String> {
    let is_balanced = method == Method::Travel(Family::Balanced);
    (is_balanced && !helps_balance(problem))
        .then(|| "it is for causal masks in the contiguous layout, elsewhere the ring".to_owned())
}

/// Whether later ranks have more to do than earlier ones, so that these can help.
pub(super) fn helps_balance(problem: &Problem) -> bool {
    problem.layout == Layout::Contiguous && problem.window.right == Some(0)
}
