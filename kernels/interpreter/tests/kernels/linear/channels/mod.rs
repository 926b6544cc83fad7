//! Decays of channels: `channel_pairs`, and the images of linear attention for them, against the
//! recurrence.

pub mod case;

use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{
    ChannelPairs, LINEAR_TILE, Launch, LaunchError, LinearAttend, LinearState, Part,
};
use burst_attention_kernels::variant::Decays as Of;
use cutile_ir::bytecode::Opcode::Select;

use self::case::{Case, Exact, Inputs, KEYS, VALUES, turned};
use super::case::Decays;
use super::{near, rounding, twice};
use crate::coverage::Group;
use crate::footprints::suffices;
use crate::mutants::{force, reroute_all, swap};
use crate::world::{Array, Change, Scalar, Stores, World};

/// Arrays in memory.
struct Arrays<'a> {
    case: &'a Case,
    inputs: &'a Inputs,
    exact: &'a Exact,
}

impl Arrays<'_> {
    fn rows(
        &self,
        world: &mut World,
        name: &'static str,
        (heads, dim): (usize, usize),
        x: &[f32],
    ) -> Array {
        let Case { batch, rows, element, .. } = *self.case;
        let array = world.rows(name, Scalar::Activation(element), [batch, rows, heads, dim], 0);
        array.fill(&mut world.memory, 0..rows, x);
        array
    }

    fn floats(
        &self,
        world: &mut World,
        name: &'static str,
        dim: usize,
        x: Option<&[f32]>,
    ) -> Array {
        let Case { batch, heads, .. } = *self.case;
        let array = world.rows(name, Scalar::F32, [batch, self.case.padded(), heads, dim], 0);
        if let Some(x) = x {
            array.fill(&mut world.memory, 0..self.case.padded(), x);
        }
        array
    }

    fn states(&self, world: &mut World) -> Array {
        let Case { batch, heads, head_dim, value_dim, .. } = *self.case;
        let rows = batch * self.case.parts() * heads * head_dim;
        world.rows("state", Scalar::F32, [1, rows, 1, value_dim], 0)
    }

    /// Returns q and k as kernels take them.
    fn keyed(&self) -> [Vec<f32>; 2] {
        let (case, inputs, Inputs { q, k, .. }) = (self.case, self.inputs, self.inputs);
        match (case.of, case.reverse) {
            (Of::KeyChannels, false) => {
                [case.faded_from_start(inputs, q), case.faded_to_end(inputs, k)]
            }
            (Of::KeyChannels, true) => {
                [case.faded_to_end(inputs, q), case.faded_from_start(inputs, k)]
            }
            _ => [q.clone(), k.clone()],
        }
    }

    fn tokens(&self) -> LinearState {
        let Case { batch, rows, heads, head_dim, value_dim, element, part, reverse, of, .. } =
            *self.case;
        LinearState {
            batch,
            rows,
            heads,
            kv_heads: heads,
            head_dim,
            value_dim,
            element,
            part: Part { rows: part, reverse },
            decays: of,
            k: 0,
            v: 0,
            sums: 0,
            state: 0,
        }
    }

    /// Returns the pairs of the reference, in reverse with tiles turned.
    fn pairs(&self) -> Vec<f32> {
        let pairs: Vec<f32> = self.exact.pairs.iter().map(|&pair| pair as f32).collect();
        if self.case.reverse { turned(&pairs, self.case.heads) } else { pairs }
    }
}

fn at(array: &Array) -> u64 {
    array.rows(0).address
}

/// Runs launches that read some arrays and write others, and returns what they wrote.
fn run(
    world: &mut World,
    launches: Result<Vec<Launch>, LaunchError>,
    inputs: &[&Array],
    results: &[&Array],
) -> Result<Vec<Vec<f32>>, String> {
    world.run(launches.map_err(|error| error.to_string())?, |_| None)?;
    let never: Vec<_> = inputs.iter().map(|&array| (array, Stores::Never)).collect();
    let once: Vec<_> = results.iter().map(|&array| (array, Stores::Exactly(1))).collect();
    world.audit(&never)?;
    world.audit(&once)?;
    Ok(results.iter().map(|array| array.read(&world.memory)).collect())
}

