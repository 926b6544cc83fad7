//! Forward pass over one rectangle of queries and keys, with segments, a soft cap, ALiBi and dropout.

#[cutile::module]
pub mod forward_general {
    use super::super::common::common::{
        band, biased, block_of, cap_ratio, capped, distances, existing, per_row_view, product,
    };
    use super::super::common::common::{
        rows_view, same_segment, segments_view, slope_log2, statistics_view,
    };
    use super::super::common::common::{stream, streamed, write, write_statistics};
    use super::super::dropout::dropout::{dropped, kept, places_across, places_down};
    use super::super::forward::forward::{conclude, gather, weigh};
    use cutile::core::*;

    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn attention_fwd_general<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
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
            unsafe { rows_view(v, batch, kv_len, kv_heads, value_dim, v_batch_stride) };
        let acc_view: Tensor<f32, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(acc, batch, q_len, heads, value_dim, acc_batch_stride) };
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

        for j in tiles.0..tiles.3 {
            let tk: Tile<E, { [BN, DT] }> = stream(&k_part, b, j, hk);
            let s: Tile<f32, { [BM, BN] }> = product(tq, tk);
            let ratio: Tile<f32, { [BM, BN] }> = cap_ratio(s, twice_by_cap);
            let mut s: Tile<f32, { [BM, BN] }> = capped(s, ratio, scale_log2, cap_log2);
            if has_slopes == 1i32 {
                let distance: i32 = k_position - q_position;
                let start: i32 = distance + (j * BN - row) * position_stride;
                let away: Tile<f32, { [BM, BN] }> = distances::<BM, BN>(start, position_stride);
                s = biased(s, slope.broadcast(const_shape![BM, BN]), away);
            }
            let seen: Tile<bool, { [BM, BN] }> = band::<BM, BN>(lower, upper, j * BN - row);
            let exist: Tile<bool, { [BM, BN] }> = existing::<BM, BN>(kv_len - j * BN);
            let other: Tile<i32, { [1, BN] }> = kv_segments_part.load([b, j]);
            let same: Tile<bool, { [BM, BN] }> = same_segment(own, other);
            let hidden: Tile<f32, { [BM, BN] }> = constant(f32::NEG_INFINITY, const_shape![BM, BN]);
            let s: Tile<f32, { [BM, BN] }> = select(seen & exist & same, s, hidden);
            let tv: Tile<E, { [BN, DT] }> = stream(&v_part, b, j, hk);
            let weighed = weigh(s, m, l, 1.0f32);
            m = weighed.2;
            l = weighed.3;
            let mut p: Tile<f32, { [BM, BN] }> = weighed.0;
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
                p = dropped(p, keep, keep_scale);
            }
            a = gather(p, tv, a, weighed.1);
        }

        if last == 1i32 {
            let o_view: Tensor<E, { [-1, -1, -1, -1] }> =
                unsafe { rows_view(o, batch, q_len, heads, value_dim, o_batch_stride) };
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
