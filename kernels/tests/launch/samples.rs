//! Descriptions that tests start from.

use burst_attention_kernels::instances::Element;
use burst_attention_kernels::launch::{
    Cast, Delta, Features, Forward, KeyGrads, QueryGrads, Rectangle, Rows, Segments, Statistics,
};

pub const Q: Rows = Rows { address: 0x1000, batch_stride: 1 << 24 };
pub const K: Rows = Rows { address: 0x2000, batch_stride: 1 << 24 };
pub const O: Rows = Rows { address: 0x3000, batch_stride: 1 << 24 };
pub const LSE: Rows = Rows { address: 0x4000, batch_stride: 1 << 24 };
pub const STATISTICS: Statistics =
    Statistics { address: 0x5000, batch_stride: 1 << 24, head_stride: 1 << 16 };

/// Returns two batch entries in which all queries see all keys, in float16.
pub fn shape(q_len: usize, kv_len: usize) -> Rectangle {
    Rectangle {
        batch: 2,
        q_len,
        kv_len,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        value_dim: 128,
        element: Element::F16,
        lower: i64::MIN,
        upper: i64::MAX,
        softmax_scale: 0.5,
    }
}

/// Returns a forward pass without a state.
pub fn forward(rectangle: Rectangle) -> Forward {
    Forward {
        rectangle,
        features: Features::default(),
        q: Q,
        k: K,
        v: K,
        acc: None,
        row_max: None,
        row_sum: None,
        o: Some(O),
        lse: Some(LSE),
        first: true,
        last: true,
    }
}

/// Returns gradients of keys and values without accumulators.
pub fn key_grads(rectangle: Rectangle) -> KeyGrads {
    KeyGrads {
        rectangle,
        features: Features::default(),
        q: Q,
        k: K,
        v: K,
        dout: O,
        lse_log2: STATISTICS,
        delta: STATISTICS,
        dk_acc: None,
        dv_acc: None,
        dq_acc: None,
        fixed_order: false,
        results: None,
        dk: Some(O),
        dv: Some(O),
        first: true,
        last: true,
    }
}

/// Returns gradients of queries without an accumulator.
pub fn query_grads(rectangle: Rectangle) -> QueryGrads {
    QueryGrads {
        rectangle,
        features: Features::default(),
        q: Q,
        k: K,
        v: K,
        dout: O,
        lse_log2: STATISTICS,
        delta: STATISTICS,
        dq_acc: None,
        dq: Some(O),
        dslopes: None,
        first: true,
        last: true,
    }
}

/// Returns statistics of a rectangle's queries.
pub fn delta(rectangle: Rectangle) -> Delta {
    let Rectangle { batch, q_len, heads, head_dim, element, .. } = rectangle;
    Delta {
        batch,
        q_len,
        heads,
        head_dim,
        element,
        o: O,
        dout: Q,
        lse: LSE,
        dlse: None,
        lse_log2: STATISTICS,
        delta: STATISTICS,
        zeros: None,
    }
}

/// Returns a cast of one accumulator of a rectangle's queries.
pub fn cast(rectangle: Rectangle) -> Cast {
    let Rectangle { batch, q_len: rows, heads, head_dim, element, .. } = rectangle;
    Cast { batch, rows, heads, head_dim, element, a: Q, b: None, out: O, scale: 1.0 }
}

/// Returns segments of up to 1024 queries and keys.
pub fn segments() -> Segments {
    let at = |address, batch_stride| Rows { address, batch_stride };
    Segments { queries: at(0x6000, 1024), keys: at(0x7000, 2048), ranges: at(0x8000, 128) }
}
