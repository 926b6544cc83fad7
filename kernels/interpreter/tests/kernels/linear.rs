//! Linear attention: `linear_state` and `linear_attend` against the recurrence, token by token.

use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{
    LINEAR_TILE, LinearAttend, LinearState, MAX_VIEW_BYTES, Part, column_tiles,
};

use super::case::{Random, round};
use super::footprints::suffices;
use super::modules::find;
use super::mutants::{force, reroute_all, swap};
use super::world::{Array, Change, Scalar, Stores, World};
use cutile_ir::bytecode::Opcode::{LoadViewTko, Select};

/// What is computed.
#[derive(Debug, Clone, Copy)]
struct Case {
    element: Element,
    target: Target,
    batch: usize,
    rows: usize,
    heads: usize,
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
    part: usize,
    reverse: bool,
    decays: Decays,
    /// Factors on queries, keys and values.
    sizes: [f32; 3],
    spoil: Spoil,
    limit: u64,
}

/// What is not finite, or overflows.
#[derive(Debug, Clone, Copy)]
enum Spoil {
    Nothing,
    /// Keys and values of a token.
    Token(usize, f32),
    /// The states where parts begin.
    States,
}

/// Log decays in base 2.
#[derive(Debug, Clone, Copy)]
enum Decays {
    All(f32),
    /// Of each token and head, from 0 to so much.
    Random(f32),
    /// None but before every so many tokens, where all is forgotten.
    Resets(usize),
}

const CASE: Case = Case {
    element: Element::Bf16,
    target: Target::Sm90,
    batch: 2,
    rows: 150,
    heads: 4,
    q_heads: 4,
    kv_heads: 2,
    head_dim: 16,
    value_dim: 24,
    part: 64,
    reverse: false,
    decays: Decays::All(-0.015),
    sizes: [1.0; 3],
    spoil: Spoil::Nothing,
    limit: MAX_VIEW_BYTES,
};

/// What 2^x is 0 of.
const FORGOTTEN: f32 = -150.0;

struct Inputs {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    other: Vec<f32>,
    /// `[batch, rows, heads]`
    logs: Vec<f32>,
    /// `[batch, parts, heads, head_dim, value_dim]`
    before: Vec<f32>,
}

impl Case {
    fn parts(&self) -> usize {
        self.rows.div_ceil(self.part)
    }

    fn state(&self) -> usize {
        self.head_dim * self.value_dim
    }

    fn padded(&self) -> usize {
        self.rows.next_multiple_of(LINEAR_TILE)
    }

    fn inputs(&self) -> Inputs {
        let mut random = Random(3);
        let tokens = self.batch * self.rows;
        let to = |x| round(self.element, x);
        let [queries, keys] = [self.q_heads, self.kv_heads].map(|heads| tokens * heads);
        let log = |at: usize, random: &mut Random| match self.decays {
            Decays::All(log) => log,
            Decays::Random(most) => -most * random.normal().abs().min(2.0) / 2.0,
            Decays::Resets(every) if (at / self.heads) % every == every - 1 => FORGOTTEN,
            Decays::Resets(_) => 0.0,
        };
        let mut inputs = Inputs {
            q: random.tensor(queries * self.head_dim, |x| to(x * self.sizes[0])),
            k: random.tensor(keys * self.head_dim, |x| to(x * self.sizes[1])),
            v: random.tensor(keys * self.value_dim, |x| to(x * self.sizes[2])),
            other: random.tensor(queries * self.value_dim, to),
            logs: (0..tokens * self.heads).map(|at| log(at, &mut random)).collect(),
            before: random.tensor(self.batch * self.parts() * self.heads * self.state(), |x| x),
        };
        match self.spoil {
            Spoil::Nothing => {}
            Spoil::Token(token, value) => {
                for (x, dim) in [(&mut inputs.k, self.head_dim), (&mut inputs.v, self.value_dim)] {
                    let row = self.kv_heads * dim;
                    x[token * row..(token + 1) * row].fill(to(value));
                }
            }
            Spoil::States => inputs.before.fill(f32::NAN),
        }
        inputs
    }

    /// Sums of logs since each tile began `[batch, heads, padded rows]`.
    fn sums(&self, inputs: &Inputs) -> Vec<f32> {
        let mut sums = vec![];
        for (b, h) in (0..self.batch).flat_map(|b| (0..self.heads).map(move |h| (b, h))) {
            let mut sum = 0.0;
            for row in 0..self.padded() {
                let log = inputs.logs.get(((b * self.rows + row) * self.heads) + h);
                let start = if row % LINEAR_TILE == 0 { 0.0 } else { sum };
                sum = start + if row < self.rows { *log.expect("a token's") } else { 0.0 };
                sums.push(sum);
            }
        }
        sums
    }

