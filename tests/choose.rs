//! Which schedule the simulator chooses, and how close its estimates for many ranks are.

mod common;

use burst_attention::problem::{Dtype, Pass, Problem};
use burst_attention::schedule::Family;
use burst_attention::simulate::{
    Choice, Cost, Link, Machine, Method, Speed, choose, cost, named, predict,
};
use burst_attention::{Layout, Window};
use common::needs::families_with_inner;

/// A contiguous causal problem with heads of 128 elements in bfloat16.
fn problem(world_size: usize, n: usize, heads: usize, kv_heads: usize) -> Problem {
    let (batch, head_dim, value_dim, dtype) = (1, 128, 128, Dtype::Bf16);
    let (layout, window) = (Layout::Contiguous, Window::CAUSAL);
    let base = Problem { heads, kv_heads, head_dim, value_dim, ..common::problem(world_size, n) };
    Problem { batch, dtype, layout, window, ..base }
}

/// H200s in nodes of eight, with kernels as fast as cuDNN's. The predicted rates of our own kernels
/// change with the kernels.
fn h200() -> Machine {
    let mut machine = named()[1].machine.clone();
    machine.kernels.forward = Speed::Rate(644e12);
    machine.kernels.backward = Speed::Rate(541e12);
    machine.kernels.launch = 5e-6;
    machine
}

fn chosen(problem: &Problem, inner: Option<usize>, machine: &Machine) -> (&'static str, Choice) {
    let choice = choose(problem, inner, None, machine, |_| None).unwrap();
    (choice.candidates[choice.chosen].name, choice)
}

#[test]
fn causal_work_in_order_is_balanced_where_heads_cannot_be_divided() {
    let long = problem(8, 16384, 12, 4);
    let (name, choice) = chosen(&long, None, &h200());
    assert_eq!(name, "balanced", "{}", choice.reason);
    let words = choice.candidates[3].cost.as_ref().unwrap_err();
    assert_eq!(words, "query heads must be a multiple of the 8 ranks that divide them, got 12");
    // The zigzag layout balances the work.
    let (name, _) = chosen(&Problem { layout: Layout::Zigzag, ..long }, None, &h200());
    assert_eq!(name, "ring");
}

#[test]
fn many_heads_of_a_short_sequence_are_exchanged_over_fast_links() {
    let (name, choice) = chosen(&problem(8, 2048, 64, 64), None, &h200());
    assert_eq!(name, "ulysses", "{}", choice.reason);
    assert!(choice.reason.starts_with("ulysses takes "), "{}", choice.reason);
}

#[test]
fn windows_and_what_saves_little_take_the_ring() {
    let window = Window { left: Some(127), right: Some(0) };
    let (name, choice) = chosen(&Problem { window, ..problem(8, 8192, 32, 8) }, None, &h200());
    assert_eq!(name, "ring", "{}", choice.reason);
    let zigzag = Problem { layout: Layout::Zigzag, ..problem(8, 16384, 32, 8) };
    let (name, choice) = chosen(&zigzag, None, &h200());
    assert_eq!(name, "ring", "{}", choice.reason);
    // Another schedule is faster, by less than 3%.
    let seconds =
        |index: usize| choice.candidates[index].cost.as_ref().map_or(f64::MAX, |c| c.seconds);
    assert!(seconds(2).min(seconds(3)) < 1.1 * seconds(0));
}

/// From short shards to long ones, exchanging heads saves less and less.
#[test]
fn only_a_schedule_that_saves_more_than_3_percent_is_taken() {
    let (mut less, mut more) = (0, 0);
    for n in (2048..4096).step_by(128) {
        let problem = Problem { layout: Layout::Zigzag, ..problem(32, n, 64, 8) };
        let (name, choice) = chosen(&problem, None, &h200());
        let seconds =
            choice.candidates.iter().filter_map(|one| Some(one.cost.as_ref().ok()?.seconds));
        let seconds: Vec<f64> = seconds.collect();
        let saves = seconds[0] / seconds.iter().copied().fold(f64::MAX, f64::min);
        assert_eq!(name != "ring", saves > 1.03, "{n}: {saves}, {}", choice.reason);
        less += usize::from(saves > 1.0 && saves <= 1.03);
        more += usize::from(saves > 1.03 && saves < 1.2);
        println!("{n}: {saves}");
    }
    assert!(less > 0 && more > 0, "{less} {more}");
}

