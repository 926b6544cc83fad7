//! Blocks of arrays as contiguous float32 scratch, and back.

use std::cell::RefCell;
use std::ops::Range;

use half::{bf16, f16};

use super::array::HostArray;
use super::simd::Simd;
use crate::problem::Dtype;

/// A cache line of floats, for alignment.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; Scratch::LINE]);

/// Hands out disjoint, aligned pieces of this thread's scratch memory.
pub(super) struct Scratch {
    next: *mut f32,
    left: usize,
}

impl Scratch {
    const LINE: usize = 16;

    /// Floats that a piece of `len` takes up.
    pub const fn footprint(len: usize) -> usize {
        len.next_multiple_of(Scratch::LINE)
    }

    /// Calls `work` with `len` floats of scratch, which hold arbitrary numbers. The memory stays
    /// with the thread for its next task.
    pub fn with(len: usize, work: impl FnOnce(Scratch)) {
        thread_local! {
            static LINES: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
        }
        LINES.with_borrow_mut(|lines| {
            let count = len.div_ceil(Scratch::LINE);
            if lines.len() < count {
                lines.resize(count, Line([0.0; Scratch::LINE]));
            }
            work(Scratch { next: lines.as_mut_ptr().cast(), left: count * Scratch::LINE });
        });
    }

    /// The next `len` floats.
    ///
    /// # Panics
    /// If more is taken than was asked for.
    pub fn take(&mut self, len: usize) -> *mut f32 {
        let len = Scratch::footprint(len);
        assert!(len <= self.left, "scratch of {} floats left, {len} wanted", self.left);
        let piece = self.next;
        self.next = piece.wrapping_add(len);
        self.left -= len;
        piece
    }
}

/// Rows of one batch entry and head of an array.
#[derive(Clone)]
pub(super) struct Rows<'a> {
    pub array: &'a HostArray,
    pub batch: usize,
    pub head: usize,
    pub rows: Range<usize>,
}

