//! The weights of decode over latents: a tile's scores become weights in memory, relative to each
//! row's largest score in the tile. `latent_values` multiplies them with the values.
//!
//! Units, slices and pieces are those of `decode`. Tiles of keys have three parts of columns: twice
//! `DT`, and the next `RT`. Columns beyond the array's end read as zero.

#[cutile::module]
pub mod latent_weights {
    use super::super::common::common::{edge, product, read_columns, rows_view, statistics_view};
    use super::super::common::common::{stream_columns, write_columns, write_statistics};
    use super::super::modes::modes::SWITCHED;
    use super::super::pages::pages::{hidden_out, page_place, pairs_of};
    use super::super::pieces::pieces::piece_in;
    use super::super::scores::scores::Scoring;
    use super::super::units::units::{Piece, Rows, Task, Units, rows_of, scores_of, task_of};
    use cutile::core::*;

    /// The rows of queries in the three parts of the columns.
    #[derive(Clone, Copy)]
    pub struct Queries<E: ElementType, const BM: i32, const DT: i32, const RT: i32> {
        pub first: Tile<E, { [BM, DT] }>,
        pub second: Tile<E, { [BM, DT] }>,
        pub rest: Tile<E, { [BM, RT] }>,
    }

    /// Which tile of `DT` columns is the second part, and which of `RT` columns is the rest.
    #[derive(Clone, Copy)]
    pub struct Columns {
        pub second: i32,
        pub rest: i32,
    }

    /// The weights of a tile, and of each row their level in base 2 and their sum.
    #[derive(Clone, Copy)]
    pub struct Weights<E: ElementType, const BM: i32, const BN: i32> {
        pub p: Tile<E, { [BM, BN] }>,
        pub m: Tile<f32, { [BM, 1] }>,
        pub l: Tile<f32, { [BM, 1] }>,
    }

    /// Returns the weights of a tile. `cut` says that some pairs may
    /// not see each other.
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
        let place = unsafe { page_place::<BN>(cut, piece.source, tile) };
        let (page, within, first): (i32, i32, i32) = (place.0, place.1, place.2);
        let k0: Tile<E, { [BN, DT] }> = stream_columns(k, page, within, piece.head, 0i32);
        let k1: Tile<E, { [BN, DT] }> = stream_columns(k, page, within, piece.head, columns.second);
        let k2: Tile<E, { [BN, RT] }> =
            stream_columns(k_rest, page, within, piece.head, columns.rest);
        let of_first: Tile<f32, { [BM, BN] }> = product(q.first, k0);
        let of_second: Tile<f32, { [BM, BN] }> = product(q.second, k1);
        let of_rest: Tile<f32, { [BM, BN] }> = product(q.rest, k2);
        let of_rest: Tile<f32, { [BM, BN] }> = of_rest.reshape(const_shape![BM, BN]);
        let s: Tile<f32, { [BM, BN] }> = of_first + of_second;
        let s: Tile<f32, { [BM, BN] }> = s + of_rest;
        let mut scores: Tile<f32, { [BM, BN] }> = scores_of::<BM, BN>(piece, rows, s, first);
        if cut == 1i32 {
            let seen: Tile<bool, { [BM, BN] }> =
                pairs_of::<BM, BN>(rows.begin, rows.end, first, place.3);
            scores = hidden_out::<BM, BN>(scores, seen);
        }
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
            // Where there is no second part, or no rest, any tile stands for it, with queries of 0.
            let second: i32 = if head_dim > DT { 1i32 } else { 0i32 };
            let rest: i32 = min(2i32 * DT / RT, (head_dim - 1i32) / RT);
            let columns: Columns = Columns { second, rest };
            let heads: i32 = u * kv_heads + h;
            let q_first: Tile<E, { [BM, DT] }> =
                read_columns(&q_view, const_shape![BM, DT], heads, part, 0i32, 0i32);
            let t: Tile<E, { [BM, DT] }> =
                read_columns(&q_view, const_shape![BM, DT], heads, part, 0i32, second);
            let mut q_second: Tile<E, { [BM, DT] }> = t;
            if head_dim <= DT {
                q_second = constant(E::ZERO, const_shape![BM, DT]);
            }
            let t: Tile<E, { [BM, RT] }> =
                read_columns(&q_view, const_shape![BM, RT], heads, part, 0i32, rest);
            let mut q_rest: Tile<E, { [BM, RT] }> = t;
            if head_dim <= 2i32 * DT {
                q_rest = constant(E::ZERO, const_shape![BM, RT]);
            }
            let q: Queries<E, BM, DT, RT> =
                Queries::<E, BM, DT, RT> { first: q_first, second: q_second, rest: q_rest };
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
