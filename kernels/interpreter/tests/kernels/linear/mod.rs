//! Linear attention: `linear_state` and `linear_attend` against the recurrence.

pub mod case;
pub mod channels;

use burst_attention_kernels::instances::Element;
use burst_attention_kernels::launch::{LinearAttend, column_tiles};
use cutile_ir::bytecode::Opcode::{LoadViewTko, Select};

use crate::footprints::suffices;
use crate::modules::find;
use crate::mutants::{force, reroute_all, swap};
use crate::world::{Array, Change, Stores, World};
use case::{Arrays, CASE, Case, Decays, Spoil, place};

/// Runs the launches in two orders of blocks, and returns what `read` returns.
pub fn twice(
    change: Change,
    run: impl Fn(&mut World) -> Result<Vec<Vec<f32>>, String>,
) -> Result<Vec<Vec<f32>>, String> {
    let [one, other] = [1, 2].map(|seed| run(&mut World::new(seed, change)));
    let (one, other) = (one?, other?);
    let bits = |found: &[Vec<f32>]| found.concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    match bits(&one) == bits(&other) {
        true => Ok(one),
        false => Err("another order of blocks gives other bits".into()),
    }
}

/// Returns the error's root mean square, relative to the exact result's, if it is within `bound`.
pub fn near(name: &str, got: &[f32], exact: &[f64], bound: f64) -> Result<f64, String> {
    assert_eq!(got.len(), exact.len(), "{name}");
    if let Some(at) = got.iter().position(|x| !x.is_finite()) {
        return Err(format!("element {at} of {name} is {}", got[at]));
    }
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let error = norm(&mut got.iter().zip(exact).map(|(got, exact)| f64::from(*got) - exact));
    let ratio = error / norm(&mut exact.iter().copied()) / bound;
    if ratio <= 1.0 { Ok(ratio) } else { Err(format!("{name} is off by {ratio:.2} bounds")) }
}

/// Returns the error of a rounding to the element type, which operands of products and results
/// have.
pub fn rounding(element: Element) -> f64 {
    match element {
        Element::Bf16 => 2f64.powi(-9),
        Element::F16 => 2f64.powi(-12),
    }
}

fn state(case: &Case, change: Change) -> Result<Vec<f32>, String> {
    let inputs = case.inputs();
    let found = twice(change, |world| {
        let arrays = place(case, &inputs, world);
        let Arrays { k, v, sums, state, .. } = &arrays;
        let launches = case
            .description([k, v, sums, state])
            .launches_within(case.target, case.limit)
            .map_err(|error| error.to_string())?;
        world.run(launches, |_| None)?;
        world.audit(&[k, v, sums].map(|array| (array, Stores::Never)))?;
        world.audit(&[(state, Stores::Exactly(1))])?;
        Ok(vec![state.read(&world.memory)])
    })?;
    Ok(found.concat())
}

fn check_state(case: &Case, change: Change) -> Result<f64, String> {
    let found = state(case, change)?;
    near("state", &found, &case.exact(&case.inputs(), true).0, rounding(case.element))
}

/// Returns the outputs, and their products with `other`.
fn attend(case: &Case, change: Change) -> Result<Vec<Vec<f32>>, String> {
    let Case { batch, heads, head_dim, .. } = *case;
    let inputs = case.inputs();
    twice(change, |world| {
        let arrays = place(case, &inputs, world);
        let states = batch * case.parts() * heads * head_dim;
        arrays.state.fill(&mut world.memory, 0..states, &inputs.before);
        let Arrays { q, k, v, other, sums, state, o, dots } = &arrays;
        let at = |array: &Array| array.rows(0).address;
        let description = LinearAttend {
            tokens: case.description([k, v, sums, state]),
            q_heads: case.q_heads,
            q: at(q),
            o: at(o),
            pairs: 0,
            levels: [0; 2],
            dots: Some((at(other), at(dots))),
            strict: case.strict,
        };
        let launches = description.launches_within(case.target, case.limit);
        world.run(launches.map_err(|error| error.to_string())?, |_| None)?;
        world.audit(&[q, k, v, other, sums, state].map(|array| (array, Stores::Never)))?;
        world.audit(&[o, dots].map(|array| (array, Stores::Exactly(1))))?;
        Ok(vec![o.read(&world.memory), dots.read(&world.memory)])
    })
}

