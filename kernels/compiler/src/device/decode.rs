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
    use super::super::pages::pages::{hidden_out, page_place, pairs_of, values_seen};
    use super::super::scores::scores::Scoring;
    use super::super::softmax::softmax::{State, empty_state, gather, weigh};
    use super::super::units::units::{Piece, Place, Rows, Task, Units};
    use super::super::units::units::{place_of, rows_of, scores_of, task_of};
    use cutile::core::*;

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
        let s: Tile<f32, { [BM, SUB] }> = product(q, tk);
        let mut scores: Tile<f32, { [BM, SUB] }> = scores_of::<BM, SUB>(piece, rows, s, first);
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
        let call: Units = Units {
            table: page_table,
            units,
            intervals,
            places,
            slopes,
            rank,
            unit_count,
            rows,
            kv_heads,
            pages,
            page_rows,
            sources,
            source_pages,
            page_shift,
            slice_tiles,
            interleave,
            world_size,
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
        let acc_view = unsafe {
            rows_view(piece_acc, slots, tile_rows, 1i32, value_dim, tile_rows * value_dim)
        };
        let max_view =
            unsafe { statistics_view(piece_max, slots, 1i32, tile_rows, tile_rows, tile_rows) };
        let sum_view =
            unsafe { statistics_view(piece_sum, slots, 1i32, tile_rows, tile_rows, tile_rows) };

        let place: Place = unsafe { place_of::<BM>(call, slot, run_count, most_slices) };
        if place.length > 0i32 {
            let queries: Rows<BM> = unsafe { rows_of::<BM>(call, place, has_slopes) };
            let task: Task = unsafe { task_of::<BM, BN, SUB>(call, scoring, place, queries) };
            let (u, h, part): (i32, i32, i32) = (place.u, place.h, place.part);
            let own: Piece = task.piece;
            let (low, inside, outside, high): (i32, i32, i32, i32) =
                (task.low, task.inside, task.outside, task.high);
            let tq: Tile<E, { [BM, DT] }> =
                read(&q_view, const_shape![BM, DT], u * kv_heads + h, part, 0i32);
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
