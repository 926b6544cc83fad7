//! Methods to divide attention among ranks, and what they take.

use super::heads;
use super::machine::Machine;
use super::report::Report;
use super::script::Script;
use super::simulation::run;
use super::travels::with_side;
use crate::error::Result;
use crate::problem::{Pass, Problem, Travels};
use crate::schedule::{Family, for_each_rank};

/// How ranks divide the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// Chunks of one side travel.
    Travel(Family),
    /// Groups of `inner` neighbouring ranks exchange rows for heads. Afterwards each rank has all
    /// rows of its group, for its part of the heads. Between groups chunks travel on rings, one
    /// ring for each number within a group. With one group (Ulysses) nothing travels; with several
    /// this is the hybrid. Nothing overlaps with the exchange of heads.
    Heads {
        /// Ranks of a group; divides the number of ranks and of query heads.
        inner: usize,
    },
}

/// Times one pass of `problem` on `machine`. Without `travels`, the side travels that costs fewer
/// bytes, or in the backward pass that takes less time where cuDNN computes gradients. The report
/// has a timeline if `has_timeline`.
///
/// # Errors
/// [`crate::Error::InvalidProblem`] if the method does not fit the ranks or the heads, or for a
/// machine that the simulator can't calculate with.
pub fn predict(
    problem: &Problem,
    method: Method,
    pass: Pass,
    travels: Option<Travels>,
    machine: &Machine,
    has_timeline: bool,
) -> Result<Report> {
    machine.validate()?;
    let seconds = |report: &Report| report.seconds;
    with_side((problem, pass, travels), machine, seconds, |travels| {
        let (travels, scripts) = match method {
            Method::Travel(family) => {
                let mut scripts = Vec::with_capacity(problem.world_size);
                let travels = for_each_rank(problem, family, pass, travels, |schedule| {
                    scripts.push(Script::of(problem, &schedule, machine));
                })?;
                (Some(travels), scripts)
            }
            Method::Heads { inner } => heads::scripts(problem, inner, pass, travels, machine)?,
        };
        run(pass, travels, &scripts, machine, has_timeline)
    })
}
