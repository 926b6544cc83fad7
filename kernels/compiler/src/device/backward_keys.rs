//! The backward pass over one rectangle, key side: dk and dv of a tile of keys, with queries
//! streaming. The fused kernel also adds each tile's part of dq to its accumulator.

#[cutile::module]
pub mod backward_keys {
    use super::super::common::common::{block_of, deliver, edge, product, rows_view};
    use super::super::common::common::{statistics_view, stream, streamed};
    use super::super::dropout::dropout::{dropped, kept, places_across, places_down};
    use super::super::scores::scores::{
        band, cap_ratio, same_segment, score, slope_log2, uncapped, unit,
    };
    use super::super::segments::segments::{narrowed, segment_tile, segments_view};
    use super::super::visible::visible::{apart, biased, drawn_across, drawn_down};
    use super::super::visible::visible::{run_tile, run_tiles, shown_down};
    use cutile::core::*;

    /// Returns min(scale · s − lse, 0) in base 2, the exponents of p. lse is huge where a row sees
    /// nothing, so that p = 0. Large scores are rounded differently than in the forward pass, and
    /// lse is rounded too: the minimum keeps p from exceeding 1. NaN stays NaN.
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

    /// Returns dk, dv and ds: dv += pᵀ dout;  ds = w ∘ (dp − delta);  dk += dsᵀ q, where w is p
    /// times the soft cap's derivative. Tiles of pairs are transposed: their rows are keys.
    pub fn add<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
        p: Tile<f32, { [BN, BM] }>,
        w: Tile<f32, { [BN, BM] }>,
        dp: Tile<f32, { [BN, BM] }>,
        q: Tile<E, { [BM, DT] }>,
        dout: Tile<E, { [BM, DT] }>,
        delta: Tile<f32, { [1, 1, BM] }>,
        sum_k: Tile<f32, { [BN, DT] }>,
        sum_v: Tile<f32, { [BN, DT] }>,
    ) -> (Tile<f32, { [BN, DT] }>, Tile<f32, { [BN, DT] }>, Tile<E, { [BN, BM] }>) {
        let p16: Tile<E, { [BN, BM] }> = convert_tile(p);
        let new_v: Tile<f32, { [BN, DT] }> = mma(p16, dout, sum_v);
        let delta: Tile<f32, { [1, BM] }> = delta.reshape(const_shape![1, BM]);
        let delta: Tile<f32, { [BN, BM] }> = delta.broadcast(const_shape![BN, BM]);
        let excess: Tile<f32, { [BN, BM] }> = dp - delta;
        let ds: Tile<f32, { [BN, BM] }> = w * excess;
        let ds: Tile<E, { [BN, BM] }> = convert_tile(ds);
        let new_k: Tile<f32, { [BN, DT] }> = mma(ds, q, sum_k);
        (new_k, new_v, ds)
    }

    /// Adds one tile of queries to dk and dv, and returns dk, dv and ds like [`add`]. `cut_low` and
    /// `cut_high` say which limits of the band may cut the tile. Where neither limit may, segments
    /// do not cut the tile either.
    pub unsafe fn visit<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
        cut_low: i32,
        cut_high: i32,
        segments: i32,
        cap: i32,
        slopes: i32,
        dropped_weights: i32,
        k: Tile<E, { [BN, DT] }>,
        v: Tile<E, { [BN, DT] }>,
        lse: Tile<f32, { [1, 1, BM] }>,
        delta: Tile<f32, { [1, 1, BM] }>,
        tq: Tile<E, { [BM, DT] }>,
        tdo: Tile<E, { [BM, DT] }>,
        sum_k: Tile<f32, { [BN, DT] }>,
        sum_v: Tile<f32, { [BN, DT] }>,
        b: i32,
        h: i32,
        key: i32,
        i: i32,
        batch: i32,
        scale_log2: f32,
        lower: i32,
        upper: i32,
        own: Tile<i32, { [BN, 1] }>,
        other: Tile<i32, { [1, BM] }>,
        place: Tile<i32, { [BN, 1] }>,
        start: Tile<i32, { [BN, 1] }>,
        stop: Tile<i32, { [BN, 1] }>,
        also_start: Tile<i32, { [BN, 1] }>,
        also_stop: Tile<i32, { [BN, 1] }>,
        others: *mut i32,
        q_len: i32,
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
    ) -> (Tile<f32, { [BN, DT] }>, Tile<f32, { [BN, DT] }>, Tile<E, { [BN, BM] }>) {
        let row: i32 = i * BM;
        let s: Tile<f32, { [BN, BM] }> = product(k, tq);
        let q_place: i32 = q_position + row * position_stride;
        let k_place: i32 = k_position + key * position_stride;
        // These distances go from keys to queries, so the slope is negated.
        let slope: Tile<f32, { [1, 1] }> = negf(slope);
        let ratio: Tile<f32, { [BN, BM] }> = cap_ratio(s, cap, twice_by_cap);
        let by_row: i32 = if segments == 3i32 { 0i32 } else { slopes };
        let mut scores: Tile<f32, { [BN, BM] }> = score(
            s,
            ratio,
            cap,
            by_row,
            scale_log2,
            cap_log2,
            slope,
            has_slopes,
            q_place - k_place,
            position_stride,
        );
        if segments == 3i32 && slopes == 2i32 && has_slopes == 1i32 {
            let view: Tensor<i32, { [-1, -1] }> =
                unsafe { segments_view(others, 6i32 * batch, q_len, q_len) };
            let part: Partition<i32, { [1, BM] }> = view.partition(const_shape![1, BM]);
            let places: Tile<i32, { [1, BM] }> = part.load([6i32 * b + 1i32, i]);
            let away: Tile<f32, { [BN, BM] }> = apart(place, places);
            scores = biased(scores, slope, away);
        }
        let s: Tile<f32, { [BN, BM] }> = scores;
        let e: Tile<f32, { [BN, BM] }> = exponents(s, lse, unit(cap, slopes, scale_log2));
        let mut p: Tile<f32, { [BN, BM] }> = exp2(e, ftz::Enabled);
        if cut_low != 0i32 || cut_high != 0i32 {
            // The signs are reversed: −upper ≤ i − j ≤ −lower.
            let corner: i32 = row - key;
            let mut seen: Tile<bool, { [BN, BM] }> = band::<BN, BM>(
                cut_low,
                cut_high,
                0i32 - upper - corner,
                0i32 - lower - corner,
                0i32,
            );
            if segments == 1i32 || (segments == 2i32 && has_segments == 1i32) {
                let same: Tile<bool, { [BN, BM] }> = same_segment(own, other);
                seen = seen & same;
            }
            if segments == 3i32 {
                let view: Tensor<i32, { [-1, -1] }> =
                    unsafe { segments_view(others, 6i32 * batch, q_len, q_len) };
                let part: Partition<i32, { [1, BM] }> = view.partition(const_shape![1, BM]);
                let segment: Tile<i32, { [1, BM] }> = part.load([6i32 * b, i]);
                let position: Tile<i32, { [1, BM] }> = part.load([6i32 * b + 2i32, i]);
                let shown: Tile<bool, { [BN, BM] }> =
                    shown_down(own, start, stop, also_start, also_stop, segment, position);
                seen = seen & shown;
            }
            let seen: Tile<bool, { [BN, BM] }> = seen;
            let zero: Tile<f32, { [BN, BM] }> = constant(0.0f32, const_shape![BN, BM]);
            p = select(seen, p, zero);
        }
        let w: Tile<f32, { [BN, BM] }> = uncapped(p, cap, ratio);
        let mut dp: Tile<f32, { [BN, BM] }> = product(v, tdo);
        if dropped_weights == 2i32 && has_dropout == 1i32 {
            let mut queries: Tile<u32, { [BN, BM] }> =
                places_across::<BN, BM>(q_place, position_stride);
            let mut keys: Tile<u32, { [BN, BM] }> = places_down::<BN, BM>(k_place, position_stride);
            if segments == 3i32 {
                let view: Tensor<i32, { [-1, -1] }> =
                    unsafe { segments_view(others, 6i32 * batch, q_len, q_len) };
                let part: Partition<i32, { [1, BM] }> = view.partition(const_shape![1, BM]);
                let places: Tile<i32, { [1, BM] }> = part.load([6i32 * b + 1i32, i]);
                queries = drawn_across::<BN, BM>(places);
                keys = drawn_down::<BN, BM>(place);
            }
            let keep: Tile<bool, { [BN, BM] }> = unsafe {
                kept(queries, keys, dropout, batch, dropout_batch_stride, b, h, threshold)
            };
            p = dropped(p, keep, keep_scale);
            dp = dropped(dp, keep, keep_scale);
        }
        add(p, w, dp, tq, tdo, delta, sum_k, sum_v)
    }

    /// Adds ds k to dq / softmax_scale, from a transposed ds. Other blocks add to it too.
    pub unsafe fn add_to_queries<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
        fused: i32,
        part: &PartitionMut<f32, { [1, BM, 1, DT] }>,
        ds: Tile<E, { [BN, BM] }>,
        k: Tile<E, { [BN, DT] }>,
        b: i32,
        i: i32,
        h: i32,
    ) {
        if fused == 1i32 {
            let transpose: Array<{ [1, 0] }> = Array::<{ [1, 0] }> { dims: &[1i32, 0i32] };
            let ds: Tile<E, { [BM, BN] }> = permute(ds, transpose);
            let zero: Tile<f32, { [BM, DT] }> = constant(0.0f32, const_shape![BM, DT]);
            let sum: Tile<f32, { [BM, DT] }> = mma(ds, k, zero);
            let sum: Tile<f32, { [1, BM, 1, DT] }> = sum.reshape(const_shape![1, BM, 1, DT]);
            unsafe {
                atomic_red_view_raw(
                    part,
                    sum,
                    [b, i, h, 0i32],
                    atomic::AddF,
                    ordering::Relaxed,
                    scope::Device,
                    None,
                )
            };
        }
    }

    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn attention_bwd_dkdv<
        E: ElementType,
        const BM: i32,
        const BN: i32,
        const DT: i32,
        const FUSED: i32,
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
        dk_acc: *mut f32,
        dv_acc: *mut f32,
        dk: *mut E,
        dv: *mut E,
        dq_acc: *mut f32,
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
        dk_acc_batch_stride: i32,
        dv_acc_batch_stride: i32,
        dk_batch_stride: i32,
        dv_batch_stride: i32,
        dq_acc_batch_stride: i32,
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
    ) {
        let segments: i32 = SEGMENTS;
        let cap: i32 = CAP;
        let alibi: i32 = SLOPES;
        let drops: i32 = DROPOUT;
        let fused: i32 = FUSED;
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
            unsafe { rows_view(k, batch, kv_len, kv_heads, head_dim, k_batch_stride) };
        let v_view: Tensor<E, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(v, batch, kv_len, kv_heads, value_dim, v_batch_stride) };
        let lse_view: Tensor<f32, { [-1, -1, -1] }> = unsafe {
            statistics_view(lse_log2, batch, heads, q_len, stat_batch_stride, stat_head_stride)
        };
        let delta_view: Tensor<f32, { [-1, -1, -1] }> = unsafe {
            statistics_view(delta, batch, heads, q_len, stat_batch_stride, stat_head_stride)
        };
        let dq_view: Tensor<f32, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(dq_acc, batch, q_len, heads, head_dim, dq_acc_batch_stride) };
        let q_part: Partition<E, { [1, BM, 1, DT] }> = q_view.partition(const_shape![1, BM, 1, DT]);
        let dout_part: Partition<E, { [1, BM, 1, DT] }> =
            dout_view.partition(const_shape![1, BM, 1, DT]);
        // Additions need a view without padding.
        let dq_part: PartitionMut<f32, { [1, BM, 1, DT] }> =
            unsafe { dq_view.partition_full_mut(const_shape![1, BM, 1, DT]) };
        let lse_part = lse_view.partition(const_shape![1, 1, BM]);
        let delta_part = delta_view.partition(const_shape![1, 1, BM]);

        let tk: Tile<E, { [1, BN, 1, DT] }> =
            k_view.partition(const_shape![1, BN, 1, DT]).load([b, j, hk, 0i32]);
        let tk: Tile<E, { [BN, DT] }> = tk.reshape(const_shape![BN, DT]);
        let tv: Tile<E, { [1, BN, 1, DT] }> =
            v_view.partition(const_shape![1, BN, 1, DT]).load([b, j, hk, 0i32]);
        let tv: Tile<E, { [BN, DT] }> = tv.reshape(const_shape![BN, DT]);

        // Query rows i that see key rows first..=last: −upper ≤ i − j ≤ −lower.
        let key: i32 = j * BN;
        let last_key: i32 = min(key + BN, kv_len) - 1i32;
        let tiles: (i32, i32, i32, i32) =
            streamed::<BM>(key, last_key, 0i32 - upper, 0i32 - lower, q_len);
        let mut begin: i32 = tiles.0;
        let mut inside: i32 = min(tiles.1, tiles.2);
        let mut outside: i32 = tiles.2;
        let mut end: i32 = tiles.3;
        if WINDOW == 0i32 {
            // Nothing cuts the last tiles: queries beyond the end read as 0 and add 0.
            inside = tiles.1;
            outside = tiles.3;
        }

        // Without segments the kernel never uses these views and tiles. With masks as data they hold
        // six numbers of each row.
        let lines: i32 = if SEGMENTS == 3i32 { 6i32 * batch } else { batch };
        let q_stride: i32 = if SEGMENTS == 3i32 { q_len } else { q_segments_batch_stride };
        let kv_stride: i32 = if SEGMENTS == 3i32 { kv_len } else { kv_segments_batch_stride };
        let q_segments_view: Tensor<i32, { [-1, -1] }> =
            unsafe { segments_view(q_segments, lines, q_len, q_stride) };
        let kv_segments_view: Tensor<i32, { [-1, -1] }> =
            unsafe { segments_view(kv_segments, lines, kv_len, kv_stride) };
        let segments_part: Partition<i32, { [1, BM] }> =
            q_segments_view.partition(const_shape![1, BM]);
        let mut own: Tile<i32, { [BN, 1] }> = constant(0i32, const_shape![BN, 1]);
        if (SEGMENTS == 1i32 || (SEGMENTS == 2i32 && has_segments == 1i32)) && lower <= upper {
            let t: Tile<i32, { [1, BN] }> =
                kv_segments_view.partition(const_shape![1, BN]).load([b, j]);
            own = t.reshape(const_shape![BN, 1]);
            let narrow: (i32, i32, i32, i32) = unsafe {
                narrowed::<BM>(
                    ranges,
                    batch,
                    kv_len,
                    ranges_batch_stride,
                    b,
                    key,
                    last_key,
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
        let mut place: Tile<i32, { [BN, 1] }> = own;
        let mut start: Tile<i32, { [BN, 1] }> = own;
        let mut stop: Tile<i32, { [BN, 1] }> = own;
        let mut also_start: Tile<i32, { [BN, 1] }> = own;
        let mut also_stop: Tile<i32, { [BN, 1] }> = own;
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
                let part: Partition<i32, { [1, BN] }> =
                    kv_segments_view.partition(const_shape![1, BN]);
                let t: Tile<i32, { [1, BN] }> = part.load([6i32 * b, j]);
                own = t.reshape(const_shape![BN, 1]);
                let t: Tile<i32, { [1, BN] }> = part.load([6i32 * b + 1i32, j]);
                place = t.reshape(const_shape![BN, 1]);
                let t: Tile<i32, { [1, BN] }> = part.load([6i32 * b + 2i32, j]);
                start = t.reshape(const_shape![BN, 1]);
                let t: Tile<i32, { [1, BN] }> = part.load([6i32 * b + 3i32, j]);
                stop = t.reshape(const_shape![BN, 1]);
                let t: Tile<i32, { [1, BN] }> = part.load([6i32 * b + 4i32, j]);
                also_start = t.reshape(const_shape![BN, 1]);
                let t: Tile<i32, { [1, BN] }> = part.load([6i32 * b + 5i32, j]);
                also_stop = t.reshape(const_shape![BN, 1]);
                let found = unsafe {
                    run_tiles::<BM>(
                        ranges, batch, kv_len, b, key, tiles.0, inside, outside, tiles.3,
                    )
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
        let mut sum_k: Tile<f32, { [BN, DT] }> = constant(0.0f32, const_shape![BN, DT]);
        let mut sum_v: Tile<f32, { [BN, DT] }> = constant(0.0f32, const_shape![BN, DT]);
        let streaming: i32 = if lower <= upper { group } else { 0i32 };
        for g in 0i32..streaming {
            let h: i32 = h0 + g;
            let mut slope: Tile<f32, { [1, 1] }> = constant(0.0f32, const_shape![1, 1]);
            if (SLOPES == 1i32 || (SLOPES == 2i32 && has_slopes == 1i32)) && lower <= upper {
                slope = unsafe { slope_log2(slopes, batch, heads, slopes_batch_stride, b, h) };
            }
            if WINDOW == 0i32 {
                for i in begin..inside {
                    let lse: Tile<f32, { [1, 1, BM] }> = lse_part.load([b, h, i]);
                    let delta: Tile<f32, { [1, 1, BM] }> = delta_part.load([b, h, i]);
                    let tq: Tile<E, { [BM, DT] }> = stream(&q_part, b, i, h);
                    let tdo: Tile<E, { [BM, DT] }> = stream(&dout_part, b, i, h);
                    let other: Tile<i32, { [1, BM] }> =
                        segment_tile(segments, has_segments, &segments_part, b, i);
                    let sums = unsafe {
                        visit(
                            1i32,
                            0i32,
                            segments,
                            cap,
                            alibi,
                            drops,
                            tk,
                            tv,
                            lse,
                            delta,
                            tq,
                            tdo,
                            sum_k,
                            sum_v,
                            b,
                            h,
                            key,
                            i,
                            batch,
                            scale_log2,
                            lower,
                            upper,
                            own,
                            other,
                            place,
                            start,
                            stop,
                            also_start,
                            also_stop,
                            q_segments,
                            q_len,
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
                    sum_k = sums.0;
                    sum_v = sums.1;
                    unsafe { add_to_queries(fused, &dq_part, sums.2, tk, b, i, h) };
                }
            }
            if FUSED == 1i32 {
                // The loads of lse and delta of the next tile run while the block computes this
                // tile. The dq kernel is faster without.
                let near: i32 = min(inside, ceil_div(q_len, BM) - 1i32);
                let mut lse: Tile<f32, { [1, 1, BM] }> = lse_part.load([b, h, near]);
                let mut delta: Tile<f32, { [1, 1, BM] }> = delta_part.load([b, h, near]);
                for i in inside..outside {
                    let next: i32 = min(i + 1i32, outside - 1i32);
                    let next_lse: Tile<f32, { [1, 1, BM] }> = lse_part.load([b, h, next]);
                    let next_delta: Tile<f32, { [1, 1, BM] }> = delta_part.load([b, h, next]);
                    let tq: Tile<E, { [BM, DT] }> = stream(&q_part, b, i, h);
                    let tdo: Tile<E, { [BM, DT] }> = stream(&dout_part, b, i, h);
                    let other: Tile<i32, { [1, BM] }> =
                        segment_tile(segments, has_segments, &segments_part, b, i);
                    let sums = unsafe {
                        visit(
                            0i32,
                            0i32,
                            segments,
                            cap,
                            alibi,
                            drops,
                            tk,
                            tv,
                            lse,
                            delta,
                            tq,
                            tdo,
                            sum_k,
                            sum_v,
                            b,
                            h,
                            key,
                            i,
                            batch,
                            scale_log2,
                            lower,
                            upper,
                            own,
                            other,
                            place,
                            start,
                            stop,
                            also_start,
                            also_stop,
                            q_segments,
                            q_len,
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
                    sum_k = sums.0;
                    sum_v = sums.1;
                    unsafe { add_to_queries(fused, &dq_part, sums.2, tk, b, i, h) };
                    lse = next_lse;
                    delta = next_delta;
                }
            }
            if FUSED == 0i32 && WINDOW != 2i32 {
                for i in inside..outside {
                    let lse: Tile<f32, { [1, 1, BM] }> = lse_part.load([b, h, i]);
                    let delta: Tile<f32, { [1, 1, BM] }> = delta_part.load([b, h, i]);
                    let tq: Tile<E, { [BM, DT] }> = stream(&q_part, b, i, h);
                    let tdo: Tile<E, { [BM, DT] }> = stream(&dout_part, b, i, h);
                    let other: Tile<i32, { [1, BM] }> =
                        segment_tile(segments, has_segments, &segments_part, b, i);
                    let sums = unsafe {
                        visit(
                            0i32,
                            0i32,
                            segments,
                            cap,
                            alibi,
                            drops,
                            tk,
                            tv,
                            lse,
                            delta,
                            tq,
                            tdo,
                            sum_k,
                            sum_v,
                            b,
                            h,
                            key,
                            i,
                            batch,
                            scale_log2,
                            lower,
                            upper,
                            own,
                            other,
                            place,
                            start,
                            stop,
                            also_start,
                            also_stop,
                            q_segments,
                            q_len,
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
                    sum_k = sums.0;
                    sum_v = sums.1;
                    unsafe { add_to_queries(fused, &dq_part, sums.2, tk, b, i, h) };
                }
            }
            if WINDOW != 0i32 {
                for t in 0i32..(inside - begin) + (end - outside) {
                    let mut i: i32 = edge(t, begin, inside, outside);
                    if SEGMENTS == 3i32 {
                        let whole: i32 = outside - inside;
                        i = run_tile(
                            t, whole, before, shift0, from1, shift1, from2, shift2, from3, shift3,
                        );
                    }
                    let lse: Tile<f32, { [1, 1, BM] }> = lse_part.load([b, h, i]);
                    let delta: Tile<f32, { [1, 1, BM] }> = delta_part.load([b, h, i]);
                    let tq: Tile<E, { [BM, DT] }> = stream(&q_part, b, i, h);
                    let tdo: Tile<E, { [BM, DT] }> = stream(&dout_part, b, i, h);
                    let other: Tile<i32, { [1, BM] }> =
                        segment_tile(segments, has_segments, &segments_part, b, i);
                    let sums = unsafe {
                        visit(
                            1i32,
                            1i32,
                            segments,
                            cap,
                            alibi,
                            drops,
                            tk,
                            tv,
                            lse,
                            delta,
                            tq,
                            tdo,
                            sum_k,
                            sum_v,
                            b,
                            h,
                            key,
                            i,
                            batch,
                            scale_log2,
                            lower,
                            upper,
                            own,
                            other,
                            place,
                            start,
                            stop,
                            also_start,
                            also_stop,
                            q_segments,
                            q_len,
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
                    sum_k = sums.0;
                    sum_v = sums.1;
                    unsafe { add_to_queries(fused, &dq_part, sums.2, tk, b, i, h) };
                }
            }
        }

        let scale: Tile<f32, { [BN, DT] }> = softmax_scale.broadcast(const_shape![BN, DT]);
        sum_k = sum_k * scale;
        let dk_acc_view: Tensor<f32, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(dk_acc, batch, kv_len, kv_heads, head_dim, dk_acc_batch_stride) };
        let dv_acc_view: Tensor<f32, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(dv_acc, batch, kv_len, kv_heads, value_dim, dv_acc_batch_stride) };
        let dk_view: Tensor<E, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(dk, batch, kv_len, kv_heads, head_dim, dk_batch_stride) };
        let dv_view: Tensor<E, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(dv, batch, kv_len, kv_heads, value_dim, dv_batch_stride) };
        unsafe { deliver(sum_k, &dk_acc_view, &dk_view, b, j, hk, first, last) };
        unsafe { deliver(sum_v, &dv_acc_view, &dv_view, b, j, hk, first, last) };
    }
}