fn check_attend(case: &Case, change: Change) -> Result<f64, String> {
    let Case { batch, rows, heads, head_dim, value_dim, .. } = *case;
    let found = attend(case, change)?;
    let (_, exact, exact_dots) = case.exact(&case.inputs(), false);
    let tiles = column_tiles(head_dim, value_dim).expect("tiles");
    let dots: Vec<f32> = (0..batch * heads)
        .flat_map(|head| (0..rows).map(move |row| (head, row)))
        .map(|(head, row)| {
            (0..tiles).map(|tile| found[1][(head * tiles + tile) * case.padded() + row]).sum()
        })
        .collect();
    // Weights, states and the result are rounded; dots come from the result before its rounding.
    let bound = 2.0 * rounding(case.element);
    Ok(near("o", &found[0], &exact, bound)?.max(near("dots", &dots, &exact_dots, bound)?))
}

type Check = fn(&Case, Change) -> Result<f64, String>;
const CHECKS: [Check; 2] = [check_state, check_attend];

fn check_all(cases: &[Case], change: Change) {
    let mut worst = 0f64;
    for case in cases {
        for check in CHECKS {
            let found = check(case, change);
            worst = worst.max(found.unwrap_or_else(|error| panic!("{case:?}: {error}")));
        }
    }
    assert!(worst > 0.3, "bounds that say little: {worst}");
}

/// Returns a case forward and in reverse, for all heads.
fn both_ways(case: Case) -> [Case; 2] {
    [case, Case { reverse: true, q_heads: case.kv_heads, kv_heads: case.q_heads, ..case }]
}

#[test]
fn tokens_get_what_the_recurrence_gives_them() {
    let f16 = Element::F16;
    let cases = [
        CASE,
        Case { rows: 1, ..CASE },
        Case { rows: 64, part: 128, q_heads: 1, kv_heads: 1, heads: 1, batch: 1, ..CASE },
        Case { rows: 201, part: 128, element: f16, decays: Decays::Random(0.3), ..CASE },
        Case { decays: Decays::All(0.0), rows: 257, part: 320, batch: 1, ..CASE },
        Case { decays: Decays::Random(40.0), ..CASE },
        Case { decays: Decays::Resets(7), part: 128, ..CASE },
        Case { strict: true, decays: Decays::Random(0.3), ..CASE },
    ];
    check_all(cases.map(both_ways).as_flattened(), Change::None);
}

/// Tokens before a reset change no bit behind it, even with NaN or infinities in an earlier tile,
/// with products that overflow in the same tile, or with a state of NaN. In reverse, tokens behind
/// a reset change no bit before it.
#[test]
fn a_reset_stops_what_is_not_finite() {
    const RESET: usize = 99;
    let clean = Case { part: 192, batch: 1, decays: Decays::Resets(RESET + 1), ..CASE };
    for [ahead, back] in [clean, Case { element: Element::F16, ..clean }].map(both_ways) {
        for (clean, [far, near]) in [(ahead, [10, 70]), (back, [140, 110])] {
            let mut spoils = vec![Spoil::Token(far, f32::NAN), Spoil::Token(far, f32::INFINITY)];
            spoils.push(Spoil::States);
            if clean.element == Element::Bf16 {
                spoils.push(Spoil::Token(near, 1e25));
            }
            let [want, want_state] = [
                attend(&clean, Change::None).map(|found| found[0].clone()),
                state(&clean, Change::None),
            ]
            .map(|found| found.expect("results"));
            let row = clean.heads * clean.value_dim;
            let apart = if clean.reverse { 0..RESET * row } else { RESET * row..clean.rows * row };
            for spoil in spoils {
                let case = Case { spoil, ..clean };
                let [o, s] = [
                    attend(&case, Change::None).map(|found| found[0].clone()),
                    state(&case, Change::None),
                ]
                .map(|found| found.expect("results"));
                assert!(o.iter().any(|x| !x.is_finite()), "{case:?}: it is nowhere");
                assert!(o[apart.clone()] == want[apart.clone()], "{case:?}: outputs");
                assert!(s == want_state, "{case:?}: the state");
            }
        }
    }
}

