//! Scores of a block of rows against the keys of a tile, and the online softmax.

use std::marker::PhantomData;

use super::element::Element;
use super::tile::{Ahead, QUAD, Seen, TILE};
use crate::host::simd::{Simd, Task};
use crate::host::softmax::{NoFeatures, ScoreFeatures, SoftCap, VectorPlace};

/// Most rows of a block. A vector has [`QUAD`] lanes for each row, so short vectors take fewer.
pub(super) const MOST_ROWS: usize = 4;

/// Returns the rows of a block.
#[inline(always)]
pub(super) fn block_rows<S: Simd>() -> usize {
    S::LANES / QUAD
}

/// The running softmax of a block: vectors in which each row has [`QUAD`] lanes.
#[derive(Clone, Copy)]
pub(super) struct Online {
    /// Largest score so far; −∞ before the first.
    pub m: *mut f32,
    /// Sums of e^(score − m), over every fourth key.
    pub l: *mut f32,
    /// e^(old m − new m), the factor for sums that were made with the old m.
    pub alpha: *mut f32,
}

/// ALiBi's part of the scores: slope · (key + query), where `key` is the distance of the key from
/// the tile's first row, and `query` the distance of this row from the query.
pub(super) struct Alibi {
    /// Positions of the tile's keys, as the lanes of scores; the same for all rows.
    pub keys: *const f32,
    pub queries: [f32; 16],
    pub slopes: [f32; 16],
}

/// Computes the scores of a block of rows, then replaces them by e^(score − m). Vector `j` of the
/// scores holds keys 4j up to 4j + 3 of the first row, then those of the second row, and so on.
///
/// ```text
/// m' = max(m, max s);  alpha = e^(m − m');  l' = l·alpha + Σ e^(s − m')
/// ```
pub(super) struct Scores<'a, E> {
    /// The rows of the block, times the scale.
    pub q: *const f32,
    /// Floats from one row of the block to the next.
    pub q_row: usize,
    /// Vectors of a row.
    pub vectors: usize,
    pub rows: usize,
    pub keys: &'a [*const u8; TILE],
    /// Bytes from the addresses of the keys to the head.
    pub skip: usize,
    /// For each row, the keys that it sees.
    pub seen: [Seen; MOST_ROWS],
    pub cap: Option<SoftCap>,
    pub alibi: Option<&'a Alibi>,
    pub scores: *mut f32,
    pub online: Online,
    pub ahead: &'a mut Ahead,
    pub element: PhantomData<E>,
}

impl<E: Element> Task for Scores<'_, E> {
    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        // SAFETY: the caller of `compute` guarantees the memory behind all pointers.
        unsafe {
            match self.rows {
                1 => self.products::<S, 1>(simd),
                2 => self.products::<S, 2>(simd),
                3 => self.products::<S, 3>(simd),
                _ => self.products::<S, 4>(simd),
            }
            match self.cap {
                Some(cap) => self.features(simd, cap),
                None if self.alibi.is_some() => self.features(simd, NoFeatures),
                None => (),
            }
            self.hide(S::LANES);
            self.softmax(simd);
        }
    }
}

