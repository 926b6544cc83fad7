//! Gradients, from the last chunk to the first.

use std::ops::Range;

use super::BackwardIo;
use super::ahead::Ahead;
use super::chunk::{Matrix, Size, chunks, flip, product, rows_of, scale_rows, store};
use super::decays::Decays;
use super::gradients::{Memory, Part, States};
use crate::host::pack::Scratch;
use crate::host::simd::{Simd, Task};

/// Floats of a head's states that are kept at once, where their number allows it. Where not all are,
/// most are made twice: 9 % more time for both passes, head_dim 64.
const KEPT_FLOATS: usize = 1 << 21;

/// Gradients of one key/value head and of all query heads that use it.
pub(super) struct BackwardGroup<'a> {
    pub io: &'a BackwardIo,
    pub batch: usize,
    pub kv_head: usize,
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
        let all: Vec<_> = chunks(self.io.q.rows.len()).collect();
        let part = part_chunks(all.len(), vw * kw);
        let parts = all.len().div_ceil(part).max(1);
        let group = self.io.q.heads / self.io.k.heads;
        let of_group = Memory::sizes((kw, vw), S::LANES);
        let of_head = [(kw, vw), (parts * vw, kw), (part * vw, kw)];
        let footprint = |sizes: &[(usize, usize)]| {
            sizes.iter().map(|(rows, row)| Scratch::footprint(rows * row)).sum::<usize>()
        };
        let total = footprint(&of_group) + group * footprint(&of_head);
        Scratch::with(total, |mut scratch| {
            let mut take = |(rows, row)| Matrix { at: scratch.take(rows * row), row };
            let memory = Memory::new(of_group.map(&mut take));
            let heads: Vec<_> = (0..group)
                .map(|member| {
                    let [d, parts, chunks] = of_head.map(&mut take);
                    (self.kv_head * group + member, States { d, parts, chunks, rows: vw })
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
        // SAFETY: all of it is scratch; the arrays were checked, and this task alone writes its
        // heads' results.
        unsafe { self.all(simd) }
    }
}

impl Walk<'_> {
    /// # Safety
    /// The memory is scratch, and the arrays have the chunks' rows.
    #[inline(always)]
    unsafe fn all<S: Simd>(&self, simd: S) {
        let Walk { of: BackwardGroup { io, batch, .. }, all, part, .. } = *self;
        let whole = 0..io.k.dim;
        // SAFETY: passed on.
        unsafe {
            for &(head, states) in self.heads {
                let States { d, parts, .. } = states;
                // Rows that only fill up squares of vectors stay zero.
                d.at.write_bytes(0, d.row * whole.len().next_multiple_of(S::LANES));
                rows_of(&io.before, (*batch, head), &whole).pack(simd, d.at, d.row);
                flip(simd, d, (whole.len(), io.v.dim), parts);
                for index in 1..all.len().div_ceil(part) {
                    let state = states.part(index);
                    states.copy(states.part(index - 1), state);
                    for number in (index - 1) * part..index * part {
                        self.step(simd, head, number, state, state);
                    }
                }
                rows_of(&io.dafter, (*batch, head), &whole).pack(simd, d.at, d.row);
            }
            for first in (0..all.len()).step_by(part).rev() {
                let chunks = first..all.len().min(first + part);
                for &(head, states) in self.heads {
                    states.copy(states.part(first / part), states.chunk(0));
                    for (at, number) in chunks.clone().skip(1).enumerate() {
                        let (from, to) = (states.chunk(at), states.chunk(at + 1));
                        self.step(simd, head, number - 1, from, to);
                    }
                }
                for number in chunks.rev() {
                    self.chunk(simd, number, number - first);
                }
            }
            for &(head, States { d, .. }) in self.heads {
                store(simd, &rows_of(&io.dbefore, (*batch, head), &whole), d);
            }
            simd.fence();
        }
    }

    /// The state after a chunk from that before it.
    ///
    /// # Safety
    /// As [`Walk::all`].
    #[inline(always)]
    unsafe fn step<S: Simd>(&self, simd: S, head: usize, number: usize, from: Matrix, to: Matrix) {
        let Walk { of: &BackwardGroup { io, batch, kv_head }, memory: Memory { k, v, .. }, .. } =
            *self;
        let (rows, arrays) = (&self.all[number], [&io.k, &io.v]);
        let mut ahead = Ahead::none();
        if let Some(next) = self.all.get(number + 1) {
            for array in arrays {
                ahead = ahead.and(&rows_of(array, (batch, kv_head), next));
            }
        }
        // SAFETY: passed on.
        unsafe {
            let decays = Decays::read(simd, &io.log_decay, (batch, head), rows);
            rows_of(&io.k, (batch, kv_head), rows).pack(simd, k.at, k.row);
            rows_of(&io.v, (batch, kv_head), rows).pack(simd, v.at, v.row);
            scale_rows(simd, k, k.row, &decays.to_end[..rows.len()]);
            let size = Size { rows: 0..io.v.dim, columns: k.row, depth: decays.last() };
            let write = decays.onto(from.at);
            product(simd, &mut ahead.over(1), (v.transposed(), k), to, size, write);
        }
    }

    /// Gradients of a chunk; the states before it are those before the chunk `at` of a part.
    ///
    /// # Safety
    /// As [`Walk::all`].
    #[inline(always)]
    unsafe fn chunk<S: Simd>(&self, simd: S, number: usize, at: usize) {
        let Walk { of: &BackwardGroup { io, batch, kv_head }, memory, heads, all, .. } = *self;
        let (rows, kv_head) = (&all[number], (batch, kv_head));
        let Memory { k, v, k_columns, v_columns, dk_sum, dv_sum, .. } = memory;
        // SAFETY: passed on.
        unsafe {
            rows_of(&io.k, kv_head, rows).pack(simd, k.at, k.row);
            rows_of(&io.v, kv_head, rows).pack(simd, v.at, v.row);
            flip(simd, k, (rows.len(), k.row), k_columns);
            flip(simd, v, (rows.len(), v.row), v_columns);
            for (member, &(head, states)) in heads.iter().enumerate() {
                let part = Part { io, memory, states, head: (batch, head), rows, at };
                let ahead = &mut self.ahead(number, at, member).over(7);
                if member == 0 {
                    part.gradients(simd, ahead, [dk_sum, dv_sum]);
                } else {
                    part.gradients(simd, ahead, [memory.dk, memory.dv]);
                    add_rows(simd, dk_sum, memory.dk, (rows.len(), k.row));
                    add_rows(simd, dv_sum, memory.dv, (rows.len(), v.row));
                }
            }
            store(simd, &rows_of(&io.dk, kv_head, rows), dk_sum);
            store(simd, &rows_of(&io.dv, kv_head, rows), dv_sum);
        }
    }

    /// What is read after the `member` of the group in a chunk.
    fn ahead(&self, number: usize, at: usize, member: usize) -> Ahead {
        let Walk { of: &BackwardGroup { io, batch, kv_head }, heads, all, .. } = *self;
        let (number, at, member) = match (heads.get(member + 1), at) {
            (Some(_), _) => (number, at, member + 1),
            (None, 0) => return Ahead::none(),
            (None, _) => (number - 1, at - 1, 0),
        };
        let (rows, (head, states)) = (&all[number], heads[member]);
        let ahead = [&io.q, &io.dout]
            .into_iter()
            .fold(Ahead::none(), |ahead, array| ahead.and(&rows_of(array, (batch, head), rows)))
            .and_scratch(states.chunk(at), io.v.dim);
        if member > 0 {
            return ahead;
        }
        let keys = [&io.k, &io.v].into_iter();
        keys.fold(ahead, |ahead, array| ahead.and(&rows_of(array, (batch, kv_head), rows)))
    }
}

/// a += b
///
/// # Safety
/// They are this thread's and do not overlap; the width is a multiple of the lanes.
#[inline(always)]
unsafe fn add_rows<S: Simd>(simd: S, a: Matrix, b: Matrix, (rows, width): (usize, usize)) {
    for row in 0..rows {
        for d in (0..width).step_by(S::LANES) {
            // SAFETY: passed on.
            unsafe {
                let (a, b) = (a.at.add(row * a.row + d), b.at.add(row * b.row + d));
                simd.store(a, simd.add(simd.load(a), simd.load(b)));
            }
        }
    }
}
