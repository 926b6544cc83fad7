//! Masks as data in the attention kernels: which pairs of a tile see each other, the counted
//! positions of rows, and which tiles a block visits. [`masks`](super::masks) says how rows are packed.

#[cutile::module]
pub mod visible {
    use super::super::modes::modes::PACKED;
    use super::super::scores::scores::alike;
    use super::super::segments::segments::{MaskRows, Segments, limit_of};
    use super::super::segments::segments::{numbers_view, segment_rows};
    use cutile::core::*;

    /// What masks say of queries that stay: segment, counted position, position.
    #[derive(Clone, Copy)]
    pub struct Queries<const BM: i32> {
        pub segment: Tile<i32, { [BM, 1] }>,
        pub counted: Tile<i32, { [BM, 1] }>,
        pub position: Tile<i32, { [BM, 1] }>,
    }

    /// What masks say of keys that stay: segment, counted position, two intervals.
    #[derive(Clone, Copy)]
    pub struct Keys<const BN: i32> {
        pub segment: Tile<i32, { [BN, 1] }>,
        pub counted: Tile<i32, { [BN, 1] }>,
        pub start: Tile<i32, { [BN, 1] }>,
        pub stop: Tile<i32, { [BN, 1] }>,
        pub also_start: Tile<i32, { [BN, 1] }>,
        pub also_stop: Tile<i32, { [BN, 1] }>,
    }

    /// The streamed tiles of a block: nothing cuts `inside..outside`; `begin..inside` and
    /// `outside..end` are cut.
    ///
    /// Where masks are data, tiles lie in four runs. Then `end − outside` tiles are cut, of which
    /// `before` come before `inside`. [`run_tile`] numbers all tiles: run n has the numbers from
    /// `from` on, and a tile is `shift` more than its number.
    #[derive(Clone, Copy)]
    pub struct Tiles {
        pub begin: i32,
        pub inside: i32,
        pub outside: i32,
        pub end: i32,
        pub before: i32,
        pub shift0: i32,
        pub from1: i32,
        pub shift1: i32,
        pub from2: i32,
        pub shift2: i32,
        pub from3: i32,
        pub shift3: i32,
    }

    /// Returns packed number `n` of a tile of rows.
    pub fn packed<const C: i32>(
        part: &Partition<i32, { [1, C] }>,
        b: i32,
        tile: i32,
        n: i32,
    ) -> Tile<i32, { [1, C] }> {
        part.load([6i32 * b + n, tile])
    }

    /// Returns packed number `n` of a tile of rows, as a column.
    pub fn packed_rows<const R: i32>(
        part: &Partition<i32, { [1, R] }>,
        b: i32,
        tile: i32,
        n: i32,
    ) -> Tile<i32, { [R, 1] }> {
        let numbers: Tile<i32, { [1, R] }> = packed(part, b, tile, n);
        numbers.reshape(const_shape![R, 1])
    }

    /// Returns the counted positions of a tile of rows.
    pub unsafe fn counted_columns<const C: i32>(
        side: MaskRows,
        b: i32,
        tile: i32,
    ) -> Tile<i32, { [1, C] }> {
        let view = unsafe { segment_rows(PACKED, side) };
        packed(&view.partition(const_shape![1, C]), b, tile, 1i32)
    }

    /// Returns the pairs among `seen` that are of the `same` segment, with the query's position in an
    /// interval of the key. Either side may be the rows of the tile.
    pub fn shown<
        const QR: i32,
        const QC: i32,
        const KR: i32,
        const KC: i32,
        const R: i32,
        const C: i32,
    >(
        position: Tile<i32, { [QR, QC] }>,
        start: Tile<i32, { [KR, KC] }>,
        stop: Tile<i32, { [KR, KC] }>,
        also_start: Tile<i32, { [KR, KC] }>,
        also_stop: Tile<i32, { [KR, KC] }>,
        same: Tile<bool, { [R, C] }>,
        seen: Tile<bool, { [R, C] }>,
    ) -> Tile<bool, { [R, C] }> {
        let position: Tile<i32, { [R, C] }> = position.broadcast(const_shape![R, C]);
        let start: Tile<i32, { [R, C] }> = start.broadcast(const_shape![R, C]);
        let stop: Tile<i32, { [R, C] }> = stop.broadcast(const_shape![R, C]);
        let first: Tile<bool, { [R, C] }> = ge_tile(position, start) & lt_tile(position, stop);
        let start: Tile<i32, { [R, C] }> = also_start.broadcast(const_shape![R, C]);
        let stop: Tile<i32, { [R, C] }> = also_stop.broadcast(const_shape![R, C]);
        let second: Tile<bool, { [R, C] }> = ge_tile(position, start) & lt_tile(position, stop);
        let either: Tile<bool, { [R, C] }> = first | second;
        let shown: Tile<bool, { [R, C] }> = either & same;
        seen & shown
    }

    /// Returns the pairs among `seen` that data allow, of queries by row and keys by column.
    pub unsafe fn shown_across<const BM: i32, const BN: i32>(
        own: Queries<BM>,
        keys: MaskRows,
        b: i32,
        tile: i32,
        seen: Tile<bool, { [BM, BN] }>,
    ) -> Tile<bool, { [BM, BN] }> {
        let view = unsafe { segment_rows(PACKED, keys) };
        let part = view.partition(const_shape![1, BN]);
        let segment: Tile<i32, { [1, BN] }> = packed(&part, b, tile, 0i32);
        let start: Tile<i32, { [1, BN] }> = packed(&part, b, tile, 2i32);
        let stop: Tile<i32, { [1, BN] }> = packed(&part, b, tile, 3i32);
        let also_start: Tile<i32, { [1, BN] }> = packed(&part, b, tile, 4i32);
        let also_stop: Tile<i32, { [1, BN] }> = packed(&part, b, tile, 5i32);
        let same: Tile<bool, { [BM, BN] }> = alike(own.segment, segment);
        shown(own.position, start, stop, also_start, also_stop, same, seen)
    }

