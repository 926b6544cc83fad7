//! Exchanges of rows for heads in the simulator, against calculations by hand.

mod common;

use burst_attention::problem::{Dtype, Pass, Problem, Travels};
use burst_attention::schedule::{Family, ring, total_bytes};
use burst_attention::simulate::{
    Bytes, Kernels, Link, Machine, Method, Network, Report, Speed, predict,
};
use burst_attention::{Layout, Window};
use common::PASSES;

/// Four query and two key/value heads, whose vectors have 8 elements of two bytes.
fn problem(world_size: usize, n: usize) -> Problem {
    let (batch, heads, kv_heads, dtype) = (1, 4, 2, Dtype::Bf16);
    let (head_dim, value_dim, window) = (8, 8, Window::FULL);
    let base = common::problem(world_size, n);
    Problem { batch, heads, kv_heads, head_dim, value_dim, dtype, window, ..base }
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
            one_backward: false,
            sum_bytes: 4,
            library: None,
        },
        network: Network { ranks_per_node, within, between, shared: false },
    }
}

fn run(problem: &Problem, inner: usize, pass: Pass, machine: &Machine) -> Report {
    let travels = Some(Travels::Keys);
    predict(problem, Method::Heads { inner }, pass, travels, machine, true).unwrap()
}

/// A row has 4·16 bytes of q, o or dout, 4·4 of lse, and 4·32 of k and v, because its two key/value
/// heads are repeated once. Three quarters of them leave, over one port.
#[test]
fn ulysses_takes_two_exchanges_and_the_work_between() {
    let problem = problem(4, 16);
    let pairs = 64.0 * 64.0;
    for (pass, there, back, work, held) in [
        (Pass::Forward, 192, 80, pairs * 32.0 / 3.0, 16 * 272),
        (Pass::Backward, 64, 192, pairs * 80.0 / 5.0, 16 * (272 + 256)),
    ] {
        let report = run(&problem, 4, pass, &machine(8));
        let sent = [there, back].map(|row: u64| 16 * row * 3 / 4);
        let waits: f64 = sent.iter().map(|bytes| 7.0 + *bytes as f64 / 4.0).sum();
        assert!((report.seconds - work - waits).abs() < 1e-6, "{pass:?}: {}", report.seconds);
        assert_eq!(report.travels, None);
        for rank in &report.ranks {
            assert!((rank.exposed - waits).abs() < 1e-6 && rank.late == 0.0, "{rank:?}");
            assert_eq!(rank.sent, Bytes { within: sent.iter().sum(), between: 0 });
            assert_eq!((rank.tiles, rank.slow_hops, rank.buffer_bytes), (1, 0, held));
        }
        assert!((report.idle_share() - waits / (work + waits)).abs() < 1e-9);
    }
}

/// On nodes of two ranks, one of three messages stays in the node. The other two share a slow port.
#[test]
fn an_exchange_over_nodes_waits_for_its_slow_part() {
    let report = run(&problem(4, 16), 4, Pass::Forward, &machine(2));
    let slow = [192, 80].map(|row| 11.0 + f64::from(16 * row * 2 / 4) / 2.0);
    assert!((report.exposed() - slow[0] - slow[1]).abs() < 1e-6, "{}", report.exposed());
    assert!(report.ranks.iter().all(|rank| rank.slow_hops == 4));
}

/// Every rank has an equal part of the causal work, whatever the layout.
#[test]
fn causal_work_is_even_without_a_layout_s_help() {
    for layout in Layout::ALL {
        let problem = Problem { layout, window: Window::CAUSAL, ..problem(4, 16) };
        let report = run(&problem, 4, Pass::Forward, &machine(8));
        let work = 64.0 * 65.0 / 2.0 * 32.0;
        assert!(report.ranks.iter().all(|rank| rank.flops == work), "{layout}");
    }
}

#[test]
fn hybrids_send_a_ring_of_longer_shards_between_nodes_and_heads_within() {
    for layout in Layout::ALL {
        let problem = Problem { layout, window: Window::CAUSAL, ..problem(6, 8) };
        let local = Problem { world_size: 3, q_len: 16, kv_len: 16, heads: 2, ..problem.clone() };
        let local = Problem { kv_heads: 1, ..local };
        for (pass, row) in PASSES.into_iter().zip([128 + 80, 64 + 128]) {
            let report = run(&problem, 2, pass, &machine(2));
            let between = 2 * total_bytes(&local, &ring(&local, pass, Travels::Keys));
            // Two key/value heads for two ranks: none is repeated.
            let within = 6 * 8 * row / 2;
            assert_eq!(report.sent(), Bytes { within, between }, "{layout} {pass:?}");
            let per_pair = if pass == Pass::Forward { 32.0 } else { 80.0 };
            assert_eq!(report.flops(), 48.0 * 49.0 / 2.0 * 4.0 * per_pair);
            assert_eq!(report.travels, Some(Travels::Keys));
        }
    }
}

/// For four ranks, six key/value heads are repeated to twelve, so each rank has three.
#[test]
fn keys_are_repeated_until_their_heads_can_be_divided() {
    let problem = Problem { heads: 12, kv_heads: 6, ..problem(4, 16) };
    let report = run(&problem, 4, Pass::Forward, &machine(8));
    let row = 12 * 16 + 12 * 32 + 12 * 20;
    assert_eq!(report.sent(), Bytes { within: 4 * 16 * row * 3 / 4, between: 0 });
}

#[test]
fn groups_of_one_rank_are_the_ring() {
    let problem = Problem { window: Window::CAUSAL, ..problem(5, 8) };
    for pass in PASSES {
        let travels = Some(Travels::Queries);
        let time = |method| predict(&problem, method, pass, travels, &machine(2), false).unwrap();
        let heads = time(Method::Heads { inner: 1 });
        let ring = time(Method::Travel(Family::Ring));
        assert_eq!((heads.seconds, heads.sent()), (ring.seconds, ring.sent()));
        assert!(heads.timeline.is_empty());
    }
}

#[test]
fn heads_that_cannot_be_divided_are_errors() {
    let error = |world_size, inner| {
        let method = Method::Heads { inner };
        let problem = problem(world_size, 8);
        predict(&problem, method, Pass::Forward, None, &machine(8), false).unwrap_err().to_string()
    };
    assert_eq!(
        error(8, 8),
        "query heads must be a multiple of the 8 ranks that divide them, got 4"
    );
    assert!(error(8, 3).contains("a divisor of the number of ranks (8)"));
}
