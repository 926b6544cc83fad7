//! Gradients, from the last chunk to the first.

use std::ops::Range;

use super::BackwardIo;
use super::chunk::{CHUNK, Decays, Left, chunks, product, rows_of, scale_rows, store, triangle};
use super::forward::{fill, scores};
use crate::host::matmul::Write;
use crate::host::pack::{Scratch, sum, transpose};
use crate::host::simd::{Simd, Task};

/// Floats of a head's states that are kept at once, where their number allows it.
const KEPT_FLOATS: usize = 1 << 21;

/// Gradients of one key/value head and of all query heads that use it.
pub(super) struct BackwardGroup<'a> {
    pub io: &'a BackwardIo,
    pub batch: usize,
    pub kv_head: usize,
}

/// Scratch that all chunks use.
#[derive(Clone, Copy)]
struct Memory {
    q: *mut f32,
    k: *mut f32,
    k_decayed: *mut f32,
    v: *mut f32,
    dout: *mut f32,
    columns: *mut f32,
    p: *mut f32,
    dp: *mut f32,
    dq: *mut f32,
    dk: *mut f32,
    dv: *mut f32,
    dk_sum: *mut f32,
    dv_sum: *mut f32,
    carry: *mut f32,
    k_width: usize,
    v_width: usize,
}

/// A head's gradient of the state, both ways, and its states, transposed: `[v_dim, k_width]`.
#[derive(Clone, Copy)]
struct States {
    d: *mut f32,
    d_columns: *mut f32,
    /// Before the first chunk of each part.
    parts: *mut f32,
    /// Before each chunk of a part, and after the last.
    chunks: *mut f32,
}

/// How many chunks are a part: all if their states fit, else as many as there are parts.
fn part_chunks(count: usize, floats: usize) -> usize {
    let root = (count as f64).sqrt().ceil() as usize;
    root.max(KEPT_FLOATS / floats.max(1)).clamp(1, count.max(1))
}

impl Task for BackwardGroup<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (k_dim, v_dim) = (self.io.k.dim, self.io.v.dim);
        let (kw, vw) = (k_dim.next_multiple_of(S::LANES), v_dim.next_multiple_of(S::LANES));
        let (keys, values, square) = (CHUNK * kw, CHUNK * vw, CHUNK * CHUNK);
        let all: Vec<_> = chunks(self.io.q.rows.len()).collect();
        let part = part_chunks(all.len(), v_dim * kw);
        let parts = all.len().div_ceil(part);
        let group = self.io.q.heads / self.io.k.heads;
        let wide = k_dim.max(v_dim);
        let of_group = [
            keys,
            keys,
            keys,
            values,
            values,
            CHUNK * wide,
            square,
            square,
            keys,
            keys,
            values,
            keys,
            values,
            wide,
        ];
        let of_head = [k_dim * vw, v_dim * kw, parts * v_dim * kw, (part + 1) * v_dim * kw];
        let footprint =
            |sizes: &[usize]| sizes.iter().map(|n| Scratch::footprint(*n)).sum::<usize>();
        let total = footprint(&of_group) + group * footprint(&of_head);
        Scratch::with(total, |mut scratch| {
            #[rustfmt::skip]
            let [q, k, k_decayed, v, dout, columns, p, dp, dq, dk, dv, dk_sum, dv_sum, carry] =
                of_group.map(|len| scratch.take(len));
            #[rustfmt::skip]
            let memory = Memory {
                q, k, k_decayed, v, dout, columns, p, dp, dq, dk, dv, dk_sum, dv_sum, carry,
                k_width: kw, v_width: vw,
            };
            let heads: Vec<_> = (0..group)
                .map(|member| {
                    let [d, d_columns, parts, chunks] = of_head.map(|len| scratch.take(len));
                    (self.kv_head * group + member, States { d, d_columns, parts, chunks })
                })
                .collect();
            simd.vectorize(Walk { of: &self, memory, heads: &heads, all: &all, part });
        });
    }
}

