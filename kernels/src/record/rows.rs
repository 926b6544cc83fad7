//! Launch records of the kernels that go through rows once.

use super::{Access, Argument, Kind, Meaning, Operand, Size, View, count, joined};

const SIZES: &[Argument] = &arguments! {
    batch: I32(Size(Batch)), "batch entries";
    q_len: I32(Size(QLen)), "rows";
    heads: I32(Size(Heads)), "heads";
    head_dim: I32(Size(HeadDim)) / 8, "columns";
};

const SUM_SIZES: &[Argument] = &arguments! {
    batch: I32(Size(Batch)), "batch entries";
    rows: I32(Size(QLen)), "rows";
    heads: I32(Size(Heads)), "heads";
    head_dim: I32(Size(HeadDim)) / 8, "columns";
};

const DELTA_ARRAYS: &[Argument] = &arguments! {
    o: Activations(O)[QLen, Heads, HeadDim] / 16, "result of the forward pass [batch, q_len, heads, head_dim]";
    dout: Activations(Dout)[QLen, Heads, HeadDim; O] / 16, "gradient of o, laid out like o";
    lse: Float32s(Lse)[QLen, Heads] / 4, "log-sum-exp [batch, q_len, heads], natural";
    dlse: Float32s(Dlse)[QLen, Heads; Lse] In(Dlse) / 4, "gradient of lse, laid out like lse; read if has_dlse";
    lse_log2: Float32s(LseLog2)[Heads, QLen; LseLog2, LseLog2] Out / 16, "lse in base 2 [batch, heads, q_len]; huge where lse is −inf";
    delta: Float32s(Delta)[Heads, QLen; LseLog2, LseLog2] Out / 16, "rowsum(dout ∘ o) − dlse, laid out like lse_log2";
    zeros: Float32s(Zeros)[QLen, Heads, HeadDim] Out(Zeros) / 16, "array to set to 0 [batch, q_len, heads, head_dim]; written if has_zeros";
};

const DELTA_NUMBERS: &[Argument] = &arguments! {
    o_batch_stride: I32(BatchStride(O)) / 8, "elements between batch entries of o, and of dout";
    lse_batch_stride: I32(BatchStride(Lse)), "elements between batch entries of lse, and of dlse";
    stat_batch_stride: I32(BatchStride(LseLog2)), "elements between batch entries of lse_log2, and of delta";
    stat_head_stride: I32(HeadStride(LseLog2)), "elements between heads of lse_log2, and of delta";
    zeros_batch_stride: I32(BatchStride(Zeros)) / 8, "elements between batch entries of zeros";
    has_dlse: I32(Has(Dlse)), "1: the kernel reads dlse";
    has_zeros: I32(Has(Zeros)), "1: the kernel writes zeros";
};

/// Arguments of `delta`.
pub const DELTA: &[Argument] = record!(DELTA_ARRAYS, SIZES, DELTA_NUMBERS);

const CAST_ARRAYS: &[Argument] = &arguments! {
    a: Float32s(A)[QLen, Heads, HeadDim] / 16, "an accumulator [batch, rows, heads, head_dim]";
    b: Float32s(B)[QLen, Heads, HeadDim] In(B) / 16, "a second accumulator, shaped like a; read if has_b";
    out: Activations(Out)[QLen, Heads, HeadDim] Out / 16, "scale · (a + b), rounded";
};

const CAST_NUMBERS: &[Argument] = &arguments! {
    a_batch_stride: I32(BatchStride(A)) / 8, "elements between batch entries of a";
    b_batch_stride: I32(BatchStride(B)) / 8, "elements between batch entries of b";
    out_batch_stride: I32(BatchStride(Out)) / 8, "elements between batch entries of out";
    scale: F32(Scale), "factor";
    has_b: I32(Has(B)), "1: the kernel reads b";
};

/// Arguments of `cast`.
pub const CAST: &[Argument] = record!(CAST_ARRAYS, SUM_SIZES, CAST_NUMBERS);

const ACCUMULATE_ARRAYS: &[Argument] = &arguments! {
    home: Float32s(Home)[QLen, Heads, HeadDim] Update / 16, "an accumulator [batch, rows, heads, head_dim]; becomes home + scale · arrived";
    arrived: Float32s(Arrived)[QLen, Heads, HeadDim] / 16, "a second accumulator, shaped like home";
};

