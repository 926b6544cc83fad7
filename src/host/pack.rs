//! Copies blocks of arrays to contiguous float32 scratch and back, and works on such scratch.

use std::ops::Range;

use half::{bf16, f16};

use super::array::HostArray;
use super::matmul::Matrix;
use super::simd::Simd;
use crate::problem::Dtype;

/// Rows of one head of an array, in one batch entry.
#[derive(Clone)]
pub(super) struct HeadRows<'a> {
    pub array: &'a HostArray,
    pub batch: usize,
    pub head: usize,
    pub rows: Range<usize>,
}

impl HostArray {
    /// Selects rows of a head in a batch entry.
    pub(super) fn head_rows(
        &self,
        (batch, head): (usize, usize),
        rows: &Range<usize>,
    ) -> HeadRows<'_> {
        HeadRows { array: self, batch, head, rows: rows.clone() }
    }
}

impl HeadRows<'_> {
    /// Copies the rows to `target`, with zeros after `dim` floats of each row.
    ///
    /// # Safety
    /// The caller guarantees that the rows are readable, and that `target` has room for all rows,
    /// of `dim` floats or more.
    #[inline(always)]
    pub unsafe fn pack<S: Simd>(&self, simd: S, target: Matrix) {
        // SAFETY: the caller guarantees the rows and the room.
        unsafe {
            self.copy(simd, target);
            for i in 0..self.rows.len() {
                for d in self.array.dim..target.row {
                    *target.at.add(i * target.row + d) = 0.0;
                }
            }
        }
    }

    /// Copies the rows to the first `dim` floats of rows of `target`.
    ///
    /// # Safety
    /// The caller guarantees what [`HeadRows::pack`] asks for.
    #[inline(always)]
    pub unsafe fn copy<S: Simd>(&self, simd: S, target: Matrix) {
        let HeadRows { array, batch, head, rows } = self;
        for (i, row) in rows.clone().enumerate() {
            let source = array.row(*batch, row, *head);
            // SAFETY: the caller guarantees that the row is readable and `target` has room for it.
            unsafe {
                load_row(simd, source, array.dtype, target.at.add(i * target.row), array.dim);
            }
        }
    }

    /// Writes rows of floats, times `factor`, to the rows of a float32 array, or adds them if
    /// `add`.
    ///
    /// # Safety
    /// The caller guarantees that `source` holds all rows, and that this thread alone uses the
    /// array's rows meanwhile.
    #[inline(always)]
    pub unsafe fn unpack<S: Simd>(&self, simd: S, source: Matrix, factor: f32, add: bool) {
        debug_assert_eq!(self.array.dtype, Dtype::F32);
        let dim = self.array.dim;
        let whole = dim - dim % S::LANES;
        let factors = simd.splat(factor);
        for (i, row) in self.rows.clone().enumerate() {
            let target = self.array.row(self.batch, row, self.head).cast::<f32>();
            // SAFETY: the caller guarantees that `source` holds the row, and that the array's row
            // is this thread's.
            unsafe {
                let source = source.at.add(i * source.row);
                for d in (0..whole).step_by(S::LANES) {
                    let x = simd.load(source.add(d));
                    let old = if add { simd.load(target.add(d)) } else { simd.zero() };
                    simd.store(target.add(d), simd.mul_add(x, factors, old));
                }
                for d in whole..dim {
                    let old = if add { *target.add(d) } else { 0.0 };
                    *target.add(d) = *source.add(d) * factor + old;
                }
            }
        }
    }

    /// Copies the values of a float32 array with `dim` 1 to consecutive floats.
    ///
    /// # Safety
    /// The caller guarantees that the rows are readable, and that `target` has room for all rows.
    #[inline(always)]
    pub unsafe fn pack_column(&self, target: *mut f32) {
        for (i, row) in self.rows.clone().enumerate() {
            // SAFETY: the caller guarantees that the row is readable and `target` has room for it.
            unsafe { *target.add(i) = *self.array.row(self.batch, row, self.head).cast::<f32>() }
        }
    }

    /// Writes consecutive floats to the values of a float32 array with `dim` 1.
    ///
    /// # Safety
    /// The caller guarantees that `source` holds all rows, and that this thread alone uses the
    /// array's rows meanwhile.
    #[inline(always)]
    pub unsafe fn unpack_column(&self, source: *const f32) {
        for (i, row) in self.rows.clone().enumerate() {
            // SAFETY: the caller guarantees that `source` holds the row, and that the array's row
            // is this thread's.
            unsafe { *self.array.row(self.batch, row, self.head).cast::<f32>() = *source.add(i) }
        }
    }
}

