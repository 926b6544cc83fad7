//! Forward pass over one rectangle of queries and keys.

#[cutile::module]
pub mod forward {
    use super::super::common::common::{band, block_of, edge, existing, per_row_view, product};
    use super::super::common::common::{rows_view, statistics_view, stream, streamed};
    use super::super::common::common::{write, write_statistics};
    use cutile::core::*;

    /// What one tile of scores makes of the running state, all in base 2, but for acc:
    ///
    /// ```text
    /// m' = max(m, rowmax s);  p = 2^(s−m');  l' = l·2^(m−m') + rowsum p
    /// ```
    ///
    /// Returns (p, 2^(m−m'), m', l'). `s` comes unscaled, `scale` is positive; hidden pairs are −inf.
    /// m starts at a finite number below every score, so that a row that has seen nothing yet stays
    /// at l = 0 without a NaN.
    pub fn weigh<const BM: i32, const BN: i32>(
        s: Tile<f32, { [BM, BN] }>,
        m: Tile<f32, { [BM, 1] }>,
        l: Tile<f32, { [BM, 1] }>,
        scale: f32,
    ) -> (
        Tile<f32, { [BM, BN] }>,
        Tile<f32, { [BM, 1] }>,
        Tile<f32, { [BM, 1] }>,
        Tile<f32, { [BM, 1] }>,
    ) {
        let scale_row: Tile<f32, { [BM, 1] }> = scale.broadcast(const_shape![BM, 1]);
        let scale_all: Tile<f32, { [BM, BN] }> = scale.broadcast(const_shape![BM, BN]);
        let highest: Tile<f32, { [BM] }> = reduce_max(s, 1i32);
        let highest: Tile<f32, { [BM, 1] }> = highest.reshape(const_shape![BM, 1]);
        let new_m: Tile<f32, { [BM, 1] }> = max_tile(m, highest * scale_row);
        let minus_m: Tile<f32, { [BM, 1] }> = negf(new_m);
        let minus_m: Tile<f32, { [BM, BN] }> = minus_m.broadcast(const_shape![BM, BN]);
        let shifted: Tile<f32, { [BM, BN] }> =
            fma(s, scale_all, minus_m, rounding::NearestEven, ftz::Enabled);
        let p: Tile<f32, { [BM, BN] }> = exp2(shifted, ftz::Enabled);
        let alpha: Tile<f32, { [BM, 1] }> = exp2(m - new_m, ftz::Enabled);
        let sum: Tile<f32, { [BM] }> = reduce_sum(p, 1i32);
        let sum: Tile<f32, { [BM, 1] }> = sum.reshape(const_shape![BM, 1]);
        let new_l: Tile<f32, { [BM, 1] }> = l * alpha + sum;
        (p, alpha, new_m, new_l)
    }

