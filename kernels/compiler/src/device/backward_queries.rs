//! The backward pass over one rectangle, query side: dq of a tile of queries, with keys streaming.

#[cutile::module]
pub mod backward_queries {
    use super::super::common::common::{
        block_of, deliver, per_row_view, product, read, read_statistics, stream,
    };
    use super::super::dropout::dropout::{Dropout, dropped};
    use super::super::modes::modes::{ABSENT, ONE_LOOP, is_on};
    use super::super::pairs::pairs::{Band, Counted, Inputs, Pair, Rectangle, Saved, Sizes, Turn};
    use super::super::pairs::pairs::{between, first_key, first_query, kept_across};
    use super::super::pairs::pairs::{
        key_rows, masked_across, query_rows, query_statistics, scores_of, slope_of,
    };
    use super::super::scores::scores::{Scoring, cap_ratio, exponents, uncapped, unit};
    use super::super::segments::segments::{MaskRows, Segments, segment_rows, segment_tile};
    use super::super::visible::visible::{Queries, Tiles};
    use super::super::walk::walk::{cut_count, cut_tile, resident_queries, tiles_of_keys};
    use cutile::core::*;

    /// The arrays of dq and of the gradient of slopes.
    #[derive(Clone, Copy)]
    pub struct Gradients<E: ElementType> {
        pub dq_acc: *mut f32,
        pub dq: *mut E,
        pub dq_acc_batch_stride: i32,
        pub dq_batch_stride: i32,
        pub dslopes: *mut f32,
        pub dslopes_batch_stride: i32,
        pub has_dslopes: i32,
    }

    /// What a block keeps of its queries.
    #[derive(Clone, Copy)]
    pub struct Resident<E: ElementType, const BM: i32, const DT: i32> {
        pub q: Tile<E, { [BM, DT] }>,
        pub dout: Tile<E, { [BM, DT] }>,
        pub lse: Tile<f32, { [BM, 1] }>,
        pub delta: Tile<f32, { [BM, 1] }>,
        pub slope: Tile<f32, { [1, 1] }>,
    }

    /// Sums over keys: dq / softmax_scale, and the gradient of the slope.
    #[derive(Clone, Copy)]
    pub struct Sums<const BM: i32, const DT: i32> {
        pub sum: Tile<f32, { [BM, DT] }>,
        pub slope: Tile<f32, { [BM, 1] }>,
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

    /// Adds one tile of keys to the sums. With `masked` 1 the band and masks may cut the tile.
    pub unsafe fn visit<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
        masked: i32,
        rect: Rectangle,
        has_dslopes: i32,
        pair: Pair,
        own: Queries<BM>,
        resident: Resident<E, BM, DT>,
        sums: Sums<BM, DT>,
        q: Tile<E, { [BM, DT] }>,
        ks: &Partition<E, { [1, BN, 1, DT] }>,
        vs: &Partition<E, { [1, BN, 1, DT] }>,
        others: &Partition<i32, { [1, BN] }>,
    ) -> Sums<BM, DT> {
        let (scoring, keys) = (rect.scoring, rect.segments.keys);
        let k: Tile<E, { [BN, DT] }> = stream(ks, pair.b, pair.tile, pair.hk);
        let v: Tile<E, { [BN, DT] }> = stream(vs, pair.b, pair.tile, pair.hk);
        let other: Tile<i32, { [1, BN] }> = segment_tile(rect.segments, others, pair.b, pair.tile);
        let s: Tile<f32, { [BM, BN] }> = product(q, k);
        let start: i32 = first_key(rect, pair) - first_query(rect, pair);
        let ratio: Tile<f32, { [BM, BN] }> = cap_ratio(s, scoring);
        let s: Tile<f32, { [BM, BN] }> =
            unsafe { scores_of(s, ratio, rect, pair, resident.slope, start, own.counted, keys) };
        let e: Tile<f32, { [BM, BN] }> = exponents(s, resident.lse, unit(scoring));
        let mut p: Tile<f32, { [BM, BN] }> = exp2(e, ftz::Enabled);
        if masked == 1i32 {
            let zero: Tile<f32, { [BM, BN] }> = constant(0.0f32, const_shape![BM, BN]);
            p = unsafe { masked_across(rect, pair, own, other, p, zero) };
        }
        let mut dp: Tile<f32, { [BM, BN] }> = product(resident.dout, v);
        if is_on(rect.dropout.mode, rect.dropout.switch) {
            let keep: Tile<bool, { [BM, BN] }> =
                unsafe { kept_across::<BM, BN>(rect, pair, own.counted) };
            dp = dropped(dp, keep, rect.dropout.keep_scale);
        }
        let ds: Tile<f32, { [BM, BN] }> = score_gradient(p, dp, resident.delta);
        let mut slope: Tile<f32, { [BM, 1] }> = sums.slope;
        if is_on(scoring.alibi, has_dslopes) {
            let away: Tile<f32, { [BM, BN] }> =
                unsafe { between::<BM, BN>(rect, pair, start, own.counted, keys) };
            let of_slope: Tile<f32, { [BM] }> = reduce_sum(ds * away, 1i32);
            slope = slope + of_slope.reshape(const_shape![BM, 1]);
        }
        let ds: Tile<f32, { [BM, BN] }> = uncapped(ds, scoring.cap, ratio);
        let sum: Tile<f32, { [BM, DT] }> = add(ds, k, sums.sum);
        Sums::<BM, DT> { sum, slope }
    }

