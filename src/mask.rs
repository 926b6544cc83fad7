//! Which (query, key) pairs of a rectangle of local rows are allowed.

use std::ops::Range;

use serde::Deserialize;

use crate::layout::StridedRange;

/// A diagonal band: query row i sees key row j if `lower ≤ j − i ≤ upper`. Rows are local rows of
/// their owner's shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Band {
    /// Smallest allowed `j − i`; `i64::MIN` for no limit.
    pub lower: i64,
    /// Largest allowed `j − i`; `i64::MAX` for no limit.
    pub upper: i64,
}

/// The global positions that a query at position p sees: p − left to p + right. A negative side
/// hides the query's own position. A query that stands at p + offset sees p − (left − offset) to
/// p + (right + offset).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Window {
    /// How many positions a query sees before its own; `None` for no limit.
    pub left: Option<i64>,
    /// How many positions a query sees after its own; `None` for no limit.
    pub right: Option<i64>,
}

impl Window {
    /// All positions.
    pub const FULL: Window = Window { left: None, right: None };
    /// A query's own position and all positions before it.
    pub const CAUSAL: Window = Window { left: None, right: Some(0) };

    /// Whether a query at position `query` sees a key at position `key`.
    pub fn allows(&self, query: usize, key: usize) -> bool {
        let (query, key) = (query as i64, key as i64);
        self.left.is_none_or(|left| query <= key.saturating_add(left))
            && self.right.is_none_or(|right| key <= query.saturating_add(right))
    }
}

/// How many pairs of a rectangle are allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coverage {
    /// Every pair.
    Full,
    /// Some pairs, or an unknown number.
    Partial,
    /// No pair.
    Empty,
}

impl Coverage {
    /// The coverage of the intersection of two masks. Two partial masks may not intersect; the
    /// result stays [`Coverage::Partial`], which is conservative.
    pub fn and(self, other: Coverage) -> Coverage {
        match (self, other) {
            (Coverage::Empty, _) | (_, Coverage::Empty) => Coverage::Empty,
            (Coverage::Full, Coverage::Full) => Coverage::Full,
            _ => Coverage::Partial,
        }
    }

    /// The coverage of the union of two masks. Two partial masks may together allow every pair; the
    /// result stays [`Coverage::Partial`].
    pub fn or(self, other: Coverage) -> Coverage {
        match (self, other) {
            (Coverage::Full, _) | (_, Coverage::Full) => Coverage::Full,
            (Coverage::Empty, Coverage::Empty) => Coverage::Empty,
            _ => Coverage::Partial,
        }
    }
}

/// The smallest and the largest of some integers of a run of rows, such as segment ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The smallest; `i32::MAX` without rows.
    pub min: i32,
    /// The largest; `i32::MIN` without rows.
    pub max: i32,
}

impl Span {
    /// The span of integers.
    pub fn of(integers: impl Iterator<Item = i32>) -> Span {
        let nothing = Span { min: i32::MAX, max: i32::MIN };
        integers.fold(nothing, |Span { min, max }, integer| Span {
            min: min.min(integer),
            max: max.max(integer),
        })
    }

    /// How many pairs of rows, one of each run, are in one segment, if these are the spans of their
    /// segment ids: none if the spans do not overlap, all if both runs are in the same single
    /// segment. Two rows see each other if their ids are equal and not negative.
    pub fn coverage(self, other: Span) -> Coverage {
        let (first, last) = (self.min.max(other.min).max(0), self.max.min(other.max));
        if last < first {
            Coverage::Empty
        } else if self == other && self.min == self.max {
            Coverage::Full
        } else {
            Coverage::Partial
        }
    }
}

/// What all intervals of a run of keys have in common. A query at position p sees a key with the
/// interval (start, stop) if start ≤ p < stop; with start ≥ stop nothing sees the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Intervals {
    /// The least start and the greatest stop of all keys that a query can see.
    some: [i32; 2],
    /// The greatest start and the least stop of all keys.
    all: [i32; 2],
}

impl Default for Intervals {
    /// The intervals of no key.
    fn default() -> Intervals {
        Intervals { some: [i32::MAX, i32::MIN], all: [i32::MIN, i32::MAX] }
    }
}

