//! The backward pass over one rectangle, key side: dk and dv of a tile of keys, with queries
//! streaming. The fused kernel also adds each tile's part of dq to its accumulator.

#[cutile::module]
pub mod backward_keys {
    use super::super::common::common::{block_of, deliver, product, read, stream};
    use super::super::dropout::dropout::{Dropout, dropped, kept};
    use super::super::modes::modes::{ABSENT, ONE_LOOP, PACKED, is_on};
    use super::super::pairs::pairs::{Band, Counted, Inputs, Pair, Rectangle, Saved, Sizes, Turn};
    use super::super::pairs::pairs::{drawn_across, drawn_down, first_key, first_query};
    use super::super::pairs::pairs::{key_rows, query_rows, query_statistics, scores_of, slope_of};
    use super::super::scores::scores::{Scoring, alike, band, cap_ratio, exponents};
    use super::super::scores::scores::{uncapped, unit};
    use super::super::segments::segments::{MaskRows, Segments, segment_rows, segment_tile};
    use super::super::visible::visible::{Keys, Tiles, shown_down};
    use super::super::walk::walk::{cut_count, cut_tile, resident_keys, tiles_of_queries};
    use cutile::core::*;

    /// The arrays of dk and dv, and for the fused kernel of dq.
    #[derive(Clone, Copy)]
    pub struct Gradients<E: ElementType> {
        pub dk_acc: *mut f32,
        pub dv_acc: *mut f32,
        pub dk: *mut E,
        pub dv: *mut E,
        pub dq_acc: *mut f32,
        pub dk_acc_batch_stride: i32,
        pub dv_acc_batch_stride: i32,
        pub dk_batch_stride: i32,
        pub dv_batch_stride: i32,
        pub dq_acc_batch_stride: i32,
    }

    /// How to visit a tile: whether either limit of the band may cut it, and whether the kernel is
    /// fused; 0 or 1 each.
    #[derive(Clone, Copy)]
    pub struct Visit {
        pub cut_low: i32,
        pub cut_high: i32,
        pub fused: i32,
    }

    /// What stays while the queries of a head stream: what masks say of the keys, the values, and
    /// the head's slope.
    #[derive(Clone, Copy)]
    pub struct Resident<E: ElementType, const BN: i32, const DT: i32> {
        pub own: Keys<BN>,
        pub v: Tile<E, { [BN, DT] }>,
        pub slope: Tile<f32, { [1, 1] }>,
    }

    /// Sums over queries: dk / softmax_scale, and dv.
    #[derive(Clone, Copy)]
    pub struct Sums<const BN: i32, const DT: i32> {
        pub k: Tile<f32, { [BN, DT] }>,
        pub v: Tile<f32, { [BN, DT] }>,
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

    /// Returns weights of keys by row and queries by column, 0 where a pair does not see each other.
    /// Where no limit of the band may cut the tile, masks do not cut it either.
    pub unsafe fn masked_down<const BM: i32, const BN: i32>(
        how: Visit,
        rect: Rectangle,
        pair: Pair,
        own: Keys<BN>,
        other: Tile<i32, { [1, BM] }>,
        p: Tile<f32, { [BN, BM] }>,
    ) -> Tile<f32, { [BN, BM] }> {
        // The signs are reversed: −upper ≤ i − j ≤ −lower.
        let corner: i32 = pair.row - pair.key;
        let low: i32 = 0i32 - rect.band.upper - corner;
        let high: i32 = 0i32 - rect.band.lower - corner;
        let mut seen: Tile<bool, { [BN, BM] }> =
            band::<BN, BM>(how.cut_low, how.cut_high, low, high, 0i32);
        if is_on(rect.segments.mode, rect.segments.switch) {
            let same: Tile<bool, { [BN, BM] }> = alike(own.segment, other);
            seen = seen & same;
        }
        if rect.segments.mode == PACKED {
            seen = unsafe { shown_down(own, rect.segments.queries, pair.b, pair.tile, seen) };
        }
        let zero: Tile<f32, { [BN, BM] }> = constant(0.0f32, const_shape![BN, BM]);
        select(seen, p, zero)
    }