fn check_pairs(case: &Case, change: Change) -> Result<f64, String> {
    let forward = Case { reverse: false, ..*case };
    let inputs = forward.inputs();
    let exact = forward.exact(&inputs);
    let found = twice(change, |world| {
        let arrays = Arrays { case: &forward, inputs: &inputs, exact: &exact };
        let shape = (case.heads, case.head_dim);
        let (q, k) =
            (arrays.rows(world, "q", shape, &inputs.q), arrays.rows(world, "k", shape, &inputs.k));
        let [met, _] = forward.levels(&inputs, &inputs.q, &inputs.k);
        let met = arrays.rows(world, "met", (6 * case.heads, case.head_dim), &met);
        let pairs = arrays.floats(world, "pairs", LINEAR_TILE, None);
        let tokens = LinearState { k: at(&k), ..arrays.tokens() };
        let description = ChannelPairs { tokens, q: at(&q), met: at(&met), pairs: at(&pairs) };
        let launches = description.launches_within(case.target, case.limit);
        run(world, launches, &[&q, &k, &met], &[&pairs])
    })?;
    near("pairs", &found[0], &exact.pairs, 2.0 * rounding(case.element))
}

fn check_state(case: &Case, change: Change) -> Result<f64, String> {
    let inputs = case.inputs();
    let exact = case.exact(&inputs);
    let found = twice(change, |world| {
        let arrays = Arrays { case, inputs: &inputs, exact: &exact };
        let [_, k] = arrays.keyed();
        let k = arrays.rows(world, "k", (case.heads, case.head_dim), &k);
        let v = arrays.rows(world, "v", (case.heads, case.value_dim), &inputs.v);
        let sums = case.of_tiles(&inputs, |sums, i| sums[i]);
        let sums = arrays.floats(world, "sums", case.head_dim, Some(&sums));
        let state = arrays.states(world);
        let description = LinearState {
            k: at(&k),
            v: at(&v),
            sums: at(&sums),
            state: at(&state),
            ..arrays.tokens()
        };
        let launches = description.launches_within(case.target, case.limit);
        run(world, launches, &[&k, &v, &sums], &[&state])
    })?;
    near("state", &found[0], &exact.states, rounding(case.element))
}

fn check_attend(case: &Case, change: Change) -> Result<f64, String> {
    let inputs = case.inputs();
    let exact = case.exact(&inputs);
    let of_values = case.of == Of::ValueChannels;
    let found = twice(change, |world| {
        let arrays = Arrays { case, inputs: &inputs, exact: &exact };
        let (keys, values) = ((case.heads, case.head_dim), (case.heads, case.value_dim));
        let [q, k] = arrays.keyed();
        let (q, k) = (arrays.rows(world, "q", keys, &q), arrays.rows(world, "k", keys, &k));
        let v = arrays.rows(world, "v", values, &inputs.v);
        let sums = case.of_tiles(&inputs, |sums, i| sums[i]);
        let sums = arrays.floats(world, "sums", case.channels(), Some(&sums));
        let state = arrays.states(world);
        let states = case.batch * case.parts() * case.heads * case.head_dim;
        state.fill(&mut world.memory, 0..states, &inputs.before);
        let o = arrays.rows(world, "o", values, &vec![0.0; inputs.v.len()]);
        let state_of = LinearState {
            k: at(&k),
            v: at(&v),
            sums: at(&sums),
            state: at(&state),
            ..arrays.tokens()
        };
        let mut description = LinearAttend {
            tokens: state_of,
            q_heads: case.heads,
            q: at(&q),
            o: at(&o),
            pairs: 0,
            levels: [0; 2],
            dots: None,
            strict: case.strict,
        };
        let read = [&q, &k, &v, &sums, &state];
        if of_values {
            let (odd, even) = (&inputs.other, &inputs.v);
            let (odd, even) = if case.reverse { (even, odd) } else { (odd, even) };
            let shape = (6 * case.heads, case.value_dim);
            let [met, fades] = case.levels(&inputs, odd, even);
            let met = arrays.rows(world, "met", shape, &met);
            let fades = arrays.rows(world, "fades", shape, &fades);
            let other = arrays.rows(world, "other", values, &inputs.other);
            let dots = arrays.floats(world, "dots", case.value_dim, None);
            description.levels = [at(&met), at(&fades)];
            description.dots = Some((at(&other), at(&dots)));
            let launches = description.launches_within(case.target, case.limit);
            let read = [&read[..], &[&met, &fades, &other]].concat();
            return run(world, launches, &read, &[&o, &dots]);
        }
        let pairs = arrays.floats(world, "pairs", LINEAR_TILE, Some(&arrays.pairs()));
        description.pairs = at(&pairs);
        let launches = description.launches_within(case.target, case.limit);
        run(world, launches, &[&read[..], &[&pairs]].concat(), &[&o])
    })?;
    let bound = 2.0 * rounding(case.element);
    let of_out = near("o", &found[0], &exact.out, bound)?;
    match found.get(1) {
        Some(found) => Ok(of_out.max(near("products", found, &exact.products, bound)?)),
        None => Ok(of_out),
    }
}

