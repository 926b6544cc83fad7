//! Which pairs of a tile's rows its data hide: segments of rows, and intervals of keys.

use std::ops::Range;

use super::array::HostArray;
use super::buffer::HostBuffer;
use crate::mask::{Coverage, Intervals, Span};
use crate::operands::Operand;
use crate::problem::Features;

/// The arrays that hide pairs of a tile; by default none.
#[derive(Debug, Clone, Default)]
pub struct Visibility<'a> {
    /// Segments of queries and of keys.
    segments: Option<[&'a HostArray; 2]>,
    /// The first and the second interval of each key; a second one comes with a first one.
    intervals: [Option<&'a HostArray>; 2],
    /// Positions of queries, if keys have intervals.
    positions: Option<&'a HostArray>,
}

/// The data of a range of queries.
#[derive(Debug, Clone, Copy)]
pub(super) struct OfQueries {
    segments: Span,
    positions: Span,
}

/// The data of a range of keys.
#[derive(Debug, Clone, Copy)]
pub(super) struct OfKeys {
    segments: Span,
    intervals: [Intervals; 2],
}

impl<'a> Visibility<'a> {
    /// Finds the arrays among the arrays of a tile's chunks.
    pub(super) fn new(
        features: &Features,
        queries: &'a HostBuffer,
        keys: &'a HostBuffer,
    ) -> Visibility<'a> {
        let of_query = |operand| queries.of_feature(features, operand);
        let of_key = |operand| keys.of_feature(features, operand);
        let segments = of_query(Operand::QuerySegments).zip(of_key(Operand::KeySegments));
        Visibility {
            segments: segments.map(|(queries, keys)| [queries, keys]),
            intervals: [Operand::Visible, Operand::AlsoVisible].map(of_key),
            positions: features.visible.then(|| of_query(Operand::QueryPositions)).flatten(),
        }
    }
}

impl Visibility<'_> {
    /// Whether rows have segments.
    pub(super) fn has_segments(&self) -> bool {
        self.segments.is_some()
    }

    /// Returns how many intervals each key has.
    pub(super) fn interval_count(&self) -> usize {
        self.intervals.iter().flatten().count()
    }

    /// Returns the segment of a query; 0 without segments.
    pub(super) fn query_segment(&self, batch: usize, row: usize) -> i32 {
        self.segments.map_or(0, |[queries, _]| integer(queries, batch, row, 0))
    }

    /// Returns the segment of a key; 0 without segments.
    pub(super) fn key_segment(&self, batch: usize, row: usize) -> i32 {
        self.segments.map_or(0, |[_, keys]| integer(keys, batch, row, 0))
    }

    /// Returns the start and the stop of a key's intervals. An interval that the key lacks is
    /// empty.
    pub(super) fn bounds(&self, batch: usize, row: usize) -> [[i32; 2]; 2] {
        let bound = |array, index| integer(array, batch, row, index);
        self.intervals.map(|array| array.map_or([0; 2], |array| [0, 1].map(|i| bound(array, i))))
    }

    /// Returns the data of a range of queries.
    pub(super) fn of_queries(&self, batch: usize, rows: &Range<usize>) -> OfQueries {
        let span = |array: Option<&HostArray>| {
            let values = |array| rows.clone().map(move |row| integer(array, batch, row, 0));
            array.map_or(Span::of([0].into_iter()), |array| Span::of(values(array)))
        };
        let segments = self.segments.map(|[queries, _]| queries);
        OfQueries { segments: span(segments), positions: span(self.positions) }
    }

    /// Returns the data of a range of keys.
    pub(super) fn of_keys(&self, batch: usize, rows: &Range<usize>) -> OfKeys {
        let segment = |row| self.key_segment(batch, row);
        let segments = match self.segments {
            Some(_) => Span::of(rows.clone().map(segment)),
            None => Span::of([0].into_iter()),
        };
        let mut intervals = [Intervals::default(); 2];
        if self.positions.is_some() {
            for row in rows.clone() {
                for (found, bounds) in intervals.iter_mut().zip(self.bounds(batch, row)) {
                    found.add(bounds);
                }
            }
        }
        OfKeys { segments, intervals }
    }

    /// Returns how many pairs of a range of queries and a range of keys are allowed.
    pub(super) fn coverage(&self, queries: &OfQueries, keys: &OfKeys) -> Coverage {
        let segments = match self.segments {
            Some(_) => queries.segments.coverage(keys.segments),
            None => Coverage::Full,
        };
        if self.positions.is_none() {
            return segments;
        }
        let [first, second] = keys.intervals.map(|found| found.coverage(queries.positions));
        segments.and(first.or(second))
    }

    /// Returns the rows from the first to the last of `keys` that some of the queries may see.
    pub(super) fn trim_keys(
        &self,
        batch: usize,
        queries: &OfQueries,
        keys: Range<usize>,
    ) -> Range<usize> {
        let seen = |key: usize| self.coverage(queries, &self.of_keys(batch, &(key..key + 1)));
        trimmed(keys, |key| seen(key) != Coverage::Empty)
    }

    /// Returns the rows from the first to the last of `queries` that may see some of the keys.
    pub(super) fn trim_queries(
        &self,
        batch: usize,
        queries: Range<usize>,
        keys: &OfKeys,
    ) -> Range<usize> {
        let sees = |row: usize| self.coverage(&self.of_queries(batch, &(row..row + 1)), keys);
        trimmed(queries, |row| sees(row) != Coverage::Empty)
    }

    /// Whether a query may see a key.
    pub(super) fn sees(&self, batch: usize, query: usize, key: usize) -> bool {
        let queries = self.of_queries(batch, &(query..query + 1));
        self.coverage(&queries, &self.of_keys(batch, &(key..key + 1))) != Coverage::Empty
    }

    /// Returns the ranges of `rows` whose keys all have the same segment and intervals.
    pub(super) fn key_ranges(&self, batch: usize, rows: &Range<usize>) -> Vec<Range<usize>> {
        let data = |row| (self.key_segment(batch, row), self.bounds(batch, row));
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for row in rows.clone() {
            match ranges.last_mut() {
                Some(range) if data(range.start) == data(row) => range.end = row + 1,
                _ => ranges.push(row..row + 1),
            }
        }
        ranges
    }

    /// Returns the ranges of `rows` whose queries see a key.
    pub(super) fn query_ranges(
        &self,
        batch: usize,
        rows: &Range<usize>,
        key: usize,
    ) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for row in rows.clone().filter(|row| self.sees(batch, *row, key)) {
            match ranges.last_mut() {
                Some(range) if range.end == row => range.end += 1,
                _ => ranges.push(row..row + 1),
            }
        }
        ranges
    }
}

/// Returns the rows from the first to the last that is wanted.
fn trimmed(mut rows: Range<usize>, is_wanted: impl Fn(usize) -> bool) -> Range<usize> {
    while !rows.is_empty() && !is_wanted(rows.start) {
        rows.start += 1;
    }
    while !rows.is_empty() && !is_wanted(rows.end - 1) {
        rows.end -= 1;
    }
    rows
}

/// Returns an integer of a row.
pub(super) fn integer(array: &HostArray, batch: usize, row: usize, index: usize) -> i32 {
    debug_assert!(index < array.dim);
    // SAFETY: the maker of the tile gave each row `dim` int32, which no task writes.
    unsafe { *array.row(batch, row, 0).cast::<i32>().add(index) }
}