impl Rows<'_> {
    /// Copies the rows to `target`, row after row of `width` floats, with zeros after `dim`.
    ///
    /// # Safety
    /// The array's rows may be read, `target` has room for all of them; `width` ≥ dim.
    #[inline(always)]
    pub unsafe fn pack<S: Simd>(&self, simd: S, target: *mut f32, width: usize) {
        let dim = self.array.dim;
        for (i, row) in self.rows.clone().enumerate() {
            let source = self.array.row(self.batch, row, self.head);
            // SAFETY: the caller vouches for both sides.
            unsafe {
                let target = target.add(i * width);
                load_row(simd, source, self.array.dtype, target, dim);
                for d in dim..width {
                    *target.add(d) = 0.0;
                }
            }
        }
    }

    /// Writes rows of `width` floats, times `factor`, into the array's rows (`add`: adds them).
    /// The array is float32.
    ///
    /// # Safety
    /// This thread alone may write the array's rows; `source` holds all of them.
    #[inline(always)]
    pub unsafe fn unpack<S: Simd>(
        &self,
        simd: S,
        source: *const f32,
        width: usize,
        factor: f32,
        add: bool,
    ) {
        debug_assert_eq!(self.array.dtype, Dtype::F32);
        let dim = self.array.dim;
        let whole = dim - dim % S::LANES;
        let factors = simd.splat(factor);
        for (i, row) in self.rows.clone().enumerate() {
            let target = self.array.row(self.batch, row, self.head).cast::<f32>();
            // SAFETY: the caller vouches for both sides.
            unsafe {
                let source = source.add(i * width);
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

    /// The values of an array with `dim` 1, into consecutive floats.
    ///
    /// # Safety
    /// The array's rows may be read, `target` has room for all of them.
    #[inline(always)]
    pub unsafe fn pack_column(&self, target: *mut f32) {
        for (i, row) in self.rows.clone().enumerate() {
            // SAFETY: the caller vouches for both sides.
            unsafe { *target.add(i) = *self.array.row(self.batch, row, self.head).cast::<f32>() }
        }
    }

    /// Consecutive floats into the values of an array with `dim` 1.
    ///
    /// # Safety
    /// This thread alone may write the array's rows; `source` holds all of them.
    #[inline(always)]
    pub unsafe fn unpack_column(&self, source: *const f32) {
        for (i, row) in self.rows.clone().enumerate() {
            // SAFETY: the caller vouches for both sides.
            unsafe { *self.array.row(self.batch, row, self.head).cast::<f32>() = *source.add(i) }
        }
    }
}

/// Reads a vector of any element type.
///
/// # Safety
/// `S::LANES` elements at `source` are readable.
#[inline(always)]
pub(super) unsafe fn load<S: Simd>(simd: S, source: *const u8, dtype: Dtype) -> S::Vector {
    // SAFETY: the caller vouches for the memory.
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
/// It is readable.
#[inline(always)]
unsafe fn load_one(source: *const u8, dtype: Dtype) -> f32 {
    // SAFETY: the caller vouches for the memory.
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
/// They are readable and `target` has room for them.
#[inline(always)]
unsafe fn load_row<S: Simd>(
    simd: S,
    source: *const u8,
    dtype: Dtype,
    target: *mut f32,
    dim: usize,
) {
    let whole = dim - dim % S::LANES;
    // SAFETY: the caller vouches for the memory.
    unsafe {
        for d in (0..whole).step_by(S::LANES) {
            simd.store(target.add(d), load(simd, source.add(d * dtype.bytes()), dtype));
        }
        for d in whole..dim {
            *target.add(d) = load_one(source.add(d * dtype.bytes()), dtype);
        }
    }
}

/// Rounds `dim` floats, times `factor`, to the element type.
///
/// # Safety
/// They are readable and `target` has room for them.
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
    // SAFETY: the caller vouches for the memory.
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
/// They are this thread's.
#[inline(always)]
pub(super) unsafe fn scale<S: Simd>(simd: S, values: *mut f32, len: usize, factor: f32) {
    for i in (0..len).step_by(S::LANES) {
        // SAFETY: the caller vouches for the memory.
        unsafe {
            let at = values.add(i);
            simd.store(at, simd.mul(simd.load(at), simd.splat(factor)));
        }
    }
}

/// Rows as columns: `target[panel][d][lane] = factor · source[first lane of panel + lane][d]`,
/// with zeros in lanes beyond `rows`. A panel is a register tile wide, and [`panels`] says where
/// each begins.
///
/// # Safety
/// `source` holds `rows` rows of `width` floats, `target` has room for `dim` floats per lane.
#[inline(always)]
pub(super) unsafe fn transpose<S: Simd>(
    simd: S,
    source: *const f32,
    width: usize,
    rows: usize,
    dim: usize,
    factor: f32,
    target: *mut f32,
) {
    for lanes in panels::<S>(rows) {
        let panel = target.wrapping_add(lanes.start * dim);
        let across = lanes.len();
        for first in lanes.clone().step_by(S::LANES) {
            let panel = panel.wrapping_add(first - lanes.start);
            // What makes no whole square of vectors goes one by one.
            let whole = if first + S::LANES <= rows { dim - dim % S::LANES } else { 0 };
            // SAFETY: the caller vouches for both sides.
            unsafe {
                for d in (0..whole).step_by(S::LANES) {
                    let from = source.add(first * width + d);
                    simd.transpose(from, width, panel.add(d * across), across);
                }
                for d in 0..whole {
                    let at = panel.add(d * across);
                    simd.store(at, simd.mul(simd.load(at), simd.splat(factor)));
                }
                for (lane, row) in (first..first + S::LANES).enumerate() {
                    for d in whole..dim {
                        let x =
                            if row < rows { *source.add(row * width + d) * factor } else { 0.0 };
                        *panel.add(d * across + lane) = x;
                    }
                }
            }
        }
    }
}

/// The lanes of each panel over `rows` rows; the last ones may lie beyond `rows`.
#[inline(always)]
pub(super) fn panels<S: Simd>(rows: usize) -> impl Iterator<Item = Range<usize>> {
    super::matmul::even_parts(rows.div_ceil(S::LANES), S::TILE_VECTORS)
        .map(|part| part.start * S::LANES..part.end * S::LANES)
}

/// Is every one of `len` floats finite? `len` is a multiple of the lanes.
///
/// # Safety
/// They are readable.
#[inline(always)]
pub(super) unsafe fn all_finite<S: Simd>(simd: S, values: *const f32, len: usize) -> bool {
    // x · 0 is NaN for what is not finite.
    let mut sums = [simd.zero(); 4];
    for i in (0..len).step_by(S::LANES) {
        let sum = &mut sums[i / S::LANES % 4];
        // SAFETY: the caller vouches for the memory.
        *sum = simd.mul_add(unsafe { simd.load(values.add(i)) }, simd.zero(), *sum);
    }
    lanes(simd, total(simd, sums)).iter().all(|x| *x == 0.0)
}

/// Σ a·b over `len` floats, a multiple of the lanes.
///
/// # Safety
/// They are readable.
#[inline(always)]
pub(super) unsafe fn dot<S: Simd>(simd: S, a: *const f32, b: *const f32, len: usize) -> f32 {
    let mut sums = [simd.zero(); 4];
    for i in (0..len).step_by(S::LANES) {
        let sum = &mut sums[i / S::LANES % 4];
        // SAFETY: passed on.
        *sum = unsafe { simd.mul_add(simd.load(a.add(i)), simd.load(b.add(i)), *sum) };
    }
    sum(simd, total(simd, sums))
}

/// Of sums that were taken in turns, so that none waits for the one before.
#[inline(always)]
fn total<S: Simd>(simd: S, [a, b, c, d]: [S::Vector; 4]) -> S::Vector {
    simd.add(simd.add(a, b), simd.add(c, d))
}

/// The lanes of a vector, with zeros behind them.
#[inline(always)]
fn lanes<S: Simd>(simd: S, x: S::Vector) -> [f32; 16] {
    let mut lanes = [0.0f32; 16];
    // SAFETY: no vector has more than 16 lanes.
    unsafe { simd.store(lanes.as_mut_ptr(), x) };
    lanes
}

/// Sum of a vector's lanes.
#[inline(always)]
pub(super) fn sum<S: Simd>(simd: S, x: S::Vector) -> f32 {
    lanes(simd, x).iter().sum()
}
