//! Sets of rows.

use std::ops::Range;

/// A set of rows as sorted, disjoint, non-empty ranges.
#[derive(Debug, Clone, Default)]
pub struct Rows(Vec<Range<usize>>);

impl Rows {
    /// Those of one range.
    pub fn from(rows: Range<usize>) -> Rows {
        let mut set = Rows::default();
        set.insert(rows);
        set
    }

    /// Adds a range.
    pub fn insert(&mut self, rows: Range<usize>) {
        let holds = |range: &Range<usize>| range.start <= rows.start && rows.end <= range.end;
        if rows.is_empty() || self.0.iter().any(holds) {
            return;
        }
        let mut all = self.missing(&rows);
        all.append(&mut self.0);
        all.sort_by_key(|range| range.start);
        for range in all {
            match self.0.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => self.0.push(range),
            }
        }
    }

    /// Adds those of another set.
    pub fn extend(&mut self, other: &Rows) {
        other.ranges().for_each(|range| self.insert(range.clone()));
    }

    /// Takes a range away.
    pub fn remove(&mut self, rows: &Range<usize>) {
        let parts = |range: &Range<usize>| Rows::from(rows.clone()).missing(range);
        self.0 = self.0.iter().flat_map(parts).collect();
    }

    /// The ranges in order; between two of them lies at least one row.
    pub fn ranges(&self) -> impl Iterator<Item = &Range<usize>> {
        self.0.iter()
    }

    /// What lies between the ranges.
    pub fn gaps(&self) -> impl Iterator<Item = Range<usize>> {
        self.0.windows(2).map(|pair| pair[0].end..pair[1].start)
    }

    /// How many rows these are.
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
