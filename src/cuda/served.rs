//! The operations of a schedule's tiles without memory, for predictions: questions to backends and
//! to the costs of kernels.

use burst_attention_kernels::backend::{BACKENDS, Backends, Kernels, cudnn};
use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{
    Features, Forward, KeyGrads, QueryGrads, Rectangle, Rows, Statistics,
};

use super::final_writes::FinalWrites;
use super::gradients::GradientOperations;
use super::tiles::{element_of, features_of, rectangle};
use crate::problem::{Order, Pass, Problem};
use crate::schedule::{Payload, Schedule, Step, Tile};

/// The way in which one operation computes all gradients of a tile, unless a call says more.
const IN_ANY_ORDER: GradientOperations = GradientOperations::One { fixed_order: false };

/// The operations of the tiles of a schedule.
#[derive(Debug)]
pub(crate) struct Operations<'a> {
    problem: &'a Problem,
    features: Features,
    element: Element,
    final_writes: FinalWrites,
}

impl<'a> Operations<'a> {
    /// Returns the operations of a schedule. With `fused`, one operation computes all gradients of
    /// a tile. Types that no kernel computes count as bfloat16.
    pub(crate) fn of(problem: &'a Problem, schedule: &Schedule, fused: bool) -> Operations<'a> {
        Operations {
            problem,
            features: features_of(problem),
            element: element_of(problem.dtype).unwrap_or(Element::Bf16),
            final_writes: match schedule.pass {
                // Tiles of the forward pass know when they are last.
                Pass::Forward => FinalWrites::default(),
                Pass::Backward => FinalWrites::of(problem, schedule, fused),
            },
        }
    }

    fn rectangle(&self, tile: &Tile) -> Rectangle {
        let (queries, keys) = (&tile.queries.rows, &tile.keys.rows);
        rectangle(self.problem, self.element, queries, keys, tile.band)
    }

    /// Returns the forward pass of a tile.
    pub(crate) fn forward(&self, tile: &Tile) -> Forward {
        let (first, last) = (tile.query_state.first, tile.query_state.last);
        Forward { first, last, ..Forward::unplaced(self.rectangle(tile), self.features) }
    }

    /// Returns the operation that computes all gradients of the tile at `index` of a step.
    pub(crate) fn all_gradients(&self, step: &Step, index: usize) -> KeyGrads {
        let tile = &step.tiles[index];
        KeyGrads {
            first: tile.key_state.first,
            last: self.final_writes.is_tile(Payload::KeyGrads, step.index, index),
            ..IN_ANY_ORDER.all_gradients(self.rectangle(tile), self.features, true)
        }
    }

    /// Returns the gradients of keys of a tile.
    pub(crate) fn key_grads(&self, step: &Step, index: usize) -> KeyGrads {
        KeyGrads { dq_acc: None, ..self.all_gradients(step, index) }
    }

    /// Returns the gradient of queries of a tile.
    pub(crate) fn query_grads(&self, step: &Step, index: usize) -> QueryGrads {
        let (tile, at) = (&step.tiles[index], Rows::default());
        let statistics = Statistics::default();
        QueryGrads {
            rectangle: self.rectangle(tile),
            features: self.features,
            q: at,
            k: at,
            v: at,
            dout: at,
            lse_log2: statistics,
            delta: statistics,
            dq_acc: Some(at),
            dq: Some(at),
            dslopes: None,
            first: tile.query_state.first,
            last: self.final_writes.is_tile(Payload::QueryGrads, step.index, index),
        }
    }
}

/// What cuDNN computes of a schedule.
#[derive(Debug)]
pub(crate) struct Served {
    pass: Pass,
    backends: Backends,
    operations: GradientOperations,
}

impl Served {
    /// Returns what cuDNN computes on `target` among these kernels, if sums have this order and lse
    /// has no gradient. `None` if it computes none of the schedule.
    pub(crate) fn of(
        problem: &Problem,
        schedule: &Schedule,
        target: Target,
        (kernels, order): (Kernels, Order),
    ) -> Option<Served> {
        let backends = Backends { all: BACKENDS, target, kernels, cudnn: None, scratch: 0 };
        let pass = schedule.pass;
        element_of(problem.dtype).ok()?;
        let (operations, _) =
            GradientOperations::of(problem, schedule, backends, order, false).ok()?;
        let may_serve = pass == Pass::Forward || operations.are_fused();
        may_serve.then_some(Served { pass, backends, operations })
    }

    /// Whether cuDNN computes the tile at `index` of a step.
    pub(crate) fn has(&self, operations: &Operations<'_>, step: &Step, index: usize) -> bool {
        let operation = match self.pass {
            Pass::Forward => operations.forward(&step.tiles[index]).into(),
            Pass::Backward => {
                let fixed_order = self.operations.have_fixed_order();
                KeyGrads { fixed_order, ..operations.all_gradients(step, index) }.into()
            }
        };
        self.backends.choose(&operation).0.is_some_and(|backend| backend.name == cudnn::NAME)
    }
}
