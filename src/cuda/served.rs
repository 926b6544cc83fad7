//! What cuDNN computes of a schedule, for predictions: the choice among backends without memory.

use burst_attention_kernels::backend::{BACKENDS, Backends, Kernels, cudnn};
use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{Features, Forward, Rows};

use super::tiles::{all_gradients, can_fuse, element_of, features_of, rectangle};
use crate::problem::{Order, Pass, Problem};
use crate::schedule::{Schedule, Tile};

/// The tiles of a schedule that cuDNN may compute.
#[derive(Debug)]
pub(crate) struct ServedTiles<'a> {
    problem: &'a Problem,
    pass: Pass,
    element: Element,
    features: Features,
    backends: Backends,
}

impl<'a> ServedTiles<'a> {
    /// Returns the tiles that cuDNN computes on `target` if sums may have any order and lse has no
    /// gradient. `None` if it computes none of the schedule.
    pub(crate) fn of(
        problem: &'a Problem,
        schedule: &Schedule,
        target: Target,
    ) -> Option<ServedTiles<'a>> {
        let backends = Backends { all: BACKENDS, target, kernels: Kernels::Cudnn, scratch: 0 };
        let element = element_of(problem.dtype).ok()?;
        let pass = schedule.pass;
        let gradients = || can_fuse(problem, schedule, backends, Order::Any, false);
        let may_serve = pass == Pass::Forward || gradients().ok()?;
        let features = features_of(problem);
        may_serve.then_some(ServedTiles { problem, pass, element, features, backends })
    }

    /// Whether cuDNN computes a tile of the schedule.
    pub(crate) fn has(&self, tile: &Tile) -> bool {
        let ServedTiles { problem, element, features, .. } = *self;
        let (queries, keys) = (&tile.queries.rows, &tile.keys.rows);
        let rectangle = rectangle(problem, element, queries, keys, tile.band);
        let at = Rows::default();
        let operation = match self.pass {
            Pass::Forward => Forward {
                rectangle,
                features,
                q: at,
                k: at,
                v: at,
                acc: Some(at),
                row_max: None,
                row_sum: None,
                o: Some(at),
                lse: Some(at),
                first: true,
                last: false,
            }
            .into(),
            Pass::Backward => all_gradients(problem, rectangle, Order::Any, true).into(),
        };
        self.backends.choose(&operation).0.is_some_and(|backend| backend.name == cudnn::NAME)
    }
}
