//! Which tiles a block visits: tiles that a limit of the band or of a mask cuts, and tiles that
//! nothing cuts.

#[cutile::module]
pub mod walk {
    use super::super::common::common::{edge, streamed};
    use super::super::modes::modes::{ABSENT, ONE_LOOP, PACKED, is_on};
    use super::super::pairs::pairs::Rectangle;
    use super::super::segments::segments::{narrowed, segment_rows};
    use super::super::visible::visible::no_runs;
    use super::super::visible::visible::{Keys, Queries, Runs, packed_rows, run_tile, run_tiles};
    use cutile::core::*;

    /// The streamed tiles of a block: nothing cuts `inside..outside`; `begin..inside` and
    /// `outside..end` are cut. Where masks are data, `runs` says which tiles are cut.
    #[derive(Clone, Copy)]
    pub struct Tiles {
        pub begin: i32,
        pub inside: i32,
        pub outside: i32,
        pub end: i32,
        pub runs: Runs,
    }

    /// What a block of queries knows before its loops.
    #[derive(Clone, Copy)]
    pub struct QueryWalk<const BM: i32> {
        pub own: Queries<BM>,
        pub tiles: Tiles,
    }

    /// What a block of keys knows before its loops.
    #[derive(Clone, Copy)]
    pub struct KeyWalk<const BN: i32> {
        pub own: Keys<BN>,
        pub tiles: Tiles,
    }

    /// Returns the number of tiles that are cut.
    pub fn cut_count(tiles: Tiles) -> i32 {
        (tiles.inside - tiles.begin) + (tiles.end - tiles.outside)
    }

    /// Returns the `t`-th tile that is cut. `segments` is the mode.
    pub fn cut_tile(segments: i32, tiles: Tiles, t: i32) -> i32 {
        let mut tile: i32 = edge(t, tiles.begin, tiles.inside, tiles.outside);
        if segments == PACKED {
            tile = run_tile(t, tiles.outside - tiles.inside, tiles.runs);
        }
        tile
    }

    /// Returns the tiles of `BN` keys that query tile `i` visits, and what masks say of its rows.
    pub unsafe fn walk_of_queries<const BM: i32, const BN: i32>(
        rect: Rectangle,
        b: i32,
        i: i32,
    ) -> QueryWalk<BM> {
        let (sizes, band, masks) = (rect.sizes, rect.band, rect.segments);
        let row: i32 = i * BM;
        let last_row: i32 = min(row + BM, sizes.q_len) - 1i32;
        let tiles = streamed::<BN>(row, last_row, band.lower, band.upper, sizes.kv_len);
        let mut begin: i32 = tiles.0;
        let mut inside: i32 = tiles.1;
        let mut outside: i32 = max(tiles.1, tiles.2);
        let mut end: i32 = tiles.3;

        let view = unsafe { segment_rows(masks.mode, masks.queries) };
        let part = view.partition(const_shape![1, BM]);
        let mut segment: Tile<i32, { [BM, 1] }> = constant(0i32, const_shape![BM, 1]);
        if is_on(masks.mode, masks.switch) && band.lower <= band.upper {
            let t: Tile<i32, { [1, BM] }> = part.load([b, i]);
            segment = t.reshape(const_shape![BM, 1]);
            let narrow = unsafe {
                narrowed::<BN>(masks, masks.queries, b, row, last_row, begin, inside, outside, end)
            };
            begin = narrow.0;
            inside = narrow.1;
            outside = narrow.2;
            end = narrow.3;
        }
        if band.window == ONE_LOOP {
            outside = inside;
        }
        let mut counted: Tile<i32, { [BM, 1] }> = segment;
        let mut position: Tile<i32, { [BM, 1] }> = segment;
        let mut runs: Runs = no_runs(inside);
        if masks.mode == PACKED {
            begin = inside;
            end = outside;
            if band.lower <= band.upper {
                segment = packed_rows(&part, b, i, 0i32);
                counted = packed_rows(&part, b, i, 1i32);
                position = packed_rows(&part, b, i, 2i32);
                let (first, past) = (tiles.0, tiles.3);
                runs = unsafe {
                    run_tiles::<BN>(masks, masks.queries, b, row, first, inside, outside, past)
                };
                inside = runs.inside;
                outside = runs.outside;
                begin = inside;
                end = outside + runs.count;
            }
        }
        let own: Queries<BM> = Queries::<BM> { segment, counted, position };
        let tiles: Tiles = Tiles { begin, inside, outside, end, runs };
        QueryWalk::<BM> { own, tiles }
    }

