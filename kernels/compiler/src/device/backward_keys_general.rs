//! Backward pass over one rectangle, key side, with segments, a soft cap, ALiBi and dropout.

#[cutile::module]
pub mod backward_keys_general {
    use super::super::backward_keys::backward_keys::{add, exponents};
    use super::super::common::common::{
        band, biased, block_of, cap_ratio, capped, distances, product, rows_view, same_segment,
        slope_log2,
    };
    use super::super::common::common::{segments_view, statistics_view, stream, streamed};
    use super::super::common::common::{uncapped, write};
    use super::super::dropout::dropout::{dropped, kept, places_across, places_down};
    use cutile::core::*;

    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn attention_bwd_dkdv_general<
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
        dv_acc_batch_stride: i32,
        dv_batch_stride: i32,
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

        let q_segments_view: Tensor<i32, { [-1, -1] }> =
            unsafe { segments_view(q_segments, batch, q_len, q_segments_batch_stride) };
        let kv_segments_view: Tensor<i32, { [-1, -1] }> =
            unsafe { segments_view(kv_segments, batch, kv_len, kv_segments_batch_stride) };
        let own: Tile<i32, { [1, BN] }> =
            kv_segments_view.partition(const_shape![1, BN]).load([b, j]);
        let own: Tile<i32, { [BN, 1] }> = own.reshape(const_shape![BN, 1]);
        let q_segments_part = q_segments_view.partition(const_shape![1, BM]);

        let count: i32 = tiles.3 - tiles.0;
        for t in 0i32..group * count {
            let g: i32 = t / count;
            let i: i32 = tiles.0 + (t - g * count);
            let h: i32 = h0 + g;
            let tq: Tile<E, { [BM, DT] }> = stream(&q_part, b, i, h);
            let s: Tile<f32, { [BN, BM] }> = product(tk, tq);
            let ratio: Tile<f32, { [BN, BM] }> = cap_ratio(s, twice_by_cap);
            let mut scores: Tile<f32, { [BN, BM] }> = capped(s, ratio, scale_log2, cap_log2);
            if has_slopes == 1i32 {
                let slope: Tile<f32, { [1, 1] }> =
                    unsafe { slope_log2(slopes, batch, heads, slopes_batch_stride, b, h) };
                let slope: Tile<f32, { [BN, BM] }> = slope.broadcast(const_shape![BN, BM]);
                // Of queries from keys, so the slope is negated.
                let start: i32 = q_position - k_position + (i * BM - key) * position_stride;
                let away: Tile<f32, { [BN, BM] }> = distances::<BN, BM>(start, position_stride);
                scores = biased(scores, negf(slope), away);
            }
            let lse: Tile<f32, { [1, 1, BM] }> = lse_part.load([b, h, i]);
            let e: Tile<f32, { [BN, BM] }> = exponents(scores, lse, 1.0f32);
            let p: Tile<f32, { [BN, BM] }> = exp2(e, ftz::Enabled);
            // Rows are keys here: the diagonal's sign is turned.
            let seen: Tile<bool, { [BN, BM] }> =
                band::<BN, BM>(0i32 - upper, 0i32 - lower, i * BM - key);
            let other: Tile<i32, { [1, BM] }> = q_segments_part.load([b, i]);
            let same: Tile<bool, { [BN, BM] }> = same_segment(own, other);
            let zero: Tile<f32, { [BN, BM] }> = constant(0.0f32, const_shape![BN, BM]);
            let p: Tile<f32, { [BN, BM] }> = select(seen & same, p, zero);
            let w: Tile<f32, { [BN, BM] }> = uncapped(p, ratio);
            let tdo: Tile<E, { [BM, DT] }> = stream(&dout_part, b, i, h);
            let delta: Tile<f32, { [1, 1, BM] }> = delta_part.load([b, h, i]);
            let mut dp: Tile<f32, { [BN, BM] }> = product(tv, tdo);
            let mut p: Tile<f32, { [BN, BM] }> = p;
            if has_dropout == 1i32 {
                let keep: Tile<bool, { [BN, BM] }> = unsafe {
                    kept(
                        places_across::<BN, BM>(
                            q_position + i * BM * position_stride,
                            position_stride,
                        ),
                        places_down::<BN, BM>(k_position + key * position_stride, position_stride),
                        dropout,
                        batch,
                        dropout_batch_stride,
                        b,
                        h,
                        threshold,
                    )
                };
                p = dropped(p, keep, keep_scale);
                dp = dropped(dp, keep, keep_scale);
            }
            let sums = add(p, w, dp, tq, tdo, delta, sum_k, sum_v);
            sum_k = sums.0;
            sum_v = sums.1;
        }

        let scale: Tile<f32, { [BN, DT] }> = softmax_scale.broadcast(const_shape![BN, DT]);
        sum_k = sum_k * scale;
        let dk_acc_view: Tensor<f32, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(dk_acc, batch, kv_len, kv_heads, head_dim, acc_batch_stride) };
        let dv_acc_view: Tensor<f32, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(dv_acc, batch, kv_len, kv_heads, value_dim, dv_acc_batch_stride) };
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
                unsafe { rows_view(dv, batch, kv_len, kv_heads, value_dim, dv_batch_stride) };
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
