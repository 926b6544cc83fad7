//! Which (query, key) pairs of a rectangle of local indices are allowed.

use std::ops::Range;

use crate::layout::Piece;

/// A diagonal band: query row i sees key row j when `lower ≤ j − i ≤ upper`. Rows count from the
/// start of their owner's shard, not of a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Band {
    /// Smallest allowed `j − i`; `i64::MIN` for no limit.
    pub lower: i64,
    /// Largest allowed `j − i`; `i64::MAX` for no limit.
    pub upper: i64,
}

/// How much of a rectangle a [`Band`] allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coverage {
    /// Every pair.
    Full,
    /// Some pairs.
    Partial,
    /// No pair.
    Empty,
}

impl Band {
    /// The band that allows everything.
    pub const FULL: Band = Band { lower: i64::MIN, upper: i64::MAX };

    /// Is key row `j` allowed for query row `i`?
    pub fn allows(&self, i: usize, j: usize) -> bool {
        let diagonal = j as i64 - i as i64;
        self.lower <= diagonal && diagonal <= self.upper
    }

    /// Key rows that query row `i` sees, within `keys`.
    pub fn keys_of(&self, i: usize, keys: &Range<usize>) -> Range<usize> {
        clamp(self.lower.saturating_add(i as i64), self.upper.saturating_add(i as i64), keys)
    }

    /// Query rows that see key row `j`, within `queries`.
    pub fn queries_of(&self, j: usize, queries: &Range<usize>) -> Range<usize> {
        let j = j as i64;
        let (first, last) = (j.saturating_sub(self.upper), j.saturating_sub(self.lower));
        clamp(first, last, queries)
    }

    /// How much of `queries × keys` is allowed. An empty rectangle is [`Coverage::Empty`].
    pub fn coverage(&self, queries: &Range<usize>, keys: &Range<usize>) -> Coverage {
        if queries.is_empty() || keys.is_empty() {
            return Coverage::Empty;
        }
        let smallest = keys.start as i64 - (queries.end as i64 - 1);
        let largest = keys.end as i64 - 1 - queries.start as i64;
        if self.lower <= smallest && largest <= self.upper {
            Coverage::Full
        } else if largest < self.lower || self.upper < smallest || self.lower > self.upper {
            Coverage::Empty
        } else {
            Coverage::Partial
        }
    }

    /// Allowed pairs in `queries × keys`.
    pub fn pairs(&self, queries: &Range<usize>, keys: &Range<usize>) -> usize {
        queries.clone().map(|i| self.keys_of(i, keys).len()).sum()
    }

    /// The causal mask between two pieces of one layout: key position ≤ query position.
    ///
    /// With positions `a + s·(i − i₀)` and `b + s·(j − j₀)` that is
    /// `j − i ≤ j₀ − i₀ + ⌊(a − b) / s⌋`.
    pub fn causal(queries: &Piece, keys: &Piece) -> Band {
        assert_eq!(queries.stride, keys.stride, "pieces of one layout share their stride");
        let ahead = queries.start as i64 - keys.start as i64;
        let origin = keys.rows.start as i64 - queries.rows.start as i64;
        Band { lower: i64::MIN, upper: origin + ahead.div_euclid(queries.stride as i64) }
    }
}

fn clamp(first: i64, last: i64, within: &Range<usize>) -> Range<usize> {
    let start = first.clamp(within.start as i64, within.end as i64) as usize;
    let end = last.saturating_add(1).clamp(start as i64, within.end.max(start) as i64) as usize;
    start..end
}
