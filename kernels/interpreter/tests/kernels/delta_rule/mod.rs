//! The delta rule: its kernels against the recurrence.

mod case;

use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{
    DeltaGrad, DeltaInverse, DeltaKeys, DeltaResults, DeltaState, DeltaTokens, LINEAR_TILE, Launch,
    LaunchError, column_tiles,
};
use cutile_ir::bytecode::Opcode::{MmaF, Select};

use crate::footprints::suffices;
use crate::linear::case::Decays;
use crate::linear::{near, rounding, twice};
use crate::modules::find;
use crate::mutants::{force, reroute_all, swap};
use crate::world::{Array, Change, Scalar, Stores, World};
use case::{CASE, Case, Exact, Inputs};

/// Inputs in memory, and the arrays of results.
struct Arrays {
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    sums: Array,
    beta: Array,
    inverse: Array,
    before: Array,
    values: Array,
    state: Array,
    transfer: Array,
}

fn at(array: &Array) -> u64 {
    array.rows(0).address
}

impl Arrays {
    fn new(case: &Case, inputs: &Inputs, world: &mut World) -> Arrays {
        let Case { batch, rows, heads, head_dim, value_dim, element, .. } = *case;
        let activations = Scalar::Activation(element);
        let mut tokens = |name, dim| world.rows(name, activations, [batch, rows, heads, dim], 0);
        let (q, k) = (tokens("q", head_dim), tokens("k", head_dim));
        let (v, dout) = (tokens("v", value_dim), tokens("dout", value_dim));
        let (inverse, values) = (tokens("inverse", LINEAR_TILE), tokens("values", value_dim));
        let count = batch * case.parts() * heads * head_dim;
        let mut floats = |name, rows, dim| world.rows(name, Scalar::F32, [1, rows, 1, dim], 0);
        let arrays = Arrays {
            q,
            k,
            v,
            dout,
            inverse,
            values,
            sums: floats("sums", batch * heads, case.padded()),
            beta: floats("beta", batch * heads, case.padded()),
            before: floats("before", count, value_dim),
            state: floats("state", count, value_dim),
            transfer: floats("transfer", count, head_dim),
        };
        let memory = &mut world.memory;
        for (array, values) in [
            (&arrays.q, &inputs.q),
            (&arrays.k, &inputs.k),
            (&arrays.v, &inputs.v),
            (&arrays.dout, &inputs.dout),
        ] {
            array.fill(memory, 0..rows, values);
        }
        arrays.sums.fill(memory, 0..batch * heads, &case.sums(inputs));
        arrays.beta.fill(memory, 0..batch * heads, &case.rates(inputs));
        arrays.before.fill(memory, 0..count, &inputs.before);
        arrays
    }

    fn tokens(&self, case: &Case) -> DeltaTokens {
        DeltaTokens {
            batch: case.batch,
            rows: case.rows,
            heads: case.heads,
            head_dim: case.head_dim,
            value_dim: case.value_dim,
            element: case.element,
            part_rows: case.part,
            k: at(&self.k),
            sums: at(&self.sums),
            beta: at(&self.beta),
            inverse: at(&self.inverse),
        }
    }

    fn results(&self, of_tokens: bool) -> DeltaResults {
        if of_tokens {
            DeltaResults::Tokens { before: at(&self.before), values: at(&self.values) }
        } else {
            DeltaResults::Parts { state: at(&self.state), transfer: at(&self.transfer) }
        }
    }

    fn inputs(&self) -> [&Array; 7] {
        [&self.q, &self.k, &self.v, &self.dout, &self.sums, &self.beta, &self.before]
    }

    /// Checks which arrays launches stored, and returns the results.
    fn stored(&self, world: &World, results: &[&Array]) -> Result<Vec<Vec<f32>>, String> {
        world.audit(&self.inputs().map(|array| (array, Stores::Never)))?;
        let once: Vec<_> = results.iter().map(|&array| (array, Stores::Exactly(1))).collect();
        world.audit(&once)?;
        Ok(results.iter().map(|array| array.read(&world.memory)).collect())
    }
}

fn run(world: &mut World, launches: Result<Vec<Launch>, LaunchError>) -> Result<(), String> {
    world.run(launches.map_err(|error| error.to_string())?, |_| None)
}

/// Computes the inverses by kernels without a fault.
fn solve(case: &Case, arrays: &Arrays, world: &mut World) -> Result<(), String> {
    let change = std::mem::replace(&mut world.change, Change::None);
    let description = DeltaInverse { tokens: arrays.tokens(case) };
    run(world, description.launches_within(case.target, case.limit))?;
    world.change = change;
    Ok(())
}

fn inverse(case: &Case, change: Change) -> Result<Vec<Vec<f32>>, String> {
    let inputs = case.inputs();
    twice(change, |world| {
        let arrays = Arrays::new(case, &inputs, world);
        let description = DeltaInverse { tokens: arrays.tokens(case) };
        run(world, description.launches_within(case.target, case.limit))?;
        arrays.stored(world, &[&arrays.inverse])
    })
}

