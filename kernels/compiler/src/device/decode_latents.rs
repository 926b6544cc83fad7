//! Decode over latents: the values are the first columns of the keys, so a block reads them once.
//!
//! Units, slices, pieces and their states are those of `decode`, and `decode_merge` adds the states.
//! Sums of weighted values of all columns do not fit a block's registers. So each piece has a block
//! for every `DT` columns of values. All blocks of a piece get the same scores (see `latents`), so the
//! first block's statistics hold for all.

#[cutile::module]
pub mod decode_latents {
    use super::super::common::common::{edge, rows_view, statistics_view};
    use super::super::common::common::{write_columns, write_statistics};
    use super::super::latents::latents::{Columns, Queries, columns_of, latent_tile, queries_of};
    use super::super::modes::modes::SWITCHED;
    use super::super::scores::scores::Scoring;
    use super::super::softmax::softmax::{State, empty_state, gather, weigh};
    use super::super::units::units::{Piece, Place, Rows, Task, Units};
    use super::super::units::units::{place_of, rows_of, task_of};
    use cutile::core::*;

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
        let found = unsafe {
            latent_tile::<E, BM, BN, DT, RT>(cut, k, k_rest, piece, columns, rows, q, tile)
        };
        let scores: Tile<f32, { [BM, BN] }> = found.0.reshape(const_shape![BM, BN]);
        let values: Tile<E, { [BN, DT] }> = found.1.reshape(const_shape![BN, DT]);
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

        let place: Place = unsafe { place_of::<BM>(call, slot, run_count, most_slices) };
        if place.length > 0i32 {
            let queries: Rows<BM> = unsafe { rows_of::<BM>(call, place, has_slopes) };
            let task: Task = unsafe { task_of::<BM, BN, BN>(call, scoring, place, queries) };
            let (u, h, part): (i32, i32, i32) = (place.u, place.h, place.part);
            let own: Piece = task.piece;
            let (low, inside, outside, high): (i32, i32, i32, i32) =
                (task.low, task.inside, task.outside, task.high);
            let columns: Columns = columns_of::<DT, RT>(head_dim, half);
            let none: Tile<E, { [BM, DT] }> = constant(E::ZERO, const_shape![BM, DT]);
            let rest: Tile<E, { [BM, RT] }> = constant(E::ZERO, const_shape![BM, RT]);
            let heads: i32 = u * kv_heads + h;
            let q: Queries<E, BM, DT, RT> =
                queries_of(&q_view, heads, part, head_dim, columns, none, rest);
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
