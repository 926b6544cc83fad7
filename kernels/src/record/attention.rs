//! Launch records of softmax attention's forward and backward passes.

use super::{Access, Argument, Kind, Shape, View, count, joined};

const QUERIES_KEYS: [Argument; 2] = arguments! {
    q: Activations[Queries, q_batch_stride] / 16, "queries [batch, q_len, heads, head_dim]";
    k: Activations[Keys, kv_batch_stride] / 16, "keys [batch, kv_len, kv_heads, head_dim]";
};

const VALUES: [Argument; 1] = arguments! {
    v: Activations[Values, kv_batch_stride] / 16, "values, as k";
};

const RESULT_GRADIENT: [Argument; 1] = arguments! {
    dout: Activations[Results, q_batch_stride] / 16, "gradient of the result, as q";
};

const SAVED: [Argument; 2] = arguments! {
    lse_log2: Float32s[Statistics, stat_batch_stride, stat_head_stride] / 16, "log-sum-exp in base 2 [batch, heads, q_len]; huge where a row sees nothing";
    delta: Float32s[Statistics, stat_batch_stride, stat_head_stride] / 16, "rowsum(dout ∘ o) − dlse, as lse_log2";
};

const SIZES: [Argument; 6] = arguments! {
    batch: I32, "batch entries";
    q_len: I32, "query rows";
    kv_len: I32, "key rows";
    heads: I32, "query heads";
    kv_heads: I32, "key/value heads, a divisor of heads";
    head_dim: I32 / 8, "columns of the activations";
};

const INPUT_STRIDES: [Argument; 2] = arguments! {
    q_batch_stride: I32 / 8, "elements between batch entries of q, and of dout unless it has its own";
    kv_batch_stride: I32 / 8, "elements between batch entries of k, and of v unless it has its own";
};

const GRADIENT_STRIDES: [Argument; 2] = arguments! {
    acc_batch_stride: I32 / 8, "elements between batch entries of the accumulators, dv_acc unless it has its own";
    out_batch_stride: I32 / 8, "elements between batch entries of the results, dv unless it has its own";
};

const STATISTICS_STRIDES: [Argument; 2] = arguments! {
    stat_batch_stride: I32, "elements between batch entries of the statistics [batch, heads, q_len]";
    stat_head_stride: I32, "elements between heads of the statistics";
};

const SCALE_LOG2: [Argument; 1] = arguments! {
    scale_log2: F32, "softmax_scale · log2 e, positive";
};

