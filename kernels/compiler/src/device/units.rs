//! Units of decode: which keys the rows of a piece see, and their scores.

#[cutile::module]
pub mod units {
    use super::super::common::common::statistics_view;
    use super::super::pages::pages::{Source, misses_pages};
    use super::super::pieces::pieces::{piece_in, word};
    use super::super::scores::scores::{Scoring, cap_ratio, capped};
    use super::super::segments::segments::{least, most, segments_view};
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

    /// The arguments of a launch that say which keys the rows of a unit see.
    #[derive(Clone, Copy)]
    pub struct Units {
        pub table: *mut i32,
        pub units: *mut i32,
        pub intervals: *mut i32,
        pub places: *mut i32,
        pub slopes: *mut f32,
        pub rank: *mut i32,
        pub unit_count: i32,
        pub rows: i32,
        pub kv_heads: i32,
        pub pages: i32,
        pub page_rows: i32,
        pub sources: i32,
        pub source_pages: i32,
        pub page_shift: i32,
        pub slice_tiles: i32,
        pub interleave: i32,
        pub world_size: i32,
    }

    /// Which piece a slot has: `length` slices from `first` on, of rows `part · BM` and on of unit `u`
    /// with key head `h`. An empty slot has none.
    #[derive(Clone, Copy)]
    pub struct Place {
        pub u: i32,
        pub h: i32,
        pub part: i32,
        pub first: i32,
        pub length: i32,
    }

    /// What a block computes: steps `low..high` of keys, of which `inside..outside` need no masks.
    #[derive(Clone, Copy)]
    pub struct Task {
        pub low: i32,
        pub inside: i32,
        pub outside: i32,
        pub high: i32,
        pub piece: Piece,
    }

    /// Returns scores in base 2 of a tile whose first row is `first`, given its products.
    pub fn scores_of<const BM: i32, const SUB: i32>(
        piece: Piece,
        rows: Rows<BM>,
        s: Tile<f32, { [BM, SUB] }>,
        first: i32,
    ) -> Tile<f32, { [BM, SUB] }> {
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

    /// Returns the piece of a slot.
    pub unsafe fn place_of<const BM: i32>(
        units: Units,
        slot: i32,
        run_count: i32,
        most_slices: i32,
    ) -> Place {
        let parts: i32 = ceil_div(units.rows, BM);
        let unit_pairs: i32 = units.kv_heads * parts;
        let (table, count): (*mut i32, i32) = (units.units, units.unit_count);
        let piece = unsafe { piece_in(table, slot, count, unit_pairs, run_count, most_slices) };
        let u: i32 = piece.0 / unit_pairs;
        let pair: i32 = piece.0 - u * unit_pairs;
        let h: i32 = pair / parts;
        let part: i32 = pair - h * parts;
        Place { u, h, part, first: piece.1, length: piece.2 }
    }

    /// Returns the rows of a piece: the keys that each sees, and with slopes its position and its
    /// slope.
    pub unsafe fn rows_of<const BM: i32>(units: Units, place: Place, has_slopes: i32) -> Rows<BM> {
        let (u, h, part): (i32, i32, i32) = (place.u, place.h, place.part);
        let (unit_count, count): (i32, i32) = (units.unit_count, units.rows);
        let view = unsafe { segments_view(units.intervals, 2i32 * unit_count, count, count) };
        let intervals = view.partition(const_shape![1, BM]);
        let t: Tile<i32, { [1, BM] }> = intervals.load([2i32 * u, part]);
        let begin: Tile<i32, { [BM, 1] }> = t.reshape(const_shape![BM, 1]);
        let t: Tile<i32, { [1, BM] }> = intervals.load([2i32 * u + 1i32, part]);
        let end: Tile<i32, { [BM, 1] }> = t.reshape(const_shape![BM, 1]);
        let mut position: Tile<i32, { [BM, 1] }> = constant(0i32, const_shape![BM, 1]);
        let mut slope: Tile<f32, { [BM, 1] }> = constant(0.0f32, const_shape![BM, 1]);
        if has_slopes == 1i32 {
            let view = unsafe { segments_view(units.places, unit_count, count, count) };
            let t: Tile<i32, { [1, BM] }> = view.partition(const_shape![1, BM]).load([u, part]);
            position = t.reshape(const_shape![BM, 1]);
            let kv_heads: i32 = units.kv_heads;
            let view = unsafe {
                statistics_view(units.slopes, 1i32, kv_heads, count, kv_heads * count, count)
            };
            let t: Tile<f32, { [1, 1, BM] }> =
                view.partition(const_shape![1, 1, BM]).load([0i32, h, part]);
            let log2e: Tile<f32, { [BM, 1] }> =
                constant(1.442695040888963407f32, const_shape![BM, 1]);
            let t: Tile<f32, { [BM, 1] }> = t.reshape(const_shape![BM, 1]);
            slope = t * log2e;
        }
        Rows::<BM> { begin, end, position, slope }
    }

    /// Returns the task of a piece.
    pub unsafe fn task_of<const BM: i32, const BN: i32, const SUB: i32>(
        units: Units,
        scoring: Scoring,
        place: Place,
        rows: Rows<BM>,
    ) -> Task {
        let (u, length): (i32, i32) = (place.u, place.length);
        let (pages, page_rows): (i32, i32) = (units.pages, units.page_rows);
        let (page_shift, slice_tiles): (i32, i32) = (units.page_shift, units.slice_tiles);
        let rank: i32 = unsafe { word(units.rank, 0i32) };
        let stripes: Stripes =
            Stripes { rank, interleave: units.interleave, world_size: units.world_size };

        // The tiles of the piece.
        let first_tile: i32 = unsafe { word(units.units, 4i32 * u + 1i32) };
        let end_tile: i32 = unsafe { word(units.units, 4i32 * u + 2i32) };
        let source: i32 = unsafe { word(units.units, 4i32 * u + 3i32) };
        let source: i32 = max(0i32, min(source, units.sources - 1i32));
        let from: i32 = first_tile / slice_tiles + place.first;
        let first: i32 = max(first_tile, from * slice_tiles);
        let end: i32 = min(end_tile, (from + length) * slice_tiles);
        let table: PointerTile<*mut i32, { [] }> = pointer_to_tile(units.table);
        let table: PointerTile<*mut i32, { [] }> = table.offset(source * units.source_pages);
        let table: *mut i32 = tile_to_pointer(table);

        let row_begin: Tile<i32, { [BM] }> = rows.begin.reshape(const_shape![BM]);
        let row_end: Tile<i32, { [BM] }> = rows.end.reshape(const_shape![BM]);
        let steps = steps_of::<BM, BN, SUB>(first, end, row_begin, row_end);
        let (low, high) = (steps.0, steps.3);
        let mut inside: i32 = steps.1;
        let mut outside: i32 = steps.2;
        let uneven: i32 = page_rows - page_rows / SUB * SUB;
        let misses: i32 =
            unsafe { misses_pages(table, first >> page_shift, (end - 1i32) >> page_shift, pages) };
        if misses == 1i32 || (uneven > 0i32 && units.source_pages > 1i32) {
            inside = low;
            outside = low;
        }
        let source: Source = Source { table, pages, page_rows, page_shift, first, end };
        let piece: Piece = Piece { source, scoring, stripes, head: place.h };
        Task { low, inside, outside, high, piece }
    }
}
