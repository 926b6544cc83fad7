//! Decode over latents: the values are the first columns of the keys, so a block reads them once.
//!
//! Units, slices, pieces and their states are those of `decode`, and `decode_merge` adds the states.
//! Sums of weighted values of all columns do not fit a block's registers. So each piece has a block
//! for every `DT` columns of values. Tiles of keys have three parts of columns: the block's values,
//! the other `DT` of the first 2 · `DT`, and the next `RT`. Columns beyond the array's end read as
//! zero. Scores add the parts in an order that is the same in all blocks of a piece, bit by bit, so
//! the first block's statistics hold for all.

#[cutile::module]
pub mod decode_latents {
    use super::super::common::common::{edge, product, read_columns, rows_view, statistics_view};
    use super::super::common::common::{stream_columns, write_columns, write_statistics};
    use super::super::modes::modes::SWITCHED;
    use super::super::pages::pages::{hidden_out, page_place, pairs_of, values_seen};
    use super::super::pieces::pieces::piece_in;
    use super::super::scores::scores::Scoring;
    use super::super::softmax::softmax::{State, empty_state, gather, weigh};
    use super::super::units::units::{Piece, Rows, Task, Units, rows_of, scores_of, task_of};
    use cutile::core::*;

    /// The rows of queries in the three parts of the columns.
    #[derive(Clone, Copy)]
    pub struct Queries<E: ElementType, const BM: i32, const DT: i32, const RT: i32> {
        pub own: Tile<E, { [BM, DT] }>,
        pub other: Tile<E, { [BM, DT] }>,
        pub rest: Tile<E, { [BM, RT] }>,
    }

    /// Which tile of `DT` columns is the block's and which is the other, and which of `RT` columns
    /// is the rest.
    #[derive(Clone, Copy)]
    pub struct Columns {
        pub own: i32,
        pub other: i32,
        pub rest: i32,
    }

    /// Folds tile `tile` of keys into the state (m, l, acc). `cut` says that some pairs may not see
    /// each other.
    pub unsafe fn fold_tile<
        E: ElementType,
        const BM: i32,
        const BN: i32,
        const DT: i32,
        const RT: i32,
        const PARTS: i32,
        const LANES: i32,
    >(
        cut: i32,
        k: &Partition<E, { [1, BN, 1, DT] }>,
        k_rest: &Partition<E, { [1, BN, 1, RT] }>,
        piece: Piece,
        columns: Columns,
        rows: Rows<BM>,
        q: Queries<E, BM, DT, RT>,
        state: State<BM, LANES, DT>,
        parts: Shape<{ [BM, PARTS, LANES] }>,
        tile: i32,
    ) -> State<BM, LANES, DT> {
        let place = unsafe { page_place::<BN>(cut, piece.source, tile) };
        let (page, within, first): (i32, i32, i32) = (place.0, place.1, place.2);
        let own: Tile<E, { [BN, DT] }> = stream_columns(k, page, within, piece.head, columns.own);
        let other: Tile<E, { [BN, DT] }> =
            stream_columns(k, page, within, piece.head, columns.other);
        let rest: Tile<E, { [BN, RT] }> =
            stream_columns(k_rest, page, within, piece.head, columns.rest);
        let of_own: Tile<f32, { [BM, BN] }> = product(q.own, own);
        let of_other: Tile<f32, { [BM, BN] }> = product(q.other, other);
        let of_rest: Tile<f32, { [BM, BN] }> = product(q.rest, rest);
        let of_rest: Tile<f32, { [BM, BN] }> = of_rest.reshape(const_shape![BM, BN]);
        let s: Tile<f32, { [BM, BN] }> = of_own + of_other;
        let s: Tile<f32, { [BM, BN] }> = s + of_rest;
        let mut scores: Tile<f32, { [BM, BN] }> = scores_of::<BM, BN>(piece, rows, s, first);
        let mut values: Tile<E, { [BN, DT] }> = own;
        if cut == 1i32 {
            let seen: Tile<bool, { [BM, BN] }> =
                pairs_of::<BM, BN>(rows.begin, rows.end, first, place.3);
            scores = hidden_out::<BM, BN>(scores, seen);
            values = values_seen::<E, BM, BN, DT>(values, seen);
        }
        let weighed = weigh(scores, state.m, state.l, parts, 1.0f32);
        let m: Tile<f32, { [BM, 1] }> = weighed.2;
        let l: Tile<f32, { [BM, LANES] }> = weighed.3;
        let acc: Tile<f32, { [BM, DT] }> = gather(weighed.0, values, state.acc, weighed.1);
        State::<BM, LANES, DT> { m, l, acc }
    }

