//! Dense attention and its gradients in float64, straight from the formulae.

use super::{HostArray64, Shape, get, random};
use burst_attention::host::array::HostArray;
use burst_attention::problem::Dtype;

/// The inputs of a test.
pub struct Inputs {
    pub q: HostArray,
    pub k: HostArray,
    pub v: HostArray,
    pub dout: HostArray,
    pub dlse: HostArray,
}

impl Inputs {
    pub fn random(shape: &Shape, seed: u64) -> Inputs {
        let Shape { batch, queries, keys, kv_heads, dim, v_dim, dtype, .. } = *shape;
        let heads = shape.heads();
        Inputs {
            q: random(dtype, [batch, queries, heads, dim], seed),
            k: random(dtype, [batch, keys, kv_heads, dim], seed + 1),
            v: random(dtype, [batch, keys, kv_heads, v_dim], seed + 2),
            dout: random(dtype, [batch, queries, heads, v_dim], seed + 3),
            dlse: random(Dtype::F32, [batch, queries, heads, 1], seed + 4),
        }
    }
}

/// What attention makes of them.
pub struct Outputs {
    pub o: HostArray64,
    pub lse: HostArray64,
    pub delta: HostArray64,
    pub dq: HostArray64,
    pub dk: HostArray64,
    pub dv: HostArray64,
}

impl Outputs {
    pub fn of(shape: &Shape, inputs: &Inputs) -> Outputs {
        let Shape { batch, queries, keys, kv_heads, dim, v_dim, .. } = *shape;
        let heads = shape.heads();
        let mut outputs = Outputs {
            o: HostArray64::zeros([batch, queries, heads, v_dim]),
            lse: HostArray64::zeros([batch, queries, heads, 1]),
            delta: HostArray64::zeros([batch, queries, heads, 1]),
            dq: HostArray64::zeros([batch, queries, heads, dim]),
            dk: HostArray64::zeros([batch, keys, kv_heads, dim]),
            dv: HostArray64::zeros([batch, keys, kv_heads, v_dim]),
        };
        for b in 0..batch {
            for head in 0..heads {
                for i in 0..queries {
                    outputs.row(shape, inputs, [b, i, head]);
                }
            }
        }
        outputs
    }

    /// One query: its results, and what it adds to the gradients of the keys it sees.
    fn row(&mut self, shape: &Shape, inputs: &Inputs, [b, i, head]: [usize; 3]) {
        let Inputs { q, k, v, dout, dlse } = inputs;
        let scale = f64::from(shape.scale());
        let kv = head / shape.group_size;
        let vector = |array: &HostArray, row: usize, head: usize| -> Vec<f64> {
            (0..array.dim).map(|d| get(array, [b, row, head, d])).collect()
        };
        let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
        let (q, dout) = (vector(q, i, head), vector(dout, i, head));
        let seen: Vec<usize> = (0..shape.keys).filter(|j| shape.band.allows(i, *j)).collect();
        // Each with its derivative by the score before the cap.
        let capped = |s: f64| match shape.soft_cap.map(f64::from) {
            Some(cap) => (cap * (s / cap).tanh(), 1.0 / (s / cap).cosh().powi(2)),
            None => (s, 1.0),
        };
        let (logits, slopes): (Vec<f64>, Vec<f64>) =
            seen.iter().map(|j| capped(scale * dot(&q, &vector(k, *j, kv)))).unzip();
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|s| (s - max).exp()).sum();
        let lse = if seen.is_empty() { f64::NEG_INFINITY } else { max + sum.ln() };
        let values: Vec<Vec<f64>> = seen.iter().map(|j| vector(v, *j, kv)).collect();
        let p: Vec<f64> = logits.iter().map(|s| (s - lse).exp()).collect();
        for (p, v) in p.iter().zip(&values) {
            for (d, v) in v.iter().enumerate() {
                *self.o.at([b, i, head, d]) += p * v;
            }
        }
        let o: Vec<f64> = (0..shape.v_dim).map(|d| self.o.get([b, i, head, d])).collect();
        let delta = dot(&dout, &o) - get(dlse, [b, i, head, 0]);
        *self.lse.at([b, i, head, 0]) = lse;
        *self.delta.at([b, i, head, 0]) = delta;
        for (((p, v), slope), j) in p.iter().zip(&values).zip(slopes).zip(seen) {
            let ds = p * (dot(&dout, v) - delta) * slope * scale;
            for (d, dout) in dout.iter().enumerate() {
                *self.dv.at([b, j, kv, d]) += p * dout;
            }
            for (d, q) in q.iter().enumerate() {
                *self.dk.at([b, j, kv, d]) += ds * q;
                *self.dq.at([b, i, head, d]) += ds * get(k, [b, j, kv, d]);
            }
        }
    }
}
