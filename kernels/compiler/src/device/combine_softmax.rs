//! Sums of softmax states, and of results, of the same queries.

#[cutile::module]
pub mod combine_softmax {
    use super::super::common::common::{block_of, per_row_view, rows_view, statistics_view};
    use super::super::common::common::{read, read_statistics, write, write_statistics};
    use super::super::softmax::softmax::conclude;
    use cutile::core::*;

    /// Returns the sum of two states, in base 2:
    ///
    /// ```text
    /// m = max(m₁, m₂);  l = l₁·2^(m₁−m) + l₂·2^(m₂−m);  acc = acc₁·2^(m₁−m) + acc₂·2^(m₂−m)
    /// ```
    ///
    /// m is never below the number at which a state starts, so that two rows that saw nothing give
    /// no NaN even if their m is −∞.
    fn state_sum<const BM: i32, const DT: i32>(
        m1: Tile<f32, { [BM, 1] }>,
        l1: Tile<f32, { [BM, 1] }>,
        a1: Tile<f32, { [BM, DT] }>,
        m2: Tile<f32, { [BM, 1] }>,
        l2: Tile<f32, { [BM, 1] }>,
        a2: Tile<f32, { [BM, DT] }>,
    ) -> (Tile<f32, { [BM, 1] }>, Tile<f32, { [BM, 1] }>, Tile<f32, { [BM, DT] }>) {
        let lowest: Tile<f32, { [BM, 1] }> = constant(-1.0e38f32, const_shape![BM, 1]);
        let m: Tile<f32, { [BM, 1] }> = max_tile(max_tile(m1, m2), lowest);
        let w1: Tile<f32, { [BM, 1] }> = exp2(m1 - m, ftz::Enabled);
        let w2: Tile<f32, { [BM, 1] }> = exp2(m2 - m, ftz::Enabled);
        let l: Tile<f32, { [BM, 1] }> = l1 * w1 + l2 * w2;
        let a1: Tile<f32, { [BM, DT] }> = a1 * w1.broadcast(const_shape![BM, DT]);
        let a2: Tile<f32, { [BM, DT] }> = a2 * w2.broadcast(const_shape![BM, DT]);
        (m, l, a1 + a2)
    }

    /// Adds the state that arrived to the state at home, see [`state_sum`]. With `last` it writes
    /// the results instead, see [`conclude`].
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn combine_softmax<E: ElementType, const BM: i32, const DT: i32>(
        acc: *mut f32,
        row_max: *mut f32,
        row_sum: *mut f32,
        arrived_acc: *mut f32,
        arrived_max: *mut f32,
        arrived_sum: *mut f32,
        o: *mut E,
        lse: *mut f32,
        batch: i32,
        q_len: i32,
        heads: i32,
        head_dim: i32,
        acc_batch_stride: i32,
        stat_batch_stride: i32,
        stat_head_stride: i32,
        arrived_acc_batch_stride: i32,
        arrived_stat_batch_stride: i32,
        arrived_stat_head_stride: i32,
        o_batch_stride: i32,
        lse_batch_stride: i32,
        last: i32,
    ) {
        let block = block_of(ceil_div(q_len, BM), heads, heads, 0i32);
        let (i, b, h) = (block.0, block.1, block.2);

        let acc_view = unsafe { rows_view(acc, batch, q_len, heads, head_dim, acc_batch_stride) };
        let max_view = unsafe {
            statistics_view(row_max, batch, heads, q_len, stat_batch_stride, stat_head_stride)
        };
        let sum_view = unsafe {
            statistics_view(row_sum, batch, heads, q_len, stat_batch_stride, stat_head_stride)
        };
        let arrived_view = unsafe {
            rows_view(arrived_acc, batch, q_len, heads, head_dim, arrived_acc_batch_stride)
        };
        let arrived_max_view = unsafe {
            let (entry, head) = (arrived_stat_batch_stride, arrived_stat_head_stride);
            statistics_view(arrived_max, batch, heads, q_len, entry, head)
        };
        let arrived_sum_view = unsafe {
            let (entry, head) = (arrived_stat_batch_stride, arrived_stat_head_stride);
            statistics_view(arrived_sum, batch, heads, q_len, entry, head)
        };
        let m1: Tile<f32, { [BM, 1] }> = read_statistics::<BM>(&max_view, b, i, h);
        let l1: Tile<f32, { [BM, 1] }> = read_statistics::<BM>(&sum_view, b, i, h);
        let a1: Tile<f32, { [BM, DT] }> = read(&acc_view, const_shape![BM, DT], b, i, h);
        let m2: Tile<f32, { [BM, 1] }> = read_statistics::<BM>(&arrived_max_view, b, i, h);
        let l2: Tile<f32, { [BM, 1] }> = read_statistics::<BM>(&arrived_sum_view, b, i, h);
        let a2: Tile<f32, { [BM, DT] }> = read(&arrived_view, const_shape![BM, DT], b, i, h);

        let sum = state_sum::<BM, DT>(m1, l1, a1, m2, l2, a2);
        let (m, l, a) = (sum.0, sum.1, sum.2);

        if last == 1i32 {
            let o_view = unsafe { rows_view(o, batch, q_len, heads, head_dim, o_batch_stride) };
            let lse_view = unsafe { per_row_view(lse, batch, q_len, heads, lse_batch_stride) };
            unsafe { conclude(m, l, a, &o_view, &lse_view, b, i, h) };
        } else {
            unsafe { write(&acc_view, a, b, i, h) };
            unsafe { write_statistics(&max_view, m, b, i, h) };
            unsafe { write_statistics(&sum_view, l, b, i, h) };
        }
    }

