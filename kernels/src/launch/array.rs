//! The places of an array's elements, and the largest part of an array that a view may hold.

use std::ops::Range;

use super::rectangle::Side;
use crate::element::Element;
use crate::kernel::{Kernel, Role};
use crate::place::Statistics;
use crate::record::{Argument, Meaning, Operand, Size, View};
use crate::variant::Variant;

/// Returns the rows that share elements of an array.
fn rows_together(rows: Option<Size>) -> usize {
    match rows {
        Some(Size::RangeBlocks) => 64,
        Some(Size::RunBlocks) => 128,
        _ => 1,
    }
}

/// Returns the side whose results a block of the kernel keeps.
pub(super) fn resident_side(kernel: Kernel) -> Side {
    if kernel.spec().role == Role::Keys { Side::Keys } else { Side::Queries }
}

/// Returns the side whose rows an array of the kernel has.
pub(super) fn side(kernel: Kernel, view: &View) -> Side {
    match view.rows() {
        Some(Size::KvLen) => Side::Keys,
        Some(Size::RangeBlocks | Size::RunBlocks) => resident_side(kernel),
        // Linear attention has one side.
        _ => Side::Queries,
    }
}

/// An array of a description: row r of batch entry b begins at element
/// `b · batch_stride + r · row_stride`. Where heads have a stride of their own, head h of the row
/// begins `h · head_stride` elements on.
#[derive(Debug, Clone)]
pub(super) struct Array {
    /// The name of its argument.
    pub name: &'static str,
    pub operand: Operand,
    pub view: View,
    /// The size that counts its rows, or the rows that share its elements; `None` without rows.
    pub counts: Option<Size>,
    /// The side whose rows it has.
    pub side: Side,
    /// 0 for an array that is not given.
    pub address: u64,
    /// Bytes of an element.
    pub bytes: u64,
    pub batch_stride: u64,
    pub row_stride: u64,
    /// Rows that share elements.
    pub rows_together: usize,
    pub head_stride: u64,
    /// Heads with a stride of their own; 1 where heads lie within rows.
    pub heads: u64,
    /// Elements from the first to the last of a row.
    pub row: u64,
}

impl Array {
    /// Returns the array of a role in an image of a variant, with a size for each of its
    /// dimensions. The head stride of `at` counts only where heads have a stride of their own.
    pub fn new(
        (kernel, variant): (Kernel, Variant),
        operand: Operand,
        element: Element,
        size: impl Fn(Size) -> usize,
        at: Statistics,
    ) -> Array {
        let argument = kernel.find(Meaning::Address(operand));
        let Some((argument, view)) = argument.and_then(|(_, it)| Some((it, it.view_of(variant)?)))
        else {
            unreachable!("{} has no array {operand:?}", kernel.name())
        };
        let Argument { name, kind, .. } = *argument;
        let elements = |dim: &Size| dim.fixed().unwrap_or_else(|| size(*dim)) as u64;
        let (rows, side) = (view.rows(), side(kernel, &view));
        let rows_together = rows_together(rows);
        let is_shared = rows_together > 1;
        let at_rows = view.dims.iter().position(|dim| Some(*dim) == rows);
        let within_row = &view.dims[at_rows.map_or(0, |at| at + 1)..];
        let row = within_row.iter().map(elements).fold(1, u64::saturating_mul);
        Array {
            name,
            operand,
            view,
            counts: if is_shared { Some(side.size()) } else { rows },
            side,
            address: at.address,
            bytes: kind.element_bytes(element) as u64,
            batch_stride: at.batch_stride,
            row_stride: if rows.is_some() { row } else { 0 },
            rows_together,
            head_stride: at.head_stride,
            heads: view.head_stride.map_or(1, |_| elements(&view.dims[0])),
            row,
        }
    }

    /// Returns the array with contiguous batch entries, each with as many rows as `size` says.
    pub fn contiguous(self, size: impl Fn(Size) -> usize) -> Array {
        let entry = self.extent(self.counts.map_or(1, size));
        // A stride beyond 64 bits is too large for a launch anyway.
        Array { batch_stride: u64::try_from(entry).unwrap_or(u64::MAX), ..self }
    }

