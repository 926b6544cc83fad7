//! Kernels that go through rows once: statistics before the backward pass, sums and casts after it.

#[cutile::module]
pub mod rows {
    use super::super::common::common::{block_of, per_row_view, rows_view, statistics_view};
    use super::super::common::common::{read, write, write_statistics};
    use cutile::core::*;

    /// Computes delta = rowsum(dout ∘ o) − dlse and lse in base 2, both `[batch, heads, rows]`, for
    /// `BM` rows of one head. With `has_zeros` it sets these rows of `zeros` to 0.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn delta<E: ElementType, const BM: i32, const DT: i32>(
        o: *mut E,
        dout: *mut E,
        lse: *mut f32,
        dlse: *mut f32,
        lse_log2: *mut f32,
        delta: *mut f32,
        zeros: *mut f32,
        batch: i32,
        q_len: i32,
        heads: i32,
        head_dim: i32,
        o_batch_stride: i32,
        lse_batch_stride: i32,
        stat_batch_stride: i32,
        stat_head_stride: i32,
        zeros_batch_stride: i32,
        has_dlse: i32,
        has_zeros: i32,
    ) {
        let block = block_of(ceil_div(q_len, BM), heads, heads, 0i32);
        let (i, b, h) = (block.0, block.1, block.2);

        let o_view = unsafe { rows_view(o, batch, q_len, heads, head_dim, o_batch_stride) };
        let dout_view = unsafe { rows_view(dout, batch, q_len, heads, head_dim, o_batch_stride) };
        let t: Tile<E, { [BM, DT] }> = read(&o_view, const_shape![BM, DT], b, i, h);
        let to: Tile<f32, { [BM, DT] }> = convert_tile(t);
        let t: Tile<E, { [BM, DT] }> = read(&dout_view, const_shape![BM, DT], b, i, h);
        let tdo: Tile<f32, { [BM, DT] }> = convert_tile(t);
        let product: Tile<f32, { [BM, DT] }> = to * tdo;
        let sum: Tile<f32, { [BM] }> = reduce_sum(product, 1i32);
        let mut sum: Tile<f32, { [BM, 1] }> = sum.reshape(const_shape![BM, 1]);
        if has_dlse == 1i32 {
            let dlse_view = unsafe { per_row_view(dlse, batch, q_len, heads, lse_batch_stride) };
            let t: Tile<f32, { [1, BM, 1] }> =
                dlse_view.partition(const_shape![1, BM, 1]).load([b, i, h]);
            let t: Tile<f32, { [BM, 1] }> = t.reshape(const_shape![BM, 1]);
            sum = sum - t;
        }
        let delta_view = unsafe {
            statistics_view(delta, batch, heads, q_len, stat_batch_stride, stat_head_stride)
        };
        unsafe { write_statistics(&delta_view, sum, b, i, h) };

        let lse_view = unsafe { per_row_view(lse, batch, q_len, heads, lse_batch_stride) };
        let t: Tile<f32, { [1, BM, 1] }> =
            lse_view.partition(const_shape![1, BM, 1]).load([b, i, h]);
        let t: Tile<f32, { [BM, 1] }> = t.reshape(const_shape![BM, 1]);
        // A row that sees nothing has lse = −inf. A huge number in its place makes all its p zero.
        let log2e: Tile<f32, { [BM, 1] }> = constant(1.442695040888963407f32, const_shape![BM, 1]);
        let nothing: Tile<f32, { [BM, 1] }> = constant(f32::NEG_INFINITY, const_shape![BM, 1]);
        let huge: Tile<f32, { [BM, 1] }> = constant(1.0e38f32, const_shape![BM, 1]);
        let scaled: Tile<f32, { [BM, 1] }> = t * log2e;
        let value: Tile<f32, { [BM, 1] }> = select(eq_tile(t, nothing), huge, scaled);
        let lse_log2_view = unsafe {
            statistics_view(lse_log2, batch, heads, q_len, stat_batch_stride, stat_head_stride)
        };
        unsafe { write_statistics(&lse_log2_view, value, b, i, h) };
        if has_zeros == 1i32 {
            let zeros_view =
                unsafe { rows_view(zeros, batch, q_len, heads, head_dim, zeros_batch_stride) };
            let zero: Tile<f32, { [BM, DT] }> = constant(0.0f32, const_shape![BM, DT]);
            unsafe { write(&zeros_view, zero, b, i, h) };
        }
    }

    /// Writes lse, `[batch, rows, heads]`, as `[batch, heads, rows]`, for `BM` rows of one head.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn pack_lse<const BM: i32>(
        lse: *mut f32,
        packed_lse: *mut f32,
        batch: i32,
        q_len: i32,
        heads: i32,
        lse_batch_stride: i32,
        packed_lse_batch_stride: i32,
        packed_lse_head_stride: i32,
    ) {
        let block = block_of(ceil_div(q_len, BM), heads, heads, 0i32);
        let (i, b, h) = (block.0, block.1, block.2);
        let lse_view = unsafe { per_row_view(lse, batch, q_len, heads, lse_batch_stride) };
        let t: Tile<f32, { [1, BM, 1] }> =
            lse_view.partition(const_shape![1, BM, 1]).load([b, i, h]);
        let t: Tile<f32, { [BM, 1] }> = t.reshape(const_shape![BM, 1]);
        let packed_view = unsafe {
            statistics_view(
                packed_lse,
                batch,
                heads,
                q_len,
                packed_lse_batch_stride,
                packed_lse_head_stride,
            )
        };
        unsafe { write_statistics(&packed_view, t, b, i, h) };
    }

    /// Computes out = scale · (a + b), cast to the activations' type; without `has_b`, b is 0.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn cast<E: ElementType, const BM: i32, const DT: i32>(
        a: *mut f32,
        b: *mut f32,
        out: *mut E,
        batch: i32,
        rows: i32,
        heads: i32,
        head_dim: i32,
        a_batch_stride: i32,
        b_batch_stride: i32,
        out_batch_stride: i32,
        scale: f32,
        has_b: i32,
    ) {
        let block = block_of(ceil_div(rows, BM), heads, heads, 0i32);
        let (i, n, h) = (block.0, block.1, block.2);
        let a_view = unsafe { rows_view(a, batch, rows, heads, head_dim, a_batch_stride) };
        let mut sum: Tile<f32, { [BM, DT] }> = read(&a_view, const_shape![BM, DT], n, i, h);
        if has_b == 1i32 {
            let b_view = unsafe { rows_view(b, batch, rows, heads, head_dim, b_batch_stride) };
            let t: Tile<f32, { [BM, DT] }> = read(&b_view, const_shape![BM, DT], n, i, h);
            sum = sum + t;
        }
        let out_view = unsafe { rows_view(out, batch, rows, heads, head_dim, out_batch_stride) };
        sum = sum * scale.broadcast(const_shape![BM, DT]);
        let t: Tile<E, { [BM, DT] }> = convert_tile(sum);
        unsafe { write(&out_view, t, n, i, h) };
    }

    /// Computes home += scale · arrived, of accumulators.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn accumulate<const BM: i32, const DT: i32>(
        home: *mut f32,
        arrived: *mut f32,
        batch: i32,
        rows: i32,
        heads: i32,
        head_dim: i32,
        home_batch_stride: i32,
        arrived_batch_stride: i32,
        scale: f32,
    ) {
        let block = block_of(ceil_div(rows, BM), heads, heads, 0i32);
        let (i, n, h) = (block.0, block.1, block.2);
        let home_view = unsafe { rows_view(home, batch, rows, heads, head_dim, home_batch_stride) };
        let arrived_view =
            unsafe { rows_view(arrived, batch, rows, heads, head_dim, arrived_batch_stride) };
        let a: Tile<f32, { [BM, DT] }> = read(&home_view, const_shape![BM, DT], n, i, h);
        let b: Tile<f32, { [BM, DT] }> = read(&arrived_view, const_shape![BM, DT], n, i, h);
        let sum: Tile<f32, { [BM, DT] }> = a + b * scale.broadcast(const_shape![BM, DT]);
        unsafe { write(&home_view, sum, n, i, h) };
    }

    /// Adds rounded gradients to an accumulator: home += scale · (sum of arrived over the heads of
    /// a group). With `first`, home starts at 0. With `last` it writes the sum to `out`, rounded,
    /// instead.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn add_gradient<E: ElementType, const BM: i32, const DT: i32>(
        home: *mut f32,
        arrived: *mut E,
        out: *mut E,
        batch: i32,
        rows: i32,
        heads: i32,
        kv_heads: i32,
        head_dim: i32,
        home_batch_stride: i32,
        arrived_batch_stride: i32,
        out_batch_stride: i32,
        scale: f32,
        first: i32,
        last: i32,
    ) {
        let block = block_of(ceil_div(rows, BM), kv_heads, kv_heads, 0i32);
        let (i, n, h) = (block.0, block.1, block.2);
        let home_view =
            unsafe { rows_view(home, batch, rows, kv_heads, head_dim, home_batch_stride) };
        let arrived_view =
            unsafe { rows_view(arrived, batch, rows, heads, head_dim, arrived_batch_stride) };
        let group = heads / kv_heads;
        let mut sum: Tile<f32, { [BM, DT] }> = constant(0.0f32, const_shape![BM, DT]);
        for member in 0i32..group {
            let head = h * group + member;
            let t: Tile<E, { [BM, DT] }> = read(&arrived_view, const_shape![BM, DT], n, i, head);
            let t: Tile<f32, { [BM, DT] }> = convert_tile(t);
            sum = sum + t;
        }
        sum = sum * scale.broadcast(const_shape![BM, DT]);
        if first == 0i32 {
            let t: Tile<f32, { [BM, DT] }> = read(&home_view, const_shape![BM, DT], n, i, h);
            sum = t + sum;
        }
        if last == 1i32 {
            let out_view =
                unsafe { rows_view(out, batch, rows, kv_heads, head_dim, out_batch_stride) };
            let t: Tile<E, { [BM, DT] }> = convert_tile(sum);
            unsafe { write(&out_view, t, n, i, h) };
        } else {
            unsafe { write(&home_view, sum, n, i, h) };
        }
    }
}
