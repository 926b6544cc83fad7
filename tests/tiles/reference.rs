//! Random inputs of a shape, and the reference's results for them.

use burst_attention::host::array::HostArray;
use burst_attention::problem::Dtype;
use burst_attention_reference::{self as reference, Attention, Dense, Features};

use super::{HostArray64, Shape, get, indices, random};

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

/// The reference's results.
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
        let attention = Attention {
            batch,
            q_len: queries,
            kv_len: keys,
            heads,
            kv_heads,
            head_dim: dim,
            value_dim: v_dim,
            softmax_scale: shape.scale(),
            features: Features {
                band: (shape.band.lower, shape.band.upper),
                soft_cap: shape.soft_cap,
                ..Features::default()
            },
        };
        let values = |array| indices(array).map(|at| get(array, at) as f32).collect::<Vec<_>>();
        let inputs = reference::Inputs {
            q: &values(&inputs.q),
            k: &values(&inputs.k),
            v: &values(&inputs.v),
            dout: &values(&inputs.dout),
            dlse: &values(&inputs.dlse),
        };
        let Dense { o, lse, delta, dq, dk, dv, .. } =
            reference::dense::<f64>(&attention, &inputs, |o| o);
        let array = |shape, values| HostArray64 { shape, values };
        Outputs {
            o: array([batch, queries, heads, v_dim], o),
            lse: array([batch, queries, heads, 1], lse),
            delta: array([batch, queries, heads, 1], delta),
            dq: array([batch, queries, heads, dim], dq),
            dk: array([batch, keys, kv_heads, dim], dk),
            dv: array([batch, keys, kv_heads, v_dim], dv),
        }
    }
}
