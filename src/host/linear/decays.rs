//! What a chunk's log decays say.

use std::ops::Range;

use super::chunk::{CHUNK, Matrix};
use crate::host::array::HostArray;
use crate::host::matmul::Write;
use crate::host::simd::Simd;

/// Decays of a chunk. With b_t the sum of its log decays in base 2 since it began, or since the last
/// reset in it, token a gets from token b of its run the part 2^(b_a − b_b): a difference, whose
/// terms are kept as two floats each, so that strong decays leave digits.
pub(super) struct Decays {
    /// Tokens.
    count: usize,
    high: [f32; CHUNK],
    low: [f32; CHUNK],
    /// Where the run of each token begins: at the last reset, or with the chunk.
    begins: [usize; CHUNK],
    /// Where the run of each token ends: at the next reset, or with the chunk.
    ends: [usize; CHUNK],
    /// Tokens before the first reset: those that the state before the chunk reaches.
    reached: usize,
    /// What is left at each token of the state before the chunk; 0 behind a reset.
    pub from_start: [f32; CHUNK],
    /// What is left of each token in the state after the chunk; 0 before a reset.
    pub to_end: [f32; CHUNK],
}

/// 2 to it is 0 in float32; below, sums would lose the digits of other tokens' decays.
const LEAST: f64 = -512.0;

impl Decays {
    /// Of `rows` of one head; a log decay of −∞ is a reset before its token.
    ///
    /// # Safety
    /// The rows may be read.
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
            // SAFETY: the caller vouches for the row.
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
                // SAFETY: a chunk is a multiple of the lanes.
                unsafe {
                    let at = factors.as_mut_ptr().add(at);
                    simd.store(at, simd.exp2(simd.load(at)));
                }
            }
        }
        decays
    }

    /// What is left of the state before the chunk in that after it; None where a reset lets nothing
    /// pass. Then not even NaN does, so the state must not be multiplied by 0.
    pub fn carry(&self) -> Option<f32> {
        (self.reached == self.count).then(|| self.from_start[self.count - 1])
    }

    /// How the state on the other side of the chunk is made of this one and what the chunk adds.
    pub fn onto(&self, state: *const f32) -> Write {
        self.carry().map_or(Write::Set, |carry| Write::Onto(state, carry))
    }

    /// Tokens before the first reset: what was before the chunk reaches no others.
    pub fn first(&self) -> Range<usize> {
        0..self.reached
    }

    /// Tokens from the last reset on: no others reach what is behind the chunk.
    pub fn last(&self) -> Range<usize> {
        self.begins[self.count - 1]..self.count
    }

    /// Tokens of its run that a token gets something from.
    pub fn until(&self, token: usize) -> Range<usize> {
        self.begins[token]..token + 1
    }

    /// Tokens of its run that get something from a token.
    pub fn since(&self, token: usize) -> Range<usize> {
        token..self.ends[token]
    }

    /// Multiplies products of tokens with tokens by what is left between them, 0 for later ones.
    ///
    /// # Safety
    /// `p` holds [`CHUNK`] floats for each token.
    #[inline(always)]
    pub unsafe fn weigh<S: Simd>(&self, simd: S, p: Matrix) {
        for row in 0..self.count {
            for column in (0..self.count).step_by(S::LANES) {
                // SAFETY: the caller vouches for the memory.
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

    /// The same for p = q kᵀ and dp = dout vᵀ. Sums of p ∘ dp with decay, without the diagonal, go to
    /// `by_row`, a vector for each row whose lanes are yet to be added, and are added by column.
    ///
    /// # Safety
    /// As [`Decays::weigh`]; there is a vector for each row.
    #[inline(always)]
    pub unsafe fn weigh_both<S: Simd>(
        &self,
        simd: S,
        [p, dp]: [Matrix; 2],
        by_row: Matrix,
        by_column: &mut [f32; CHUNK],
    ) {
        // SAFETY: the caller vouches for the memory.
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

    /// What is left at token `row` of those from `column` on.
    #[inline(always)]
    fn between<S: Simd>(&self, simd: S, row: usize, column: usize) -> S::Vector {
        let (high, low) = (simd.splat(self.high[row]), simd.splat(self.low[row]));
        // SAFETY: the arrays have CHUNK floats, a multiple of the lanes, as is the column.
        unsafe {
            let high = simd.sub(high, simd.load(self.high.as_ptr().add(column)));
            let low = simd.sub(low, simd.load(self.low.as_ptr().add(column)));
            simd.exp2(simd.add(high, low))
        }
    }

    /// `x` in the columns of the row's run before `end`, else 0.
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
