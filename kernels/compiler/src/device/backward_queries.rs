//! The backward pass over one rectangle, query side: dq of a tile of queries, with keys streaming.

#[cutile::module]
pub mod backward_queries {
    use super::super::common::common::{block_of, deliver, edge, per_row_view, product, rows_view};
    use super::super::common::common::{statistics_view, stream, streamed};
    use super::super::dropout::dropout::{dropped, kept, places_across, places_down};
    use super::super::scores::scores::{
        band, cap_ratio, distances, same_segment, score, slope_log2,
    };
    use super::super::scores::scores::{uncapped, unit};
    use super::super::segments::segments::{narrowed, segment_tile, segments_view};
    use super::super::visible::visible::{apart, biased, drawn_across, drawn_down};
    use super::super::visible::visible::{run_tile, run_tiles, shown_across};
    use cutile::core::*;

    /// Returns min(scale · s − lse, 0) in base 2, the exponents of p. lse is huge where a row sees
    /// nothing, so that p = 0. Large scores are rounded differently than in the forward pass, and
    /// lse is rounded too: the minimum keeps p from exceeding 1. NaN stays NaN.
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

    /// Returns ds = p ∘ (dp − delta) with dp = dout vᵀ.
    pub fn score_gradient<const BM: i32, const BN: i32>(
        p: Tile<f32, { [BM, BN] }>,
        dp: Tile<f32, { [BM, BN] }>,
        delta: Tile<f32, { [BM, 1] }>,
    ) -> Tile<f32, { [BM, BN] }> {
        let delta: Tile<f32, { [BM, BN] }> = delta.broadcast(const_shape![BM, BN]);
        let excess: Tile<f32, { [BM, BN] }> = dp - delta;
        p * excess
    }