    /// Returns the weights that dropout keeps, of keys by row and queries by column.
    pub unsafe fn kept_down<const BM: i32, const BN: i32>(
        rect: Rectangle,
        pair: Pair,
        own: Tile<i32, { [BN, 1] }>,
    ) -> Tile<bool, { [BN, BM] }> {
        let (row, column, others) =
            (first_key(rect, pair), first_query(rect, pair), rect.segments.queries);
        let queries: Tile<u32, { [BN, BM] }> =
            unsafe { drawn_across::<BN, BM>(rect, pair, column, others) };
        let keys: Tile<u32, { [BN, BM] }> = drawn_down::<BN, BM>(rect, row, own);
        unsafe { kept(queries, keys, rect.dropout, rect.sizes.batch, pair.b, pair.h) }
    }

    /// Adds one tile of queries to the sums, and in the fused kernel its part of dq to `dq_part`.
    pub unsafe fn visit<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
        how: Visit,
        rect: Rectangle,
        pair: Pair,
        kept: Resident<E, BN, DT>,
        sums: Sums<BN, DT>,
        k: Tile<E, { [BN, DT] }>,
        lse: Tile<f32, { [1, 1, BM] }>,
        delta: Tile<f32, { [1, 1, BM] }>,
        q_part: &Partition<E, { [1, BM, 1, DT] }>,
        dout_part: &Partition<E, { [1, BM, 1, DT] }>,
        others: &Partition<i32, { [1, BM] }>,
        dq_part: &PartitionMut<f32, { [1, BM, 1, DT] }>,
    ) -> Sums<BN, DT> {
        let (scoring, own) = (rect.scoring, kept.own);
        let q: Tile<E, { [BM, DT] }> = stream(q_part, pair.b, pair.tile, pair.h);
        let dout: Tile<E, { [BM, DT] }> = stream(dout_part, pair.b, pair.tile, pair.h);
        let other: Tile<i32, { [1, BM] }> = segment_tile(rect.segments, others, pair.b, pair.tile);
        let s: Tile<f32, { [BN, BM] }> = product(k, q);
        // These distances go from keys to queries, so the slope is negated.
        let start: i32 = first_query(rect, pair) - first_key(rect, pair);
        let slope: Tile<f32, { [1, 1] }> = negf(kept.slope);
        let ratio: Tile<f32, { [BN, BM] }> = cap_ratio(s, scoring);
        let s: Tile<f32, { [BN, BM] }> = unsafe {
            scores_of(s, ratio, rect, pair, slope, start, own.counted, rect.segments.queries)
        };
        let lse: Tile<f32, { [1, BM] }> = lse.reshape(const_shape![1, BM]);
        let e: Tile<f32, { [BN, BM] }> = exponents(s, lse, unit(scoring));
        let mut p: Tile<f32, { [BN, BM] }> = exp2(e, ftz::Enabled);
        if how.cut_low != 0i32 || how.cut_high != 0i32 {
            let masked: Tile<f32, { [BN, BM] }> =
                unsafe { masked_down(how, rect, pair, own, other, p) };
            p = masked;
        }
        let w: Tile<f32, { [BN, BM] }> = uncapped(p, scoring.cap, ratio);
        let mut dp: Tile<f32, { [BN, BM] }> = product(kept.v, dout);
        if is_on(rect.dropout.mode, rect.dropout.switch) {
            let keep: Tile<bool, { [BN, BM] }> =
                unsafe { kept_down::<BM, BN>(rect, pair, own.counted) };
            p = dropped(p, keep, rect.dropout.keep_scale);
            dp = dropped(dp, keep, rect.dropout.keep_scale);
        }
        let new = add(p, w, dp, q, dout, delta, sums.k, sums.v);
        unsafe { add_to_queries(how.fused, dq_part, new.2, k, pair.b, pair.tile, pair.h) };
        let (k, v) = (new.0, new.1);
        Sums::<BN, DT> { k, v }
    }

