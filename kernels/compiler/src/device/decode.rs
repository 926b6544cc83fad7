//! Decode: a few queries of each sequence over keys that lie in pages.
//!
//! A *unit* is a set of queries that read one source, a sequence or a prefix. Its rows, queries of
//! all heads of a group, see keys of one key head: a row sees keys `begin ≤ i < end` of the source.
//! Tiles of `SUB` keys lie within pages. A *slice* is `slice_tiles` consecutive tiles. The slices of
//! all pairs of a unit and a key head, for each `BM` rows of the unit, make one line. Equal runs of
//! the line, cut where a pair ends, are *pieces*. A block folds the keys of a piece into a softmax
//! state, and `decode_merge` adds the states of each row in order.
//!
//! `units` holds four numbers of each unit, `[units, 4]`: the slices of one pair of this unit and of
//! all units before it, its first tile, the end of its tiles, and its source.

#[cutile::module]
pub mod decode {
    use super::super::common::common::{edge, product, read, rows_view, statistics_view};
    use super::super::common::common::{stream, write, write_statistics};
    use super::super::modes::modes::SWITCHED;
    use super::super::pages::pages::{
        Source, hidden_out, misses_pages, page_place, pairs_of, values_seen,
    };
    use super::super::pieces::pieces::{piece_in, word};
    use super::super::scores::scores::{Scoring, cap_ratio, capped};
    use super::super::segments::segments::{least, most, segments_view};
    use super::super::softmax::softmax::{State, empty_state, gather, weigh};
    use cutile::core::*;

    /// What each query of a unit sees, its position, and its slope in base 2.
    #[derive(Clone, Copy)]
    pub struct Rows<const BM: i32> {
        pub begin: Tile<i32, { [BM, 1] }>,
        pub end: Tile<i32, { [BM, 1] }>,
        pub position: Tile<i32, { [BM, 1] }>,
        pub slope: Tile<f32, { [BM, 1] }>,
    }

    /// Which positions the rows of a source have: stripes of `interleave` rows go round the ranks.
    #[derive(Clone, Copy)]
    pub struct Stripes {
        pub rank: i32,
        pub interleave: i32,
        pub world_size: i32,
    }

    /// What the tiles of a piece have in common.
    #[derive(Clone, Copy)]
    pub struct Piece {
        pub source: Source,
        pub scoring: Scoring,
        pub stripes: Stripes,
        pub head: i32,
    }

    /// Returns scores in base 2 of a tile whose first row is `first`.
    pub fn scores_of<E: ElementType, const BM: i32, const SUB: i32, const DT: i32>(
        piece: Piece,
        rows: Rows<BM>,
        q: Tile<E, { [BM, DT] }>,
        k: Tile<E, { [SUB, DT] }>,
        first: i32,
    ) -> Tile<f32, { [BM, SUB] }> {
        let s: Tile<f32, { [BM, SUB] }> = product(q, k);
        let (scoring, stripes) = (piece.scoring, piece.stripes);
        let ratio: Tile<f32, { [BM, SUB] }> = cap_ratio(s, scoring);
        let mut scores: Tile<f32, { [BM, SUB] }> = capped(s, ratio, scoring);
        if scoring.has_slopes == 1i32 {
            let (rank, interleave) = (stripes.rank, stripes.interleave);
            let world_size: i32 = stripes.world_size;
            let row: Tile<i32, { [SUB] }> = iota(const_shape![SUB]);
            let row: Tile<i32, { [SUB] }> = row + first.broadcast(const_shape![SUB]);
            let stripe: Tile<i32, { [SUB] }> = interleave.broadcast(const_shape![SUB]);
            let ranks: Tile<i32, { [SUB] }> = world_size.broadcast(const_shape![SUB]);
            let own: Tile<i32, { [SUB] }> = rank.broadcast(const_shape![SUB]);
            let round: Tile<i32, { [SUB] }> = row / stripe;
            let whole: Tile<i32, { [SUB] }> = round * ranks + own;
            let key: Tile<i32, { [SUB] }> = whole * stripe + (row - round * stripe);
            let key: Tile<i32, { [1, SUB] }> = key.reshape(const_shape![1, SUB]);
            let key: Tile<i32, { [BM, SUB] }> = key.broadcast(const_shape![BM, SUB]);
            let away: Tile<i32, { [BM, SUB] }> =
                key - rows.position.broadcast(const_shape![BM, SUB]);
            let away: Tile<f32, { [BM, SUB] }> = convert_tile(away);
            let slope: Tile<f32, { [BM, SUB] }> = rows.slope.broadcast(const_shape![BM, SUB]);
            scores = fma(away, slope, scores, rounding::NearestEven, ftz::Disabled);
        }
        scores
    }

