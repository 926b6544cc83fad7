//! The sums of decode over latents: the weights that `latent_weights` left, times the values, which
//! are the first columns of the keys.
//!
//! Units, slices, pieces and their states are those of `decode`, and `decode_merge` adds the states.
//! Sums of all columns do not fit a block's registers, so each piece has a block for every `DT`
//! columns of values.

#[cutile::module]
pub mod latent_values {
    use super::super::common::common::{edge, read_statistics, rows_view, statistics_view};
    use super::super::common::common::{stream_columns, write_columns, write_statistics};
    use super::super::modes::modes::ABSENT;
    use super::super::pages::pages::{page_place, pairs_of, values_seen};
    use super::super::pieces::pieces::elements;
    use super::super::scores::scores::Scoring;
    use super::super::units::units::{Piece, Place, Rows, Task, Units};
    use super::super::units::units::{place_of, rows_of, task_of};
    use cutile::core::*;

    /// Of each row the level of its weights, and their sum.
    #[derive(Clone, Copy)]
    pub struct Level<const BM: i32> {
        pub m: Tile<f32, { [1, BM] }>,
        pub l: Tile<f32, { [1, BM] }>,
    }

    /// Returns the level of a piece, the largest of its tiles `low..high`, and the sum of its weights
    /// relative to it, from the levels and sums of tiles, whose first are at `first` of the arrays.
    pub unsafe fn level_of<const BM: i32, const AT: i32, const N: i32>(
        tile_max: *mut f32,
        tile_sum: *mut f32,
        low: i32,
        high: i32,
        first: i32,
        padded_rows: i32,
        none: Tile<f32, { [1, BM] }>,
    ) -> Level<BM> {
        let mut m: Tile<f32, { [1, BM] }> = none;
        let mut l: Tile<f32, { [1, BM] }> = constant(0.0f32, const_shape![1, BM]);
        let mut start: i32 = low;
        while start < high {
            let index: Tile<i32, { [N] }> = iota(const_shape![N]);
            let rows: i32 = BM;
            let rows: Tile<i32, { [N] }> = rows.broadcast(const_shape![N]);
            let within: Tile<i32, { [N] }> = index / rows;
            let row: Tile<i32, { [N] }> = index - within * rows;
            let tile: Tile<i32, { [N] }> = within + start.broadcast(const_shape![N]);
            let wanted: Tile<bool, { [N] }> = lt_tile(tile, high.broadcast(const_shape![N]));
            let at: Tile<i32, { [N] }> = tile * padded_rows.broadcast(const_shape![N]) + row;
            let at: Tile<i32, { [N] }> = at + first.broadcast(const_shape![N]);
            let t: Tile<f32, { [N] }> = unsafe { elements(tile_max, at, wanted, -1.0e38f32) };
            let levels: Tile<f32, { [AT, BM] }> = t.reshape(const_shape![AT, BM]);
            let t: Tile<f32, { [N] }> = unsafe { elements(tile_sum, at, wanted, 0.0f32) };
            let sums: Tile<f32, { [AT, BM] }> = t.reshape(const_shape![AT, BM]);
            let highest: Tile<f32, { [BM] }> = reduce_max(levels, 0i32);
            let highest: Tile<f32, { [1, BM] }> = highest.reshape(const_shape![1, BM]);
            let new_m: Tile<f32, { [1, BM] }> = max_tile(m, highest);
            let factor: Tile<f32, { [AT, BM] }> =
                exp2(levels - new_m.broadcast(const_shape![AT, BM]), ftz::Enabled);
            let sum: Tile<f32, { [BM] }> = reduce_sum(sums * factor, 0i32);
            let sum: Tile<f32, { [1, BM] }> = sum.reshape(const_shape![1, BM]);
            l = l * exp2(m - new_m, ftz::Enabled) + sum;
            m = new_m;
            start = start + AT;
        }
        Level::<BM> { m, l }
    }

