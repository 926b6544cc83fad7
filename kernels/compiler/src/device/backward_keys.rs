//! Backward pass over one rectangle, key side: dk and dv of a tile of keys, queries streaming.

#[cutile::module]
pub mod backward_keys {
    use super::super::common::common::{band, block_of, edge, product, rows_view};
    use super::super::common::common::{statistics_view, stream, streamed, write};
    use cutile::core::*;

    /// min(scale · s − lse, 0) in base 2, of which 2^ is p; lse is huge where a row sees nothing:
    /// p = 0. Large scores are rounded otherwise than in the forward pass, and so is lse: the
    /// minimum keeps p from exceeding 1, and NaN stays.
    pub fn exponents<const BN: i32, const BM: i32>(
        s: Tile<f32, { [BN, BM] }>,
        lse: Tile<f32, { [1, 1, BM] }>,
        scale: f32,
    ) -> Tile<f32, { [BN, BM] }> {
        let scale: Tile<f32, { [BN, BM] }> = scale.broadcast(const_shape![BN, BM]);
        let lse: Tile<f32, { [1, BM] }> = lse.reshape(const_shape![1, BM]);
        let minus_lse: Tile<f32, { [1, BM] }> = negf(lse);
        let minus_lse: Tile<f32, { [BN, BM] }> = minus_lse.broadcast(const_shape![BN, BM]);
        let e: Tile<f32, { [BN, BM] }> =
            fma(s, scale, minus_lse, rounding::NearestEven, ftz::Enabled);
        let zero: Tile<f32, { [BN, BM] }> = constant(0.0f32, const_shape![BN, BM]);
        minf(e, zero, nan::Enabled, ftz::Disabled)
    }

