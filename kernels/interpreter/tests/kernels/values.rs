//! Every kernel over one list of cases.

use burst_attention_kernels::instances::{Element::*, Instance, Kernel, Target};
use burst_attention_kernels::kernel::Role;
use burst_attention_kernels::variant::Variant;
use std::collections::HashSet;

use super::case::{CASE, CAUSAL, Case, NONE, round};
use super::features::DOCUMENTS;
use super::problem::{Found, Problem};
use super::reference::dense;
use super::world::Change;
use super::{combine_softmax, fold_result, forward, gradients, rows};

type Check = fn(&Problem, Change) -> Result<Found, String>;

const CHECKS: [(Kernel, Check); 10] = [
    (Kernel::Forward, forward::check),
    (Kernel::KeyGrads, gradients::check_keys),
    (Kernel::QueryGrads, gradients::check_queries),
    (Kernel::Delta, rows::check_delta),
    (Kernel::Cast, rows::check_cast),
    (Kernel::Accumulate, rows::check_accumulate),
    (Kernel::AddGradient, rows::check_add_gradient),
    (Kernel::PackLse, rows::check_pack_lse),
    (Kernel::CombineSoftmax, combine_softmax::check),
    (Kernel::FoldResult, fold_result::check),
];

/// Runs all kernels over all cases, and returns the number of launches of each. A case that kernels
/// for rows do not suit runs the attention passes only.
pub fn check(cases: &[Case]) -> Vec<[usize; CHECKS.len()]> {
    check_with(cases, Change::None)
}

/// Runs all kernels over all cases with a change or a look at each launch, and returns the number
/// of launches of each.
pub fn check_with(cases: &[Case], change: Change) -> Vec<[usize; CHECKS.len()]> {
    let mut worst = [0f64; CHECKS.len()];
    let mut launches = vec![];
    for case in cases {
        let problem = Problem::new(*case);
        let mut counts = [0; CHECKS.len()];
        for (n, (kernel, check)) in CHECKS.into_iter().enumerate() {
            if !case.suits_rows() && kernel.spec().role == Role::Rows {
                continue;
            }
            let found = check(&problem, change)
                .unwrap_or_else(|error| panic!("{}: {error}\n{case:?}", kernel.name()));
            worst[n] = worst[n].max(found.worst);
            counts[n] = found.launches;
            println!("{} {:.2} {case:?}", kernel.name(), found.worst);
        }
        launches.push(counts);
    }
    for ((kernel, _), worst) in CHECKS.iter().zip(worst) {
        println!("{}: worst ratio {worst:.2}, of 2 allowed", kernel.name());
    }
    launches
}

#[test]
#[ignore = "takes long: make test-full"]
fn head_dims_and_elements() {
    let wide = Case { q_len: 70, kv_len: 90, heads: 2, band: (i64::MIN, 20), ..CASE };
    let dims = [
        (8, Bf16),
        (40, F16),
        (64, Bf16),
        (72, Bf16),
        (96, F16),
        (128, Bf16),
        (160, F16),
        (192, Bf16),
        (248, Bf16),
        (256, F16),
    ];
    check(&dims.map(|(head_dim, element)| Case {
        head_dim,
        element,
        kv_heads: 1 + head_dim % 16 / 8,
        ..wide
    }));
}

#[test]
#[ignore = "takes long: make test-full"]
fn groups_and_batches() {
    let group = |batch, heads, kv_heads| Case {
        batch,
        heads,
        kv_heads,
        head_dim: 16,
        band: CAUSAL,
        ..CASE
    };
    check(&[
        group(1, 8, 1),
        group(2, 8, 2),
        group(3, 3, 3),
        Case { element: F16, q_len: 30, ..group(2, 4, 1) },
    ]);
    check(&[Case { margin: 0, ..group(2, 4, 2) }]);
}

#[test]
fn lengths() {
    let lengths =
        [(1, 1), (1, 200), (200, 1), (128, 128), (129, 257), (300, 77), (31, 300), (5, 0), (0, 5)];
    check(&lengths.map(|(q_len, kv_len)| Case { q_len, kv_len, head_dim: 32, ..CASE }));
    let causal =
        lengths.map(|(q_len, kv_len)| Case { q_len, kv_len, head_dim: 32, band: CAUSAL, ..CASE });
    check(&causal);
}

#[test]
fn bands() {
    let bands = [
        (i64::MIN, 57),
        (i64::MIN, -57),
        (i64::MIN, -129),
        (-40, i64::MAX),
        (130, i64::MAX),
        (-20, 0),
        (-3, 5),
        (60, 70),
        (-200, -150),
        (0, 0),
        (-300, 300),
        (NONE.0, -500),
        (5, 4),
    ];
    check(&bands.map(|band| Case {
        q_len: 290,
        kv_len: 270,
        head_dim: 24,
        band,
        second: false,
        ..CASE
    }));
}

#[test]
fn large_logits_and_scales() {
    let large = Case { magnitude: 2500.0, head_dim: 64, band: CAUSAL, ..CASE };
    assert!(Problem::new(large).exact.largest > 9e3);
    check(&[large, Case { element: F16, magnitude: 20.0, ..large }]);
    let scaled = |scale| Case { softmax_scale: Some(scale), band: CAUSAL, ..CASE };
    check(&[scaled(1.0), scaled(0.01), Case { element: F16, ..scaled(0.3) }]);
}

