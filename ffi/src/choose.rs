//! The choice of a schedule for a problem on a machine.

use std::collections::HashMap;

use burst_attention::simulate::{Candidate, Choice, choose};
use burst_attention::{Problem, Travels};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::answer::{Result, travels};
use crate::machine::MachineRequest;
use crate::simulate::side_name;

/// A problem and the machine that computes it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Request {
    #[serde(flatten)]
    problem: Problem,
    /// Length of the inner axis, if there are two.
    inner: Option<usize>,
    #[serde(deserialize_with = "travels")]
    backward: Option<Travels>,
    machine: MachineRequest,
    /// Names of schedules that the caller can't use, with the reason of each.
    refused: HashMap<String, String>,
}

impl Request {
    /// Returns `{"schedule": …, "reason": …, "candidates": […], "machine": …}`: the schedule that
    /// takes the least time, why, and the times of all schedules.
    pub(crate) fn answer(&self) -> Result<Value> {
        let Request { problem, .. } = self;
        problem.validate()?;
        let resolved = self.machine.resolved(problem.world_size)?;
        let refused = |name: &str| self.refused.get(name).cloned();
        let Choice { chosen, reason, candidates } =
            choose(problem, self.inner, self.backward, &resolved.machine, refused)?;
        Ok(json!({
            "schedule": candidates[chosen].name,
            "reason": reason,
            "candidates": candidates.iter().map(candidate_json).collect::<Vec<_>>(),
            "machine": resolved.json(problem.world_size),
        }))
    }
}

fn candidate_json(Candidate { name, cost }: &Candidate) -> Value {
    match cost {
        Ok(cost) => json!({
            "schedule": name,
            "seconds": cost.seconds,
            "exposed": cost.exposed,
            "sent": cost.sent,
            "backward": side_name(cost.backward),
            "estimated": cost.estimated,
        }),
        Err(reason) => json!({ "schedule": name, "impossible": reason }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json;

    fn ask(edit: impl FnOnce(&mut Value)) -> Value {
        let mut request = json!({
            "ask": "choose", "world_size": 8, "inner": null, "batch": 1, "q_len": 8192,
            "kv_len": 8192, "heads": 32, "kv_heads": 8, "head_dim": 128, "value_dim": 128,
            "dtype": "bfloat16", "layout": "contiguous", "window": { "right": 0 },
            "softmax_scale": 1.0, "backward": "keys", "machine": {}, "refused": {},
        });
        edit(&mut request);
        json::answer(request.to_string().as_bytes())
    }

    #[test]
    fn answers_with_all_candidates_and_what_each_takes_or_lacks() {
        let answer = ask(|request| request["refused"] = json!({ "all_gather": "not today" }));
        let names: Vec<_> = (answer["candidates"].as_array().unwrap().iter())
            .map(|candidate| candidate["schedule"].as_str().unwrap())
            .collect();
        assert_eq!(names, ["ring", "balanced", "all_gather", "ulysses"], "{answer}");
        assert_eq!(answer["candidates"][2]["impossible"], "not today");
        assert_eq!(answer["candidates"][0]["backward"], "keys");
        assert_eq!(answer["candidates"][3]["backward"], "heads");
        assert!(answer["candidates"][0]["seconds"].as_f64().unwrap() > 0.0);
        assert_eq!(answer["machine"]["name"], "h200-nvlink");
        let words = answer["reason"].as_str().unwrap();
        assert!(words.starts_with(answer["schedule"].as_str().unwrap()), "{words}");
    }

    #[test]
    fn answers_what_is_wrong_with_a_request() {
        let error = |name: &str, value: Value| {
            let answer = ask(|request| request[name] = value);
            answer["error"].as_str().unwrap_or_else(|| panic!("{name}: {answer}")).to_owned()
        };
        assert!(error("world_size", 0.into()).contains("at least 1"));
        assert!(error("inner", 3.into()).contains("a divisor of the number of ranks (8)"));
        assert!(error("backward", "both".into()).contains("auto, keys or queries, got \"both\""));
        assert!(error("machine", json!({ "tflops": [0] })).contains("above 0"));
    }
}
