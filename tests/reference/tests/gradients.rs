//! The gradients of the reference equal finite differences.

use burst_attention_reference::linear::Head;
use burst_attention_reference::{Attention, Dense, Dropout, Features, Inputs, dense, numbers};

/// Returns multiples of 2^-10 in [−1, 1), so that float32 holds them and their neighbours exactly.
fn values(count: usize, seed: usize) -> Vec<f32> {
    let value = |at: usize| (((at + 1) * 7919 + seed * 104_729) % 2048) as f32 / 1024.0 - 1.0;
    (0..count).map(value).collect()
}

/// Returns a problem with every feature, in which some queries see no key.
fn attention() -> Attention {
    let segments = |rows: usize| (0..2 * rows).map(|at| [0, 0, 1, -1][at / 2 % 4]).collect();
    Attention {
        batch: 2,
        q_len: 7,
        kv_len: 6,
        heads: 4,
        kv_heads: 2,
        head_dim: 3,
        value_dim: 2,
        softmax_scale: 0.7,
        features: Features {
            band: Features::window(Some(5), Some(2)),
            segments: Some([segments(7), segments(6)]),
            soft_cap: Some(1.5),
            positions: (3, 1, 2),
            counted_positions: None,
            visible: None,
            slopes: Some(values(8, 5)),
            dropout: Some(Dropout { rate: 0.3, numbers: (0..2).map(numbers).collect() }),
        },
    }
}

/// Returns the results for q, k, v, dout and dlse.
fn results(attention: &Attention, [q, k, v, dout, dlse]: &[Vec<f32>; 5]) -> Dense {
    dense::<f64>(attention, &Inputs { q, k, v, dout, dlse }, |o| o)
}

/// Asserts that `gradient` is the derivative of `loss` by each of some values.
fn assert_derivative(
    name: &str,
    gradient: &[f64],
    step: f64,
    mut loss: impl FnMut(usize, f64) -> f64,
) {
    assert!(gradient.iter().any(|x| x.abs() > 0.01), "{name} says little");
    for (at, gradient) in gradient.iter().enumerate() {
        let difference = (loss(at, step) - loss(at, -step)) / (2.0 * step);
        assert!((gradient - difference).abs() < 1e-4, "{name} {at}: {gradient}, not {difference}");
    }
}

#[test]
fn attention_with_every_feature() {
    let attention = attention();
    let inputs = [168, 72, 48, 112, 56].map(|count| values(count, count / 8 % 5 + count % 11));
    let found = results(&attention, &inputs);
    assert!(found.lse.iter().any(|x| x.is_infinite()) && found.lse.iter().any(|x| x.is_finite()));
    let loss = |attention: &Attention, inputs: &[Vec<f32>; 5]| {
        let Dense { o, lse, .. } = results(attention, inputs);
        let finite = lse.iter().map(|x| if x.is_finite() { *x } else { 0.0 });
        let [.., dout, dlse] = inputs;
        o.iter().zip(dout).map(|(x, y)| x * f64::from(*y)).sum::<f64>()
            + finite.zip(dlse).map(|(x, y)| x * f64::from(*y)).sum::<f64>()
    };
    for (n, (name, gradient)) in
        [("dq", &found.dq), ("dk", &found.dk), ("dv", &found.dv)].into_iter().enumerate()
    {
        assert_derivative(name, gradient, 2f64.powi(-8), |at, step| {
            let mut inputs = inputs.clone();
            inputs[n][at] += step as f32;
            loss(&attention, &inputs)
        });
    }
    let mut dslopes = [0.0; 8];
    for (at, term) in found.dslopes.iter().enumerate() {
        dslopes[at / (7 * 4) * 4 + at % 4] += term;
    }
    assert_derivative("dslopes", &dslopes, 2f64.powi(-8), |at, step| {
        let mut attention = attention.clone();
        attention.features.slopes.as_mut().expect("slopes")[at] += step as f32;
        loss(&attention, &inputs)
    });
}

/// Asserts that all gradients of the recurrence are derivatives, with a number of decays for each
/// token, and with or without the delta rule.
fn assert_recurrence(decays: usize, delta: bool) {
    const TOKENS: usize = 6;
    let wide = |count, seed| values(count, seed).into_iter().map(f64::from).collect::<Vec<_>>();
    let head = Head {
        dims: [3, 2],
        q: wide(3 * TOKENS, 1),
        k: wide(3 * TOKENS, 2),
        v: wide(2 * TOKENS, 3),
        dout: wide(2 * TOKENS, 4),
        decays: wide(decays * TOKENS, 5).into_iter().map(|x| 0.5 + x / 4.0).collect(),
        beta: delta.then(|| wide(TOKENS, 8).into_iter().map(|x| 1.0 + x).collect()),
    };
    let (before, dafter) = (wide(6, 6), wide(6, 7));
    let loss = |head: &Head, before: &[f64]| {
        let found = head.recurrence(before, &dafter);
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
        dot(&found.o, &head.dout) + dot(&found.after, &dafter)
    };
    let found = head.recurrence(&before, &dafter);
    type Part = fn(&mut Head) -> &mut Vec<f64>;
    let mut parts: Vec<(&str, &[f64], Part)> = vec![
        ("dq", &found.dq, |head| &mut head.q),
        ("dk", &found.dk, |head| &mut head.k),
        ("dv", &found.dv, |head| &mut head.v),
    ];
    if delta {
        parts.push(("dbeta", &found.dbeta, |head| head.beta.as_mut().expect("the delta rule")));
    }
    for (name, gradient, part) in parts {
        assert_derivative(name, gradient, 1e-5, |at, step| {
            let mut head = head.clone();
            part(&mut head)[at] += step;
            loss(&head, &before)
        });
    }
    assert_derivative("dlog_decay", &found.dlog_decay, 1e-5, |at, step| {
        let mut head = head.clone();
        head.decays[at] *= step.exp();
        loss(&head, &before)
    });
    assert_derivative("dbefore", &found.dbefore, 1e-5, |at, step| {
        let mut before = before.clone();
        before[at] += step;
        loss(&head, &before)
    });
}

#[test]
fn the_recurrence() {
    assert_recurrence(1, false);
    assert_recurrence(3, false);
}

#[test]
fn the_recurrence_of_the_delta_rule() {
    assert_recurrence(1, true);
    assert_recurrence(3, true);
}
