//! Sets of rows.

use std::ops::Range;

/// A set of rows as sorted, disjoint, non-empty ranges. Most sets are one range, which takes no
/// allocation.
#[derive(Debug, Clone, Default)]
pub struct Rows {
    /// Empty if the set is.
    first: Range<usize>,
    rest: Vec<Range<usize>>,
}

impl Rows {
    /// Those of one range.
    pub fn from(rows: Range<usize>) -> Rows {
        let mut set = Rows::default();
        set.insert(rows);
        set
    }

    /// Adds a range.
    pub fn insert(&mut self, rows: Range<usize>) {
        if rows.is_empty() {
            return;
        }
        if self.first.is_empty() {
            self.first = rows;
            return;
        }
        let touches = |range: &Range<usize>| range.start <= rows.end && rows.start <= range.end;
        if self.rest.is_empty() && touches(&self.first) {
            self.first = self.first.start.min(rows.start)..self.first.end.max(rows.end);
            return;
        }
        let (mut whole, mut others) = (rows.clone(), Vec::with_capacity(self.rest.len() + 2));
        for range in self.ranges().cloned() {
            match touches(&range) {
                true => whole = whole.start.min(range.start)..whole.end.max(range.end),
                false => others.push(range),
            }
        }
        let place = others.partition_point(|range| range.start < whole.start);
        others.insert(place, whole);
        self.first = others.remove(0);
        self.rest = others;
    }

    /// Adds those of another set.
    pub fn extend(&mut self, other: &Rows) {
        other.ranges().for_each(|range| self.insert(range.clone()));
    }

    /// Takes a range away.
    pub fn remove(&mut self, rows: &Range<usize>) {
        let taken = Rows::from(rows.clone());
        let left: Vec<Range<usize>> =
            self.ranges().flat_map(|range| taken.missing(range)).collect();
        *self = Rows::default();
        left.into_iter().for_each(|range| self.insert(range));
    }

    /// The ranges in order; between two of them lies at least one row.
    pub fn ranges(&self) -> impl Iterator<Item = &Range<usize>> {
        let first = (!self.first.is_empty()).then_some(&self.first);
        first.into_iter().chain(&self.rest)
    }

    /// What lies between the ranges.
    pub fn gaps(&self) -> impl Iterator<Item = Range<usize>> {
        self.ranges().zip(&self.rest).map(|(range, next)| range.end..next.start)
    }

    /// How many rows these are.
    pub fn len(&self) -> usize {
        self.ranges().map(ExactSizeIterator::len).sum()
    }

    /// Parts of `rows` in the set.
    pub fn common(&self, rows: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let cut = |range: &Range<usize>| range.start.max(rows.start)..range.end.min(rows.end);
        self.ranges().map(cut).filter(|range| !range.is_empty())
    }

    /// Parts of `rows` that are not in the set.
    pub fn missing(&self, rows: &Range<usize>) -> Vec<Range<usize>> {
        let mut gaps = Vec::new();
        let mut start = rows.start;
        for range in self.common(rows) {
            gaps.push(start..range.start);
            start = range.end;
        }
        gaps.push(start..rows.end);
        gaps.retain(|range| !range.is_empty());
        gaps
    }
}
