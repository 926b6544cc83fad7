//! From the scores of a unit to the weights of its values.

use std::iter::StepBy;
use std::ops::Range;

use super::tile::{QUAD, QUADS};
use super::units::{State, Units};
use crate::host::matmul::Matrix;
use crate::host::simd::Simd;
use crate::host::softmax::{NoFeatures, ScoreFeatures, VectorPlace};

impl Units<'_> {
    /// Applies features to a unit's scores, and takes the step of the online softmax.
    ///
    /// # Safety
    /// The caller guarantees what [`Units::compute`] asks for.
    #[inline(always)]
    pub(super) unsafe fn softmax<S: Simd>(&self, simd: S, unit: usize) {
        // SAFETY: the caller guarantees the memory behind all pointers.
        unsafe {
            match self.cap {
                Some(cap) => self.features(simd, unit, cap),
                None if self.has_slopes => self.features(simd, unit, NoFeatures),
                None => (),
            }
            self.hide(unit);
            self.online(simd, unit);
        }
    }

    /// Returns where the vectors begin that hold the rows of a unit, in [`SCORES`] floats.
    #[inline(always)]
    fn lanes<S: Simd>(&self, unit: usize) -> StepBy<Range<usize>> {
        (0..self.seen(unit).len() * QUAD).step_by(S::LANES)
    }

    /// Applies the soft cap, then ALiBi.
    ///
    /// # Safety
    /// The caller guarantees what [`Units::compute`] asks for.
    #[inline(always)]
    unsafe fn features<S: Simd>(&self, simd: S, unit: usize, cap: impl ScoreFeatures) {
        let State { scores, slopes, queries, keys, .. } = self.state;
        for lanes in self.lanes::<S>(unit) {
            let of = |matrix: Matrix, row| matrix.skip(row).at.wrapping_add(lanes);
            for quad in 0..QUADS {
                let at = of(scores, unit * QUADS + quad);
                // SAFETY: the caller guarantees the scores, and the distances and slopes if there
                // are slopes.
                unsafe {
                    let place = VectorPlace { row: 0, first: 0 };
                    let (mut s, _) = cap.logits(simd, simd.load(at), place);
                    if self.has_slopes {
                        let query = simd.load(of(queries, unit % self.blocks));
                        let distance = simd.add(simd.load(of(keys, quad)), query);
                        s = simd.mul_add(simd.load(of(slopes, unit)), distance, s);
                    }
                    simd.store(at, s);
                }
            }
        }
    }

    /// Writes −∞ in place of the scores of keys that a row does not see.
    ///
    /// # Safety
    /// The caller guarantees what [`Units::compute`] asks for.
    #[inline(always)]
    unsafe fn hide(&self, unit: usize) {
        for (row, seen) in self.seen(unit).iter().enumerate() {
            let mut hidden = !seen;
            while hidden != 0 {
                let at = self.place(unit, row, hidden.trailing_zeros() as usize);
                hidden &= hidden - 1;
                // SAFETY: the caller guarantees the room for the scores.
                unsafe { *at = f32::NEG_INFINITY };
            }
        }
    }

    /// Takes the step of the online softmax.
    ///
    /// # Safety
    /// The caller guarantees what [`Units::compute`] asks for.
    #[inline(always)]
    unsafe fn online<S: Simd>(&self, simd: S, unit: usize) {
        let State { m, l, alpha, scores, .. } = self.state;
        for lanes in self.lanes::<S>(unit) {
            let [m, l, alpha] =
                [m, l, alpha].map(|matrix| matrix.skip(unit).at.wrapping_add(lanes));
            let at = |quad| scores.skip(unit * QUADS + quad).at.wrapping_add(lanes);
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
