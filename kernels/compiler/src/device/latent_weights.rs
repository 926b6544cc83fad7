//! The weights of decode over latents: a tile's scores become weights in memory, relative to each
//! row's largest score in the tile. `latent_values` multiplies them with the values.
//!
//! Units, slices and pieces are those of `decode`, tiles of keys and their columns those of `latents`.

#[cutile::module]
pub mod latent_weights {
    use super::super::common::common::{edge, rows_view, statistics_view};
    use super::super::common::common::{write_columns, write_statistics};
    use super::super::latents::latents::{Columns, Queries, columns_of, latent_tile, queries_of};
    use super::super::modes::modes::SWITCHED;
    use super::super::scores::scores::Scoring;
    use super::super::units::units::{Piece, Place, Rows, Task, Units};
    use super::super::units::units::{place_of, rows_of, task_of};
    use cutile::core::*;

    /// The weights of a tile, and of each row their level in base 2 and their sum.
    #[derive(Clone, Copy)]
    pub struct Weights<E: ElementType, const BM: i32, const BN: i32> {
        pub p: Tile<E, { [BM, BN] }>,
        pub m: Tile<f32, { [BM, 1] }>,
        pub l: Tile<f32, { [BM, 1] }>,
    }

    /// Returns the weights of a tile. `cut` says that some pairs may not see each other.
    ///
    /// ```text
    /// m = rowmax s;  p = 2^(s−m);  l = rowsum p
    /// ```
    pub unsafe fn weights_of<
        E: ElementType,
        const BM: i32,
        const BN: i32,
        const DT: i32,
        const RT: i32,
    >(
        cut: i32,
        piece: Piece,
        columns: Columns,
        rows: Rows<BM>,
        q: Queries<E, BM, DT, RT>,
        k: &Partition<E, { [1, BN, 1, DT] }>,
        k_rest: &Partition<E, { [1, BN, 1, RT] }>,
        tile: i32,
        least: Tile<f32, { [BM, 1] }>,
    ) -> Weights<E, BM, BN> {
        let found = unsafe {
            latent_tile::<E, BM, BN, DT, RT>(cut, k, k_rest, piece, columns, rows, q, tile)
        };
        let scores: Tile<f32, { [BM, BN] }> = found.0.reshape(const_shape![BM, BN]);
        let highest: Tile<f32, { [BM] }> = reduce_max(scores, 1i32);
        let highest: Tile<f32, { [BM, 1] }> = highest.reshape(const_shape![BM, 1]);
        let m: Tile<f32, { [BM, 1] }> = max_tile(least, highest);
        let p: Tile<f32, { [BM, BN] }> =
            exp2(scores - m.broadcast(const_shape![BM, BN]), ftz::Enabled);
        let l: Tile<f32, { [BM] }> = reduce_sum(p, 1i32);
        let l: Tile<f32, { [BM, 1] }> = l.reshape(const_shape![BM, 1]);
        let p: Tile<E, { [BM, BN] }> = convert_tile(p);
        Weights::<E, BM, BN> { p, m, l }
    }

    /// Computes the weights of all tiles of the piece in each slot.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn latent_weights<
        E: ElementType,
        const BM: i32,
        const BN: i32,
        const DT: i32,
        const RT: i32,
    >(
        q: *mut E,
        k: *mut E,
        page_table: *mut i32,
        units: *mut i32,
        intervals: *mut i32,
        places: *mut i32,
        slopes: *mut f32,
        rank: *mut i32,
        weights: *mut E,
        tile_max: *mut f32,
        tile_sum: *mut f32,
        unit_count: i32,
        rows: i32,
        kv_heads: i32,
        head_dim: i32,
        pages: i32,
        page_rows: i32,
        sources: i32,
        source_pages: i32,
        page_shift: i32,
        capacity: i32,
        tiles: i32,
        padded_rows: i32,
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
        let slot: i32 = get_tile_block_id().0;
        let count: i32 = unit_count * kv_heads;
        let q_view = unsafe { rows_view(q, count, rows, 1i32, head_dim, rows * head_dim) };
        let k_view = unsafe {
            rows_view(k, pages, page_rows, kv_heads, head_dim, page_rows * kv_heads * head_dim)
        };
        let k_part = k_view.partition(const_shape![1, BN, 1, DT]);
        let rest_part = k_view.partition(const_shape![1, BN, 1, RT]);
        let weight_view =
            unsafe { rows_view(weights, count, rows, 1i32, capacity, rows * capacity) };
        let size: i32 = tiles * padded_rows;
        let max_view =
            unsafe { statistics_view(tile_max, count, tiles, padded_rows, size, padded_rows) };
        let sum_view =
            unsafe { statistics_view(tile_sum, count, tiles, padded_rows, size, padded_rows) };

        let place: Place = unsafe { place_of::<BM>(call, slot, run_count, most_slices) };
        if place.length > 0i32 {
            let queries: Rows<BM> = unsafe { rows_of::<BM>(call, place, has_slopes) };
            let task: Task = unsafe { task_of::<BM, BN, BN>(call, scoring, place, queries) };
            let (u, h, part): (i32, i32, i32) = (place.u, place.h, place.part);
            let own: Piece = task.piece;
            let (low, inside, outside, high): (i32, i32, i32, i32) =
                (task.low, task.inside, task.outside, task.high);
            let columns: Columns = columns_of::<DT, RT>(head_dim, 0i32);
            let none: Tile<E, { [BM, DT] }> = constant(E::ZERO, const_shape![BM, DT]);
            let rest: Tile<E, { [BM, RT] }> = constant(E::ZERO, const_shape![BM, RT]);
            let heads: i32 = u * kv_heads + h;
            let q: Queries<E, BM, DT, RT> =
                queries_of(&q_view, heads, part, head_dim, columns, none, rest);
            let least: Tile<f32, { [BM, 1] }> = constant(-1.0e38f32, const_shape![BM, 1]);
            for j in inside..outside {
                let found: Weights<E, BM, BN> = unsafe {
                    weights_of::<E, BM, BN, DT, RT>(
                        0i32, own, columns, queries, q, &k_part, &rest_part, j, least,
                    )
                };
                unsafe { write_columns(&weight_view, found.p, heads, part, 0i32, j) };
                unsafe { write_statistics(&max_view, found.m, heads, part, j) };
                unsafe { write_statistics(&sum_view, found.l, heads, part, j) };
            }
            let mut t: i32 = 0i32;
            let cuts: i32 = (inside - low) + (high - outside);
            while t < cuts {
                let j: i32 = edge(t, low, inside, outside);
                let found: Weights<E, BM, BN> = unsafe {
                    weights_of::<E, BM, BN, DT, RT>(
                        1i32, own, columns, queries, q, &k_part, &rest_part, j, least,
                    )
                };
                unsafe { write_columns(&weight_view, found.p, heads, part, 0i32, j) };
                unsafe { write_statistics(&max_view, found.m, heads, part, j) };
                unsafe { write_statistics(&sum_view, found.l, heads, part, j) };
                t = t + 1i32;
            }
        }
    }
}
