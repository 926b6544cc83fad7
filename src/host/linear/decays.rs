//! The decays between the tokens of a chunk.

use std::ops::Range;

use super::chunk::CHUNK;
use crate::host::array::HostArray;
use crate::host::matmul::{Matrix, Write};
use crate::host::simd::Simd;

/// The decays of a chunk. A run of tokens begins with the chunk or at a reset. With b_t the sum of
/// the log decays in base 2 from the start of the run to token t, token a receives from token b of
/// its run the part 2^(b_a − b_b). Each sum is kept as two floats, so that their difference has
/// digits left even if decays are strong.
pub(super) struct Decays {
    /// Number of tokens.
    count: usize,
    high: [f32; CHUNK],
    low: [f32; CHUNK],
    /// The start of each token's run: the last reset, or the start of the chunk.
    begins: [usize; CHUNK],
    /// The end of each token's run: the next reset, or the end of the chunk.
    ends: [usize; CHUNK],
    /// Number of tokens before the first reset. The state before the chunk reaches these tokens.
    reached: usize,
    /// The part of the state before the chunk that is left at each token; 0 from a reset on.
    pub from_start: [f32; CHUNK],
    /// The part of each token that is left in the state after the chunk; 0 before a reset.
    pub to_end: [f32; CHUNK],
}

/// Least log decay in base 2. 2 to this power is 0 in float32; with smaller log decays, sums would
/// lose the digits of other tokens' decays.
const LEAST: f64 = -512.0;

