//! Which tiles a block visits: tiles that a limit of the band or of a mask cuts, and tiles that
//! nothing cuts.

#[cutile::module]
pub mod walk {
    use super::super::common::common::{edge, streamed};
    use super::super::modes::modes::{ABSENT, ONE_LOOP, PACKED, is_on};
    use super::super::pairs::pairs::{Band, Rectangle};
    use super::super::segments::segments::{MaskRows, narrowed, segment_column, segment_rows};
    use super::super::visible::visible::{
        Keys, Queries, Tiles, packed_rows, run_tile, run_tiles, without_runs,
    };
    use cutile::core::*;

    /// Returns the number of tiles that are cut.
    pub fn cut_count(tiles: Tiles) -> i32 {
        (tiles.inside - tiles.begin) + (tiles.end - tiles.outside)
    }

    /// Returns the `t`-th tile that is cut. `segments` is the mode.
    pub fn cut_tile(segments: i32, tiles: Tiles, t: i32) -> i32 {
        let mut tile: i32 = edge(t, tiles.begin, tiles.inside, tiles.outside);
        if segments == PACKED {
            tile = run_tile(t, tiles);
        }
        tile
    }

    /// Returns the tiles of `BN` keys that query tile `i` visits.
    pub unsafe fn tiles_of_keys<const BM: i32, const BN: i32>(
        rect: Rectangle,
        b: i32,
        i: i32,
    ) -> Tiles {
        let band: Band = rect.band;
        let row: i32 = i * BM;
        let last_row: i32 = min(row + BM, rect.sizes.q_len) - 1i32;
        let found = streamed::<BN>(row, last_row, band.lower, band.upper, rect.sizes.kv_len);
        let (inside, outside) = (found.1, max(found.1, found.2));
        let resident: MaskRows = rect.segments.queries;
        unsafe {
            masked_tiles::<BN>(rect, resident, b, row, last_row, found.0, inside, outside, found.3)
        }
    }

    /// Returns the tiles of `BM` queries that key tile `j` visits.
    pub unsafe fn tiles_of_queries<const BM: i32, const BN: i32>(
        rect: Rectangle,
        b: i32,
        j: i32,
    ) -> Tiles {
        // Query rows i that see key rows key..=last_key: −upper ≤ i − j ≤ −lower.
        let (low, high) = (0i32 - rect.band.upper, 0i32 - rect.band.lower);
        let key: i32 = j * BN;
        let last_key: i32 = min(key + BN, rect.sizes.kv_len) - 1i32;
        let found = streamed::<BM>(key, last_key, low, high, rect.sizes.q_len);
        let mut inside: i32 = min(found.1, found.2);
        let mut outside: i32 = found.2;
        if rect.band.window == ABSENT {
            // Nothing cuts the last tiles: queries beyond the end read as 0 and add 0.
            inside = found.1;
            outside = found.3;
        }
        let resident: MaskRows = rect.segments.keys;
        unsafe {
            masked_tiles::<BM>(rect, resident, b, key, last_key, found.0, inside, outside, found.3)
        }
    }

    /// Returns the tiles of `BS` streamed rows that rows `first..=last` visit, of tiles
    /// `begin..end` that the band lets them see. The band cuts no tile of `inside..outside`.
    pub unsafe fn masked_tiles<const BS: i32>(
        rect: Rectangle,
        resident: MaskRows,
        b: i32,
        first: i32,
        last: i32,
        begin: i32,
        inside: i32,
        outside: i32,
        end: i32,
    ) -> Tiles {
        let (band, masks) = (rect.band, rect.segments);
        let mut tiles: Tiles = without_runs(begin, inside, outside, end);
        if is_on(masks.mode, masks.switch) && band.lower <= band.upper {
            let seen = unsafe {
                narrowed::<BS>(masks, resident, b, first, last, begin, inside, outside, end)
            };
            tiles = without_runs(seen.0, seen.1, seen.2, seen.3);
        }
        if band.window == ONE_LOOP {
            tiles = without_runs(tiles.begin, tiles.inside, tiles.inside, tiles.end);
        }
        if masks.mode == PACKED {
            let (inside, outside) = (tiles.inside, tiles.outside);
            tiles = without_runs(inside, inside, outside, outside);
            if band.lower <= band.upper {
                tiles = unsafe {
                    run_tiles::<BS>(masks, resident, b, first, begin, inside, outside, end)
                };
            }
        }
        tiles
    }

    /// Returns what masks say of query tile `i`; zeros where there are none.
    pub unsafe fn resident_queries<const BM: i32>(rect: Rectangle, b: i32, i: i32) -> Queries<BM> {
        let (band, masks) = (rect.band, rect.segments);
        let view = unsafe { segment_rows(masks.mode, masks.queries) };
        let part = view.partition(const_shape![1, BM]);
        let mut segment: Tile<i32, { [BM, 1] }> = constant(0i32, const_shape![BM, 1]);
        let mut counted: Tile<i32, { [BM, 1] }> = segment;
        let mut position: Tile<i32, { [BM, 1] }> = segment;
        if is_on(masks.mode, masks.switch) && band.lower <= band.upper {
            segment = segment_column(&part, b, i);
        }
        if masks.mode == PACKED && band.lower <= band.upper {
            segment = packed_rows(&part, b, i, 0i32);
            counted = packed_rows(&part, b, i, 1i32);
            position = packed_rows(&part, b, i, 2i32);
        }
        Queries::<BM> { segment, counted, position }
    }

    /// Returns what masks say of key tile `j`; zeros where there are none.
    pub unsafe fn resident_keys<const BN: i32>(rect: Rectangle, b: i32, j: i32) -> Keys<BN> {
        let (band, masks) = (rect.band, rect.segments);
        let view = unsafe { segment_rows(masks.mode, masks.keys) };
        let part = view.partition(const_shape![1, BN]);
        let mut segment: Tile<i32, { [BN, 1] }> = constant(0i32, const_shape![BN, 1]);
        let mut counted: Tile<i32, { [BN, 1] }> = segment;
        let mut start: Tile<i32, { [BN, 1] }> = segment;
        let mut stop: Tile<i32, { [BN, 1] }> = segment;
        let mut also_start: Tile<i32, { [BN, 1] }> = segment;
        let mut also_stop: Tile<i32, { [BN, 1] }> = segment;
        if is_on(masks.mode, masks.switch) && band.lower <= band.upper {
            segment = segment_column(&part, b, j);
        }
        if masks.mode == PACKED && band.lower <= band.upper {
            segment = packed_rows(&part, b, j, 0i32);
            counted = packed_rows(&part, b, j, 1i32);
            start = packed_rows(&part, b, j, 2i32);
            stop = packed_rows(&part, b, j, 3i32);
            also_start = packed_rows(&part, b, j, 4i32);
            also_stop = packed_rows(&part, b, j, 5i32);
        }
        Keys::<BN> { segment, counted, start, stop, also_start, also_stop }
    }
}
