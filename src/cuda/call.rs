//! A call: the computation that all ranks of a ring share.

use std::sync::Arc;

use burst_attention_kernels::backend::Kernels;

use super::gradients::GradientOperations;
use super::workspace::WorkspaceLayout;
use crate::problem::{Order, Pass, Problem, Travels};
use crate::schedule::{self, Family, Schedule};

/// One pass of attention over a ring.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// The problem.
    pub problem: Problem,
    /// The family of schedules, which must fit the number of ranks.
    pub family: Family,
    /// The pass.
    pub pass: Pass,
    /// The side whose chunks travel. `None` stands for keys in the forward pass, and for the side
    /// that costs fewer bytes in the backward pass.
    pub travels: Option<Travels>,
    /// The order of sums in the backward pass.
    pub backward_order: Order,
    /// Whether lse has a gradient, in the backward pass.
    pub lse_gradient: bool,
    /// The kernels that may compute it.
    pub kernels: Kernels,
}

impl Call {
    /// Returns a call in which keys travel forward, sums have a fixed order, lse has a gradient, and
    /// this library's own kernels compute.
    pub fn new(problem: Problem, family: Family, pass: Pass) -> Call {
        let (travels, backward_order, kernels) = (None, Order::Fixed, Kernels::Tile);
        Call { problem, family, pass, travels, backward_order, lse_gradient: true, kernels }
    }

    /// Returns the schedules of all ranks.
    pub(super) fn schedules(&self) -> Arc<Vec<Schedule>> {
        // Travelling queries would bring home softmax states in float32, and a kernel would have to
        // combine them.
        let keys = (self.pass == Pass::Forward).then_some(Travels::Keys);
        schedule::cached(&self.problem, self.family, self.pass, self.travels.or(keys))
            .expect("the family fits the number of ranks")
    }

    /// Returns the bytes of workspace that are enough on every rank and every GPU.
    pub fn workspace_bytes(&self) -> u64 {
        let schedules = self.schedules();
        WorkspaceLayout::bytes(self, &schedules, GradientOperations::may_fuse(self, &schedules))
    }
}
