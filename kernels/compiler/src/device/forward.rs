//! The forward pass over one rectangle of queries and keys.

#[cutile::module]
pub mod forward {
    use super::super::common::common::write_statistics;
    use super::super::common::common::{block_of, per_row_view, product, read, stream, write};
    use super::super::dropout::dropout::{Dropout, dropped};
    use super::super::modes::modes::{ONE_LOOP, is_on};
    use super::super::pairs::pairs::{Band, Counted, Inputs, Pair, Rectangle, Sizes, Turn};
    use super::super::pairs::pairs::{first_key, first_query, key_rows, query_rows};
    use super::super::pairs::pairs::{
        kept_across, masked_across, query_statistics, scores_of, slope_of,
    };
    use super::super::scores::scores::{Scoring, cap_ratio, unit};
    use super::super::segments::segments::{MaskRows, Segments, segment_rows, segment_tile};
    use super::super::softmax::softmax::{State, conclude, empty_state, gather, read_state, weigh};
    use super::super::visible::visible::{Queries, Tiles};
    use super::super::walk::walk::{cut_count, cut_tile, resident_queries, tiles_of_keys};
    use cutile::core::*;

    /// The arrays of running states and of results.
    #[derive(Clone, Copy)]
    pub struct Outputs<E: ElementType> {
        pub acc: *mut f32,
        pub row_max: *mut f32,
        pub row_sum: *mut f32,
        pub o: *mut E,
        pub lse: *mut f32,
        pub acc_batch_stride: i32,
        pub o_batch_stride: i32,
        pub lse_batch_stride: i32,
        pub stat_batch_stride: i32,
        pub stat_head_stride: i32,
    }

    /// Folds one tile of keys into the state. With `masked` 1 the band and masks may cut the tile.
    pub unsafe fn visit<
        E: ElementType,
        const BM: i32,
        const BN: i32,
        const DT: i32,
        const PARTS: i32,
        const LANES: i32,
    >(
        masked: i32,
        rect: Rectangle,
        pair: Pair,
        slope: Tile<f32, { [1, 1] }>,
        own: Queries<BM>,
        state: State<BM, LANES, DT>,
        parts: Shape<{ [BM, PARTS, LANES] }>,
        q: Tile<E, { [BM, DT] }>,
        ks: &Partition<E, { [1, BN, 1, DT] }>,
        vs: &Partition<E, { [1, BN, 1, DT] }>,
        others: &Partition<i32, { [1, BN] }>,
    ) -> State<BM, LANES, DT> {
        let k: Tile<E, { [BN, DT] }> = stream(ks, pair.b, pair.tile, pair.hk);
        let v: Tile<E, { [BN, DT] }> = stream(vs, pair.b, pair.tile, pair.hk);
        let other: Tile<i32, { [1, BN] }> = segment_tile(rect.segments, others, pair.b, pair.tile);
        let s: Tile<f32, { [BM, BN] }> = product(q, k);
        let start: i32 = first_key(rect, pair) - first_query(rect, pair);
        let ratio: Tile<f32, { [BM, BN] }> = cap_ratio(s, rect.scoring);
        let mut s: Tile<f32, { [BM, BN] }> = unsafe {
            scores_of(s, ratio, rect, pair, slope, start, own.counted, rect.segments.keys)
        };
        if masked == 1i32 {
            let hidden: Tile<f32, { [BM, BN] }> = constant(f32::NEG_INFINITY, const_shape![BM, BN]);
            s = unsafe { masked_across(rect, pair, own, other, s, hidden) };
        }
        let weighed = weigh(s, state.m, state.l, parts, unit(rect.scoring));
        let mut p: Tile<f32, { [BM, BN] }> = weighed.0;
        if is_on(rect.dropout.mode, rect.dropout.switch) {
            let keep: Tile<bool, { [BM, BN] }> =
                unsafe { kept_across::<BM, BN>(rect, pair, own.counted) };
            p = dropped(p, keep, rect.dropout.keep_scale);
        }
        let acc: Tile<f32, { [BM, DT] }> = gather(p, v, state.acc, weighed.1);
        let (m, l) = (weighed.2, weighed.3);
        State::<BM, LANES, DT> { m, l, acc }
    }