    /// Returns the pairs among `seen` that data allow, of keys by row and queries by column.
    pub unsafe fn shown_down<const BM: i32, const BN: i32>(
        own: Keys<BN>,
        queries: MaskRows,
        b: i32,
        tile: i32,
        seen: Tile<bool, { [BN, BM] }>,
    ) -> Tile<bool, { [BN, BM] }> {
        let view = unsafe { segment_rows(PACKED, queries) };
        let part = view.partition(const_shape![1, BM]);
        let segment: Tile<i32, { [1, BM] }> = packed(&part, b, tile, 0i32);
        let position: Tile<i32, { [1, BM] }> = packed(&part, b, tile, 2i32);
        let (start, stop) = (own.start, own.stop);
        let (also_start, also_stop) = (own.also_start, own.also_stop);
        let same: Tile<bool, { [BN, BM] }> = alike(own.segment, segment);
        shown(position, start, stop, also_start, also_stop, same, seen)
    }

    /// Returns a view of the results of `mask_runs`, `[batch, ⌈rows / 128⌉, 10]` at `base`.
    pub unsafe fn runs_view(
        base: *mut i32,
        batch: i32,
        rows: i32,
    ) -> Tensor<i32, { [-1, -1, 10] }> {
        let blocks: i32 = ceil_div(rows, 128i32);
        unsafe { numbers_view::<10>(base, batch, blocks, 10i32 * blocks) }
    }

    /// Returns tiles without runs, for launches whose masks are no data.
    pub fn without_runs(begin: i32, inside: i32, outside: i32, end: i32) -> Tiles {
        Tiles {
            begin,
            inside,
            outside,
            end,
            before: inside,
            shift0: inside,
            from1: inside,
            shift1: inside,
            from2: inside,
            shift2: inside,
            from3: inside,
            shift3: inside,
        }
    }

    /// Returns the runs of `BS` streamed rows that data let rows from `first` on see, and that lie
    /// in `begin..end`.
    pub unsafe fn run_tiles<const BS: i32>(
        masks: Segments,
        resident: MaskRows,
        b: i32,
        first: i32,
        begin: i32,
        inside: i32,
        outside: i32,
        end: i32,
    ) -> Tiles {
        let view = unsafe { runs_view(masks.ranges, resident.batch, resident.rows) };
        let block: i32 = first / 128i32;
        let begin0: i32 = min(end, max(begin, limit_of(&view, b, block, 0i32) / BS));
        let end0: i32 = min(end, max(begin0, ceil_div(limit_of(&view, b, block, 1i32), BS)));
        let begin1: i32 = min(end, max(end0, limit_of(&view, b, block, 2i32) / BS));
        let end1: i32 = min(end, max(begin1, ceil_div(limit_of(&view, b, block, 3i32), BS)));
        let begin2: i32 = min(end, max(end1, limit_of(&view, b, block, 4i32) / BS));
        let end2: i32 = min(end, max(begin2, ceil_div(limit_of(&view, b, block, 5i32), BS)));
        let begin3: i32 = min(end, max(end2, limit_of(&view, b, block, 6i32) / BS));
        let end3: i32 = min(end, max(begin3, ceil_div(limit_of(&view, b, block, 7i32), BS)));
        let same: i32 = ceil_div(limit_of(&view, b, block, 8i32), BS);
        let differs: i32 = limit_of(&view, b, block, 9i32) / BS;
        let inside: i32 = min(end, max(max(begin, inside), same));
        let outside: i32 = min(end, max(inside, min(outside, differs)));
        let from1: i32 = end0 - begin0;
        let from2: i32 = from1 + (end1 - begin1);
        let from3: i32 = from2 + (end2 - begin2);
        let all: i32 = from3 + (end3 - begin3);
        // The tiles of each run before `inside`.
        let before0: i32 = max(0i32, min(end0, inside) - begin0);
        let before1: i32 = max(0i32, min(end1, inside) - begin1);
        let before2: i32 = max(0i32, min(end2, inside) - begin2);
        let before3: i32 = max(0i32, min(end3, inside) - begin3);
        let before: i32 = before0 + before1 + before2 + before3;
        let count: i32 = all - (outside - inside);
        Tiles {
            begin: inside,
            inside,
            outside,
            end: outside + count,
            before,
            shift0: begin0,
            from1,
            shift1: begin1 - from1,
            from2,
            shift2: begin2 - from2,
            from3,
            shift3: begin3 - from3,
        }
    }

    /// Returns the `t`-th tile that is cut, of tiles in four runs.
    pub fn run_tile(t: i32, tiles: Tiles) -> i32 {
        let n: i32 = if t < tiles.before { t } else { t + (tiles.outside - tiles.inside) };
        let low: i32 = if n < tiles.from1 { n + tiles.shift0 } else { n + tiles.shift1 };
        let high: i32 = if n < tiles.from3 { n + tiles.shift2 } else { n + tiles.shift3 };
        if n < tiles.from2 { low } else { high }
    }
}
