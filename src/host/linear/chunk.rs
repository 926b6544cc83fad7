//! A chunk of consecutive tokens of one head, and the products that its results are made of.

use std::ops::Range;

use super::prefetch::Prefetch;
use crate::host::matmul::{Depth, Left, Matrix, Product, Write, even_parts};
use crate::host::pack::{HeadRows, rows_are_finite, store_row};
use crate::host::simd::Simd;
use crate::problem::Dtype;

/// Tokens of a chunk, a multiple of the lanes of every instruction set. Work within a chunk grows
/// with the square of its length, and each chunk adds the work on the state. With head_dim 64,
/// chunks of 32 take as long.
pub(super) const CHUNK: usize = 64;

/// Computes c = a b, or adds to c as `write` says, in some rows and columns and over some depth.
///
/// # Safety
/// The caller guarantees that all three matrices are this thread's, that they have these rows, this
/// depth and these columns, which are whole vectors, and that c overlaps neither side.
#[inline(always)]
pub(super) unsafe fn product<S: Simd>(
    simd: S,
    prefetch: &mut Prefetch,
    sides: (Left, Matrix),
    c: Matrix,
    (rows, columns, depth): (Range<usize>, Range<usize>, Range<usize>),
    write: Write,
) {
    // SAFETY: the caller guarantees the three matrices.
    unsafe { product_in_parts(simd, prefetch, sides, c, (rows, columns), Depth::All(depth), write) }
}

/// Computes c = a b in some rows and over some depth, and writes 0 to all other rows up to `count`.
///
/// # Safety
/// The caller guarantees what [`product`] asks for, and that c has `count` rows.
#[inline(always)]
pub(super) unsafe fn product_and_zeros<S: Simd>(
    simd: S,
    prefetch: &mut Prefetch,
    sides: (Left, Matrix),
    c: Matrix,
    (rows, depth): (Range<usize>, Range<usize>),
    count: usize,
) {
    // SAFETY: the caller guarantees the three matrices, and `count` rows of c.
    unsafe {
        for others in [0..rows.start, rows.end..count] {
            c.skip(others.start).clear(others.len());
        }
        product(simd, prefetch, sides, c, (rows, 0..c.row, depth), Write::Set);
    }
}

/// Computes c = a b, or adds to c as `write` says, in some rows and columns, where row i of `a` has
/// zeros outside of `range(i)`.
///
/// # Safety
/// The caller guarantees what [`product`] asks for.
#[inline(always)]
pub(super) unsafe fn triangular_product<S: Simd>(
    simd: S,
    prefetch: &mut Prefetch,
    (a, b): (Left, Matrix),
    c: Matrix,
    (rows, columns): (Range<usize>, Range<usize>),
    range: &dyn Fn(usize) -> Range<usize>,
    write: Write,
) {
    let depth = range(rows.start).start..range(rows.end - 1).end;
    // SAFETY: the caller guarantees the three matrices. Rows of scratch are whole vectors.
    unsafe {
        let exact = !rows_are_finite(simd, b, depth, &columns);
        let depth = Depth::Rows { range, exact };
        product_in_parts(simd, prefetch, (a, b), c, (rows, columns), depth, write);
    }
}

/// Computes some rows and columns of a product, a few rows at a time, with prefetches between.
///
/// # Safety
/// The caller guarantees what [`product`] asks for.
#[inline(always)]
unsafe fn product_in_parts<S: Simd>(
    simd: S,
    prefetch: &mut Prefetch,
    (a, b): (Left, Matrix),
    c: Matrix,
    (rows, columns): (Range<usize>, Range<usize>),
    depth: Depth<'_>,
    write: Write,
) {
    let (b, c) = (b.skip_columns(columns.start), c.skip_columns(columns.start));
    let write = match write {
        Write::Onto(from, factors) => Write::Onto(from.wrapping_add(columns.start), factors),
        write => write,
    };
    for part in even_parts(rows.len(), S::TILE_ROWS) {
        prefetch.fetch(simd);
        let rows = rows.start + part.start..rows.start + part.end;
        let (vectors, depth) = (columns.len() / S::LANES, depth.clone());
        // SAFETY: the caller guarantees the three matrices.
        unsafe { Product { a, b, c, rows, vectors, depth, write }.compute(simd) }
    }
}

