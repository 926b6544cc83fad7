//! Scores so large that float32 rounds them by more than 1, and differently in each pass.

use cutile_ir::bytecode::Opcode::MinF;

use super::case::{CASE, CAUSAL, Case};
use super::features::DOCUMENTS;
use super::forward;
use super::fused;
use super::gradients::{run_keys, run_queries};
use super::mutants::reroute_all;
use super::problem::Problem;
use super::rows::run_delta;
use super::world::Change;

const PLAIN: Case = Case { heads: 2, q_len: 70, kv_len: 70, head_dim: 16, band: CAUSAL, ..CASE };
const GENERAL: Case =
    Case { segments: Some((DOCUMENTS, DOCUMENTS)), slopes: true, positions: (3, 3, 1), ..PLAIN };

/// Returns dk, dv and dq. Each kernel reads the results of the kernel before it.
fn gradients(
    problem: &mut Problem,
    is_fused: bool,
    change: Change,
) -> Result<[Vec<f32>; 3], String> {
    let (outputs, _) = forward::run(problem, 3, Change::None)?;
    [problem.saved.o, problem.saved.lse] = outputs.try_into().expect("two outputs");
    let (outputs, _) = run_delta(problem, 3, Change::None)?;
    [problem.saved.lse_log2, problem.saved.delta] = outputs.try_into().expect("two outputs");
    if is_fused {
        let outputs = fused::run(problem, 3, change)?.0;
        let [dk, dv, _, dq] = outputs.try_into().expect("four outputs");
        return Ok([dk, dv, dq]);
    }
    let [dk, dv] = run_keys(problem, 3, change)?.0.try_into().expect("two outputs");
    let dq = run_queries(problem, 3, change)?.0.swap_remove(0);
    Ok([dk, dv, dq])
}

/// Checks that all gradients are finite, and that no element of dv exceeds the sum of |dout|.
fn bounded(case: Case, is_fused: bool, change: Change) -> Result<(), String> {
    let mut problem = Problem::new(case);
    let [dk, dv, dq] = gradients(&mut problem, is_fused, change)?;
    for (name, array) in [("dk", &dk), ("dv", &dv), ("dq", &dq)] {
        if let Some(at) = array.iter().position(|x| !x.is_finite()) {
            return Err(format!("element {at} of {name} is {}", array[at]));
        }
    }
    let dim = case.value_dim();
    for (at, x) in dv.iter().enumerate() {
        let of_column = problem.inputs.dout.iter().skip(at % dim).step_by(dim);
        // The result is rounded once, to 8 bits.
        let most = of_column.map(|x| x.abs()).sum::<f32>() * (1.0 + 2f32.powi(-8));
        if x.abs() > most {
            return Err(format!("element {at} of dv is {x:e}, and Σ|dout| only {most:e}"));
        }
    }
    Ok(())
}

#[test]
fn no_weight_exceeds_one() {
    check([(PLAIN, false, 5e8, 1e9), (PLAIN, true, 5e8, 1e9)]);
}

#[test]
#[ignore = "takes long: make test-full"]
fn no_weight_exceeds_one_with_features_or_at_smaller_scores() {
    check([(PLAIN, false, 5e4, 1e5), (GENERAL, false, 5e7, 1e8)]);
}

/// Checks cases: whether the fused kernel runs, a magnitude of the queries, and the number that the
/// largest score then exceeds.
fn check(cases: [(Case, bool, f32, f64); 2]) {
    for (case, is_fused, magnitude, score) in cases {
        let case = Case { magnitude, ..case };
        assert!(Problem::new(case).exact.largest > score);
        let found = bounded(case, is_fused, Change::None);
        found.unwrap_or_else(|error| panic!("{error}\n{case:?}"));
        // At 1e5 weights are up to 1.1. A sum over all rows would hide this excess.
        let unbounded = Change::Module(|module| reroute_all(module, MinF, 1, 0));
        let found = bounded(case, is_fused, unbounded);
        assert_eq!(found.is_err(), score > 1e6, "without it: {case:?}");
    }
}

#[test]
#[ignore = "takes long: make test-full"]
fn nan_is_not_taken_for_a_bound() {
    for (case, is_fused) in [(PLAIN, false), (PLAIN, true), (GENERAL, false)] {
        let mut problem = Problem::new(case);
        // The first query's head 1, which sees the first key.
        problem.inputs.q[case.head_dim] = f32::NAN;
        let [dk, dv, dq] = gradients(&mut problem, is_fused, Change::None).unwrap();
        for (name, array, row) in [("dk", &dk, 0), ("dv", &dv, 0), ("dq", &dq, 1)] {
            let row = &array[row * case.head_dim..][..case.head_dim];
            assert!(row.iter().all(|x| x.is_nan()), "{name} {row:?} in {case:?}");
        }
        assert!(dq[..case.head_dim].iter().all(|x| x.is_finite()), "{case:?}");
    }
}