    /// Computes one tile of queries of one head.
    pub unsafe fn fold_keys<
        E: ElementType,
        const BM: i32,
        const BN: i32,
        const DT: i32,
        const PARTS: i32,
        const LANES: i32,
    >(
        inputs: Inputs<E>,
        outputs: Outputs<E>,
        rect: Rectangle,
        turn: Turn,
    ) {
        let sizes: Sizes = rect.sizes;
        let blocks: i32 = ceil_div(sizes.q_len, BM);
        let block = block_of(blocks, sizes.heads, turn.section, turn.reverse);
        let (i, b, h) = (block.0, block.1, block.2);
        let hk: i32 = h / (sizes.heads / sizes.kv_heads);

        let (head_dim, value_dim) = (sizes.head_dim, sizes.value_dim);
        let q_view = unsafe { query_rows(inputs.q, sizes, head_dim, inputs.q_batch_stride) };
        let k_view = unsafe { key_rows(inputs.k, sizes, head_dim, inputs.k_batch_stride) };
        let v_view = unsafe { key_rows(inputs.v, sizes, value_dim, inputs.v_batch_stride) };
        let acc_view =
            unsafe { query_rows(outputs.acc, sizes, value_dim, outputs.acc_batch_stride) };
        let (entry, head) = (outputs.stat_batch_stride, outputs.stat_head_stride);
        let max_view = unsafe { query_statistics(outputs.row_max, sizes, entry, head) };
        let sum_view = unsafe { query_statistics(outputs.row_sum, sizes, entry, head) };
        let ks = k_view.partition(const_shape![1, BN, 1, DT]);
        let vs = v_view.partition(const_shape![1, BN, 1, DT]);

        let tq: Tile<E, { [BM, DT] }> = read(&q_view, const_shape![BM, DT], b, i, h);
        let mut state: State<BM, LANES, DT> = empty_state::<BM, LANES, DT>();
        if turn.first == 0i32 {
            state = read_state::<BM, LANES, DT>(&max_view, &sum_view, &acc_view, b, i, h);
        }

        let own: Queries<BM> = unsafe { resident_queries::<BM>(rect, b, i) };
        let tiles: Tiles = unsafe { tiles_of_keys::<BM, BN>(rect, b, i) };
        let masks: Segments = rect.segments;
        let others = unsafe { segment_rows(masks.mode, masks.keys) };
        let others = others.partition(const_shape![1, BN]);
        let row: i32 = i * BM;
        let slope: Tile<f32, { [1, 1] }> = unsafe { slope_of(rect, b, h) };

        if rect.band.window != ONE_LOOP {
            for j in tiles.inside..tiles.outside {
                let pair: Pair = Pair { b, h, hk, row, key: j * BN, tile: j };
                let parts = const_shape![BM, PARTS, LANES];
                state = unsafe {
                    visit(0i32, rect, pair, slope, own, state, parts, tq, &ks, &vs, &others)
                };
            }
        }
        for t in 0i32..cut_count(tiles) {
            let j: i32 = cut_tile(masks.mode, tiles, t);
            let pair: Pair = Pair { b, h, hk, row, key: j * BN, tile: j };
            let parts = const_shape![BM, PARTS, LANES];
            state =
                unsafe { visit(1i32, rect, pair, slope, own, state, parts, tq, &ks, &vs, &others) };
        }

        let l: Tile<f32, { [BM] }> = reduce_sum(state.l, 1i32);
        let l: Tile<f32, { [BM, 1] }> = l.reshape(const_shape![BM, 1]);
        if turn.last == 1i32 {
            let o_view = unsafe { query_rows(outputs.o, sizes, value_dim, outputs.o_batch_stride) };
            let (lse, stride) = (outputs.lse, outputs.lse_batch_stride);
            let lse_view =
                unsafe { per_row_view(lse, sizes.batch, sizes.q_len, sizes.heads, stride) };
            unsafe { conclude(state.m, l, state.acc, &o_view, &lse_view, b, i, h) };
        } else {
            unsafe { write(&acc_view, state.acc, b, i, h) };
            unsafe { write_statistics(&max_view, state.m, b, i, h) };
            unsafe { write_statistics(&sum_view, l, b, i, h) };
        }
    }

    // The record decides the arguments. They stand in groups, most of which become structs.
    #[rustfmt::skip]
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn attention_fwd<
        E: ElementType,
        const BM: i32, const BN: i32, const DT: i32, const PARTS: i32, const LANES: i32,
        const WINDOW: i32, const SEGMENTS: i32, const CAP: i32, const SLOPES: i32,
        const DROPOUT: i32,
    >(
        q: *mut E, k: *mut E, v: *mut E,
        acc: *mut f32, row_max: *mut f32, row_sum: *mut f32, o: *mut E, lse: *mut f32,
        batch: i32, q_len: i32, kv_len: i32, heads: i32, kv_heads: i32,
        head_dim: i32, value_dim: i32,
        q_batch_stride: i32, k_batch_stride: i32, v_batch_stride: i32,
        acc_batch_stride: i32, o_batch_stride: i32, lse_batch_stride: i32,
        stat_batch_stride: i32, stat_head_stride: i32,
        scale_log2: f32, lower: i32, upper: i32,
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
        let outputs = Outputs::<E> {
            acc, row_max, row_sum, o, lse,
            acc_batch_stride, o_batch_stride, lse_batch_stride, stat_batch_stride, stat_head_stride,
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
        unsafe { fold_keys::<E, BM, BN, DT, PARTS, LANES>(inputs, outputs, rect, turn) };
    }
}
