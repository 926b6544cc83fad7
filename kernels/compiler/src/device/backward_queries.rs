//! Backward pass over one rectangle, query side: dq of a tile of queries, keys streaming.

#[cutile::module]
pub mod backward_queries {
    use super::super::common::common::{band, block_of, edge, existing, product};
    use super::super::common::common::{deliver, rows_view, statistics_view, stream, streamed};
    use cutile::core::*;

    /// min(scale · s − lse, 0) in base 2, of which 2^ is p; lse is huge where a row sees nothing:
    /// p = 0. Large scores are rounded otherwise than in the forward pass, and so is lse: the
    /// minimum keeps p from exceeding 1, and NaN stays.
    pub fn exponents<const BM: i32, const BN: i32>(
        s: Tile<f32, { [BM, BN] }>,
        lse: Tile<f32, { [BM, 1] }>,
        scale: f32,
    ) -> Tile<f32, { [BM, BN] }> {
        let scale: Tile<f32, { [BM, BN] }> = scale.broadcast(const_shape![BM, BN]);
        let minus_lse: Tile<f32, { [BM, 1] }> = negf(lse);
        let minus_lse: Tile<f32, { [BM, BN] }> = minus_lse.broadcast(const_shape![BM, BN]);
        let e: Tile<f32, { [BM, BN] }> =
            fma(s, scale, minus_lse, rounding::NearestEven, ftz::Enabled);
        let zero: Tile<f32, { [BM, BN] }> = constant(0.0f32, const_shape![BM, BN]);
        minf(e, zero, nan::Enabled, ftz::Disabled)
    }

    /// ds = p ∘ (dp − delta) with dp = dout vᵀ.
    pub fn score_gradient<const BM: i32, const BN: i32>(
        p: Tile<f32, { [BM, BN] }>,
        dp: Tile<f32, { [BM, BN] }>,
        delta: Tile<f32, { [BM, 1] }>,
    ) -> Tile<f32, { [BM, BN] }> {
        let delta: Tile<f32, { [BM, BN] }> = delta.broadcast(const_shape![BM, BN]);
        let excess: Tile<f32, { [BM, BN] }> = dp - delta;
        p * excess
    }

    /// dq += ds k.
    pub fn add<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
        ds: Tile<f32, { [BM, BN] }>,
        k: Tile<E, { [BN, DT] }>,
        sum: Tile<f32, { [BM, DT] }>,
    ) -> Tile<f32, { [BM, DT] }> {
        let ds: Tile<E, { [BM, BN] }> = convert_tile(ds);
        mma(ds, k, sum)
    }

    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn attention_bwd_dq<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
        q: *mut E,
        k: *mut E,
        v: *mut E,
        dout: *mut E,
        lse_log2: *mut f32,
        delta: *mut f32,
        dq_acc: *mut f32,
        dq: *mut E,
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
        let order: (i32, i32) = block_of(pid.0, ceil_div(q_len, BM), section, reverse);
        let i: i32 = order.0;
        let b: i32 = order.1 / heads;
        let h: i32 = order.1 - b * heads;
        let hk: i32 = h / (heads / kv_heads);

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
        let k_part = k_view.partition(const_shape![1, BN, 1, DT]);
        let v_part = v_view.partition(const_shape![1, BN, 1, DT]);

        let tq: Tile<E, { [1, BM, 1, DT] }> =
            q_view.partition(const_shape![1, BM, 1, DT]).load([b, i, h, 0i32]);
        let tq: Tile<E, { [BM, DT] }> = tq.reshape(const_shape![BM, DT]);
        let tdo: Tile<E, { [1, BM, 1, DT] }> =
            dout_view.partition(const_shape![1, BM, 1, DT]).load([b, i, h, 0i32]);
        let tdo: Tile<E, { [BM, DT] }> = tdo.reshape(const_shape![BM, DT]);
        let lse: Tile<f32, { [1, 1, BM] }> =
            lse_view.partition(const_shape![1, 1, BM]).load([b, h, i]);
        let lse: Tile<f32, { [BM, 1] }> = lse.reshape(const_shape![BM, 1]);
        let delta: Tile<f32, { [1, 1, BM] }> =
            delta_view.partition(const_shape![1, 1, BM]).load([b, h, i]);
        let delta: Tile<f32, { [BM, 1] }> = delta.reshape(const_shape![BM, 1]);

        let mut sum: Tile<f32, { [BM, DT] }> = constant(0.0f32, const_shape![BM, DT]);
        let row: i32 = i * BM;
        let last_row: i32 = min(row + BM, q_len) - 1i32;
        let tiles: (i32, i32, i32, i32) = streamed::<BN>(row, last_row, lower, upper, kv_len);

        for j in tiles.1..tiles.2 {
            let tk: Tile<E, { [BN, DT] }> = stream(&k_part, b, j, hk);
            let s: Tile<f32, { [BM, BN] }> = product(tq, tk);
            let e: Tile<f32, { [BM, BN] }> = exponents(s, lse, scale_log2);
            let p: Tile<f32, { [BM, BN] }> = exp2(e, ftz::Enabled);
            let tv: Tile<E, { [BN, DT] }> = stream(&v_part, b, j, hk);
            let dp: Tile<f32, { [BM, BN] }> = product(tdo, tv);
            sum = add(score_gradient(p, dp, delta), tk, sum);
        }
        let edges: i32 = (tiles.1 - tiles.0) + (tiles.3 - tiles.2);
        for t in 0i32..edges {
            let j: i32 = edge(t, tiles.0, tiles.1, tiles.2);
            let tk: Tile<E, { [BN, DT] }> = stream(&k_part, b, j, hk);
            let s: Tile<f32, { [BM, BN] }> = product(tq, tk);
            let e: Tile<f32, { [BM, BN] }> = exponents(s, lse, scale_log2);
            let p: Tile<f32, { [BM, BN] }> = exp2(e, ftz::Enabled);
            let seen: Tile<bool, { [BM, BN] }> = band::<BM, BN>(lower, upper, j * BN - row);
            // A key past the end reads as 0 and adds 0. Hiding it all the same lets sm_80 do without
            // spills.
            let exist: Tile<bool, { [BM, BN] }> = existing::<BM, BN>(kv_len - j * BN);
            let zero: Tile<f32, { [BM, BN] }> = constant(0.0f32, const_shape![BM, BN]);
            let p: Tile<f32, { [BM, BN] }> = select(seen & exist, p, zero);
            let tv: Tile<E, { [BN, DT] }> = stream(&v_part, b, j, hk);
            let dp: Tile<f32, { [BM, BN] }> = product(tdo, tv);
            sum = add(score_gradient(p, dp, delta), tk, sum);
        }

        let scale: Tile<f32, { [BM, DT] }> = softmax_scale.broadcast(const_shape![BM, DT]);
        sum = sum * scale;
        let acc_view: Tensor<f32, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(dq_acc, batch, q_len, heads, head_dim, acc_batch_stride) };
        let dq_view: Tensor<E, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(dq, batch, q_len, heads, head_dim, out_batch_stride) };
        unsafe { deliver(sum, &acc_view, &dq_view, b, i, h, first, last) };
    }
}
