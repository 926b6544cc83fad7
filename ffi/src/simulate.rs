//! Predictions as other programs ask for them: a problem and a machine in, what they take out.

use std::ffi::{CStr, c_char};
use std::panic::resume_unwind;
use std::thread;

use burst_attention::mask::Window;
use burst_attention::problem::MAX_RANKS;
use burst_attention::simulate::{
    Activity, Bytes, Class, Estimate, Event, Method, RankReport, Report, estimate, predict,
};
use burst_attention::{Features, Layout, Pass, Problem, Travels};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::answer::answered;
use crate::call::travels_of;
use crate::machine::{MachineRequest, NamedOrGiven};
use crate::options::Schedule;

/// Most ranks whose steps are all walked; of more there is an estimate.
const MOST_WALKED: usize = 1024;

/// What is to be predicted.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    /// The family of schedules, or ulysses or hybrid; the inner rings of a double ring, and the
    /// ranks of a hybrid that exchange heads, are nodes.
    schedule: String,
    world_size: usize,
    batch: usize,
    /// Of all ranks together.
    seq: usize,
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
    /// Tell every event.
    timeline: bool,
}

/// What went wrong, in words.
pub(crate) type Result<T> = std::result::Result<T, String>;

/// `{"machine": …, "passes": […]}`, or `{"error": …}`. The string stays until the thread asks again.
pub fn simulate(request: &CStr) -> *const c_char {
    answered(request, answer)
}

fn answer(request: &Request) -> Result<Value> {
    let problem = request.problem()?;
    let named = request.machine.named(request.world_size)?;
    let backward = travels_of(&request.backward).map_err(|error| error.to_string())?;
    let node = named.machine.network.ranks_per_node.min(request.world_size);
    let method = request.method(node)?;
    if request.world_size > MOST_WALKED {
        return request.estimated(&problem, method, backward, &named);
    }
    let report = |(pass, travels): (Pass, Option<Travels>)| {
        predict(&problem, method, pass, travels, &named.machine, request.timeline)
    };
    let backward = (Pass::Backward, backward);
    let reports = thread::scope(|scope| {
        let backward = scope.spawn(|| report(backward));
        let forward = report((Pass::Forward, None));
        [forward, backward.join().unwrap_or_else(|panic| resume_unwind(panic))]
    });
    let pass = |report: burst_attention::Result<Report>| {
        Ok(pass_json(&report.map_err(|error| error.to_string())?, request.timeline))
    };
    let passes: Vec<Value> = reports.into_iter().map(pass).collect::<Result<_>>()?;
    Ok(json!({ "machine": named.json(request.world_size), "passes": passes }))
}

impl Request {
    /// The same of a large world: totals, and one rank for all.
    fn estimated(
        &self,
        problem: &Problem,
        method: Method,
        backward: Option<Travels>,
        named: &NamedOrGiven,
    ) -> Result<Value> {
        if self.timeline {
            let got = self.world_size;
            return Err(format!("a timeline has at most {MOST_WALKED} ranks, got {got}"));
        }
        let passes = [(Pass::Forward, None), (Pass::Backward, backward)].map(|(pass, travels)| {
            let found = estimate(problem, method, pass, travels, &named.machine);
            Ok(estimate_json(&found.map_err(|error| error.to_string())?, pass, self.world_size))
        });
        let passes: Vec<Value> = passes.into_iter().collect::<Result<_>>()?;
        Ok(json!({ "machine": named.json(self.world_size), "passes": passes }))
    }

    /// How ranks divide the work, with nodes of so many ranks.
    fn method(&self, node: usize) -> Result<Method> {
        match self.schedule.as_str() {
            "ulysses" => Ok(Method::Heads { inner: self.world_size }),
            "hybrid" => Ok(Method::Heads { inner: node }),
            name => match Schedule::named(name) {
                Ok(schedule) => Ok(Method::Travel(schedule.family(node))),
                Err(error) => Err(format!("{error}; or ulysses or hybrid")),
            },
        }
    }

