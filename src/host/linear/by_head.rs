//! The decays between the tokens of a chunk, one number for each token and head.

use std::ops::Range;

use super::chunk::{CHUNK, scores, triangular_product};
use super::decays::{DecayScratch, LEAST, Pairs, Terms};
use super::prefetch::Prefetch;
use super::runs::Runs;
use crate::host::array::HostArray;
use crate::host::matmul::{Matrix, Write};
use crate::host::simd::Simd;

/// The decays of a chunk. With b_t the sum of the log decays in base 2 from the start of the run to
/// token t, token a receives from token b of its run the part 2^(b_a − b_b). Each sum is kept as two
/// floats, so that their difference has digits left even if decays are strong.
pub(super) struct HeadDecays {
    high: [f32; CHUNK],
    low: [f32; CHUNK],
    /// The part of each token that is left at each token of its run, once [`HeadDecays::pair`] has
    /// written it.
    between: Matrix,
    /// The part of the state before the chunk that is left at each token; 0 from a reset on.
    pub from_start: [f32; CHUNK],
    /// The part of each token that is left in the state after the chunk; 0 before a reset.
    pub to_end: [f32; CHUNK],
}

impl HeadDecays {
    /// Reads the decays of `rows` of one head. A log decay of −∞ is a reset before its token. The
    /// part of the state that is left after the chunk goes to the scratch, for each row of a state.
    ///
    /// # Safety
    /// The caller guarantees that the rows are readable, and that the scratch is this thread's.
    #[inline(always)]
    pub unsafe fn read<S: Simd>(
        simd: S,
        array: &HostArray,
        (batch, head): (usize, usize),
        rows: &Range<usize>,
        scratch: &DecayScratch,
    ) -> (Runs, HeadDecays) {
        // SAFETY: the caller guarantees that the rows are readable.
        let log = |i| unsafe { *array.row(batch, rows.start + i, head).cast::<f32>() };
        let runs = Runs::new(rows.len(), |i| log(i) == f32::NEG_INFINITY);
        let (zeros, nothing) = ([0.0; CHUNK], [f32::NEG_INFINITY; CHUNK]);
        let mut decays = HeadDecays {
            high: zeros,
            low: zeros,
            between: scratch.between,
            from_start: nothing,
            to_end: nothing,
        };
        let (mut sums, mut sum) = ([0.0f64; CHUNK], 0.0f64);
        for (i, at) in sums[..rows.len()].iter_mut().enumerate() {
            let log = f64::from(log(i)) * std::f64::consts::LOG2_E;
            sum = match runs.resets(i) {
                true => 0.0,
                false => sum + if log < LEAST { LEAST } else { log },
            };
            *at = sum;
            decays.high[i] = sum as f32;
            decays.low[i] = (sum - f64::from(sum as f32)) as f32;
        }
        let first = runs.first();
        decays.from_start[first.clone()].copy_from_slice(&decays.high[first]);
        for i in runs.last() {
            decays.to_end[i] = (sum - sums[i]) as f32;
        }
        for factors in [&mut decays.from_start, &mut decays.to_end] {
            for at in (0..CHUNK).step_by(S::LANES) {
                // SAFETY: `factors` have CHUNK floats, a multiple of the lanes.
                unsafe {
                    let at = factors.as_mut_ptr().add(at);
                    simd.store(at, simd.exp2(simd.load(at)));
                }
            }
        }
        let carry = simd.splat(decays.from_start[rows.len() - 1]);
        for at in (0..scratch.width).step_by(S::LANES) {
            // SAFETY: the caller guarantees the scratch, which has `width` floats there.
            unsafe { simd.store(scratch.carry.add(at), carry) }
        }
        (runs, decays)
    }

    /// Computes the decays between tokens, on and below the diagonal.
    ///
    /// # Safety
    /// The caller guarantees that the scratch of the decays is this thread's.
    #[inline(always)]
    pub unsafe fn pair<S: Simd>(&self, simd: S, count: usize) {
        for row in 0..count {
            let (high, low) = (simd.splat(self.high[row]), simd.splat(self.low[row]));
            for column in (0..row + 1).step_by(S::LANES) {
                // SAFETY: both arrays have CHUNK floats. CHUNK and the column are multiples of the
                // lanes. The caller guarantees the scratch.
                unsafe {
                    let high = simd.sub(high, simd.load(self.high.as_ptr().add(column)));
                    let low = simd.sub(low, simd.load(self.low.as_ptr().add(column)));
                    let to = self.between.at.add(row * CHUNK + column);
                    simd.store(to, simd.exp2(simd.add(high, low)));
                }
            }
        }
    }