/// Computes p = a bᵀ on and below the diagonal, for `count` rows and columns of length `dim`. The
/// rows of b come as columns.
///
/// # Safety
/// The caller guarantees what [`product`] asks for.
#[inline(always)]
pub(super) unsafe fn scores<S: Simd>(
    simd: S,
    prefetch: &mut Prefetch,
    (a, columns): (Matrix, Matrix),
    p: Matrix,
    (count, dim): (usize, usize),
) {
    for first in (0..count).step_by(S::LANES) {
        let end = first + S::LANES;
        let (sides, size) = ((a.left(), columns), (first..end.min(count), 0..end));
        let depth = Depth::All(0..dim);
        // SAFETY: the caller guarantees the three matrices.
        unsafe { product_in_parts(simd, prefetch, sides, p, size, depth, Write::Set) }
    }
}

/// Writes the transpose of `rows` × `columns` floats, rounded up to whole squares of vectors.
/// Floats beyond `rows` and `columns` are arbitrary.
///
/// # Safety
/// The caller guarantees that both are scratch of this thread with room for whole squares, and do
/// not overlap.
#[inline(always)]
pub(super) unsafe fn transpose<S: Simd>(
    simd: S,
    from: Matrix,
    (rows, columns): (usize, usize),
    to: Matrix,
) {
    for column in (0..columns).step_by(S::LANES) {
        for row in (0..rows).step_by(S::LANES) {
            // SAFETY: the caller guarantees room for whole squares.
            unsafe {
                let source = from.at.add(row * from.row + column);
                simd.transpose(source, from.row, to.at.add(column * to.row + row), to.row);
            }
        }
    }
}

/// Multiplies each row by its factor.
///
/// # Safety
/// The caller guarantees that there is a row of whole vectors for each factor, and that the rows
/// are this thread's.
#[inline(always)]
pub(super) unsafe fn scale_rows<S: Simd>(simd: S, rows: Matrix, factors: &[f32]) {
    for (row, factor) in factors.iter().enumerate() {
        let factor = simd.splat(*factor);
        for d in (0..rows.row).step_by(S::LANES) {
            // SAFETY: the caller guarantees the row and whole vectors.
            unsafe {
                let at = rows.at.add(row * rows.row + d);
                simd.store(at, simd.mul(simd.load(at), factor));
            }
        }
    }
}

/// Multiplies `count` rows by one factor.
///
/// # Safety
/// The caller guarantees what [`scale_rows`] asks for, and at most [`CHUNK`] rows.
#[inline(always)]
pub(super) unsafe fn scale_all<S: Simd>(simd: S, rows: Matrix, count: usize, factor: f32) {
    if factor != 1.0 {
        // SAFETY: the caller guarantees the rows.
        unsafe { scale_rows(simd, rows, &[factor; CHUNK][..count]) }
    }
}

/// Least bytes of an array whose rows are written past the caches. A write through the caches reads
/// each line before it overwrites the line, and pushes out lines that are in use: with results of
/// 64 MiB that took a sixth of the time of both passes.
const STREAMED: usize = 1 << 25;

/// Writes rows of floats to an array of any element type. [`Simd::fence`] must follow the last
/// write.
///
/// # Safety
/// The caller guarantees that `source` holds all rows, and that the array's rows are this thread's.
#[inline(always)]
pub(super) unsafe fn store<S: Simd>(simd: S, to: &HeadRows<'_>, source: Matrix) {
    let HeadRows { array, batch, head, rows } = to;
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
        // SAFETY: the caller guarantees the row on both sides. Rows that are streamed consist of
        // whole cache lines, and no vector is longer than a line.
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