    fn problem(&self) -> Result<Problem> {
        let dtype =
            self.dtype.parse().map_err(|error: burst_attention::Error| error.to_string())?;
        if self.world_size == 0 {
            return Err("world size must be at least 1, got 0".into());
        }
        if self.world_size > MAX_RANKS {
            let got = self.world_size;
            return Err(format!(
                "world size must be at most {MAX_RANKS} (further devices can share the batch or \
                 the heads), got {got}"
            ));
        }
        let layout: Layout = self.layout.parse().map_err(|error| format!("{error}"))?;
        let (chunks, what) = match layout {
            Layout::Zigzag => (2 * self.world_size, "two chunks for each rank"),
            _ => (self.world_size, "the world size"),
        };
        if !self.seq.is_multiple_of(chunks) {
            let seq = self.seq;
            return Err(format!(
                "sequence length must be a multiple of {chunks} ({what}), got {seq}"
            ));
        }
        let shard = self.seq / self.world_size;
        let problem = Problem {
            batch: self.batch,
            q_len: shard,
            kv_len: shard,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            value_dim: self.value_dim,
            dtype,
            window: Window { left: self.window_left, right: self.window_right },
            softmax_scale: 1.0,
            features: Features::NONE,
            layout,
            world_size: self.world_size,
        };
        problem.validate().map_err(|error| error.to_string())?;
        Ok(problem)
    }
}

fn pass_json(report: &Report, timeline: bool) -> Value {
    let mut text = json!({
        "pass": format!("{:?}", report.pass).to_lowercase(),
        "travels": side_name(report.travels),
        "seconds": report.seconds,
        "idle_share": report.idle_share(),
        "exposed": report.exposed(),
        "flops": report.flops(),
        "sent": bytes_json(report.sent()),
        "slow_hops": report.slow_hops(),
        "ranks": (report.ranks.iter().map(|rank| rank_json(report.seconds, rank)))
            .collect::<Vec<_>>(),
    });
    if timeline {
        text["timeline"] = report.timeline.iter().map(event_json).collect();
    }
    text
}

/// As [`pass_json`], with the busiest rank alone.
fn estimate_json(found: &Estimate, pass: Pass, world_size: usize) -> Value {
    let all = found.seconds * world_size as f64;
    json!({
        "pass": format!("{pass:?}").to_lowercase(),
        "estimated": true,
        "world_size": world_size,
        "travels": side_name(found.travels),
        "seconds": found.seconds,
        "idle_share": if all > 0.0 { 1.0 - found.compute / all } else { 0.0 },
        "exposed": found.exposed,
        "flops": found.flops,
        "sent": bytes_json(found.sent),
        "slow_hops": found.slow_hops,
        "ranks": [rank_json(found.seconds, &found.busiest)],
    })
}

/// What travels, in a word; where no side does, ranks exchange heads.
pub(crate) fn side_name(side: Option<Travels>) -> String {
    side.map_or("heads".into(), |side| format!("{side:?}").to_lowercase())
}

fn rank_json(seconds: f64, rank: &RankReport) -> Value {
    json!({
        "steps": rank.steps,
        "tiles": rank.tiles,
        "flops": rank.flops,
        "compute": rank.compute,
        "exposed": rank.exposed,
        "late": rank.late,
        "idle": seconds - rank.compute,
        "sent": bytes_json(rank.sent),
        "slow_hops": rank.slow_hops,
        "buffer_bytes": rank.buffer_bytes,
    })
}

pub(crate) fn bytes_json(bytes: Bytes) -> Value {
    json!({ "within": bytes.within, "between": bytes.between })
}