/// Reads a vector of any element type.
///
/// # Safety
/// The caller guarantees that `S::LANES` elements at `source` are readable.
#[inline(always)]
pub(super) unsafe fn load<S: Simd>(simd: S, source: *const u8, dtype: Dtype) -> S::Vector {
    // SAFETY: the caller guarantees that the elements are readable.
    unsafe {
        match dtype {
            Dtype::F32 => simd.load(source.cast()),
            Dtype::Bf16 => simd.load_bf16(source.cast()),
            Dtype::F16 => simd.load_f16(source.cast()),
        }
    }
}

/// Reads one element of any type.
///
/// # Safety
/// The caller guarantees that the element is readable.
#[inline(always)]
unsafe fn load_one(source: *const u8, dtype: Dtype) -> f32 {
    // SAFETY: the caller guarantees that the element is readable.
    unsafe {
        match dtype {
            Dtype::F32 => *source.cast::<f32>(),
            Dtype::Bf16 => (*source.cast::<bf16>()).to_f32(),
            Dtype::F16 => (*source.cast::<f16>()).to_f32(),
        }
    }
}

/// Converts `dim` elements to float32.
///
/// # Safety
/// The caller guarantees that the elements are readable, and that `target` has room for `dim`
/// floats.
#[inline(always)]
pub(super) unsafe fn load_row<S: Simd>(
    simd: S,
    source: *const u8,
    dtype: Dtype,
    target: *mut f32,
    dim: usize,
) {
    let whole = dim - dim % S::LANES;
    // SAFETY: the caller guarantees that `source` is readable and `target` writable up to `dim`.
    unsafe {
        for d in (0..whole).step_by(S::LANES) {
            simd.store(target.add(d), load(simd, source.add(d * dtype.bytes()), dtype));
        }
        for d in whole..dim {
            *target.add(d) = load_one(source.add(d * dtype.bytes()), dtype);
        }
    }
}

/// Rounds `dim` floats, times `factor`, to an element type.
///
/// # Safety
/// The caller guarantees that the floats are readable, and that `target` has room for `dim`
/// elements.
#[inline(always)]
pub(super) unsafe fn store_row<S: Simd>(
    simd: S,
    source: *const f32,
    factor: f32,
    target: *mut u8,
    dtype: Dtype,
    dim: usize,
) {
    let whole = dim - dim % S::LANES;
    let factors = simd.splat(factor);
    // SAFETY: the caller guarantees that `source` is readable and `target` writable up to `dim`.
    unsafe {
        for d in (0..whole).step_by(S::LANES) {
            let x = simd.mul(simd.load(source.add(d)), factors);
            let target = target.add(d * dtype.bytes());
            match dtype {
                Dtype::F32 => simd.store(target.cast(), x),
                Dtype::Bf16 => simd.store_bf16(target.cast(), x),
                Dtype::F16 => simd.store_f16(target.cast(), x),
            }
        }
        for d in whole..dim {
            let x = *source.add(d) * factor;
            let target = target.add(d * dtype.bytes());
            match dtype {
                Dtype::F32 => *target.cast::<f32>() = x,
                Dtype::Bf16 => *target.cast::<bf16>() = bf16::from_f32(x),
                Dtype::F16 => *target.cast::<f16>() = f16::from_f32(x),
            }
        }
    }
}

/// Multiplies `len` floats by `factor`; `len` is a multiple of the lanes.
///
/// # Safety
/// The caller guarantees that the floats are this thread's.
#[inline(always)]
pub(super) unsafe fn scale<S: Simd>(simd: S, values: *mut f32, len: usize, factor: f32) {
    for i in (0..len).step_by(S::LANES) {
        // SAFETY: the caller guarantees that the floats are this thread's.
        unsafe {
            let at = values.add(i);
            simd.store(at, simd.mul(simd.load(at), simd.splat(factor)));
        }
    }
}

