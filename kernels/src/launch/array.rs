//! Where the elements of an array lie, and how much of it one view may hold.

use std::ops::Range;

/// Whose rows an array has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// One row per query.
    Queries,
    /// One row per key.
    Keys,
}

/// An array of a description: element (b, r, h, d) lies at
/// `b · batch_stride + r · row_stride + h · head_stride + d`.
#[derive(Debug, Clone)]
pub(super) struct Array {
    /// The argument that it is.
    pub name: &'static str,
    /// The argument that its batch stride is; shared with arrays of the same shape.
    pub stride_name: &'static str,
    pub side: Side,
    /// 0 for an array that is not there.
    pub address: u64,
    /// Bytes of an element.
    pub bytes: u64,
    pub batch_stride: u64,
    pub row_stride: u64,
    pub head_stride: u64,
    pub heads: u64,
    /// Columns.
    pub dim: u64,
}

impl Array {
    pub fn is_given(&self) -> bool {
        self.address != 0
    }

    /// Is it there, and laid out by the same arguments as `other`?
    pub fn is_twin_of(&self, other: &Array) -> bool {
        self.is_given() && self.stride_name == other.stride_name
    }

    /// Elements from the first to the last of `rows` rows of one batch entry.
    pub fn extent(&self, rows: usize) -> u128 {
        let before_last_row = rows.max(1) as u128 - 1;
        let before_last_head = u128::from(self.heads) - 1;
        before_last_row * u128::from(self.row_stride)
            + before_last_head * u128::from(self.head_stride)
            + u128::from(self.dim)
    }

    /// Bytes from the first to the last element.
    pub fn span(&self, entries: usize, rows: usize) -> u128 {
        let before_last = (entries.max(1) as u128 - 1) * u128::from(self.batch_stride);
        (before_last + self.extent(rows)) * u128::from(self.bytes)
    }

    /// The most batch entries, of `batch`, whose span with all `rows` is below `limit`.
    pub fn entries_within(&self, batch: usize, rows: usize, limit: u64) -> usize {
        largest(batch, |entries| self.span(entries, rows) < u128::from(limit))
    }

    /// The most rows, of `rows`, whose span in one batch entry is below `limit`.
    pub fn rows_within(&self, rows: usize, limit: u64) -> usize {
        largest(rows, |rows| self.span(1, rows) < u128::from(limit))
    }

    /// Address of the first element of a piece; 0 stays 0.
    pub fn at(&self, batch: &Range<usize>, rows: &Range<usize>) -> u64 {
        if !self.is_given() {
            return 0;
        }
        let elements = batch.start as u64 * self.batch_stride + rows.start as u64 * self.row_stride;
        self.address + elements * self.bytes
    }
}

/// The largest n ≤ `most` that `fits`, where all below fit too; 0 if not even 1 does.
fn largest(most: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut fitting, mut beyond) = (0, most + 1);
    while fitting + 1 < beyond {
        let middle = fitting + (beyond - fitting) / 2;
        if fits(middle) { fitting = middle } else { beyond = middle }
    }
    fitting
}
