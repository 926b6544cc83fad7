//! Launch records of softmax attention's forward and backward passes.

use super::{Access, Argument, Kind, Meaning, Operand, Size, View, count, joined};

const INPUTS: &[Argument] = &arguments! {
    q: Activations(Q)[QLen, Heads, HeadDim] / 16, "queries [batch, q_len, heads, head_dim]";
    k: Activations(K)[KvLen, KvHeads, HeadDim] / 16, "keys [batch, kv_len, kv_heads, head_dim]";
    v: Activations(V)[KvLen, KvHeads, ValueDim] / 16, "values [batch, kv_len, kv_heads, value_dim]";
};

const SAVED: &[Argument] = &arguments! {
    dout: Activations(Dout)[QLen, Heads, ValueDim] / 16, "gradient of the result [batch, q_len, heads, value_dim]";
    lse_log2: Float32s(LseLog2)[Heads, QLen; LseLog2, LseLog2] / 16, "log-sum-exp in base 2 [batch, heads, q_len]; huge where a row sees nothing";
    delta: Float32s(Delta)[Heads, QLen; LseLog2, LseLog2] / 16, "rowsum(dout ∘ o) − dlse, laid out like lse_log2";
};

const SIZES: &[Argument] = &arguments! {
    batch: I32(Size(Batch)), "batch entries";
    q_len: I32(Size(QLen)), "query rows";
    kv_len: I32(Size(KvLen)), "key rows";
    heads: I32(Size(Heads)), "query heads";
    kv_heads: I32(Size(KvHeads)), "key/value heads, a divisor of heads";
    head_dim: I32(Size(HeadDim)) / 8, "columns of queries and keys";
    value_dim: I32(Size(ValueDim)) / 8, "columns of values and results";
    q_batch_stride: I32(BatchStride(Q)) / 8, "elements between batch entries of q";
    k_batch_stride: I32(BatchStride(K)) / 8, "elements between batch entries of k";
    v_batch_stride: I32(BatchStride(V)) / 8, "elements between batch entries of v";
};

const STATISTICS_STRIDES: &[Argument] = &arguments! {
    stat_batch_stride: I32(BatchStride(LseLog2)), "elements between batch entries of the statistics [batch, heads, q_len]";
    stat_head_stride: I32(HeadStride(LseLog2)), "elements between heads of the statistics";
};

const SCALE_LOG2: &[Argument] = &arguments! {
    scale_log2: F32(ScaleLog2), "softmax_scale · log2 e, positive";
};

const SOFTMAX_SCALE: &[Argument] = &arguments! {
    softmax_scale: F32(SoftmaxScale), "factor on q·k, positive";
};

const WORK: &[Argument] = &arguments! {
    lower: I32(Lower), "smallest key row − query row that is seen";
    upper: I32(Upper), "largest key row − query row that is seen";
    section: I32(Section), "heads of the resident rows, over all batch entries, that blocks work on together; a divisor of their number";
    reverse: I32(Reverse), "1: the last rows first";
    first: I32(First), "1: the state or accumulator starts empty and is not read";
    last: I32(Last), "1: the kernel writes the results instead of the state or accumulator";
};

/// Arguments of the features. An image without a feature ignores the arguments of that feature.
/// Where masks are data, the first three arrays are the results of `mask_rows` for queries and for
/// keys, and of `mask_runs`; [`Argument::view_of`] says how large they are.
const FEATURES: &[Argument] = &arguments! {
    q_segments: Int32s(QSegments)[QLen] In(QSegments) / 4, "segment of each query row [batch, q_len]; a row of a negative segment sees nothing";
    kv_segments: Int32s(KvSegments)[KvLen] In(QSegments) / 4, "segment of each key row [batch, kv_len]; a query sees its own segment only";
    ranges: Int32s(Ranges)[RangeBlocks, Four] In(QSegments) / 4, "output of segment_ranges for the resident rows";
    q_segments_batch_stride: I32(BatchStride(QSegments)), "elements between batch entries of q_segments";
    kv_segments_batch_stride: I32(BatchStride(KvSegments)), "elements between batch entries of kv_segments";
    ranges_batch_stride: I32(BatchStride(Ranges)), "elements between batch entries of ranges";
    has_segments: I32(Has(QSegments)), "1: rows see rows of their own segment only";
    cap_log2: F32(CapLog2), "soft cap of the scaled scores, times log2 e; 0 for none";
    twice_by_cap: F32(TwiceByCap), "2 · softmax_scale · log2 e / soft cap; 0 for none";
    slopes: Float32s(Slopes)[Heads] In(Slopes) / 4, "ALiBi's slope of each query head [batch, heads]";
    slopes_batch_stride: I32(BatchStride(Slopes)), "elements between batch entries of slopes";
    has_slopes: I32(Has(Slopes)), "1: slope · (key position − query position) is added to scores";
    dropout: Int32s(Dropout)[Four] In(Dropout) / 4, "for each batch entry the two words of the random key, the entry and the first query head [batch, 4]";
    dropout_batch_stride: I32(BatchStride(Dropout)), "elements between batch entries of dropout";
    has_dropout: I32(Has(Dropout)), "1: the kernel drops weights";
    threshold: I32(Threshold), "bits of 2³² times the rate: a weight stays where its random word is not below";
    keep_scale: F32(KeepScale), "1 / (1 − rate), a factor on the weights that stay; 1 without dropout";
    q_position: I32(QPosition), "position of the first query; read with slopes and dropout, like the next two arguments";
    k_position: I32(KPosition), "position of the first key";
    position_stride: I32(PositionStride), "positions from one row to the next";
};

