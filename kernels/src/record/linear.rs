//! Launch records of linear attention.

use super::{Access, Argument, Kind, Meaning, Operand, Size, View, count, joined};

const STATE_ARRAYS: &[Argument] = &arguments! {
    k: Activations(K)[QLen, KvHeads, HeadDim] / 16, "keys, or in reverse queries [batch, rows, kv_heads, head_dim]";
    v: Activations(V)[QLen, KvHeads, ValueDim] / 16, "values, or in reverse gradients of the output [batch, rows, kv_heads, value_dim]";
    sums: Float32s(Sums)[Heads, PaddedRows; Sums, Sums] / 16, "sums of log decays since the start of a tile, in base 2 [batch, heads, padded_rows]; of channels [batch, padded_rows, heads, columns]";
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

const SUMS_STRIDES: &[Argument] = &arguments! {
    sums_batch_stride: I32(BatchStride(Sums)) / 16, "elements between batch entries of sums";
    sums_head_stride: I32(HeadStride(Sums)) / 16, "elements between heads of sums, and of dots";
};

const STATE_STRIDES: &[Argument] = &arguments! {
    state_stride: I32(StateSize) / 16, "elements of a state";
};

const CUTS: &[Argument] = &arguments! {
    parts: I32(Size(Parts)), "parts of the tokens, each with a state of its own";
    part_tiles: I32(PartTiles), "tiles of a part; the last may have fewer";
};

const DIRECTION: &[Argument] = &arguments! {
    reverse: I32(Reverse), "1: from the last token to the first";
};

const ATTEND_ARRAYS: &[Argument] = &arguments! {
    q: Activations(Q)[QLen, QHeads, HeadDim] / 16, "queries [batch, rows, q_heads, head_dim]";
    k: Activations(K)[QLen, KvHeads, HeadDim] / 16, "keys [batch, rows, kv_heads, head_dim]";
    v: Activations(V)[QLen, KvHeads, ValueDim] / 16, "values [batch, rows, kv_heads, value_dim]";
    pairs: Float32s(Pairs)[PaddedRows, Heads, SixtyFour] KeyChannelsIn / 16, "products of queries with the keys of their tile under decays of channels, 0 where a query does not see a key [batch, padded_rows, heads, 64]";
    met: Activations(Met)[QLen, Six, Heads, ValueDim] ValueChannelsIn / 16, "for each level of blocks of 1, 2 … 32 tokens, rows of other (in reverse values) of odd blocks and values (in reverse rows of other) of even blocks, with decays between them and the end of the even block [batch, rows, 6, heads, value_dim]";
    fades: Activations(Fades)[QLen, Six, Heads, ValueDim; Met] ValueChannelsIn / 16, "these decays, laid out like met";
    sums: Float32s(Sums)[Heads, PaddedRows; Sums, Sums] / 16, "sums of log decays since the start of a tile, in base 2 [batch, heads, padded_rows]; of channels [batch, padded_rows, heads, columns]";
    state: Float32s(State)[Parts, Heads, HeadDim, ValueDim] / 16, "the state where each part begins [batch, parts, heads, head_dim, value_dim]";
    other: Activations(Other)[QLen, QHeads, ValueDim] In(Dots) / 16, "factor of the products by row [batch, rows, q_heads, value_dim]; read if has_other";
    o: Activations(O)[QLen, Heads, ValueDim] Out / 16, "result [batch, rows, heads, value_dim]";
    dots: Float32s(Dots)[DotHeads, PaddedRows; Dots, Sums] Out(Dots) / 16, "rowsum(o ∘ other) of each tile of columns [batch, heads · tiles, padded_rows]; of channels o ∘ other without a token's own part [batch, padded_rows, heads, value_dim]; written if has_dots";
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
    pairs_batch_stride: I32(BatchStride(Pairs)) / 16, "elements between batch entries of pairs";
    met_batch_stride: I32(BatchStride(Met)) / 8, "elements between batch entries of met and fades";
    other_batch_stride: I32(BatchStride(Other)) / 8, "elements between batch entries of other";
    o_batch_stride: I32(BatchStride(O)) / 8, "elements between batch entries of o";
    dots_batch_stride: I32(BatchStride(Dots)) / 16, "elements between batch entries of dots";
};

const STRICT: &[Argument] = &arguments! {
    strict: I32(Strict), "1: a token's own key and value give it nothing";
};

const BOUNDED: &[Argument] = &arguments! {
    bounded: I32(Bounded), "1: the kernel scales values so that they stay below 2^15 when narrowed to 16 bits";
};

const ATTEND_FLAGS: &[Argument] = &arguments! {
    has_other: I32(Has(Dots)), "1: the kernel reads other and writes dots; equals has_dots";
    has_dots: I32(Has(Dots)), "1: the kernel reads other and writes dots";
};

/// Arguments of `linear_state`.
pub const LINEAR_STATE: &[Argument] = record!(
    STATE_ARRAYS,
    ROWS,
    KEY_HEADS,
    COLUMNS,
    KEY_STRIDES,
    SUMS_STRIDES,
    STATE_STRIDES,
    CUTS,
    DIRECTION
);

/// Arguments of `linear_attend`.
pub const LINEAR_ATTEND: &[Argument] = record!(
    ATTEND_ARRAYS,
    ROWS,
    ATTEND_HEADS,
    COLUMNS,
    ATTEND_STRIDES,
    SUMS_STRIDES,
    STATE_STRIDES,
    CUTS,
    DIRECTION,
    STRICT,
    BOUNDED,
    ATTEND_FLAGS
);

const PAIRS_ARRAYS: &[Argument] = &arguments! {
    q: Activations(Q)[QLen, Heads, HeadDim] / 16, "queries [batch, rows, heads, head_dim]";
    k: Activations(K)[QLen, Heads, HeadDim; Q] / 16, "keys, laid out like q";
    met: Activations(Met)[QLen, Six, Heads, HeadDim] / 16, "for each level of blocks of 1, 2 … 32 tokens, queries of odd blocks and keys of even blocks, with decays between them and the end of the even block [batch, rows, 6, heads, head_dim]";
    pairs: Float32s(Pairs)[PaddedRows, Heads, SixtyFour] Out / 16, "products of queries with the keys of their tile under decays of channels, 0 where a query does not see a key [batch, padded_rows, heads, 64]";
};

const PAIRS_STRIDES: &[Argument] = &arguments! {
    q_batch_stride: I32(BatchStride(Q)) / 8, "elements between batch entries of q and k";
    met_batch_stride: I32(BatchStride(Met)) / 8, "elements between batch entries of met";
    pairs_batch_stride: I32(BatchStride(Pairs)) / 16, "elements between batch entries of pairs";
};

/// Arguments of `channel_pairs`.
pub const CHANNEL_PAIRS: &[Argument] =
    record!(PAIRS_ARRAYS, ROWS, KEY_COLUMNS, PAIRS_STRIDES, CUTS);

const INVERSE_ARRAYS: &[Argument] = &arguments! {
    k: Activations(K)[QLen, Heads, HeadDim] HeadsIn / 16, "keys [batch, rows, heads, head_dim]";
    pairs: Float32s(Pairs)[PaddedRows, Heads, SixtyFour] KeyChannelsIn / 16, "products of keys with the keys of their tile under decays of channels, 0 where a key comes later [batch, padded_rows, heads, 64]";
    sums: Float32s(Sums)[Heads, PaddedRows; Sums, Sums] HeadsIn / 16, "sums of log decays since the start of a tile, in base 2 [batch, heads, padded_rows]";
    beta: Float32s(Beta)[Heads, PaddedRows; Beta, Sums] / 16, "rates [batch, heads, padded_rows]; 0 behind the last token";
    inverse: Activations(Inverse)[QLen, Heads, SixtyFour] Out / 16, "rows of the inverses of tiles [batch, rows, heads, 64]";
};

const KEY_COLUMNS: &[Argument] = &arguments! {
    head_dim: I32(Size(HeadDim)) / 8, "columns of k, rows of a state";
};

const INVERSE_STRIDES: &[Argument] = &arguments! {
    k_batch_stride: I32(BatchStride(K)) / 8, "elements between batch entries of k";
    pairs_batch_stride: I32(BatchStride(Pairs)) / 16, "elements between batch entries of pairs";
    inverse_batch_stride: I32(BatchStride(Inverse)) / 8, "elements between batch entries of inverse";
};

const BETA_STRIDE: &[Argument] = &arguments! {
    beta_batch_stride: I32(BatchStride(Beta)) / 16, "elements between batch entries of beta, whose heads are as far apart as those of sums of heads";
};

/// Arguments of `delta_rule_inverse`.
pub const DELTA_RULE_INVERSE: &[Argument] =
    record!(INVERSE_ARRAYS, ROWS, KEY_COLUMNS, INVERSE_STRIDES, SUMS_STRIDES, BETA_STRIDE, CUTS);

const SOLVED: &[Argument] = &arguments! {
    inverse: Activations(Inverse)[QLen, Heads, SixtyFour] / 16, "rows of the inverses of tiles [batch, rows, heads, 64]";
    sums: Float32s(Sums)[Heads, PaddedRows; Sums, Sums] / 16, "sums of log decays since the start of a tile, in base 2 [batch, heads, padded_rows]; of channels [batch, padded_rows, heads, columns]";
    beta: Float32s(Beta)[Heads, PaddedRows; Beta, Sums] / 16, "rates [batch, heads, padded_rows]; 0 behind the last token";
};

const TOKEN_VALUES: &[Argument] = &arguments! {
    k: Activations(K)[QLen, Heads, HeadDim] / 16, "keys, with decays of channels those from the start of their tile [batch, rows, heads, head_dim]";
    kh: Activations(KeysToEnd)[QLen, Heads, HeadDim; K] KeyChannelsIn / 16, "keys with decays of channels to the end of their tile, laid out like k";
    v: Activations(V)[QLen, Heads, ValueDim] / 16, "values [batch, rows, heads, value_dim]";
};

const TOKEN_GRADIENTS: &[Argument] = &arguments! {
    q: Activations(Q)[QLen, Heads, HeadDim] / 16, "queries, with decays of channels those from the start of their tile [batch, rows, heads, head_dim]";
    k: Activations(K)[QLen, Heads, HeadDim] / 16, "keys, with decays of channels those from the start of their tile [batch, rows, heads, head_dim]";
    kh: Activations(KeysToEnd)[QLen, Heads, HeadDim; K] KeyChannelsIn / 16, "keys with decays of channels to the end of their tile, laid out like k";
    dout: Activations(Dout)[QLen, Heads, ValueDim] / 16, "gradients of the output [batch, rows, heads, value_dim]";
    pairs: Float32s(Pairs)[PaddedRows, Heads, SixtyFour] KeyChannelsIn / 16, "products of keys with the queries of their tile under decays of channels, 0 where a query comes earlier [batch, padded_rows, heads, 64]";
};

const CORRECTED: &[Argument] = &arguments! {
    before: Float32s(Before)[Parts, Heads, HeadDim, ValueDim] In(Corrected) / 16, "the state where each part begins [batch, parts, heads, head_dim, value_dim]; read if has_u";
    u: Activations(Corrected)[QLen, Heads, ValueDim] Out(Corrected) / 16, "corrected values [batch, rows, heads, value_dim]; written if has_u";
};

const CHANGED: &[Argument] = &arguments! {
    before: Float32s(Before)[Parts, Heads, HeadDim, ValueDim] In(Dy) / 16, "the gradient of the state behind each part [batch, parts, heads, head_dim, value_dim]; read if has_dy";
    dy: Activations(Dy)[QLen, Heads, ValueDim] Out(Dy) / 16, "gradient of the products with inverses [batch, rows, heads, value_dim]; written if has_dy";
};

const AFFINE: &[Argument] = &arguments! {
    state: Float32s(State)[Parts, Heads, HeadDim, ValueDim] Out(Transfer) / 16, "the state that each part leaves, or its gradient [batch, parts, heads, head_dim, value_dim]; written if has_transfer";
    transfer: Float32s(Transfer)[Parts, Heads, HeadDim, HeadDim] Out(Transfer) / 16, "what each part does to any state [batch, parts, heads, head_dim, head_dim]; written if has_transfer";
};

const VALUE_STRIDES: &[Argument] = &arguments! {
    k_batch_stride: I32(BatchStride(K)) / 8, "elements between batch entries of k";
    v_batch_stride: I32(BatchStride(V)) / 8, "elements between batch entries of v";
    inverse_batch_stride: I32(BatchStride(Inverse)) / 8, "elements between batch entries of inverse";
    u_batch_stride: I32(BatchStride(Corrected)) / 8, "elements between batch entries of u";
};

const GRADIENT_STRIDES: &[Argument] = &arguments! {
    q_batch_stride: I32(BatchStride(Q)) / 8, "elements between batch entries of q";
    k_batch_stride: I32(BatchStride(K)) / 8, "elements between batch entries of k";
    dout_batch_stride: I32(BatchStride(Dout)) / 8, "elements between batch entries of dout";
    pairs_batch_stride: I32(BatchStride(Pairs)) / 16, "elements between batch entries of pairs";
    inverse_batch_stride: I32(BatchStride(Inverse)) / 8, "elements between batch entries of inverse";
    dy_batch_stride: I32(BatchStride(Dy)) / 8, "elements between batch entries of dy";
};

const TRANSFER_STRIDE: &[Argument] = &arguments! {
    transfer_stride: I32(TransferSize) / 16, "elements of a part's transfer";
};

const HAS_U: &[Argument] = &arguments! {
    has_u: I32(Has(Corrected)), "1: the kernel reads before and writes u";
};

const HAS_DY: &[Argument] = &arguments! {
    has_dy: I32(Has(Dy)), "1: the kernel reads before and writes dy";
};

const HAS_TRANSFER: &[Argument] = &arguments! {
    has_transfer: I32(Has(Transfer)), "1: the kernel writes state and transfer";
};

/// Arguments of `delta_rule_state`.
pub const DELTA_RULE_STATE: &[Argument] = record!(
    TOKEN_VALUES,
    SOLVED,
    CORRECTED,
    AFFINE,
    ROWS,
    COLUMNS,
    VALUE_STRIDES,
    SUMS_STRIDES,
    BETA_STRIDE,
    STATE_STRIDES,
    TRANSFER_STRIDE,
    CUTS,
    BOUNDED,
    HAS_U,
    HAS_TRANSFER
);

/// Arguments of `delta_rule_grad`.
pub const DELTA_RULE_GRAD: &[Argument] = record!(
    TOKEN_GRADIENTS,
    SOLVED,
    CHANGED,
    AFFINE,
    ROWS,
    COLUMNS,
    GRADIENT_STRIDES,
    SUMS_STRIDES,
    BETA_STRIDE,
    STATE_STRIDES,
    TRANSFER_STRIDE,
    CUTS,
    BOUNDED,
    HAS_DY,
    HAS_TRANSFER
);

const KEYS_ARRAYS: &[Argument] = &arguments! {
    u: Activations(Corrected)[QLen, Heads, ValueDim] / 16, "corrected values [batch, rows, heads, value_dim]";
    dout: Activations(Dout)[QLen, Heads, ValueDim; Corrected] / 16, "gradients of the output, laid out like u";
    q: Activations(Q)[QLen, Heads, HeadDim] / 16, "queries [batch, rows, heads, head_dim]";
    dv: Activations(Dv)[QLen, Heads, ValueDim; Corrected] / 16, "gradient of values, laid out like u";
    k: Activations(K)[QLen, Heads, HeadDim; Q] / 16, "keys, laid out like q";
    met: Activations(Met)[QLen, Six, Heads, HeadDim] KeyChannelsIn / 16, "for each level of blocks of 1, 2 … 32 tokens, queries of odd blocks and keys of even blocks, with decays between them and the end of the even block [batch, rows, 6, heads, head_dim]";
    keys_met: Activations(KeysMet)[QLen, Six, Heads, HeadDim; Met] KeyChannelsIn / 16, "keys with these decays, laid out like met";
    fades: Activations(Fades)[QLen, Six, Heads, HeadDim; Met] KeyChannelsIn / 16, "these decays, laid out like met";
    sums: Float32s(Sums)[Heads, PaddedRows; Sums, Sums] / 16, "sums of log decays since the start of a tile, in base 2 [batch, heads, padded_rows]; of channels [batch, padded_rows, heads, columns]";
    turned: Float32s(Turned)[Parts, Heads, ValueDim, HeadDim] / 16, "the turned gradient of the state behind each part [batch, parts, heads, value_dim, head_dim]";
    dk: Activations(Dk)[QLen, Heads, HeadDim; Q] Out / 16, "gradient of keys, laid out like q";
    key_dots: Float32s(KeyDots)[DotHeads, PaddedRows; KeyDots, Sums] Out / 16, "rowsum(dk ∘ k) of each tile of columns [batch, heads · tiles, padded_rows]; of channels dk ∘ k without a token's own part [batch, padded_rows, heads, head_dim]";
};

const DOT_HEADS: &[Argument] = &arguments! {
    dot_heads: I32(Size(DotHeads)), "heads times tiles of columns";
};

const KEYS_STRIDES: &[Argument] = &arguments! {
    u_batch_stride: I32(BatchStride(Corrected)) / 8, "elements between batch entries of u, dout and dv";
    q_batch_stride: I32(BatchStride(Q)) / 8, "elements between batch entries of q, k and dk";
    met_batch_stride: I32(BatchStride(Met)) / 8, "elements between batch entries of met, keys_met and fades";
    key_dots_batch_stride: I32(BatchStride(KeyDots)) / 16, "elements between batch entries of key_dots";
};

/// Arguments of `delta_rule_keys`.
pub const DELTA_RULE_KEYS: &[Argument] = record!(
    KEYS_ARRAYS,
    ROWS,
    DOT_HEADS,
    COLUMNS,
    KEYS_STRIDES,
    SUMS_STRIDES,
    STATE_STRIDES,
    CUTS,
    BOUNDED
);
