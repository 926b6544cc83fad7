//! The gradients of the log decays of a chunk.

use std::ops::Range;

use super::chunk::CHUNK;
use super::decays::{Decays, Terms};
use crate::host::array::HostArray;
use crate::host::matmul::Matrix;
use crate::host::pack::dot;
use crate::host::simd::Simd;

/// Channels whose sums are computed together.
const CHANNELS: usize = 16;

/// The gradients of the log decays.
///
/// A token's log decay scales what earlier tokens and the state before the chunk give to this token
/// and to later tokens. Its gradient is a sum, in float64, of
///
/// - pairs of tokens of the chunk: the sums of P ∘ dP and B ∘ dB by rows less the sums by columns,
///   from the token on, without the diagonal, which no decay scales,
/// - the state before the chunk with queries, and with keys that the delta rule takes from it, from
///   the token on,
/// - keys before the token with the gradient of the state after the chunk,
/// - the state before with the gradient of the state after.
///
/// No term is a small difference of large sums, and errors do not add up over chunks.
pub(super) struct DecayGradients<'a> {
    /// The log decays, their gradients, and batch entry and head.
    pub of: (&'a HostArray, &'a HostArray, (usize, usize)),
    pub decays: &'a Decays,
    pub rows: &'a Range<usize>,
    pub terms: &'a Terms,
    /// The state before the chunk and the gradient of the state after it, as columns, and the
    /// number of rows that this makes.
    pub columns: ([Matrix; 2], usize),
}

impl DecayGradients<'_> {
    /// Computes the gradients.
    ///
    /// # Safety
    /// The caller guarantees that the arrays have the rows, that the gradients are this task's, and
    /// that the other matrices are this thread's.
    #[inline(always)]
    pub unsafe fn compute<S: Simd>(&self, simd: S) {
        // SAFETY: the caller guarantees the arrays and the matrices.
        unsafe {
            if self.decays.by_channel() {
                self.by_channel();
            } else {
                self.by_head(simd);
            }
        }
    }

    /// Computes the gradients of one log decay for each token.
    ///
    /// # Safety
    /// The caller guarantees what [`DecayGradients::compute`] asks for.
    #[inline(always)]
    unsafe fn by_head<S: Simd>(&self, simd: S) {
        let ([state, d], len) = self.columns;
        let count = self.rows.len();
        let (mut rows, mut keys) = ([0.0; CHUNK], [0.0; CHUNK]);
        // SAFETY: the caller guarantees the arrays, and matrices with a vector for each token.
        unsafe {
            // A closure would be compiled without the instructions of `S`.
            let crossing = match self.decays.carry() {
                Some(carry) => {
                    f64::from(*carry) * f64::from(dot(simd, state.at, d.at, len * d.row))
                }
                None => 0.0,
            };
            add_lanes(simd, self.terms.by_row, count, &mut rows);
            add_lanes(simd, self.terms.by_key, count, &mut keys);
            let differences = |i: usize| f64::from(rows[i]) - f64::from(self.terms.by_column[i]);
            let (rows, keys) = (|i| [differences(i)], |i: usize| [f64::from(keys[i])]);
            self.sums::<1>(0, [crossing], rows, keys);
        }
    }

    /// Computes the gradients of the log decays of all channels.
    ///
    /// # Safety
    /// The caller guarantees what [`DecayGradients::compute`] asks for.
    #[inline(always)]
    unsafe fn by_channel(&self) {
        let ([state, d], len) = self.columns;
        // SAFETY: the caller guarantees the arrays, and matrices with a float for each channel.
        unsafe {
            for first in (0..self.of.0.dim).step_by(CHANNELS) {
                let mut crossing = [0.0f64; CHANNELS];
                if let Some(carry) = self.decays.carry() {
                    for row in 0..len {
                        let (state, d) = (state.skip(row).at.add(first), d.skip(row).at.add(first));
                        for (i, sum) in crossing.iter_mut().enumerate() {
                            *sum += f64::from(*state.add(i)) * f64::from(*d.add(i));
                        }
                    }
                    for (i, sum) in crossing.iter_mut().enumerate() {
                        *sum *= f64::from(*carry.add(first + i));
                    }
                }
                let channels = |matrix: Matrix, token: usize| {
                    let at = matrix.skip(token).at.add(first).cast::<[f32; CHANNELS]>();
                    at.read_unaligned().map(f64::from)
                };
                let rows = |token| channels(self.terms.by_row, token);
                let keys = |token| channels(self.terms.by_key, token);
                self.sums::<CHANNELS>(first, crossing, rows, keys);
            }
        }
    }

    /// Computes and stores the gradients of `N` log decays of each token from number `first` on.
    /// `rows` and `keys` return what a token adds to the sums over later and over earlier tokens.
    ///
    /// # Safety
    /// The caller guarantees what [`DecayGradients::compute`] asks for.
    #[inline(always)]
    unsafe fn sums<const N: usize>(
        &self,
        first: usize,
        crossing: [f64; N],
        rows: impl Fn(usize) -> [f64; N],
        keys: impl Fn(usize) -> [f64; N],
    ) {
        let (log_decay, gradients, (batch, head)) = self.of;
        let (mut before, mut sum) = ([[0.0; N]; CHUNK], crossing);
        for (i, before) in before[..self.rows.len()].iter_mut().enumerate() {
            *before = sum;
            for (sum, key) in sum.iter_mut().zip(keys(i)) {
                *sum += key;
            }
        }
        let mut sum = [0.0; N];
        for (i, row) in self.rows.clone().enumerate().rev() {
            for (sum, x) in sum.iter_mut().zip(rows(i)) {
                *sum += x;
            }
            // SAFETY: the caller guarantees the rows of the arrays.
            unsafe {
                let log = log_decay.row(batch, row, head).cast::<f32>().add(first);
                let target = gradients.row(batch, row, head).cast::<f32>().add(first);
                for d in 0..N.min(log_decay.dim - first) {
                    let reset = *log.add(d) == f32::NEG_INFINITY;
                    *target.add(d) = if reset { 0.0 } else { (sum[d] + before[i][d]) as f32 };
                }
            }
            if self.decays.runs.resets(i) {
                // Nothing passes a reset, and the sum over pairs of the run before starts anew.
                sum = [0.0; N];
            }
        }
    }
}

/// Writes the sum of the lanes of each row's vector.
///
/// # Safety
/// The caller guarantees that `sums` have a vector for each row of a chunk.
#[inline(always)]
unsafe fn add_lanes<S: Simd>(simd: S, sums: Matrix, count: usize, to: &mut [f32; CHUNK]) {
    let mut columns = [0.0f32; 16 * 16];
    for first in (0..count).step_by(S::LANES) {
        // SAFETY: no vector has more than 16 lanes, and a chunk is a multiple of the lanes.
        unsafe {
            simd.transpose(sums.at.add(first * sums.row), sums.row, columns.as_mut_ptr(), S::LANES);
            let mut total = simd.zero();
            for lane in 0..S::LANES {
                total = simd.add(total, simd.load(columns.as_ptr().add(lane * S::LANES)));
            }
            simd.store(to.as_mut_ptr().add(first), total);
        }
    }
}
