//! The forward pass over one rectangle of queries and keys.

#[cutile::module]
pub mod forward {
    use super::super::common::common::write_statistics;
    use super::super::common::common::{block_of, edge, per_row_view, product, rows_view};
    use super::super::common::common::{statistics_view, stream, streamed, write};
    use super::super::dropout::dropout::{dropped, kept, places_across, places_down};
    use super::super::scores::scores::{band, cap_ratio, same_segment, score, slope_log2, unit};
    use super::super::segments::segments::{narrowed, segment_tile, segments_view};
    use super::super::visible::visible::{apart, biased, drawn_across, drawn_down};
    use super::super::visible::visible::{run_tile, run_tiles, shown_across};
    use cutile::core::*;

    /// Folds one tile of scores into the running state without acc, all in base 2:
    ///
    /// ```text
    /// m' = max(m, rowmax s);  p = 2^(s−m');  l' = l·2^(m−m') + rowsum p
    /// ```
    ///
    /// Returns (p, 2^(m−m'), m', l'). `s` times `scale`, which is positive, is in base 2; hidden
    /// pairs are −inf. m starts at a finite number below every score, so that a row that has seen
    /// nothing yet stays at l = 0 without a NaN.
    ///
    /// l has `LANES` parts, the sums of every `LANES`-th column. Each part belongs to one thread,
    /// so threads add their parts once for each row instead of once for each tile.
    pub fn weigh<const BM: i32, const BN: i32, const PARTS: i32, const LANES: i32>(
        s: Tile<f32, { [BM, BN] }>,
        m: Tile<f32, { [BM, 1] }>,
        l: Tile<f32, { [BM, LANES] }>,
        parts: Shape<{ [BM, PARTS, LANES] }>,
        scale: f32,
    ) -> (
        Tile<f32, { [BM, BN] }>,
        Tile<f32, { [BM, 1] }>,
        Tile<f32, { [BM, 1] }>,
        Tile<f32, { [BM, LANES] }>,
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
        let apart: Tile<f32, { [BM, PARTS, LANES] }> = p.reshape(parts);
        let sums: Tile<f32, { [BM, LANES] }> = reduce_sum(apart, 1i32);
        let sums: Tile<f32, { [BM, LANES] }> = sums.reshape(const_shape![BM, LANES]);
        let decay: Tile<f32, { [BM, LANES] }> = alpha.broadcast(const_shape![BM, LANES]);
        let new_l: Tile<f32, { [BM, LANES] }> = l * decay + sums;
        (p, alpha, new_m, new_l)
    }

    /// Returns acc' = acc·2^(m−m') + p v.
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

