//! Backward pass over one rectangle, query side, with segments, a soft cap, ALiBi and dropout.

#[cutile::module]
pub mod backward_queries_general {
    use super::super::backward_queries::backward_queries::{add, exponents, score_gradient};
    use super::super::common::common::{
        band, biased, block_of, cap_ratio, capped, distances, existing, per_row_view, product,
        rows_view,
    };
    use super::super::common::common::{deliver, streamed, uncapped};
    use super::super::common::common::{
        same_segment, segments_view, slope_log2, statistics_view, stream,
    };
    use super::super::dropout::dropout::{dropped, kept, places_across, places_down};
    use cutile::core::*;

    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn attention_bwd_dq_general<
        E: ElementType,
        const BM: i32,
        const BN: i32,
        const DT: i32,
    >(
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
        q_segments: *mut i32,
        kv_segments: *mut i32,
        q_segments_batch_stride: i32,
        kv_segments_batch_stride: i32,
        cap_log2: f32,
        twice_by_cap: f32,
        slopes: *mut f32,
        slopes_batch_stride: i32,
        has_slopes: i32,
        dropout: *mut i32,
        dropout_batch_stride: i32,
        has_dropout: i32,
        threshold: i32,
        keep_scale: f32,
        q_position: i32,
        k_position: i32,
        position_stride: i32,
        value_dim: i32,
        v_batch_stride: i32,
        dout_batch_stride: i32,
        dslopes: *mut f32,
        dslopes_batch_stride: i32,
        has_dslopes: i32,
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
            unsafe { rows_view(dout, batch, q_len, heads, value_dim, dout_batch_stride) };
        let k_view: Tensor<E, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(k, batch, kv_len, kv_heads, head_dim, kv_batch_stride) };
        let v_view: Tensor<E, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(v, batch, kv_len, kv_heads, value_dim, v_batch_stride) };
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

        let q_segments_view: Tensor<i32, { [-1, -1] }> =
            unsafe { segments_view(q_segments, batch, q_len, q_segments_batch_stride) };
        let kv_segments_view: Tensor<i32, { [-1, -1] }> =
            unsafe { segments_view(kv_segments, batch, kv_len, kv_segments_batch_stride) };
        let own: Tile<i32, { [1, BM] }> =
            q_segments_view.partition(const_shape![1, BM]).load([b, i]);
        let own: Tile<i32, { [BM, 1] }> = own.reshape(const_shape![BM, 1]);
        let kv_segments_part = kv_segments_view.partition(const_shape![1, BN]);

        let mut slope: Tile<f32, { [1, 1] }> = constant(0.0f32, const_shape![1, 1]);
        if has_slopes == 1i32 {
            slope = unsafe { slope_log2(slopes, batch, heads, slopes_batch_stride, b, h) };
        }

        let mut slope_sum: Tile<f32, { [BM, 1] }> = constant(0.0f32, const_shape![BM, 1]);
        for j in tiles.0..tiles.3 {
            let tk: Tile<E, { [BN, DT] }> = stream(&k_part, b, j, hk);
            let s: Tile<f32, { [BM, BN] }> = product(tq, tk);
            let ratio: Tile<f32, { [BM, BN] }> = cap_ratio(s, twice_by_cap);
            let mut scores: Tile<f32, { [BM, BN] }> = capped(s, ratio, scale_log2, cap_log2);
            let start: i32 = k_position - q_position + (j * BN - row) * position_stride;
            if has_slopes == 1i32 {
                let away: Tile<f32, { [BM, BN] }> = distances::<BM, BN>(start, position_stride);
                scores = biased(scores, slope.broadcast(const_shape![BM, BN]), away);
            }
            let e: Tile<f32, { [BM, BN] }> = exponents(scores, lse, 1.0f32);
            let p: Tile<f32, { [BM, BN] }> = exp2(e, ftz::Enabled);
            let seen: Tile<bool, { [BM, BN] }> = band::<BM, BN>(lower, upper, j * BN - row);
            // A key past the end reads as 0, but its distance would count in the slope's gradient.
            let exist: Tile<bool, { [BM, BN] }> = existing::<BM, BN>(kv_len - j * BN);
            let other: Tile<i32, { [1, BN] }> = kv_segments_part.load([b, j]);
            let same: Tile<bool, { [BM, BN] }> = same_segment(own, other);
            let zero: Tile<f32, { [BM, BN] }> = constant(0.0f32, const_shape![BM, BN]);
            let p: Tile<f32, { [BM, BN] }> = select(seen & exist & same, p, zero);
            let tv: Tile<E, { [BN, DT] }> = stream(&v_part, b, j, hk);
            let mut dp: Tile<f32, { [BM, BN] }> = product(tdo, tv);
            if has_dropout == 1i32 {
                let keep: Tile<bool, { [BM, BN] }> = unsafe {
                    kept(
                        places_down::<BM, BN>(q_position + row * position_stride, position_stride),
                        places_across::<BM, BN>(
                            k_position + j * BN * position_stride,
                            position_stride,
                        ),
                        dropout,
                        batch,
                        dropout_batch_stride,
                        b,
                        h,
                        threshold,
                    )
                };
                dp = dropped(dp, keep, keep_scale);
            }
            let ds: Tile<f32, { [BM, BN] }> = score_gradient(p, dp, delta);
            if has_dslopes == 1i32 {
                let away: Tile<f32, { [BM, BN] }> = distances::<BM, BN>(start, position_stride);
                let of_slope: Tile<f32, { [BM] }> = reduce_sum(ds * away, 1i32);
                slope_sum = slope_sum + of_slope.reshape(const_shape![BM, 1]);
            }
            sum = add(uncapped(ds, ratio), tk, sum);
        }

        if has_dslopes == 1i32 {
            let view: Tensor<f32, { [-1, -1, -1] }> =
                unsafe { per_row_view(dslopes, batch, q_len, heads, dslopes_batch_stride) };
            let t: Tile<f32, { [1, BM, 1] }> =
                view.partition(const_shape![1, BM, 1]).load([b, i, h]);
            let t: Tile<f32, { [1, BM, 1] }> = t + slope_sum.reshape(const_shape![1, BM, 1]);
            let mut part: PartitionMut<f32, { [1, BM, 1] }> =
                unsafe { view.partition_full_mut(const_shape![1, BM, 1]) };
            unsafe { part.store_unchecked(t, [b, i, h]) };
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
