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

/// p = e^(s − lse), o = Σ p v, dp = dout·v, delta = dout·o − dlse, ds = p (dp − delta) times what
/// the soft cap gives, dq = scale Σ ds k, dk = scale Σ ds q, dv = Σ p dout; `store_o` rounds o as
/// what delta is computed from is.
pub fn dense<R: Real>(case: &Case, inputs: &Inputs, store_o: impl Fn(R) -> R) -> Dense {
    let Case { batch, q_len, kv_len, heads, kv_heads, head_dim: dim, .. } = *case;
    let zero = R::from(0.0);
    let scale = R::from(case.scale());
    let mut largest = 0f64;
    let queries = batch * q_len * heads;
    let (mut o, mut lse) = (vec![zero; queries * dim], vec![R::from(f32::NEG_INFINITY); queries]);
    let (mut delta, mut dq) = (vec![zero; queries], vec![zero; queries * dim]);
    let mut dk = vec![zero; batch * kv_len * kv_heads * dim];
    let mut dv = dk.clone();
    let key_rows = |array: &[f32]| -> Vec<Vec<R>> {
        (0..batch * kv_len * kv_heads).map(|index| row(array, index, dim)).collect()
    };
    let (k, v) = (key_rows(&inputs.k), key_rows(&inputs.v));
    for at in 0..queries {
        let (b, i, h) = (at / heads / q_len, at / heads % q_len, at % heads);
        let key = |j: usize| (b * kv_len + j) * kv_heads + h / (heads / kv_heads);
        let (q, dout) = (row::<R>(&inputs.q, at, dim), row::<R>(&inputs.dout, at, dim));
        let scores: Vec<_> = (0..kv_len)
            .filter(|&j| case.sees(b, i, j))
            .map(|j| (key(j), capped(case, scale * dot(&q, &k[key(j)]))))
            .collect();
        let mut max = R::from(f32::NEG_INFINITY);
        for &(_, (score, _)) in &scores {
            max = if score > max { score } else { max };
            largest = largest.max(score.into().abs());
        }
        let total = scores.iter().fold(zero, |sum, &(_, (score, _))| sum + (score - max).exp());
        let out = &mut o[at * dim..][..dim];
        if !scores.is_empty() {
            lse[at] = max + total.ln();
            scores.iter().for_each(|&(j, (score, _))| add_scaled(out, (score - max).exp(), &v[j]));
            out.iter_mut().for_each(|x| *x = *x / total);
        }
        let stored: Vec<R> = out.iter().map(|&x| store_o(x)).collect();
        delta[at] = dot(&dout, &stored) - R::from(inputs.dlse[at]);
        for (j, (score, slope)) in scores {
            let p = (score - lse[at]).exp();
            let ds = scale * p * (dot(&dout, &v[j]) - delta[at]) * slope;
            add_scaled(&mut dq[at * dim..][..dim], ds, &k[j]);
            add_scaled(&mut dk[j * dim..][..dim], ds, &q);
            add_scaled(&mut dv[j * dim..][..dim], p, &dout);
        }
    }
    let wide = |tensor: Vec<R>| tensor.into_iter().map(Into::into).collect();
    let [o, lse, delta, dq, dk, dv] = [o, lse, delta, dq, dk, dv].map(wide);
    Dense { o, lse, delta, dq, dk, dv, largest }
}
