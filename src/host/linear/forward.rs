//! Outputs and states, chunk after chunk.

use std::ops::Range;

use super::chunk::{CHUNK, Decays, Left, chunks, product, rows_of, scale_rows, store, triangle};
use super::{ForwardIo, Scan};
use crate::host::array::HostArray;
use crate::host::matmul::Write;
use crate::host::pack::{Scratch, panels, transpose};
use crate::host::simd::{Simd, Task};

/// The state of one head after all its tokens, from zero or from the one before.
pub(super) struct ScanHead<'a> {
    pub scan: &'a Scan<'a>,
    pub batch: usize,
    pub head: usize,
}

impl Task for ScanHead<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (left, right) = (self.scan.left, self.scan.right);
        let (kw, vw) = (left.dim.next_multiple_of(S::LANES), right.dim.next_multiple_of(S::LANES));
        let sizes = [CHUNK * kw, CHUNK * vw, left.dim * vw, left.dim];
        let total = sizes.iter().map(|len| Scratch::footprint(*len)).sum();
        Scratch::with(total, |mut scratch| {
            let [k, v, state, carry] = sizes.map(|len| scratch.take(len));
            simd.vectorize(ScanWalk { of: &self, k, v, state, carry, k_width: kw, v_width: vw });
        });
    }
}

/// A task of its own, since what is called from a closure is compiled without the instructions.
struct ScanWalk<'a> {
    of: &'a ScanHead<'a>,
    k: *mut f32,
    v: *mut f32,
    state: *mut f32,
    carry: *mut f32,
    k_width: usize,
    v_width: usize,
}

impl Task for ScanWalk<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let ScanWalk { of: &ScanHead { scan, batch, head }, k, v, state, carry, .. } = self;
        let (kw, vw, dim) = (self.k_width, self.v_width, scan.left.dim);
        let count = chunks(scan.left.rows.len()).len();
        let head_of = |array: &HostArray| head * array.heads / scan.log_decay.heads;
        // SAFETY: all of it is scratch, the inputs have these rows, and this task alone writes its
        // head's state.
        unsafe {
            state.write_bytes(0, dim * vw);
            for number in 0..count {
                let chunk = if scan.backward { count - 1 - number } else { number };
                let rows = chunk * CHUNK..scan.left.rows.len().min((chunk + 1) * CHUNK);
                let decays = Decays::read(scan.log_decay, batch, head, &rows);
                rows_of(scan.left, batch, head_of(scan.left), &rows).pack(simd, k, kw);
                rows_of(scan.right, batch, head_of(scan.right), &rows).pack(simd, v, vw);
                let factors = if scan.backward { &decays.from_start } else { &decays.to_end };
                scale_rows(simd, k, kw, &factors[..rows.len()]);
                fill(carry, dim, decays.carry());
                let (a, write) = (Left::transposed(k, kw), Write::Rescale(carry));
                product(simd, a, (v, vw), (state, vw), (0..dim, vw), 0..rows.len(), write);
            }
            store(simd, &rows_of(scan.out, batch, head, &(0..dim)), state, vw);
        }
    }
}

/// Outputs of one head.
pub(super) struct ForwardHead<'a> {
    pub io: &'a ForwardIo,
    pub batch: usize,
    pub head: usize,
}

/// Scratch of a head.
#[derive(Clone, Copy)]
struct Memory {
    q: *mut f32,
    k: *mut f32,
    k_columns: *mut f32,
    v: *mut f32,
    p: *mut f32,
    o: *mut f32,
    state: *mut f32,
    carry: *mut f32,
    k_width: usize,
    v_width: usize,
}

