//! The choice of a schedule, as Python asks for it.

use std::collections::HashMap;
use std::ffi::{CStr, c_char};

use burst_attention::mask::Window;
use burst_attention::simulate::{Candidate, Choice, choose as chosen};
use burst_attention::{Features, Problem};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::answer::answered;
use crate::call::travels_of;
use crate::machine::MachineRequest;
use crate::simulate::{Result, bytes_json, side_name};

/// What a schedule is wanted for.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    world_size: usize,
    /// Length of the inner axis, if there are two.
    inner: Option<usize>,
    batch: usize,
    /// Of one rank.
    q_len: usize,
    /// Likewise.
    kv_len: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
    dtype: String,
    layout: String,
    /// None for no limit.
    window_left: Option<usize>,
    window_right: Option<usize>,
    /// What travels in the backward pass.
    backward: String,
    machine: MachineRequest,
    /// Schedules that can't be had, and why.
    refused: HashMap<String, String>,
}

/// `{"schedule": …, "reason": …, "candidates": […], "machine": …}`, or `{"error": …}`. The string
/// stays until the thread asks again.
pub fn choose(request: &CStr) -> *const c_char {
    answered(request, answer)
}

fn answer(request: &Request) -> Result<Value> {
    let problem = request.problem()?;
    let named = request.machine.named(request.world_size)?;
    let words = |error: &dyn std::error::Error| error.to_string();
    let backward = travels_of(&request.backward).map_err(|error| words(&error))?;
    let refused = |name: &str| request.refused.get(name).cloned();
    let choice = chosen(&problem, request.inner, backward, &named.machine, refused);
    let Choice { chosen, reason, candidates } = choice.map_err(|error| words(&error))?;
    Ok(json!({
        "schedule": candidates[chosen].name,
        "reason": reason,
        "candidates": candidates.iter().map(candidate_json).collect::<Vec<_>>(),
        "machine": named.json(request.world_size),
    }))
}

impl Request {
    fn problem(&self) -> Result<Problem> {
        let problem = Problem {
            batch: self.batch,
            q_len: self.q_len,
            kv_len: self.kv_len,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            value_dim: self.value_dim,
            dtype: self.dtype.parse().map_err(|error: burst_attention::Error| error.to_string())?,
            window: Window { left: self.window_left, right: self.window_right },
            softmax_scale: 1.0,
            features: Features::NONE,
            layout: self.layout.parse().map_err(|error| format!("{error}"))?,
            world_size: self.world_size,
        };
        problem.validate().map_err(|error| error.to_string())?;
        Ok(problem)
    }
}

fn candidate_json(Candidate { name, cost }: &Candidate) -> Value {
    match cost {
        Ok(cost) => json!({
            "schedule": name,
            "seconds": cost.seconds,
            "exposed": cost.exposed,
            "sent": bytes_json(cost.sent),
            "backward": side_name(cost.backward),
            "estimated": cost.estimated,
        }),
        Err(reason) => json!({ "schedule": name, "impossible": reason }),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;

    use super::*;

    fn ask(edit: impl FnOnce(&mut Value)) -> Value {
        let mut request = json!({
            "world_size": 8, "inner": null, "batch": 1, "q_len": 8192, "kv_len": 8192, "heads": 32,
            "kv_heads": 8, "head_dim": 128, "value_dim": 128, "dtype": "bfloat16",
            "layout": "contiguous", "window_left": null, "window_right": 0, "backward": "keys",
            "machine": {}, "refused": {},
        });
        edit(&mut request);
        let request = CString::new(request.to_string()).unwrap();
        // SAFETY: the thread does not ask again before it is parsed.
        let answer = unsafe { CStr::from_ptr(choose(&request)) };
        serde_json::from_slice(answer.to_bytes()).unwrap()
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
        assert!(error("backward", "both".into()).contains("both"));
        assert!(error("machine", json!({ "tflops": [0] })).contains("above 0"));
    }
}