#[test]
fn slow_links_between_nodes_take_the_double_ring() {
    let mut machine = h200();
    machine.network.between = Link { latency: 20e-6, bandwidth: 12.5e9 };
    let zigzag = Problem { layout: Layout::Zigzag, ..problem(32, 8192, 32, 8) };
    let seconds = |method| cost(&zigzag, method, None, &machine).unwrap().seconds;
    let double = seconds(Method::Travel(Family::DoubleRing { inner: 8 }));
    assert!(2.0 * double < seconds(Method::Travel(Family::Ring)));
    let (name, choice) = chosen(&zigzag, Some(8), &machine);
    assert_eq!(choice.candidates[0].cost.as_ref().unwrap().seconds, double);
    assert_ne!(name, "all_gather", "{}", choice.reason);
    let odd = Problem { heads: 12, kv_heads: 4, ..zigzag };
    let (name, choice) = chosen(&odd, Some(8), &machine);
    assert_eq!(name, "ring", "{}", choice.reason);
    assert!(choice.candidates[1].cost.is_err());
}

#[test]
fn an_impossible_schedule_is_not_chosen_and_says_why() {
    let problem = problem(8, 2048, 64, 64);
    let refused = |name: &str| (name == "ulysses").then(|| "not here".to_owned());
    let choice = choose(&problem, None, None, &h200(), refused).unwrap();
    assert_ne!(choice.candidates[choice.chosen].name, "ulysses");
    assert_eq!(choice.candidates[3].cost.as_ref().unwrap_err(), "not here");
    assert!(choose(&problem, Some(3), None, &h200(), |_| None).is_err());
    let mut machine = h200();
    machine.kernels.forward = Speed::Rate(0.0);
    assert!(choose(&problem, None, None, &machine, |_| None).is_err());
}

/// Simulates both passes, whatever the number of ranks. Returns seconds, and bytes within nodes and
/// between nodes.
fn simulated(problem: &Problem, method: Method) -> [f64; 3] {
    simulated_on(&h200(), problem, method)
}

fn simulated_on(machine: &Machine, problem: &Problem, method: Method) -> [f64; 3] {
    let run = |pass| predict(problem, method, pass, None, machine, false).unwrap();
    let [forward, backward] = [Pass::Forward, Pass::Backward].map(run);
    let seconds = forward.seconds + backward.seconds;
    let sent = [forward.sent(), backward.sent()];
    let bytes = |of: fn(burst_attention::simulate::Bytes) -> u64| {
        sent.map(of).into_iter().sum::<u64>() as f64
    };
    [seconds, bytes(|sent| sent.within), bytes(|sent| sent.between)]
}

#[test]
#[ignore = "takes long: make test-full"]
fn estimates_for_many_ranks_are_within_a_tenth_of_the_simulation() {
    let methods = |world_size| {
        let families = families_with_inner(world_size, 8).map(Method::Travel);
        families.chain([8, world_size].map(|inner| Method::Heads { inner }))
    };
    let short = Window { left: Some(9000), right: Some(0) };
    for (world_size, n) in [(64, 8192), (88, 2048)] {
        for layout in [Layout::Contiguous, Layout::Zigzag] {
            for window in [Window::CAUSAL, Window::FULL, short] {
                let heads = 8 * world_size;
                let problem = Problem { layout, window, ..problem(world_size, n, heads, 8) };
                for method in methods(world_size) {
                    let found = cost(&problem, method, None, &h200()).unwrap();
                    assert!(found.estimated);
                    let all = simulated(&problem, method);
                    let sent = [found.sent.within as f64, found.sent.between as f64];
                    let what =
                        format!("{method:?} {world_size} {layout} {window:?}: {found:?}, {all:?}");
                    println!("{what}");
                    assert!((found.seconds / all[0] - 1.0).abs() < 0.1, "{what}");
                    let total = all[1] + all[2];
                    assert!((sent[0] + sent[1] - total).abs() < 0.1 * total, "{what}");
                }
            }
        }
    }
}