    fn description(&self, [k, v, sums, state]: [&Array; 4]) -> LinearState {
        let at = |array: &Array| array.rows(0).address;
        LinearState {
            batch: self.batch,
            rows: self.rows,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            value_dim: self.value_dim,
            element: self.element,
            part: Part { rows: self.part, reverse: self.reverse },
            k: at(k),
            v: at(v),
            sums: at(sums),
            state: at(state),
        }
    }

    /// Of each entry and head its parts, from the one that comes first.
    fn each_part(&self, mut body: impl FnMut(usize, usize, usize, Vec<usize>)) {
        for (b, h) in (0..self.batch).flat_map(|b| (0..self.heads).map(move |h| (b, h))) {
            for part in 0..self.parts() {
                let mut rows: Vec<_> =
                    (part * self.part..self.rows.min((part + 1) * self.part)).collect();
                if self.reverse {
                    rows.reverse();
                }
                body(b, h, part, rows);
            }
        }
    }

    /// What parts leave, what tokens get, and the products of that with `other`, in float64.
    fn exact(&self, inputs: &Inputs, from_zero: bool) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let Case { batch, rows, heads, q_heads, kv_heads, head_dim, value_dim, .. } = *self;
        let mut states = vec![0.0; batch * self.parts() * heads * self.state()];
        let mut out = vec![0.0; batch * rows * heads * value_dim];
        let mut dots = vec![0.0; batch * heads * rows];
        self.each_part(|b, h, part, tokens| {
            let place = ((b * self.parts() + part) * heads + h) * self.state();
            let start = &inputs.before[place..][..self.state()];
            let mut s: Vec<f64> =
                start.iter().map(|&x| if from_zero { 0.0 } else { f64::from(x) }).collect();
            let fade = |s: &mut Vec<f64>, row: usize| {
                let log = inputs.logs[(b * rows + row) * heads + h];
                let left = if log <= FORGOTTEN { 0.0 } else { f64::from(log).exp2() };
                s.iter_mut().for_each(|x| *x *= left);
            };
            for row in tokens {
                let at = |array_heads: usize, dim: usize| {
                    ((b * rows + row) * array_heads + h * array_heads / heads) * dim
                };
                let q = &inputs.q[at(q_heads, head_dim)..][..head_dim];
                let k = &inputs.k[at(kv_heads, head_dim)..][..head_dim];
                let v = &inputs.v[at(kv_heads, value_dim)..][..value_dim];
                let other = &inputs.other[at(q_heads, value_dim)..][..value_dim];
                if !self.reverse {
                    fade(&mut s, row);
                }
                for (i, j) in (0..head_dim).flat_map(|i| (0..value_dim).map(move |j| (i, j))) {
                    s[i * value_dim + j] += f64::from(k[i]) * f64::from(v[j]);
                }
                for j in 0..value_dim {
                    let o: f64 =
                        (0..head_dim).map(|i| f64::from(q[i]) * s[i * value_dim + j]).sum();
                    out[at(heads, value_dim) + j] = o;
                    dots[(b * heads + h) * rows + row] += o * f64::from(other[j]);
                }
                if self.reverse {
                    fade(&mut s, row);
                }
            }
            states[place..][..self.state()].copy_from_slice(&s);
        });
        (states, out, dots)
    }
}

/// Inputs in memory, and where the results go.
struct Arrays {
    q: Array,
    k: Array,
    v: Array,
    other: Array,
    sums: Array,
    state: Array,
    o: Array,
    dots: Array,
}

fn place(case: &Case, inputs: &Inputs, world: &mut World) -> Arrays {
    let Case { batch, rows, heads, q_heads, kv_heads, head_dim, value_dim, element, .. } = *case;
    let tiles = column_tiles(head_dim, value_dim).expect("tiles");
    let activations = Scalar::Activation(element);
    let states = [1, batch * case.parts() * heads * head_dim, 1, value_dim];
    let mut tokens = |name, heads, dim| world.rows(name, activations, [batch, rows, heads, dim], 0);
    let (q, k) = (tokens("q", q_heads, head_dim), tokens("k", kv_heads, head_dim));
    let (v, other) = (tokens("v", kv_heads, value_dim), tokens("other", q_heads, value_dim));
    let o = tokens("o", heads, value_dim);
    let arrays = Arrays {
        q,
        k,
        v,
        other,
        o,
        sums: world.rows("sums", Scalar::F32, [1, batch * heads, 1, case.padded()], 0),
        state: world.rows("state", Scalar::F32, states, 0),
        dots: world.rows("dots", Scalar::F32, [1, batch * heads * tiles, 1, case.padded()], 0),
    };
    let memory = &mut world.memory;
    arrays.q.fill(memory, 0..rows, &inputs.q);
    arrays.k.fill(memory, 0..rows, &inputs.k);
    arrays.v.fill(memory, 0..rows, &inputs.v);
    arrays.other.fill(memory, 0..rows, &inputs.other);
    arrays.sums.fill(memory, 0..batch * heads, &case.sums(inputs));
    arrays
}