const FORWARD_ARRAYS: &[Argument] = &arguments! {
    acc: Float32s(Acc)[QLen, Heads, ValueDim] Carry / 16, "running Σ p·v, float32, shaped like o";
    row_max: Float32s(RowMax)[Heads, QLen; RowMax, RowMax] Carry / 16, "running maximum of the scaled scores, in base 2 [batch, heads, q_len]";
    row_sum: Float32s(RowSum)[Heads, QLen; RowMax, RowMax] Carry / 16, "running Σ p, laid out like row_max";
    o: Activations(O)[QLen, Heads, ValueDim] LastOut / 16, "result [batch, q_len, heads, value_dim]; written if last";
    lse: Float32s(Lse)[QLen, Heads] LastOut / 4, "log-sum-exp [batch, q_len, heads], natural; written if last";
};

const FORWARD_STRIDES: &[Argument] = &arguments! {
    acc_batch_stride: I32(BatchStride(Acc)) / 8, "elements between batch entries of acc";
    o_batch_stride: I32(BatchStride(O)) / 8, "elements between batch entries of o";
    lse_batch_stride: I32(BatchStride(Lse)), "elements between batch entries of lse";
    stat_batch_stride: I32(BatchStride(RowMax)), "elements between batch entries of the statistics [batch, heads, q_len]";
    stat_head_stride: I32(HeadStride(RowMax)), "elements between heads of the statistics";
};

const RESULT_GRADIENT_STRIDE: &[Argument] = &arguments! {
    dout_batch_stride: I32(BatchStride(Dout)) / 8, "elements between batch entries of dout";
};

const KEY_GRAD_ARRAYS: &[Argument] = &arguments! {
    dk_acc: Float32s(DkAcc)[KvLen, KvHeads, HeadDim] Carry / 16, "running dk, float32, shaped like k";
    dv_acc: Float32s(DvAcc)[KvLen, KvHeads, ValueDim] Carry / 16, "running dv, float32, shaped like v";
    dk: Activations(Dk)[KvLen, KvHeads, HeadDim] LastOut / 16, "result, shaped like k; written if last";
    dv: Activations(Dv)[KvLen, KvHeads, ValueDim] LastOut / 16, "result, shaped like v; written if last";
    dq_acc: Float32s(DqAcc)[QLen, Heads, HeadDim] FusedAdd / 16, "running dq / softmax_scale, float32, shaped like q; only fused images add to it";
};

const KEY_GRAD_STRIDES: &[Argument] = &arguments! {
    dk_acc_batch_stride: I32(BatchStride(DkAcc)) / 8, "elements between batch entries of dk_acc";
    dv_acc_batch_stride: I32(BatchStride(DvAcc)) / 8, "elements between batch entries of dv_acc";
    dk_batch_stride: I32(BatchStride(Dk)) / 8, "elements between batch entries of dk";
    dv_batch_stride: I32(BatchStride(Dv)) / 8, "elements between batch entries of dv";
    dq_acc_batch_stride: I32(BatchStride(DqAcc)) / 8, "elements between batch entries of dq_acc";
};

const QUERY_GRAD_ARRAYS: &[Argument] = &arguments! {
    dq_acc: Float32s(DqAcc)[QLen, Heads, HeadDim] Carry / 16, "running dq, float32, shaped like q";
    dq: Activations(Dq)[QLen, Heads, HeadDim] LastOut / 16, "result, shaped like q; written if last";
};

const QUERY_GRAD_STRIDES: &[Argument] = &arguments! {
    dq_acc_batch_stride: I32(BatchStride(DqAcc)) / 8, "elements between batch entries of dq_acc";
    dq_batch_stride: I32(BatchStride(Dq)) / 8, "elements between batch entries of dq";
};

const SLOPE_GRADIENTS: &[Argument] = &arguments! {
    dslopes: Float32s(Dslopes)[QLen, Heads] Update(Dslopes) / 4, "what each query adds to the gradient of its head's slope [batch, q_len, heads]";
    dslopes_batch_stride: I32(BatchStride(Dslopes)), "elements between batch entries of dslopes";
    has_dslopes: I32(Has(Dslopes)), "1: Σ ds · (key position − query position) is added to dslopes";
};

/// Arguments of `attention_fwd`.
pub const FORWARD: &[Argument] =
    record!(INPUTS, FORWARD_ARRAYS, SIZES, FORWARD_STRIDES, SCALE_LOG2, WORK, FEATURES);

/// Arguments of `attention_bwd_dkdv`.
pub const KEY_GRADS: &[Argument] = record!(
    INPUTS,
    SAVED,
    KEY_GRAD_ARRAYS,
    SIZES,
    RESULT_GRADIENT_STRIDE,
    KEY_GRAD_STRIDES,
    STATISTICS_STRIDES,
    SCALE_LOG2,
    SOFTMAX_SCALE,
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
    SCALE_LOG2,
    SOFTMAX_SCALE,
    WORK,
    FEATURES,
    SLOPE_GRADIENTS
);
