//! The workspace of a call on GPUs, which Python declares as one more result of the call.

use burst_attention::cuda::call::Call;
use burst_attention::{Dtype, Order, Pass, Problem, Travels};
use burst_attention_kernels::backend::Kernels;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::answer::{Result, travels};
use crate::options::Options;

/// A call, as Python describes it before it makes one.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Request {
    #[serde(flatten)]
    problem: Problem,
    pass: Pass,
    /// The call's attributes, which hold the window and the features of the problem.
    options: Options,
    #[serde(deserialize_with = "travels")]
    backward: Option<Travels>,
    backward_order: Order,
    kernels: Kernels,
}

impl Request {
    /// Returns `{"bytes": …}`.
    pub(crate) fn answer(&self) -> Result<Value> {
        let Request { options: Options { family, .. }, pass, .. } = *self;
        let problem = self.options.of(&self.problem)?;
        if problem.dtype == Dtype::F32 {
            return Err("dtype must be bfloat16 or float16, got float32".into());
        }
        let (travels, backward_order) = match pass {
            Pass::Forward => (None, Order::Fixed),
            Pass::Backward => (self.backward, self.backward_order),
        };
        let kernels = self.kernels;
        // With a gradient of lse, cuDNN serves fewer tiles, and no call needs more.
        let lse_gradient = false;
        let call = Call {
            travels,
            backward_order,
            kernels,
            lse_gradient,
            ..Call::new(problem, family, pass)
        };
        Ok(json!({ "bytes": call.workspace_bytes() }))
    }
}