/// Returns corrected values, or states and transfers.
fn state(case: &Case, of_tokens: bool, change: Change) -> Result<Vec<Vec<f32>>, String> {
    let inputs = case.inputs();
    twice(change, |world| {
        let arrays = Arrays::new(case, &inputs, world);
        solve(case, &arrays, world)?;
        let (tokens, results) = (arrays.tokens(case), arrays.results(of_tokens));
        let description = DeltaState { tokens, v: at(&arrays.v), results };
        run(world, description.launches_within(case.target, case.limit))?;
        stored_pass(&arrays, world, of_tokens)
    })
}

/// Returns dY, or gradients of states and their transfers.
fn grad(case: &Case, of_tokens: bool, change: Change) -> Result<Vec<Vec<f32>>, String> {
    let inputs = case.inputs();
    twice(change, |world| {
        let arrays = Arrays::new(case, &inputs, world);
        solve(case, &arrays, world)?;
        let (tokens, results) = (arrays.tokens(case), arrays.results(of_tokens));
        let (q, dout) = (at(&arrays.q), at(&arrays.dout));
        let description = DeltaGrad { tokens, q, dout, results };
        run(world, description.launches_within(case.target, case.limit))?;
        stored_pass(&arrays, world, of_tokens)
    })
}

fn stored_pass(arrays: &Arrays, world: &World, of_tokens: bool) -> Result<Vec<Vec<f32>>, String> {
    let Arrays { inverse, values, state, transfer, .. } = arrays;
    world.audit(&[(inverse, Stores::Exactly(1))])?;
    let (of_values, of_parts) = (vec![values], vec![state, transfer]);
    let (found, others) = if of_tokens { (of_values, of_parts) } else { (of_parts, of_values) };
    for array in others {
        world.audit(&[(array, Stores::Never)])?;
    }
    arrays.stored(world, &found)
}

/// Returns the gradient of keys, and its products with keys, from rounded results of the reference.
fn keys(case: &Case, change: Change) -> Result<Vec<Vec<f32>>, String> {
    let Case { batch, rows, heads, head_dim, value_dim, .. } = *case;
    let inputs = case.inputs();
    let exact = case.exact(&inputs);
    let found = twice(change, |world| {
        let arrays = Arrays::new(case, &inputs, world);
        let activations = Scalar::Activation(case.element);
        let mut of_values =
            |name| world.rows(name, activations, [batch, rows, heads, value_dim], 0);
        let (u, dv) = (of_values("u"), of_values("dv"));
        let dk = world.rows("dk", activations, [batch, rows, heads, head_dim], 0);
        let tiles = column_tiles(head_dim.max(value_dim), head_dim).expect("tiles");
        let dots = world.rows("dots", Scalar::F32, [1, batch * heads * tiles, 1, case.padded()], 0);
        let states = batch * case.parts() * heads;
        let shape = [1, states * value_dim, 1, head_dim];
        let turned = world.rows("turned", Scalar::F32, shape, 0);
        let memory = &mut world.memory;
        let narrow = |values: &[f64]| values.iter().map(|&x| x as f32).collect::<Vec<_>>();
        u.fill(memory, 0..rows, &narrow(&exact.u));
        let rate = |at: usize| f64::from(inputs.rates[at / value_dim]);
        let of_rates: Vec<f64> = exact.dy.iter().enumerate().map(|(i, x)| x * rate(i)).collect();
        dv.fill(memory, 0..rows, &narrow(&of_rates));
        let column = |n: usize, c: usize| {
            let state = &inputs.before[n * head_dim * value_dim..][..head_dim * value_dim];
            state.iter().skip(c).step_by(value_dim).copied().collect::<Vec<_>>()
        };
        let columns = (0..states).flat_map(|n| (0..value_dim).map(move |c| (n, c)));
        let values: Vec<f32> = columns.flat_map(|(n, c)| column(n, c)).collect();
        turned.fill(memory, 0..states * value_dim, &values);
        let description = DeltaKeys {
            tokens: arrays.tokens(case),
            q: at(&arrays.q),
            u: at(&u),
            dout: at(&arrays.dout),
            dv: at(&dv),
            turned: at(&turned),
            dk: at(&dk),
            dots: at(&dots),
        };
        run(world, description.launches_within(case.target, case.limit))?;
        world.audit(&[(&u, Stores::Never), (&dv, Stores::Never), (&turned, Stores::Never)])?;
        arrays.stored(world, &[&dk, &dots])
    })?;
    let tiles = column_tiles(head_dim.max(value_dim), head_dim).expect("tiles");
    let sums = (0..batch * heads).flat_map(|head| (0..rows).map(move |row| (head, row)));
    let sums = sums.map(|(head, row)| {
        (0..tiles).map(|tile| found[1][(head * tiles + tile) * case.padded() + row]).sum()
    });
    Ok(vec![found[0].clone(), sums.collect()])
}

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

#[test]
fn launches_touch_what_their_footprints_say() {
    check_all(&[CASE, Case { limit: 40_000, ..CASE }], Change::Before(suffices));
}

#[test]
fn every_mistake_is_found() {
    let same = Case { decays: Decays::Random(0.5), ..CASE };
    let even = Case { value_dim: 16, ..same };
    let alike = Case { alike: 0.7, rate: 2.0, ..same };
    let short = Case { part: 64, ..same };
    type Mutant = (&'static str, Check, Case, Change);
    #[rustfmt::skip]
    let mutants: [Mutant; 22] = [
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
