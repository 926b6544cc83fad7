//! The delta rule: its kernels against the recurrence.

mod case;
mod runs;

use burst_attention_kernels::instances::{Element, Target};
use cutile_ir::Module;
use cutile_ir::bytecode::Opcode::{If, MmaF, Select};
use cutile_ir::ir::{OpId, ValueProducer};

use crate::coverage::Group;
use crate::footprints::suffices;
use crate::linear::case::Decays;
use crate::linear::{near, rounding};
use crate::modules::find;
use crate::mutants::{force, reroute_all, swap};
use crate::world::Change;
use case::{CASE, Case, Exact};
use runs::{grad, inverse, keys, state};

/// Returns the error of transfers, relative to the identity, if it is within `bounds` roundings.
fn near_transfer(case: &Case, found: &[f32], exact: &[f64], bounds: f64) -> Result<f64, String> {
    let square = |error: f64| error * error;
    let errors = found.iter().zip(exact).map(|(found, exact)| square(f64::from(*found) - exact));
    let ratio = (errors.sum::<f64>() / (exact.len() / case.head_dim) as f64).sqrt();
    let ratio = ratio / bounds / rounding(case.element);
    // NaN is no such error.
    if ratio <= 1.0 { Ok(ratio) } else { Err(format!("transfer is off by {ratio:.2} bounds")) }
}

