//! The gradients of a chunk of one head.

use std::ops::Range;

use super::BackwardIo;
use super::chunk::{
    CHUNK, product, product_and_zeros, scale_all, scale_rows, scores, transpose, triangular_product,
};
use super::decays::Decays;
use super::head_of;
use super::prefetch::Prefetch;
use crate::host::matmul::Matrix;
use crate::host::pack::dot;
use crate::host::simd::Simd;

/// The scratch that all chunks of a group use.
#[derive(Clone, Copy)]
pub(super) struct GroupScratch {
    pub q: Matrix,
    pub k: Matrix,
    pub v: Matrix,
    pub dout: Matrix,
    /// Keys and values of the chunk as columns.
    pub columns: [Matrix; 2],
    /// Gradient of the state as columns.
    pub d_columns: Matrix,
    pub p: Matrix,
    pub dp: Matrix,
    /// dq, dk and dv of one head.
    pub own: [Matrix; 3],
    /// Sums of dq, dk and dv over the heads that share a head of q, k or v.
    pub sums: [Matrix; 3],
    /// A vector for each row. The sum of its lanes is what the query adds to the gradients of
    /// decays.
    pub by_query: Matrix,
    /// A vector for each row. The sum of its lanes is what the key adds to the gradients of decays.
    pub by_key: Matrix,
}

impl GroupScratch {
    /// Takes the scratch for rows of `kw` floats for keys and `vw` floats for values. `take` takes
    /// a number of rows of a number of floats.
    pub fn take(
        mut take: impl FnMut(usize, usize) -> Matrix,
        (kw, vw): (usize, usize),
        lanes: usize,
    ) -> GroupScratch {
        GroupScratch {
            q: take(CHUNK, kw),
            k: take(CHUNK, kw),
            v: take(CHUNK, vw),
            dout: take(CHUNK, vw),
            columns: [take(kw, CHUNK), take(vw, CHUNK)],
            d_columns: take(vw, kw),
            p: take(CHUNK, CHUNK),
            dp: take(CHUNK, CHUNK),
            own: [kw, kw, vw].map(|width| take(CHUNK, width)),
            sums: [kw, kw, vw].map(|width| take(CHUNK, width)),
            by_query: take(CHUNK, lanes),
            by_key: take(CHUNK, lanes),
        }
    }
}

/// A head's states, transposed, and their gradient.
#[derive(Clone, Copy)]
pub(super) struct HeadStates {
    /// Batch entry and head of decays.
    pub head: (usize, usize),
    /// Gradient of the state after a chunk, `[k_dim, v_dim]`.
    pub d: Matrix,
    /// The state before each part of the chunks.
    pub parts: Matrix,
    /// The state before each chunk of a part.
    pub chunks: Matrix,
    /// Number of rows of a state.
    pub rows: usize,
}

impl HeadStates {
    /// Returns the state before a part.
    pub fn part(&self, index: usize) -> Matrix {
        self.parts.skip(index * self.rows)
    }

    /// Returns the state before a chunk of the current part.
    pub fn chunk(&self, index: usize) -> Matrix {
        self.chunks.skip(index * self.rows)
    }

    /// Copies one state to another.
    ///
    /// # Safety
    /// The caller guarantees that both are states of this head, that they differ, and that they are
    /// this thread's.
    pub unsafe fn copy(&self, from: Matrix, to: Matrix) {
        // SAFETY: the caller guarantees two states of `rows` rows.
        unsafe { to.at.copy_from_nonoverlapping(from.at, self.rows * from.row) }
    }
}

/// A chunk of a head, whose keys and values are packed.
pub(super) struct HeadChunk<'a> {
    pub io: &'a BackwardIo,
    pub scratch: GroupScratch,
    pub states: &'a HeadStates,
    pub rows: &'a Range<usize>,
    /// Number of the chunk in the current part.
    pub at: usize,
}