type Check = fn(&Case, Change) -> Result<f64, String>;

/// Returns the checks of a case's kernels.
fn checks(case: &Case) -> Vec<Check> {
    if case.of == Of::ValueChannels {
        return vec![check_attend];
    }
    vec![check_pairs, check_state, check_attend]
}

fn check_all(cases: &[Case], change: Change) {
    for case in cases {
        let mut worst = 0f64;
        for check in checks(case) {
            let found = check(case, change);
            worst = worst.max(found.unwrap_or_else(|error| panic!("{case:?}: {error}")));
        }
        assert!(worst > 0.1, "bounds that say little: {worst} of {case:?}");
    }
}

/// Returns a case of each kind of channels, forward and in reverse.
fn all_kinds(case: Case) -> [Case; 4] {
    let turned = Case { reverse: true, ..case };
    let of_values = |case| Case { of: Of::ValueChannels, ..case };
    [case, turned, of_values(case), of_values(turned)]
}

#[test]
fn tokens_get_what_the_recurrence_gives_them() {
    let cases = [
        KEYS,
        Case { rows: 1, ..KEYS },
        Case { rows: 201, part: 128, element: Element::F16, batch: 1, ..KEYS },
        Case { decays: Decays::All(0.0), batch: 1, ..KEYS },
        // e⁻²⁰ a token.
        Case { decays: Decays::All(-28.9), batch: 1, ..KEYS },
        Case { decays: Decays::Random(60.0), batch: 1, heads: 1, element: Element::F16, ..KEYS },
        Case { decays: Decays::Resets(7), batch: 1, ..KEYS },
        Case { strict: true, batch: 1, ..KEYS },
    ];
    for case in cases {
        let kinds = all_kinds(case);
        // A token that sees itself is part of the pairs of keys.
        check_all(if case.strict { &kinds[2..] } else { &kinds }, Change::None);
    }
}

#[test]
#[ignore = "takes long: make test-full"]
fn columns_of_any_width_on_all_targets() {
    // The state of few channels is many tokens', so that their roundings average.
    let slow = Case { decays: Decays::Random(0.3), rows: 70, batch: 1, heads: 1, ..KEYS };
    for target in Target::ALL {
        for (head_dim, value_dim) in [(64, 64), (128, 72), (8, 128)] {
            let case = Case { target, head_dim, value_dim, ..slow };
            check_all(&all_kinds(case), Change::None);
        }
    }
}

#[test]
fn large_arrays_are_cut_by_entries_and_by_parts() {
    let by_part = Case { limit: 60_000, rows: 300, part: 64, batch: 1, ..KEYS };
    check_all(&all_kinds(by_part), Change::None);
    check_all(&all_kinds(Case { limit: 80_000, ..KEYS }), Change::None);
}