impl<E: Element> Scores<'_, E> {
    /// Computes the block, in a function of its own.
    ///
    /// # Safety
    /// The caller guarantees that `rows` rows of q and the keys are readable, that scores have
    /// room for a tile and that the softmax has a vector of each kind, all of them this thread's.
    #[inline(always)]
    pub unsafe fn compute<S: Simd>(self, simd: S) {
        simd.vectorize(self);
    }

    /// Computes the products of `R` rows and the keys that any of them sees.
    ///
    /// # Safety
    /// The caller guarantees what [`Scores::compute`] asks for.
    #[inline(always)]
    unsafe fn products<S: Simd, const R: usize>(&mut self, simd: S) {
        if R > block_rows::<S>() {
            return;
        }
        let seen = self.seen[..R].iter().fold(0, |all, seen| all | seen);
        for quad in 0..TILE / QUAD {
            let mut sums = [[simd.zero(); QUAD]; R];
            if seen >> (quad * QUAD) & 0xf != 0 {
                let mut rows = [std::ptr::null(); QUAD];
                for (i, row) in rows.iter_mut().enumerate() {
                    *row = self.keys[quad * QUAD + i].wrapping_add(self.skip);
                }
                for at in 0..self.vectors {
                    // SAFETY: the caller guarantees the rows of q and the keys.
                    unsafe {
                        let mut keys = [simd.zero(); QUAD];
                        for (key, row) in keys.iter_mut().zip(rows) {
                            *key = E::load(simd, row, at);
                        }
                        for (r, sums) in sums.iter_mut().enumerate() {
                            let q = simd.load(self.q.add(r * self.q_row + at * S::LANES));
                            for (sum, key) in sums.iter_mut().zip(keys) {
                                *sum = simd.mul_add(q, key, *sum);
                            }
                        }
                    }
                }
            }
            let mut all = [simd.zero(); 16];
            for (to, from) in all.iter_mut().zip(sums.as_flattened()) {
                *to = *from;
            }
            // SAFETY: the caller guarantees the room for the scores.
            unsafe { simd.store(self.scores.add(quad * S::LANES), simd.sum_each(all)) };
            self.ahead.fetch(simd, 2);
        }
    }

    /// Applies the soft cap, then ALiBi.
    ///
    /// # Safety
    /// The caller guarantees what [`Scores::compute`] asks for.
    #[inline(always)]
    unsafe fn features<S: Simd>(&self, simd: S, cap: impl ScoreFeatures) {
        for at in (0..TILE / QUAD * S::LANES).step_by(S::LANES) {
            // SAFETY: the caller guarantees the scores, and as many positions of keys.
            unsafe {
                let at_scores = self.scores.add(at);
                let place = VectorPlace { row: 0, first: 0 };
                let (mut s, _) = cap.logits(simd, simd.load(at_scores), place);
                if let Some(alibi) = self.alibi {
                    let queries = simd.load(alibi.queries.as_ptr());
                    let distance = simd.add(simd.load(alibi.keys.add(at)), queries);
                    s = simd.mul_add(simd.load(alibi.slopes.as_ptr()), distance, s);
                }
                simd.store(at_scores, s);
            }
        }
    }

    /// Writes −∞ in place of the scores of keys that a row does not see.
    ///
    /// # Safety
    /// The caller guarantees what [`Scores::compute`] asks for.
    #[inline(always)]
    unsafe fn hide(&self, lanes: usize) {
        for (row, seen) in self.seen[..self.rows].iter().enumerate() {
            let mut hidden = !seen;
            while hidden != 0 {
                let key = hidden.trailing_zeros() as usize;
                hidden &= hidden - 1;
                // SAFETY: the caller guarantees the room for the scores.
                unsafe { *self.scores.add(lane_of(key, row, lanes)) = f32::NEG_INFINITY };
            }
        }
    }

    /// Takes the step of the online softmax.
    ///
    /// # Safety
    /// The caller guarantees what [`Scores::compute`] asks for.
    #[inline(always)]
    unsafe fn softmax<S: Simd>(&self, simd: S) {
        let Online { m, l, alpha } = self.online;
        let vectors = (0..TILE / QUAD).map(|quad| self.scores.wrapping_add(quad * S::LANES));
        // SAFETY: the caller guarantees the scores and the softmax.
        unsafe {
            let before = simd.load(m);
            let mut most = before;
            for at in vectors.clone() {
                // This order of operands ignores NaN, which then comes back from the exponential.
                most = simd.max(simd.load(at), most);
            }
            let (mut lanes, mut finite) = ([0.0f32; 16], [0.0f32; 16]);
            simd.store(lanes.as_mut_ptr(), most);
            for (of_row, finite) in lanes.chunks_exact_mut(QUAD).zip(finite.chunks_exact_mut(QUAD))
            {
                let most = of_row[0].max(of_row[1]).max(of_row[2].max(of_row[3]));
                of_row.fill(most);
                // Where a row has seen no key yet, −∞ − m would be NaN.
                finite.fill(if most == f32::NEG_INFINITY { 0.0 } else { most });
            }
            simd.store(m, simd.load(lanes.as_ptr()));
            let most = simd.load(finite.as_ptr());
            let factor = simd.exp(simd.sub(before, most));
            simd.store(alpha, factor);
            let mut sum = simd.mul(simd.load(l), factor);
            for at in vectors {
                let p = simd.exp(simd.sub(simd.load(at), most));
                simd.store(at, p);
                sum = simd.add(sum, p);
            }
            simd.store(l, sum);
        }
    }
}

/// Returns the place of a key and a row among the scores.
#[inline(always)]
pub(super) fn lane_of(key: usize, row: usize, lanes: usize) -> usize {
    key / QUAD * lanes + row * QUAD + key % QUAD
}
