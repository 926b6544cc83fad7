//! Sums of a tile's values, weighted by a block's softmax.

use std::marker::PhantomData;

use super::element::Element;
use super::scores::{MOST_ROWS, block_rows, lane_of};
use super::tile::{Ahead, QUAD, Seen, TILE};
use crate::host::matmul::even_parts;
use crate::host::simd::{Simd, Task};

/// Vectors of a row that are summed at a time. With four rows, 16 sums and the operands fill half
/// of the registers of AVX-512.
const COLUMNS: usize = 4;

/// Adds values to the outputs of a block of rows:
///
/// ```text
/// o' = o · alpha + Σ weight · v
/// ```
///
/// Keys that a row does not see are left out, since 0 · NaN is NaN.
pub(super) struct Values<'a, E> {
    /// Weights, as [`super::scores::Scores`] leaves them.
    pub weights: *const f32,
    pub alpha: *const f32,
    pub values: &'a [*const u8; TILE],
    /// Bytes from the addresses of the values to the head.
    pub skip: usize,
    pub seen: [Seen; MOST_ROWS],
    pub rows: usize,
    pub o: *mut f32,
    /// Vectors of a row of the output.
    pub vectors: usize,
    pub ahead: &'a mut Ahead,
    pub element: PhantomData<E>,
}

/// Returns the units of work of [`Values`], as the prefetch counts them.
pub(super) fn units(vectors: usize) -> usize {
    TILE / QUAD * vectors.div_ceil(COLUMNS)
}

impl<E: Element> Task for Values<'_, E> {
    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let rows = self.rows;
        // SAFETY: the caller of `compute` guarantees the memory behind all pointers.
        unsafe {
            if self.seen[..rows].iter().all(|seen| *seen == self.seen[0]) {
                match rows {
                    1 => self.block::<S, 1>(simd, 0),
                    2 => self.block::<S, 2>(simd, 0),
                    3 => self.block::<S, 3>(simd, 0),
                    _ => self.block::<S, 4>(simd, 0),
                }
            } else {
                (0..rows).for_each(|row| self.block::<S, 1>(simd, row));
            }
        }
    }
}

impl<E: Element> Values<'_, E> {
    /// Computes the block, in a function of its own.
    ///
    /// # Safety
    /// The caller guarantees that weights, alpha and values are readable, and that `rows` rows of
    /// the output are this thread's.
    #[inline(always)]
    pub unsafe fn compute<S: Simd>(self, simd: S) {
        simd.vectorize(self);
    }

    /// Computes `R` rows that see the same keys.
    ///
    /// # Safety
    /// The caller guarantees what [`Values::compute`] asks for.
    #[inline(always)]
    unsafe fn block<S: Simd, const R: usize>(&mut self, simd: S, row: usize) {
        if R > block_rows::<S>() {
            return;
        }
        for columns in even_parts(self.vectors, COLUMNS) {
            // SAFETY: the caller guarantees the memory behind all pointers.
            unsafe {
                match columns.len() {
                    1 => self.tile::<S, R, 1>(simd, row, columns.start),
                    2 => self.tile::<S, R, 2>(simd, row, columns.start),
                    3 => self.tile::<S, R, 3>(simd, row, columns.start),
                    _ => self.tile::<S, R, 4>(simd, row, columns.start),
                }
            }
        }
    }

    /// Computes `N` vectors of `R` rows.
    ///
    /// # Safety
    /// The caller guarantees what [`Values::compute`] asks for.
    #[inline(always)]
    unsafe fn tile<S: Simd, const R: usize, const N: usize>(
        &mut self,
        simd: S,
        row: usize,
        column: usize,
    ) {
        // SAFETY: the caller guarantees the memory behind all pointers.
        unsafe {
            let o = self.o.add((row * self.vectors + column) * S::LANES);
            let at = |r: usize, n: usize| o.add((r * self.vectors + n) * S::LANES);
            let mut sums = [[simd.zero(); N]; R];
            for (r, sums) in sums.iter_mut().enumerate() {
                let alpha = simd.splat(*self.alpha.add((row + r) * QUAD));
                for (n, sum) in sums.iter_mut().enumerate() {
                    *sum = simd.mul(simd.load(at(r, n)), alpha);
                }
            }
            for quad in 0..TILE / QUAD {
                let mut seen = self.seen[row] >> (quad * QUAD) & 0xf;
                while seen != 0 {
                    let key = quad * QUAD + seen.trailing_zeros() as usize;
                    seen &= seen - 1;
                    let value = self.values[key].wrapping_add(self.skip);
                    let mut right = [simd.zero(); N];
                    for (n, right) in right.iter_mut().enumerate() {
                        *right = E::load(simd, value, column + n);
                    }
                    let weights = self.weights.add(lane_of(key, row, S::LANES));
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let weight = simd.splat(*weights.add(r * QUAD));
                        for (sum, right) in sums.iter_mut().zip(right) {
                            *sum = simd.mul_add(weight, right, *sum);
                        }
                    }
                }
                self.ahead.fetch(simd, 1);
            }
            for (r, sums) in sums.iter().enumerate() {
                for (n, sum) in sums.iter().enumerate() {
                    simd.store(at(r, n), *sum);
                }
            }
        }
    }
}