    /// Adds a result of attention over other keys, o and lse, to a state: its m is lse in base 2,
    /// its l is 1, and its acc is o. With `first` the result alone becomes the state. With `last` it
    /// writes the results instead, see [`conclude`].
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn fold_result<E: ElementType, const BM: i32, const DT: i32>(
        acc: *mut f32,
        row_max: *mut f32,
        row_sum: *mut f32,
        arrived_o: *mut E,
        arrived_lse: *mut f32,
        o: *mut E,
        lse: *mut f32,
        batch: i32,
        q_len: i32,
        heads: i32,
        head_dim: i32,
        acc_batch_stride: i32,
        stat_batch_stride: i32,
        stat_head_stride: i32,
        arrived_o_batch_stride: i32,
        arrived_lse_batch_stride: i32,
        arrived_lse_head_stride: i32,
        o_batch_stride: i32,
        lse_batch_stride: i32,
        first: i32,
        last: i32,
    ) {
        let block = block_of(ceil_div(q_len, BM), heads, heads, 0i32);
        let (i, b, h) = (block.0, block.1, block.2);

        let arrived_view =
            unsafe { rows_view(arrived_o, batch, q_len, heads, head_dim, arrived_o_batch_stride) };
        let arrived_lse_view = unsafe {
            let (entry, head) = (arrived_lse_batch_stride, arrived_lse_head_stride);
            statistics_view(arrived_lse, batch, heads, q_len, entry, head)
        };
        let t: Tile<E, { [BM, DT] }> = read(&arrived_view, const_shape![BM, DT], b, i, h);
        let mut a: Tile<f32, { [BM, DT] }> = convert_tile(t);
        let t: Tile<f32, { [BM, 1] }> = read_statistics::<BM>(&arrived_lse_view, b, i, h);
        // A row that saw nothing has lse = −∞, and its state is that at the start.
        let nothing: Tile<f32, { [BM, 1] }> = constant(f32::NEG_INFINITY, const_shape![BM, 1]);
        let lowest: Tile<f32, { [BM, 1] }> = constant(-1.0e38f32, const_shape![BM, 1]);
        let log2e: Tile<f32, { [BM, 1] }> = constant(1.442695040888963407f32, const_shape![BM, 1]);
        let zero: Tile<f32, { [BM, 1] }> = constant(0.0f32, const_shape![BM, 1]);
        let one: Tile<f32, { [BM, 1] }> = constant(1.0f32, const_shape![BM, 1]);
        let mut m: Tile<f32, { [BM, 1] }> = select(eq_tile(t, nothing), lowest, t * log2e);
        let mut l: Tile<f32, { [BM, 1] }> = select(eq_tile(t, nothing), zero, one);

        let acc_view = unsafe { rows_view(acc, batch, q_len, heads, head_dim, acc_batch_stride) };
        let max_view = unsafe {
            statistics_view(row_max, batch, heads, q_len, stat_batch_stride, stat_head_stride)
        };
        let sum_view = unsafe {
            statistics_view(row_sum, batch, heads, q_len, stat_batch_stride, stat_head_stride)
        };
        if first == 0i32 {
            let m1: Tile<f32, { [BM, 1] }> = read_statistics::<BM>(&max_view, b, i, h);
            let l1: Tile<f32, { [BM, 1] }> = read_statistics::<BM>(&sum_view, b, i, h);
            let a1: Tile<f32, { [BM, DT] }> = read(&acc_view, const_shape![BM, DT], b, i, h);
            let sum = state_sum::<BM, DT>(m1, l1, a1, m, l, a);
            m = sum.0;
            l = sum.1;
            a = sum.2;
        }
        if last == 1i32 {
            let o_view = unsafe { rows_view(o, batch, q_len, heads, head_dim, o_batch_stride) };
            let lse_view = unsafe { per_row_view(lse, batch, q_len, heads, lse_batch_stride) };
            unsafe { conclude(m, l, a, &o_view, &lse_view, b, i, h) };
        } else {
            unsafe { write(&acc_view, a, b, i, h) };
            unsafe { write_statistics(&max_view, m, b, i, h) };
            unsafe { write_statistics(&sum_view, l, b, i, h) };
        }
    }
}
