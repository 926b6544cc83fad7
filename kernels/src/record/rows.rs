//! Launch records of what is done once per row.

use super::{Access, Argument, Kind, Shape, View, count, joined};

/// Arguments of `delta`.
pub const DELTA: &[Argument] = &arguments! {
    o: Activations[Queries, o_batch_stride] / 16, "result of the forward pass [batch, q_len, heads, head_dim]";
    dout: Activations[Queries, o_batch_stride] / 16, "its gradient, as o";
    lse: Float32s[PerQuery, lse_batch_stride] / 4, "log-sum-exp [batch, q_len, heads], natural";
    dlse: Float32s[PerQuery, lse_batch_stride] MaybeIn(has_dlse) / 4, "its gradient, as lse; read if has_dlse";
    lse_log2: Float32s[Statistics, stat_batch_stride, stat_head_stride] Out / 16, "lse in base 2 [batch, heads, q_len]; huge where lse is −inf";
    delta: Float32s[Statistics, stat_batch_stride, stat_head_stride] Out / 16, "rowsum(dout ∘ o) − dlse, as lse_log2";
    zeros: Float32s[Queries, zeros_batch_stride] OptionalOut(has_zeros) / 16, "set to 0 [batch, q_len, heads, head_dim]";
    batch: I32, "batch entries";
    q_len: I32, "rows";
    heads: I32, "heads";
    head_dim: I32 / 8, "columns of o and dout";
    o_batch_stride: I32 / 8, "elements between batch entries of o, and of dout";
    lse_batch_stride: I32, "elements between batch entries of lse, and of dlse";
    stat_batch_stride: I32, "elements between batch entries of lse_log2, and of delta";
    stat_head_stride: I32, "elements between heads of lse_log2, and of delta";
    zeros_batch_stride: I32 / 8, "elements between batch entries of zeros";
    has_dlse: I32, "1: dlse is read";
    has_zeros: I32, "1: zeros is written";
};

/// Arguments of `finish`.
pub const FINISH: &[Argument] = &arguments! {
    a: Float32s[Queries, a_batch_stride] / 16, "an accumulator [batch, rows, heads, head_dim]";
    b: Float32s[Queries, b_batch_stride] MaybeIn(has_b) / 16, "another, as a; read if has_b";
    out: Activations[Queries, out_batch_stride] Out / 16, "scale · (a + b), rounded";
    batch: I32, "batch entries";
    rows: I32, "rows";
    heads: I32, "heads";
    head_dim: I32 / 8, "columns";
    a_batch_stride: I32 / 8, "elements between batch entries of a";
    b_batch_stride: I32 / 8, "elements between batch entries of b";
    out_batch_stride: I32 / 8, "elements between batch entries of out";
    scale: F32, "factor";
    has_b: I32, "1: b is read";
};

/// Arguments of `merge`.
pub const MERGE: &[Argument] = &arguments! {
    home: Float32s[Queries, home_batch_stride] Update / 16, "an accumulator [batch, rows, heads, head_dim]; becomes home + arrived";
    arrived: Float32s[Queries, arrived_batch_stride] / 16, "another, as home";
    batch: I32, "batch entries";
    rows: I32, "rows";
    heads: I32, "heads";
    head_dim: I32 / 8, "columns";
    home_batch_stride: I32 / 8, "elements between batch entries of home";
    arrived_batch_stride: I32 / 8, "elements between batch entries of arrived";
};

const JOIN_ARRAYS: [Argument; 8] = arguments! {
    acc: Float32s[Results, acc_batch_stride] Carry / 16, "running Σ p·v [batch, q_len, heads, head_dim]; becomes that of both";
    row_max: Float32s[Statistics, stat_batch_stride, stat_head_stride] Carry / 16, "running maximum of the scaled scores, in base 2 [batch, heads, q_len]";
    row_sum: Float32s[Statistics, stat_batch_stride, stat_head_stride] Carry / 16, "running Σ p, as row_max";
    came_acc: Float32s[Results, came_acc_batch_stride] / 16, "the other state's acc";
    came_max: Float32s[Statistics, came_stat_batch_stride, came_stat_head_stride] / 16, "its row_max";
    came_sum: Float32s[Statistics, came_stat_batch_stride, came_stat_head_stride] / 16, "its row_sum, as came_max";
    o: Activations[Results, o_batch_stride] MaybeOut / 16, "result, as acc; written if last";
    lse: Float32s[PerQuery, lse_batch_stride] MaybeOut / 4, "log-sum-exp [batch, q_len, heads], natural; written if last";
};

const JOIN_NUMBERS: [Argument; 13] = arguments! {
    batch: I32, "batch entries";
    q_len: I32, "rows";
    heads: I32, "heads";
    head_dim: I32 / 8, "columns";
    acc_batch_stride: I32 / 8, "elements between batch entries of acc";
    stat_batch_stride: I32, "elements between batch entries of row_max, and of row_sum";
    stat_head_stride: I32, "elements between heads of row_max, and of row_sum";
    came_acc_batch_stride: I32 / 8, "elements between batch entries of came_acc";
    came_stat_batch_stride: I32, "elements between batch entries of came_max, and of came_sum";
    came_stat_head_stride: I32, "elements between heads of came_max, and of came_sum";
    o_batch_stride: I32 / 8, "elements between batch entries of o";
    lse_batch_stride: I32, "elements between batch entries of lse";
    last: I32, "1: the results are written, not the state";
};

/// Arguments of `join`.
pub const JOIN: &[Argument] = record!(JOIN_ARRAYS, JOIN_NUMBERS);

/// Arguments of `segment_ranges`. Its queries are the rows that a block of another kernel keeps, its
/// keys those that the block streams.
pub const SEGMENT_RANGES: &[Argument] = &arguments! {
    segments: Int32s[QueryTokens, segments_batch_stride] / 4, "segment of each row [batch, q_len]";
    others: Int32s[KeyTokens, others_batch_stride] / 4, "segment of each row that may be seen [batch, kv_len]";
    ranges: Int32s[Ranges, ranges_batch_stride] Out / 4, "of each 64 rows, which others they see [batch, ⌈q_len / 64⌉, 4]: begin, same, differs, end";
    batch: I32, "batch entries";
    q_len: I32, "rows";
    kv_len: I32, "rows that may be seen";
    segments_batch_stride: I32, "elements between batch entries of segments";
    others_batch_stride: I32, "elements between batch entries of others";
    ranges_batch_stride: I32, "elements between batch entries of ranges";
};