    /// Writes o = acc / l and lse = ln 2 · (m + log2 l); 0 and −inf for a row that saw nothing.
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
        // NaN does not equal 0, so a NaN score makes o and lse of its row NaN.
        let empty: Tile<bool, { [BM, 1] }> = eq_tile(l, zero);
        let divisor: Tile<f32, { [BM, 1] }> = select(empty, one, l);
        let factor: Tile<f32, { [BM, 1] }> = true_div(one, divisor);
        let out: Tile<f32, { [BM, DT] }> = acc * factor.broadcast(const_shape![BM, DT]);
        let out: Tile<E, { [BM, DT] }> = convert_tile(out);
        unsafe { write(o, out, b, i, h) };
        let ln2: Tile<f32, { [BM, 1] }> = constant(0.693147180559945309f32, const_shape![BM, 1]);
        let nothing: Tile<f32, { [BM, 1] }> = constant(f32::NEG_INFINITY, const_shape![BM, 1]);
        let log: Tile<f32, { [BM, 1] }> = log2(divisor);
        let value: Tile<f32, { [BM, 1] }> = (m + log) * ln2;
        let value: Tile<f32, { [BM, 1] }> = select(empty, nothing, value);
        let mut part: PartitionMut<f32, { [1, BM, 1] }> =
            unsafe { lse.partition_full_mut(const_shape![1, BM, 1]) };
        unsafe { part.store_unchecked(value.reshape(const_shape![1, BM, 1]), [b, i, h]) };
    }

    /// Folds one tile of keys into the state (m, l, acc). `LOW` and `HIGH` say which limits of the
    /// band may cut the tile. Where neither limit may, segments do not cut the tile either.
    pub unsafe fn visit<
        E: ElementType,
        const BM: i32,
        const BN: i32,
        const DT: i32,
        const PARTS: i32,
        const LANES: i32,
    >(
        masked: i32,
        window: i32,
        segments: i32,
        cap: i32,
        slopes: i32,
        dropped_weights: i32,
        parts: Shape<{ [BM, PARTS, LANES] }>,
        q: Tile<E, { [BM, DT] }>,
        tk: Tile<E, { [BN, DT] }>,
        tv: Tile<E, { [BN, DT] }>,
        m: Tile<f32, { [BM, 1] }>,
        l: Tile<f32, { [BM, LANES] }>,
        acc: Tile<f32, { [BM, DT] }>,
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
    ) -> (Tile<f32, { [BM, 1] }>, Tile<f32, { [BM, LANES] }>, Tile<f32, { [BM, DT] }>) {
        let key: i32 = j * BN;
        let s: Tile<f32, { [BM, BN] }> = product(q, tk);
        let q_place: i32 = q_position + row * position_stride;
        let k_place: i32 = k_position + key * position_stride;
        let ratio: Tile<f32, { [BM, BN] }> = cap_ratio(s, cap, twice_by_cap);
        let by_row: i32 = if segments == 3i32 { 0i32 } else { slopes };
        let s: Tile<f32, { [BM, BN] }> = score(
            s,
            ratio,
            cap,
            by_row,
            scale_log2,
            cap_log2,
            slope,
            has_slopes,
            k_place - q_place,
            position_stride,
        );
        let mut scores: Tile<f32, { [BM, BN] }> = s;
        if segments == 3i32 && slopes == 2i32 && has_slopes == 1i32 {
            let view: Tensor<i32, { [-1, -1] }> =
                unsafe { segments_view(others, 6i32 * batch, kv_len, kv_len) };
            let part: Partition<i32, { [1, BN] }> = view.partition(const_shape![1, BN]);
            let places: Tile<i32, { [1, BN] }> = part.load([6i32 * b + 1i32, j]);
            let away: Tile<f32, { [BM, BN] }> = apart(place, places);
            scores = biased(scores, slope, away);
        }
        let mut s: Tile<f32, { [BM, BN] }> = scores;
        if masked == 1i32 {
            let corner: i32 = key - row;
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
            let hidden: Tile<f32, { [BM, BN] }> = constant(f32::NEG_INFINITY, const_shape![BM, BN]);
            s = select(seen, s, hidden);
        }
        let weighed = weigh(s, m, l, parts, unit(cap, slopes, scale_log2));
        let mut p: Tile<f32, { [BM, BN] }> = weighed.0;
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
            p = dropped(p, keep, keep_scale);
        }
        let new_acc: Tile<f32, { [BM, DT] }> = gather(p, tv, acc, weighed.1);
        (weighed.2, weighed.3, new_acc)
    }

    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn attention_fwd<
        E: ElementType,
        const BM: i32,
        const BN: i32,
        const DT: i32,
        const PARTS: i32,
        const LANES: i32,
        const WINDOW: i32,
        const SEGMENTS: i32,
        const CAP: i32,
        const SLOPES: i32,
        const DROPOUT: i32,
    >(
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
        value_dim: i32,
        q_batch_stride: i32,
        k_batch_stride: i32,
        v_batch_stride: i32,
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
        let k_view: Tensor<E, { [-1, -1, -1, -1] }> =
            unsafe { rows_view(k, batch, kv_len, kv_heads, head_dim, k_batch_stride) };
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
        let k_part: Partition<E, { [1, BN, 1, DT] }> = k_view.partition(const_shape![1, BN, 1, DT]);
        let v_part: Partition<E, { [1, BN, 1, DT] }> = v_view.partition(const_shape![1, BN, 1, DT]);

        let tq: Tile<E, { [1, BM, 1, DT] }> =
            q_view.partition(const_shape![1, BM, 1, DT]).load([b, i, h, 0i32]);
        let tq: Tile<E, { [BM, DT] }> = tq.reshape(const_shape![BM, DT]);

        let mut m: Tile<f32, { [BM, 1] }> = constant(-1.0e38f32, const_shape![BM, 1]);
        let mut l: Tile<f32, { [BM, LANES] }> = constant(0.0f32, const_shape![BM, LANES]);
        let mut a: Tile<f32, { [BM, DT] }> = constant(0.0f32, const_shape![BM, DT]);
        if first == 0i32 {
            let t: Tile<f32, { [1, 1, BM] }> =
                max_view.partition(const_shape![1, 1, BM]).load([b, h, i]);
            m = t.reshape(const_shape![BM, 1]);
            let t: Tile<f32, { [1, 1, BM] }> =
                sum_view.partition(const_shape![1, 1, BM]).load([b, h, i]);
            let t: Tile<f32, { [BM, 1] }> = t.reshape(const_shape![BM, 1]);
            let place: Tile<i32, { [LANES] }> = iota(const_shape![LANES]);
            let place: Tile<i32, { [1, LANES] }> = place.reshape(const_shape![1, LANES]);
            let place: Tile<i32, { [BM, LANES] }> = place.broadcast(const_shape![BM, LANES]);
            let none: Tile<i32, { [BM, LANES] }> = constant(0i32, const_shape![BM, LANES]);
            l = select(eq_tile(place, none), t.broadcast(const_shape![BM, LANES]), l);
            let t: Tile<f32, { [1, BM, 1, DT] }> =
                acc_view.partition(const_shape![1, BM, 1, DT]).load([b, i, h, 0i32]);
            a = t.reshape(const_shape![BM, DT]);
        }

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

        if WINDOW != 2i32 {
            for j in inside..outside {
                let tk: Tile<E, { [BN, DT] }> = stream(&k_part, b, j, hk);
                let tv: Tile<E, { [BN, DT] }> = stream(&v_part, b, j, hk);
                let other: Tile<i32, { [1, BN] }> =
                    segment_tile(segments, has_segments, &segments_part, b, j);
                let state = unsafe {
                    visit(
                        0i32,
                        window,
                        segments,
                        cap,
                        alibi,
                        drops,
                        const_shape![BM, PARTS, LANES],
                        tq,
                        tk,
                        tv,
                        m,
                        l,
                        a,
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
                m = state.0;
                l = state.1;
                a = state.2;
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
            let state = unsafe {
                visit(
                    1i32,
                    window,
                    segments,
                    cap,
                    alibi,
                    drops,
                    const_shape![BM, PARTS, LANES],
                    tq,
                    tk,
                    tv,
                    m,
                    l,
                    a,
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
            m = state.0;
            l = state.1;
            a = state.2;
        }

        let l: Tile<f32, { [BM] }> = reduce_sum(l, 1i32);
        let l: Tile<f32, { [BM, 1] }> = l.reshape(const_shape![BM, 1]);
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
