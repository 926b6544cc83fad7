//! Linear attention on the host agrees with the recurrence, token by token in float64.

mod common;

use burst_attention::Dtype;
use burst_attention::host::array::HostArray;
use burst_attention::host::isa::Isa;
use burst_attention::host::linear::{ForwardIo, Scan, forward, scan};
use common::data::Array;
use common::recurrence::{CASE, Case, Data, Logs, NAMES, error, pool, recurrence, state};

/// Largest relative errors in the norm of float32 results: of outputs, and of gradients.
const VALUES: f64 = 2e-6;
const GRADIENTS: f64 = 1e-5;
/// Half the distance of neighbouring 16-bit numbers near 1: the largest error of one rounding.
const BF16: f64 = 1.0 / 256.0;
const F16: f64 = 1.0 / 2048.0;

fn assert_right(data: &Data, expected: &[Vec<f64>], isa: Isa) {
    let rounded = match data.case.dtype {
        Dtype::F32 => 0.0,
        Dtype::Bf16 => BF16,
        Dtype::F16 => F16,
    };
    for ((name, got), want) in NAMES.iter().zip(&data.results).zip(expected) {
        let bound = if ["o", "after"].contains(name) { VALUES } else { GRADIENTS };
        let bound = if got.dtype == data.case.dtype { bound.max(rounded) } else { bound };
        let error = error(&got.values(), want);
        assert!(error <= bound, "{name} is off by {error:e}, {isa}, {:?}", data.case);
    }
}

/// Returns the case with and without the delta rule, with decays by head and by channel. With β up
/// to 2, eigenvalues are negative.
fn rules(case: Case) -> [Case; 4] {
    let by_channel = Case { by_channel: true, ..case };
    [case, Case { beta: 2.0, ..case }, by_channel, Case { beta: 2.0, ..by_channel }]
}

fn check(cases: impl IntoIterator<Item = Case>) {
    let pool = pool(2);
    for case in cases.into_iter().flat_map(rules) {
        let expected = recurrence(&Data::new(case));
        for isa in Isa::available() {
            let data = Data::new(case);
            data.run((isa, &pool));
            assert_right(&data, &expected, isa);
        }
    }
}

#[test]
fn any_length_gives_the_recurrence() {
    let lengths = [0, 1, 2, 31, 63, 64, 65, 100, 127, 128, 129, 300];
    check(lengths.map(|tokens| Case { tokens, ..CASE }));
}

#[test]
fn any_decay_gives_the_recurrence() {
    check([0.5, 0.7, 0.9, 0.99, 0.999, 1.0].map(|decay| Case { logs: Logs::Of(decay), ..CASE }));
}

#[test]
fn any_heads_and_dims_give_the_recurrence() {
    let shapes = [
        ([1, 1, 1], [1, 3]),
        ([3, 3, 3], [16, 16]),
        ([4, 1, 1], [64, 64]),
        ([6, 2, 2], [130, 7]),
        ([2, 2, 6], [16, 24]),
        ([1, 1, 4], [40, 8]),
        ([6, 2, 3], [8, 16]),
        ([3, 2, 6], [8, 16]),
        ([2, 4, 8], [24, 16]),
    ];
    check(shapes.map(|(heads, dims)| Case { heads, dims, batch: 1, ..CASE }));
}

#[test]
fn queries_are_scaled_before_any_rounding() {
    let case = Case { scale: 0.3, heads: [2, 2, 4], ..CASE };
    check([Dtype::F32, Dtype::Bf16].map(|dtype| Case { dtype, ..case }));
}

#[test]
fn results_of_16_bits_are_rounded_once() {
    check([Dtype::Bf16, Dtype::F16].map(|dtype| Case { dtype, logs: Logs::Of(0.95), ..CASE }));
}

/// Where tokens decay by e^−50, the gradients of decays are as small.
#[test]
fn strong_decays_keep_their_digits() {
    check([
        Case { logs: Logs::Of((-50.0f64).exp()), ..CASE },
        Case { logs: Logs::Of((-9.0f64).exp()), ..CASE },
        Case { logs: Logs::Sometimes(7, -50.0), ..CASE },
        Case { logs: Logs::Sometimes(70, -1e5), ..CASE },
        Case { logs: Logs::Sometimes(50, -1e30), ..CASE },
        Case { logs: Logs::Sometimes(50, f32::MIN), ..CASE },
    ]);
}

