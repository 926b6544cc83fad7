//! Which rectangles of local indices two ranks have to compute, as few as possible.

use std::ops::Range;

use crate::layout::Piece;
use crate::mask::{Band, Coverage};
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

/// The mask between two pieces, in the local indices of their owners.
fn band_between(problem: &Problem, queries: &Piece, keys: &Piece) -> Band {
    Band::between(problem.window, queries, keys)
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
    let q_pieces = problem.layout.pieces(q_rank, problem.world_size, problem.q_len);
    let k_pieces = problem.layout.pieces(k_rank, problem.world_size, problem.kv_len);
    let consecutive = q_pieces.iter().chain(&k_pieces).all(|piece| piece.stride == 1);
    let rectangle = |queries: &[Piece], keys: &[Piece], band| {
        let whole = Rectangle { queries: hull(queries), keys: hull(keys), band };
        if consecutive { trimmed(whole, queries) } else { whole }
    };
    if let Some(band) = common_band(problem, &q_pieces, &k_pieces) {
        return vec![rectangle(&q_pieces, &k_pieces, band)];
    }
    let mut blocks = blocks_by_size(q_pieces.len(), k_pieces.len());
    let mut found: Vec<(Block, Band)> = Vec::new();
    while let Some(block) = blocks.pop() {
        let overlaps = |(other, _): &(Block, Band)| {
            intersects(&block.0, &other.0) && intersects(&block.1, &other.1)
        };
        if found.iter().any(overlaps) {
            continue;
        }
        let (queries, keys) = (&q_pieces[block.0.clone()], &k_pieces[block.1.clone()]);
        if let Some(band) = common_band(problem, queries, keys) {
            found.push((block, band));
        }
    }
    found.sort_by_key(|((queries, keys), _)| (queries.start, keys.start));
    let join = |((q, k), band): (Block, Band)| rectangle(&q_pieces[q], &k_pieces[k], band);
    found.into_iter().map(join).collect()
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

/// All blocks of neighbouring pieces, the largest last.
fn blocks_by_size(q_pieces: usize, k_pieces: usize) -> Vec<Block> {
    let runs = |count: usize| {
        (0..count).flat_map(move |start| (start + 1..=count).map(move |end| start..end))
    };
    let mut blocks: Vec<Block> =
        runs(q_pieces).flat_map(|q| runs(k_pieces).map(move |k| (q.clone(), k))).collect();
    blocks.sort_by_key(|(q, k)| (q.len() * k.len(), q.start + k.start));
    blocks
}

fn intersects(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

/// One band that says the same as the mask of every pair of pieces; none if there is no such band,
/// if a whole row or column of pieces is empty, or if nothing is allowed.
fn common_band(problem: &Problem, queries: &[Piece], keys: &[Piece]) -> Option<Band> {
    let coverage = |q: &Piece, k: &Piece| band_between(problem, q, k).coverage(&q.rows, &k.rows);
    let empty = |q: &Piece, k: &Piece| coverage(q, k) == Coverage::Empty;
    if queries.iter().any(|q| keys.iter().all(|k| empty(q, k)))
        || keys.iter().any(|k| queries.iter().all(|q| empty(q, k)))
    {
        return None;
    }
    let pairs = || queries.iter().flat_map(|q| keys.iter().map(move |k| (q, k)));
    let bands = pairs()
        .filter(|(q, k)| coverage(q, k) != Coverage::Empty)
        .map(|(q, k)| band_between(problem, q, k));
    let agrees = |band: &Band| {
        pairs().all(|(q, k)| match coverage(q, k) {
            Coverage::Partial => *band == band_between(problem, q, k),
            whole => band.coverage(&q.rows, &k.rows) == whole,
        })
    };
    [Band::FULL].into_iter().chain(bands).find(agrees)
}
