//! Attention and its gradients, densely, in any precision.

use super::case::{Case, Inputs};
use std::ops::{Add, AddAssign, Div, Mul, Sub};

pub trait Real:
    Copy
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + AddAssign
    + From<f32>
    + Into<f64>
{
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn tanh(self) -> Self;
}

impl Real for f32 {
    fn exp(self) -> Self {
        f32::exp(self)
    }
    fn ln(self) -> Self {
        f32::ln(self)
    }
    fn tanh(self) -> Self {
        f32::tanh(self)
    }
}

impl Real for f64 {
    fn exp(self) -> Self {
        f64::exp(self)
    }
    fn ln(self) -> Self {
        f64::ln(self)
    }
    fn tanh(self) -> Self {
        f64::tanh(self)
    }
}

/// Results as float64, whatever they were computed in.
pub struct Dense {
    pub o: Vec<f64>,
    /// `[batch, q_len, heads]`
    pub lse: Vec<f64>,
    pub delta: Vec<f64>,
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
    /// What each query adds to its slope's gradient, as lse.
    pub dslopes: Vec<f64>,
    /// The largest scaled and capped score, without its sign.
    pub largest: f64,
}

fn row<R: Real>(array: &[f32], index: usize, dim: usize) -> Vec<R> {
    array[index * dim..][..dim].iter().map(|&x| R::from(x)).collect()
}

fn dot<R: Real>(a: &[R], b: &[R]) -> R {
    a.iter().zip(b).fold(R::from(0.0), |sum, (&a, &b)| sum + a * b)
}

fn add_scaled<R: Real>(sum: &mut [R], factor: R, row: &[R]) {
    sum.iter_mut().zip(row).for_each(|(sum, &x)| *sum += factor * x);
}

/// A scaled score with its soft cap, and what its gradient gets for that: cap · tanh(s / cap) and
/// 1 − tanh²(s / cap).
fn capped<R: Real>(case: &Case, score: R) -> (R, R) {
    let (one, cap) = (R::from(1.0), R::from(case.soft_cap));
    if case.soft_cap == 0.0 {
        return (score, one);
    }
    let ratio = (score / cap).tanh();
    (cap * ratio, one - ratio * ratio)
}

/// A key that a query sees.
struct Pair<R> {
    key: usize,
    score: R,
    /// What the soft cap makes of the score's gradient.
    slope: R,
    /// What dropout makes of the weight.
    keep: R,
    distance: R,
}

/// ALiBi's bias of a pair so far apart.
fn bias<R: Real>(case: &Case, inputs: &Inputs, (b, h): (usize, usize), distance: i64) -> R {
    R::from(inputs.slopes[b * case.heads + h]) * R::from(distance as f32)
}

/// p = e^(s − lse), o = Σ p keep v, dp = keep dout·v, delta = dout·o − dlse, ds = p (dp − delta),
/// dslope = Σ ds distance; then, with what the soft cap gives times ds, dq = scale Σ ds k,
/// dk = scale Σ ds q, dv = Σ p keep dout; `store_o` rounds o as what delta is computed from is.
pub fn dense<R: Real>(case: &Case, inputs: &Inputs, store_o: impl Fn(R) -> R) -> Dense {
    let Case { batch, q_len, kv_len, heads, kv_heads, head_dim: dim, .. } = *case;
    let value_dim = case.value_dim();
    let zero = R::from(0.0);
    let scale = R::from(case.scale());
    let mut largest = 0f64;
    let queries = batch * q_len * heads;
    let mut o = vec![zero; queries * value_dim];
    let mut lse = vec![R::from(f32::NEG_INFINITY); queries];
    let (mut delta, mut dslopes) = (vec![zero; queries], vec![zero; queries]);
    let mut dq = vec![zero; queries * dim];
    let keys = batch * kv_len * kv_heads;
    let (mut dk, mut dv) = (vec![zero; keys * dim], vec![zero; keys * value_dim]);
    let key_rows = |array: &[f32], dim| -> Vec<Vec<R>> {
        (0..keys).map(|index| row(array, index, dim)).collect()
    };
    let (k, v) = (key_rows(&inputs.k, dim), key_rows(&inputs.v, value_dim));
    for at in 0..queries {
        let (b, i, h) = (at / heads / q_len, at / heads % q_len, at % heads);
        let key = |j: usize| (b * kv_len + j) * kv_heads + h / (heads / kv_heads);
        let (q, dout) = (row::<R>(&inputs.q, at, dim), row::<R>(&inputs.dout, at, value_dim));
        let pairs: Vec<_> = (0..kv_len)
            .filter(|&j| case.sees(b, i, j))
            .map(|j| {
                let (score, slope) = capped(case, scale * dot(&q, &k[key(j)]));
                let distance = case.distance(i, j);
                let keep = R::from(case.kept((b, h), i, j));
                let score = score + bias(case, inputs, (b, h), distance);
                Pair { key: key(j), score, slope, keep, distance: R::from(distance as f32) }
            })
            .collect();
        let mut max = R::from(f32::NEG_INFINITY);
        for &Pair { score, .. } in &pairs {
            max = if score > max { score } else { max };
            largest = largest.max(score.into().abs());
        }
        let total = pairs.iter().fold(zero, |sum, pair| sum + (pair.score - max).exp());
        let out = &mut o[at * value_dim..][..value_dim];
        if !pairs.is_empty() {
            lse[at] = max + total.ln();
            for pair in &pairs {
                add_scaled(out, (pair.score - max).exp() * pair.keep, &v[pair.key]);
            }
            out.iter_mut().for_each(|x| *x = *x / total);
        }
        let stored: Vec<R> = out.iter().map(|&x| store_o(x)).collect();
        delta[at] = dot(&dout, &stored) - R::from(inputs.dlse[at]);
        for Pair { key: j, score, slope, keep, distance } in pairs {
            let p = (score - lse[at]).exp();
            let ds = p * (keep * dot(&dout, &v[j]) - delta[at]);
            dslopes[at] += ds * distance;
            add_scaled(&mut dq[at * dim..][..dim], scale * ds * slope, &k[j]);
            add_scaled(&mut dk[j * dim..][..dim], scale * ds * slope, &q);
            add_scaled(&mut dv[j * value_dim..][..value_dim], p * keep, &dout);
        }
    }
    let wide = |tensor: Vec<R>| tensor.into_iter().map(Into::into).collect();
    let [o, lse, delta, dq, dk, dv, dslopes] = [o, lse, delta, dq, dk, dv, dslopes].map(wide);
    Dense { o, lse, delta, dq, dk, dv, dslopes, largest }
}