    pub fn is_given(&self) -> bool {
        self.address != 0
    }

    /// Whether the array is given and laid out by the same arguments as `other`.
    pub fn is_twin_of(&self, other: &Array) -> bool {
        self.is_given() && self.view.batch_stride == other.view.batch_stride
    }

    /// Returns the elements from the first to the last of `rows` rows of one batch entry.
    pub fn extent(&self, rows: usize) -> u128 {
        let before_last_row = rows.div_ceil(self.rows_together).max(1) as u128 - 1;
        let before_last_head = u128::from(self.heads) - 1;
        before_last_row * u128::from(self.row_stride)
            + before_last_head * u128::from(self.head_stride)
            + u128::from(self.row)
    }

    /// Returns the bytes from the first to the last element.
    pub fn span(&self, entries: usize, rows: usize) -> u128 {
        let before_last = (entries.max(1) as u128 - 1) * u128::from(self.batch_stride);
        (before_last + self.extent(rows)) * u128::from(self.bytes)
    }

    /// Returns the most batch entries, up to `batch`, whose span with all `rows` is below `limit`.
    pub fn entries_within(&self, batch: usize, rows: usize, limit: u64) -> usize {
        largest(batch, |entries| self.span(entries, rows) < u128::from(limit))
    }

    /// Returns the most rows, up to `rows`, whose span in one batch entry is below `limit`.
    pub fn rows_within(&self, rows: usize, limit: u64) -> usize {
        largest(rows, |rows| self.span(1, rows) < u128::from(limit))
    }

    /// Returns the address of the first element of some rows; 0 for an array that is not given.
    pub fn at(&self, batch: &Range<usize>, rows: &Range<usize>) -> u64 {
        if !self.is_given() {
            return 0;
        }
        // Where rows share elements, every launch uses them from the first on.
        let row = if self.rows_together == 1 { rows.start as u64 } else { 0 };
        let elements = batch.start as u64 * self.batch_stride + row * self.row_stride;
        self.address + elements * self.bytes
    }

    /// Returns the batch stride for a launch over `rows` rows of `batch`. The stride of a single
    /// entry may be any, even beyond 32 bits, so the kernel gets a stride that fits.
    fn stride(&self, batch: &Range<usize>, rows: &Range<usize>) -> u64 {
        let stride =
            if batch.len() == 1 { self.extent(rows.len()) as u64 } else { self.batch_stride };
        // The stride of an array that is not given must only fit its argument.
        if self.is_given() { stride } else { stride.min(1 << 30) }
    }
}

/// Returns the array of a description by its role.
pub(super) fn find(arrays: &[Array], operand: Operand) -> &Array {
    let found = arrays.iter().find(|array| array.operand == operand);
    found.unwrap_or_else(|| unreachable!("{operand:?} is not described"))
}

/// Returns the value of an argument that arrays decide, in a launch over the `rows` of each array
/// in `batch`; `None` for any other argument.
pub(super) fn value(
    arrays: &[Array],
    meaning: Meaning,
    batch: &Range<usize>,
    rows: impl Fn(&Array) -> Range<usize>,
) -> Option<u64> {
    Some(match meaning {
        Meaning::Address(operand) => {
            let array = find(arrays, operand);
            array.at(batch, &rows(array))
        }
        Meaning::BatchStride(operand) => {
            let array = find(arrays, operand);
            array.stride(batch, &rows(array))
        }
        // 0 where there are no rows, which no view may have.
        Meaning::HeadStride(operand) => find(arrays, operand).head_stride.max(1),
        Meaning::Has(operand) => find(arrays, operand).is_given().into(),
        _ => return None,
    })
}

/// Returns the largest n ≤ `most` that `fits`, where all smaller numbers fit too; 0 if 1 does not.
fn largest(most: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut fitting, mut beyond) = (0, most + 1);
    while fitting + 1 < beyond {
        let middle = fitting + (beyond - fitting) / 2;
        if fits(middle) { fitting = middle } else { beyond = middle }
    }
    fitting
}