const ACCUMULATE_STRIDES: &[Argument] = &arguments! {
    home_batch_stride: I32(BatchStride(Home)) / 8, "elements between batch entries of home";
    arrived_batch_stride: I32(BatchStride(Arrived)) / 8, "elements between batch entries of arrived";
};

const FACTOR: &[Argument] = &arguments! {
    scale: F32(Scale), "factor";
};

/// Arguments of `accumulate`.
pub const ACCUMULATE: &[Argument] =
    record!(ACCUMULATE_ARRAYS, SUM_SIZES, ACCUMULATE_STRIDES, FACTOR);

const ADD_GRADIENT_ARRAYS: &[Argument] = &arguments! {
    home: Float32s(Home)[QLen, KvHeads, HeadDim] Carry / 16, "an accumulator [batch, rows, kv_heads, head_dim]; becomes home + scale · (sum of arrived over the heads of a group)";
    arrived: Activations(Arrived)[QLen, Heads, HeadDim] / 16, "a rounded gradient of each head [batch, rows, heads, head_dim]";
    out: Activations(Out)[QLen, KvHeads, HeadDim] LastOut / 16, "the same sum, rounded; written if last";
};

const ADD_GRADIENT_SIZES: &[Argument] = &arguments! {
    batch: I32(Size(Batch)), "batch entries";
    rows: I32(Size(QLen)), "rows";
    heads: I32(Size(Heads)), "heads of arrived, a multiple of kv_heads";
    kv_heads: I32(Size(KvHeads)), "heads of home, and of out";
    head_dim: I32(Size(HeadDim)) / 8, "columns";
};

const ADD_GRADIENT_NUMBERS: &[Argument] = &arguments! {
    out_batch_stride: I32(BatchStride(Out)) / 8, "elements between batch entries of out";
    scale: F32(Scale), "factor";
    first: I32(First), "1: the accumulator starts at 0 and is not read";
    last: I32(Last), "1: the kernel writes out instead of the accumulator";
};

/// Arguments of `add_gradient`.
pub const ADD_GRADIENT: &[Argument] =
    record!(ADD_GRADIENT_ARRAYS, ADD_GRADIENT_SIZES, ACCUMULATE_STRIDES, ADD_GRADIENT_NUMBERS);

const PACK_LSE_ARGUMENTS: &[Argument] = &arguments! {
    lse: Float32s(Lse)[QLen, Heads] / 4, "log-sum-exp [batch, q_len, heads], natural";
    packed_lse: Float32s(PackedLse)[Heads, QLen; PackedLse, PackedLse] Out / 4, "the same numbers [batch, heads, q_len]";
    batch: I32(Size(Batch)), "batch entries";
    q_len: I32(Size(QLen)), "rows";
    heads: I32(Size(Heads)), "heads";
    lse_batch_stride: I32(BatchStride(Lse)), "elements between batch entries of lse";
    packed_lse_batch_stride: I32(BatchStride(PackedLse)), "elements between batch entries of packed_lse";
    packed_lse_head_stride: I32(HeadStride(PackedLse)), "elements between heads of packed_lse";
};

/// Arguments of `pack_lse`.
pub const PACK_LSE: &[Argument] = record!(PACK_LSE_ARGUMENTS);

const COMBINE_ARRAYS: &[Argument] = &arguments! {
    acc: Float32s(Acc)[QLen, Heads, HeadDim] Carry / 16, "running Σ p·v [batch, q_len, heads, head_dim]; becomes that of both states";
    row_max: Float32s(RowMax)[Heads, QLen; RowMax, RowMax] Carry / 16, "running maximum of the scaled scores, in base 2 [batch, heads, q_len]";
    row_sum: Float32s(RowSum)[Heads, QLen; RowMax, RowMax] Carry / 16, "running Σ p, laid out like row_max";
    arrived_acc: Float32s(ArrivedAcc)[QLen, Heads, HeadDim] / 16, "acc of the state that arrived";
    arrived_max: Float32s(ArrivedMax)[Heads, QLen; ArrivedMax, ArrivedMax] / 16, "row_max of the state that arrived";
    arrived_sum: Float32s(ArrivedSum)[Heads, QLen; ArrivedMax, ArrivedMax] / 16, "row_sum of the state that arrived, laid out like arrived_max";
    o: Activations(O)[QLen, Heads, HeadDim] LastOut / 16, "result, shaped like acc; written if last";
    lse: Float32s(Lse)[QLen, Heads] LastOut / 4, "log-sum-exp [batch, q_len, heads], natural; written if last";
};

