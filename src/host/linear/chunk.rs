//! A chunk of consecutive tokens of one head, and the products it is made of.

use std::ops::Range;

use super::ahead::Ahead;
use crate::host::array::HostArray;
use crate::host::matmul::{Depth, Product, Write, even_parts};
use crate::host::pack::{Rows, all_finite, store_row};
use crate::host::simd::Simd;
use crate::problem::Dtype;

/// Tokens of a chunk, a multiple of all vectors' lanes. Inside a chunk work grows with its square,
/// per chunk there is that of the state. With head_dim 64 chunks of 32 take as long.
pub(super) const CHUNK: usize = 64;

/// Rows of floats, `row` apart, in scratch or in an array.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub at: *mut f32,
    pub row: usize,
}

impl Matrix {
    /// As the left side of a product.
    pub fn left(self) -> Left {
        Left { at: self.at, row: self.row, column: 1 }
    }

    /// The same memory as the left side of a product, transposed.
    pub fn transposed(self) -> Left {
        Left { at: self.at, row: 1, column: self.row }
    }
}

/// The left side of a product: element (i, j) at `at + i·row + j·column`.
#[derive(Clone, Copy)]
pub(super) struct Left {
    at: *const f32,
    row: usize,
    column: usize,
}

/// Rows and columns of a product and what it sums over; columns are a multiple of the lanes.
#[derive(Clone)]
pub(super) struct Size {
    pub rows: Range<usize>,
    pub columns: usize,
    pub depth: Range<usize>,
}

/// c = a b.
///
/// # Safety
/// All of it is this thread's, and c overlaps neither side.
#[inline(always)]
pub(super) unsafe fn product<S: Simd>(
    simd: S,
    ahead: &mut Ahead,
    (a, b): (Left, Matrix),
    c: Matrix,
    size: Size,
    write: Write,
) {
    let depth = Depth::All(size.depth.clone());
    // SAFETY: passed on.
    unsafe { parts(simd, ahead, (a, b), c, size, depth, write) }
}

/// c = a b in the rows of `size`, and 0 in the remaining rows of `count`.
///
/// # Safety
/// As [`product`].
#[inline(always)]
pub(super) unsafe fn product_of_some<S: Simd>(
    simd: S,
    ahead: &mut Ahead,
    sides: (Left, Matrix),
    c: Matrix,
    size: Size,
    count: usize,
) {
    // SAFETY: the caller vouches for the memory.
    unsafe {
        for others in [0..size.rows.start, size.rows.end..count] {
            c.at.add(others.start * c.row).write_bytes(0, others.len() * c.row);
        }
        product(simd, ahead, sides, c, size, Write::Set);
    }
}

/// c = factor ∘ c + a b, where row i of `a` holds zeros outside of `range(i)`.
///
/// # Safety
/// As [`product`].
#[inline(always)]
pub(super) unsafe fn triangle<S: Simd>(
    simd: S,
    ahead: &mut Ahead,
    (a, b): (Left, Matrix),
    c: Matrix,
    size: Size,
    range: &dyn Fn(usize) -> Range<usize>,
    factor: &[f32; CHUNK],
) {
    // SAFETY: the caller vouches for the memory; rows of scratch are whole vectors.
    unsafe {
        let exact = !all_finite(simd, b.at, size.depth.end * b.row);
        let (depth, write) = (Depth::Rows { range, exact }, Write::Rescale(factor.as_ptr()));
        parts(simd, ahead, (a, b), c, size, depth, write);
    }
}

/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn parts<S: Simd>(
    simd: S,
    ahead: &mut Ahead,
    (a, b): (Left, Matrix),
    c: Matrix,
    Size { rows, columns, .. }: Size,
    depth: Depth<'_>,
    write: Write,
) {
    for part in even_parts(rows.len(), S::TILE_ROWS) {
        ahead.fetch(simd);
        let product = Product {
            a: a.at,
            a_row: a.row,
            a_depth: a.column,
            b: b.at,
            b_depth: b.row,
            c: c.at,
            c_row: c.row,
            rows: rows.start + part.start..rows.start + part.end,
            vectors: columns / S::LANES,
            depth: depth.clone(),
            write,
        };
        // SAFETY: passed on.
        unsafe { product.compute(simd) }
    }
}

