//! The side that travels in the backward pass of a call, where the caller leaves it.

use burst_attention::simulate::{Method, estimate, library_computes};
use burst_attention::{Order, Pass, Problem};
use burst_attention_kernels::backend::Kernels;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::answer::Result;
use crate::machine::MachineRequest;
use crate::options::Options;

/// A call, as Python describes it before it makes one, and the machine that computes it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Request {
    #[serde(flatten)]
    problem: Problem,
    /// The call's attributes, which hold the window and the features of the problem.
    options: Options,
    /// The order of sums, and the kernels that may compute.
    backward_order: Order,
    kernels: Kernels,
    machine: MachineRequest,
}

impl Request {
    /// Returns `{"travels": …}`: the side with which the backward pass takes less time where cuDNN
    /// computes gradients, or else the side that costs fewer bytes.
    pub(crate) fn answer(&self) -> Result<Value> {
        let problem = self.options.of(&self.problem)?;
        let mut machine = self.machine.resolved(problem.world_size)?.machine;
        let asked = (self.kernels, self.backward_order);
        let computes = |target| library_computes(&problem, target, asked);
        machine.kernels.library = machine.kernels.library.filter(|target| computes(*target));
        let method = Method::Travel(self.options.family);
        let found = estimate(&problem, method, Pass::Backward, None, &machine)?;
        Ok(json!({ "travels": found.travels }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json;

    fn ask(edit: impl FnOnce(&mut Value)) -> Value {
        let mut request = json!({
            "ask": "travels", "world_size": 8, "batch": 1, "q_len": 8192, "kv_len": 8192,
            "heads": 32, "kv_heads": 32, "head_dim": 128, "value_dim": 128, "dtype": "bfloat16",
            "layout": "zigzag", "softmax_scale": 1.0,
            "options": {
                "window_left": i64::MIN, "window_right": 0, "logits_soft_cap": 0.0,
                "dropout_rate": 0.0, "feature_operands": "", "schedule": "ring", "inner_size": 0,
            },
            "backward_order": "any", "kernels": "cudnn", "machine": { "name": "h200-400g-cudnn" },
        });
        edit(&mut request);
        json::answer(request.to_string().as_bytes())["travels"].clone()
    }

    #[test]
    fn keys_travel_where_cudnn_then_computes_in_less_time() {
        assert_eq!(ask(|_| ()), "keys");
        assert_eq!(ask(|request| request["layout"] = "contiguous".into()), "keys");
        assert_eq!(ask(|request| request["backward_order"] = "fixed".into()), "keys");
        // Fewer bytes decide where messages take longer than computing.
        let far = json!({ "name": "h200-400g-cudnn", "ranks_per_node": 1 });
        assert_eq!(ask(|request| request["machine"] = far.clone()), "queries");
        // This library's own kernels keep their share of rates that are given.
        let fast = json!({ "name": "h200-400g-cudnn", "tflops": [1e9] });
        assert_eq!(ask(|request| request["machine"] = fast), "queries");
        let long = |request: &mut Value| {
            request["machine"] = far;
            (request["q_len"], request["kv_len"]) = (65536.into(), 65536.into());
        };
        assert_eq!(ask(long), "keys");
    }

    #[test]
    fn bytes_decide_where_cudnn_computes_no_gradient() {
        let own = json!({ "name": "h200-400g" });
        assert_eq!(ask(|request| request["machine"] = own), "queries");
        assert_eq!(ask(|request| request["dtype"] = "float32".into()), "queries");
        let segments = json!("query_segment_ids,key_segment_ids");
        assert_eq!(ask(|request| request["options"]["feature_operands"] = segments), "queries");
        assert_eq!(ask(|request| request["kv_heads"] = 8.into()), "keys");
        assert_eq!(ask(|request| request["kernels"] = "tile".into()), "queries");
    }
}