    /// Returns the scores of a tile of keys, and its values. `cut` says that some pairs may not
    /// see each other.
    pub unsafe fn tile_of<E: ElementType, const BM: i32, const SUB: i32, const DT: i32>(
        cut: i32,
        k: &Partition<E, { [1, SUB, 1, DT] }>,
        v: &Partition<E, { [1, SUB, 1, DT] }>,
        piece: Piece,
        rows: Rows<BM>,
        q: Tile<E, { [BM, DT] }>,
        tile: i32,
    ) -> (Tile<f32, { [BM, SUB] }>, Tile<E, { [SUB, DT] }>) {
        let place = unsafe { page_place::<SUB>(cut, piece.source, tile) };
        let first: i32 = place.2;
        let tk: Tile<E, { [SUB, DT] }> = stream(k, place.0, place.1, piece.head);
        let tv: Tile<E, { [SUB, DT] }> = stream(v, place.0, place.1, piece.head);
        let mut scores: Tile<f32, { [BM, SUB] }> =
            scores_of::<E, BM, SUB, DT>(piece, rows, q, tk, first);
        let mut values: Tile<E, { [SUB, DT] }> = tv;
        if cut == 1i32 {
            let seen: Tile<bool, { [BM, SUB] }> =
                pairs_of::<BM, SUB>(rows.begin, rows.end, first, place.3);
            scores = hidden_out::<BM, SUB>(scores, seen);
            values = values_seen::<E, BM, SUB, DT>(values, seen);
        }
        (scores, values)
    }

