//! The backends that compute the operations of a call on GPUs of a kind, which need not be present.

use burst_attention::cuda::call::Call;
use burst_attention::cuda::executor::choices;
use burst_attention::{Family, Order, Pass, Problem, Travels};
use burst_attention_kernels::backend::{Choice, Kernels, Refusal};
use burst_attention_kernels::cost::Cost;
use burst_attention_kernels::instances::Target;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::answer::{Result, travels};

/// Most ranks whose operations are listed: 256 ranks take 2 s, and the time grows with their square.
const MOST_RANKS: usize = 256;

/// A problem, how its ranks divide the work, and the kind of GPU, such as `sm_90`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Request {
    #[serde(flatten)]
    problem: Problem,
    /// A family of schedules.
    schedule: String,
    ranks_per_node: usize,
    #[serde(deserialize_with = "travels")]
    backward: Option<Travels>,
    backward_order: Order,
    kernels: Kernels,
    target: String,
}

impl Request {
    /// Returns `{"passes": [{"pass", "operations": [{"operation", "count", "backend", "cost",
    /// "refusals": [{"backend", "reason", "cost"}]}]}]}` of all ranks together. A cost is null or
    /// the mean of the operations: `{"seconds", "source"}`.
    pub(crate) fn answer(&self) -> Result<Value> {
        let target = Target::of_name(&self.target)?;
        self.problem.validate()?;
        let ranks = self.problem.world_size;
        if ranks > MOST_RANKS {
            let remedy = "take fewer ranks with as many tokens each, which make the same choices";
            return Err(
                format!("world_size must be at most {MOST_RANKS}, got {ranks}: {remedy}").into()
            );
        }
        let family = Family::named(&self.schedule, self.ranks_per_node)?;
        family.validate(self.problem.world_size)?;
        let of_pass = |pass| -> Result<Value> {
            let call = Call {
                travels: self.backward.filter(|_| pass == Pass::Backward),
                backward_order: self.backward_order,
                lse_gradient: false,
                kernels: self.kernels,
                ..Call::new(self.problem.clone(), family, pass)
            };
            let operations = choices(&call, target)?;
            let operations = operations.iter().map(|(choice, count)| json_of(&choice, count));
            Ok(json!({ "pass": pass, "operations": operations.collect::<Vec<_>>() }))
        };
        Ok(json!({ "passes": [of_pass(Pass::Forward)?, of_pass(Pass::Backward)?] }))
    }
}

fn json_of(Choice { operation, backend, cost, refusals }: &Choice, count: usize) -> Value {
    let of_cost = |cost: Cost| json!({ "seconds": cost.seconds, "source": cost.source.name() });
    let refusal = |(backend, refusal): &(&str, Refusal)| {
        let (reason, cost) = (refusal.reason(), refusal.cost().map(of_cost));
        json!({ "backend": backend, "reason": reason, "cost": cost })
    };
    let refusals: Vec<_> = refusals.iter().map(refusal).collect();
    json!({
        "operation": operation,
        "count": count,
        "backend": backend,
        "cost": cost.map(of_cost),
        "refusals": refusals,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json;

    fn ask(edit: impl FnOnce(&mut Value)) -> Value {
        let mut request = json!({
            "ask": "backends", "schedule": "ring", "ranks_per_node": 1, "world_size": 4,
            "batch": 1, "q_len": 512, "kv_len": 512, "heads": 8, "kv_heads": 2, "head_dim": 128,
            "value_dim": 128, "dtype": "bfloat16", "layout": "zigzag", "window": { "right": 0 },
            "softmax_scale": 1.0, "backward": "keys", "backward_order": "fixed", "kernels": "tile",
            "target": "sm_90",
        });
        edit(&mut request);
        json::answer(request.to_string().as_bytes())
    }

    #[test]
    fn every_operation_of_both_passes_has_its_backend() {
        let answer = ask(|_| ());
        let of_pass = |pass: usize| -> Vec<(String, u64)> {
            let operations = answer["passes"][pass]["operations"].as_array().unwrap().iter();
            let one = |operation: &Value| {
                assert_eq!(operation["backend"], "tile", "{operation}");
                assert_eq!(operation["refusals"], json!([]));
                let name = operation["operation"].as_str().unwrap().to_owned();
                (name, operation["count"].as_u64().unwrap())
            };
            operations.map(one).collect()
        };
        let [(name, tiles)] = &of_pass(0)[..] else { panic!("{answer}") };
        assert_eq!(name, "forward");
        assert!(*tiles >= 16, "each of four ranks meets the keys of each: {tiles}");
        let names: Vec<_> = of_pass(1).into_iter().map(|(name, _)| name).collect();
        assert!(names.contains(&"key_grads".into()) && names.contains(&"query_grads".into()));
        let fused = ask(|request| {
            request["backward_order"] = "any".into();
            (request["head_dim"], request["value_dim"]) = (64.into(), 64.into());
            (request["q_len"], request["kv_len"]) = (8192.into(), 8192.into());
            (request["heads"], request["kv_heads"]) = (32.into(), 8.into());
        });
        assert!(!fused["passes"][1].to_string().contains("query_grads"), "{fused}");
    }

    #[test]
    fn a_request_that_no_gpu_serves_is_refused() {
        let error = |name: &str, value: Value| {
            ask(|request| request[name] = value)["error"].as_str().unwrap().to_owned()
        };
        assert!(error("dtype", "float32".into()).contains("cast query, key and value"));
        assert!(error("target", "sm_75".into()).contains("sm_80"));
        assert!(error("schedule", "maypole".into()).contains("ring"));
        assert!(error("head_dim", 0.into()).contains("head_dim"));
        assert!(error("world_size", 257.into()).contains("at most 256, got 257"));
    }
}
