//! The blocks of a launch, and the tiles that each streams.

use crate::kernel::{Kernel, Role};
use crate::launch::Rectangle;
use crate::tiles::TileShape;

/// Most groups of equal blocks. Of longer rectangles, neighbouring tiles are one group with the mean
/// of its ends.
const MOST_GROUPS: usize = 64;

/// How a kernel divides a rectangle.
#[derive(Debug, Clone, Copy)]
pub(super) struct Streams {
    /// Whether blocks keep keys and stream queries.
    keeps_keys: bool,
    /// Rows that a block keeps.
    kept: usize,
    /// Rows of a tile that it streams.
    step: usize,
    /// Whether a block that keeps keys goes through all query heads that share them.
    shares_keys: bool,
}

impl Streams {
    /// Blocks that keep queries and stream keys.
    pub const fn queries(kept: usize, step: usize) -> Streams {
        Streams { keeps_keys: false, kept, step, shares_keys: false }
    }

    /// Blocks that keep keys and stream the queries of one head.
    pub const fn keys(kept: usize, step: usize) -> Streams {
        Streams { keeps_keys: true, kept, step, shares_keys: false }
    }

    /// Returns how a kernel of this library divides a rectangle.
    pub fn of(kernel: Kernel, tile: TileShape) -> Streams {
        let (rows, keys) = (tile.rows as usize, tile.keys as usize);
        let keeps_keys = kernel.spec().role == Role::Keys;
        let (kept, step) = if keeps_keys { (keys, rows) } else { (rows, keys) };
        Streams { keeps_keys, kept, step, shares_keys: keeps_keys }
    }
}

/// The tiles that a block streams.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Tiles {
    /// Tiles whose pairs all see each other.
    pub whole: f64,
    /// Tiles of which some pairs do.
    pub masked: f64,
}

/// Returns groups of equal blocks, in the order in which they start, each with the number of its
/// blocks. The longest start first, as in a launch.
pub(super) fn blocks(
    rectangle: &Rectangle,
    streams: Streams,
) -> impl Iterator<Item = (Tiles, usize)> {
    let Rectangle { batch, q_len, kv_len, heads, kv_heads, .. } = *rectangle;
    let band = Band::of(rectangle, streams);
    let (heads, times) = match streams.shares_keys {
        true => (kv_heads, heads / kv_heads.max(1)),
        false => (heads, 1),
    };
    let tiles = if streams.keeps_keys { kv_len } else { q_len }.div_ceil(streams.kept);
    // Without a limit all blocks are equal.
    let length = if band.is_full() { tiles } else { tiles.div_ceil(MOST_GROUPS) }.max(1);
    let groups = tiles.div_ceil(length);
    let of_group = move |group: usize| {
        let (first, last) = (group * length, tiles.min((group + 1) * length) - 1);
        let (a, b) = (band.tiles(first), band.tiles(last));
        let mean = |a: f64, b: f64| (a + b) / 2.0 * times as f64;
        let tiles = Tiles { whole: mean(a.whole, b.whole), masked: mean(a.masked, b.masked) };
        (tiles, (last + 1 - first) * batch * heads)
    };
    let seen = |tile: usize| band.tiles(tile).whole + band.tiles(tile).masked;
    let reverse = tiles > 0 && seen(tiles - 1) > seen(0);
    (0..groups).map(move |n| of_group(if reverse { groups - 1 - n } else { n }))
}

/// The streamed rows that kept rows see: row i sees row j when `low ≤ j − i ≤ high`.
#[derive(Debug, Clone, Copy)]
struct Band {
    low: i64,
    high: i64,
    /// Kept rows of the rectangle, and of a block.
    kept: [i64; 2],
    /// Streamed rows of the rectangle, and of a tile.
    streamed: [i64; 2],
}

impl Band {
    fn of(rectangle: &Rectangle, streams: Streams) -> Band {
        let Rectangle { q_len, kv_len, lower, upper, .. } = *rectangle;
        // No pair is further apart.
        let far = (q_len + kv_len) as i64;
        let (lower, upper) = (lower.clamp(-far, far), upper.clamp(-far, far));
        let (low, high, kept, streamed) = match streams.keeps_keys {
            true => (-upper, -lower, kv_len, q_len),
            false => (lower, upper, q_len, kv_len),
        };
        let kept = [kept as i64, streams.kept as i64];
        Band { low, high, kept, streamed: [streamed as i64, streams.step as i64] }
    }

    /// Whether all pairs see each other.
    fn is_full(&self) -> bool {
        let [kept, streamed] = [self.kept[0], self.streamed[0]];
        self.low <= 1 - kept && self.high >= streamed - 1
    }