impl Intervals {
    /// Adds the interval of a key.
    pub fn add(&mut self, [start, stop]: [i32; 2]) {
        self.all = [self.all[0].max(start), self.all[1].min(stop)];
        if start < stop {
            self.some = [self.some[0].min(start), self.some[1].max(stop)];
        }
    }

    /// How many pairs of these keys and of queries whose positions have this span are allowed.
    pub fn coverage(&self, positions: Span) -> Coverage {
        let Span { min, max } = positions;
        if max < self.some[0] || self.some[1] <= min {
            Coverage::Empty
        } else if self.all[0] <= min && max < self.all[1] {
            Coverage::Full
        } else {
            Coverage::Partial
        }
    }
}

impl Band {
    /// The band that allows everything.
    pub const FULL: Band = Band { lower: i64::MIN, upper: i64::MAX };

    /// Whether query row `i` sees key row `j`.
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

    /// How many pairs of `queries × keys` are allowed. An empty rectangle is [`Coverage::Empty`].
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

    /// The rows of `queries × keys` that have an allowed pair in it: one range of each side.
    pub fn trim(
        &self,
        queries: &Range<usize>,
        keys: &Range<usize>,
    ) -> (Range<usize>, Range<usize>) {
        if self.coverage(queries, keys) == Coverage::Empty {
            return (queries.start..queries.start, keys.start..keys.start);
        }
        let (q_first, q_last) = (queries.start as i64, queries.end as i64 - 1);
        let (k_first, k_last) = (keys.start as i64, keys.end as i64 - 1);
        let seeing = (k_first.saturating_sub(self.upper), k_last.saturating_sub(self.lower));
        let seen = (q_first.saturating_add(self.lower), q_last.saturating_add(self.upper));
        (clamp(seeing.0, seeing.1, queries), clamp(seen.0, seen.1, keys))
    }

    /// The number of allowed pairs in `queries × keys`, by a formula that does not depend on the
    /// number of rows.
    pub fn pairs(&self, queries: &Range<usize>, keys: &Range<usize>) -> usize {
        if self.coverage(queries, keys) == Coverage::Empty {
            return 0;
        }
        let (height, width) = (queries.len() as i128, keys.len() as i128);
        let smallest = keys.start as i64 - (queries.end as i64 - 1);
        let largest = keys.end as i64 - 1 - queries.start as i64;
        // Pairs at or below a diagonal. Each row has one more than the row before, from none to all
        // keys.
        let below = |diagonal: i64| {
            let first = i128::from(diagonal.clamp(smallest - 1, largest)) + 1
                - (keys.start as i128 - queries.start as i128);
            let up_to = |end: i128| {
                let rising = end.clamp(0, width);
                rising * (rising - 1) / 2 + (end - rising).max(0) * width
            };
            up_to(first + height) - up_to(first)
        };
        let pairs = below(self.upper) - below(self.lower.saturating_sub(1));
        usize::try_from(pairs).unwrap_or(usize::MAX)
    }

    /// The mask of `window` between two strided ranges of one layout.
    ///
    /// With positions `a + s·(i − i₀)` and `b + s·(j − j₀)` and d = j₀ − i₀, it is
    ///
    /// ```text
    /// d + ⌈(a − b − left) / s⌉ ≤ j − i ≤ d + ⌊(a − b + right) / s⌋
    /// ```
    pub fn between(window: Window, queries: &StridedRange, keys: &StridedRange) -> Band {
        assert_eq!(queries.stride, keys.stride, "ranges of one layout share their stride");
        let (stride, ahead) = (queries.stride as i64, queries.start as i64 - keys.start as i64);
        let origin = keys.rows.start as i64 - queries.rows.start as i64;
        // No sequence is that long, so a wider window makes no difference.
        let wide = |limit: i64| limit.clamp(-(1 << 60), 1 << 60);
        let steps = |distance: i64| distance.div_euclid(stride);
        Band {
            lower: window.left.map_or(i64::MIN, |left| origin - steps(wide(left) - ahead)),
            upper: window.right.map_or(i64::MAX, |right| origin + steps(wide(right) + ahead)),
        }
    }
}

fn clamp(first: i64, last: i64, within: &Range<usize>) -> Range<usize> {
    let start = first.clamp(within.start as i64, within.end as i64) as usize;
    let end = last.saturating_add(1).clamp(start as i64, within.end.max(start) as i64) as usize;
    start..end
}