    /// Returns the tiles of `BM` queries that key tile `j` visits, and what masks say of its rows.
    pub unsafe fn walk_of_keys<const BM: i32, const BN: i32>(
        rect: Rectangle,
        b: i32,
        j: i32,
    ) -> KeyWalk<BN> {
        let (sizes, band, masks) = (rect.sizes, rect.band, rect.segments);
        // Query rows i that see key rows key..=last_key: −upper ≤ i − j ≤ −lower.
        let key: i32 = j * BN;
        let last_key: i32 = min(key + BN, sizes.kv_len) - 1i32;
        let (low, high) = (0i32 - band.upper, 0i32 - band.lower);
        let tiles = streamed::<BM>(key, last_key, low, high, sizes.q_len);
        let mut begin: i32 = tiles.0;
        let mut inside: i32 = min(tiles.1, tiles.2);
        let mut outside: i32 = tiles.2;
        let mut end: i32 = tiles.3;
        if band.window == ABSENT {
            // Nothing cuts the last tiles: queries beyond the end read as 0 and add 0.
            inside = tiles.1;
            outside = tiles.3;
        }

        let view = unsafe { segment_rows(masks.mode, masks.keys) };
        let part = view.partition(const_shape![1, BN]);
        let mut segment: Tile<i32, { [BN, 1] }> = constant(0i32, const_shape![BN, 1]);
        if is_on(masks.mode, masks.switch) && band.lower <= band.upper {
            let t: Tile<i32, { [1, BN] }> = part.load([b, j]);
            segment = t.reshape(const_shape![BN, 1]);
            let narrow = unsafe {
                narrowed::<BM>(masks, masks.keys, b, key, last_key, begin, inside, outside, end)
            };
            begin = narrow.0;
            inside = narrow.1;
            outside = narrow.2;
            end = narrow.3;
        }
        if band.window == ONE_LOOP {
            outside = inside;
        }
        let mut counted: Tile<i32, { [BN, 1] }> = segment;
        let mut start: Tile<i32, { [BN, 1] }> = segment;
        let mut stop: Tile<i32, { [BN, 1] }> = segment;
        let mut also_start: Tile<i32, { [BN, 1] }> = segment;
        let mut also_stop: Tile<i32, { [BN, 1] }> = segment;
        let mut runs: Runs = no_runs(inside);
        if masks.mode == PACKED {
            begin = inside;
            end = outside;
            if band.lower <= band.upper {
                segment = packed_rows(&part, b, j, 0i32);
                counted = packed_rows(&part, b, j, 1i32);
                start = packed_rows(&part, b, j, 2i32);
                stop = packed_rows(&part, b, j, 3i32);
                also_start = packed_rows(&part, b, j, 4i32);
                also_stop = packed_rows(&part, b, j, 5i32);
                let (first, past) = (tiles.0, tiles.3);
                runs = unsafe {
                    run_tiles::<BM>(masks, masks.keys, b, key, first, inside, outside, past)
                };
                inside = runs.inside;
                outside = runs.outside;
                begin = inside;
                end = outside + runs.count;
            }
        }
        let own: Keys<BN> = Keys::<BN> { segment, counted, start, stop, also_start, also_stop };
        let tiles: Tiles = Tiles { begin, inside, outside, end, runs };
        KeyWalk::<BN> { own, tiles }
    }
}