    /// dv += pᵀ dout;  dk += (w ∘ (dp − delta))ᵀ q; w is p, times the soft cap's derivative. All
    /// tiles of pairs are transposed: their rows are keys.
    pub fn add<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
        p: Tile<f32, { [BN, BM] }>,
        w: Tile<f32, { [BN, BM] }>,
        dp: Tile<f32, { [BN, BM] }>,
        q: Tile<E, { [BM, DT] }>,
        dout: Tile<E, { [BM, DT] }>,
        delta: Tile<f32, { [1, 1, BM] }>,
        sum_k: Tile<f32, { [BN, DT] }>,
        sum_v: Tile<f32, { [BN, DT] }>,
    ) -> (Tile<f32, { [BN, DT] }>, Tile<f32, { [BN, DT] }>) {
        let p16: Tile<E, { [BN, BM] }> = convert_tile(p);
        let new_v: Tile<f32, { [BN, DT] }> = mma(p16, dout, sum_v);
        let delta: Tile<f32, { [1, BM] }> = delta.reshape(const_shape![1, BM]);
        let delta: Tile<f32, { [BN, BM] }> = delta.broadcast(const_shape![BN, BM]);
        let excess: Tile<f32, { [BN, BM] }> = dp - delta;
        let ds: Tile<f32, { [BN, BM] }> = w * excess;
        let ds: Tile<E, { [BN, BM] }> = convert_tile(ds);
        let new_k: Tile<f32, { [BN, DT] }> = mma(ds, q, sum_k);
        (new_k, new_v)
    }

    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn attention_bwd_dkdv<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
        q: *mut E,
        k: *mut E,
        v: *mut E,
        dout: *mut E,
        lse_log2: *mut f32,
        delta: *mut f32,
        dk_acc: *mut f32,
        dv_acc: *mut f32,
        dk: *mut E,
        dv: *mut E,
        batch: i32,
        q_len: i32,
        kv_len: i32,
        heads: i32,
        kv_heads: i32,
        head_dim: i32,
        q_batch_stride: i32,
        kv_batch_stride: i32,
        acc_batch_stride: i32,
        out_batch_stride: i32,
        stat_batch_stride: i32,
        stat_head_stride: i32,
        scale_log2: f32,
        softmax_scale: f32,
        lower: i32,
        upper: i32,
        section: i32,
        reverse: i32,
        first: i32,
        last: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let order: (i32, i32) = block_of(pid.0, ceil_div(kv_len, BN), section, reverse);
        let j: i32 = order.0;
        let b: i32 = order.1 / kv_heads;
        let hk: i32 = order.1 - b * kv_heads;
        let group: i32 = heads / kv_heads;
        let h0: i32 = hk * group;

        let q_view: Tensor<E, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(q, batch, q_len, heads, head_dim, q_batch_stride) };
        let dout_view: Tensor<E, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(dout, batch, q_len, heads, head_dim, q_batch_stride) };
        let k_view: Tensor<E, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(k, batch, kv_len, kv_heads, head_dim, kv_batch_stride) };
        let v_view: Tensor<E, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(v, batch, kv_len, kv_heads, head_dim, kv_batch_stride) };
        let lse_view: Tensor<f32, { [-1, -1, -1] }> = unsafe {
            statistics_view(lse_log2, batch, heads, q_len, stat_batch_stride, stat_head_stride)
        };
        let delta_view: Tensor<f32, { [-1, -1, -1] }> = unsafe {
            statistics_view(delta, batch, heads, q_len, stat_batch_stride, stat_head_stride)
        };
        let q_part = q_view.partition(const_shape![1, BM, 1, DT]);
        let dout_part = dout_view.partition(const_shape![1, BM, 1, DT]);
        let lse_part = lse_view.partition(const_shape![1, 1, BM]);
        let delta_part = delta_view.partition(const_shape![1, 1, BM]);

        let tk: Tile<E, { [1, BN, 1, DT] }> =
            k_view.partition(const_shape![1, BN, 1, DT]).load([b, j, hk, 0i32]);
        let tk: Tile<E, { [BN, DT] }> = tk.reshape(const_shape![BN, DT]);
        let tv: Tile<E, { [1, BN, 1, DT] }> =
            v_view.partition(const_shape![1, BN, 1, DT]).load([b, j, hk, 0i32]);
        let tv: Tile<E, { [BN, DT] }> = tv.reshape(const_shape![BN, DT]);

        let mut sum_k: Tile<f32, { [BN, DT] }> = constant(0.0f32, const_shape![BN, DT]);
        let mut sum_v: Tile<f32, { [BN, DT] }> = constant(0.0f32, const_shape![BN, DT]);

        // Query rows i that see key rows first..=last: −upper ≤ i − j ≤ −lower.
        let key: i32 = j * BN;
        let last_key: i32 = min(key + BN, kv_len) - 1i32;
        let tiles: (i32, i32, i32, i32) =
            streamed::<BM>(key, last_key, 0i32 - upper, 0i32 - lower, q_len);

        // All query heads of the group in one loop, so that it stays full between heads.
        let inside: i32 = tiles.2 - tiles.1;
        for t in 0i32..group * inside {
            let g: i32 = t / inside;
            let i: i32 = tiles.1 + (t - g * inside);
            let h: i32 = h0 + g;
            let tq: Tile<E, { [BM, DT] }> = stream(&q_part, b, i, h);
            let s: Tile<f32, { [BN, BM] }> = product(tk, tq);
            let lse: Tile<f32, { [1, 1, BM] }> = lse_part.load([b, h, i]);
            let e: Tile<f32, { [BN, BM] }> = exponents(s, lse, scale_log2);
            let p: Tile<f32, { [BN, BM] }> = exp2(e, ftz::Enabled);
            let tdo: Tile<E, { [BM, DT] }> = stream(&dout_part, b, i, h);
            let delta: Tile<f32, { [1, 1, BM] }> = delta_part.load([b, h, i]);
            let dp: Tile<f32, { [BN, BM] }> = product(tv, tdo);
            let sums = add(p, p, dp, tq, tdo, delta, sum_k, sum_v);
            sum_k = sums.0;
            sum_v = sums.1;
        }
        let edges: i32 = (tiles.1 - tiles.0) + (tiles.3 - tiles.2);
        for t in 0i32..group * edges {
            let g: i32 = t / edges;
            let i: i32 = edge(t - g * edges, tiles.0, tiles.1, tiles.2);
            let h: i32 = h0 + g;
            let tq: Tile<E, { [BM, DT] }> = stream(&q_part, b, i, h);
            let s: Tile<f32, { [BN, BM] }> = product(tk, tq);
            let lse: Tile<f32, { [1, 1, BM] }> = lse_part.load([b, h, i]);
            let e: Tile<f32, { [BN, BM] }> = exponents(s, lse, scale_log2);
            let p: Tile<f32, { [BN, BM] }> = exp2(e, ftz::Enabled);
            // Rows are keys here: the diagonal's sign is turned.
            let seen: Tile<bool, { [BN, BM] }> =
                band::<BN, BM>(0i32 - upper, 0i32 - lower, i * BM - key);
            let zero: Tile<f32, { [BN, BM] }> = constant(0.0f32, const_shape![BN, BM]);
            let p: Tile<f32, { [BN, BM] }> = select(seen, p, zero);
            let tdo: Tile<E, { [BM, DT] }> = stream(&dout_part, b, i, h);
            let delta: Tile<f32, { [1, 1, BM] }> = delta_part.load([b, h, i]);
            let dp: Tile<f32, { [BN, BM] }> = product(tv, tdo);
            let sums = add(p, p, dp, tq, tdo, delta, sum_k, sum_v);
            sum_k = sums.0;
            sum_v = sums.1;
        }

        let scale: Tile<f32, { [BN, DT] }> = softmax_scale.broadcast(const_shape![BN, DT]);
        sum_k = sum_k * scale;
        let dk_acc_view: Tensor<f32, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(dk_acc, batch, kv_len, kv_heads, head_dim, acc_batch_stride) };
        let dv_acc_view: Tensor<f32, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(dv_acc, batch, kv_len, kv_heads, head_dim, acc_batch_stride) };
        if first == 0i32 {
            let t: Tile<f32, { [1, BN, 1, DT] }> =
                dk_acc_view.partition(const_shape![1, BN, 1, DT]).load([b, j, hk, 0i32]);
            let t: Tile<f32, { [BN, DT] }> = t.reshape(const_shape![BN, DT]);
            sum_k = sum_k + t;
            let t: Tile<f32, { [1, BN, 1, DT] }> =
                dv_acc_view.partition(const_shape![1, BN, 1, DT]).load([b, j, hk, 0i32]);
            let t: Tile<f32, { [BN, DT] }> = t.reshape(const_shape![BN, DT]);
            sum_v = sum_v + t;
        }
        if last == 1i32 {
            let dk_view: Tensor<E, { [-1, -1, -1, -1] }> =
                unsafe { rows_view(dk, batch, kv_len, kv_heads, head_dim, out_batch_stride) };
            let dv_view: Tensor<E, { [-1, -1, -1, -1] }> =
                unsafe { rows_view(dv, batch, kv_len, kv_heads, head_dim, out_batch_stride) };
            let t: Tile<E, { [BN, DT] }> = convert_tile(sum_k);
            unsafe { write(&dk_view, t, b, j, hk) };
            let t: Tile<E, { [BN, DT] }> = convert_tile(sum_v);
            unsafe { write(&dv_view, t, b, j, hk) };
        } else {
            unsafe { write(&dk_acc_view, sum_k, b, j, hk) };
            unsafe { write(&dv_acc_view, sum_v, b, j, hk) };
        }
    }
}