fn event_json(event: &Event) -> Value {
    let Event { rank, step, activity, start, end } = event;
    let what = match activity {
        Activity::Compute => "compute",
        Activity::Exposed => "exposed",
        Activity::Late => "late",
        Activity::Send { class: Class::Within, .. } => "send_within",
        Activity::Send { class: Class::Between, .. } => "send_between",
    };
    let mut text = json!({ "rank": rank, "step": step, "what": what, "start": start, "end": end });
    if let Activity::Send { peer, bytes, .. } = activity {
        text["peer"] = (*peer).into();
        text["bytes"] = (*bytes).into();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;

    use super::*;

    fn ask(edit: impl FnOnce(&mut Value)) -> Value {
        let mut request = json!({
            "schedule": "ring", "world_size": 8, "batch": 1, "seq": 65536, "heads": 32,
            "kv_heads": 8, "head_dim": 128, "value_dim": 128, "dtype": "bfloat16",
            "layout": "zigzag", "window_left": null, "window_right": 0, "backward": "queries",
            "machine": { "name": "h200-nvlink" }, "timeline": false,
        });
        edit(&mut request);
        let request = CString::new(request.to_string()).unwrap();
        // SAFETY: the thread does not ask again before it is parsed.
        let answer = unsafe { CStr::from_ptr(simulate(&request)) };
        serde_json::from_slice(answer.to_bytes()).unwrap()
    }

    #[test]
    fn answers_both_passes_with_what_every_rank_does() {
        let answer = ask(|_| ());
        let [forward, backward] = answer["passes"].as_array().unwrap().as_slice() else {
            panic!("two passes: {answer}")
        };
        assert_eq!((&forward["pass"], &forward["travels"]), (&json!("forward"), &json!("keys")));
        assert_eq!(backward["travels"], "queries");
        let pairs = 65536.0 * 65537.0 / 2.0 * 32.0;
        assert_eq!(forward["flops"], json!(pairs * 512.0));
        assert_eq!(backward["flops"], json!(pairs * 1280.0));
        assert_eq!(forward["ranks"].as_array().unwrap().len(), 8);
        assert_eq!(forward["timeline"], Value::Null);
        assert!(answer["machine"]["sources"]["compute"].as_str().unwrap().contains("predicted"));
        assert_eq!(answer["machine"]["between"], Value::Null);
        let told = ask(|request| request["timeline"] = true.into());
        let event = &told["passes"][0]["timeline"][0];
        assert_eq!(
            (&event["what"], &event["start"]),
            (&json!("send_within"), &json!(0.0)),
            "{event}"
        );
    }

    #[test]
    fn numbers_that_are_given_replace_those_of_the_machine() {
        let answer = ask(|request| {
            request["machine"] = json!({
                "ranks_per_node": 4, "tflops": [1000.0], "link_gbps": [80.0, 8.0],
                "latency_us": [1.0, 2.0], "launch_us": 0.0,
            });
        });
        let machine = &answer["machine"];
        assert_eq!(machine["flops"], json!({ "forward": 1e15, "backward": 1e15 }), "{answer}");
        assert_eq!(machine["within"], json!({ "bandwidth": 1e10, "latency": 1e-6 }));
        assert_eq!(machine["between"], json!({ "bandwidth": 1e9, "latency": 2e-6 }));
        for (_, source) in machine["sources"].as_object().unwrap() {
            assert!(source.as_str().unwrap().contains("as given"), "{source}");
        }
        assert_eq!(machine["shared"], false);
        assert!(answer["passes"][0]["sent"]["between"].as_u64().unwrap() > 0);
        let shared = ask(|request| {
            request["machine"] = json!({ "ranks_per_node": 4, "shared": true });
        });
        assert_eq!(shared["machine"]["shared"], true);
        assert!(shared["machine"]["sources"]["between"].as_str().unwrap().contains("share one"));
    }

    #[test]
    fn ranks_of_a_node_exchange_heads_in_a_hybrid_and_all_do_in_ulysses() {
        let travels = |schedule: &str| {
            let answer = ask(|request| {
                request["schedule"] = schedule.into();
                request["machine"] = json!({ "ranks_per_node": 4 });
            });
            answer["passes"]
                .as_array()
                .unwrap()
                .iter()
                .map(|p| p["travels"].clone())
                .collect::<Vec<Value>>()
        };
        assert_eq!(travels("ulysses"), Vec::from(["heads", "heads"].map(Value::from)));
        assert_eq!(travels("hybrid"), Vec::from(["keys", "queries"].map(Value::from)));
    }

    #[test]
    fn answers_what_is_wrong_with_a_request() {
        let error = |name: &str, value: Value| {
            let answer = ask(|request| request[name] = value);
            answer["error"].as_str().unwrap_or_else(|| panic!("{name}: {answer}")).to_owned()
        };
        assert!(error("layout", "diagonal".into()).contains("contiguous, zigzag or striped"));
        assert!(error("seq", 65544.into()).contains("multiple of 16 (two chunks for each rank)"));
        assert!(error("world_size", 0.into()).contains("at least 1"));
        assert!(error("world_size", 32.into()).contains("take h200-400g"));
        assert!(error("machine", json!({ "name": "abacus" })).contains("h200-nvlink or h200-400g"));
        assert!(error("machine", json!({ "tflops": [1, 2, 3] })).contains("one or two"));
        assert!(error("machine", json!({ "tflops": [0] })).contains("above 0"));
        assert!(error("kv_heads", 5.into()).contains("multiple of key/value heads"));
        assert!(error("schedule", "maypole".into()).contains(
            "must be ring, double_ring, balanced or all_gather, got \"maypole\"; or ulysses"
        ));
        assert!(error("backward", "both".into()).contains("both"));
        assert!(error("dtype", "int8".into()).contains("float32"));
        assert!(error("nonsense", 1.into()).contains("can't be read"));
    }
}