    /// Computes the piece of each slot: Σ p·v, the largest score in base 2, and Σ p of each row.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn decode_latents<
        E: ElementType,
        const BM: i32,
        const BN: i32,
        const DT: i32,
        const RT: i32,
        const PARTS: i32,
        const LANES: i32,
    >(
        q: *mut E,
        k: *mut E,
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
        let halves: i32 = ceil_div(value_dim, DT);
        let slot: i32 = pid.0 / halves;
        let half: i32 = pid.0 - slot * halves;
        let q_view =
            unsafe { rows_view(q, unit_count * kv_heads, rows, 1i32, head_dim, rows * head_dim) };
        let k_view = unsafe {
            rows_view(k, pages, page_rows, kv_heads, head_dim, page_rows * kv_heads * head_dim)
        };
        let k_part = k_view.partition(const_shape![1, BN, 1, DT]);
        let rest_part = k_view.partition(const_shape![1, BN, 1, RT]);
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
            let queries: Rows<BM> = unsafe { rows_of::<BM>(call, u, h, part, has_slopes) };
            let task: Task =
                unsafe { task_of::<BM, BN, BN>(call, scoring, u, h, piece.1, piece.2, queries) };
            let own: Piece = task.piece;
            let (low, inside, outside, high): (i32, i32, i32, i32) =
                (task.low, task.inside, task.outside, task.high);
            // Where there are no other columns, or no rest, any tile stands for them, with queries
            // of 0.
            let other: i32 = if head_dim > DT { 1i32 - half } else { 0i32 };
            let rest: i32 = min(2i32 * DT / RT, (head_dim - 1i32) / RT);
            let columns: Columns = Columns { own: half, other, rest };
            let heads: i32 = u * kv_heads + h;
            let q_own: Tile<E, { [BM, DT] }> =
                read_columns(&q_view, const_shape![BM, DT], heads, part, 0i32, half);
            let t: Tile<E, { [BM, DT] }> =
                read_columns(&q_view, const_shape![BM, DT], heads, part, 0i32, other);
            let mut q_other: Tile<E, { [BM, DT] }> = t;
            if head_dim <= DT {
                q_other = constant(E::ZERO, const_shape![BM, DT]);
            }
            let t: Tile<E, { [BM, RT] }> =
                read_columns(&q_view, const_shape![BM, RT], heads, part, 0i32, rest);
            let mut q_rest: Tile<E, { [BM, RT] }> = t;
            if head_dim <= 2i32 * DT {
                q_rest = constant(E::ZERO, const_shape![BM, RT]);
            }
            let q: Queries<E, BM, DT, RT> =
                Queries::<E, BM, DT, RT> { own: q_own, other: q_other, rest: q_rest };
            let mut state: State<BM, LANES, DT> = empty_state::<BM, LANES, DT>();
            for j in inside..outside {
                let shape = const_shape![BM, PARTS, LANES];
                state = unsafe {
                    fold_tile::<E, BM, BN, DT, RT, PARTS, LANES>(
                        0i32, &k_part, &rest_part, own, columns, queries, q, state, shape, j,
                    )
                };
            }
            let mut t: i32 = 0i32;
            let cuts: i32 = (inside - low) + (high - outside);
            while t < cuts {
                let j: i32 = edge(t, low, inside, outside);
                let shape = const_shape![BM, PARTS, LANES];
                state = unsafe {
                    fold_tile::<E, BM, BN, DT, RT, PARTS, LANES>(
                        1i32, &k_part, &rest_part, own, columns, queries, q, state, shape, j,
                    )
                };
                t = t + 1i32;
            }
            let l: Tile<f32, { [BM] }> = reduce_sum(state.l, 1i32);
            let l: Tile<f32, { [BM, 1] }> = l.reshape(const_shape![BM, 1]);
            unsafe { write_columns(&acc_view, state.acc, slot, 0i32, 0i32, half) };
            if half == 0i32 {
                unsafe { write_statistics(&max_view, state.m, slot, 0i32, 0i32) };
                unsafe { write_statistics(&sum_view, l, slot, 0i32, 0i32) };
            }
        }
    }
}