#[test]
#[ignore = "takes long: make test-full"]
fn steps_carry_their_state() {
    const ORDERS: [&[(usize, usize)]; 4] = [
        &[(0, 100), (100, 300)],
        &[(200, 300), (0, 64), (64, 200)],
        &[(128, 300), (0, 128)],
        &[(0, 300)],
    ];
    let long =
        Case { q_len: 300, kv_len: 300, head_dim: 32, heads: 2, margin: 4, band: CAUSAL, ..CASE };
    for finished in [true, false] {
        check(&ORDERS.map(|steps| Case { steps, finished, ..long }));
    }
    check(&[Case { steps: ORDERS[1], band: (-50, 20), batch: 2, element: F16, ..long }]);
    // No query sees a key from 50 on, and no query before 250 sees a key. So the first or the last
    // step only starts the state, or only writes the results.
    for finished in [true, false] {
        let idle = Case { band: (i64::MIN, -250), finished, ..long };
        check(&[Case { steps: ORDERS[0], ..idle }, Case { steps: ORDERS[2], ..idle }]);
    }
}

#[test]
#[ignore = "takes long: make test-full"]
fn large_problems_are_cut_by_batch_rows_and_keys() {
    let cut =
        Case { batch: 2, q_len: 300, kv_len: 300, heads: 2, kv_heads: 2, limit: 70_000, ..CASE };
    let launches = check(&[
        cut,
        Case { band: CAUSAL, ..cut },
        Case { band: (-30, -10), steps: &[(128, 300), (0, 128)], ..cut },
    ]);
    // 128 rows of float32 arrays fit the limit, and 256 rows of activations.
    assert_eq!(launches[0], [12, 18, 12, 6, 6, 6, 6, 1, 6, 6]);
    // Two of three entries fit the limit.
    let small = Case { batch: 3, q_len: 40, kv_len: 40, limit: 60_000, ..cut };
    let launches = check(&[small]);
    assert_eq!(launches[0][0], 2);
}

/// Runs tiles of other targets, each shape once, because the results depend on the shape alone.
#[test]
#[ignore = "takes long: make test-full"]
fn tile_shapes_of_all_targets() {
    let mut seen: HashSet<_> = HashSet::new();
    let of = |target| Instance::of_target(target).filter(|instance| instance.element == Bf16);
    for instance in of(Target::Sm90).chain(Target::ALL.into_iter().flat_map(of)) {
        let tile = instance.tile();
        let fresh = seen.insert((instance.kernel, instance.width, tile.rows, tile.keys));
        if !fresh || instance.target == Target::Sm90 {
            continue;
        }
        let check = CHECKS.into_iter().find(|(kernel, _)| *kernel == instance.kernel);
        let Some((_, check)) = check else { continue };
        let head_dim = instance.width as usize - 8;
        let all = instance.variant == Variant::GENERAL;
        let case = Case {
            target: instance.target,
            head_dim,
            q_len: 140,
            kv_len: 150,
            band: (-90, 10),
            segments: all.then_some((DOCUMENTS, DOCUMENTS)),
            soft_cap: if all { 5.0 } else { 0.0 },
            slopes: all,
            dropout: all.then_some(0.2),
            positions: (0, 7, 1),
            ..CASE
        };
        let found = check(&Problem::new(case), Change::None);
        let found = found.unwrap_or_else(|error| panic!("{instance}: {error}"));
        println!("{instance} {:.2}", found.worst);
    }
}

/// Runs forward pass, statistics and gradients. Each reads the results of the kernel before it.
#[test]
fn passes_follow_each_other() {
    let whole = Case {
        q_len: 170,
        kv_len: 150,
        heads: 4,
        kv_heads: 2,
        batch: 2,
        head_dim: 40,
        band: (-100, -3),
        ..CASE
    };
    let general = Case { segments: Some((DOCUMENTS, DOCUMENTS)), soft_cap: 3.0, ..whole };
    let general = Case { value_dim: Some(24), slopes: true, positions: (20, 0, 1), ..general };
    let general = Case { dropout: Some(0.25), ..general };
    for case in [whole, Case { element: F16, band: CAUSAL, ..whole }, general] {
        let mut problem = Problem::new(case);
        let stored = |o| round(case.element, o);
        problem.plain = dense::<f32>(&case, &problem.inputs, stored);
        let fail = |error| panic!("{error}\n{case:?}");
        let (outputs, _) = forward::run(&problem, 3, Change::None).unwrap_or_else(fail);
        [problem.saved.o, problem.saved.lse] = outputs.try_into().expect("two outputs");
        let (outputs, _) = rows::run_delta(&problem, 3, Change::None).unwrap_or_else(fail);
        [problem.saved.lse_log2, problem.saved.delta] = outputs.try_into().expect("two outputs");
        for check in [gradients::check_keys, gradients::check_queries] {
            let found =
                check(&problem, Change::None).unwrap_or_else(|error| panic!("{error}\n{case:?}"));
            println!("all passes {:.2} {case:?}", found.worst);
        }
    }
}
