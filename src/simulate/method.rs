//! Ways to divide attention among ranks, and what they take.

use super::cost::Costs;
use super::heads;
use super::machine::Machine;
use super::report::Report;
use super::script::Script;
use super::walk::run;
use crate::error::Result;
use crate::problem::{Pass, Problem, Travels};
use crate::schedule::{Family, each};

/// How ranks divide the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// Chunks of one side travel.
    Travel(Family),
    /// Groups of `inner` neighbouring ranks exchange rows for heads: afterwards each has all rows of
    /// its group for its part of the heads. Between groups chunks travel on rings, one for each
    /// number within a group. With one group (Ulysses) nothing travels; with several this is the
    /// hybrid of both. Nothing of the exchange overlaps with anything.
    Heads {
        /// Ranks of a group; divides the number of ranks and that of query heads.
        inner: usize,
    },
}

/// Times one pass of `problem` on `machine`. Without `travels`, the side travels that costs fewer
/// bytes; the report has a timeline if `tells`.
///
/// # Errors
/// [`crate::Error::InvalidProblem`] where the method does not fit the ranks or the heads, or for a
/// machine that can't be calculated with.
pub fn predict(
    problem: &Problem,
    method: Method,
    pass: Pass,
    travels: Option<Travels>,
    machine: &Machine,
    tells: bool,
) -> Result<Report> {
    machine.validate()?;
    match method {
        Method::Travel(family) => {
            let costs = Costs { problem, kernels: &machine.kernels };
            let mut scripts = Vec::with_capacity(problem.world_size);
            let travels = each(problem, family, pass, travels, |schedule| {
                scripts.push(Script::of(&costs, &schedule, &machine.network));
            })?;
            run(pass, Some(travels), &scripts, machine, tells)
        }
        Method::Heads { inner } => heads::predict(problem, inner, pass, travels, machine, tells),
    }
}
