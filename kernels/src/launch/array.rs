//! Where the elements of an array lie, and how much of it one view may hold.

use std::ops::Range;

use super::description::Statistics;
use crate::kernel::{Kernel, Task};
use crate::record::{Argument, Kind, Shape};

/// Rows that share an element of [`Shape::Ranges`].
pub(super) const RANGE_ROWS: usize = 64;

/// Whose rows an array has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// One row per query.
    Queries,
    /// One row per key.
    Keys,
}

impl Side {
    /// The side whose results a block of the kernel keeps.
    pub fn resident(kernel: Kernel) -> Side {
        if kernel.spec().task == Task::Keys { Side::Keys } else { Side::Queries }
    }

    /// The side whose rows an array of a shape has, in a kernel whose blocks keep `resident` rows.
    pub fn of(shape: Shape, resident: Side) -> Side {
        match shape {
            Shape::Ranges => resident,
            Shape::Queries | Shape::Results | Shape::QueryTokens => Side::Queries,
            Shape::PerQuery | Shape::Statistics | Shape::PerHead | Shape::PerEntry => Side::Queries,
            Shape::Keys | Shape::Values | Shape::KeyTokens => Side::Keys,
            // Linear attention has one side.
            _ => Side::Queries,
        }
    }
}

/// What the sizes of arrays follow from, beside entries and rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    /// Of linear attention's queries.
    pub q_heads: usize,
    /// Of the products that it writes by row.
    pub dot_heads: usize,
    pub resident: Side,
}

/// An array of a description: element (b, r, h, d) lies at
/// `b · batch_stride + r · row_stride + h · head_stride + d`.
#[derive(Debug, Clone)]
pub(super) struct Array {
    /// The argument that it is.
    pub name: &'static str,
    /// The argument that its batch stride is; shared with arrays of the same shape.
    pub stride_name: &'static str,
    /// The argument that its head stride is, of statistics.
    pub head_stride_name: Option<&'static str>,
    pub side: Side,
    /// 0 for an array that is not there.
    pub address: u64,
    /// Bytes of an element.
    pub bytes: u64,
    pub batch_stride: u64,
    pub row_stride: u64,
    /// Rows that share elements.
    pub rows_together: usize,
    pub head_stride: u64,
    pub heads: u64,
    /// Columns.
    pub dim: u64,
}

impl Array {
    /// The array that a pointer leads to; the head stride of `at` counts for statistics alone.
    pub fn new(argument: &'static Argument, sizes: Sizes, at: Statistics) -> Array {
        let Some(view) = argument.view else { unreachable!("{} is no array", argument.name) };
        let (heads, dim) = match view.shape {
            Shape::Queries => (sizes.heads, sizes.head_dim),
            Shape::Keys => (sizes.kv_heads, sizes.head_dim),
            Shape::Results => (sizes.heads, sizes.value_dim),
            Shape::Values => (sizes.kv_heads, sizes.value_dim),
            Shape::PerQuery | Shape::Statistics | Shape::PerHead => (sizes.heads, 1),
            Shape::QueryTokens | Shape::KeyTokens => (1, 1),
            Shape::Ranges => (1, 4),
            Shape::PerEntry => (1, 4),
            Shape::LinearQueries => (sizes.q_heads, sizes.head_dim),
            Shape::LinearKeys => (sizes.kv_heads, sizes.head_dim),
            Shape::LinearValues => (sizes.kv_heads, sizes.value_dim),
            Shape::LinearOthers => (sizes.q_heads, sizes.value_dim),
            Shape::LinearResults => (sizes.heads, sizes.value_dim),
            Shape::LinearSums => (sizes.heads, 1),
            Shape::LinearDots => (sizes.dot_heads, 1),
            Shape::LinearStates => (1, sizes.value_dim),
        };
        let (heads, dim) = (heads as u64, dim as u64);
        let (row_stride, head_stride) = match view.shape {
            shape if shape.has_head_stride() => (1, at.head_stride),
            Shape::PerHead | Shape::PerEntry => (0, 1),
            _ => (heads.saturating_mul(dim), dim),
        };
        Array {
            name: argument.name,
            stride_name: view.batch_stride,
            head_stride_name: view.head_stride,
            side: Side::of(view.shape, sizes.resident),
            rows_together: if view.shape == Shape::Ranges { RANGE_ROWS } else { 1 },
            address: at.address,
            bytes: if argument.kind == Kind::Activations { 2 } else { 4 },
            batch_stride: at.batch_stride,
            row_stride,
            head_stride,
            heads,
            dim,
        }
    }

    pub fn is_given(&self) -> bool {
        self.address != 0
    }

    /// Is it there, and laid out by the same arguments as `other`?
    pub fn is_twin_of(&self, other: &Array) -> bool {
        self.is_given() && self.stride_name == other.stride_name
    }

    /// Elements from the first to the last of `rows` rows of one batch entry.
    pub fn extent(&self, rows: usize) -> u128 {
        let before_last_row = rows.div_ceil(self.rows_together).max(1) as u128 - 1;
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
        // Where rows share elements, every piece has them from the first on.
        let row = if self.rows_together == 1 { rows.start as u64 } else { 0 };
        let elements = batch.start as u64 * self.batch_stride + row * self.row_stride;
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