/// Units of 32 ranks are estimated from units of 8 and 16. Without a window, and where a window
/// ends within a unit, estimates are within 10%. In other windows they are within 15%: the worst
/// here is a double ring whose ranks share a slow link, 13.4% below the simulation.
#[test]
#[ignore = "takes long: make test-full"]
fn estimates_for_long_units_are_near_the_simulation() {
    let windows = [Window::CAUSAL, Window::FULL]
        .into_iter()
        .chain([1000, 70_000].map(|left| Window { left: Some(left), right: Some(0) }));
    let (inner, n) = (32, 2048);
    let mut slow = h200();
    slow.network.ranks_per_node = inner;
    slow.network.between.bandwidth = 5e9;
    let mut shared = slow.clone();
    (shared.network.shared, shared.network.between.bandwidth) = (true, 50e9);
    for (window, layout) in
        windows.flat_map(|w| [Layout::Contiguous, Layout::Zigzag].map(|l| (w, l)))
    {
        let problem = Problem { layout, window, ..problem(4 * inner, n, 4096, 512) };
        let families = families_with_inner(problem.world_size, inner);
        for (family, machine) in families.flat_map(|family| [(family, &slow), (family, &shared)]) {
            let method = Method::Travel(family);
            let what = format!("{family} {layout} {window:?} {}", machine.network.shared);
            let found = cost(&problem, method, None, machine).unwrap();
            assert!(found.estimated, "{what}");
            let all = simulated_on(machine, &problem, method);
            let tolerance = if window.left == Some(70_000) { 0.15 } else { 0.1 };
            let error = found.seconds / all[0] - 1.0;
            let total = (found.sent.within + found.sent.between) as f64 / (all[1] + all[2]) - 1.0;
            println!("{what}: {error:.4}, bytes {total:.4}");
            assert!(error.abs() < tolerance, "{what}: {found:?}, {all:?}");
            assert!(total.abs() < tolerance, "{what}: {found:?}, {all:?}");
        }
    }
}

/// One rank stands for each group, so only rounding is lost.
#[test]
fn groups_that_exchange_heads_are_estimated_as_they_are_simulated() {
    for (inner, layout) in [(4, Layout::Contiguous), (16, Layout::Zigzag), (64, Layout::Contiguous)]
    {
        let mut machine = h200();
        machine.network.ranks_per_node = inner;
        machine.network.shared = inner == 16;
        let problem = Problem { layout, ..problem(64, 512, 512, 64) };
        let method = Method::Heads { inner };
        let found = cost(&problem, method, None, &machine).unwrap();
        let all = simulated_on(&machine, &problem, method);
        assert!((found.seconds / all[0] - 1.0).abs() < 1e-9, "{inner}: {found:?}, {all:?}");
        assert_eq!([found.sent.within as f64, found.sent.between as f64], [all[1], all[2]]);
    }
}

/// An assertion in the product checks that no simulation has more than 144 ranks.
#[test]
#[ignore = "takes long: make test-full"]
fn worlds_of_any_shape_are_estimated_from_small_ones() {
    let half = Window { left: Some(2048 * 1024), right: Some(0) };
    let near = Window { left: Some(60_000), right: Some(60_000) };
    for (outer, inner) in
        [(8, 512), (64, 64), (2, 2048), (1024, 4), (1, 4096), (4096, 1), (3, 1000)]
    {
        for (layout, window) in
            [(Layout::Contiguous, Window::CAUSAL), (Layout::Striped, half), (Layout::Zigzag, near)]
        {
            let problem = Problem { layout, window, ..problem(outer * inner, 1024, 4096, 512) };
            let mut machine = h200();
            machine.network.ranks_per_node = inner;
            for inner in [None, Some(inner)] {
                let choice = choose(&problem, inner, None, &machine, |_| None).unwrap();
                let seconds = |cost: &Cost| cost.seconds.is_finite() && cost.seconds > 0.0;
                let ring = choice.candidates[0].cost.as_ref().unwrap();
                assert!(seconds(ring) && ring.estimated, "{outer} {inner:?} {layout} {window:?}");
            }
        }
    }
}