    /// Folds step `j` of keys into the state (m, l, acc): `BN / SUB` tiles, one or four.
    pub unsafe fn fold_step<
        E: ElementType,
        const BM: i32,
        const BN: i32,
        const DT: i32,
        const PARTS: i32,
        const LANES: i32,
        const SUB: i32,
    >(
        cut: i32,
        k: &Partition<E, { [1, SUB, 1, DT] }>,
        v: &Partition<E, { [1, SUB, 1, DT] }>,
        piece: Piece,
        rows: Rows<BM>,
        state: State<BM, LANES, DT>,
        parts: Shape<{ [BM, PARTS, LANES] }>,
        q: Tile<E, { [BM, DT] }>,
        j: i32,
    ) -> State<BM, LANES, DT> {
        let mut m: Tile<f32, { [BM, 1] }> = state.m;
        let mut l: Tile<f32, { [BM, LANES] }> = state.l;
        let mut acc: Tile<f32, { [BM, DT] }> = state.acc;
        if BN == SUB {
            let one = unsafe { tile_of::<E, BM, SUB, DT>(cut, k, v, piece, rows, q, j) };
            let s: Tile<f32, { [BM, BN] }> = one.0.reshape(const_shape![BM, BN]);
            let values: Tile<E, { [BN, DT] }> = one.1.reshape(const_shape![BN, DT]);
            let weighed = weigh(s, m, l, parts, 1.0f32);
            m = weighed.2;
            l = weighed.3;
            acc = gather(weighed.0, values, acc, weighed.1);
        }
        if BN > SUB {
            let one = unsafe { tile_of::<E, BM, SUB, DT>(cut, k, v, piece, rows, q, 4i32 * j) };
            let two =
                unsafe { tile_of::<E, BM, SUB, DT>(cut, k, v, piece, rows, q, 4i32 * j + 1i32) };
            let three =
                unsafe { tile_of::<E, BM, SUB, DT>(cut, k, v, piece, rows, q, 4i32 * j + 2i32) };
            let four =
                unsafe { tile_of::<E, BM, SUB, DT>(cut, k, v, piece, rows, q, 4i32 * j + 3i32) };
            let s0: Tile<f32, { [BM, SUB] }> = one.0.reshape(const_shape![BM, SUB]);
            let s1: Tile<f32, { [BM, SUB] }> = two.0.reshape(const_shape![BM, SUB]);
            let s2: Tile<f32, { [BM, SUB] }> = three.0.reshape(const_shape![BM, SUB]);
            let s3: Tile<f32, { [BM, SUB] }> = four.0.reshape(const_shape![BM, SUB]);
            let highest: Tile<f32, { [BM, SUB] }> = max_tile(max_tile(s0, s1), max_tile(s2, s3));
            let highest: Tile<f32, { [BM] }> = reduce_max(highest, 1i32);
            let highest: Tile<f32, { [BM, 1] }> = highest.reshape(const_shape![BM, 1]);
            let new_m: Tile<f32, { [BM, 1] }> = max_tile(m, highest);
            let level: Tile<f32, { [BM, SUB] }> = new_m.broadcast(const_shape![BM, SUB]);
            let p0: Tile<f32, { [BM, SUB] }> = exp2(s0 - level, ftz::Enabled);
            let p1: Tile<f32, { [BM, SUB] }> = exp2(s1 - level, ftz::Enabled);
            let p2: Tile<f32, { [BM, SUB] }> = exp2(s2 - level, ftz::Enabled);
            let p3: Tile<f32, { [BM, SUB] }> = exp2(s3 - level, ftz::Enabled);
            let alpha: Tile<f32, { [BM, 1] }> = exp2(m - new_m, ftz::Enabled);
            m = new_m;
            let sums: Tile<f32, { [BM, SUB] }> = l.reshape(const_shape![BM, SUB]);
            let sums: Tile<f32, { [BM, SUB] }> = sums * alpha.broadcast(const_shape![BM, SUB]);
            let sums: Tile<f32, { [BM, SUB] }> = sums + ((p0 + p1) + (p2 + p3));
            l = sums.reshape(const_shape![BM, LANES]);
            let faded: Tile<f32, { [BM, DT] }> = acc * alpha.broadcast(const_shape![BM, DT]);
            let p0: Tile<E, { [BM, SUB] }> = convert_tile(p0);
            let p1: Tile<E, { [BM, SUB] }> = convert_tile(p1);
            let p2: Tile<E, { [BM, SUB] }> = convert_tile(p2);
            let p3: Tile<E, { [BM, SUB] }> = convert_tile(p3);
            let sum: Tile<f32, { [BM, DT] }> = mma(p0, one.1, faded);
            let sum: Tile<f32, { [BM, DT] }> = mma(p1, two.1, sum);
            let sum: Tile<f32, { [BM, DT] }> = mma(p2, three.1, sum);
            acc = mma(p3, four.1, sum);
        }
        State::<BM, LANES, DT> { m, l, acc }
    }

    /// Returns the steps of a piece, and the steps that every row sees which sees anything: (low,
    /// inside, outside, high). Rows see keys `begin ≤ i < end`.
    pub fn steps_of<const BM: i32, const BN: i32, const SUB: i32>(
        low_tile: i32,
        high_tile: i32,
        begin: Tile<i32, { [BM] }>,
        end: Tile<i32, { [BM] }>,
    ) -> (i32, i32, i32, i32) {
        let step: i32 = BN / SUB;
        let low: i32 = low_tile / step;
        let high: i32 = ceil_div(high_tile, step);
        let sees: Tile<bool, { [BM] }> = lt_tile(begin, end);
        let far: i32 = 2147483647i32;
        let zeros: Tile<i32, { [BM] }> = constant(0i32, const_shape![BM]);
        let fars: Tile<i32, { [BM] }> = far.broadcast(const_shape![BM]);
        let all_begin: i32 = max(low_tile * SUB, most(select(sees, begin, zeros)));
        let all_end: i32 = min(high_tile * SUB, least(select(sees, end, fars)));
        let inside: i32 = max(low, min(high, ceil_div(all_begin, BN)));
        let outside: i32 = max(inside, min(high, all_end / BN));
        (low, inside, outside, high)
    }

