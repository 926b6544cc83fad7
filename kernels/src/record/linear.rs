//! Launch records of linear attention.

use super::{Access, Argument, Kind, Shape, View, count, joined};

const STATE_ARRAYS: [Argument; 4] = arguments! {
    k: Activations[LinearKeys, k_batch_stride] / 16, "keys, in reverse queries [batch, rows, kv_heads, head_dim]";
    v: Activations[LinearValues, v_batch_stride] / 16, "values, in reverse gradients of the output [batch, rows, kv_heads, value_dim]";
    sums: Float32s[LinearSums, sums_batch_stride, sums_head_stride] / 16, "sums of log decays since a tile began, in base 2 [batch, heads, padded_rows]";
    state: Float32s[LinearStates, state_stride] Out / 16, "the state that each part leaves [batch, parts, heads, head_dim, value_dim]";
};

const ROWS: [Argument; 4] = arguments! {
    batch: I32, "batch entries";
    rows: I32, "tokens";
    padded_rows: I32 / 16, "those up to the end of a tile";
    heads: I32, "heads of sums and states";
};

const KEY_HEADS: [Argument; 1] = arguments! {
    kv_heads: I32, "heads of k and v, a divisor of heads";
};

const COLUMNS: [Argument; 2] = arguments! {
    head_dim: I32 / 8, "columns of k, rows of a state";
    value_dim: I32 / 8, "columns of v, and of a state";
};

const KEY_STRIDES: [Argument; 2] = arguments! {
    k_batch_stride: I32 / 8, "elements between batch entries of k";
    v_batch_stride: I32 / 8, "elements between batch entries of v";
};

const STATE_STRIDES: [Argument; 3] = arguments! {
    sums_batch_stride: I32 / 16, "elements between batch entries of sums";
    sums_head_stride: I32 / 16, "elements between heads of sums, and of dots";
    state_stride: I32 / 16, "elements of a state";
};

const CUTS: [Argument; 3] = arguments! {
    parts: I32, "parts of the tokens, each of which has its state";
    part_tiles: I32, "tiles of a part; the last may have fewer";
    reverse: I32, "1: from the last token to the first";
};

const ATTEND_ARRAYS: [Argument; 8] = arguments! {
    q: Activations[LinearQueries, q_batch_stride] / 16, "queries [batch, rows, q_heads, head_dim]";
    k: Activations[LinearKeys, k_batch_stride] / 16, "keys [batch, rows, kv_heads, head_dim]";
    v: Activations[LinearValues, v_batch_stride] / 16, "values [batch, rows, kv_heads, value_dim]";
    sums: Float32s[LinearSums, sums_batch_stride, sums_head_stride] / 16, "sums of log decays since a tile began, in base 2 [batch, heads, padded_rows]";
    state: Float32s[LinearStates, state_stride] / 16, "the state where each part begins [batch, parts, heads, head_dim, value_dim]";
    other: Activations[LinearOthers, other_batch_stride] MaybeIn(has_other) / 16, "what the result is multiplied with [batch, rows, q_heads, value_dim]; read if has_other";
    o: Activations[LinearResults, o_batch_stride] Out / 16, "result [batch, rows, heads, value_dim]";
    dots: Float32s[LinearDots, dots_batch_stride, sums_head_stride] OptionalOut(has_dots) / 16, "rowsum(o ∘ other) of each tile of columns [batch, heads · tiles, padded_rows]; written if has_dots";
};

const ATTEND_HEADS: [Argument; 3] = arguments! {
    q_heads: I32, "heads of q and other, a divisor of heads";
    kv_heads: I32, "heads of k and v, a divisor of heads";
    dot_heads: I32, "heads times tiles of columns";
};

const ATTEND_STRIDES: [Argument; 6] = arguments! {
    q_batch_stride: I32 / 8, "elements between batch entries of q";
    k_batch_stride: I32 / 8, "elements between batch entries of k";
    v_batch_stride: I32 / 8, "elements between batch entries of v";
    other_batch_stride: I32 / 8, "elements between batch entries of other";
    o_batch_stride: I32 / 8, "elements between batch entries of o";
    dots_batch_stride: I32 / 16, "elements between batch entries of dots";
};

const ATTEND_FLAGS: [Argument; 3] = arguments! {
    bounded: I32, "1: what is narrowed to 16 bits is scaled to stay below 2^15";
    has_other: I32, "1: other is read, and dots are written; as has_dots";
    has_dots: I32, "1: other is read, and dots are written";
};

/// Arguments of `linear_state`.
pub const LINEAR_STATE: &[Argument] =
    record!(STATE_ARRAYS, ROWS, KEY_HEADS, COLUMNS, KEY_STRIDES, STATE_STRIDES, CUTS);

/// Arguments of `linear_attend`.
pub const LINEAR_ATTEND: &[Argument] = record!(
    ATTEND_ARRAYS,
    ROWS,
    ATTEND_HEADS,
    COLUMNS,
    ATTEND_STRIDES,
    STATE_STRIDES,
    CUTS,
    ATTEND_FLAGS
);