    /// Computes one tile of keys of one head.
    pub unsafe fn add_queries<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
        fused: i32,
        inputs: Inputs<E>,
        saved: Saved<E>,
        gradients: Gradients<E>,
        rect: Rectangle,
        turn: Turn,
        softmax_scale: f32,
    ) {
        let sizes: Sizes = rect.sizes;
        let blocks: i32 = ceil_div(sizes.kv_len, BN);
        let block = block_of(blocks, sizes.kv_heads, turn.section, turn.reverse);
        let (j, b, hk) = (block.0, block.1, block.2);
        let group: i32 = sizes.heads / sizes.kv_heads;
        let h0: i32 = hk * group;

        let (head_dim, value_dim) = (sizes.head_dim, sizes.value_dim);
        let q_view = unsafe { query_rows(inputs.q, sizes, head_dim, inputs.q_batch_stride) };
        let dout_view =
            unsafe { query_rows(saved.dout, sizes, value_dim, saved.dout_batch_stride) };
        let k_view = unsafe { key_rows(inputs.k, sizes, head_dim, inputs.k_batch_stride) };
        let v_view = unsafe { key_rows(inputs.v, sizes, value_dim, inputs.v_batch_stride) };
        let (entry, head) = (saved.stat_batch_stride, saved.stat_head_stride);
        let lse_view = unsafe { query_statistics(saved.lse_log2, sizes, entry, head) };
        let delta_view = unsafe { query_statistics(saved.delta, sizes, entry, head) };
        let dq_view =
            unsafe { query_rows(gradients.dq_acc, sizes, head_dim, gradients.dq_acc_batch_stride) };
        let qs = q_view.partition(const_shape![1, BM, 1, DT]);
        let douts = dout_view.partition(const_shape![1, BM, 1, DT]);
        // Additions need a view without padding.
        let dqs: PartitionMut<f32, { [1, BM, 1, DT] }> =
            unsafe { dq_view.partition_full_mut(const_shape![1, BM, 1, DT]) };
        let lse_part = lse_view.partition(const_shape![1, 1, BM]);
        let delta_part = delta_view.partition(const_shape![1, 1, BM]);

        let k: Tile<E, { [BN, DT] }> = read(&k_view, const_shape![BN, DT], b, j, hk);
        let v: Tile<E, { [BN, DT] }> = read(&v_view, const_shape![BN, DT], b, j, hk);

        let own: Keys<BN> = unsafe { resident_keys::<BN>(rect, b, j) };
        let tiles: Tiles = unsafe { tiles_of_queries::<BM, BN>(rect, b, j) };
        let masks: Segments = rect.segments;
        let others = unsafe { segment_rows(masks.mode, masks.queries) };
        let others = others.partition(const_shape![1, BM]);
        let key: i32 = j * BN;
        let zero: Tile<f32, { [BN, DT] }> = constant(0.0f32, const_shape![BN, DT]);
        let mut sums: Sums<BN, DT> = Sums::<BN, DT> { k: zero, v: zero };
        let low: Visit = Visit { cut_low: 1i32, cut_high: 0i32, fused };
        let none: Visit = Visit { cut_low: 0i32, cut_high: 0i32, fused };
        let both: Visit = Visit { cut_low: 1i32, cut_high: 1i32, fused };
        let streaming: i32 = if rect.band.lower <= rect.band.upper { group } else { 0i32 };
        for g in 0i32..streaming {
            let h: i32 = h0 + g;
            let slope: Tile<f32, { [1, 1] }> = unsafe { slope_of(rect, b, h) };
            let kept: Resident<E, BN, DT> = Resident::<E, BN, DT> { own, v, slope };
            if rect.band.window == ABSENT {
                for i in tiles.begin..tiles.inside {
                    let lse: Tile<f32, { [1, 1, BM] }> = lse_part.load([b, h, i]);
                    let delta: Tile<f32, { [1, 1, BM] }> = delta_part.load([b, h, i]);
                    let pair: Pair = Pair { b, h, hk, row: i * BM, key, tile: i };
                    sums = unsafe {
                        visit(
                            low, rect, pair, kept, sums, k, lse, delta, &qs, &douts, &others, &dqs,
                        )
                    };
                }
            }
            if fused == 1i32 {
                // The loads of lse and delta of the next tile run while the block computes this
                // tile. The dq kernel is faster without.
                let near: i32 = min(tiles.inside, ceil_div(sizes.q_len, BM) - 1i32);
                let mut lse: Tile<f32, { [1, 1, BM] }> = lse_part.load([b, h, near]);
                let mut delta: Tile<f32, { [1, 1, BM] }> = delta_part.load([b, h, near]);
                for i in tiles.inside..tiles.outside {
                    let next: i32 = min(i + 1i32, tiles.outside - 1i32);
                    let next_lse: Tile<f32, { [1, 1, BM] }> = lse_part.load([b, h, next]);
                    let next_delta: Tile<f32, { [1, 1, BM] }> = delta_part.load([b, h, next]);
                    let pair: Pair = Pair { b, h, hk, row: i * BM, key, tile: i };
                    sums = unsafe {
                        visit(
                            none, rect, pair, kept, sums, k, lse, delta, &qs, &douts, &others, &dqs,
                        )
                    };
                    lse = next_lse;
                    delta = next_delta;
                }
            }
            if fused == 0i32 && rect.band.window != ONE_LOOP {
                for i in tiles.inside..tiles.outside {
                    let lse: Tile<f32, { [1, 1, BM] }> = lse_part.load([b, h, i]);
                    let delta: Tile<f32, { [1, 1, BM] }> = delta_part.load([b, h, i]);
                    let pair: Pair = Pair { b, h, hk, row: i * BM, key, tile: i };
                    sums = unsafe {
                        visit(
                            none, rect, pair, kept, sums, k, lse, delta, &qs, &douts, &others, &dqs,
                        )
                    };
                }
            }
            if rect.band.window != ABSENT {
                for t in 0i32..cut_count(tiles) {
                    let i: i32 = cut_tile(masks.mode, tiles, t);
                    let lse: Tile<f32, { [1, 1, BM] }> = lse_part.load([b, h, i]);
                    let delta: Tile<f32, { [1, 1, BM] }> = delta_part.load([b, h, i]);
                    let pair: Pair = Pair { b, h, hk, row: i * BM, key, tile: i };
                    sums = unsafe {
                        visit(
                            both, rect, pair, kept, sums, k, lse, delta, &qs, &douts, &others, &dqs,
                        )
                    };
                }
            }
        }

        let scale: Tile<f32, { [BN, DT] }> = softmax_scale.broadcast(const_shape![BN, DT]);
        let dk: Tile<f32, { [BN, DT] }> = sums.k * scale;
        let (acc, stride) = (gradients.dk_acc, gradients.dk_acc_batch_stride);
        let dk_acc_view = unsafe { key_rows(acc, sizes, head_dim, stride) };
        let (acc, stride) = (gradients.dv_acc, gradients.dv_acc_batch_stride);
        let dv_acc_view = unsafe { key_rows(acc, sizes, value_dim, stride) };
        let dk_view = unsafe { key_rows(gradients.dk, sizes, head_dim, gradients.dk_batch_stride) };
        let dv_view =
            unsafe { key_rows(gradients.dv, sizes, value_dim, gradients.dv_batch_stride) };
        unsafe { deliver(dk, &dk_acc_view, &dk_view, b, j, hk, turn.first, turn.last) };
        unsafe { deliver(sums.v, &dv_acc_view, &dv_view, b, j, hk, turn.first, turn.last) };
    }

    // The record decides the arguments. They stand in groups, most of which become structs.
    #[rustfmt::skip]
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn attention_bwd_dkdv<
        E: ElementType, const BM: i32, const BN: i32, const DT: i32, const FUSED: i32,
        const WINDOW: i32, const SEGMENTS: i32, const CAP: i32, const SLOPES: i32,
        const DROPOUT: i32,
    >(
        q: *mut E, k: *mut E, v: *mut E,
        dout: *mut E, lse_log2: *mut f32, delta: *mut f32,
        dk_acc: *mut f32, dv_acc: *mut f32, dk: *mut E, dv: *mut E, dq_acc: *mut f32,
        batch: i32, q_len: i32, kv_len: i32, heads: i32, kv_heads: i32,
        head_dim: i32, value_dim: i32,
        q_batch_stride: i32, k_batch_stride: i32, v_batch_stride: i32,
        dout_batch_stride: i32, dk_acc_batch_stride: i32, dv_acc_batch_stride: i32,
        dk_batch_stride: i32, dv_batch_stride: i32, dq_acc_batch_stride: i32,
        stat_batch_stride: i32, stat_head_stride: i32,
        scale_log2: f32, softmax_scale: f32, lower: i32, upper: i32,
        section: i32, reverse: i32, first: i32, last: i32,
        q_segments: *mut i32, kv_segments: *mut i32, ranges: *mut i32,
        q_segments_batch_stride: i32, kv_segments_batch_stride: i32, ranges_batch_stride: i32,
        has_segments: i32, cap_log2: f32, twice_by_cap: f32,
        slopes: *mut f32, slopes_batch_stride: i32, has_slopes: i32,
        dropout: *mut i32, dropout_batch_stride: i32, has_dropout: i32,
        threshold: i32, keep_scale: f32,
        q_position: i32, k_position: i32, position_stride: i32,
    ) {
        let inputs = Inputs::<E> { q, k, v, q_batch_stride, k_batch_stride, v_batch_stride };
        let saved = Saved::<E> {
            dout, lse_log2, delta,
            dout_batch_stride, stat_batch_stride, stat_head_stride,
        };
        let gradients = Gradients::<E> {
            dk_acc, dv_acc, dk, dv, dq_acc, dk_acc_batch_stride, dv_acc_batch_stride,
            dk_batch_stride, dv_batch_stride, dq_acc_batch_stride,
        };
        let sizes = Sizes { batch, q_len, kv_len, heads, kv_heads, head_dim, value_dim };
        let band = Band { window: WINDOW, lower, upper };
        let queries = MaskRows {
            base: q_segments, batch, rows: q_len, batch_stride: q_segments_batch_stride,
        };
        let keys = MaskRows {
            base: kv_segments, batch, rows: kv_len, batch_stride: kv_segments_batch_stride,
        };
        let segments = Segments {
            mode: SEGMENTS, switch: has_segments, queries, keys, ranges, ranges_batch_stride,
        };
        let scoring = Scoring {
            cap: CAP, alibi: SLOPES,
            scale_log2, cap_log2, twice_by_cap, slopes, slopes_batch_stride, has_slopes,
        };
        let dropout = Dropout {
            mode: DROPOUT, switch: has_dropout,
            numbers: dropout, batch_stride: dropout_batch_stride, threshold, keep_scale,
        };
        let counted = Counted { q_position, k_position, position_stride };
        let rect = Rectangle { sizes, band, segments, scoring, dropout, counted };
        let turn = Turn { section, reverse, first, last };
        unsafe {
            add_queries::<E, BM, BN, DT>(
                FUSED, inputs, saved, gradients, rect, turn, softmax_scale,
            )
        };
    }
}
