//! Baselines of publications, against calculations by hand.

use burst_attention::simulate::{
    self, Bytes, Kernels, Link, Machine, Method, Network, Report, Speed,
};
use burst_attention::{Dtype, Family, Features, Layout, Pass, Problem, Travels, Window};
use burst_attention_studies::{Baseline, predict};

const PASSES: [Pass; 2] = [Pass::Forward, Pass::Backward];
const BASELINES: [Baseline; 2] = [Baseline::RingSelfAttention, Baseline::MegatronTp];

/// Bytes per second of a rank's memory.
const MEMORY: f64 = 16.0;

/// Four query and four key/value heads, whose vectors have 8 elements of two bytes.
fn problem(world_size: usize, n: usize) -> Problem {
    Problem {
        batch: 1,
        q_len: n,
        kv_len: n,
        heads: 4,
        kv_heads: 4,
        head_dim: 8,
        value_dim: 8,
        dtype: Dtype::Bf16,
        window: Window::FULL,
        softmax_scale: 0.25,
        features: Features::default(),
        layout: Layout::Contiguous,
        world_size,
    }
}

fn machine(ranks_per_node: usize) -> Machine {
    let within = Link { latency: 7.0, bandwidth: 4.0 };
    let between = Link { latency: 11.0, bandwidth: 2.0 };
    let (forward, backward, launch) = (Speed::Rate(3.0), Speed::Rate(5.0), 0.0);
    Machine {
        kernels: Kernels {
            forward,
            backward,
            launch,
            one_backward: true,
            sum_bytes: 4,
            library: None,
        },
        network: Network { ranks_per_node, within, between, shared: false },
    }
}

fn run(problem: &Problem, baseline: Baseline, pass: Pass, machine: &Machine) -> Report {
    predict(problem, baseline, pass, machine, MEMORY).unwrap()
}

fn ring(problem: &Problem, pass: Pass, machine: &Machine) -> Report {
    simulate::predict(problem, Method::Travel(Family::Ring), pass, None, machine, false).unwrap()
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
        let report = run(&problem, Baseline::RingSelfAttention, pass, &machine(8));
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
            let report = run(&problem, Baseline::RingSelfAttention, pass, &machine(8));
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
            let report = run(&problem(4, 16), Baseline::MegatronTp, pass, &machine(ranks_per_node));
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
    let report = run(&problem(3, 16), Baseline::MegatronTp, Pass::Forward, &machine(8));
    for rank in &report.ranks {
        assert_near(rank.compute, 48.0 * 48.0 * 2.0 * 32.0 / 3.0);
    }
    assert_near(report.flops(), 48.0 * 48.0 * 4.0 * 32.0);
}

/// Baselines differ from a ring in time, not in the work that the mask asks for.
#[test]
fn baselines_do_the_work_of_a_ring() {
    for (world_size, layout) in (1..=6).flat_map(|ranks| Layout::ALL.map(|of| (ranks, of))) {
        for window in [Window::FULL, Window::CAUSAL] {
            let problem = Problem { layout, window, ..problem(world_size, 8) };
            for (pass, method) in PASSES.into_iter().flat_map(|pass| BASELINES.map(|of| (pass, of)))
            {
                let found = run(&problem, method, pass, &machine(world_size));
                assert_near(found.flops(), ring(&problem, pass, &machine(1)).flops());
                // Nothing waits for a rank that is late, since all do the same at the same time.
                assert!(found.ranks.iter().all(|rank| rank.late < 1e-9 * found.seconds));
            }
        }
    }
}

/// One rank sends nothing. With memory that takes no time and the products that it computes, Ring
/// Self-Attention is as fast as a kernel; backward it does not compute the scores again.
#[test]
fn one_rank_computes_plain_attention() {
    let machine = machine(8);
    for window in [Window::FULL, Window::CAUSAL] {
        let problem = Problem { window, ..problem(1, 32) };
        for pass in PASSES {
            let plain = ring(&problem, pass, &machine);
            let [scores, heads] =
                BASELINES.map(|of| predict(&problem, of, pass, &machine, f64::INFINITY).unwrap());
            assert_eq!(scores.sent().within + heads.sent().within, 0);
            assert_near(heads.seconds, plain.seconds);
            let all = 32.0 * 32.0 * 4.0 * if pass == Pass::Forward { 32.0 } else { 80.0 };
            let products = if pass == Pass::Forward { 1.0 } else { 4.0 / 5.0 };
            assert_near(scores.seconds, plain.seconds * all / plain.flops() * products);
        }
    }
}

#[test]
fn nodes_divide_the_ranks() {
    let uneven = predict(&problem(6, 8), Baseline::MegatronTp, Pass::Forward, &machine(4), MEMORY);
    assert!(uneven.unwrap_err().to_string().contains("a divisor of the number of ranks (6)"));
}