/// Writes rows as columns, in panels, with zeros in lanes beyond `rows`:
///
/// ```text
/// target[panel][d][lane] = factor · source[first lane of panel + lane][d]
/// ```
///
/// A panel is as wide as a register tile, and [`panels`] says where each panel begins.
///
/// # Safety
/// The caller guarantees that `source` holds `rows` rows of `dim` floats, that `target` has room
/// for `dim` floats per lane, and that both are this thread's and do not overlap.
#[inline(always)]
pub(super) unsafe fn transpose<S: Simd>(
    simd: S,
    source: Matrix,
    (rows, dim): (usize, usize),
    factor: f32,
    target: *mut f32,
) {
    let width = source.row;
    for lanes in panels::<S>(rows) {
        let Matrix { at: panel, row: across } = panel(target, &lanes, dim);
        for first in lanes.clone().step_by(S::LANES) {
            let panel = panel.wrapping_add(first - lanes.start);
            // Floats outside of whole squares of vectors are copied one by one.
            let whole = if first + S::LANES <= rows { dim - dim % S::LANES } else { 0 };
            // SAFETY: the caller guarantees the rows of `source` and the room in `target`.
            unsafe {
                for d in (0..whole).step_by(S::LANES) {
                    let from = source.at.add(first * width + d);
                    simd.transpose(from, width, panel.add(d * across), across);
                }
                for d in 0..whole {
                    let at = panel.add(d * across);
                    simd.store(at, simd.mul(simd.load(at), simd.splat(factor)));
                }
                for (lane, row) in (first..first + S::LANES).enumerate() {
                    for d in whole..dim {
                        let from = source.at.add(row * width + d);
                        let x = if row < rows { *from * factor } else { 0.0 };
                        *panel.add(d * across + lane) = x;
                    }
                }
            }
        }
    }
}

/// Returns the lanes of each panel over `rows` rows. The last lanes may lie beyond `rows`.
#[inline(always)]
pub(super) fn panels<S: Simd>(rows: usize) -> impl Iterator<Item = Range<usize>> {
    super::matmul::even_parts(rows.div_ceil(S::LANES), S::TILE_VECTORS)
        .map(|part| part.start * S::LANES..part.end * S::LANES)
}

/// Returns the panel of `lanes` among panels of `dim` rows.
#[inline(always)]
pub(super) fn panel(panels: *mut f32, lanes: &Range<usize>, dim: usize) -> Matrix {
    Matrix { at: panels.wrapping_add(lanes.start * dim), row: lanes.len() }
}

/// Whether all of `len` floats are finite; `len` is a multiple of the lanes.
///
/// # Safety
/// The caller guarantees that the floats are readable.
#[inline(always)]
pub(super) unsafe fn all_finite<S: Simd>(simd: S, values: *const f32, len: usize) -> bool {
    let row = Matrix { at: values.cast_mut(), row: len };
    // SAFETY: the caller guarantees that the floats are readable.
    unsafe { rows_are_finite(simd, row, 0..1, &(0..len)) }
}

/// Whether all floats of some rows and columns, which are whole vectors, are finite.
///
/// # Safety
/// The caller guarantees that the floats are readable.
#[inline(always)]
pub(super) unsafe fn rows_are_finite<S: Simd>(
    simd: S,
    matrix: Matrix,
    rows: Range<usize>,
    columns: &Range<usize>,
) -> bool {
    // x · 0 is NaN if x is not finite.
    let mut sums = [simd.zero(); 4];
    for row in rows {
        for (i, column) in columns.clone().step_by(S::LANES).enumerate() {
            let sum = &mut sums[i % 4];
            // SAFETY: the caller guarantees that the floats are readable.
            let x = unsafe { simd.load(matrix.at.add(row * matrix.row + column)) };
            *sum = simd.mul_add(x, simd.zero(), *sum);
        }
    }
    lanes(simd, total(simd, sums)).iter().all(|x| *x == 0.0)
}

/// Returns Σ a·b over `len` floats; `len` is a multiple of the lanes.
///
/// # Safety
/// The caller guarantees that the floats of both are readable.
#[inline(always)]
pub(super) unsafe fn dot<S: Simd>(simd: S, a: *const f32, b: *const f32, len: usize) -> f32 {
    let mut sums = [simd.zero(); 4];
    for i in (0..len).step_by(S::LANES) {
        let sum = &mut sums[i / S::LANES % 4];
        // SAFETY: the caller guarantees that the floats of both are readable.
        *sum = unsafe { simd.mul_add(simd.load(a.add(i)), simd.load(b.add(i)), *sum) };
    }
    sum(simd, total(simd, sums))
}

/// Returns the total of four sums. A loop adds to them in turns, so that no addition waits for the
/// one before.
#[inline(always)]
fn total<S: Simd>(simd: S, [a, b, c, d]: [S::Vector; 4]) -> S::Vector {
    simd.add(simd.add(a, b), simd.add(c, d))
}

/// Returns the lanes of a vector, with zeros behind them.
#[inline(always)]
fn lanes<S: Simd>(simd: S, x: S::Vector) -> [f32; 16] {
    let mut lanes = [0.0f32; 16];
    // SAFETY: no vector has more than 16 lanes, so `lanes` has room.
    unsafe { simd.store(lanes.as_mut_ptr(), x) };
    lanes
}

/// Returns the sum of a vector's lanes.
#[inline(always)]
pub(super) fn sum<S: Simd>(simd: S, x: S::Vector) -> f32 {
    lanes(simd, x).iter().sum()
}