fn compare(
    case: &Case,
    found: &[Vec<f32>],
    bounds: f64,
    of: impl Fn(&Exact) -> Vec<(&'static str, &Vec<f64>)>,
) -> Result<f64, String> {
    let exact = case.exact(&case.inputs());
    let bound = bounds * rounding(case.element);
    let ratios = of(&exact)
        .into_iter()
        .zip(found)
        .map(|((name, exact), found)| near(name, found, exact, bound));
    ratios.collect::<Result<Vec<_>, _>>().map(|ratios| ratios.into_iter().fold(0.0, f64::max))
}

fn check_inverse(case: &Case, change: Change) -> Result<f64, String> {
    let found = inverse(case, change)?;
    compare(case, &found, 1.0, |exact| vec![("inverse", &exact.inverse)])
}

fn check_states(case: &Case, change: Change) -> Result<f64, String> {
    let found = state(case, false, change)?;
    let transfer = &case.exact(&case.inputs()).states[1];
    let of_transfer = near_transfer(case, &found[1], transfer, case.bounds())?;
    let of_state = compare(case, &found, case.bounds(), |exact| vec![("state", &exact.states[0])])?;
    Ok(of_state.max(of_transfer))
}

fn check_values(case: &Case, change: Change) -> Result<f64, String> {
    let found = state(case, true, change)?;
    compare(case, &found, case.bounds(), |exact| vec![("u", &exact.u)])
}

fn check_gradients(case: &Case, change: Change) -> Result<f64, String> {
    let found = grad(case, false, change)?;
    let transfer = &case.exact(&case.inputs()).gradients[1];
    let of_transfer = near_transfer(case, &found[1], transfer, case.bounds())?;
    let of_state =
        compare(case, &found, case.bounds(), |exact| vec![("gradient", &exact.gradients[0])])?;
    Ok(of_state.max(of_transfer))
}

fn check_changes(case: &Case, change: Change) -> Result<f64, String> {
    let found = grad(case, true, change)?;
    compare(case, &found, case.bounds(), |exact| vec![("dy", &exact.dy)])
}

fn check_keys(case: &Case, change: Change) -> Result<f64, String> {
    let found = keys(case, change)?;
    let of_keys = compare(case, &found, case.bounds(), |exact| vec![("dk", &exact.dk)])?;
    // Terms of a product by row cancel.
    let bounds = 2.0 * case.bounds();
    Ok(of_keys.max(compare(case, &found[1..], bounds, |exact| vec![("dots", &exact.dots)])?))
}

type Check = fn(&Case, Change) -> Result<f64, String>;
const CHECKS: [Check; 6] =
    [check_inverse, check_states, check_values, check_gradients, check_changes, check_keys];

fn check_all(cases: &[Case], change: Change) {
    let mut worst = 0f64;
    for case in cases {
        for check in CHECKS {
            let found = check(case, change);
            worst = worst.max(found.unwrap_or_else(|error| panic!("{case:?}: {error}")));
        }
    }
    assert!(worst > 0.5, "bounds that say little: {worst}");
}

#[test]
fn tokens_get_what_the_recurrence_gives_them() {
    let f16 = Element::F16;
    let cases = [
        CASE,
        Case { rows: 1, ..CASE },
        Case { rows: 64, heads: 1, batch: 1, ..CASE },
        Case { rows: 201, element: f16, decays: Decays::Random(0.3), ..CASE },
        Case { decays: Decays::All(0.0), rows: 257, part: 320, batch: 1, ..CASE },
        Case { decays: Decays::Random(40.0), ..CASE },
        Case { decays: Decays::Resets(7), ..CASE },
        Case { rate: 2.0, batch: 1, ..CASE },
        Case { alike: 0.7, decays: Decays::All(0.0), batch: 1, ..CASE },
        Case { alike: 0.7, rate: 2.0, element: f16, batch: 1, ..CASE },
    ];
    check_all(&cases, Change::None);
}

/// Decays from almost none to e⁻²⁰ a token, and resets.
#[test]
fn channels_have_decays_of_their_own() {
    let of_channels = Case { of_channels: true, decays: Decays::Random(3.0), ..CASE };
    let slow = Decays::Random(0.02);
    let cases = [
        of_channels,
        Case { rows: 1, ..of_channels },
        Case { rows: 201, element: Element::F16, decays: slow, batch: 1, ..of_channels },
        Case { decays: Decays::All(-28.9), batch: 1, ..of_channels },
        Case { decays: Decays::Random(60.0), batch: 1, heads: 1, ..of_channels },
        Case { decays: Decays::Resets(7), batch: 1, ..of_channels },
        Case { rate: 2.0, decays: slow, batch: 1, ..of_channels },
        Case { alike: 0.7, decays: slow, batch: 1, ..of_channels },
        Case { limit: 80_000, rows: 300, part: 64, batch: 1, ..of_channels },
    ];
    check_all(&cases, Change::None);
    check_all(&[of_channels], Change::Before(suffices));
}

/// Tokens before a reset at the beginning of a tile change no bit behind it, even with NaN or with a
/// state of NaN.
#[test]
fn a_reset_at_a_tile_stops_what_is_not_finite() {
    const RESET: usize = 64;
    let clean = Case { part: 192, batch: 1, decays: Decays::Resets(RESET + 1), ..CASE };
    let clean = Case { rows: 128, ..clean };
    let values = state(&clean, true, Change::None).expect("results");
    let parts = state(&clean, false, Change::None).expect("results");
    for spoilt in [Some(10), None] {
        let case = Case { spoilt, spoils_states: spoilt.is_none(), ..clean };
        let found = state(&case, true, Change::None).expect("results");
        let row = clean.heads * clean.value_dim;
        assert!(found[0].iter().any(|x| !x.is_finite()), "{case:?}: it is nowhere");
        assert!(found[0][RESET * row..] == values[0][RESET * row..], "{case:?}: values");
        assert!(state(&case, false, Change::None).expect("results") == parts, "{case:?}: states");
    }
}

#[test]
#[ignore = "takes long: make test-full"]
fn columns_of_any_width_and_of_several_tiles() {
    let small = Case { batch: 1, heads: 2, rows: 70, ..CASE };
    let dims = [(64, 64), (128, 128), (96, 200), (256, 8), (8, 256)];
    let cases = dims.map(|(head_dim, value_dim)| Case { head_dim, value_dim, ..small });
    check_all(&cases, Change::None);
    // Tiles of fewer columns.
    let wide = Case { head_dim: 96, value_dim: 200, ..small };
    check_all(&[Target::Sm80, Target::Sm120].map(|target| Case { target, ..wide }), Change::None);
    let decays = Decays::Random(0.02);
    let of_channels = Case { of_channels: true, decays, value_dim: 104, ..wide };
    let targets = [Target::Sm80, Target::Sm90, Target::Sm120];
    check_all(&targets.map(|target| Case { target, ..of_channels }), Change::None);
}

#[test]
fn large_arrays_are_cut_by_entries_and_by_parts() {
    let by_part = Case { limit: 20_000, rows: 300, part: 64, batch: 1, ..CASE };
    check_all(&[Case { limit: 40_000, ..CASE }, by_part], Change::None);
}

/// States, and gradients of states, beyond the range of float16.
#[test]
fn states_may_be_larger_than_float16() {
    let case = Case { element: Element::F16, key: 1e-3, start: 1e5, ..CASE };
    let unbounded = Change::Launch(|launch| force(launch, "bounded", 0));
    for check in [check_values, check_changes] {
        check(&case, Change::None).unwrap_or_else(|error| panic!("{error}"));
        check(&case, unbounded).expect_err("something is beyond float16");
    }
}

/// Products of values with gradients of outputs beyond the range of float16.
#[test]
fn weights_may_be_larger_than_float16() {
    let large = Case { element: Element::F16, query: 1e-3, value: 300.0, batch: 1, ..CASE };
    let unbounded = Change::Launch(|launch| force(launch, "bounded", 0));
    for case in [large, Case { of_channels: true, ..large }] {
        check_keys(&case, Change::None).unwrap_or_else(|error| panic!("{error}"));
        check_keys(&case, unbounded).expect_err("something is beyond float16");
    }
}

/// Returns the branches that the argument `bounded`, the last one, decides.
fn bounded_branches(module: &Module) -> Vec<OpId> {
    let region = module.op(module.functions[0]).regions[0];
    let arguments = &module.block(module.region(region).blocks[0]).args;
    let (bounded, _) = *arguments.last().expect("arguments");
    let mut branches = find(module, If);
    branches.retain(|&id| match module.value_data(module.op(id).operands[0]).producer {
        ValueProducer::OpResult { op, .. } => module.op(op).operands.contains(&bounded),
        ValueProducer::BlockArg { .. } => false,
    });
    branches
}

/// Makes products of keys leave out the `N`-th step of those that keep them within float16, if there
/// are so many.
fn skip_step<const N: usize>(module: &mut Module) {
    if let Some(&id) = bounded_branches(module).get(N) {
        let op = module.op_mut(id);
        op.regions[0] = op.regions[1];
    }
}

/// Cases in which pairs of tokens, and states, are larger than float16, and the results are not.
const LARGE: [Case; 2] = {
    let case = Case { element: Element::F16, batch: 1, heads: 1, ..CASE };
    [
        Case { query: 1e-3, value: 300.0, start: 25.0, ..case },
        Case { key: 1e-6, value: 1e-3, start: 1e5, rate: 0.2, ..case },
    ]
};

/// The gradient of keys needs each step that scales a product down or up again. The first of the
/// kernel for heads alone makes no difference here: it finds the bound of pairs of values, which
/// bound the result as well, so they exceed 2¹⁵ but not float16.
#[test]
fn every_step_that_bounds_products_of_keys_counts() {
    const STEPS: [fn(&mut Module); 12] = [
        skip_step::<0>,
        skip_step::<1>,
        skip_step::<2>,
        skip_step::<3>,
        skip_step::<4>,
        skip_step::<5>,
        skip_step::<6>,
        skip_step::<7>,
        skip_step::<8>,
        skip_step::<9>,
        skip_step::<10>,
        skip_step::<11>,
    ];
    for (of_channels, counts) in [(false, 1..12), (true, 0..11)] {
        let cases = LARGE.map(|case| Case { of_channels, ..case });
        for case in &cases {
            check_keys(case, Change::None).unwrap_or_else(|error| panic!("{error}"));
        }
        let notices =
            |step| cases.iter().any(|case| check_keys(case, Change::Module(step)).is_err());
        let found: Vec<_> = (0..12).filter(|&n| notices(STEPS[n])).collect();
        assert_eq!(found, counts.collect::<Vec<_>>(), "of channels: {of_channels}");
    }
}

#[test]
fn launches_touch_what_their_footprints_say() {
    check_all(&[CASE, Case { limit: 40_000, ..CASE }], Change::Before(suffices));
}

/// Parts of one tile and of two; and one tile in float16, which is bounded.
#[test]
fn branches_and_loops_go_every_way() {
    let case = Case { batch: 1, heads: 1, ..CASE };
    let channels = Case { of_channels: true, decays: Decays::Random(3.0), ..case };
    Group::DeltaRule.assert_reached(|| {
        for (element, rows) in [(Element::Bf16, 150), (Element::F16, 40)] {
            check_all(&[case, channels].map(|case| Case { element, rows, ..case }), Change::None);
        }
    });
}

#[test]
fn every_mistake_is_found() {
    let same = Case { decays: Decays::Random(0.5), ..CASE };
    let even = Case { value_dim: 16, ..same };
    let alike = Case { alike: 0.7, rate: 2.0, ..same };
    let short = Case { part: 64, ..same };
    let channels = Case { of_channels: true, decays: Decays::Random(1.0), ..CASE };
    type Mutant = (&'static str, Check, Case, Change);
    #[rustfmt::skip]
    let mutants: [Mutant; 31] = [
        ("inverse: decays and rates swapped", check_inverse, same, Change::Launch(|l| swap(l, "sums", "beta"))),
        ("inverse: a token too few", check_inverse, same, Change::Launch(|l| force(l, "rows", 149))),
        ("inverse: no mask", check_inverse, same, Change::Module(|m| reroute_all(m, Select, 2, 1))),
        ("inverse: no quarter", check_inverse, same, Change::Module(|m| reroute_all(m, Select, 1, 2))),
        ("inverse: a product the other way", check_inverse, alike, Change::Module(|m| {
            let product = find(m, MmaF)[2];
            m.op_mut(product).operands.swap(0, 1);
        })),
        ("inverse: no correction", check_inverse, alike, Change::Module(|m| {
            let [first, last] = [find(m, MmaF)[3], find(m, MmaF)[5]];
            let rough = m.op(first).operands[2];
            m.op_mut(last).operands[1] = m.op(last).operands[0];
            m.op_mut(last).operands[2] = rough;
        })),
        ("state: decays and rates swapped", check_states, same, Change::Launch(|l| swap(l, "sums", "beta"))),
        ("state: k and v swapped", check_values, even, Change::Launch(|l| swap(l, "k", "v"))),
        ("state: parts too long", check_states, short, Change::Launch(|l| force(l, "part_tiles", 2))),
        ("state: a token too few", check_states, same, Change::Launch(|l| force(l, "rows", 149))),
        ("state: values in the transfer", check_states, same, Change::Module(|m| reroute_all(m, Select, 1, 2))),
        ("state: u not written", check_values, same, Change::Launch(|l| force(l, "has_u", 0))),
        ("state: no transfer", check_states, same, Change::Launch(|l| force(l, "has_transfer", 0))),
        ("grad: q and k swapped", check_gradients, same, Change::Launch(|l| swap(l, "q", "k"))),
        ("grad: decays and rates swapped", check_changes, same, Change::Launch(|l| swap(l, "sums", "beta"))),
        ("grad: no mask", check_changes, same, Change::Module(|m| reroute_all(m, Select, 2, 1))),
        ("grad: dy not written", check_changes, same, Change::Launch(|l| force(l, "has_dy", 0))),
        ("grad: parts too long", check_gradients, short, Change::Launch(|l| force(l, "part_tiles", 2))),
        ("keys: dout and dv swapped", check_keys, same, Change::Launch(|l| swap(l, "dout", "dv"))),
        ("keys: q and k swapped", check_keys, same, Change::Launch(|l| swap(l, "q", "k"))),
        ("keys: no mask", check_keys, same, Change::Module(|m| reroute_all(m, Select, 2, 1))),
        ("channels: inverse with its diagonal", check_inverse, channels, Change::Module(|m| {
            let diagonal = find(m, Select)[0];
            m.op_mut(diagonal).operands.swap(1, 2);
        })),
        ("channels: pairs and rates swapped", check_inverse, channels, Change::Launch(|l| swap(l, "pairs", "beta"))),
        ("channels: state with k in place of kh", check_states, channels, Change::Launch(|l| swap(l, "k", "kh"))),
        ("channels: totals of another tile", check_states, channels, Change::Launch(|l| force(l, "sums_batch_stride", 64))),
        ("channels: grad with k in place of kh", check_changes, channels, Change::Launch(|l| swap(l, "k", "kh"))),
        ("channels: grad with q and k swapped", check_gradients, channels, Change::Launch(|l| swap(l, "q", "k"))),
        ("channels: keys meet queries", check_keys, channels, Change::Launch(|l| swap(l, "met", "keys_met"))),
        ("channels: what meets and decays swapped", check_keys, channels, Change::Launch(|l| swap(l, "met", "fades"))),
        ("channels: dout and dv swapped", check_keys, channels, Change::Launch(|l| swap(l, "dout", "dv"))),
        ("keys: state of another part", check_keys, short, Change::Launch(|l| force(l, "part_tiles", 2))),
    ];
    let mut missed = vec![];
    for (name, check, case, change) in mutants {
        check(&case, Change::None).unwrap_or_else(|error| panic!("{name} without it: {error}"));
        if let Ok(found) = check(&case, change) {
            missed.push((name, found));
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}
