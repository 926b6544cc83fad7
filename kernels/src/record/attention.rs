//! Launch records of softmax attention's forward and backward passes.

use super::{Access, Argument, Kind, Shape, View, count, joined};

const INPUTS: [Argument; 3] = arguments! {
    q: Activations[Queries, q_batch_stride] / 16, "queries [batch, q_len, heads, head_dim]";
    k: Activations[Keys, k_batch_stride] / 16, "keys [batch, kv_len, kv_heads, head_dim]";
    v: Activations[Values, v_batch_stride] / 16, "values [batch, kv_len, kv_heads, value_dim]";
};

const SAVED: [Argument; 3] = arguments! {
    dout: Activations[Results, dout_batch_stride] / 16, "gradient of the result [batch, q_len, heads, value_dim]";
    lse_log2: Float32s[Statistics, stat_batch_stride, stat_head_stride] / 16, "log-sum-exp in base 2 [batch, heads, q_len]; huge where a row sees nothing";
    delta: Float32s[Statistics, stat_batch_stride, stat_head_stride] / 16, "rowsum(dout ∘ o) − dlse, as lse_log2";
};

const SIZES: [Argument; 10] = arguments! {
    batch: I32, "batch entries";
    q_len: I32, "query rows";
    kv_len: I32, "key rows";
    heads: I32, "query heads";
    kv_heads: I32, "key/value heads, a divisor of heads";
    head_dim: I32 / 8, "columns of queries and keys";
    value_dim: I32 / 8, "columns of values and results";
    q_batch_stride: I32 / 8, "elements between batch entries of q";
    k_batch_stride: I32 / 8, "elements between batch entries of k";
    v_batch_stride: I32 / 8, "elements between batch entries of v";
};

const STATISTICS_STRIDES: [Argument; 2] = arguments! {
    stat_batch_stride: I32, "elements between batch entries of the statistics [batch, heads, q_len]";
    stat_head_stride: I32, "elements between heads of the statistics";
};

const SCALE_LOG2: [Argument; 1] = arguments! {
    scale_log2: F32, "softmax_scale · log2 e, positive";
};

const GRADIENT_SCALES: [Argument; 2] = arguments! {
    scale_log2: F32, "softmax_scale · log2 e, positive";
    softmax_scale: F32, "factor on q·k, positive";
};

const WORK: [Argument; 6] = arguments! {
    lower: I32, "smallest key row − query row that is seen";
    upper: I32, "largest key row − query row that is seen";
    section: I32, "heads of the resident rows, over all batch entries, worked on together; a divisor of their number";
    reverse: I32, "1: the last rows first";
    first: I32, "1: the state or accumulator is not read but starts empty";
    last: I32, "1: the results are written, not the state or accumulator";
};

/// What features take. An image without a feature ignores its arguments.
const FEATURES: [Argument; 20] = arguments! {
    q_segments: Int32s[QueryTokens, q_segments_batch_stride] MaybeIn(has_segments) / 4, "segment of each query row [batch, q_len]; a negative one sees nothing";
    kv_segments: Int32s[KeyTokens, kv_segments_batch_stride] MaybeIn(has_segments) / 4, "segment of each key row [batch, kv_len]; queries see their own only";
    ranges: Int32s[Ranges, ranges_batch_stride] MaybeIn(has_segments) / 4, "what segment_ranges gives of the resident rows";
    q_segments_batch_stride: I32, "elements between batch entries of q_segments";
    kv_segments_batch_stride: I32, "elements between batch entries of kv_segments";
    ranges_batch_stride: I32, "elements between batch entries of ranges";
    has_segments: I32, "1: rows see those of their own segment only";
    cap_log2: F32, "soft cap of the scaled scores, times log2 e; 0 for none";
    twice_by_cap: F32, "2 · softmax_scale · log2 e / soft cap; 0 for none";
    slopes: Float32s[PerHead, slopes_batch_stride] MaybeIn(has_slopes) / 4, "ALiBi's slope of each query head [batch, heads]";
    slopes_batch_stride: I32, "elements between batch entries of slopes";
    has_slopes: I32, "1: slope · (key position − query position) is added to scores";
    dropout: Int32s[PerEntry, dropout_batch_stride] MaybeIn(has_dropout) / 4, "of each batch entry: the random key's two words, the entry, the first query head [batch, 4]";
    dropout_batch_stride: I32, "elements between batch entries of dropout";
    has_dropout: I32, "1: weights are dropped";
    threshold: I32, "2³² times the rate, its bits: a weight stays where its random word is not below";
    keep_scale: F32, "1 / (1 − rate), which the weights that stay are times; 1 without dropout";
    q_position: I32, "position of the first query; read with slopes and dropout, as the next two";
    k_position: I32, "position of the first key";
    position_stride: I32, "positions from one row to the next";
};