#[test]
fn a_reset_lets_nothing_pass() {
    for every in [2, 9, 70, 200] {
        let logs = Logs::Sometimes(every, f32::NEG_INFINITY);
        check([Case { logs, ..CASE }]);
        let data = Data::new(Case { logs, ..CASE });
        data.run((Isa::best(), &pool(1)));
        let (logs, gradients) = (data.logs.values(), data.results[5].values());
        let resets = gradients.iter().zip(&logs).filter(|(_, log)| **log == f64::NEG_INFINITY);
        let resets: Vec<f64> = resets.map(|(gradient, _)| *gradient).collect();
        assert!(!resets.is_empty() && resets.iter().all(|x| *x == 0.0), "{resets:?}");
    }
}

#[test]
fn values_that_are_not_finite_stay_with_later_tokens() {
    for isa in Isa::available() {
        let mut data = Data::new(CASE);
        let [k_dim, v_dim] = CASE.dims;
        let token = 100;
        let first = |dim| token * CASE.heads[1] * dim;
        data.k.set(first(k_dim), f32::NAN);
        data.v.set(first(v_dim), f32::INFINITY);
        data.run((isa, &pool(1)));
        let o = data.results[0].values();
        let row = CASE.all_heads() * v_dim;
        assert!(o[..token * row].iter().all(|x| x.is_finite()), "{isa}: earlier outputs");
        assert!(o[token * row..][..v_dim].iter().all(|x| !x.is_finite()), "{isa}: its output");
    }
}

/// Asserts that spoilt tokens have results that are not finite, and that all other tokens have the
/// same bits as in `clean`. `spoilt` takes the resets of a head and a token.
fn assert_apart(clean: &Data, data: &Data, spoilt: impl Fn(&[usize], usize) -> bool, what: &str) {
    let (tokens, heads) = (clean.case.tokens, clean.case.all_heads());
    let logs = clean.logs.values();
    let log = |t: usize, head: usize| logs[(t * heads + head) * clean.case.decays()];
    let rows = [0, 2, 3, 4, 5, 7].into_iter().filter(|at| *at < 7 || clean.case.beta > 0.0);
    for at in rows {
        let (name, dim) = (NAMES[at], clean.results[at].shape[3]);
        let [want, got] = [clean, data].map(|data| data.results[at].values());
        for head in 0..heads {
            let resets: Vec<usize> =
                (0..tokens).filter(|t| log(*t, head) == f64::NEG_INFINITY).collect();
            let (inside, outside): (Vec<_>, Vec<_>) =
                (0..tokens).partition(|&t| spoilt(&resets, t));
            let row = |t: usize| (t * heads + head) * dim..(t * heads + head + 1) * dim;
            for t in outside {
                assert_eq!(got[row(t)], want[row(t)], "{what}: {name} of token {t}, head {head}");
            }
            let mut inside = inside.into_iter().flat_map(|t| &got[row(t)]);
            assert!(inside.any(|x| !x.is_finite()), "{what}: {name} of head {head}");
        }
    }
}

#[test]
fn not_even_nan_passes_a_reset() {
    let token = 75;
    let resets =
        |every| Case { heads: [2; 3], logs: Logs::Sometimes(every, f32::NEG_INFINITY), ..CASE };
    let cases = [9, 70].map(|every| rules(resets(every)).map(|case| (every, case)));
    let isas = Isa::available();
    let all = cases.iter().flatten().flat_map(|case| isas.iter().map(move |isa| (*case, *isa)));
    for ((every, case), isa) in all {
        let run = |spoil: &dyn Fn(&mut Data)| {
            let mut data = Data::new(case);
            spoil(&mut data);
            data.run((isa, &pool(1)));
            data
        };
        let clean = run(&|_| ());
        for value in [f32::NAN, f32::INFINITY, 1e25] {
            let data = run(&|data| {
                for array in [&mut data.q, &mut data.k, &mut data.v, &mut data.dout] {
                    let row = 2 * array.shape[3];
                    (token * row..(token + 1) * row).for_each(|at| array.set(at, value));
                }
            });
            let run_of = |resets: &[usize], t: usize| resets.partition_point(|reset| *reset <= t);
            let spoilt = |resets: &[usize], t| run_of(resets, t) == run_of(resets, token);
            assert_apart(&clean, &data, spoilt, &format!("{value}, {isa}, every {every}"));
        }
        let data = run(&|data| {
            for array in [&mut data.before, &mut data.dafter] {
                (0..array.values().len()).for_each(|at| array.set(at, f32::NAN));
            }
        });
        let at_ends = |resets: &[usize], t: usize| {
            let before = resets.first().is_none_or(|reset| t < *reset);
            before || resets.last().is_none_or(|reset| t >= *reset)
        };
        assert_apart(&clean, &data, at_ends, &format!("states, {isa}, every {every}"));
    }
}