    /// Computes the products of `pairs` with decay, below the diagonal and, unless they are strict,
    /// on it, and writes 0 elsewhere. The rows of `pairs.b` come as `columns` too.
    ///
    /// # Safety
    /// The caller guarantees that the matrices are this thread's and have the rows of the chunk.
    #[inline(always)]
    pub unsafe fn scores<S: Simd>(
        &self,
        simd: S,
        prefetch: &mut Prefetch,
        runs: &Runs,
        pairs: &Pairs,
        columns: Matrix,
        dim: usize,
    ) {
        // SAFETY: the caller guarantees the matrices.
        unsafe {
            scores(simd, prefetch, (pairs.a, columns), pairs.p, (runs.count(), dim));
            for row in 0..runs.count() {
                for column in (0..runs.count()).step_by(S::LANES) {
                    let at = row * CHUNK + column;
                    let p = pairs.p.at.add(at);
                    if column > row {
                        simd.store(p, simd.zero());
                        continue;
                    }
                    let left = simd.load(self.between.at.add(at));
                    let left = simd.mul(left, simd.splat(pairs.sign));
                    let x = simd.mul(simd.load(p), left);
                    simd.store(p, runs.seen(simd, (row, column), pairs.end(row), x));
                }
            }
        }
    }

    /// Multiplies `dp`, the gradient of products of tokens with tokens, by the decay between them,
    /// and adds the gradients of both sides:
    ///
    /// ```text
    /// da += dp b;  db += dpᵀ a
    /// ```
    ///
    /// Sums of p ∘ dp without the diagonal are added to the terms.
    ///
    /// # Safety
    /// The caller guarantees what [`HeadDecays::scores`] asks for.
    #[inline(always)]
    pub unsafe fn gradients<S: Simd>(
        &self,
        simd: S,
        prefetch: &mut Prefetch,
        runs: &Runs,
        (pairs, dp): (&Pairs, Matrix),
        [da, db]: [Matrix; 2],
        terms: &mut Terms,
    ) {
        let (Pairs { a, b, .. }, all) = (*pairs, 0..runs.count());
        let (until, since) = (|row| runs.until(row), |row| runs.since(row));
        // SAFETY: the caller guarantees the matrices.
        unsafe {
            self.weigh(simd, runs, (pairs, dp), terms);
            let size = (all.clone(), 0..da.row);
            triangular_product(simd, prefetch, (dp.left(), b), da, size, &until, Write::Add);
            let (sides, size) = ((dp.transposed(), a), (all, 0..db.row));
            triangular_product(simd, prefetch, sides, db, size, &since, Write::Add);
        }
    }

    /// Multiplies `dp` by the decay between tokens, and adds the sums of p ∘ dp to the terms.
    ///
    /// # Safety
    /// The caller guarantees what [`HeadDecays::scores`] asks for.
    #[inline(always)]
    unsafe fn weigh<S: Simd>(
        &self,
        simd: S,
        runs: &Runs,
        (pairs, dp): (&Pairs, Matrix),
        terms: &mut Terms,
    ) {
        let Pairs { p, sign, .. } = *pairs;
        // SAFETY: the caller guarantees the rows of all matrices.
        unsafe {
            for row in 0..runs.count() {
                let mut sums = simd.zero();
                for column in (0..runs.count()).step_by(S::LANES) {
                    let at = row * CHUNK + column;
                    let (p, dp) = (p.at.add(at), dp.at.add(at));
                    if column > row {
                        simd.store(dp, simd.zero());
                        continue;
                    }
                    let left = simd.load(self.between.at.add(at));
                    let left = simd.mul(left, simd.splat(sign));
                    let (x, dx) = (simd.load(p), simd.load(dp));
                    let both = runs.seen(simd, (row, column), row, simd.mul(x, dx));
                    sums = simd.add(sums, both);
                    let by_column = terms.by_column.as_mut_ptr().add(column);
                    simd.store(by_column, simd.add(simd.load(by_column), both));
                    let weighted = simd.mul(dx, left);
                    simd.store(dp, runs.seen(simd, (row, column), pairs.end(row), weighted));
                }
                let at = terms.by_row.at.add(row * terms.by_row.row);
                simd.store(at, simd.add(simd.load(at), sums));
            }
        }
    }
}