    /// Computes the piece of each slot: Σ p·v, the largest score in base 2, and Σ p of each row.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn decode<
        E: ElementType,
        const BM: i32,
        const BN: i32,
        const DT: i32,
        const PARTS: i32,
        const LANES: i32,
        const SUB: i32,
    >(
        q: *mut E,
        k: *mut E,
        v: *mut E,
        page_table: *mut i32,
        units: *mut i32,
        intervals: *mut i32,
        places: *mut i32,
        slopes: *mut f32,
        rank: *mut i32,
        piece_acc: *mut f32,
        piece_max: *mut f32,
        piece_sum: *mut f32,
        unit_count: i32,
        rows: i32,
        kv_heads: i32,
        head_dim: i32,
        value_dim: i32,
        pages: i32,
        page_rows: i32,
        sources: i32,
        source_pages: i32,
        page_shift: i32,
        slots: i32,
        tile_rows: i32,
        slice_tiles: i32,
        run_count: i32,
        most_slices: i32,
        scale_log2: f32,
        cap_log2: f32,
        twice_by_cap: f32,
        has_slopes: i32,
        interleave: i32,
        world_size: i32,
    ) {
        let scoring: Scoring = Scoring {
            cap: SWITCHED,
            alibi: SWITCHED,
            scale_log2,
            cap_log2,
            twice_by_cap,
            slopes,
            slopes_batch_stride: 0i32,
            has_slopes,
        };
        let pid = get_tile_block_id();
        let slot: i32 = pid.0;
        let q_view =
            unsafe { rows_view(q, unit_count * kv_heads, rows, 1i32, head_dim, rows * head_dim) };
        let k_view = unsafe {
            rows_view(k, pages, page_rows, kv_heads, head_dim, page_rows * kv_heads * head_dim)
        };
        let v_view = unsafe {
            rows_view(v, pages, page_rows, kv_heads, value_dim, page_rows * kv_heads * value_dim)
        };
        let k_part = k_view.partition(const_shape![1, SUB, 1, DT]);
        let v_part = v_view.partition(const_shape![1, SUB, 1, DT]);
        let intervals_view = unsafe { segments_view(intervals, 2i32 * unit_count, rows, rows) };
        let intervals_part = intervals_view.partition(const_shape![1, BM]);
        let acc_view = unsafe {
            rows_view(piece_acc, slots, tile_rows, 1i32, value_dim, tile_rows * value_dim)
        };
        let max_view =
            unsafe { statistics_view(piece_max, slots, 1i32, tile_rows, tile_rows, tile_rows) };
        let sum_view =
            unsafe { statistics_view(piece_sum, slots, 1i32, tile_rows, tile_rows, tile_rows) };

        let parts: i32 = ceil_div(rows, BM);
        let unit_pairs: i32 = kv_heads * parts;
        let piece =
            unsafe { piece_in(units, slot, unit_count, unit_pairs, run_count, most_slices) };
        if piece.2 > 0i32 {
            let u: i32 = piece.0 / unit_pairs;
            let pair: i32 = piece.0 - u * unit_pairs;
            let h: i32 = pair / parts;
            let part: i32 = pair - h * parts;
            let rank: i32 = unsafe { word(rank, 0i32) };
            let stripes: Stripes = Stripes { rank, interleave, world_size };

            // The tiles of the piece.
            let first_tile: i32 = unsafe { word(units, 4i32 * u + 1i32) };
            let end_tile: i32 = unsafe { word(units, 4i32 * u + 2i32) };
            let source: i32 = unsafe { word(units, 4i32 * u + 3i32) };
            let source: i32 = max(0i32, min(source, sources - 1i32));
            let from: i32 = first_tile / slice_tiles + piece.1;
            let low_tile: i32 = max(first_tile, from * slice_tiles);
            let high_tile: i32 = min(end_tile, (from + piece.2) * slice_tiles);

            let t: Tile<i32, { [1, BM] }> = intervals_part.load([2i32 * u, part]);
            let begin: Tile<i32, { [BM] }> = t.reshape(const_shape![BM]);
            let t: Tile<i32, { [1, BM] }> = intervals_part.load([2i32 * u + 1i32, part]);
            let end: Tile<i32, { [BM] }> = t.reshape(const_shape![BM]);
            let steps = steps_of::<BM, BN, SUB>(low_tile, high_tile, begin, end);
            let (low, high) = (steps.0, steps.3);
            let mut inside: i32 = steps.1;
            let mut outside: i32 = steps.2;
            let table: PointerTile<*mut i32, { [] }> = pointer_to_tile(page_table);
            let table: PointerTile<*mut i32, { [] }> = table.offset(source * source_pages);
            let table: *mut i32 = tile_to_pointer(table);
            let uneven: i32 = page_rows - page_rows / SUB * SUB;
            let misses: i32 = unsafe {
                misses_pages(table, low_tile >> page_shift, (high_tile - 1i32) >> page_shift, pages)
            };
            if misses == 1i32 || (uneven > 0i32 && source_pages > 1i32) {
                inside = low;
                outside = low;
            }
            let begin: Tile<i32, { [BM, 1] }> = begin.reshape(const_shape![BM, 1]);
            let end: Tile<i32, { [BM, 1] }> = end.reshape(const_shape![BM, 1]);

            let tq: Tile<E, { [BM, DT] }> =
                read(&q_view, const_shape![BM, DT], u * kv_heads + h, part, 0i32);
            let mut position: Tile<i32, { [BM, 1] }> = constant(0i32, const_shape![BM, 1]);
            let mut slope: Tile<f32, { [BM, 1] }> = constant(0.0f32, const_shape![BM, 1]);
            if has_slopes == 1i32 {
                let view = unsafe { segments_view(places, unit_count, rows, rows) };
                let t: Tile<i32, { [1, BM] }> = view.partition(const_shape![1, BM]).load([u, part]);
                position = t.reshape(const_shape![BM, 1]);
                let view =
                    unsafe { statistics_view(slopes, 1i32, kv_heads, rows, kv_heads * rows, rows) };
                let t: Tile<f32, { [1, 1, BM] }> =
                    view.partition(const_shape![1, 1, BM]).load([0i32, h, part]);
                let log2e: Tile<f32, { [BM, 1] }> =
                    constant(1.442695040888963407f32, const_shape![BM, 1]);
                let t: Tile<f32, { [BM, 1] }> = t.reshape(const_shape![BM, 1]);
                slope = t * log2e;
            }

            let keys: Source =
                Source { table, pages, page_rows, page_shift, first: low_tile, end: high_tile };
            let own: Piece = Piece { source: keys, scoring, stripes, head: h };
            let queries: Rows<BM> = Rows::<BM> { begin, end, position, slope };
            let mut state: State<BM, LANES, DT> = empty_state::<BM, LANES, DT>();
            for j in inside..outside {
                let shape = const_shape![BM, PARTS, LANES];
                state = unsafe {
                    fold_step::<E, BM, BN, DT, PARTS, LANES, SUB>(
                        0i32, &k_part, &v_part, own, queries, state, shape, tq, j,
                    )
                };
            }
            let mut t: i32 = 0i32;
            let cuts: i32 = (inside - low) + (high - outside);
            while t < cuts {
                let j: i32 = edge(t, low, inside, outside);
                let shape = const_shape![BM, PARTS, LANES];
                state = unsafe {
                    fold_step::<E, BM, BN, DT, PARTS, LANES, SUB>(
                        1i32, &k_part, &v_part, own, queries, state, shape, tq, j,
                    )
                };
                t = t + 1i32;
            }
            let l: Tile<f32, { [BM] }> = reduce_sum(state.l, 1i32);
            let l: Tile<f32, { [BM, 1] }> = l.reshape(const_shape![BM, 1]);
            unsafe { write(&acc_view, state.acc, slot, 0i32, 0i32) };
            unsafe { write_statistics(&max_view, state.m, slot, 0i32, 0i32) };
            unsafe { write_statistics(&sum_view, l, slot, 0i32, 0i32) };
        }
    }
}
