//! The side that travels in the backward pass, where the caller leaves it.

use burst_attention_kernels::backend::Kernels;
use burst_attention_kernels::instances::Target;

use super::machine::Machine;
use crate::cuda::served::{Operations, Served};
use crate::error::Result;
use crate::problem::{Order, Pass, Problem, Travels};
use crate::schedule::ring;

/// Ranks that say what a ring of any length has cuDNN compute: all have tiles of the same kinds.
const FEW: usize = 8;

/// Returns what `predict` predicts of a pass. It gets the side that travels, or `None` for the side
/// that costs fewer bytes.
///
/// Where the caller leaves the side, and cuDNN computes gradients if keys travel, that is the side
/// with which the pass takes fewer seconds. Queries may cost fewer bytes, but only this library's
/// slower kernels compute then.
pub(super) fn with_side<R>(
    (problem, pass, travels): (&Problem, Pass, Option<Travels>),
    machine: &Machine,
    seconds: fn(&R) -> f64,
    predict: impl Fn(Option<Travels>) -> Result<R>,
) -> Result<R> {
    let target = machine.kernels.library;
    let asked = (Kernels::Cudnn, Order::Any);
    let has_library = || target.is_some_and(|target| library_computes(problem, target, asked));
    if travels.is_some() || pass == Pass::Forward || !has_library() {
        return predict(travels);
    }
    let [keys, queries] = [Travels::Keys, Travels::Queries].map(|side| predict(Some(side)));
    let (keys, queries) = (keys?, queries?);
    Ok(if seconds(&queries) < seconds(&keys) { queries } else { keys })
}

/// Whether cuDNN computes gradients of a ring in which keys travel, on a target among these kernels,
/// if sums have this order.
pub fn library_computes(problem: &Problem, target: Target, asked: (Kernels, Order)) -> bool {
    let few = Problem { world_size: problem.world_size.min(FEW), ..problem.clone() };
    ring(&few, Pass::Backward, Travels::Keys).iter().any(|schedule| {
        let Some(served) = Served::of(&few, schedule, target, asked) else { return false };
        let operations = Operations::of(&few, schedule, true);
        let steps = schedule.steps.iter();
        let mut tiles = steps.flat_map(|step| (0..step.tiles.len()).map(move |n| (step, n)));
        tiles.any(|(step, index)| served.has(&operations, step, index))
    })
}
