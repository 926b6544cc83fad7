//! Sets of rows.

use std::ops::Range;

/// A set of rows, as sorted ranges. Between two ranges lies at least one row.
#[derive(Debug, Clone, Default)]
pub struct Rows(Vec<Range<usize>>);

impl Rows {
    /// Adds a range.
    pub fn insert(&mut self, rows: Range<usize>) {
        if rows.is_empty() {
            return;
        }
        let first = self.0.partition_point(|range| range.end < rows.start);
        let end = self.0.partition_point(|range| range.start <= rows.end);
        if first == end {
            self.0.insert(first, rows);
        } else {
            let last = self.0[end - 1].end.max(rows.end);
            self.0[first] = self.0[first].start.min(rows.start)..last;
            self.0.drain(first + 1..end);
        }
    }

    /// Adds the rows of another set.
    pub fn extend(&mut self, other: &Rows) {
        other.0.iter().for_each(|range| self.insert(range.clone()));
    }

    /// Removes a range.
    pub fn remove(&mut self, rows: &Range<usize>) {
        let taken = Rows::from_iter([rows.clone()]);
        self.0 = self.0.iter().flat_map(|range| taken.missing(range)).collect();
    }

    /// The first range; `None` for the empty set.
    pub fn first(&self) -> Option<&Range<usize>> {
        self.0.first()
    }

    /// The rows between the ranges.
    pub fn gaps(&self) -> impl Iterator<Item = Range<usize>> {
        self.0.windows(2).map(|pair| pair[0].end..pair[1].start)
    }

    /// The number of rows in the set.
    pub fn len(&self) -> usize {
        self.0.iter().map(ExactSizeIterator::len).sum()
    }

    /// Parts of `rows` in the set.
    pub fn common(&self, rows: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let cut = |range: &Range<usize>| range.start.max(rows.start)..range.end.min(rows.end);
        self.0.iter().map(cut).filter(|range| !range.is_empty())
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

impl FromIterator<Range<usize>> for Rows {
    fn from_iter<T: IntoIterator<Item = Range<usize>>>(ranges: T) -> Rows {
        let mut rows = Rows::default();
        ranges.into_iter().for_each(|range| rows.insert(range));
        rows
    }
}