#[test]
#[ignore = "takes long: make test-full"]
fn columns_of_any_width_and_of_several_tiles() {
    let small = Case { batch: 1, heads: 2, q_heads: 2, kv_heads: 1, rows: 70, ..CASE };
    let dims = [(64, 64), (128, 128), (96, 200), (256, 8), (8, 256)];
    let cases = dims.map(|(head_dim, value_dim)| Case { head_dim, value_dim, ..small });
    check_all(cases.map(both_ways).as_flattened(), Change::None);
}

#[test]
fn large_arrays_are_cut_by_entries_and_by_parts() {
    let by_entry = Case { limit: 36_000, ..CASE };
    let by_part = Case { limit: 13_000, rows: 300, part: 64, heads: 2, q_heads: 2, ..CASE };
    check_all(&[by_entry, Case { kv_heads: 1, ..by_part }], Change::None);
    check_all(&[Case { q_heads: 1, reverse: true, ..by_part }], Change::None);
}

const LARGE: Case = Case {
    element: Element::F16,
    part: 192,
    decays: Decays::All(0.0),
    sizes: [1e-3, 1e4, 1.0],
    ..CASE
};

/// States, and products of queries with keys, beyond the range of float16.
#[test]
fn states_and_weights_may_be_larger_than_float16() {
    let weights = Case { sizes: [10.0, 1e4, 1e-3], ..LARGE };
    for case in [LARGE, weights] {
        check_all(&both_ways(case), Change::None);
        let unbounded = Change::Launch(|launch| force(launch, "bounded", 0));
        check_attend(&case, unbounded).expect_err("something is beyond float16");
    }
}

#[test]
fn launches_touch_what_their_footprints_say() {
    check_all(&both_ways(CASE), Change::Before(suffices));
    check_all(&[Case { limit: 36_000, ..CASE }], Change::Before(suffices));
}

#[test]
fn every_mistake_is_found() {
    let [same, turned] = both_ways(Case { decays: Decays::Random(0.5), ..CASE });
    let even = Case { value_dim: 16, kv_heads: 4, ..same };
    type Mutant = (&'static str, Check, Case, Change);
    #[rustfmt::skip]
    let mutants: [Mutant; 14] = [
        ("state: k and v swapped", check_state, even, Change::Launch(|l| swap(l, "k", "v"))),
        ("state: the other way", check_state, same, Change::Launch(|l| force(l, "reverse", 1))),
        ("state: reverse the other way", check_state, turned, Change::Launch(|l| force(l, "reverse", 0))),
        ("state: parts too long", check_state, same, Change::Launch(|l| force(l, "part_tiles", 2))),
        ("state: a token too few", check_state, same, Change::Launch(|l| force(l, "rows", 149))),
        ("attend: q and k swapped", check_attend, even, Change::Launch(|l| swap(l, "q", "k"))),
        ("attend: the other way", check_attend, even, Change::Launch(|l| force(l, "reverse", 1))),
        ("attend: a token sees itself", check_attend, Case { strict: true, ..same }, Change::Launch(|l| force(l, "strict", 0))),
        ("attend: a token misses itself", check_attend, turned, Change::Launch(|l| force(l, "strict", 1))),
        ("attend: no mask", check_attend, same, Change::Module(|m| reroute_all(m, Select, 2, 1))),
        ("attend: dots not written", check_attend, same, Change::Launch(|l| force(l, "has_other", 0))),
        ("attend: heads mistaken", check_attend, same, Change::Launch(|l| force(l, "kv_heads", 4))),
        ("attend: state of another part", check_attend, same, Change::Launch(|l| force(l, "part_tiles", 2))),
        ("attend: another column", check_attend, same, Change::Module(|m| {
            let load = find(m, LoadViewTko)[0];
            m.op_mut(load).operands.swap(1, 3);
        })),
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