    /// Computes one tile of queries of one head.
    pub unsafe fn add_keys<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
        inputs: Inputs<E>,
        saved: Saved<E>,
        gradients: Gradients<E>,
        rect: Rectangle,
        turn: Turn,
        softmax_scale: f32,
    ) {
        let sizes: Sizes = rect.sizes;
        let blocks: i32 = ceil_div(sizes.q_len, BM);
        let block = block_of(blocks, sizes.heads, turn.section, turn.reverse);
        let (i, b, h) = (block.0, block.1, block.2);
        let hk: i32 = h / (sizes.heads / sizes.kv_heads);

        let (head_dim, value_dim) = (sizes.head_dim, sizes.value_dim);
        let q_view = unsafe { query_rows(inputs.q, sizes, head_dim, inputs.q_batch_stride) };
        let dout_view =
            unsafe { query_rows(saved.dout, sizes, value_dim, saved.dout_batch_stride) };
        let k_view = unsafe { key_rows(inputs.k, sizes, head_dim, inputs.k_batch_stride) };
        let v_view = unsafe { key_rows(inputs.v, sizes, value_dim, inputs.v_batch_stride) };
        let (entry, head) = (saved.stat_batch_stride, saved.stat_head_stride);
        let lse_view = unsafe { query_statistics(saved.lse_log2, sizes, entry, head) };
        let delta_view = unsafe { query_statistics(saved.delta, sizes, entry, head) };
        let ks = k_view.partition(const_shape![1, BN, 1, DT]);
        let vs = v_view.partition(const_shape![1, BN, 1, DT]);

        let q: Tile<E, { [BM, DT] }> = read(&q_view, const_shape![BM, DT], b, i, h);
        let dout: Tile<E, { [BM, DT] }> = read(&dout_view, const_shape![BM, DT], b, i, h);
        let lse: Tile<f32, { [BM, 1] }> = read_statistics::<BM>(&lse_view, b, i, h);
        let delta: Tile<f32, { [BM, 1] }> = read_statistics::<BM>(&delta_view, b, i, h);

        let own: Queries<BM> = unsafe { resident_queries::<BM>(rect, b, i) };
        let tiles: Tiles = unsafe { tiles_of_keys::<BM, BN>(rect, b, i) };
        let masks: Segments = rect.segments;
        let others = unsafe { segment_rows(masks.mode, masks.keys) };
        let others = others.partition(const_shape![1, BN]);
        let row: i32 = i * BM;
        let slope: Tile<f32, { [1, 1] }> = unsafe { slope_of(rect, b, h) };
        let resident: Resident<E, BM, DT> = Resident::<E, BM, DT> { q, dout, lse, delta, slope };

        let sum: Tile<f32, { [BM, DT] }> = constant(0.0f32, const_shape![BM, DT]);
        let none: Tile<f32, { [BM, 1] }> = constant(0.0f32, const_shape![BM, 1]);
        let mut sums: Sums<BM, DT> = Sums::<BM, DT> { sum, slope: none };
        let has: i32 = gradients.has_dslopes;
        if rect.band.window != ONE_LOOP {
            for j in tiles.inside..tiles.outside {
                let pair: Pair = Pair { b, h, hk, row, key: j * BN, tile: j };
                sums = unsafe {
                    visit(0i32, rect, has, pair, own, resident, sums, q, &ks, &vs, &others)
                };
            }
        }
        for t in 0i32..cut_count(tiles) {
            let j: i32 = cut_tile(masks.mode, tiles, t);
            let pair: Pair = Pair { b, h, hk, row, key: j * BN, tile: j };
            sums =
                unsafe { visit(1i32, rect, has, pair, own, resident, sums, q, &ks, &vs, &others) };
        }

        if rect.scoring.alibi != ABSENT && gradients.has_dslopes == 1i32 {
            let (dslopes, stride) = (gradients.dslopes, gradients.dslopes_batch_stride);
            let view =
                unsafe { per_row_view(dslopes, sizes.batch, sizes.q_len, sizes.heads, stride) };
            let t: Tile<f32, { [1, BM, 1] }> =
                view.partition(const_shape![1, BM, 1]).load([b, i, h]);
            let slope_sum: Tile<f32, { [BM, 1] }> = sums.slope;
            let t: Tile<f32, { [1, BM, 1] }> = t + slope_sum.reshape(const_shape![1, BM, 1]);
            let mut part: PartitionMut<f32, { [1, BM, 1] }> =
                unsafe { view.partition_full_mut(const_shape![1, BM, 1]) };
            unsafe { part.store_unchecked(t, [b, i, h]) };
        }

        let sum: Tile<f32, { [BM, DT] }> = sums.sum;
        let sum: Tile<f32, { [BM, DT] }> = sum * softmax_scale.broadcast(const_shape![BM, DT]);
        let (acc, dq) = (gradients.dq_acc, gradients.dq);
        let acc_view = unsafe { query_rows(acc, sizes, head_dim, gradients.dq_acc_batch_stride) };
        let dq_view = unsafe { query_rows(dq, sizes, head_dim, gradients.dq_batch_stride) };
        unsafe { deliver(sum, &acc_view, &dq_view, b, i, h, turn.first, turn.last) };
    }

    // The record decides the arguments. They stand in groups, most of which become structs.
    #[rustfmt::skip]
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn attention_bwd_dq<
        E: ElementType, const BM: i32, const BN: i32, const DT: i32,
        const WINDOW: i32, const SEGMENTS: i32, const CAP: i32, const SLOPES: i32,
        const DROPOUT: i32,
    >(
        q: *mut E, k: *mut E, v: *mut E,
        dout: *mut E, lse_log2: *mut f32, delta: *mut f32, dq_acc: *mut f32, dq: *mut E,
        batch: i32, q_len: i32, kv_len: i32, heads: i32, kv_heads: i32,
        head_dim: i32, value_dim: i32,
        q_batch_stride: i32, k_batch_stride: i32, v_batch_stride: i32,
        dout_batch_stride: i32, dq_acc_batch_stride: i32, dq_batch_stride: i32,
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
        dslopes: *mut f32, dslopes_batch_stride: i32, has_dslopes: i32,
    ) {
        let inputs = Inputs::<E> { q, k, v, q_batch_stride, k_batch_stride, v_batch_stride };
        let saved = Saved::<E> {
            dout, lse_log2, delta,
            dout_batch_stride, stat_batch_stride, stat_head_stride,
        };
        let gradients = Gradients::<E> {
            dq_acc, dq, dq_acc_batch_stride, dq_batch_stride,
            dslopes, dslopes_batch_stride, has_dslopes,
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
        unsafe { add_keys::<E, BM, BN, DT>(inputs, saved, gradients, rect, turn, softmax_scale) };
    }
}
