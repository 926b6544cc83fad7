//! `attention_fwd`: its launches, and whether their results are right.

use burst_attention_kernels::instances::Kernel;
use burst_attention_kernels::launch::{Forward, MAX_VIEW_BYTES};
use std::f64::consts::LN_2;

use super::case::Case;
use super::feature_arrays::FeatureArrays;
use super::problem::{Found, Output, Problem};
use super::world::{Array, Change, Scalar, Stores, World};

struct Arrays {
    q: Array,
    k: Array,
    v: Array,
    acc: Array,
    row_max: Array,
    row_sum: Array,
    o: Array,
    lse: Array,
    feature_arrays: FeatureArrays,
}

impl Arrays {
    fn new(world: &mut World, problem: &Problem) -> Arrays {
        let Case { batch, q_len, kv_len, heads, kv_heads, head_dim, margin, .. } = problem.case;
        let (queries, keys) =
            ([batch, q_len, heads, head_dim], [batch, kv_len, kv_heads, head_dim]);
        let value_dim = problem.case.value_dim();
        let (results, values) =
            ([batch, q_len, heads, value_dim], [batch, kv_len, kv_heads, value_dim]);
        let (activation, statistics) =
            (Scalar::Activation(problem.case.element), [batch, q_len, heads]);
        let visited = problem.visited_keys(Kernel::Forward);
        let arrays = Arrays {
            q: world.rows("q", activation, queries, margin),
            k: world.rows("k", activation, keys, 2 * margin),
            v: world.rows("v", activation, values, 2 * margin),
            acc: world.rows("acc", Scalar::F32, results, 3 * margin),
            row_max: world.statistics("row_max", statistics, margin),
            row_sum: world.statistics("row_sum", statistics, margin),
            o: world.rows("o", activation, results, 5 * margin),
            lse: world.rows("lse", Scalar::F32, [batch, q_len, heads, 1], 3 * margin / 2),
            feature_arrays: FeatureArrays::new(world, problem, Kernel::Forward),
        };
        arrays.q.fill(&mut world.memory, 0..q_len, &problem.inputs.q);
        arrays.k.fill(&mut world.memory, visited.clone(), &problem.inputs.k);
        arrays.v.fill(&mut world.memory, visited, &problem.inputs.v);
        arrays
    }
}

/// Returns the outputs, o and lse or acc, row_max and row_sum, and the number of launches.
pub fn run(problem: &Problem, seed: u64, change: Change) -> Result<(Vec<Vec<f32>>, usize), String> {
    let case = &problem.case;
    let mut world = World::new(seed, change);
    let arrays = Arrays::new(&mut world, problem);
    let steps = case.ranges(case.kv_len);
    let alone = steps.len() == 1 && case.finished && case.limit == MAX_VIEW_BYTES;
    for (n, keys) in steps.iter().enumerate() {
        let description = Forward {
            rectangle: case.rectangle(&(0..case.q_len), keys),
            features: arrays.feature_arrays.features(case, 0, keys.start),
            q: arrays.q.rows(0),
            k: arrays.k.rows(keys.start),
            v: arrays.v.rows(keys.start),
            acc: (!alone).then(|| arrays.acc.rows(0)),
            row_max: (!alone).then(|| arrays.row_max.statistics(0)),
            row_sum: (!alone).then(|| arrays.row_sum.statistics(0)),
            o: case.finished.then(|| arrays.o.rows(0)),
            lse: case.finished.then(|| arrays.lse.rows(0)),
            first: n == 0,
            last: case.finished && n + 1 == steps.len(),
        };
        let chain = description.launches_within(case.target, case.limit);
        let chain = chain.map_err(|error| error.to_string())?;
        world.run(chain, |_| None)?;
    }
    let (carried, results) = (world.carries(case.finished), Stores::Exactly(case.finished.into()));
    let Arrays { q, k, v, acc, row_max, row_sum, o, lse, feature_arrays } = &arrays;
    feature_arrays.audit(&world)?;
    world.audit(&[(q, Stores::Never), (k, Stores::Never), (v, Stores::Never)])?;
    world.audit(&[
        (acc, carried),
        (row_max, carried),
        (row_sum, carried),
        (o, results),
        (lse, results),
    ])?;
    let outputs: &[&Array] = if case.finished { &[o, lse] } else { &[acc, row_max, row_sum] };
    Ok((outputs.iter().map(|array| array.read(&world.memory)).collect(), world.launches()))
}

/// Returns o and lse of a state that was carried on.
pub fn finish(case: &Case, state: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let [acc, max, sum] = state else { panic!("a state is three arrays, got {}", state.len()) };
    let rows = acc.chunks(case.value_dim()).zip(sum);
    let o =
        rows.flat_map(|(row, &sum)| row.iter().map(move |x| if sum > 0.0 { x / sum } else { *x }));
    let lse = max
        .iter()
        .zip(sum)
        .map(|(&max, &sum)| ((f64::from(max) + f64::from(sum).log2()) * LN_2) as f32);
    vec![o.collect(), lse.collect()]
}

/// Checks that lse is within 2^-20 of the largest score (and of 1): three float32 roundings of such
/// a number, and the roundings of a dot product, which partly cancel. A soft cap's tanh has an
/// error of this share of the cap, however small the score.
pub fn check_lse(problem: &Problem, got: &[f32]) -> Result<(), String> {
    let bound = (1.0 + problem.exact.largest.max(problem.case.soft_cap.into())) * 2f64.powi(-20);
    let far = |(&got, &exact): (&f32, &f64)| match exact == f64::NEG_INFINITY {
        true => got != f32::NEG_INFINITY,
        false => {
            (f64::from(got) - exact).abs().partial_cmp(&bound) != Some(std::cmp::Ordering::Less)
        }
    };
    match got.iter().zip(&problem.exact.lse).position(far) {
        None => Ok(()),
        Some(at) => {
            Err(format!("lse {at} is {}, expected {} ± {bound:e}", got[at], problem.exact.lse[at]))
        }
    }
}

pub fn check(problem: &Problem, change: Change) -> Result<Found, String> {
    let (outputs, launches) = problem.twice(|seed| run(problem, seed, change))?;
    let outputs = if problem.case.finished { outputs } else { finish(&problem.case, &outputs) };
    let [o, lse] = &outputs[..] else { panic!("o and lse, got {} outputs", outputs.len()) };
    check_lse(problem, lse)?;
    problem.zero("o", o, |at| problem.blind(at))?;
    let (exact, plain) = (&problem.exact.o, &problem.plain.o);
    // One rounding of p's sum to float32: with a single visible key the plain o is exact.
    let floor = 2f64.powi(-24);
    let worst = problem.ratio(&Output { name: "o", got: o, exact, plain, floor })?;
    Ok(Found { worst, launches })
}