impl HeadChunk<'_> {
    /// Computes the gradients, with q the scaled queries, S the state before the chunk, D the
    /// gradient of the state after it, p = (q kᵀ) ∘ decay and dp = (dout vᵀ) ∘ decay:
    ///
    /// ```text
    /// dq = from_start ∘ dout Sᵀ + dp k;  dk = to_end ∘ v Dᵀ + dpᵀ q;  dv = to_end ∘ k D + pᵀ dout
    /// ```
    ///
    /// Then D = carry · D + (from_start ∘ q)ᵀ dout for the chunk before.
    ///
    /// # Safety
    /// The caller guarantees that the scratch is this task's, that the arrays have these rows, and
    /// that the gradients of the head's decays, `dq`, `dk` and `dv` are this task's.
    #[inline(always)]
    pub unsafe fn gradients<S: Simd>(
        &self,
        simd: S,
        prefetch: &mut Prefetch,
        [dq, dk, dv]: [Matrix; 3],
    ) {
        let HeadChunk { io, scratch, states, rows, at } = *self;
        let head = states.head;
        let (count, k_dim, v_dim) = (rows.len(), io.k.dim, io.v.dim);
        let GroupScratch { q, k, v, dout, d_columns, p, dp, .. } = scratch;
        let (state, d) = (states.chunk(at), states.d);
        let mut by_column = [0.0; CHUNK];
        // SAFETY: the caller guarantees the scratch and the rows of the arrays.
        unsafe {
            let decays = Decays::read(simd, &io.log_decay, head, rows);
            let (before, after) = (&decays.from_start, &decays.to_end);
            let (first, last) = (decays.first(), decays.last());
            let (until, since) = (|row| decays.until(row), |row| decays.since(row));
            io.q.head_rows(head_of(&io.q, &io.log_decay, head), rows).pack(simd, q);
            scale_all(simd, q, count, io.scale);
            io.dout.head_rows(head, rows).pack(simd, dout);
            scores(simd, prefetch, (q, scratch.columns[0]), p, (count, k_dim));
            scores(simd, prefetch, (dout, scratch.columns[1]), dp, (count, v_dim));
            decays.weigh_both(simd, [p, dp], scratch.by_query, &mut by_column);

            let size = (first.clone(), 0..v_dim);
            product_and_zeros(simd, prefetch, (dout.left(), state), dq, size, count);
            add_dots(simd, [q, dq], before, first.clone(), scratch.by_query);
            triangular_product(simd, prefetch, (dp.left(), k), dq, count, &until, before);
            scale_all(simd, dq, count, io.scale);

            transpose(simd, d, (k_dim, v_dim), d_columns);
            let size = (last.clone(), 0..v_dim);
            product_and_zeros(simd, prefetch, (v.left(), d_columns), dk, size, count);
            scratch.by_key.clear(count);
            add_dots(simd, [k, dk], after, last.clone(), scratch.by_key);
            triangular_product(simd, prefetch, (dp.transposed(), q), dk, count, &since, after);

            product_and_zeros(simd, prefetch, (k.left(), d), dv, (last, 0..k_dim), count);
            triangular_product(simd, prefetch, (p.transposed(), dout), dv, count, &since, after);

            let crossing = match decays.carry() {
                Some(carry) => {
                    f64::from(carry) * f64::from(dot(simd, state.at, d_columns.at, v_dim * k.row))
                }
                None => 0.0,
            };
            self.decay_gradients(simd, &by_column, crossing);

            scale_rows(simd, q, &before[..count]);
            let (sides, write) = ((q.transposed(), dout), decays.onto(d.at));
            product(simd, prefetch, sides, d, (0..k_dim, first), write);
        }
    }

    /// Computes the gradients of the log decays.
    ///
    /// A token's log decay scales what earlier tokens and the state before the chunk give to this
    /// token and to later tokens. Its gradient is a sum, in float64, of
    ///
    /// - pairs of tokens of the chunk: the sums of p ∘ dp by rows less the sums by columns, from
    ///   the token on, without the diagonal, which no decay scales,
    /// - the state before the chunk with queries from the token on,
    /// - keys before the token with the gradient of the state after the chunk,
    /// - the state before with the gradient of the state after: `crossing`.
    ///
    /// No term is a small difference of large sums, and errors do not add up over chunks.
    ///
    /// # Safety
    /// The caller guarantees what [`HeadChunk::gradients`] asks for.
    #[inline(always)]
    unsafe fn decay_gradients<S: Simd>(&self, simd: S, by_column: &[f32; CHUNK], crossing: f64) {
        let HeadChunk { io, scratch, states, rows, .. } = *self;
        let (batch, head) = states.head;
        let (mut queries, mut keys) = ([0.0; CHUNK], [0.0; CHUNK]);
        // SAFETY: the caller guarantees the scratch, which has a vector for each row of a chunk.
        unsafe {
            add_lanes(simd, scratch.by_query, rows.len(), &mut queries);
            add_lanes(simd, scratch.by_key, rows.len(), &mut keys);
        }
        let (mut sums, mut sum) = ([0.0; CHUNK], crossing);
        for (before, key) in sums.iter_mut().zip(&keys[..rows.len()]) {
            *before = sum;
            sum += f64::from(*key);
        }
        let mut sum = 0.0;
        for (i, row) in rows.clone().enumerate().rev() {
            sum += f64::from(queries[i]) - f64::from(by_column[i]);
            // SAFETY: the caller guarantees that the arrays have the row, and that the result is
            // this task's.
            unsafe {
                let target = io.dlog_decay.row(batch, row, head).cast::<f32>();
                if *io.log_decay.row(batch, row, head).cast::<f32>() == f32::NEG_INFINITY {
                    // Nothing passes a reset, and the sum over pairs of the run before starts anew.
                    *target = 0.0;
                    sum = 0.0;
                } else {
                    *target = (sum + sums[i]) as f32;
                }
            }
        }
    }
}

/// Adds factor · a ∘ b of each row to the row's vector of sums. A row has as many floats as in `a`.
///
/// # Safety
/// The caller guarantees that all three have these rows, and that `sums` are this thread's.
#[inline(always)]
unsafe fn add_dots<S: Simd>(
    simd: S,
    [a, b]: [Matrix; 2],
    factors: &[f32; CHUNK],
    rows: Range<usize>,
    sums: Matrix,
) {
    for row in rows {
        // SAFETY: the caller guarantees that all three have the row.
        unsafe {
            let mut dot = simd.zero();
            for d in (0..a.row).step_by(S::LANES) {
                let (a, b) = (a.at.add(row * a.row + d), b.at.add(row * b.row + d));
                dot = simd.mul_add(simd.load(a), simd.load(b), dot);
            }
            let at = sums.at.add(row * sums.row);
            simd.store(at, simd.mul_add(dot, simd.splat(factors[row]), simd.load(at)));
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
