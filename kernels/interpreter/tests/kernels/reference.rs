//! The reference's results for a case.

use burst_attention_reference::{
    self as reference, Attention, Dropout, Features, Real, Visible, numbers,
};

pub use burst_attention_reference::Dense;

use super::case::{Case, Inputs};

/// Computes a case densely in any precision. `store_o` rounds o before delta is computed from it.
pub fn dense<R: Real>(case: &Case, inputs: &Inputs, store_o: impl Fn(R) -> R) -> Dense {
    let Inputs { q, k, v, dout, dlse, slopes } = inputs;
    let Case { batch, q_len, kv_len, heads, kv_heads, head_dim, .. } = *case;
    let entries = 0..batch;
    let segments = |rows: usize, segment: fn(&Case, usize, usize) -> i32| {
        let rows = entries.clone().flat_map(move |b| (0..rows).map(move |row| (b, row)));
        rows.map(|(b, row)| segment(case, b, row)).collect()
    };
    let of_rows = |rows: usize, number: fn(usize, usize) -> i32| -> Vec<i32> {
        let rows = entries.clone().flat_map(move |b| (0..rows).map(move |row| (b, row)));
        rows.map(|(b, row)| number(b, row)).collect()
    };
    let intervals = case.masks.filter(|masks| masks.count > 0).map(|masks| {
        let of_key = |(b, j)| (masks.intervals)(b, j)[..masks.count].to_vec();
        let keys = entries.clone().flat_map(|b| (0..kv_len).map(move |j| (b, j)));
        let intervals = keys.map(of_key).collect();
        Visible { positions: of_rows(q_len, masks.position), intervals }
    });
    let counted_positions = case
        .masks
        .and_then(|masks| Some([of_rows(q_len, masks.position), of_rows(kv_len, masks.counted?)]));
    let attention = Attention {
        batch,
        q_len,
        kv_len,
        heads,
        kv_heads,
        head_dim,
        value_dim: case.value_dim(),
        softmax_scale: case.scale(),
        features: Features {
            band: case.band,
            segments: case
                .segments
                .map(|_| [segments(q_len, Case::q_segment), segments(kv_len, Case::kv_segment)]),
            soft_cap: (case.soft_cap != 0.0).then_some(case.soft_cap),
            positions: case.positions,
            counted_positions,
            visible: intervals,
            slopes: case.slopes.then(|| slopes.clone()),
            dropout: case
                .dropout
                .map(|rate| Dropout { rate, numbers: entries.clone().map(numbers).collect() }),
        },
    };
    reference::dense(&attention, &reference::Inputs { q, k, v, dout, dlse }, store_o)
}
