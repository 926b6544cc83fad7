//! Which rectangles of local indices two ranks have to compute, as few as possible.

use std::ops::Range;

use crate::layout::Piece;
use crate::mask::{Band, Coverage, Window};
use crate::problem::{Problem, Travels};

/// Where rows of a piece are left out, queries begin and end at a multiple of so many from its start
/// (or at its end): statistics of that many rows, 4 bytes each, are what kernels want them to be
/// aligned to.
pub const QUERY_GRAIN: usize = 4;

/// Query rows of one rank × key rows of another with the mask between them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rectangle {
    /// Local rows of the rank that owns the queries.
    pub queries: Range<usize>,
    /// Local rows of the rank that owns the keys.
    pub keys: Range<usize>,
    /// Which pairs are allowed.
    pub band: Band,
}

impl Rectangle {
    /// The side that travels.
    pub(super) fn travelling(&self, travels: Travels) -> &Range<usize> {
        match travels {
            Travels::Keys => &self.keys,
            Travels::Queries => &self.queries,
        }
    }

    /// With only those of the travelling rows that are in `part`; none without any pair.
    pub(super) fn within(&self, travels: Travels, part: &Range<usize>) -> Option<Rectangle> {
        let rows = self.travelling(travels);
        let rows = rows.start.max(part.start)..rows.end.min(part.end);
        let cut = match travels {
            Travels::Keys => Rectangle { keys: rows, ..self.clone() },
            Travels::Queries => Rectangle { queries: rows, ..self.clone() },
        };
        (cut.band.coverage(&cut.queries, &cut.keys) != Coverage::Empty).then_some(cut)
    }
}

/// A block of neighbouring pieces, `queries × keys` counted in pieces.
type Block = (Range<usize>, Range<usize>);

fn hull(pieces: &[Piece]) -> Range<usize> {
    pieces[0].rows.start..pieces[pieces.len() - 1].rows.end
}

/// The rectangles that rank `q_rank`'s queries and rank `k_rank`'s keys form, in row order, each
/// with at least one allowed pair. Neighbouring pieces are joined where one band describes them.
/// Where positions are consecutive, rows at the edges of a rectangle that the mask leaves alone are
/// not part of it; where they are not, that would be a row here and there.
pub fn rectangles(problem: &Problem, q_rank: usize, k_rank: usize) -> Vec<Rectangle> {
    let mut found = Vec::new();
    Cutter::new(problem).rectangles(q_rank, k_rank, &mut found);
    found
}

/// Finds the rectangles of pairs of ranks; what these have in common is worked out once.
pub(super) struct Cutter {
    window: Window,
    /// Of the queries of each rank.
    q_pieces: Vec<Vec<Piece>>,
    /// Of the keys of each rank.
    k_pieces: Vec<Vec<Piece>>,
    /// All that there are, in the order in which they are tried.
    blocks: Vec<Block>,
    /// The mask between each piece of queries and each of keys, of the pair that is looked at.
    masks: Vec<Vec<(Band, Coverage)>>,
}

impl Cutter {
    pub fn new(problem: &Problem) -> Cutter {
        let Problem { layout, world_size, window, .. } = *problem;
        let pieces = |len| (0..world_size).map(move |rank| layout.pieces(rank, world_size, len));
        let (q_pieces, k_pieces): (Vec<_>, Vec<_>) =
            (pieces(problem.q_len).collect(), pieces(problem.kv_len).collect());
        let count = |pieces: &[Vec<Piece>]| pieces.first().map_or(0, Vec::len);
        let blocks = blocks_by_size(count(&q_pieces), count(&k_pieces));
        Cutter { window, q_pieces, k_pieces, blocks, masks: vec![] }
    }

    /// Adds the [`rectangles`] of two ranks to `found`.
    pub fn rectangles(&mut self, q_rank: usize, k_rank: usize, found: &mut Vec<Rectangle>) {
        let (q_pieces, k_pieces) = (&self.q_pieces[q_rank], &self.k_pieces[k_rank]);
        let consecutive = q_pieces.iter().chain(k_pieces).all(|piece| piece.stride == 1);
        self.masks.resize_with(q_pieces.len(), Vec::new);
        for (q, masks) in q_pieces.iter().zip(&mut self.masks) {
            masks.clear();
            masks.extend(k_pieces.iter().map(|k| {
                let band = Band::between(self.window, q, k);
                (band, band.coverage(&q.rows, &k.rows))
            }));
        }
        let mut taken: Vec<(&Block, Rectangle)> = Vec::new();
        for block in &self.blocks {
            let overlaps = |(other, _): &(&Block, Rectangle)| {
                intersects(&block.0, &other.0) && intersects(&block.1, &other.1)
            };
            if taken.iter().any(overlaps) {
                continue;
            }
            let (queries, keys) = (&q_pieces[block.0.clone()], &k_pieces[block.1.clone()]);
            if let Some(band) = self.common_band(block, queries, keys) {
                let whole = Rectangle { queries: hull(queries), keys: hull(keys), band };
                let own = if consecutive { trimmed(whole, queries) } else { whole };
                taken.push((block, own));
            }
        }
        taken.sort_by_key(|((queries, keys), _)| (queries.start, keys.start));
        found.extend(taken.into_iter().map(|(_, rectangle)| rectangle));
    }

    /// One band that says the same as the mask of every pair of pieces of a block; none if there is
    /// no such band, if a whole row or column of pieces is empty, or if nothing is allowed.
    fn common_band(&self, (q, k): &Block, queries: &[Piece], keys: &[Piece]) -> Option<Band> {
        let masks = &self.masks;
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
}

/// Without the rows at its edges that have no allowed pair, as far as [`QUERY_GRAIN`] lets them go.
fn trimmed(rectangle: Rectangle, q_pieces: &[Piece]) -> Rectangle {
    let Rectangle { queries, keys, band } = rectangle;
    let (seeing, keys) = band.trim(&queries, &keys);
    let grains = |row: usize| {
        let piece = q_pieces.iter().find(|piece| piece.rows.contains(&row));
        let Range { start, end } = piece.map_or(queries.clone(), |piece| piece.rows.clone());
        let first = row - (row - start) % QUERY_GRAIN;
        first..end.min(first + QUERY_GRAIN)
    };
    let queries = grains(seeing.start).start..grains(seeing.end - 1).end;
    Rectangle { queries, keys, band }
}

/// All blocks of neighbouring pieces, the largest first.
fn blocks_by_size(q_pieces: usize, k_pieces: usize) -> Vec<Block> {
    let runs = |count: usize| {
        (0..count).flat_map(move |start| (start + 1..=count).map(move |end| start..end))
    };
    let mut blocks: Vec<Block> =
        runs(q_pieces).flat_map(|q| runs(k_pieces).map(move |k| (q.clone(), k))).collect();
    blocks.sort_by_key(|(q, k)| (q.len() * k.len(), q.start + k.start));
    blocks.reverse();
    blocks
}

fn intersects(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}
