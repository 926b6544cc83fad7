//! Gradients of a chunk of one query head.

use std::ops::Range;

use super::BackwardIo;
use super::ahead::Ahead;
use super::chunk::{
    CHUNK, Matrix, Size, flip, product, product_of_some, rows_of, scale_rows, scores, store,
    triangle,
};
use super::decays::Decays;
use crate::host::pack::dot;
use crate::host::simd::Simd;

/// Scratch that all chunks use.
#[derive(Clone, Copy)]
pub(super) struct Memory {
    pub q: Matrix,
    pub k: Matrix,
    pub v: Matrix,
    pub dout: Matrix,
    /// Keys and values of the chunk and the gradient of the state, as columns.
    pub k_columns: Matrix,
    pub v_columns: Matrix,
    pub d_columns: Matrix,
    pub p: Matrix,
    pub dp: Matrix,
    pub dq: Matrix,
    pub dk: Matrix,
    pub dv: Matrix,
    /// Sums over a group's heads.
    pub dk_sum: Matrix,
    pub dv_sum: Matrix,
    /// A vector for each row, whose lanes make up a sum: what queries and what keys give to the
    /// gradients of the decays.
    pub by_query: Matrix,
    pub by_key: Matrix,
}

impl Memory {
    const PIECES: usize = 16;

    /// Rows and floats of a row of each piece, for rows of keys and of values.
    pub fn sizes((kw, vw): (usize, usize), lanes: usize) -> [(usize, usize); Memory::PIECES] {
        let (keys, values, square) = ((CHUNK, kw), (CHUNK, vw), (CHUNK, CHUNK));
        let (sums, d) = ((CHUNK, lanes), (vw, kw));
        let (k_columns, v_columns) = ((kw, CHUNK), (vw, CHUNK));
        [
            [keys, keys, values, values],
            [k_columns, v_columns, d, square],
            [square, keys, keys, values],
            [keys, values, sums, sums],
        ]
        .as_flattened()
        .try_into()
        .expect("as many as there are pieces")
    }

    /// Of the pieces.
    #[rustfmt::skip]
    pub fn new(pieces: [Matrix; Memory::PIECES]) -> Memory {
        let [
            q, k, v, dout, k_columns, v_columns, d_columns, p, dp, dq, dk, dv, dk_sum, dv_sum,
            by_query, by_key,
        ] = pieces;
        Memory {
            q, k, v, dout, k_columns, v_columns, d_columns, p, dp, dq, dk, dv, dk_sum, dv_sum,
            by_query, by_key,
        }
    }
}

/// A head's states, transposed, and their gradient.
#[derive(Clone, Copy)]
pub(super) struct States {
    /// Gradient of the state after a chunk, `[k_dim, v_dim]`.
    pub d: Matrix,
    /// States before each part of the chunks.
    pub parts: Matrix,
    /// States before each chunk of a part.
    pub chunks: Matrix,
    /// Rows of a state.
    pub rows: usize,
}

impl States {
    /// The state before a part.
    pub fn part(&self, index: usize) -> Matrix {
        self.state(self.parts, index)
    }

    /// The state before a chunk of the part at hand.
    pub fn chunk(&self, index: usize) -> Matrix {
        self.state(self.chunks, index)
    }

    fn state(&self, Matrix { at, row }: Matrix, index: usize) -> Matrix {
        Matrix { at: at.wrapping_add(index * self.rows * row), row }
    }

    /// Makes one state another.
    ///
    /// # Safety
    /// They are two of these, and this thread's.
    pub unsafe fn copy(&self, from: Matrix, to: Matrix) {
        // SAFETY: passed on.
        unsafe { to.at.copy_from_nonoverlapping(from.at, self.rows * from.row) }
    }
}

/// A chunk of a query head, whose keys and values are packed.
pub(super) struct Part<'a> {
    pub io: &'a BackwardIo,
    pub memory: Memory,
    pub states: States,
    /// Batch entry and query head.
    pub head: (usize, usize),
    pub rows: &'a Range<usize>,
    /// Which chunk of those whose states are kept.
    pub at: usize,
}