    /// Returns the tiles that a block streams.
    fn tiles(&self, block: usize) -> Tiles {
        let ([kept, rows], [streamed, step]) = (self.kept, self.streamed);
        let first = block as i64 * rows;
        let last = kept.min(first + rows) - 1;
        let within = |row: i64| row.clamp(0, streamed);
        let up = |row: i64| (row + step - 1) / step;
        // What any row sees, and what all rows see.
        let any = within(first + self.low)..within(last + self.high + 1);
        let all = within(last + self.low)..within(first + self.high + 1);
        if any.is_empty() {
            return Tiles::default();
        }
        let tiles = up(any.end) - any.start / step;
        // The last tile may have fewer rows.
        let all_end = if all.end == streamed { up(streamed) } else { all.end / step };
        let whole = (all_end - up(all.start)).clamp(0, tiles);
        Tiles { whole: whole as f64, masked: (tiles - whole) as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Element;

    fn rectangle(q_len: usize, kv_len: usize, lower: i64, upper: i64) -> Rectangle {
        let (batch, heads, kv_heads, head_dim, value_dim) = (2, 6, 3, 128, 128);
        let (element, softmax_scale) = (Element::Bf16, 1.0);
        Rectangle {
            batch,
            q_len,
            kv_len,
            heads,
            kv_heads,
            head_dim,
            value_dim,
            element,
            lower,
            upper,
            softmax_scale,
        }
    }

    /// Tiles of a block, pair by pair.
    fn counted(rectangle: &Rectangle, streams: Streams, block: usize) -> Tiles {
        let Rectangle { q_len, kv_len, lower, upper, .. } = *rectangle;
        let (kept, streamed) = if streams.keeps_keys { (kv_len, q_len) } else { (q_len, kv_len) };
        let sees = |own: usize, other: usize| {
            let (query, key) = if streams.keeps_keys { (other, own) } else { (own, other) };
            let ahead = key as i64 - query as i64;
            lower <= ahead && ahead <= upper
        };
        let rows = block * streams.kept..kept.min((block + 1) * streams.kept);
        let mut tiles = Tiles::default();
        for start in (0..streamed).step_by(streams.step) {
            let others = start..streamed.min(start + streams.step);
            let pairs = rows.clone().flat_map(|own| others.clone().map(move |other| (own, other)));
            let seen = pairs.filter(|(own, other)| sees(*own, *other)).count();
            if seen == rows.len() * others.len() {
                tiles.whole += 1.0;
            } else if seen > 0 {
                tiles.masked += 1.0;
            }
        }
        tiles
    }

    #[test]
    fn tiles_of_bands_are_those_that_pairs_need() {
        let all = [(i64::MIN, i64::MAX), (i64::MIN, 0), (-20, 0), (-20, 7), (3, 40), (-90, -5)];
        let streams = [(false, 8, 4), (true, 8, 4), (false, 4, 16), (true, 16, 16)];
        for (lower, upper) in all {
            for (q_len, kv_len) in [(64, 64), (61, 40), (24, 67)] {
                for (keeps_keys, kept, step) in streams {
                    let rectangle = rectangle(q_len, kv_len, lower, upper);
                    let streams = Streams { keeps_keys, kept, step, shares_keys: false };
                    let band = Band::of(&rectangle, streams);
                    let rows = if keeps_keys { kv_len } else { q_len };
                    for block in 0..rows.div_ceil(kept) {
                        let what = format!("{rectangle:?}, {streams:?}, block {block}");
                        let counted = counted(&rectangle, streams, block);
                        let found = band.tiles(block);
                        let sum = |tiles: Tiles| tiles.whole + tiles.masked;
                        assert_eq!(sum(found), sum(counted), "{what}");
                        assert_eq!(found.whole, counted.whole, "{what}");
                    }
                }
            }
        }
    }

    /// Grouped blocks stream what all blocks stream, and the longest come first.
    #[test]
    fn groups_of_blocks_have_all_tiles() {
        for (lower, upper) in [(i64::MIN, 0), (-9000, 0), (i64::MIN, i64::MAX)] {
            let rectangle = rectangle(32_768, 32_768, lower, upper);
            for (keeps_keys, shares_keys) in [(false, false), (true, true)] {
                let streams = Streams { keeps_keys, kept: 64, step: 128, shares_keys };
                let groups: Vec<_> = blocks(&rectangle, streams).collect();
                let count: usize = groups.iter().map(|(_, count)| count).sum();
                assert_eq!(count, 512 * 2 * if shares_keys { 3 } else { 6 });
                assert!(groups.len() <= MOST_GROUPS);
                let of = |tiles: Tiles| tiles.whole + tiles.masked;
                let found: f64 =
                    groups.iter().map(|(tiles, count)| of(*tiles) * *count as f64).sum();
                let band = Band::of(&rectangle, streams);
                let each: f64 = (0..512).map(|block| of(band.tiles(block))).sum();
                let ratio = found / (each * 12.0);
                assert!((ratio - 1.0).abs() < 0.005, "{ratio}");
                assert!(of(groups[0].0) >= of(groups[groups.len() - 1].0));
            }
        }
    }
}