const COMBINE_NUMBERS: &[Argument] = &arguments! {
    acc_batch_stride: I32(BatchStride(Acc)) / 8, "elements between batch entries of acc";
    stat_batch_stride: I32(BatchStride(RowMax)), "elements between batch entries of row_max, and of row_sum";
    stat_head_stride: I32(HeadStride(RowMax)), "elements between heads of row_max, and of row_sum";
    arrived_acc_batch_stride: I32(BatchStride(ArrivedAcc)) / 8, "elements between batch entries of arrived_acc";
    arrived_stat_batch_stride: I32(BatchStride(ArrivedMax)), "elements between batch entries of arrived_max, and of arrived_sum";
    arrived_stat_head_stride: I32(HeadStride(ArrivedMax)), "elements between heads of arrived_max, and of arrived_sum";
    o_batch_stride: I32(BatchStride(O)) / 8, "elements between batch entries of o";
    lse_batch_stride: I32(BatchStride(Lse)), "elements between batch entries of lse";
    last: I32(Last), "1: the kernel writes the results instead of the state";
};

/// Arguments of `combine_softmax`.
pub const COMBINE_SOFTMAX: &[Argument] = record!(COMBINE_ARRAYS, SIZES, COMBINE_NUMBERS);

const FOLD_ARRAYS: &[Argument] = &arguments! {
    acc: Float32s(Acc)[QLen, Heads, HeadDim] Carry / 16, "running Σ p·v [batch, q_len, heads, head_dim]";
    row_max: Float32s(RowMax)[Heads, QLen; RowMax, RowMax] Carry / 16, "running maximum of the scaled scores, in base 2 [batch, heads, q_len]";
    row_sum: Float32s(RowSum)[Heads, QLen; RowMax, RowMax] Carry / 16, "running Σ p, laid out like row_max";
    arrived_o: Activations(ArrivedAcc)[QLen, Heads, HeadDim] / 16, "result over other keys, shaped like acc";
    arrived_lse: Float32s(ArrivedMax)[Heads, QLen; ArrivedMax, ArrivedMax] / 16, "its log-sum-exp, natural [batch, heads, q_len]";
    o: Activations(O)[QLen, Heads, HeadDim] LastOut / 16, "result, shaped like acc; written if last";
    lse: Float32s(Lse)[QLen, Heads] LastOut / 4, "log-sum-exp [batch, q_len, heads], natural; written if last";
};

const FOLD_NUMBERS: &[Argument] = &arguments! {
    acc_batch_stride: I32(BatchStride(Acc)) / 8, "elements between batch entries of acc";
    stat_batch_stride: I32(BatchStride(RowMax)), "elements between batch entries of row_max, and of row_sum";
    stat_head_stride: I32(HeadStride(RowMax)), "elements between heads of row_max, and of row_sum";
    arrived_o_batch_stride: I32(BatchStride(ArrivedAcc)) / 8, "elements between batch entries of arrived_o";
    arrived_lse_batch_stride: I32(BatchStride(ArrivedMax)), "elements between batch entries of arrived_lse";
    arrived_lse_head_stride: I32(HeadStride(ArrivedMax)), "elements between heads of arrived_lse";
    o_batch_stride: I32(BatchStride(O)) / 8, "elements between batch entries of o";
    lse_batch_stride: I32(BatchStride(Lse)), "elements between batch entries of lse";
    first: I32(First), "1: the state starts empty and is not read";
    last: I32(Last), "1: the kernel writes the results instead of the state";
};

/// Arguments of `fold_result`.
pub const FOLD_RESULT: &[Argument] = record!(FOLD_ARRAYS, SIZES, FOLD_NUMBERS);

