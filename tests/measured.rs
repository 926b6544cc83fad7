//! The simulator and the costs of kernels against what an H100 measured: the files of results.

mod common;

use std::path::Path;

use burst_attention::problem::{Dtype, Pass, Problem, Travels};
use burst_attention::schedule::ring;
use burst_attention::simulate::{Machine, named, simulate};
use burst_attention::{Layout, Window};
use burst_attention_kernels::cost;
use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{Features, Forward, KeyGrads, Rectangle, TileOperation};
use serde_json::Value;

/// Returns a file of results of the H100; `kind` is the end of its name.
fn results(kind: &str) -> Value {
    let name = format!("benchmarks/results/nvidia-h100-80gb-hbm3{kind}.json");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Milliseconds of a contender, forward and backward.
fn milliseconds(row: &Value, contender: &str) -> [f64; 2] {
    let of = |pass: &str| row["passes"][pass]["contenders"][contender]["ms"].as_f64().unwrap();
    let forward = of("forward");
    [forward, of("forward + backward") - forward]
}

/// H200s have the constants of the H100. One GPU held all ranks in turn, so nothing travelled.
fn h100() -> Machine {
    let mut machine =
        named().into_iter().find(|known| known.name == "h200-nvlink").unwrap().machine;
    machine.network.within.bandwidth = f64::INFINITY;
    machine.network.within.latency = 0.0;
    machine
}

/// Milliseconds of all ranks of a ring, one after the other.
fn predicted(layout: Layout, tokens: usize, pass: Pass) -> f64 {
    let (heads, kv_heads, head_dim, value_dim) = (32, 8, 128, 128);
    let base = common::problem(8, tokens);
    let base = Problem { heads, kv_heads, head_dim, value_dim, ..base };
    let (batch, dtype, window) = (1, Dtype::Bf16, Window::CAUSAL);
    let problem = Problem { batch, dtype, window, layout, ..base };
    let schedules = ring(&problem, pass, Travels::Keys);
    1e3 * simulate(&problem, &schedules, &h100()).unwrap().compute()
}

/// Eight ranks, 32 query and 8 key/value heads of 128 columns, causal: with the zigzag layout 4,096
/// tokens on a rank, and contiguous 8,192 (the whole mask of the row about windows).
#[test]
fn rings_take_what_an_h100_measured() {
    let rows = &results("-ring")["rows"];
    for (layout, tokens, row, contender) in [
        (Layout::Zigzag, 4096, "ring, heads grouped, tokens 4096", "ring"),
        (Layout::Contiguous, 8192, "window", "whole causal mask"),
    ] {
        let measured = milliseconds(&rows[row], contender);
        for (pass, measured) in [Pass::Forward, Pass::Backward].into_iter().zip(measured) {
            let predicted = predicted(layout, tokens, pass);
            let error = predicted / measured - 1.0;
            println!(
                "{layout} {tokens} {pass:?}: {predicted:.2}, measured {measured:.2}, {error:.4}"
            );
            assert!(error.abs() < 0.02, "{layout} {pass:?}: {predicted} ms, measured {measured}");
        }
    }
}

/// What a row of the file of single launches computes.
fn rectangle(row: &Value) -> Rectangle {
    let of = |name: &str| row[name].as_u64().unwrap() as usize;
    let upper = if row["causal"].as_bool().unwrap() { 0 } else { i64::MAX };
    let (q_len, head_dim) = (of("seq"), of("dim"));
    Rectangle {
        batch: of("batch"),
        q_len,
        kv_len: q_len,
        heads: of("heads"),
        kv_heads: of("kv_heads"),
        head_dim,
        value_dim: head_dim,
        element: Element::Bf16,
        lower: i64::MIN,
        upper,
        softmax_scale: 1.0,
    }
}

fn forward(rectangle: Rectangle) -> TileOperation {
    Forward::unplaced(rectangle, Features::default()).into()
}

/// The worst error of predictions, as a part, and the number of rows.
#[derive(Default)]
struct Errors {
    worst: f64,
    rows: usize,
}

impl Errors {
    fn add(&mut self, what: &str, seconds: f64, milliseconds: f64) {
        let error = 1e3 * seconds / milliseconds - 1.0;
        println!("{what}: {:.3}, measured {milliseconds:.3}, {error:.4}", 1e3 * seconds);
        self.worst = self.worst.max(error.abs());
        self.rows += 1;
    }
}

/// The forward pass at 128 columns within 3%, and all else within the errors that
/// `kernels/src/cost/constants.rs` states.
#[test]
fn launches_take_what_an_h100_measured() {
    let found = results("");
    let mut worst = std::collections::BTreeMap::<(&str, u64), Errors>::new();
    for row in found["speed"].as_array().unwrap() {
        let (name, rectangle) = (row["shape"].as_str().unwrap(), rectangle(row));
        let dim = row["dim"].as_u64().unwrap();
        let ms = |of: &Value| of["ms"].as_f64();
        let mut add = |what, cost: Option<cost::Cost>, measured: Option<f64>| {
            let Some((cost, measured)) = cost.zip(measured) else { return };
            worst.entry((what, dim)).or_default().add(
                &format!("{name} {what}"),
                cost.seconds,
                measured,
            );
        };
        let contender = |name: &str| ms(&row["contenders"][name]);
        let own = |operation: TileOperation| cost::own(&operation, Target::Sm90);
        if row["pass"] == "forward" {
            add("forward", own(forward(rectangle)), contender("ours"));
            // The spread of one of cuDNN's rows is two thirds of its time.
            let is_steady = row["contenders"]["cudnn"]["spread"].as_f64().unwrap() < 0.3;
            let measured = contender("cudnn").filter(|_| is_steady);
            add("cuDNN forward", cost::cudnn(&forward(rectangle), Target::Sm90), measured);
            continue;
        }
        let all = KeyGrads { last: true, ..KeyGrads::fused(rectangle, Features::default()) };
        let keys = KeyGrads { dq_acc: None, ..all };
        let both = cost::apart(&all, (true, true), Target::Sm90);
        let keys = own(keys.into());
        let kernels = |names: &[&str]| names.iter().map(|name| ms(&row["kernels"][*name])).sum();
        add("dkdv", keys, kernels(&["dkdv"]));
        add("both", both, kernels(&["dkdv", "dq"]));
        // The file has cuDNN's call alone.
        let library = cost::cudnn_parts(&all.into(), Target::Sm90).map(|parts| parts.call);
        add("cuDNN backward", library, contender("cudnn"));
    }
    let most = |what, dim| match (what, dim) {
        ("forward", _) => 0.03,
        ("dkdv" | "both", _) => 0.06,
        _ => 0.065,
    };
    for ((what, dim), Errors { worst, rows }) in worst {
        println!("{what} {dim}: {rows} rows within {worst:.4}");
        assert!(rows >= if dim == 128 { 9 } else { 4 }, "{what} {dim}: {rows} rows");
        assert!(worst < most(what, dim), "{what} {dim}: {worst}");
    }
}
