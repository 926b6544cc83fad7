//! Outputs and the state after them, chunk after chunk.

use std::ops::Range;

use super::ForwardIo;
use super::ahead::Ahead;
use super::chunk::{
    CHUNK, Matrix, Size, chunks, flip, product, product_of_some, rows_of, scale_rows, scores,
    store, triangle,
};
use super::decays::Decays;
use crate::host::pack::Scratch;
use crate::host::simd::{Simd, Task};

/// Outputs of one head.
pub(super) struct ForwardHead<'a> {
    pub io: &'a ForwardIo,
    pub batch: usize,
    pub head: usize,
}

/// Scratch of a head.
#[derive(Clone, Copy)]
struct Memory {
    q: Matrix,
    k: Matrix,
    /// Keys as columns.
    columns: Matrix,
    v: Matrix,
    p: Matrix,
    o: Matrix,
    state: Matrix,
}

impl Task for ForwardHead<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (k_dim, v_dim) = (self.io.k.dim, self.io.v.dim);
        let (kw, vw) = (k_dim.next_multiple_of(S::LANES), v_dim.next_multiple_of(S::LANES));
        let (keys, values, square) = ((CHUNK, kw), (CHUNK, vw), (CHUNK, CHUNK));
        let sizes = [keys, keys, (kw, CHUNK), values, square, values, (k_dim, vw)];
        let total = sizes.iter().map(|(rows, row)| Scratch::footprint(rows * row)).sum();
        Scratch::with(total, |mut scratch| {
            let [q, k, columns, v, p, o, state] =
                sizes.map(|(rows, row)| Matrix { at: scratch.take(rows * row), row });
            let memory = Memory { q, k, columns, v, p, o, state };
            simd.vectorize(Walk { of: &self, memory });
        });
    }
}

/// A task of its own, since what is called from a closure is compiled without the instructions.
struct Walk<'a> {
    of: &'a ForwardHead<'a>,
    memory: Memory,
}

impl Task for Walk<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Walk { of, memory: Memory { state, .. } } = self;
        let ForwardHead { io, batch, head } = *of;
        let (whole, head) = (0..io.k.dim, (batch, head));
        // SAFETY: all of it is scratch; the arrays were checked, and this task alone writes its
        // head's results.
        unsafe {
            rows_of(&io.before, head, &whole).pack(simd, state.at, state.row);
            for rows in chunks(io.q.rows.len()) {
                of.chunk(simd, self.memory, rows);
            }
            store(simd, &rows_of(&io.after, head, &whole), state);
            simd.fence();
        }
    }
}

impl ForwardHead<'_> {
    /// o = from_start ∘ q S + ((q kᵀ) ∘ decay) v, then S = carry · S + (to_end ∘ k)ᵀ v.
    ///
    /// # Safety
    /// The memory is scratch, and the arrays have these rows.
    #[inline(always)]
    unsafe fn chunk<S: Simd>(&self, simd: S, memory: Memory, rows: Range<usize>) {
        let ForwardHead { io, batch, head } = *self;
        let Memory { q, k, columns, v, p, o, state } = memory;
        let (count, dim) = (rows.len(), io.k.dim);
        let (head, kv_head) = ((batch, head), (batch, head * io.k.heads / io.q.heads));
        let ahead = &mut self.ahead(rows.end).over(3);
        // SAFETY: passed on.
        unsafe {
            let decays = Decays::read(simd, &io.log_decay, head, &rows);
            rows_of(&io.q, head, &rows).pack(simd, q.at, q.row);
            rows_of(&io.k, kv_head, &rows).pack(simd, k.at, k.row);
            rows_of(&io.v, kv_head, &rows).pack(simd, v.at, v.row);
            flip(simd, k, (count, k.row), columns);
            scores(simd, ahead, (q, columns), p, (count, dim));
            decays.weigh(simd, p);

            let size = Size { rows: decays.first(), columns: v.row, depth: 0..dim };
            product_of_some(simd, ahead, (q.left(), state), o, size, count);
            let size = Size { rows: 0..count, columns: v.row, depth: 0..count };
            let (until, before) = (|row| decays.until(row), &decays.from_start);
            triangle(simd, ahead, (p.left(), v), o, size, &until, before);
            store(simd, &rows_of(&io.o, head, &rows), o);

            scale_rows(simd, k, k.row, &decays.to_end[..count]);
            let size = Size { rows: 0..dim, columns: v.row, depth: decays.last() };
            let write = decays.onto(state.at);
            product(simd, ahead, (k.transposed(), v), state, size, write);
        }
    }

    /// What the chunk that starts here will read.
    fn ahead(&self, start: usize) -> Ahead {
        let ForwardHead { io, batch, head } = *self;
        let len = io.q.rows.len();
        if start == len {
            return Ahead::none();
        }
        let rows = start..len.min(start + CHUNK);
        let (head, kv_head) = ((batch, head), (batch, head * io.k.heads / io.q.heads));
        let keys = [&io.k, &io.v].map(|array| rows_of(array, kv_head, &rows));
        Ahead::none().and(&rows_of(&io.q, head, &rows)).and(&keys[0]).and(&keys[1])
    }
}
