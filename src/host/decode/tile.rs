//! Where the rows of a tile lie, and the prefetch of the next tile.

use std::ops::Range;

use super::DecodeIo;
use crate::host::array::HostArray;
use crate::host::simd::Simd;

/// Rows of a tile, the number of bits of [`Seen`]. The keys and values of a tile, and of the next
/// one, fit a core's cache.
pub(super) const TILE: usize = 32;
/// Rows of a tile that a query sees, one bit for each.
pub(super) type Seen = u32;
/// Adjacent keys whose scores a vector holds, for each row of a block.
pub(super) const QUAD: usize = 4;
/// Quads of a tile.
pub(super) const QUADS: usize = TILE / QUAD;
/// Bytes of a cache line.
const LINE: usize = 64;

/// Addresses of a tile's rows in the first head of a task.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// First row of the tile, a multiple of [`TILE`].
    pub first: usize,
    /// Rows that exist and that the task needs. The addresses of all other rows are those of zeros.
    pub present: Seen,
    pub keys: [*const u8; TILE],
    pub values: [*const u8; TILE],
}

impl Tile {
    /// Finds the rows of a source from `first` on that lie in `rows`. `zeros` is the address of a
    /// row of zeros.
    #[inline(always)]
    pub fn find(
        io: &DecodeIo<'_>,
        (source, kv_head): (usize, usize),
        (first, rows): (usize, &Range<usize>),
        zeros: *const u8,
    ) -> Tile {
        let mut tile = Tile { first, present: 0, keys: [zeros; TILE], values: [zeros; TILE] };
        let (start, end) = (first.max(rows.start), rows.end.min(first + TILE));
        let page_rows = io.k.rows.len();
        let pages = &io.page_table[source * io.pages_per_source..][..io.pages_per_source];
        let mut row = start;
        while row < end {
            let until = end.min((row / page_rows + 1) * page_rows);
            let page = usize::try_from(pages[row / page_rows]).ok();
            if let Some(page) = page.filter(|page| *page < io.k.batch) {
                for at in row..until {
                    let address = |array: &HostArray| array.row(page, at % page_rows, kv_head);
                    tile.keys[at - first] = address(&io.k);
                    tile.values[at - first] = address(&io.v);
                    tile.present |= 1 << (at - first);
                }
            }
            row = until;
        }
        tile
    }

    /// Returns the rows of the tile that lie in `rows` and are present.
    #[inline(always)]
    pub fn seen(&self, rows: &Range<usize>) -> Seen {
        let below = |row: usize| match row.saturating_sub(self.first) {
            count @ 0..TILE => (1 << count) - 1,
            _ => Seen::MAX,
        };
        below(rows.end) & !below(rows.start) & self.present
    }
}

/// The prefetch of the rows that a task reads next, in quads of rows.
#[derive(Clone, Copy)]
pub(super) struct Ahead<'a> {
    /// This tile and the next one.
    pub tiles: [&'a Tile; 2],
    /// Bytes of a head in a row of keys and in a row of values. Heads are adjacent.
    pub bytes: [usize; 2],
}

impl Ahead<'_> {
    /// Asks for a quad of rows of one head. Quads of this tile's keys, of its values, of the next
    /// tile's keys and of its values count on.
    #[inline(always)]
    pub fn fetch<S: Simd>(&self, simd: S, quad: usize, head: usize) {
        let (side, first) = (quad / QUADS, quad % QUADS * QUAD);
        let Tile { keys, values, .. } = self.tiles[side / 2 % 2];
        let (rows, bytes) =
            if side % 2 == 0 { (keys, self.bytes[0]) } else { (values, self.bytes[1]) };
        for skip in (0..bytes).step_by(LINE) {
            for row in &rows[first..first + QUAD] {
                simd.prefetch_far(row.wrapping_add(head * bytes + skip));
            }
        }
    }
}