    /// acc' = acc·2^(m−m') + p v.
    pub fn gather<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
        p: Tile<f32, { [BM, BN] }>,
        v: Tile<E, { [BN, DT] }>,
        acc: Tile<f32, { [BM, DT] }>,
        alpha: Tile<f32, { [BM, 1] }>,
    ) -> Tile<f32, { [BM, DT] }> {
        let rescaled: Tile<f32, { [BM, DT] }> = acc * alpha.broadcast(const_shape![BM, DT]);
        let p: Tile<E, { [BM, BN] }> = convert_tile(p);
        mma(p, v, rescaled)
    }

    /// Folds one tile of scores into the running state, see [`weigh`] and [`gather`].
    pub fn fold<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
        s: Tile<f32, { [BM, BN] }>,
        v: Tile<E, { [BN, DT] }>,
        m: Tile<f32, { [BM, 1] }>,
        l: Tile<f32, { [BM, 1] }>,
        acc: Tile<f32, { [BM, DT] }>,
        scale: f32,
    ) -> (Tile<f32, { [BM, 1] }>, Tile<f32, { [BM, 1] }>, Tile<f32, { [BM, DT] }>) {
        let weighed = weigh(s, m, l, scale);
        let new_acc: Tile<f32, { [BM, DT] }> = gather(weighed.0, v, acc, weighed.1);
        (weighed.2, weighed.3, new_acc)
    }

    /// o = acc / l, lse = ln 2 · (m + log2 l); a row that saw nothing: 0 and −inf.
    pub unsafe fn conclude<E: ElementType, const BM: i32, const DT: i32>(
        m: Tile<f32, { [BM, 1] }>,
        l: Tile<f32, { [BM, 1] }>,
        acc: Tile<f32, { [BM, DT] }>,
        o: &Tensor<E, { [-1, -1, -1, -1] }>,
        lse: &Tensor<f32, { [-1, -1, -1] }>,
        b: i32,
        i: i32,
        h: i32,
    ) {
        let zero: Tile<f32, { [BM, 1] }> = constant(0.0f32, const_shape![BM, 1]);
        let one: Tile<f32, { [BM, 1] }> = constant(1.0f32, const_shape![BM, 1]);
        let some: Tile<bool, { [BM, 1] }> = gt_tile(l, zero);
        let divisor: Tile<f32, { [BM, 1] }> = select(some, l, one);
        let factor: Tile<f32, { [BM, 1] }> = true_div(one, divisor);
        let out: Tile<f32, { [BM, DT] }> = acc * factor.broadcast(const_shape![BM, DT]);
        let out: Tile<E, { [BM, DT] }> = convert_tile(out);
        unsafe { write(o, out, b, i, h) };
        let ln2: Tile<f32, { [BM, 1] }> = constant(0.693147180559945309f32, const_shape![BM, 1]);
        let nothing: Tile<f32, { [BM, 1] }> = constant(f32::NEG_INFINITY, const_shape![BM, 1]);
        let log: Tile<f32, { [BM, 1] }> = log2(divisor);
        let value: Tile<f32, { [BM, 1] }> = (m + log) * ln2;
        let value: Tile<f32, { [BM, 1] }> = select(some, value, nothing);
        let mut part: PartitionMut<f32, { [1, BM, 1] }> =
            unsafe { lse.partition_full_mut(const_shape![1, BM, 1]) };
        unsafe { part.store_unchecked(value.reshape(const_shape![1, BM, 1]), [b, i, h]) };
    }

    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn attention_fwd<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
        q: *mut E,
        k: *mut E,
        v: *mut E,
        acc: *mut f32,
        row_max: *mut f32,
        row_sum: *mut f32,
        o: *mut E,
        lse: *mut f32,
        batch: i32,
        q_len: i32,
        kv_len: i32,
        heads: i32,
        kv_heads: i32,
        head_dim: i32,
        q_batch_stride: i32,
        kv_batch_stride: i32,
        acc_batch_stride: i32,
        o_batch_stride: i32,
        lse_batch_stride: i32,
        stat_batch_stride: i32,
        stat_head_stride: i32,
        scale_log2: f32,
        lower: i32,
        upper: i32,
        section: i32,
        reverse: i32,
        first: i32,
        last: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let order: (i32, i32) = block_of(pid.0, ceil_div(q_len, BM), section, reverse);
        let i: i32 = order.0;
        let b: i32 = order.1 / heads;
        let h: i32 = order.1 - b * heads;
        let hk: i32 = h / (heads / kv_heads);

        let q_view: Tensor<E, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(q, batch, q_len, heads, head_dim, q_batch_stride) };
        let k_view: Tensor<E, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(k, batch, kv_len, kv_heads, head_dim, kv_batch_stride) };
        let v_view: Tensor<E, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(v, batch, kv_len, kv_heads, head_dim, kv_batch_stride) };
        let acc_view: Tensor<f32, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(acc, batch, q_len, heads, head_dim, acc_batch_stride) };
        let max_view: Tensor<f32, { [-1, -1, -1] }> = unsafe {
            statistics_view(row_max, batch, heads, q_len, stat_batch_stride, stat_head_stride)
        };
        let sum_view: Tensor<f32, { [-1, -1, -1] }> = unsafe {
            statistics_view(row_sum, batch, heads, q_len, stat_batch_stride, stat_head_stride)
        };
        let k_part = k_view.partition(const_shape![1, BN, 1, DT]);
        let v_part = v_view.partition(const_shape![1, BN, 1, DT]);

        let tq: Tile<E, { [1, BM, 1, DT] }> =
            q_view.partition(const_shape![1, BM, 1, DT]).load([b, i, h, 0i32]);
        let tq: Tile<E, { [BM, DT] }> = tq.reshape(const_shape![BM, DT]);

        let mut m: Tile<f32, { [BM, 1] }> = constant(-1.0e38f32, const_shape![BM, 1]);
        let mut l: Tile<f32, { [BM, 1] }> = constant(0.0f32, const_shape![BM, 1]);
        let mut a: Tile<f32, { [BM, DT] }> = constant(0.0f32, const_shape![BM, DT]);
        if first == 0i32 {
            let t: Tile<f32, { [1, 1, BM] }> =
                max_view.partition(const_shape![1, 1, BM]).load([b, h, i]);
            m = t.reshape(const_shape![BM, 1]);
            let t: Tile<f32, { [1, 1, BM] }> =
                sum_view.partition(const_shape![1, 1, BM]).load([b, h, i]);
            l = t.reshape(const_shape![BM, 1]);
            let t: Tile<f32, { [1, BM, 1, DT] }> =
                acc_view.partition(const_shape![1, BM, 1, DT]).load([b, i, h, 0i32]);
            a = t.reshape(const_shape![BM, DT]);
        }

        let row: i32 = i * BM;
        let last_row: i32 = min(row + BM, q_len) - 1i32;
        let tiles: (i32, i32, i32, i32) = streamed::<BN>(row, last_row, lower, upper, kv_len);

        for j in tiles.1..tiles.2 {
            let tk: Tile<E, { [BN, DT] }> = stream(&k_part, b, j, hk);
            let s: Tile<f32, { [BM, BN] }> = product(tq, tk);
            let tv: Tile<E, { [BN, DT] }> = stream(&v_part, b, j, hk);
            let state = fold(s, tv, m, l, a, scale_log2);
            m = state.0;
            l = state.1;
            a = state.2;
        }
        let edges: i32 = (tiles.1 - tiles.0) + (tiles.3 - tiles.2);
        for t in 0i32..edges {
            let j: i32 = edge(t, tiles.0, tiles.1, tiles.2);
            let tk: Tile<E, { [BN, DT] }> = stream(&k_part, b, j, hk);
            let s: Tile<f32, { [BM, BN] }> = product(tq, tk);
            let seen: Tile<bool, { [BM, BN] }> = band::<BM, BN>(lower, upper, j * BN - row);
            let exist: Tile<bool, { [BM, BN] }> = existing::<BM, BN>(kv_len - j * BN);
            let hidden: Tile<f32, { [BM, BN] }> = constant(f32::NEG_INFINITY, const_shape![BM, BN]);
            let s: Tile<f32, { [BM, BN] }> = select(seen & exist, s, hidden);
            let tv: Tile<E, { [BN, DT] }> = stream(&v_part, b, j, hk);
            let state = fold(s, tv, m, l, a, scale_log2);
            m = state.0;
            l = state.1;
            a = state.2;
        }

        if last == 1i32 {
            let o_view: Tensor<E, { [-1, -1, -1, -1] }> =
                unsafe { rows_view(o, batch, q_len, heads, head_dim, o_batch_stride) };
            let lse_view: Tensor<f32, { [-1, -1, -1] }> =
                unsafe { per_row_view(lse, batch, q_len, heads, lse_batch_stride) };
            unsafe { conclude(m, l, a, &o_view, &lse_view, b, i, h) };
        } else {
            unsafe { write(&acc_view, a, b, i, h) };
            unsafe { write_statistics(&max_view, m, b, i, h) };
            unsafe { write_statistics(&sum_view, l, b, i, h) };
        }
    }
}