#[test]
fn two_calls_are_one() {
    for (at, case) in [1, 40, 64, 128, 149].into_iter().flat_map(|at| rules(CASE).map(|c| (at, c)))
    {
        let (whole, halves) = (Data::new(case), Data::new(case));
        let device = (Isa::best(), &pool(2));
        whole.run(device);
        halves.run_halves(device, at);
        for ((name, whole), halves) in NAMES.iter().zip(&whole.results).zip(&halves.results) {
            let error = error(&halves.values(), &whole.values());
            assert!(error <= VALUES, "{name} is off by {error:e}, halves meet at {at}");
        }
    }
}

/// Two calls that meet between chunks compute the bits of one call, even if the scratch of the one
/// call cannot hold all states.
#[test]
fn states_that_do_not_all_fit_change_no_bits() {
    // Seven chunks of large states make three parts. Each needs the state that the one before leaves.
    let (tokens, logs) = (6 * 64 + 1, Logs::Of(0.999));
    let case = Case { batch: 1, tokens, heads: [1; 3], dims: [728; 2], logs, ..CASE };
    let (whole, halves) = (Data::new(case), Data::new(case));
    let device = (Isa::best(), &pool(2));
    whole.run(device);
    halves.run_halves(device, 3 * 64);
    for ((name, whole), halves) in NAMES.iter().zip(&whole.results).zip(&halves.results) {
        let zero = *name == "dbeta" && case.beta == 0.0;
        assert!(zero || whole.bits().iter().any(|x| *x != 0), "{name} is zero");
        assert!(whole.bits() == halves.bits(), "{name} differs");
    }
}

/// Large results whose rows are whole cache lines bypass the cache; the results of halves are too
/// small to do so.
#[test]
#[ignore = "takes long: make test-full"]
fn large_results_have_the_same_bits() {
    let (tokens, heads, dims) = (1 << 15, [4; 3], [16, 64]);
    let case = Case { batch: 1, tokens, heads, dims, logs: Logs::Of(0.99), ..CASE };
    for isa in Isa::available() {
        let data = Data::new(case);
        let device = (isa, &pool(2));
        data.run_halves(device, tokens / 2);
        let o = HostArray::accumulator(1, 0..tokens, heads[0], dims[1]);
        let io = ForwardIo {
            q: data.q.view(),
            k: data.k.view(),
            v: data.v.view(),
            scale: 1.0,
            log_decay: data.logs.view(),
            beta: None,
            before: state(&data.before),
            o: o.clone(),
            after: state(&data.results[1]),
        };
        forward(device, &io);
        let halves = data.results[0].view();
        for (row, head) in (0..tokens).flat_map(|row| (0..heads[0]).map(move |head| (row, head))) {
            let [got, expected] = [&o, &halves].map(|array| {
                let at = array.row(0, row, head).cast::<[u32; 64]>();
                // SAFETY: a row has 64 floats, which `o` or `data` owns until the test ends.
                unsafe { at.read_unaligned() }
            });
            assert!(got == expected, "{isa}: row {row} of head {head} differs");
        }
    }
}

/// With more threads than heads, the threads share the chunks of each head.
#[test]
fn results_repeat_on_any_number_of_threads() {
    let case = Case { tokens: 1100, logs: Logs::Sometimes(300, f32::NEG_INFINITY), ..CASE };
    for case in rules(case) {
        let runs = [1, 2, 9, 40].map(|threads| {
            let data = Data::new(case);
            data.run((Isa::best(), &pool(threads)));
            data.results
        });
        for other in &runs[1..] {
            for ((name, one), other) in NAMES.iter().zip(&runs[0]).zip(other) {
                assert!(one.bits() == other.bits(), "{name}, {case:?}");
            }
        }
    }
}

/// A scan gives the state after tokens alone, and backward the gradient of the state before them.
#[test]
fn a_scan_gives_the_states_of_both_passes() {
    for logs in [Logs::Random, Logs::Of(0.98), Logs::Sometimes(70, f32::NEG_INFINITY)] {
        for isa in Isa::available() {
            let mut data = Data::new(Case { logs, heads: [2, 2, 4], scale: 0.3, ..CASE });
            data.before = Array::zeros(Dtype::F32, data.before.shape);
            data.dafter = data.before.clone();
            let device = (isa, &pool(2));
            data.run(device);
            for (backward, result) in [(false, 1), (true, 6)] {
                let found = data.before.clone();
                let [left, right] =
                    if backward { [&data.q, &data.dout] } else { [&data.k, &data.v] };
                let (left, right, log_decay) = (&left.view(), &right.view(), &data.logs.view());
                let (out, scale) = (&state(&found), if backward { data.case.scale } else { 1.0 });
                scan(device, &Scan { left, right, scale, log_decay, backward, out });
                let error = error(&found.values(), &data.results[result].values());
                assert!(error <= 1e-6, "{} is off by {error:e}, {isa}, {logs:?}", NAMES[result]);
            }
        }
    }
}