impl Part<'_> {
    /// With S the state before the chunk, D the gradient of that after it, p = (q kᵀ) ∘ decay and
    /// dp = (dout vᵀ) ∘ decay:
    ///
    /// ```text
    /// dq = from_start ∘ dout Sᵀ + dp k;  dk = to_end ∘ v Dᵀ + dpᵀ q;  dv = to_end ∘ k D + pᵀ dout
    /// ```
    ///
    /// and D = carry · D + (from_start ∘ q)ᵀ dout for the chunk before.
    ///
    /// # Safety
    /// The memory is scratch, the arrays have these rows, and this thread alone may write the
    /// head's results, dk and dv.
    #[inline(always)]
    pub unsafe fn gradients<S: Simd>(&self, simd: S, ahead: &mut Ahead, [dk, dv]: [Matrix; 2]) {
        let Part { io, memory, states, head, rows, at } = *self;
        let (count, k_dim, v_dim) = (rows.len(), io.k.dim, io.v.dim);
        let Memory { q, k, v, dout, d_columns, p, dp, dq, .. } = memory;
        let (state, d) = (states.chunk(at), states.d);
        let keys = |rows, depth| Size { rows, columns: k.row, depth: 0..depth };
        let values = |rows, depth| Size { rows, columns: v.row, depth: 0..depth };
        let mut by_column = [0.0; CHUNK];
        // SAFETY: passed on.
        unsafe {
            let decays = Decays::read(simd, &io.log_decay, head, rows);
            let (before, after) = (&decays.from_start, &decays.to_end);
            let (first, last) = (decays.first(), decays.last());
            let (until, since) = (|row| decays.until(row), |row| decays.since(row));
            rows_of(&io.q, head, rows).pack(simd, q.at, q.row);
            rows_of(&io.dout, head, rows).pack(simd, dout.at, dout.row);
            scores(simd, ahead, (q, memory.k_columns), p, (count, k_dim));
            scores(simd, ahead, (dout, memory.v_columns), dp, (count, v_dim));
            decays.weigh_both(simd, [p, dp], memory.by_query, &mut by_column);

            let size = keys(first.clone(), v_dim);
            product_of_some(simd, ahead, (dout.left(), state), dq, size, count);
            add_dots(simd, [q, dq], before, first.clone(), memory.by_query);
            triangle(simd, ahead, (dp.left(), k), dq, keys(0..count, count), &until, before);
            store(simd, &rows_of(&io.dq, head, rows), dq);

            flip(simd, d, (k_dim, v_dim), d_columns);
            let size = keys(last.clone(), v_dim);
            product_of_some(simd, ahead, (v.left(), d_columns), dk, size, count);
            memory.by_key.at.write_bytes(0, count * memory.by_key.row);
            add_dots(simd, [k, dk], after, last.clone(), memory.by_key);
            triangle(simd, ahead, (dp.transposed(), q), dk, keys(0..count, count), &since, after);

            product_of_some(simd, ahead, (k.left(), d), dv, values(last, k_dim), count);
            let size = values(0..count, count);
            triangle(simd, ahead, (p.transposed(), dout), dv, size, &since, after);

            let crossing = match decays.carry() {
                Some(carry) => {
                    f64::from(carry) * f64::from(dot(simd, state.at, d_columns.at, v_dim * k.row))
                }
                None => 0.0,
            };
            self.decay_gradients(simd, &by_column, crossing);

            scale_rows(simd, q, q.row, &before[..count]);
            let size = Size { rows: 0..k_dim, columns: v.row, depth: first };
            product(simd, ahead, (q.transposed(), dout), d, size, decays.onto(d.at));
        }
    }

    /// A token's log decay scales what tokens before it, and the state, give to it and to those
    /// behind. Those are, summed in float64,
    ///
    /// - pairs of tokens of the chunk: sums of p ∘ dp by rows less those by columns, from the token
    ///   on; the diagonal, which no decay scales, is in neither,
    /// - the state before with queries from the token on,
    /// - keys before the token with the gradient of the state after,
    /// - the state before with that gradient: `crossing`.
    ///
    /// Nothing is a small difference of large sums, and errors do not add up over chunks.
    ///
    /// # Safety
    /// As [`Part::gradients`].
    #[inline(always)]
    unsafe fn decay_gradients<S: Simd>(&self, simd: S, by_column: &[f32; CHUNK], crossing: f64) {
        let Part { io, memory, head: (batch, head), rows, .. } = *self;
        let (mut queries, mut keys) = ([0.0; CHUNK], [0.0; CHUNK]);
        // SAFETY: passed on.
        unsafe {
            add_lanes(simd, memory.by_query, rows.len(), &mut queries);
            add_lanes(simd, memory.by_key, rows.len(), &mut keys);
        }
        let (mut sums, mut sum) = ([0.0; CHUNK], crossing);
        for (before, key) in sums.iter_mut().zip(&keys[..rows.len()]) {
            *before = sum;
            sum += f64::from(*key);
        }
        let mut sum = 0.0;
        for (i, row) in rows.clone().enumerate().rev() {
            sum += f64::from(queries[i]) - f64::from(by_column[i]);
            // SAFETY: passed on.
            unsafe {
                let target = io.dlog_decay.row(batch, row, head).cast::<f32>();
                if *io.log_decay.row(batch, row, head).cast::<f32>() == f32::NEG_INFINITY {
                    // A reset: nothing passes it, and pairs of the run before begin anew.
                    *target = 0.0;
                    sum = 0.0;
                } else {
                    *target = (sum + sums[i]) as f32;
                }
            }
        }
    }
}

/// Adds factor · a ∘ b of each of the rows, as long as those of `a`, to the row's vector of sums.
///
/// # Safety
/// All have these rows, and `sums` are this thread's.
#[inline(always)]
unsafe fn add_dots<S: Simd>(
    simd: S,
    [a, b]: [Matrix; 2],
    factors: &[f32; CHUNK],
    rows: Range<usize>,
    sums: Matrix,
) {
    for row in rows {
        // SAFETY: passed on.
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

/// The sum of the lanes of each row's vector.
///
/// # Safety
/// There is a vector for each row of a chunk.
#[inline(always)]
unsafe fn add_lanes<S: Simd>(simd: S, sums: Matrix, count: usize, to: &mut [f32; CHUNK]) {
    let mut columns = [0.0f32; 16 * 16];
    for first in (0..count).step_by(S::LANES) {
        // SAFETY: no vector has more than 16 lanes, and a chunk is a multiple of them.
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