    /// Returns the sums with those of tile `tile`. `cut` says that no query may see some of its keys.
    pub unsafe fn add_tile<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
        cut: i32,
        k: &Partition<E, { [1, BN, 1, DT] }>,
        weights: &Partition<E, { [1, BM, 1, BN] }>,
        tile_max: &Tensor<f32, { [-1, -1, -1] }>,
        piece: Piece,
        rows: Rows<BM>,
        heads: i32,
        part: i32,
        column: i32,
        level: Tile<f32, { [BM, 1] }>,
        tile: i32,
        sums: Tile<f32, { [BM, DT] }>,
    ) -> Tile<f32, { [BM, DT] }> {
        let place = unsafe { page_place::<BN>(cut, piece.source, tile) };
        let mut values: Tile<E, { [BN, DT] }> =
            stream_columns(k, place.0, place.1, piece.head, column);
        let p: Tile<E, { [BM, BN] }> = stream_columns(weights, heads, part, 0i32, tile);
        let m: Tile<f32, { [BM, 1] }> = read_statistics::<BM>(tile_max, heads, part, tile);
        let m: Tile<f32, { [BM, 1] }> = m.reshape(const_shape![BM, 1]);
        let level: Tile<f32, { [BM, 1] }> = level.reshape(const_shape![BM, 1]);
        let factor: Tile<f32, { [BM, 1] }> = exp2(m - level, ftz::Enabled);
        let p: Tile<f32, { [BM, BN] }> = convert_tile(p);
        let p: Tile<f32, { [BM, BN] }> = p * factor.broadcast(const_shape![BM, BN]);
        let p: Tile<E, { [BM, BN] }> = convert_tile(p);
        if cut == 1i32 {
            let seen: Tile<bool, { [BM, BN] }> =
                pairs_of::<BM, BN>(rows.begin, rows.end, place.2, place.3);
            values = values_seen::<E, BM, BN, DT>(values, seen);
        }
        mma(p, values, sums)
    }

    /// Computes the piece of each slot: Σ p·v, the level of p in base 2, and Σ p of each row.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn latent_values<E: ElementType, const BM: i32, const BN: i32, const DT: i32>(
        k: *mut E,
        page_table: *mut i32,
        units: *mut i32,
        intervals: *mut i32,
        rank: *mut i32,
        weights: *mut E,
        tile_max: *mut f32,
        tile_sum: *mut f32,
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
        capacity: i32,
        tiles: i32,
        padded_rows: i32,
        slots: i32,
        tile_rows: i32,
        slice_tiles: i32,
        run_count: i32,
        most_slices: i32,
    ) {
        // Scores are no matter here.
        let scoring: Scoring = Scoring {
            cap: ABSENT,
            alibi: ABSENT,
            scale_log2: 1.0f32,
            cap_log2: 0.0f32,
            twice_by_cap: 0.0f32,
            slopes: piece_max,
            slopes_batch_stride: 0i32,
            has_slopes: 0i32,
        };
        let call: Units = Units {
            table: page_table,
            units,
            intervals,
            places: rank,
            slopes: piece_max,
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
            interleave: 1i32,
            world_size: 1i32,
        };
        let pid = get_tile_block_id();
        let columns: i32 = ceil_div(value_dim, DT);
        let slot: i32 = pid.0 / columns;
        let column: i32 = pid.0 - slot * columns;
        let count: i32 = unit_count * kv_heads;
        let k_view = unsafe {
            rows_view(k, pages, page_rows, kv_heads, head_dim, page_rows * kv_heads * head_dim)
        };
        let k_part = k_view.partition(const_shape![1, BN, 1, DT]);
        let weight_view =
            unsafe { rows_view(weights, count, rows, 1i32, capacity, rows * capacity) };
        let weight_part = weight_view.partition(const_shape![1, BM, 1, BN]);
        let size: i32 = tiles * padded_rows;
        let tile_max_view =
            unsafe { statistics_view(tile_max, count, tiles, padded_rows, size, padded_rows) };
        let acc_view = unsafe {
            rows_view(piece_acc, slots, tile_rows, 1i32, value_dim, tile_rows * value_dim)
        };
        let max_view =
            unsafe { statistics_view(piece_max, slots, 1i32, tile_rows, tile_rows, tile_rows) };
        let sum_view =
            unsafe { statistics_view(piece_sum, slots, 1i32, tile_rows, tile_rows, tile_rows) };

        let place: Place = unsafe { place_of::<BM>(call, slot, run_count, most_slices) };
        if place.length > 0i32 {
            let queries: Rows<BM> = unsafe { rows_of::<BM>(call, place, 0i32) };
            let task: Task = unsafe { task_of::<BM, BN, BN>(call, scoring, place, queries) };
            let (u, h, part): (i32, i32, i32) = (place.u, place.h, place.part);
            let own: Piece = task.piece;
            let (low, inside, outside, high): (i32, i32, i32, i32) =
                (task.low, task.inside, task.outside, task.high);
            let heads: i32 = u * kv_heads + h;
            let none: Tile<f32, { [1, BM] }> = constant(-1.0e38f32, const_shape![1, BM]);
            let first: i32 = heads * size + part * BM;
            let whole: Level<BM> = unsafe {
                level_of::<BM, 16, 1024>(tile_max, tile_sum, low, high, first, padded_rows, none)
            };
            let level: Tile<f32, { [BM, 1] }> = whole.m.reshape(const_shape![BM, 1]);
            let sum: Tile<f32, { [BM, 1] }> = whole.l.reshape(const_shape![BM, 1]);
            let mut sums: Tile<f32, { [BM, DT] }> = constant(0.0f32, const_shape![BM, DT]);
            for j in inside..outside {
                sums = unsafe {
                    add_tile::<E, BM, BN, DT>(
                        0i32,
                        &k_part,
                        &weight_part,
                        &tile_max_view,
                        own,
                        queries,
                        heads,
                        part,
                        column,
                        level,
                        j,
                        sums,
                    )
                };
            }
            let mut t: i32 = 0i32;
            let cuts: i32 = (inside - low) + (high - outside);
            while t < cuts {
                let j: i32 = edge(t, low, inside, outside);
                sums = unsafe {
                    add_tile::<E, BM, BN, DT>(
                        1i32,
                        &k_part,
                        &weight_part,
                        &tile_max_view,
                        own,
                        queries,
                        heads,
                        part,
                        column,
                        level,
                        j,
                        sums,
                    )
                };
                t = t + 1i32;
            }
            unsafe { write_columns(&acc_view, sums, slot, 0i32, 0i32, column) };
            if column == 0i32 {
                unsafe { write_statistics(&max_view, level, slot, 0i32, 0i32) };
                unsafe { write_statistics(&sum_view, sum, slot, 0i32, 0i32) };
            }
        }
    }
}