const FORWARD_ARRAYS: [Argument; 5] = arguments! {
    acc: Float32s[Results, acc_batch_stride] Carry / 16, "running Σ p·v, as o in float32";
    row_max: Float32s[Statistics, stat_batch_stride, stat_head_stride] Carry / 16, "running maximum of the scaled scores, in base 2 [batch, heads, q_len]";
    row_sum: Float32s[Statistics, stat_batch_stride, stat_head_stride] Carry / 16, "running Σ p, as row_max";
    o: Activations[Results, o_batch_stride] MaybeOut / 16, "result [batch, q_len, heads, value_dim]; written if last";
    lse: Float32s[PerQuery, lse_batch_stride] MaybeOut / 4, "log-sum-exp [batch, q_len, heads], natural; written if last";
};

const FORWARD_STRIDES: [Argument; 3] = arguments! {
    acc_batch_stride: I32 / 8, "elements between batch entries of acc";
    o_batch_stride: I32 / 8, "elements between batch entries of o";
    lse_batch_stride: I32, "elements between batch entries of lse";
};

const RESULT_GRADIENT_STRIDE: [Argument; 1] = arguments! {
    dout_batch_stride: I32 / 8, "elements between batch entries of dout";
};

const KEY_GRAD_ARRAYS: [Argument; 5] = arguments! {
    dk_acc: Float32s[Keys, dk_acc_batch_stride] Carry / 16, "running dk, as k in float32";
    dv_acc: Float32s[Values, dv_acc_batch_stride] Carry / 16, "running dv, as v in float32";
    dk: Activations[Keys, dk_batch_stride] MaybeOut / 16, "result, as k; written if last";
    dv: Activations[Values, dv_batch_stride] MaybeOut / 16, "result, as v; written if last";
    dq_acc: Float32s[Queries, dq_acc_batch_stride] FusedAdd / 16, "running dq / softmax_scale, as q in float32; only fused images add to it";
};

const KEY_GRAD_STRIDES: [Argument; 5] = arguments! {
    dk_acc_batch_stride: I32 / 8, "elements between batch entries of dk_acc";
    dv_acc_batch_stride: I32 / 8, "elements between batch entries of dv_acc";
    dk_batch_stride: I32 / 8, "elements between batch entries of dk";
    dv_batch_stride: I32 / 8, "elements between batch entries of dv";
    dq_acc_batch_stride: I32 / 8, "elements between batch entries of dq_acc";
};

const QUERY_GRAD_ARRAYS: [Argument; 2] = arguments! {
    dq_acc: Float32s[Queries, dq_acc_batch_stride] Carry / 16, "running dq, as q in float32";
    dq: Activations[Queries, dq_batch_stride] MaybeOut / 16, "result, as q; written if last";
};

const QUERY_GRAD_STRIDES: [Argument; 2] = arguments! {
    dq_acc_batch_stride: I32 / 8, "elements between batch entries of dq_acc";
    dq_batch_stride: I32 / 8, "elements between batch entries of dq";
};

const SLOPE_GRADIENTS: [Argument; 3] = arguments! {
    dslopes: Float32s[PerQuery, dslopes_batch_stride] MaybeUpdate(has_dslopes) / 4, "what each query adds to the gradient of its head's slope [batch, q_len, heads]";
    dslopes_batch_stride: I32, "elements between batch entries of dslopes";
    has_dslopes: I32, "1: Σ ds · (key position − query position) is added to dslopes";
};

/// Arguments of `attention_fwd`.
pub const FORWARD: &[Argument] = record!(
    INPUTS,
    FORWARD_ARRAYS,
    SIZES,
    FORWARD_STRIDES,
    STATISTICS_STRIDES,
    SCALE_LOG2,
    WORK,
    FEATURES
);

/// Arguments of `attention_bwd_dkdv`.
pub const KEY_GRADS: &[Argument] = record!(
    INPUTS,
    SAVED,
    KEY_GRAD_ARRAYS,
    SIZES,
    RESULT_GRADIENT_STRIDE,
    KEY_GRAD_STRIDES,
    STATISTICS_STRIDES,
    GRADIENT_SCALES,
    WORK,
    FEATURES
);

/// Arguments of `attention_bwd_dq`.
pub const QUERY_GRADS: &[Argument] = record!(
    INPUTS,
    SAVED,
    QUERY_GRAD_ARRAYS,
    SIZES,
    RESULT_GRADIENT_STRIDE,
    QUERY_GRAD_STRIDES,
    STATISTICS_STRIDES,
    GRADIENT_SCALES,
    WORK,
    FEATURES,
    SLOPE_GRADIENTS
);