const SOFTMAX_SCALE: [Argument; 1] = arguments! {
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

/// What the general variants take beside: masks and features that the plain ones do without.
const GENERAL: [Argument; 19] = arguments! {
    q_segments: Int32s[QueryTokens, q_segments_batch_stride] / 4, "segment of each query row [batch, q_len]; a negative one sees nothing";
    kv_segments: Int32s[KeyTokens, kv_segments_batch_stride] / 4, "segment of each key row [batch, kv_len]; queries see their own only";
    q_segments_batch_stride: I32, "elements between batch entries of q_segments";
    kv_segments_batch_stride: I32, "elements between batch entries of kv_segments";
    cap_log2: F32, "soft cap of the scaled scores, times log2 e; 0 for none";
    twice_by_cap: F32, "2 · softmax_scale · log2 e / soft cap; 0 for none";
    slopes: Float32s[PerHead, slopes_batch_stride] MaybeIn / 4, "ALiBi's slope of each query head [batch, heads]; read if has_slopes";
    slopes_batch_stride: I32, "elements between batch entries of slopes";
    has_slopes: I32, "1: slope · (key position − query position) is added to scores";
    dropout: Int32s[PerEntry, dropout_batch_stride] MaybeIn / 4, "of each batch entry: the random key's two words, the entry, the first query head [batch, 4]; read if has_dropout";
    dropout_batch_stride: I32, "elements between batch entries of dropout";
    has_dropout: I32, "1: weights are dropped";
    threshold: I32, "2³² times the rate, its bits: a weight stays where its random word is not below";
    keep_scale: F32, "1 / (1 − rate), which the weights that stay are times; 1 without dropout";
    q_position: I32, "position of the first query; read with slopes and dropout, as the next two";
    k_position: I32, "position of the first key";
    position_stride: I32, "positions from one row to the next";
    value_dim: I32 / 8, "columns of the values, results and what belongs to them";
    v_batch_stride: I32 / 8, "elements between batch entries of v";
};

/// Arrays with `value_dim` columns, which share no stride with those of `head_dim`.
const GENERAL_VALUES: [Argument; 1] = arguments! {
    v: Activations[Values, v_batch_stride] / 16, "values [batch, kv_len, kv_heads, value_dim]";
};

const GENERAL_RESULT_GRADIENT: [Argument; 1] = arguments! {
    dout: Activations[Results, dout_batch_stride] / 16, "gradient of the result [batch, q_len, heads, value_dim]";
};

const GENERAL_GRADIENT: [Argument; 1] = arguments! {
    dout_batch_stride: I32 / 8, "elements between batch entries of dout";
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

const KEY_GRAD_ARRAYS: [Argument; 4] = arguments! {
    dk_acc: Float32s[Keys, acc_batch_stride] Carry / 16, "running dk, as k in float32";
    dv_acc: Float32s[Values, acc_batch_stride] Carry / 16, "running dv, as dk_acc";
    dk: Activations[Keys, out_batch_stride] MaybeOut / 16, "result, as k; written if last";
    dv: Activations[Values, out_batch_stride] MaybeOut / 16, "result, as v; written if last";
};

const GENERAL_KEY_GRAD_ARRAYS: [Argument; 4] = arguments! {
    dk_acc: Float32s[Keys, acc_batch_stride] Carry / 16, "running dk, as k in float32";
    dv_acc: Float32s[Values, dv_acc_batch_stride] Carry / 16, "running dv, as v in float32";
    dk: Activations[Keys, out_batch_stride] MaybeOut / 16, "result, as k; written if last";
    dv: Activations[Values, dv_batch_stride] MaybeOut / 16, "result, as v; written if last";
};

/// What the query side of the general variants gives beside.
const GENERAL_QUERY_GRAD: [Argument; 3] = arguments! {
    dslopes: Float32s[PerQuery, dslopes_batch_stride] MaybeUpdate / 4, "what each query adds to the gradient of its head's slope [batch, q_len, heads]; read and written if has_dslopes";
    dslopes_batch_stride: I32, "elements between batch entries of dslopes";
    has_dslopes: I32, "1: Σ ds · (key position − query position) is added to dslopes";
};

const GENERAL_KEY_GRAD_STRIDES: [Argument; 2] = arguments! {
    dv_acc_batch_stride: I32 / 8, "elements between batch entries of dv_acc";
    dv_batch_stride: I32 / 8, "elements between batch entries of dv";
};

const QUERY_GRAD_ARRAYS: [Argument; 2] = arguments! {
    dq_acc: Float32s[Queries, acc_batch_stride] Carry / 16, "running dq, as q in float32";
    dq: Activations[Queries, out_batch_stride] MaybeOut / 16, "result, as q; written if last";
};

/// Sizes, strides and numbers of the forward pass.
const FORWARD_NUMBERS: &[Argument] =
    record!(SIZES, INPUT_STRIDES, FORWARD_STRIDES, STATISTICS_STRIDES, SCALE_LOG2, WORK);

/// Sizes, strides and numbers of both backward passes.
const GRADIENT_NUMBERS: &[Argument] = record!(
    SIZES,
    INPUT_STRIDES,
    GRADIENT_STRIDES,
    STATISTICS_STRIDES,
    SCALE_LOG2,
    SOFTMAX_SCALE,
    WORK
);

/// Arguments of `attention_fwd`.
pub const FORWARD: &[Argument] = record!(QUERIES_KEYS, VALUES, FORWARD_ARRAYS, FORWARD_NUMBERS);

/// Arguments of `attention_bwd_dkdv`.
pub const KEY_GRADS: &[Argument] =
    record!(QUERIES_KEYS, VALUES, RESULT_GRADIENT, SAVED, KEY_GRAD_ARRAYS, GRADIENT_NUMBERS);

/// Arguments of `attention_bwd_dq`.
pub const QUERY_GRADS: &[Argument] =
    record!(QUERIES_KEYS, VALUES, RESULT_GRADIENT, SAVED, QUERY_GRAD_ARRAYS, GRADIENT_NUMBERS);

/// Arguments of `attention_fwd_general`.
pub const FORWARD_GENERAL: &[Argument] =
    record!(QUERIES_KEYS, GENERAL_VALUES, FORWARD_ARRAYS, FORWARD_NUMBERS, GENERAL);

/// Arguments of `attention_bwd_dkdv_general`.
pub const KEY_GRADS_GENERAL: &[Argument] = record!(
    QUERIES_KEYS,
    GENERAL_VALUES,
    GENERAL_RESULT_GRADIENT,
    SAVED,
    GENERAL_KEY_GRAD_ARRAYS,
    GRADIENT_NUMBERS,
    GENERAL,
    GENERAL_GRADIENT,
    GENERAL_KEY_GRAD_STRIDES
);

/// Arguments of `attention_bwd_dq_general`.
pub const QUERY_GRADS_GENERAL: &[Argument] = record!(
    QUERIES_KEYS,
    GENERAL_VALUES,
    GENERAL_RESULT_GRADIENT,
    SAVED,
    QUERY_GRAD_ARRAYS,
    GRADIENT_NUMBERS,
    GENERAL,
    GENERAL_GRADIENT,
    GENERAL_QUERY_GRAD
);
