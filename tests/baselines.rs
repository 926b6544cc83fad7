//! Baselines of publications in the simulator, against calculations by hand.

mod common;

use burst_attention::problem::{Dtype, Pass, Problem, Travels};
use burst_attention::schedule::Family;
use burst_attention::simulate::{
    Bytes, Estimate, Kernels, Link, Machine, Method, Network, Report, estimate, predict,
};
use burst_attention::{Layout, Window};
use common::{PASSES, problems};

const BASELINES: [Method; 2] = [Method::RingSelfAttention, Method::MegatronTp];

/// Four query and four key/value heads, whose vectors have 8 elements of two bytes.
fn problem(world_size: usize, n: usize) -> Problem {
    let (batch, heads, kv_heads, dtype) = (1, 4, 4, Dtype::Bf16);
    let (head_dim, value_dim, window) = (8, 8, Window::FULL);
    let base = common::problem(world_size, n);
    Problem { batch, heads, kv_heads, head_dim, value_dim, dtype, window, ..base }
}

fn machine(ranks_per_node: usize) -> Machine {
    let within = Link { latency: 7.0, bandwidth: 4.0 };
    let between = Link { latency: 11.0, bandwidth: 2.0 };
    let (forward, backward, launch, memory) = (3.0, 5.0, 0.0, 16.0);
    Machine {
        kernels: Kernels { forward, backward, launch, one_backward: true, sum_bytes: 4, memory },
        network: Network { ranks_per_node, within, between, shared: false },
    }
}

fn run(problem: &Problem, method: Method, pass: Pass, machine: &Machine) -> Report {
    predict(problem, method, pass, None, machine, false).unwrap()
}

#[track_caller]
fn assert_near(found: f64, expected: f64) {
    assert!((found / expected - 1.0).abs() < 1e-9, "{found}, expected {expected}");
}

/// A chunk has 16 rows of 4·8·2 bytes. Forward, keys and values take three hops each. Backward, they
/// take them again, and the sums of dk and dv go round twice each: six units of P − 1 hops, as
/// Sequence Parallelism (arXiv:2105.13120) counts them.
#[test]
fn ring_self_attention_sends_two_rings_forward_and_six_backward() {
    let (problem, chunk) = (problem(4, 16), 16 * 64);
    for (pass, rings) in PASSES.into_iter().zip([2, 6]) {
        let report = run(&problem, Method::RingSelfAttention, pass, &machine(8));
        assert_eq!(report.travels, Some(Travels::Keys));
        let hops = 3 * rings;
        for rank in &report.ranks {
            assert_eq!(rank.sent, Bytes { within: hops * chunk, between: 0 });
            // No message overlaps with computing.
            assert_near(rank.exposed, hops as f64 * (7.0 + chunk as f64 / 4.0));
            assert_near(rank.end, rank.compute + rank.exposed);
        }
    }
}

/// Scores have 4·16·64 pairs of two bytes on each rank. Forward they pass memory four times and two
/// products of 16 FLOPs each. Backward, seven times and four products.
#[test]
fn ring_self_attention_computes_and_keeps_all_scores() {
    let pairs = 4.0 * 16.0 * 64.0;
    for (pass, rate, products, passes, kept) in
        [(Pass::Forward, 3.0, 2.0, 4.0, 2), (Pass::Backward, 5.0, 4.0, 7.0, 3)]
    {
        let seconds = pairs * (products * 16.0 / rate + passes * 2.0 / 16.0);
        let chunks = 16 * 64;
        let sums = if pass == Pass::Forward { 0 } else { 4 * 16 * 128 };
        for (window, layout) in
            [(Window::FULL, Layout::Contiguous), (Window::CAUSAL, Layout::Zigzag)]
        {
            let problem = Problem { window, layout, ..problem(4, 16) };
            let report = run(&problem, Method::RingSelfAttention, pass, &machine(8));
            for rank in &report.ranks {
                assert_near(rank.compute, seconds);
                assert_eq!(rank.tiles, 4 * products as usize);
                assert_eq!(rank.buffer_bytes, kept * 2 * pairs as u64 + 2 * chunks + sums);
            }
        }
    }
}

