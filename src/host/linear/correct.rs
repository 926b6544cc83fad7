//! The correction of values by the delta rule: systems of equations among the tokens of a chunk.

use std::ops::Range;

use super::chunk::triangular_product;
use super::prefetch::Prefetch;
use super::runs::Runs;
use crate::host::matmul::{Matrix, Write};
use crate::host::simd::{Simd, Task};

/// Tokens of a block. Products bring what other blocks give to a block.
const BLOCK: usize = 16;

/// The equations of a chunk, with the products B of its keys with decay, below the diagonal:
///
/// ```text
/// e + B x = right side, x = β ∘ e;   backward: e + Bᵀ x = right side
/// ```
///
/// `e` holds the right side, and then the solution.
pub(super) struct Equations<'a> {
    pub runs: &'a Runs,
    /// −B.
    pub minus_b: Matrix,
    /// β of each token.
    pub beta: *const f32,
    pub e: Matrix,
    pub x: Matrix,
    /// The columns to solve for, whole vectors.
    pub columns: Range<usize>,
    pub backward: bool,
}

impl Equations<'_> {
    /// Solves the equations, block after block.
    ///
    /// # Safety
    /// The caller guarantees that the matrices have the rows of the chunk and these columns, that
    /// the columns of `e` and `x` are this thread's, and that no matrix overlaps another.
    #[inline(always)]
    pub unsafe fn solve<S: Simd>(&self, simd: S, prefetch: &mut Prefetch) {
        let Equations { runs, minus_b, e, x, backward, .. } = *self;
        let count = runs.count();
        for number in 0..count.div_ceil(BLOCK) {
            let number = if backward { count.div_ceil(BLOCK) - 1 - number } else { number };
            let block = number * BLOCK..count.min((number + 1) * BLOCK);
            let (columns, write) = (self.columns.clone(), Write::Add);
            // SAFETY: the caller guarantees the matrices.
            unsafe {
                let others = if backward { block.end..count } else { 0..block.start };
                if !others.is_empty() {
                    let before = |row| runs.until(row).start.min(others.end)..others.end;
                    let after = |row| others.start..runs.since(row).end.max(others.start);
                    let (left, range): (_, &dyn Fn(usize) -> Range<usize>) = match backward {
                        true => (minus_b.transposed(), &after),
                        false => (minus_b.left(), &before),
                    };
                    let size = (block.clone(), columns);
                    triangular_product(simd, prefetch, (left, x), e, size, range, write);
                }
                simd.vectorize(Block { of: self, rows: block });
            }
        }
    }
}

/// The equations among the tokens of a block.
struct Block<'a> {
    of: &'a Equations<'a>,
    rows: Range<usize>,
}

impl Task for Block<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Range { start, end } = self.of.columns;
        let mut column = start;
        while column < end {
            // SAFETY: `Equations::solve` is the only caller, and its caller guarantees the matrices.
            unsafe {
                match (end - column) / S::LANES {
                    1 => self.columns::<S, 1>(simd, &mut column),
                    2 | 3 => self.columns::<S, 2>(simd, &mut column),
                    _ => self.columns::<S, 4>(simd, &mut column),
                }
            }
        }
    }
}

impl Block<'_> {
    /// Solves for `N` vectors of columns, and moves `column` behind them.
    ///
    /// # Safety
    /// The caller guarantees what [`Equations::solve`] asks for.
    #[inline(always)]
    unsafe fn columns<S: Simd, const N: usize>(&self, simd: S, column: &mut usize) {
        let Equations { runs, minus_b, beta, e, x, backward, .. } = *self.of;
        let Range { start, end } = self.rows;
        let (e, x) = (e.skip_columns(*column), x.skip_columns(*column));
        for step in 0..end - start {
            let row = if backward { end - 1 - step } else { start + step };
            let (others, first, stride) = match backward {
                true => (row + 1..runs.since(row).end.min(end), row, minus_b.row),
                false => (runs.until(row).start.max(start)..row, row * minus_b.row, 1),
            };
            // SAFETY: the caller guarantees the matrices.
            unsafe {
                let at = e.at.add(row * e.row);
                let mut sums = [simd.zero(); N];
                for (n, sum) in sums.iter_mut().enumerate() {
                    *sum = simd.load(at.add(n * S::LANES));
                }
                for other in others {
                    let factor = simd.splat(*minus_b.at.add(first + other * stride));
                    for (n, sum) in sums.iter_mut().enumerate() {
                        let right = simd.load(x.at.add(other * x.row + n * S::LANES));
                        *sum = simd.mul_add(factor, right, *sum);
                    }
                }
                let (beta, to) = (simd.splat(*beta.add(row)), x.at.add(row * x.row));
                for (n, sum) in sums.iter().enumerate() {
                    simd.store(at.add(n * S::LANES), *sum);
                    simd.store(to.add(n * S::LANES), simd.mul(*sum, beta));
                }
            }
        }
        *column += N * S::LANES;
    }
}