/// A task of its own, since what is called from a closure is compiled without the instructions.
struct Walk<'a> {
    of: &'a BackwardGroup<'a>,
    memory: Memory,
    heads: &'a [(usize, States)],
    all: &'a [Range<usize>],
    part: usize,
}

impl Task for Walk<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Walk { of, memory, heads, all, part } = self;
        // SAFETY: all of it is scratch; the arrays were checked, and this task alone writes its
        // heads' results.
        unsafe { of.all(simd, memory, heads, all, part) }
    }
}

impl BackwardGroup<'_> {
    /// # Safety
    /// The memory is scratch, and the arrays have the chunks' rows.
    #[inline(always)]
    unsafe fn all<S: Simd>(
        &self,
        simd: S,
        memory: Memory,
        heads: &[(usize, States)],
        all: &[Range<usize>],
        part: usize,
    ) {
        let (BackwardIo { before, dafter, dbefore, .. }, batch) = (self.io, self.batch);
        let (k_dim, v_dim) = (self.io.k.dim, self.io.v.dim);
        let Memory { k_width: kw, v_width: vw, .. } = memory;
        let floats = v_dim * kw;
        // SAFETY: passed on.
        unsafe {
            for &(head, States { d, d_columns, parts, chunks }) in heads {
                let whole = 0..k_dim;
                rows_of(before, batch, head, &whole).pack(simd, d, vw);
                flip(d, vw, k_dim, parts, kw, v_dim);
                for (index, chunks_of_part) in all.chunks(part).enumerate() {
                    chunks.copy_from_nonoverlapping(parts.add(index * floats), floats);
                    // The last part is gone through again at once, so it is left to that.
                    if (index + 1) * part < all.len() {
                        self.states(simd, memory, head, chunks, chunks_of_part);
                        let last = chunks.add(chunks_of_part.len() * floats);
                        parts.add((index + 1) * floats).copy_from_nonoverlapping(last, floats);
                    }
                }
                rows_of(dafter, batch, head, &whole).pack(simd, d, vw);
                flip(d, vw, k_dim, d_columns, kw, v_dim);
            }
            for (index, chunks_of_part) in all.chunks(part).enumerate().rev() {
                for &(head, States { parts, chunks, .. }) in heads {
                    chunks.copy_from_nonoverlapping(parts.add(index * floats), floats);
                    self.states(simd, memory, head, chunks, chunks_of_part);
                }
                for (number, rows) in chunks_of_part.iter().enumerate().rev() {
                    self.chunk(simd, memory, heads, rows, number * floats);
                }
            }
            for &(head, States { d, .. }) in heads {
                store(simd, &rows_of(dbefore, batch, head, &(0..k_dim)), d, vw);
            }
        }
    }

    /// The state after each chunk, each behind the one before it.
    ///
    /// # Safety
    /// As [`BackwardGroup::all`].
    #[inline(always)]
    unsafe fn states<S: Simd>(
        &self,
        simd: S,
        memory: Memory,
        head: usize,
        states: *mut f32,
        chunks: &[Range<usize>],
    ) {
        let Memory { k, v, carry, k_width: kw, v_width: vw, .. } = memory;
        let (BackwardIo { k: keys, v: values, log_decay, .. }, batch) = (self.io, self.batch);
        let floats = values.dim * kw;
        for (number, rows) in chunks.iter().enumerate() {
            // SAFETY: passed on.
            unsafe {
                let decays = Decays::read(log_decay, batch, head, rows);
                rows_of(keys, batch, self.kv_head, rows).pack(simd, k, kw);
                rows_of(values, batch, self.kv_head, rows).pack(simd, v, vw);
                scale_rows(simd, k, kw, &decays.to_end[..rows.len()]);
                let (from, to) = (states.add(number * floats), states.add((number + 1) * floats));
                to.copy_from_nonoverlapping(from, floats);
                fill(carry, values.dim, decays.carry());
                let (a, write) = (Left::transposed(v, vw), Write::Rescale(carry));
                product(simd, a, (k, kw), (to, kw), (0..values.dim, kw), 0..rows.len(), write);
            }
        }
    }

    /// # Safety
    /// As [`BackwardGroup::all`]; the state before the chunk lies at `state` in each head's.
    #[inline(always)]
    unsafe fn chunk<S: Simd>(
        &self,
        simd: S,
        memory: Memory,
        heads: &[(usize, States)],
        rows: &Range<usize>,
        state: usize,
    ) {
        let (io, batch, kv_head) = (self.io, self.batch, self.kv_head);
        let Memory { k, v, dk_sum, dv_sum, k_width: kw, v_width: vw, .. } = memory;
        let count = rows.len();
        // SAFETY: passed on.
        unsafe {
            rows_of(&io.k, batch, kv_head, rows).pack(simd, k, kw);
            rows_of(&io.v, batch, kv_head, rows).pack(simd, v, vw);
            dk_sum.write_bytes(0, count * kw);
            dv_sum.write_bytes(0, count * vw);
            for (head, states) in heads {
                self.head(simd, memory, (*head, *states), rows, state);
                add(simd, dk_sum, memory.dk, count * kw);
                add(simd, dv_sum, memory.dv, count * vw);
            }
            store(simd, &rows_of(&io.dk, batch, kv_head, rows), dk_sum, kw);
            store(simd, &rows_of(&io.dv, batch, kv_head, rows), dv_sum, vw);
        }
    }

    /// One query head's part of a chunk.
    ///
    /// # Safety
    /// As [`BackwardGroup::chunk`]; keys and values are packed.
    #[inline(always)]
    unsafe fn head<S: Simd>(
        &self,
        simd: S,
        memory: Memory,
        (head, states): (usize, States),
        rows: &Range<usize>,
        state: usize,
    ) {
        let (io, batch, count) = (self.io, self.batch, rows.len());
        let (k_dim, v_dim) = (io.k.dim, io.v.dim);
        #[rustfmt::skip]
        let Memory {
            q, k, k_decayed, v, dout, columns, p, dp, dq, dk, dv, carry, k_width: kw, v_width: vw, ..
        } = memory;
        let States { d, d_columns, chunks, .. } = states;
        // SAFETY: passed on.
        unsafe {
            let decays = Decays::read(&io.log_decay, batch, head, rows);
            let (from_start, to_end) = (decays.from_start.as_ptr(), decays.to_end.as_ptr());
            rows_of(&io.q, batch, head, rows).pack(simd, q, kw);
            rows_of(&io.dout, batch, head, rows).pack(simd, dout, vw);
            transpose(simd, k, kw, count, k_dim, 1.0, columns);
            scores(simd, (q, kw), columns, p, (count, k_dim));
            transpose(simd, v, vw, count, v_dim, 1.0, columns);
            scores(simd, (dout, vw), columns, dp, (count, v_dim));
            decays.weigh(simd, [p, dp]);

            let before = (chunks.add(state).cast_const(), kw);
            let a = Left::rows(dout, vw);
            product(simd, a, before, (dq, kw), (0..count, kw), 0..v_dim, Write::Set);
            let until = |row| 0..row + 1;
            triangle(
                simd,
                Left::rows(dp, CHUNK),
                (k, kw),
                (dq, kw),
                (count, kw),
                until,
                from_start,
            );

            let since = |row| row..count;
            let a = Left::rows(v, vw);
            product(simd, a, (d_columns, kw), (dk, kw), (0..count, kw), 0..v_dim, Write::Set);
            let a = Left::transposed(dp, CHUNK);
            triangle(simd, a, (q, kw), (dk, kw), (count, kw), since, to_end);

            let a = Left::rows(k, kw);
            product(simd, a, (d, vw), (dv, vw), (0..count, vw), 0..k_dim, Write::Set);
            let a = Left::transposed(p, CHUNK);
            triangle(simd, a, (dout, vw), (dv, vw), (count, vw), since, to_end);
            store(simd, &rows_of(&io.dq, batch, head, rows), dq, kw);

            let after = chunks.add(state + v_dim * kw);
            let crossing = dot(simd, after, d_columns, v_dim * kw);
            self.decay_gradients(simd, memory, head, rows, crossing);

            // k_decayed is free: queries with what is left at them of the state before.
            k_decayed.copy_from_nonoverlapping(q, count * kw);
            scale_rows(simd, k_decayed, kw, &decays.from_start[..count]);
            fill(carry, k_dim.max(v_dim), decays.carry());
            let write = || Write::Rescale(carry);
            let a = Left::transposed(k_decayed, kw);
            product(simd, a, (dout, vw), (d, vw), (0..k_dim, vw), 0..count, write());
            let a = Left::transposed(dout, vw);
            product(simd, a, (k_decayed, kw), (d_columns, kw), (0..v_dim, kw), 0..count, write());
        }
    }

    /// Each token's log decay scales what earlier tokens of its run give to it and to later ones.
    /// By rows q·dq − k·dk is the gradient of the sum of logs up to a token; what goes beyond the
    /// chunk is ⟨S, D⟩ at its end. So errors do not add up over chunks.
    ///
    /// # Safety
    /// As [`BackwardGroup::head`].
    #[inline(always)]
    unsafe fn decay_gradients<S: Simd>(
        &self,
        simd: S,
        memory: Memory,
        head: usize,
        rows: &Range<usize>,
        crossing: f32,
    ) {
        let Memory { q, k, dq, dk, k_width: kw, .. } = memory;
        let mut total = f64::from(crossing);
        for (i, row) in rows.clone().enumerate().rev() {
            // SAFETY: passed on.
            unsafe {
                let at = i * kw;
                let of_query = dot(simd, q.add(at), dq.add(at), kw);
                let of_key = dot(simd, k.add(at), dk.add(at), kw);
                total += f64::from(of_query) - f64::from(of_key);
                let target = self.io.dlog_decay.row(self.batch, row, head).cast::<f32>();
                let log = *self.io.log_decay.row(self.batch, row, head).cast::<f32>();
                if log == f32::NEG_INFINITY {
                    // A reset: nothing passes it. What is before it ends here.
                    *target = 0.0;
                    total = 0.0;
                } else {
                    *target = total as f32;
                }
            }
        }
    }
}

