//! The predicted time of a problem's schedules on a machine.

use std::panic::resume_unwind;
use std::thread;

use burst_attention::simulate::{
    Activity, Class, Estimate, Event, Machine, Method, RankReport, Report, estimate, predict,
};
use burst_attention::{Family, Pass, Problem, Travels};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::answer::{Result, travels};
use crate::machine::MachineRequest;

/// Most ranks whose steps are all simulated. Larger worlds are estimated from smaller ones.
const MOST_SIMULATED: usize = 1024;

/// A problem, how its ranks divide the work, and the machine that computes it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Request {
    #[serde(flatten)]
    problem: Problem,
    /// A family of schedules, `ulysses` or `hybrid`. The inner rings of a double ring are nodes, and
    /// so are the groups of a hybrid that exchange heads.
    schedule: String,
    #[serde(deserialize_with = "travels")]
    backward: Option<Travels>,
    machine: MachineRequest,
    /// Whether the answer lists every event.
    timeline: bool,
}

impl Request {
    /// Returns `{"machine": …, "passes": [forward, backward]}`.
    pub(crate) fn answer(&self) -> Result<Value> {
        self.problem.validate()?;
        let world_size = self.problem.world_size;
        let resolved = self.machine.resolved(world_size)?;
        let node = resolved.machine.network.ranks_per_node.min(world_size);
        let method = self.method(node)?;
        let passes = if world_size > MOST_SIMULATED {
            self.estimated(method, &resolved.machine)?
        } else {
            self.simulated(method, &resolved.machine)?
        };
        Ok(json!({ "machine": resolved.json(world_size), "passes": passes }))
    }

    /// Simulates all ranks, the two passes at the same time.
    fn simulated(&self, method: Method, machine: &Machine) -> Result<[Value; 2]> {
        let report =
            |pass, travels| predict(&self.problem, method, pass, travels, machine, self.timeline);
        let (forward, backward) = thread::scope(|scope| {
            let backward = scope.spawn(|| report(Pass::Backward, self.backward));
            let forward = report(Pass::Forward, None);
            (forward, backward.join().unwrap_or_else(|panic| resume_unwind(panic)))
        });
        Ok([pass_json(&forward?, self.timeline), pass_json(&backward?, self.timeline)])
    }

    /// Estimates the totals of a large world, and its busiest rank.
    fn estimated(&self, method: Method, machine: &Machine) -> Result<[Value; 2]> {
        let world_size = self.problem.world_size;
        if self.timeline {
            let error = format!("a timeline has at most {MOST_SIMULATED} ranks, got {world_size}");
            return Err(error.into());
        }
        let pass = |pass, travels| -> Result<Value> {
            let found = estimate(&self.problem, method, pass, travels, machine)?;
            Ok(estimate_json(&found, pass, world_size))
        };
        Ok([pass(Pass::Forward, None)?, pass(Pass::Backward, self.backward)?])
    }

    /// Returns how ranks divide the work, where a node has `node` ranks.
    fn method(&self, node: usize) -> Result<Method> {
        match self.schedule.as_str() {
            "ulysses" => Ok(Method::Heads { inner: self.problem.world_size }),
            "hybrid" => Ok(Method::Heads { inner: node }),
            name => match Family::named(name, node) {
                Ok(family) => Ok(Method::Travel(family)),
                Err(error) => Err(format!("{error}; or ulysses or hybrid").into()),
            },
        }
    }
}

fn pass_json(report: &Report, timeline: bool) -> Value {
    let rank = |rank: &RankReport| rank_json(report.seconds, rank);
    let mut text = json!({
        "pass": report.pass,
        "travels": side_name(report.travels),
        "seconds": report.seconds,
        "idle_share": report.idle_share(),
        "exposed": report.exposed(),
        "flops": report.flops(),
        "sent": report.sent(),
        "slow_hops": report.slow_hops(),
        "ranks": report.ranks.iter().map(rank).collect::<Vec<_>>(),
    });
    if timeline {
        text["timeline"] = report.timeline.iter().map(event_json).collect();
    }
    text
}

/// Returns the fields of [`pass_json`], with the busiest rank alone.
fn estimate_json(found: &Estimate, pass: Pass, world_size: usize) -> Value {
    let all = found.seconds * world_size as f64;
    json!({
        "pass": pass,
        "estimated": true,
        "world_size": world_size,
        "travels": side_name(found.travels),
        "seconds": found.seconds,
        "idle_share": if all > 0.0 { 1.0 - found.compute / all } else { 0.0 },
        "exposed": found.exposed,
        "flops": found.flops,
        "sent": found.sent,
        "slow_hops": found.slow_hops,
        "ranks": [rank_json(found.seconds, &found.busiest)],
    })
}

/// Returns the name of the side that travels, or `heads` where ranks exchange heads instead.
pub(crate) fn side_name(side: Option<Travels>) -> Value {
    side.map_or("heads".into(), |side| json!(side))
}

fn rank_json(seconds: f64, rank: &RankReport) -> Value {
    let mut text = json!(rank);
    text["idle"] = (seconds - rank.compute).into();
    text
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
    use super::*;
    use crate::json;

    fn ask(edit: impl FnOnce(&mut Value)) -> Value {
        let mut request = json!({
            "ask": "simulate", "schedule": "ring", "world_size": 8, "batch": 1, "q_len": 8192,
            "kv_len": 8192, "heads": 32, "kv_heads": 8, "head_dim": 128, "value_dim": 128,
            "dtype": "bfloat16", "layout": "zigzag", "window": { "right": 0 },
            "softmax_scale": 1.0, "backward": "queries", "machine": { "name": "h200-nvlink" },
            "timeline": false,
        });
        edit(&mut request);
        json::answer(request.to_string().as_bytes())
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
        assert!(answer["machine"]["sources"]["compute"].as_str().unwrap().contains("measured"));
        assert_eq!(answer["machine"]["between"], Value::Null);
        let timed = ask(|request| request["timeline"] = true.into());
        let event = &timed["passes"][0]["timeline"][0];
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
        assert!(error("q_len", 8193.into()).contains("even in the zigzag layout"));
        assert!(error("world_size", 0.into()).contains("at least 1"));
        assert!(error("world_size", 32.into()).contains("take h200-400g"));
        assert!(error("machine", json!({ "name": "abacus" })).contains("h200-nvlink or h200-400g"));
        assert!(error("machine", json!({ "tflops": [1, 2, 3] })).contains("one or two"));
        assert!(error("machine", json!({ "tflops": [0] })).contains("above 0"));
        assert!(error("kv_heads", 5.into()).contains("multiple of key/value heads"));
        assert!(error("schedule", "maypole".into()).contains("got \"maypole\"; or ulysses"));
        assert!(error("backward", "both".into()).contains("both"));
        assert!(error("dtype", "int8".into()).contains("float32"));
        assert!(error("nonsense", 1.into()).contains("can't be read: unknown field `nonsense`"));
    }
}