/// Runs the launches in two orders of blocks, and gives what `read` finds.
fn twice(
    case: &Case,
    change: Change,
    run: impl Fn(&Inputs, &mut World) -> Result<Vec<Vec<f32>>, String>,
) -> Result<Vec<Vec<f32>>, String> {
    let inputs = case.inputs();
    let [one, other] = [1, 2].map(|seed| run(&inputs, &mut World::new(seed, change)));
    let (one, other) = (one?, other?);
    let bits = |found: &[Vec<f32>]| found.concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    match bits(&one) == bits(&other) {
        true => Ok(one),
        false => Err("another order of blocks gives other bits".into()),
    }
}

/// Is the root mean square of the error within `bound` times that of what is exact?
fn near(name: &str, got: &[f32], exact: &[f64], bound: f64) -> Result<f64, String> {
    assert_eq!(got.len(), exact.len(), "{name}");
    if let Some(at) = got.iter().position(|x| !x.is_finite()) {
        return Err(format!("element {at} of {name} is {}", got[at]));
    }
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let error = norm(&mut got.iter().zip(exact).map(|(got, exact)| f64::from(*got) - exact));
    let ratio = error / norm(&mut exact.iter().copied()) / bound;
    if ratio <= 1.0 { Ok(ratio) } else { Err(format!("{name} is off by {ratio:.2} bounds")) }
}

/// A rounding to the element type: what products' operands, and results, have of error.
fn rounding(element: Element) -> f64 {
    match element {
        Element::Bf16 => 2f64.powi(-9),
        Element::F16 => 2f64.powi(-12),
    }
}

fn state(case: &Case, change: Change) -> Result<Vec<f32>, String> {
    let found = twice(case, change, |inputs, world| {
        let arrays = place(case, inputs, world);
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

/// Results, and their products with `other`.
fn attend(case: &Case, change: Change) -> Result<Vec<Vec<f32>>, String> {
    let Case { batch, heads, head_dim, .. } = *case;
    twice(case, change, |inputs, world| {
        let arrays = place(case, inputs, world);
        let states = batch * case.parts() * heads * head_dim;
        arrays.state.fill(&mut world.memory, 0..states, &inputs.before);
        let Arrays { q, k, v, other, sums, state, o, dots } = &arrays;
        let at = |array: &Array| array.rows(0).address;
        let description = LinearAttend {
            tokens: case.description([k, v, sums, state]),
            q_heads: case.q_heads,
            q: at(q),
            o: at(o),
            dots: Some((at(other), at(dots))),
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
    // Weights, states and the result are rounded; dots are of what is not rounded yet.
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

/// Both ways, for all heads.
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
    ];
    check_all(cases.map(both_ways).as_flattened(), Change::None);
}

/// Tokens before a reset, one of which has NaN or infinities in an earlier tile, or products that
/// overflow in the same one, or a state of NaN, change no bit behind it; in reverse the other way.
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

/// States, and products of queries with keys, beyond what float16 holds.
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
    let mutants: [Mutant; 12] = [
        ("state: k and v swapped", check_state, even, Change::Launch(|l| swap(l, "k", "v"))),
        ("state: the other way", check_state, same, Change::Launch(|l| force(l, "reverse", 1))),
        ("state: reverse the other way", check_state, turned, Change::Launch(|l| force(l, "reverse", 0))),
        ("state: parts too long", check_state, same, Change::Launch(|l| force(l, "part_tiles", 2))),
        ("state: a token too few", check_state, same, Change::Launch(|l| force(l, "rows", 149))),
        ("attend: q and k swapped", check_attend, even, Change::Launch(|l| swap(l, "q", "k"))),
        ("attend: the other way", check_attend, even, Change::Launch(|l| force(l, "reverse", 1))),
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