/// `[rows, width]` as `[columns, to_width]`, with zeros behind.
///
/// # Safety
/// Both are scratch of these sizes.
unsafe fn flip(
    from: *const f32,
    width: usize,
    rows: usize,
    to: *mut f32,
    to_width: usize,
    columns: usize,
) {
    for column in 0..columns {
        for row in 0..to_width {
            // SAFETY: passed on.
            unsafe {
                let x = if row < rows { *from.add(row * width + column) } else { 0.0 };
                *to.add(column * to_width + row) = x;
            }
        }
    }
}

/// Σ a·b over `count` floats, a multiple of the lanes.
///
/// # Safety
/// They are readable.
#[inline(always)]
unsafe fn dot<S: Simd>(simd: S, a: *const f32, b: *const f32, count: usize) -> f32 {
    let mut sums = simd.zero();
    for i in (0..count).step_by(S::LANES) {
        // SAFETY: passed on.
        sums = unsafe { simd.mul_add(simd.load(a.add(i)), simd.load(b.add(i)), sums) };
    }
    sum(simd, sums)
}

/// a += b over `count` floats, a multiple of the lanes.
///
/// # Safety
/// They are scratch.
#[inline(always)]
unsafe fn add<S: Simd>(simd: S, a: *mut f32, b: *const f32, count: usize) {
    for i in (0..count).step_by(S::LANES) {
        // SAFETY: passed on.
        unsafe { simd.store(a.add(i), simd.add(simd.load(a.add(i)), simd.load(b.add(i)))) }
    }
}