#[test]
fn launches_touch_what_their_footprints_say() {
    check_all(&all_kinds(KEYS), Change::Before(suffices));
}

#[test]
fn tiles_of_256_columns_have_no_images() {
    let case = Case { head_dim: 136, ..KEYS };
    let error = check_state(&case, Change::None).expect_err("too wide");
    assert!(error.contains("at most 128 columns where channels have decays"), "{error}");
}

#[test]
fn weights_may_be_larger_than_float16() {
    let large = Case {
        element: Element::F16,
        sizes: [150.0, 1e-3],
        decays: Decays::All(-0.1),
        batch: 1,
        ..KEYS
    };
    let unbounded = Change::Launch(|launch| force(launch, "bounded", 0));
    for case in [large, Case { of: Of::ValueChannels, ..large }] {
        check_attend(&case, Change::None).unwrap_or_else(|error| panic!("{error}"));
        check_attend(&case, unbounded).expect_err("something is beyond float16");
    }
}

/// Parts of one tile and of two; and one tile in float16, which is bounded.
#[test]
fn branches_and_loops_go_every_way() {
    let of_heads = super::Case { part: 128, batch: 1, ..super::CASE };
    let of_channels = Case { batch: 1, heads: 1, ..KEYS };
    Group::Linear.assert_reached(|| {
        for (element, rows) in [(Element::Bf16, 150), (Element::F16, 40)] {
            let cases = super::both_ways(super::Case { element, rows, ..of_heads });
            super::check_all(&cases, Change::None);
            check_all(&all_kinds(Case { element, rows, ..of_channels }), Change::None);
        }
    });
}

#[test]
fn every_mistake_is_found() {
    let even = Case { value_dim: 16, ..KEYS };
    let short = Case { part: 64, ..KEYS };
    let turned = Case { reverse: true, ..VALUES };
    type Mutant = (&'static str, Check, Case, Change);
    #[rustfmt::skip]
    let mutants: [Mutant; 16] = [
        ("pairs: no quarter", check_pairs, KEYS, Change::Module(|m| reroute_all(m, Select, 2, 1))),
        ("pairs: k in place of what meets", check_pairs, KEYS, Change::Launch(|l| swap(l, "k", "met"))),
        ("pairs: columns too few", check_pairs, KEYS, Change::Launch(|l| force(l, "head_dim", 8))),
        ("pairs: a token too few", check_pairs, KEYS, Change::Launch(|l| force(l, "rows", 149))),
        ("state: k and v swapped", check_state, even, Change::Launch(|l| swap(l, "k", "v"))),
        ("state: the other way", check_state, KEYS, Change::Launch(|l| force(l, "reverse", 1))),
        ("state: parts too long", check_state, short, Change::Launch(|l| force(l, "part_tiles", 2))),
        ("keys: pairs and sums swapped", check_attend, KEYS, Change::Launch(|l| swap(l, "pairs", "sums"))),
        ("keys: q and k swapped", check_attend, KEYS, Change::Launch(|l| swap(l, "q", "k"))),
        ("keys: the other way", check_attend, KEYS, Change::Launch(|l| force(l, "reverse", 1))),
        ("values: no quarter", check_attend, VALUES, Change::Module(|m| reroute_all(m, Select, 2, 1))),
        ("values: what meets and decays swapped", check_attend, VALUES, Change::Launch(|l| swap(l, "met", "fades"))),
        ("values: the other way", check_attend, VALUES, Change::Launch(|l| force(l, "reverse", 1))),
        ("values: forward", check_attend, turned, Change::Launch(|l| force(l, "reverse", 0))),
        ("values: a token sees itself", check_attend, Case { strict: true, ..VALUES }, Change::Launch(|l| force(l, "strict", 0))),
        ("values: state of another part", check_attend, Case { part: 64, ..VALUES }, Change::Launch(|l| force(l, "part_tiles", 2))),
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
