//! `combine_softmax`: its launches, and whether two states become the attention over both ranges of
//! keys.

use burst_attention_kernels::launch::{CombineSoftmax, SoftmaxState};
use std::f64::consts::LOG2_E;

use super::case::Case;
use super::forward::{check_lse, finish};
use super::problem::{Found, Output, Problem};
use super::world::{Array, Change, Scalar, Stores, World};

/// A state `[acc, row_max, row_sum]` of all rows.
type Values = [Vec<f32>; 3];

/// Returns the states that forward passes over the keys before and behind the middle leave. Every
/// other row without visible keys has an m of −∞.
pub fn states(problem: &Problem) -> [Values; 2] {
    let middle = problem.case.kv_len / 2;
    [0..middle, middle..problem.case.kv_len].map(|keys| {
        let Case { batch, q_len, heads, .. } = problem.case;
        let mut values = Values::default();
        for at in 0..batch * q_len * heads {
            let place = (at / heads / q_len, at / heads % q_len, at % heads);
            let (acc, m, l) = row(problem, place, keys.clone());
            values[0].extend(acc);
            values[1].push(if m.is_finite() || at % 2 == 0 { m } else { -1.0e38 });
            values[2].push(l);
        }
        values
    })
}

/// Returns acc, m and l of one row over some keys.
fn row(
    problem: &Problem,
    (b, i, h): (usize, usize, usize),
    keys: std::ops::Range<usize>,
) -> (Vec<f32>, f32, f32) {
    let Case { q_len, kv_len, heads, kv_heads, head_dim: dim, .. } = problem.case;
    let query = &problem.inputs.q[((b * q_len + i) * heads + h) * dim..][..dim];
    let key = |j: usize| ((b * kv_len + j) * kv_heads + h / (heads / kv_heads)) * dim;
    let score = |j: usize| {
        let terms = query.iter().zip(&problem.inputs.k[key(j)..][..dim]);
        let sum: f64 = terms.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
        sum * f64::from(problem.case.scale()) * LOG2_E
    };
    let scores: Vec<_> =
        keys.filter(|&j| problem.case.sees(b, i, j)).map(|j| (j, score(j))).collect();
    let m = scores.iter().fold(f64::NEG_INFINITY, |m, (_, s)| m.max(*s)) as f32;
    let (mut acc, mut l) = (vec![0f64; dim], 0f64);
    for (j, s) in scores {
        let p = (s - f64::from(m)).exp2();
        l += p;
        let values = &problem.inputs.v[key(j)..][..dim];
        acc.iter_mut().zip(values).for_each(|(sum, v)| *sum += p * f64::from(*v));
    }
    (acc.iter().map(|&x| x as f32).collect(), m, l as f32)
}

/// Returns the outputs, o and lse or acc, row_max and row_sum, and the number of launches.
fn run(problem: &Problem, seed: u64, change: Change) -> Result<(Vec<Vec<f32>>, usize), String> {
    let Case { batch, q_len, heads, head_dim, margin, element, finished, .. } = problem.case;
    let mut world = World::new(seed, change);
    let (sizes, per_head) = ([batch, q_len, heads, head_dim], [batch, q_len, heads]);
    let mut state = |names: [&'static str; 3], values: &Values, margin| {
        let arrays = [
            world.rows(names[0], Scalar::F32, sizes, margin),
            world.statistics(names[1], per_head, 4 * margin),
            world.statistics(names[2], per_head, 4 * margin),
        ];
        let filled = arrays.iter().zip(values);
        filled.for_each(|(array, values)| array.fill(&mut world.memory, 0..q_len, values));
        arrays
    };
    let [stayed, arrived] = states(problem);
    let home = state(["acc", "row_max", "row_sum"], &stayed, margin);
    let arrived = state(["arrived_acc", "arrived_max", "arrived_sum"], &arrived, 2 * margin);
    let o = world.rows("o", Scalar::Activation(element), sizes, 3 * margin);
    let lse = world.rows("lse", Scalar::F32, [batch, q_len, heads, 1], margin);
    let of = |[acc, row_max, row_sum]: &[Array; 3]| SoftmaxState {
        acc: acc.rows(0),
        row_max: row_max.statistics(0),
        row_sum: row_sum.statistics(0),
    };
    let description = CombineSoftmax {
        batch,
        q_len,
        heads,
        head_dim,
        element,
        home: of(&home),
        arrived: of(&arrived),
        o: finished.then(|| o.rows(0)),
        lse: finished.then(|| lse.rows(0)),
        last: finished,
    };
    let chain = description.launches_within(problem.case.target, problem.case.limit);
    let chain = chain.map_err(|error| error.to_string())?;
    let launches = chain.len();
    world.run(chain, |_| None)?;
    let [state, results] = [!finished, finished].map(|written| Stores::Exactly(written.into()));
    world.audit(&home.each_ref().map(|array| (array, state)))?;
    world.audit(&arrived.each_ref().map(|array| (array, Stores::Never)))?;
    world.audit(&[(&o, results), (&lse, results)])?;
    let outputs: Vec<&Array> = if finished { vec![&o, &lse] } else { home.iter().collect() };
    Ok((outputs.iter().map(|array| array.read(&world.memory)).collect(), launches))
}

/// Checks the result against attention over all keys; rows without visible keys must be 0 and −∞.
/// The m of a state that is carried on must be the larger of both, and finite.
pub fn check(problem: &Problem, change: Change) -> Result<Found, String> {
    let (outputs, launches) = problem.twice(|seed| run(problem, seed, change))?;
    if !problem.case.finished {
        let [stayed, arrived] = states(problem).map(|[_, m, _]| m);
        let larger = stayed.iter().zip(&arrived).map(|(one, other)| one.max(*other).max(-1.0e38));
        if let Some(at) = larger.zip(&outputs[1]).position(|(m, got)| m != *got) {
            return Err(format!("m {at} is {}", outputs[1][at]));
        }
    }
    let finished = problem.case.finished;
    let outputs = if finished { outputs } else { finish(&problem.case, &outputs) };
    let [o, lse] = &outputs[..] else { panic!("o and lse, got {} outputs", outputs.len()) };
    check_lse(problem, lse)?;
    problem.zero("o", o, |at| problem.blind(at))?;
    let (exact, plain) = (&problem.exact.o, &problem.plain.o);
    let worst =
        problem.ratio(&Output { name: "o", got: o, exact, plain, floor: 2f64.powi(-24) })?;
    Ok(Found { worst, launches })
}