impl Task for ForwardHead<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (k_dim, v_dim) = (self.io.k.dim, self.io.v.dim);
        let (kw, vw) = (k_dim.next_multiple_of(S::LANES), v_dim.next_multiple_of(S::LANES));
        let (keys, values) = (CHUNK * kw, CHUNK * vw);
        let sizes = [keys, keys, keys, values, CHUNK * CHUNK, values, k_dim * vw, k_dim];
        let total = sizes.iter().map(|len| Scratch::footprint(*len)).sum();
        Scratch::with(total, |mut scratch| {
            let [q, k, k_columns, v, p, o, state, carry] = sizes.map(|len| scratch.take(len));
            let memory =
                Memory { q, k, k_columns, v, p, o, state, carry, k_width: kw, v_width: vw };
            simd.vectorize(ForwardWalk { of: &self, memory });
        });
    }
}

/// As [`ScanWalk`].
struct ForwardWalk<'a> {
    of: &'a ForwardHead<'a>,
    memory: Memory,
}

impl Task for ForwardWalk<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let ForwardWalk { of, memory: Memory { state, v_width, .. } } = self;
        let ForwardHead { io, batch, head } = of;
        let whole = 0..io.k.dim;
        // SAFETY: all of it is scratch; the arrays were checked, and this task alone writes its
        // head's results.
        unsafe {
            rows_of(&io.before, *batch, *head, &whole).pack(simd, state, v_width);
            for rows in chunks(io.q.rows.len()) {
                of.chunk(simd, self.memory, rows);
            }
            store(simd, &rows_of(&io.after, *batch, *head, &whole), state, v_width);
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
        let Memory { q, k, k_columns, v, p, o, state, carry, k_width: kw, v_width: vw } = memory;
        let (count, dim) = (rows.len(), io.k.dim);
        let kv_head = head * io.k.heads / io.q.heads;
        // SAFETY: passed on.
        unsafe {
            let decays = Decays::read(&io.log_decay, batch, head, &rows);
            rows_of(&io.q, batch, head, &rows).pack(simd, q, kw);
            rows_of(&io.k, batch, kv_head, &rows).pack(simd, k, kw);
            rows_of(&io.v, batch, kv_head, &rows).pack(simd, v, vw);
            transpose(simd, k, kw, count, dim, 1.0, k_columns);
            scores(simd, (q, kw), k_columns, p, (count, dim));
            decays.weigh(simd, [p]);
            let queries = Left::rows(q, kw);
            product(simd, queries, (state, vw), (o, vw), (0..count, vw), 0..dim, Write::Set);
            let (weights, before) = (Left::rows(p, CHUNK), decays.from_start.as_ptr());
            triangle(simd, weights, (v, vw), (o, vw), (count, vw), |row| 0..row + 1, before);
            store(simd, &rows_of(&io.o, batch, head, &rows), o, vw);
            scale_rows(simd, k, kw, &decays.to_end[..count]);
            fill(carry, dim, decays.carry());
            let (keys, write) = (Left::transposed(k, kw), Write::Rescale(carry));
            product(simd, keys, (v, vw), (state, vw), (0..dim, vw), 0..count, write);
        }
    }
}

/// p = a bᵀ on and below the diagonal, for `count` rows and columns of length `dim`; b comes as
/// columns.
///
/// # Safety
/// All of it is scratch.
#[inline(always)]
pub(super) unsafe fn scores<S: Simd>(
    simd: S,
    (a, width): (*const f32, usize),
    columns: *const f32,
    p: *mut f32,
    (count, dim): (usize, usize),
) {
    for lanes in panels::<S>(count) {
        // SAFETY: passed on.
        unsafe {
            let b = (columns.add(lanes.start * dim), lanes.len());
            let c = (p.add(lanes.start), CHUNK);
            let sizes = (lanes.start..count, lanes.len());
            product(simd, Left::rows(a, width), b, c, sizes, 0..dim, Write::Set);
        }
    }
}

/// # Safety
/// There are so many floats.
#[inline(always)]
pub(super) unsafe fn fill(to: *mut f32, count: usize, x: f32) {
    // SAFETY: passed on.
    unsafe { std::slice::from_raw_parts_mut(to, count) }.fill(x);
}
