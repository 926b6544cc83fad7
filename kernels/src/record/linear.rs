//! Launch records of linear attention.

use super::{Access, Argument, Kind, Meaning, Operand, Size, View, count, joined};

const STATE_ARRAYS: &[Argument] = &arguments! {
    k: Activations(K)[QLen, KvHeads, HeadDim] / 16, "keys, or in reverse queries [batch, rows, kv_heads, head_dim]";
    v: Activations(V)[QLen, KvHeads, ValueDim] / 16, "values, or in reverse gradients of the output [batch, rows, kv_heads, value_dim]";
    sums: Float32s(Sums)[Heads, PaddedRows; Sums, Sums] / 16, "sums of log decays since the start of a tile, in base 2 [batch, heads, padded_rows]";
    state: Float32s(State)[Parts, Heads, HeadDim, ValueDim] Out / 16, "the state that each part leaves [batch, parts, heads, head_dim, value_dim]";
};

const ROWS: &[Argument] = &arguments! {
    batch: I32(Size(Batch)), "batch entries";
    rows: I32(Size(QLen)), "tokens";
    padded_rows: I32(Size(PaddedRows)) / 16, "tokens, rounded up to whole tiles";
    heads: I32(Size(Heads)), "heads of sums and states";
};

const KEY_HEADS: &[Argument] = &arguments! {
    kv_heads: I32(Size(KvHeads)), "heads of k and v, a divisor of heads";
};

const COLUMNS: &[Argument] = &arguments! {
    head_dim: I32(Size(HeadDim)) / 8, "columns of k, rows of a state";
    value_dim: I32(Size(ValueDim)) / 8, "columns of v, and of a state";
};

const KEY_STRIDES: &[Argument] = &arguments! {
    k_batch_stride: I32(BatchStride(K)) / 8, "elements between batch entries of k";
    v_batch_stride: I32(BatchStride(V)) / 8, "elements between batch entries of v";
};

const STATE_STRIDES: &[Argument] = &arguments! {
    sums_batch_stride: I32(BatchStride(Sums)) / 16, "elements between batch entries of sums";
    sums_head_stride: I32(HeadStride(Sums)) / 16, "elements between heads of sums, and of dots";
    state_stride: I32(StateSize) / 16, "elements of a state";
};

const CUTS: &[Argument] = &arguments! {
    parts: I32(Size(Parts)), "parts of the tokens, each with a state of its own";
    part_tiles: I32(PartTiles), "tiles of a part; the last may have fewer";
    reverse: I32(Reverse), "1: from the last token to the first";
};

const ATTEND_ARRAYS: &[Argument] = &arguments! {
    q: Activations(Q)[QLen, QHeads, HeadDim] / 16, "queries [batch, rows, q_heads, head_dim]";
    k: Activations(K)[QLen, KvHeads, HeadDim] / 16, "keys [batch, rows, kv_heads, head_dim]";
    v: Activations(V)[QLen, KvHeads, ValueDim] / 16, "values [batch, rows, kv_heads, value_dim]";
    sums: Float32s(Sums)[Heads, PaddedRows; Sums, Sums] / 16, "sums of log decays since the start of a tile, in base 2 [batch, heads, padded_rows]";
    state: Float32s(State)[Parts, Heads, HeadDim, ValueDim] / 16, "the state where each part begins [batch, parts, heads, head_dim, value_dim]";
    other: Activations(Other)[QLen, QHeads, ValueDim] In(Dots) / 16, "factor of the products by row [batch, rows, q_heads, value_dim]; read if has_other";
    o: Activations(O)[QLen, Heads, ValueDim] Out / 16, "result [batch, rows, heads, value_dim]";
    dots: Float32s(Dots)[DotHeads, PaddedRows; Dots, Sums] Out(Dots) / 16, "rowsum(o ∘ other) of each tile of columns [batch, heads · tiles, padded_rows]; written if has_dots";
};

const ATTEND_HEADS: &[Argument] = &arguments! {
    q_heads: I32(Size(QHeads)), "heads of q and other, a divisor of heads";
    kv_heads: I32(Size(KvHeads)), "heads of k and v, a divisor of heads";
    dot_heads: I32(Size(DotHeads)), "heads times tiles of columns";
};

const ATTEND_STRIDES: &[Argument] = &arguments! {
    q_batch_stride: I32(BatchStride(Q)) / 8, "elements between batch entries of q";
    k_batch_stride: I32(BatchStride(K)) / 8, "elements between batch entries of k";
    v_batch_stride: I32(BatchStride(V)) / 8, "elements between batch entries of v";
    other_batch_stride: I32(BatchStride(Other)) / 8, "elements between batch entries of other";
    o_batch_stride: I32(BatchStride(O)) / 8, "elements between batch entries of o";
    dots_batch_stride: I32(BatchStride(Dots)) / 16, "elements between batch entries of dots";
};

const ATTEND_FLAGS: &[Argument] = &arguments! {
    bounded: I32(Bounded), "1: the kernel scales values so that they stay below 2^15 when narrowed to 16 bits";
    has_other: I32(Has(Dots)), "1: the kernel reads other and writes dots; equals has_dots";
    has_dots: I32(Has(Dots)), "1: the kernel reads other and writes dots";
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