    /// Returns dq + ds k.
    pub fn add<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
        ds: Tile<f32, { [BM, BN] }>,
        k: Tile<E, { [BN, DT] }>,
        sum: Tile<f32, { [BM, DT] }>,
    ) -> Tile<f32, { [BM, DT] }> {
        let ds: Tile<E, { [BM, BN] }> = convert_tile(ds);
        mma(ds, k, sum)
    }

    /// Adds one tile of keys to dq and the slope's gradient, and returns both. `LOW` and `HIGH` say
    /// which limits of the band may cut the tile. Where neither may, segments do not cut it either.
    pub unsafe fn visit<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
        masked: i32,
        window: i32,
        segments: i32,
        cap: i32,
        slopes: i32,
        dropped_weights: i32,
        q: Tile<E, { [BM, DT] }>,
        dout: Tile<E, { [BM, DT] }>,
        lse: Tile<f32, { [BM, 1] }>,
        delta: Tile<f32, { [BM, 1] }>,
        tk: Tile<E, { [BN, DT] }>,
        tv: Tile<E, { [BN, DT] }>,
        sum: Tile<f32, { [BM, DT] }>,
        slope_sum: Tile<f32, { [BM, 1] }>,
        b: i32,
        h: i32,
        row: i32,
        j: i32,
        batch: i32,
        kv_len: i32,
        scale_log2: f32,
        lower: i32,
        upper: i32,
        own: Tile<i32, { [BM, 1] }>,
        other: Tile<i32, { [1, BN] }>,
        place: Tile<i32, { [BM, 1] }>,
        position: Tile<i32, { [BM, 1] }>,
        others: *mut i32,
        has_dslopes: i32,
        has_segments: i32,
        cap_log2: f32,
        twice_by_cap: f32,
        slope: Tile<f32, { [1, 1] }>,
        has_slopes: i32,
        dropout: *mut i32,
        dropout_batch_stride: i32,
        has_dropout: i32,
        threshold: i32,
        keep_scale: f32,
        q_position: i32,
        k_position: i32,
        position_stride: i32,
    ) -> (Tile<f32, { [BM, DT] }>, Tile<f32, { [BM, 1] }>) {
        let key: i32 = j * BN;
        let s: Tile<f32, { [BM, BN] }> = product(q, tk);
        let q_place: i32 = q_position + row * position_stride;
        let k_place: i32 = k_position + key * position_stride;
        let start: i32 = k_place - q_place;
        let ratio: Tile<f32, { [BM, BN] }> = cap_ratio(s, cap, twice_by_cap);
        let by_row: i32 = if segments == 3i32 { 0i32 } else { slopes };
        let mut scores: Tile<f32, { [BM, BN] }> = score(
            s,
            ratio,
            cap,
            by_row,
            scale_log2,
            cap_log2,
            slope,
            has_slopes,
            start,
            position_stride,
        );
        if segments == 3i32 && slopes == 2i32 && has_slopes == 1i32 {
            let view: Tensor<i32, { [-1, -1] }> =
                unsafe { segments_view(others, 6i32 * batch, kv_len, kv_len) };
            let part: Partition<i32, { [1, BN] }> = view.partition(const_shape![1, BN]);
            let places: Tile<i32, { [1, BN] }> = part.load([6i32 * b + 1i32, j]);
            let away: Tile<f32, { [BM, BN] }> = apart(place, places);
            scores = biased(scores, slope, away);
        }
        let s: Tile<f32, { [BM, BN] }> = scores;
        let e: Tile<f32, { [BM, BN] }> = exponents(s, lse, unit(cap, slopes, scale_log2));
        let mut p: Tile<f32, { [BM, BN] }> = exp2(e, ftz::Enabled);
        if masked == 1i32 {
            let corner: i32 = key - row;
            // A key beyond the end reads as 0 and adds 0, but its distance would count in the
            // slope's gradient.
            let cut_low: i32 = if window == 0i32 { 0i32 } else { 1i32 };
            let mut seen: Tile<bool, { [BM, BN] }> =
                band::<BM, BN>(cut_low, 2i32, lower - corner, upper - corner, kv_len - key);
            if segments == 1i32 || (segments == 2i32 && has_segments == 1i32) {
                let same: Tile<bool, { [BM, BN] }> = same_segment(own, other);
                seen = seen & same;
            }
            if segments == 3i32 {
                let view: Tensor<i32, { [-1, -1] }> =
                    unsafe { segments_view(others, 6i32 * batch, kv_len, kv_len) };
                let part: Partition<i32, { [1, BN] }> = view.partition(const_shape![1, BN]);
                let segment: Tile<i32, { [1, BN] }> = part.load([6i32 * b, j]);
                let start: Tile<i32, { [1, BN] }> = part.load([6i32 * b + 2i32, j]);
                let stop: Tile<i32, { [1, BN] }> = part.load([6i32 * b + 3i32, j]);
                let also_start: Tile<i32, { [1, BN] }> = part.load([6i32 * b + 4i32, j]);
                let also_stop: Tile<i32, { [1, BN] }> = part.load([6i32 * b + 5i32, j]);
                let shown: Tile<bool, { [BM, BN] }> =
                    shown_across(own, position, segment, start, stop, also_start, also_stop);
                seen = seen & shown;
            }
            let seen: Tile<bool, { [BM, BN] }> = seen;
            let zero: Tile<f32, { [BM, BN] }> = constant(0.0f32, const_shape![BM, BN]);
            p = select(seen, p, zero);
        }
        let mut dp: Tile<f32, { [BM, BN] }> = product(dout, tv);
        if dropped_weights == 2i32 && has_dropout == 1i32 {
            let mut queries: Tile<u32, { [BM, BN] }> =
                places_down::<BM, BN>(q_place, position_stride);
            let mut keys: Tile<u32, { [BM, BN] }> =
                places_across::<BM, BN>(k_place, position_stride);
            if segments == 3i32 {
                queries = drawn_down::<BM, BN>(place);
                let view: Tensor<i32, { [-1, -1] }> =
                    unsafe { segments_view(others, 6i32 * batch, kv_len, kv_len) };
                let part: Partition<i32, { [1, BN] }> = view.partition(const_shape![1, BN]);
                let places: Tile<i32, { [1, BN] }> = part.load([6i32 * b + 1i32, j]);
                keys = drawn_across::<BM, BN>(places);
            }
            let keep: Tile<bool, { [BM, BN] }> = unsafe {
                kept(queries, keys, dropout, batch, dropout_batch_stride, b, h, threshold)
            };
            dp = dropped(dp, keep, keep_scale);
        }
        let ds: Tile<f32, { [BM, BN] }> = score_gradient(p, dp, delta);
        let mut new_slope_sum: Tile<f32, { [BM, 1] }> = slope_sum;
        if slopes == 1i32 || (slopes == 2i32 && has_dslopes == 1i32) {
            let mut away: Tile<f32, { [BM, BN] }> = distances::<BM, BN>(start, position_stride);
            if segments == 3i32 {
                let view: Tensor<i32, { [-1, -1] }> =
                    unsafe { segments_view(others, 6i32 * batch, kv_len, kv_len) };
                let part: Partition<i32, { [1, BN] }> = view.partition(const_shape![1, BN]);
                let places: Tile<i32, { [1, BN] }> = part.load([6i32 * b + 1i32, j]);
                away = apart(place, places);
            }
            let of_slope: Tile<f32, { [BM] }> = reduce_sum(ds * away, 1i32);
            new_slope_sum = slope_sum + of_slope.reshape(const_shape![BM, 1]);
        }
        let ds: Tile<f32, { [BM, BN] }> = uncapped(ds, cap, ratio);
        (add(ds, tk, sum), new_slope_sum)
    }

    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn attention_bwd_dq<
        E: ElementType,
        const BM: i32,
        const BN: i32,
        const DT: i32,
        const WINDOW: i32,
        const SEGMENTS: i32,
        const CAP: i32,
        const SLOPES: i32,
        const DROPOUT: i32,
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
        value_dim: i32,
        q_batch_stride: i32,
        k_batch_stride: i32,
        v_batch_stride: i32,
        dout_batch_stride: i32,
        dq_acc_batch_stride: i32,
        dq_batch_stride: i32,
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
        ranges: *mut i32,
        q_segments_batch_stride: i32,
        kv_segments_batch_stride: i32,
        ranges_batch_stride: i32,
        has_segments: i32,
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
        dslopes: *mut f32,
        dslopes_batch_stride: i32,
        has_dslopes: i32,
    ) {
        let window: i32 = WINDOW;
        let segments: i32 = SEGMENTS;
        let cap: i32 = CAP;
        let alibi: i32 = SLOPES;
        let drops: i32 = DROPOUT;
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
            unsafe { rows_view(k, batch, kv_len, kv_heads, head_dim, k_batch_stride) };
        let v_view: Tensor<E, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(v, batch, kv_len, kv_heads, value_dim, v_batch_stride) };
        let lse_view: Tensor<f32, { [-1, -1, -1] }> = unsafe {
            statistics_view(lse_log2, batch, heads, q_len, stat_batch_stride, stat_head_stride)
        };
        let delta_view: Tensor<f32, { [-1, -1, -1] }> = unsafe {
            statistics_view(delta, batch, heads, q_len, stat_batch_stride, stat_head_stride)
        };
        let k_part: Partition<E, { [1, BN, 1, DT] }> = k_view.partition(const_shape![1, BN, 1, DT]);
        let v_part: Partition<E, { [1, BN, 1, DT] }> = v_view.partition(const_shape![1, BN, 1, DT]);

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

        let row: i32 = i * BM;
        let last_row: i32 = min(row + BM, q_len) - 1i32;
        let tiles: (i32, i32, i32, i32) = streamed::<BN>(row, last_row, lower, upper, kv_len);
        let mut begin: i32 = tiles.0;
        let mut inside: i32 = tiles.1;
        let mut outside: i32 = max(tiles.1, tiles.2);
        let mut end: i32 = tiles.3;

        // Without segments the kernel never uses these views and tiles. With masks as data they hold
        // six numbers of each row.
        let lines: i32 = if SEGMENTS == 3i32 { 6i32 * batch } else { batch };
        let q_stride: i32 = if SEGMENTS == 3i32 { q_len } else { q_segments_batch_stride };
        let kv_stride: i32 = if SEGMENTS == 3i32 { kv_len } else { kv_segments_batch_stride };
        let q_segments_view: Tensor<i32, { [-1, -1] }> =
            unsafe { segments_view(q_segments, lines, q_len, q_stride) };
        let kv_segments_view: Tensor<i32, { [-1, -1] }> =
            unsafe { segments_view(kv_segments, lines, kv_len, kv_stride) };
        let segments_part: Partition<i32, { [1, BN] }> =
            kv_segments_view.partition(const_shape![1, BN]);
        let mut own: Tile<i32, { [BM, 1] }> = constant(0i32, const_shape![BM, 1]);
        if (SEGMENTS == 1i32 || (SEGMENTS == 2i32 && has_segments == 1i32)) && lower <= upper {
            let t: Tile<i32, { [1, BM] }> =
                q_segments_view.partition(const_shape![1, BM]).load([b, i]);
            own = t.reshape(const_shape![BM, 1]);
            let narrow: (i32, i32, i32, i32) = unsafe {
                narrowed::<BN>(
                    ranges,
                    batch,
                    q_len,
                    ranges_batch_stride,
                    b,
                    row,
                    last_row,
                    begin,
                    inside,
                    outside,
                    end,
                )
            };
            begin = narrow.0;
            inside = narrow.1;
            outside = narrow.2;
            end = narrow.3;
        }
        if WINDOW == 2i32 {
            // One loop masks all tiles.
            outside = inside;
        }
        // Masks as data: the numbers of resident rows, and the runs of tiles to visit.
        let mut place: Tile<i32, { [BM, 1] }> = own;
        let mut position: Tile<i32, { [BM, 1] }> = own;
        let mut before: i32 = inside;
        let mut shift0: i32 = inside;
        let mut from1: i32 = inside;
        let mut shift1: i32 = inside;
        let mut from2: i32 = inside;
        let mut shift2: i32 = inside;
        let mut from3: i32 = inside;
        let mut shift3: i32 = inside;
        if SEGMENTS == 3i32 {
            begin = inside;
            end = outside;
            if lower <= upper {
                let part: Partition<i32, { [1, BM] }> =
                    q_segments_view.partition(const_shape![1, BM]);
                let t: Tile<i32, { [1, BM] }> = part.load([6i32 * b, i]);
                own = t.reshape(const_shape![BM, 1]);
                let t: Tile<i32, { [1, BM] }> = part.load([6i32 * b + 1i32, i]);
                place = t.reshape(const_shape![BM, 1]);
                let t: Tile<i32, { [1, BM] }> = part.load([6i32 * b + 2i32, i]);
                position = t.reshape(const_shape![BM, 1]);
                let found = unsafe {
                    run_tiles::<BN>(ranges, batch, q_len, b, row, tiles.0, inside, outside, tiles.3)
                };
                inside = found.0;
                outside = found.1;
                begin = inside;
                end = outside + found.2;
                before = found.3;
                shift0 = found.4;
                from1 = found.5;
                shift1 = found.6;
                from2 = found.7;
                shift2 = found.8;
                from3 = found.9;
                shift3 = found.10;
            }
        }
        let mut slope: Tile<f32, { [1, 1] }> = constant(0.0f32, const_shape![1, 1]);
        if (SLOPES == 1i32 || (SLOPES == 2i32 && has_slopes == 1i32)) && lower <= upper {
            slope = unsafe { slope_log2(slopes, batch, heads, slopes_batch_stride, b, h) };
        }

        let mut sum: Tile<f32, { [BM, DT] }> = constant(0.0f32, const_shape![BM, DT]);
        let mut slope_sum: Tile<f32, { [BM, 1] }> = constant(0.0f32, const_shape![BM, 1]);
        if WINDOW != 2i32 {
            for j in inside..outside {
                let tk: Tile<E, { [BN, DT] }> = stream(&k_part, b, j, hk);
                let tv: Tile<E, { [BN, DT] }> = stream(&v_part, b, j, hk);
                let other: Tile<i32, { [1, BN] }> =
                    segment_tile(segments, has_segments, &segments_part, b, j);
                let sums = unsafe {
                    visit(
                        0i32,
                        window,
                        segments,
                        cap,
                        alibi,
                        drops,
                        tq,
                        tdo,
                        lse,
                        delta,
                        tk,
                        tv,
                        sum,
                        slope_sum,
                        b,
                        h,
                        row,
                        j,
                        batch,
                        kv_len,
                        scale_log2,
                        lower,
                        upper,
                        own,
                        other,
                        place,
                        position,
                        kv_segments,
                        has_dslopes,
                        has_segments,
                        cap_log2,
                        twice_by_cap,
                        slope,
                        has_slopes,
                        dropout,
                        dropout_batch_stride,
                        has_dropout,
                        threshold,
                        keep_scale,
                        q_position,
                        k_position,
                        position_stride,
                    )
                };
                sum = sums.0;
                slope_sum = sums.1;
            }
        }
        for t in 0i32..(inside - begin) + (end - outside) {
            let mut j: i32 = edge(t, begin, inside, outside);
            if SEGMENTS == 3i32 {
                let whole: i32 = outside - inside;
                j = run_tile(t, whole, before, shift0, from1, shift1, from2, shift2, from3, shift3);
            }
            let tk: Tile<E, { [BN, DT] }> = stream(&k_part, b, j, hk);
            let tv: Tile<E, { [BN, DT] }> = stream(&v_part, b, j, hk);
            let other: Tile<i32, { [1, BN] }> =
                segment_tile(segments, has_segments, &segments_part, b, j);
            let sums = unsafe {
                visit(
                    1i32,
                    window,
                    segments,
                    cap,
                    alibi,
                    drops,
                    tq,
                    tdo,
                    lse,
                    delta,
                    tk,
                    tv,
                    sum,
                    slope_sum,
                    b,
                    h,
                    row,
                    j,
                    batch,
                    kv_len,
                    scale_log2,
                    lower,
                    upper,
                    own,
                    other,
                    place,
                    position,
                    kv_segments,
                    has_dslopes,
                    has_segments,
                    cap_log2,
                    twice_by_cap,
                    slope,
                    has_slopes,
                    dropout,
                    dropout_batch_stride,
                    has_dropout,
                    threshold,
                    keep_scale,
                    q_position,
                    k_position,
                    position_stride,
                )
            };
            sum = sums.0;
            slope_sum = sums.1;
        }

        if SLOPES != 0i32 && has_dslopes == 1i32 {
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
            unsafe { rows_view(dq_acc, batch, q_len, heads, head_dim, dq_acc_batch_stride) };
        let dq_view: Tensor<E, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(dq, batch, q_len, heads, head_dim, dq_batch_stride) };
        unsafe { deliver(sum, &acc_view, &dq_view, b, i, h, first, last) };
    }
}
