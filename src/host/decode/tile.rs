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

/// The prefetch of a tile's rows, line by line in the order of memory.
pub(super) struct Ahead {
    tile: Tile,
    /// Lines of a row of keys, and of a row of values, in the heads of the task.
    lines: [usize; 2],
    /// Index of the next piece: row of keys, row of values, next row of keys, and so on.
    piece: usize,
    /// The next line of the piece.
    line: usize,
    /// Lines for each unit of work.
    pace: usize,
}

impl Ahead {
    /// Spreads the lines of a tile over `units` units of work.
    #[inline(always)]
    pub fn new(tile: Tile, bytes: [usize; 2], units: usize) -> Ahead {
        let lines = bytes.map(|bytes| bytes.div_ceil(LINE));
        let pace = (TILE * (lines[0] + lines[1])).div_ceil(units.max(1));
        Ahead { tile, lines, piece: 0, line: 0, pace }
    }

    /// Asks for the lines of some units of work.
    #[inline(always)]
    pub fn fetch<S: Simd>(&mut self, simd: S, units: usize) {
        let mut left = units * self.pace;
        while left > 0 && self.piece < 2 * TILE {
            let (row, side) = (self.piece / 2, self.piece % 2);
            let rows = if side == 0 { &self.tile.keys } else { &self.tile.values };
            let count = left.min(self.lines[side] - self.line);
            let first = rows[row].wrapping_add(self.line * LINE);
            for line in 0..count {
                simd.prefetch_far(first.wrapping_add(line * LINE));
            }
            left -= count;
            self.line += count;
            if self.line == self.lines[side] {
                (self.piece, self.line) = (self.piece + 1, 0);
            }
        }
    }
}