/// Arguments of `segment_ranges`. Its queries are the rows that a block of another kernel keeps,
/// its keys the rows that such a block streams.
pub const SEGMENT_RANGES: &[Argument] = &arguments! {
    segments: Int32s(Segments)[QLen] / 4, "segment of each row [batch, q_len]";
    others: Int32s(Others)[KvLen] / 4, "segment of each row that may be seen [batch, kv_len]";
    ranges: Int32s(Ranges)[RangeBlocks, Four] Out / 4, "which others each 64 rows see [batch, ⌈q_len / 64⌉, 4]: begin, same, differs, end";
    batch: I32(Size(Batch)), "batch entries";
    q_len: I32(Size(QLen)), "rows";
    kv_len: I32(Size(KvLen)), "rows that may be seen";
    segments_batch_stride: I32(BatchStride(Segments)), "elements between batch entries of segments";
    others_batch_stride: I32(BatchStride(Others)), "elements between batch entries of others";
    ranges_batch_stride: I32(BatchStride(Ranges)), "elements between batch entries of ranges";
};

/// Arguments of `mask_rows`. Packed numbers of a row are its segment, its counted position, and start and stop
/// of two intervals; each number of all rows of a batch entry lies together.
pub const MASK_ROWS: &[Argument] = &arguments! {
    segments: Int32s(Segments)[QLen] In(Segments) / 4, "segment of each row [batch, q_len]; read if has_segment_ids";
    visible: Int32s(Visible)[QLen, Two] In(Visible) / 4, "interval of each row [batch, q_len, 2]; read if has_visible";
    also_visible: Int32s(AlsoVisible)[QLen, Two] In(AlsoVisible) / 4, "second interval of each row; read if has_also_visible";
    positions: Int32s(Positions)[QLen] In(Positions) / 4, "position of each row [batch, q_len], where its interval begins; read if has_positions";
    places: Int32s(CountedPositions)[QLen] In(CountedPositions) / 4, "position of each row that slopes and dropout count by; read if has_places";
    packed: Int32s(MaskRows)[QLen, Six] Out / 4, "packed numbers of each row [batch, 6, q_len]";
    batch: I32(Size(Batch)), "batch entries";
    q_len: I32(Size(QLen)), "rows";
    segments_batch_stride: I32(BatchStride(Segments)), "elements between batch entries of segments";
    visible_batch_stride: I32(BatchStride(Visible)), "elements between batch entries of visible";
    also_visible_batch_stride: I32(BatchStride(AlsoVisible)), "elements between batch entries of also_visible";
    positions_batch_stride: I32(BatchStride(Positions)), "elements between batch entries of positions";
    places_batch_stride: I32(BatchStride(CountedPositions)), "elements between batch entries of places";
    has_segment_ids: I32(Has(Segments)), "1: rows have segments; otherwise all are in segment 0";
    has_visible: I32(Has(Visible)), "1: rows have intervals; otherwise [0, 1)";
    has_also_visible: I32(Has(AlsoVisible)), "1: rows have second intervals; otherwise empty ones";
    has_positions: I32(Has(Positions)), "1: the first interval of a row begins at its position";
    has_places: I32(Has(CountedPositions)), "1: counted positions are data";
    first_place: I32(QPosition), "counted position of the first row without has_places";
    place_stride: I32(PositionStride), "counted positions from one row to the next";
};

/// Arguments of `mask_runs`. Its queries are the rows that a block of another kernel keeps, its keys
/// the rows that such a block streams.
pub const MASK_RUNS: &[Argument] = &arguments! {
    own_rows: Int32s(MaskRows)[QLen, Six] / 4, "packed numbers of each row [batch, 6, q_len]";
    other_rows: Int32s(OtherMaskRows)[KvLen, Six] / 4, "packed numbers of each row that may be seen [batch, 6, kv_len]";
    runs: Int32s(Runs)[RunBlocks, Ten] Out / 4, "which others each 128 rows see [batch, ⌈q_len / 128⌉, 10]: begin and end of four runs, same, differs";
    batch: I32(Size(Batch)), "batch entries";
    q_len: I32(Size(QLen)), "rows";
    kv_len: I32(Size(KvLen)), "rows that may be seen";
    keys_stay: I32(KeysStay), "1: rows are keys, and the others queries; 0: the other way round";
};
