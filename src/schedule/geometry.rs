//! Which rectangles of local rows two ranks have to compute, as few as possible.

use std::ops::Range;

use crate::layout::StridedRange;
use crate::mask::{Band, Coverage, Window};
use crate::problem::{Problem, Travels};

/// Query rows of a strided range begin and end at a multiple of this many rows from its start, or
/// at its end. Kernels need their statistics aligned to this many rows of 4 bytes each.
pub const QUERY_GRAIN: usize = 4;

/// Query rows of one rank × key rows of another, with the mask between them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rectangle {
    /// Local rows of the rank that owns the queries.
    pub queries: Range<usize>,
    /// Local rows of the rank that owns the keys.
    pub keys: Range<usize>,
    /// The allowed pairs.
    pub band: Band,
}

impl Rectangle {
    /// Rows of `side`, and none of the other side.
    pub(super) fn without_pairs(side: Travels, rows: Range<usize>) -> Rectangle {
        let (queries, keys) = match side {
            Travels::Keys => (0..0, rows),
            Travels::Queries => (rows, 0..0),
        };
        Rectangle { queries, keys, band: Band::FULL }
    }

    /// The rows of `side`.
    pub(super) fn side(&self, side: Travels) -> &Range<usize> {
        match side {
            Travels::Keys => &self.keys,
            Travels::Queries => &self.queries,
        }
    }

    /// The part of the rectangle with the rows of `side` that are in `range`; `None` if that part
    /// has no allowed pair.
    pub(super) fn within(&self, side: Travels, range: &Range<usize>) -> Option<Rectangle> {
        let mut cut = self.clone();
        let rows = match side {
            Travels::Keys => &mut cut.keys,
            Travels::Queries => &mut cut.queries,
        };
        *rows = rows.start.max(range.start)..rows.end.min(range.end);
        (cut.band.coverage(&cut.queries, &cut.keys) != Coverage::Empty).then_some(cut)
    }
}

/// A block of neighbouring strided ranges: the numbers of its query ranges and of its key ranges.
type Block = (Range<usize>, Range<usize>);

/// Returns the rectangles of the queries of each rank and the keys of each rank: for each rank of
/// the queries, all ranks of the keys. They are in row order, and each has at least one allowed
/// pair.
///
/// Neighbouring strided ranges form one rectangle where one band describes them. Where positions
/// are consecutive, a rectangle leaves out the rows at its edges that have no allowed pair.
/// Elsewhere it keeps them, because single rows would be missing here and there.
pub fn rectangles(problem: &Problem) -> Vec<Vec<Rectangle>> {
    let Problem { layout, world_size, window, q_len, kv_len, .. } = *problem;
    let ranges =
        |len| (0..world_size).map(move |rank| layout.strided_ranges(rank, world_size, len));
    let [queries, keys]: [Vec<_>; 2] = [q_len, kv_len].map(|len| ranges(len).collect());
    let blocks = blocks_by_size(queries.first().map_or(0, Vec::len));
    let pairs = queries.iter().flat_map(|queries| keys.iter().map(move |keys| (queries, keys)));
    pairs.map(|(queries, keys)| cut(window, &blocks, queries, keys)).collect()
}

/// The mask between each query range and each key range of two ranks.
type Masks = Vec<Vec<(Band, Coverage)>>;

/// Cuts the queries of one rank and the keys of another into rectangles. Tries `blocks` in order.
fn cut(
    window: Window,
    blocks: &[Block],
    queries: &[StridedRange],
    keys: &[StridedRange],
) -> Vec<Rectangle> {
    let consecutive = queries.iter().chain(keys).all(|range| range.stride == 1);
    let mask = |q: &StridedRange, k: &StridedRange| {
        let band = Band::between(window, q, k);
        (band, band.coverage(&q.rows, &k.rows))
    };
    let masks = queries.iter().map(|q| keys.iter().map(|k| mask(q, k)).collect());
    let masks: Masks = masks.collect();
    let mut taken: Vec<(&Block, Rectangle)> = Vec::new();
    for block in blocks {
        let overlaps = |(other, _): &(&Block, Rectangle)| {
            intersects(&block.0, &other.0) && intersects(&block.1, &other.1)
        };
        if taken.iter().any(overlaps) {
            continue;
        }
        let (queries, keys) = (&queries[block.0.clone()], &keys[block.1.clone()]);
        if let Some(band) = common_band(&masks, block, queries, keys) {
            let rows = |of: &[StridedRange]| of[0].rows.start..of[of.len() - 1].rows.end;
            let whole = Rectangle { queries: rows(queries), keys: rows(keys), band };
            taken.push((block, if consecutive { trimmed(whole, queries) } else { whole }));
        }
    }
    taken.sort_by_key(|((queries, keys), _)| (queries.start, keys.start));
    taken.into_iter().map(|(_, rectangle)| rectangle).collect()
}

/// Returns the one band that equals the mask of every pair of ranges of a block. Returns `None` if
/// there is no such band, or if a range has no allowed pair with the whole other side.
fn common_band(
    masks: &Masks,
    (q, k): &Block,
    queries: &[StridedRange],
    keys: &[StridedRange],
) -> Option<Band> {
    let empty = |q: usize, k: usize| masks[q][k].1 == Coverage::Empty;
    if q.clone().any(|q| k.clone().all(|k| empty(q, k)))
        || k.clone().any(|k| q.clone().all(|q| empty(q, k)))
    {
        return None;
    }
    let rows = || masks[q.clone()].iter().map(|row| &row[k.clone()]);
    let bands = rows().flatten().filter(|(_, coverage)| *coverage != Coverage::Empty);
    let agrees = |band: &Band| {
        rows().zip(queries).all(|(row, q)| {
            row.iter().zip(keys).all(|((own, coverage), k)| match coverage {
                Coverage::Partial => band == own,
                whole => band.coverage(&q.rows, &k.rows) == *whole,
            })
        })
    };
    [Band::FULL].into_iter().chain(bands.map(|(band, _)| *band)).find(agrees)
}

/// Returns the rectangle without the rows at its edges that have no allowed pair. Queries leave out
/// whole grains of [`QUERY_GRAIN`] rows.
fn trimmed(rectangle: Rectangle, q_ranges: &[StridedRange]) -> Rectangle {
    let Rectangle { queries, keys, band } = rectangle;
    let (seeing, keys) = band.trim(&queries, &keys);
    let grains = |row: usize| {
        let range = q_ranges.iter().find(|range| range.rows.contains(&row));
        let Range { start, end } = range.map_or(queries.clone(), |range| range.rows.clone());
        let first = row - (row - start) % QUERY_GRAIN;
        first..end.min(first + QUERY_GRAIN)
    };
    let queries = grains(seeing.start).start..grains(seeing.end - 1).end;
    Rectangle { queries, keys, band }
}

/// Returns all blocks of neighbouring ranges of two shards of `count` ranges, the largest first.
fn blocks_by_size(count: usize) -> Vec<Block> {
    let runs = || (0..count).flat_map(move |start| (start + 1..=count).map(move |end| start..end));
    let mut blocks: Vec<Block> = runs().flat_map(|q| runs().map(move |k| (q.clone(), k))).collect();
    blocks.sort_by_key(|(q, k)| (q.len() * k.len(), q.start + k.start));
    blocks.reverse();
    blocks
}

fn intersects(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}