impl Decays {
    /// Reads the decays of `rows` of one head. A log decay of −∞ is a reset before its token.
    ///
    /// # Safety
    /// The caller guarantees that the rows are readable.
    #[inline(always)]
    pub unsafe fn read<S: Simd>(
        simd: S,
        array: &HostArray,
        (batch, head): (usize, usize),
        rows: &Range<usize>,
    ) -> Decays {
        let (zeros, nothing) = ([0.0; CHUNK], [f32::NEG_INFINITY; CHUNK]);
        let mut decays = Decays {
            count: rows.len(),
            high: zeros,
            low: zeros,
            begins: [0; CHUNK],
            ends: [rows.len(); CHUNK],
            reached: rows.len(),
            from_start: nothing,
            to_end: nothing,
        };
        let (mut sums, mut sum, mut begin) = ([0.0f64; CHUNK], 0.0f64, 0);
        for (i, row) in rows.clone().enumerate() {
            // SAFETY: the caller guarantees that the row is readable.
            let log = unsafe { *array.row(batch, row, head).cast::<f32>() };
            if log == f32::NEG_INFINITY {
                decays.ends[begin..i].fill(i);
                decays.reached = decays.reached.min(i);
                (sum, begin) = (0.0, i);
            } else {
                let log = f64::from(log) * std::f64::consts::LOG2_E;
                sum += if log < LEAST { LEAST } else { log };
            }
            sums[i] = sum;
            decays.high[i] = sum as f32;
            decays.low[i] = (sum - f64::from(sum as f32)) as f32;
            decays.begins[i] = begin;
            if decays.reached == rows.len() {
                decays.from_start[i] = sum as f32;
            }
        }
        let last = begin..rows.len();
        for (to_end, at) in decays.to_end[last.clone()].iter_mut().zip(&sums[last]) {
            *to_end = (sum - at) as f32;
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
        decays
    }

    /// Returns the part of the state before the chunk that is left after it, or `None` if a reset
    /// lets nothing pass. Not even NaN may pass a reset, so the state must not be multiplied by 0.
    pub fn carry(&self) -> Option<f32> {
        (self.reached == self.count).then(|| self.from_start[self.count - 1])
    }

    /// Returns how a product writes the state on the other side of the chunk: the part of `state`
    /// that is left, plus what the chunk adds.
    pub fn onto(&self, state: *const f32) -> Write {
        self.carry().map_or(Write::Set, |carry| Write::Onto(state, carry))
    }

    /// Returns the tokens before the first reset, which the state before the chunk reaches.
    pub fn first(&self) -> Range<usize> {
        0..self.reached
    }

    /// Returns the tokens from the last reset on, which reach the state after the chunk.
    pub fn last(&self) -> Range<usize> {
        self.begins[self.count - 1]..self.count
    }

    /// Returns the tokens of its run that a token receives from.
    pub fn until(&self, token: usize) -> Range<usize> {
        self.begins[token]..token + 1
    }

    /// Returns the tokens of its run that receive from a token.
    pub fn since(&self, token: usize) -> Range<usize> {
        token..self.ends[token]
    }

    /// Multiplies products of tokens with tokens by the decay between them, which is 0 for later
    /// tokens.
    ///
    /// # Safety
    /// The caller guarantees that `p` is this thread's and holds [`CHUNK`] floats for each token.
    #[inline(always)]
    pub unsafe fn weigh<S: Simd>(&self, simd: S, p: Matrix) {
        for row in 0..self.count {
            for column in (0..self.count).step_by(S::LANES) {
                // SAFETY: the caller guarantees the row of `p`.
                unsafe {
                    let at = p.at.add(row * p.row + column);
                    if column > row {
                        simd.store(at, simd.zero());
                        continue;
                    }
                    let left = self.between(simd, row, column);
                    let x = simd.mul(simd.load(at), left);
                    simd.store(at, self.seen(simd, row, column, row + 1, x));
                }
            }
        }
    }

    /// Multiplies p = q kᵀ and dp = dout vᵀ by the decay between tokens. Sums of p ∘ dp with decay,
    /// without the diagonal, are written to `by_row`, as a vector for each row whose lanes are yet
    /// to be added, and are added to `by_column`.
    ///
    /// # Safety
    /// The caller guarantees that `p` and `dp` are this thread's and hold [`CHUNK`] floats for each
    /// token, and that `by_row` has a vector for each token.
    #[inline(always)]
    pub unsafe fn weigh_both<S: Simd>(
        &self,
        simd: S,
        [p, dp]: [Matrix; 2],
        by_row: Matrix,
        by_column: &mut [f32; CHUNK],
    ) {
        // SAFETY: the caller guarantees the rows of all three matrices.
        unsafe {
            for row in 0..self.count {
                let mut sums = simd.zero();
                for column in (0..self.count).step_by(S::LANES) {
                    let at = row * p.row + column;
                    let (p, dp) = (p.at.add(at), dp.at.add(at));
                    let by_column = by_column.as_mut_ptr().add(column);
                    if column > row {
                        simd.store(p, simd.zero());
                        simd.store(dp, simd.zero());
                        continue;
                    }
                    let left = self.between(simd, row, column);
                    let (x, dx) = (simd.load(p), simd.load(dp));
                    let weighted = simd.mul(x, left);
                    let both = self.seen(simd, row, column, row, simd.mul(weighted, dx));
                    sums = simd.add(sums, both);
                    simd.store(by_column, simd.add(simd.load(by_column), both));
                    simd.store(p, self.seen(simd, row, column, row + 1, weighted));
                    let weighted = simd.mul(dx, left);
                    simd.store(dp, self.seen(simd, row, column, row + 1, weighted));
                }
                simd.store(by_row.at.add(row * by_row.row), sums);
            }
        }
    }

    /// Returns the parts of the tokens from `column` on that are left at token `row`.
    #[inline(always)]
    fn between<S: Simd>(&self, simd: S, row: usize, column: usize) -> S::Vector {
        let (high, low) = (simd.splat(self.high[row]), simd.splat(self.low[row]));
        // SAFETY: both arrays have CHUNK floats. CHUNK and the column are multiples of the lanes.
        unsafe {
            let high = simd.sub(high, simd.load(self.high.as_ptr().add(column)));
            let low = simd.sub(low, simd.load(self.low.as_ptr().add(column)));
            simd.exp2(simd.add(high, low))
        }
    }

    /// Returns `x` in the columns of the row's run before `end`, and 0 elsewhere.
    #[inline(always)]
    fn seen<S: Simd>(
        &self,
        simd: S,
        row: usize,
        column: usize,
        end: usize,
        x: S::Vector,
    ) -> S::Vector {
        let start = self.begins[row].saturating_sub(column).min(S::LANES);
        let end = end.saturating_sub(column).min(S::LANES);
        simd.inside(start, end, x, simd.zero())
    }
}