/// p = a bᵀ on and below the diagonal, for `count` rows and columns of length `dim`; b comes as
/// columns.
///
/// # Safety
/// As [`product`].
#[inline(always)]
pub(super) unsafe fn scores<S: Simd>(
    simd: S,
    ahead: &mut Ahead,
    (a, columns): (Matrix, Matrix),
    p: Matrix,
    (count, dim): (usize, usize),
) {
    for first in (0..count).step_by(S::LANES) {
        let end = first + S::LANES;
        let size = Size { rows: first..end.min(count), columns: end, depth: 0..dim };
        // SAFETY: passed on.
        unsafe { product(simd, ahead, (a.left(), columns), p, size, Write::Set) }
    }
}

/// Rows as columns: `to` becomes the transpose of `rows` × `columns` floats, rounded up to whole
/// squares of vectors. What is beyond `rows` and `columns` is arbitrary.
///
/// # Safety
/// Both are scratch with room for whole squares, and do not overlap.
#[inline(always)]
pub(super) unsafe fn flip<S: Simd>(
    simd: S,
    from: Matrix,
    (rows, columns): (usize, usize),
    to: Matrix,
) {
    for column in (0..columns).step_by(S::LANES) {
        for row in (0..rows).step_by(S::LANES) {
            // SAFETY: passed on.
            unsafe {
                let source = from.at.add(row * from.row + column);
                simd.transpose(source, from.row, to.at.add(column * to.row + row), to.row);
            }
        }
    }
}

/// Multiplies each row of `width` floats by its factor.
///
/// # Safety
/// There is a row for each factor, and all of it is this thread's.
#[inline(always)]
pub(super) unsafe fn scale_rows<S: Simd>(simd: S, rows: Matrix, width: usize, factors: &[f32]) {
    for (row, factor) in factors.iter().enumerate() {
        let factor = simd.splat(*factor);
        for d in (0..width).step_by(S::LANES) {
            // SAFETY: the caller vouches for the memory; widths are multiples of the lanes.
            unsafe {
                let at = rows.at.add(row * rows.row + d);
                simd.store(at, simd.mul(simd.load(at), factor));
            }
        }
    }
}

/// Rows of an array that belong to one head.
pub(super) fn rows_of<'a>(
    array: &'a HostArray,
    (batch, head): (usize, usize),
    rows: &Range<usize>,
) -> Rows<'a> {
    Rows { array, batch, head, rows: rows.clone() }
}

/// Bytes of an array from which on its rows are written past the caches. Else lines that are not in
/// them are read before they are overwritten, and push out what is in use: with results of 64 MiB
/// that took a sixth of the time of both passes.
const STREAMED: usize = 1 << 25;

/// Writes rows of floats to an array of any element type; [`Simd::fence`] comes after the last.
///
/// # Safety
/// This thread alone may write the rows; `source` holds all of them.
#[inline(always)]
pub(super) unsafe fn store<S: Simd>(simd: S, to: &Rows<'_>, source: Matrix) {
    let Rows { array, batch, head, rows } = to;
    let streams = array.dtype == Dtype::F32
        && array.bytes(&array.rows) >= STREAMED
        && array.dim.is_multiple_of(16)
        && [
            array.ptr.as_ptr() as usize / 4,
            array.row_stride,
            array.head_stride,
            array.batch_stride,
        ]
        .iter()
        .all(|at| at.is_multiple_of(16));
    for (i, row) in rows.clone().enumerate() {
        let target = array.row(*batch, row, *head);
        // SAFETY: the caller vouches for both sides; rows that are streamed are whole lines of the
        // cache, and vectors no longer than those.
        unsafe {
            let source = source.at.add(i * source.row);
            if streams {
                for d in (0..array.dim).step_by(S::LANES) {
                    simd.stream(target.cast::<f32>().add(d), simd.load(source.add(d)));
                }
            } else {
                store_row(simd, source, 1.0, target, array.dtype, array.dim);
            }
        }
    }
}

/// The chunks of so many tokens.
pub(super) fn chunks(
    len: usize,
) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator {
    (0..len.div_ceil(CHUNK)).map(move |chunk| chunk * CHUNK..len.min((chunk + 1) * CHUNK))
}
