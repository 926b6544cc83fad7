//! Outputs and the state after them, chunk after chunk.

use std::ops::Range;

use super::ForwardIo;
use super::chunk::{
    CHUNK, chunks, product, product_and_zeros, scale_all, scale_rows, scores, store, transpose,
    triangular_product,
};
use super::decays::Decays;
use super::head_of;
use super::prefetch::Prefetch;
use crate::host::matmul::Matrix;
use crate::host::scratch::{Scratch, ScratchTask};
use crate::host::simd::Simd;

/// The outputs of one head.
pub(super) struct ForwardHead<'a> {
    pub io: &'a ForwardIo,
    /// Batch entry and head of decays.
    pub head: (usize, usize),
}

/// The scratch of a head.
#[derive(Clone, Copy)]
pub(super) struct HeadScratch {
    q: Matrix,
    k: Matrix,
    /// Keys as columns.
    columns: Matrix,
    v: Matrix,
    p: Matrix,
    o: Matrix,
    state: Matrix,
}

impl ScratchTask for ForwardHead<'_> {
    type Parts = HeadScratch;

    fn lay_out<S: Simd>(&self, scratch: &mut Scratch) -> HeadScratch {
        let (k_dim, v_dim) = (self.io.k.dim, self.io.v.dim);
        let (kw, vw) = (k_dim.next_multiple_of(S::LANES), v_dim.next_multiple_of(S::LANES));
        let mut take = |rows, row| Matrix::take(scratch, (rows, row));
        HeadScratch {
            q: take(CHUNK, kw),
            k: take(CHUNK, kw),
            columns: take(kw, CHUNK),
            v: take(CHUNK, vw),
            p: take(CHUNK, CHUNK),
            o: take(CHUNK, vw),
            state: take(k_dim, vw),
        }
    }

    #[inline(always)]
    unsafe fn work<S: Simd>(&self, simd: S, scratch: HeadScratch) {
        let ForwardHead { io, head } = *self;
        let (state, whole) = (scratch.state, 0..io.k.dim);
        // SAFETY: the scratch is this task's. The caller of `forward` guarantees that the arrays
        // have the rows that the problem asks for, and that this call alone uses the results. This
        // task alone uses its head's results.
        unsafe {
            io.before.head_rows(head, &whole).pack(simd, state);
            for rows in chunks(io.q.rows.len()) {
                self.chunk(simd, scratch, rows);
            }
            store(simd, &io.after.head_rows(head, &whole), state);
            simd.fence();
        }
    }
}

impl ForwardHead<'_> {
    /// Computes o = from_start ∘ q S + ((q kᵀ) ∘ decay) v, then S = carry · S + (to_end ∘ k)ᵀ v. Here
    /// q stands for the scaled queries.
    ///
    /// # Safety
    /// The caller guarantees that the scratch is this task's, that the inputs have these rows, and
    /// that `rows` of the head's output are this task's.
    #[inline(always)]
    unsafe fn chunk<S: Simd>(&self, simd: S, scratch: HeadScratch, rows: Range<usize>) {
        let ForwardHead { io, head } = *self;
        let HeadScratch { q, k, columns, v, p, o, state } = scratch;
        let (count, dim) = (rows.len(), io.k.dim);
        let prefetch = &mut self.prefetch(rows.end).over(3);
        // SAFETY: the caller guarantees the scratch and the rows of the arrays.
        unsafe {
            let decays = Decays::read(simd, &io.log_decay, head, &rows);
            for (array, packed) in [(&io.q, q), (&io.k, k), (&io.v, v)] {
                array.head_rows(head_of(array, &io.log_decay, head), &rows).pack(simd, packed);
            }
            scale_all(simd, q, count, io.scale);
            transpose(simd, k, (count, k.row), columns);
            scores(simd, prefetch, (q, columns), p, (count, dim));
            decays.weigh(simd, p);

            let size = (decays.first(), 0..dim);
            product_and_zeros(simd, prefetch, (q.left(), state), o, size, count);
            let (until, before) = (|row| decays.until(row), &decays.from_start);
            triangular_product(simd, prefetch, (p.left(), v), o, count, &until, before);
            store(simd, &io.o.head_rows(head, &rows), o);

            scale_rows(simd, k, &decays.to_end[..count]);
            let (size, write) = ((0..dim, decays.last()), decays.onto(state.at));
            product(simd, prefetch, (k.transposed(), v), state, size, write);
        }
    }

    /// Returns the rows that the chunk from `start` on reads.
    fn prefetch(&self, start: usize) -> Prefetch {
        let ForwardHead { io, head } = *self;
        let len = io.q.rows.len();
        if start == len {
            return Prefetch::none();
        }
        let rows = start..len.min(start + CHUNK);
        [&io.q, &io.k, &io.v].into_iter().fold(Prefetch::none(), |prefetch, array| {
            prefetch.and(&array.head_rows(head_of(array, &io.log_decay, head), &rows))
        })
    }
}
