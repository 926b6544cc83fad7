//! From the scores of a row block to the weights of its values.

use std::iter::StepBy;
use std::ops::Range;

use super::row_blocks::{RowBlocks, State};
use super::tile::{QUAD, QUADS};
use crate::host::matmul::Matrix;
use crate::host::simd::Simd;
use crate::host::softmax::{NoFeatures, ScoreFeatures, VectorPlace};

impl RowBlocks<'_> {
    /// Applies features to a row block's scores, and takes the step of the online softmax.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute`] asks for.
    #[inline(always)]
    pub(super) unsafe fn softmax<S: Simd>(&self, simd: S, block: usize) {
        // SAFETY: the caller guarantees the memory behind all pointers.
        unsafe {
            match self.cap {
                Some(cap) => self.features(simd, block, cap),
                None if self.has_slopes => self.features(simd, block, NoFeatures),
                None => (),
            }
            self.hide(block);
            self.online(simd, block);
        }
    }

    /// Returns where the vectors begin that hold the rows of a row block, in
    /// [`SCORES`](super::row_blocks::SCORES) floats.
    #[inline(always)]
    fn lanes<S: Simd>(&self, block: usize) -> StepBy<Range<usize>> {
        (0..self.seen(block).len() * QUAD).step_by(S::LANES)
    }

    /// Applies the soft cap, then ALiBi.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute`] asks for.
    #[inline(always)]
    unsafe fn features<S: Simd>(&self, simd: S, block: usize, cap: impl ScoreFeatures) {
        let State { scores, slopes, queries, keys, .. } = self.state;
        for lanes in self.lanes::<S>(block) {
            let of = |matrix: Matrix, row| matrix.skip(row).at.wrapping_add(lanes);
            for quad in 0..QUADS {
                let at = of(scores, block * QUADS + quad);
                // SAFETY: the caller guarantees the scores, and the distances and slopes if there
                // are slopes.
                unsafe {
                    let place = VectorPlace { row: 0, first: 0 };
                    let (mut s, _) = cap.logits(simd, simd.load(at), place);
                    if self.has_slopes {
                        let query = simd.load(of(queries, block % self.per_head));
                        let distance = simd.add(simd.load(of(keys, quad)), query);
                        s = simd.mul_add(simd.load(of(slopes, block)), distance, s);
                    }
                    simd.store(at, s);
                }
            }
        }
    }

    /// Writes −∞ in place of the scores of keys that a row does not see.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute`] asks for.
    #[inline(always)]
    unsafe fn hide(&self, block: usize) {
        for (row, seen) in self.seen(block).iter().enumerate() {
            let mut hidden = !seen;
            while hidden != 0 {
                let at = self.place(block, row, hidden.trailing_zeros() as usize);
                hidden &= hidden - 1;
                // SAFETY: the caller guarantees the room for the scores.
                unsafe { *at = f32::NEG_INFINITY };
            }
        }
    }

    /// Takes the step of the online softmax.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute`] asks for.
    #[inline(always)]
    unsafe fn online<S: Simd>(&self, simd: S, block: usize) {
        let State { m, l, alpha, scores, .. } = self.state;
        for lanes in self.lanes::<S>(block) {
            let [m, l, alpha] =
                [m, l, alpha].map(|matrix| matrix.skip(block).at.wrapping_add(lanes));
            let at = |quad| scores.skip(block * QUADS + quad).at.wrapping_add(lanes);
            // SAFETY: the caller guarantees the scores and the softmax.
            unsafe {
                let before = simd.load(m);
                let mut most = before;
                for quad in 0..QUADS {
                    // This order of operands ignores NaN, which then comes back from the exponential.
                    most = simd.max(simd.load(at(quad)), most);
                }
                let most = simd.max_of_quads(most);
                simd.store(m, most);
                // Where a row has seen no key yet, −∞ − m would be NaN.
                let most = simd.max(most, simd.splat(f32::MIN));
                let factor = simd.exp(simd.sub(before, most));
                simd.store(alpha, factor);
                let mut sum = simd.mul(simd.load(l), factor);
                for quad in 0..QUADS {
                    let p = simd.exp(simd.sub(simd.load(at(quad)), most));
                    simd.store(at(quad), p);
                    sum = simd.add(sum, p);
                }
                simd.store(l, sum);
            }
        }
    }
}
