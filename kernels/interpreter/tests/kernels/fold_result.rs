//! `fold_result`: its launches, and whether a state and a rounded result become the attention over
//! both ranges of keys.

use std::f64::consts::{LN_2, LOG2_E};

use burst_attention_kernels::launch::{FoldResult, SoftmaxState};

use super::case::{Case, round};
use super::combine_softmax::states;
use super::forward::finish;
use super::problem::{Found, Problem};
use super::world::{Array, Change, Scalar, Stores, World};

/// Returns the state at home, and the result that arrives: o, rounded, and lse.
fn inputs(problem: &Problem) -> ([Vec<f32>; 3], [Vec<f32>; 2]) {
    let [home, arrived] = states(problem);
    let results = finish(&problem.case, &arrived);
    let [o, lse] = results.try_into().expect("o and lse");
    let o = o.into_iter().map(|value| round(problem.case.element, value)).collect();
    (home, [o, lse])
}

/// Returns the outputs, o and lse or acc, row_max and row_sum, and the number of launches.
fn run(problem: &Problem, seed: u64, change: Change) -> Result<(Vec<Vec<f32>>, usize), String> {
    let Case { batch, q_len, heads, head_dim, margin, element, finished, second, .. } =
        problem.case;
    let mut world = World::new(seed, change);
    let (sizes, per_head) = ([batch, q_len, heads, head_dim], [batch, q_len, heads]);
    let (state, result) = inputs(problem);
    let activation = Scalar::Activation(element);
    let home = [
        world.rows("acc", Scalar::F32, sizes, margin),
        world.statistics("row_max", per_head, 4 * margin),
        world.statistics("row_sum", per_head, 4 * margin),
    ];
    let arrived_o = world.rows("arrived_o", activation, sizes, 2 * margin);
    let arrived_lse = world.statistics("arrived_lse", per_head, 8 * margin);
    let o = world.rows("o", activation, sizes, 3 * margin);
    let lse = world.rows("lse", Scalar::F32, [batch, q_len, heads, 1], margin);
    let given = home.iter().zip(&state).filter(|_| second);
    let arrived = [(&arrived_o, &result[0]), (&arrived_lse, &result[1])];
    for (array, values) in given.chain(arrived) {
        array.fill(&mut world.memory, 0..q_len, values);
    }
    let description = FoldResult {
        batch,
        q_len,
        heads,
        head_dim,
        element,
        home: Some(SoftmaxState {
            acc: home[0].rows(0),
            row_max: home[1].statistics(0),
            row_sum: home[2].statistics(0),
        }),
        arrived_o: arrived_o.rows(0),
        arrived_lse: arrived_lse.statistics(0),
        o: finished.then(|| o.rows(0)),
        lse: finished.then(|| lse.rows(0)),
        first: !second,
        last: finished,
    };
    let chain = description.launches_within(problem.case.target, problem.case.limit);
    let chain = chain.map_err(|error| error.to_string())?;
    let launches = chain.len();
    world.run(chain, |_| None)?;
    let [state, results] = [!finished, finished].map(|written| Stores::Exactly(written.into()));
    world.audit(&home.each_ref().map(|array| (array, state)))?;
    world.audit(&[(&arrived_o, Stores::Never), (&arrived_lse, Stores::Never)])?;
    world.audit(&[(&o, results), (&lse, results)])?;
    let outputs: Vec<&Array> = if finished { vec![&o, &lse] } else { home.iter().collect() };
    Ok((outputs.iter().map(|array| array.read(&world.memory)).collect(), launches))
}

/// Returns o and lse, computed in float64 from the same inputs.
fn expected(problem: &Problem) -> [Vec<f64>; 2] {
    let ([acc, row_max, row_sum], [o, lse]) = inputs(problem);
    let dim = problem.case.head_dim;
    let mut found = [vec![], vec![]];
    for row in 0..lse.len() {
        let arrived = f64::from(lse[row]) * LOG2_E;
        let (m, l) = if problem.case.second {
            (f64::from(row_max[row]), f64::from(row_sum[row]))
        } else {
            (f64::NEG_INFINITY, 0.0)
        };
        let most = m.max(arrived).max(-1e38);
        let weights = [(m - most).exp2(), (arrived - most).exp2()];
        let sum = l * weights[0] + weights[1];
        for column in row * dim..(row + 1) * dim {
            let home = if problem.case.second { f64::from(acc[column]) } else { 0.0 };
            let total = home * weights[0] + f64::from(o[column]) * weights[1];
            found[0].push(if sum > 0.0 { total / sum } else { 0.0 });
        }
        found[1].push(if sum > 0.0 { (most + sum.log2()) * LN_2 } else { f64::NEG_INFINITY });
    }
    found
}

/// Checks the result against float64: o within float32's roundings of weights and sums, and the
/// rounding to its own type; lse within the roundings of a number of its size.
pub fn check(problem: &Problem, change: Change) -> Result<Found, String> {
    let (outputs, launches) = problem.twice(|seed| run(problem, seed, change))?;
    let Case { finished, element, .. } = problem.case;
    let outputs = if finished { outputs } else { finish(&problem.case, &outputs) };
    let [o, lse] = expected(problem);
    let largest = problem.exact.largest + 1.0;
    // Weights are powers of numbers that have the rounding errors of the largest score.
    let relative = 8.0 * largest * f64::from(f32::EPSILON);
    let rounded = |exact: f64| f64::from(round(element, exact as f32));
    let mut worst = 0f64;
    for (name, exact, got) in [("o", &o, &outputs[0]), ("lse", &lse, &outputs[1])] {
        for (at, (&exact, &got)) in exact.iter().zip(got).enumerate() {
            let got = f64::from(got);
            if exact == got {
                continue;
            }
            let own =
                if name == "o" && finished { 2.0 * (rounded(exact) - exact).abs() } else { 0.0 };
            let ulp = if name == "o" && finished { exact.abs() / 128.0 } else { 0.0 };
            let bound = own.max(ulp) + relative * if name == "o" { 4.0 } else { largest };
            let error = (got - exact).abs();
            if error.partial_cmp(&bound) != Some(std::cmp::Ordering::Less) {
                return Err(format!("{name} {at} is {got}, expected {exact} ± {bound:e}"));
            }
            worst = worst.max(error / bound);
        }
    }
    Ok(Found { worst, launches })
}