/// Between nodes a rank gathers one chunk of 16·64 bytes from each other node, and within its node
/// as many chunks as there are nodes from each neighbour; sums go back the same way.
#[test]
fn tensor_parallelism_sends_activations_twice_in_each_pass() {
    let chunk = 16 * 64;
    for (ranks_per_node, within, between) in [(8, 3 * chunk, 0), (2, 2 * chunk, chunk)] {
        for (pass, work) in PASSES.into_iter().zip([32.0 / 3.0, 80.0 / 5.0]) {
            let report = run(&problem(4, 16), Method::MegatronTp, pass, &machine(ranks_per_node));
            assert_eq!(report.travels, None);
            let waits = [(within, 7.0, 4.0), (between, 11.0, 2.0)]
                .map(
                    |(bytes, latency, rate)| {
                        if bytes > 0 { 2.0 * (latency + f64::from(bytes) / rate) } else { 0.0 }
                    },
                )
                .iter()
                .sum::<f64>();
            for rank in &report.ranks {
                let sent = [within, between].map(|bytes| 2 * bytes as u64);
                assert_eq!(rank.sent, Bytes { within: sent[0], between: sent[1] });
                assert_near(rank.compute, 64.0 * 64.0 * work);
                assert_near(rank.exposed, waits);
                assert_eq!(rank.buffer_bytes, 4 * chunk as u64);
            }
        }
    }
}

/// Three ranks with four heads compute six: the time is that of two heads on each rank.
#[test]
fn heads_that_cannot_be_divided_are_padded() {
    let report = run(&problem(3, 16), Method::MegatronTp, Pass::Forward, &machine(8));
    for rank in &report.ranks {
        assert_near(rank.compute, 48.0 * 48.0 * 2.0 * 32.0 / 3.0);
    }
    assert_near(report.flops(), 48.0 * 48.0 * 4.0 * 32.0);
}

/// Methods differ in time, not in the work that the mask asks for.
#[test]
fn baselines_do_the_work_of_a_ring() {
    for problem in problems(1..=6, &[8]) {
        for (pass, method) in PASSES.into_iter().flat_map(|pass| BASELINES.map(|of| (pass, of))) {
            let found = run(&problem, method, pass, &machine(problem.world_size));
            let ring = run(&problem, Method::Travel(Family::Ring), pass, &machine(1));
            assert_near(found.flops(), ring.flops());
            // Nothing waits for a rank that is late, since all do the same at the same time.
            assert!(found.ranks.iter().all(|rank| rank.late < 1e-9 * found.seconds));
        }
    }
}

/// One rank sends nothing. With memory that takes no time and the products that it computes, Ring
/// Self-Attention is as fast as a kernel; backward it does not compute the scores again.
#[test]
fn one_rank_computes_plain_attention() {
    let mut machine = machine(8);
    machine.kernels.memory = f64::INFINITY;
    for window in [Window::FULL, Window::CAUSAL] {
        let problem = Problem { window, ..problem(1, 32) };
        for pass in PASSES {
            let plain = run(&problem, Method::Travel(Family::Ring), pass, &machine);
            let [scores, heads] = BASELINES.map(|method| run(&problem, method, pass, &machine));
            assert_eq!(scores.sent().within + heads.sent().within, 0);
            assert_near(heads.seconds, plain.seconds);
            let all = 32.0 * 32.0 * 4.0 * if pass == Pass::Forward { 32.0 } else { 80.0 };
            let products = if pass == Pass::Forward { 1.0 } else { 4.0 / 5.0 };
            assert_near(scores.seconds, plain.seconds * all / plain.flops() * products);
        }
    }
}

#[test]
fn estimates_of_baselines_are_simulations_and_large_worlds_are_errors() {
    for method in BASELINES {
        let large = problem(64, 8);
        let machine = machine(8);
        let found: Estimate = estimate(&large, method, Pass::Forward, None, &machine).unwrap();
        let all = run(&large, method, Pass::Forward, &machine);
        assert_eq!((found.estimated, found.seconds), (false, all.seconds));
        let error = estimate(&problem(512, 8), method, Pass::Forward, None, &machine).unwrap_err();
        let words = "world_size must be at most 256 for baselines of the simulator, got 512";
        assert_eq!(error.to_string(), words);
    }
    let uneven = predict(&problem(6, 8), BASELINES[1], Pass::Forward, None, &machine(4), false);
    assert!(uneven.unwrap_err().to_string().contains("a divisor of the number of ranks (6)"));
}
