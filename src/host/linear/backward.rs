//! Gradients, from the last chunk to the first.

use std::ops::Range;

use super::BackwardIo;
use super::chunk::{chunks, product, scale_rows, store, transpose};
use super::decays::Decays;
use super::gradients::{GroupScratch, HeadChunk, HeadStates};
use super::head_of;
use super::prefetch::Prefetch;
use crate::host::array::HostArray;
use crate::host::matmul::Matrix;
use crate::host::scratch::{Scratch, ScratchTask};
use crate::host::simd::Simd;

/// Most floats of a head's states that are kept at once, if one part of the chunks may be so large.
/// If the states do not all fit, most are computed twice: 9 % more time for both passes, head_dim
/// 64.
const KEPT_FLOATS: usize = 1 << 21;

/// The gradients of a group: consecutive heads that share no head of q, k or v with other heads.
pub(super) struct BackwardGroup<'a> {
    pub io: &'a BackwardIo,
    /// Batch entry and group.
    pub group: (usize, usize),
}

/// Returns the largest number of groups: the greatest common divisor of the heads of q, k and v.
pub(super) fn groups(io: &BackwardIo) -> usize {
    let mut of_all = io.q.heads;
    for array in [&io.k, &io.v] {
        let mut rest = array.heads;
        while rest > 0 {
            (of_all, rest) = (rest, of_all % rest);
        }
    }
    of_all
}

/// Returns the number of chunks of a part: all chunks if their states fit, or else as many chunks
/// as there are parts.
fn part_chunks(count: usize, floats: usize) -> usize {
    let root = (count as f64).sqrt().ceil() as usize;
    root.max(KEPT_FLOATS / floats.max(1)).clamp(1, count.max(1))
}

/// The scratch of a group, and how its chunks are cut into parts.
pub(super) struct GroupMemory {
    scratch: GroupScratch,
    heads: Vec<HeadStates>,
    /// Chunks of a part.
    part: usize,
}

impl ScratchTask for BackwardGroup<'_> {
    type Parts = GroupMemory;

    fn lay_out<S: Simd>(&self, scratch: &mut Scratch) -> GroupMemory {
        let BackwardIo { q, k, v, .. } = self.io;
        let (kw, vw) = (k.dim.next_multiple_of(S::LANES), v.dim.next_multiple_of(S::LANES));
        let count = chunks(q.rows.len()).len();
        let part = part_chunks(count, vw * kw);
        let parts = count.div_ceil(part).max(1);
        let mut take = |rows, row| Matrix::take(scratch, (rows, row));
        let of_group = GroupScratch::take(&mut take, (kw, vw), S::LANES);
        let (batch, group) = self.group;
        let size = self.io.log_decay.heads / groups(self.io);
        let of_head = |head| HeadStates {
            head: (batch, head),
            d: take(kw, vw),
            parts: take(parts * vw, kw),
            chunks: take(part * vw, kw),
            rows: vw,
        };
        let heads = (group * size..(group + 1) * size).map(of_head).collect();
        GroupMemory { scratch: of_group, heads, part }
    }

    #[inline(always)]
    unsafe fn work<S: Simd>(&self, simd: S, GroupMemory { scratch, heads, part }: GroupMemory) {
        let all = chunks(self.io.q.rows.len()).collect();
        let task = GroupTask { group: self, scratch, heads, all, part };
        // SAFETY: the scratch is this task's. The caller of `backward` guarantees that the arrays
        // have the rows that the problem asks for, and that this call alone uses the results. This
        // task alone uses its heads' results.
        unsafe { task.all(simd) }
    }
}

/// A group with its scratch and its chunks.
///
/// Every method relies on what [`BackwardGroup::work`] guarantees: the scratch is this task's, the
/// arrays have the rows of all chunks, and the results of the group's heads are this task's.
struct GroupTask<'a> {
    group: &'a BackwardGroup<'a>,
    scratch: GroupScratch,
    heads: Vec<HeadStates>,
    all: Vec<Range<usize>>,
    part: usize,
}

impl GroupTask<'_> {
    /// Computes all gradients.
    ///
    /// # Safety
    /// The caller guarantees the scratch and the arrays, as [`GroupTask`] says.
    #[inline(always)]
    unsafe fn all<S: Simd>(&self, simd: S) {
        let GroupTask { group: BackwardGroup { io, .. }, ref all, part, .. } = *self;
        let whole = 0..io.k.dim;
        // SAFETY: the caller guarantees the scratch and the arrays.
        unsafe {
            for states in &self.heads {
                let HeadStates { head, d, parts, .. } = *states;
                // Rows that only fill up squares of vectors stay zero.
                d.clear(whole.len().next_multiple_of(S::LANES));
                io.before.head_rows(head, &whole).pack(simd, d);
                transpose(simd, d, (whole.len(), io.v.dim), parts);
                for index in 1..all.len().div_ceil(part) {
                    let state = states.part(index);
                    states.copy(states.part(index - 1), state);
                    for number in (index - 1) * part..index * part {
                        self.step(simd, head, number, (state, state));
                    }
                }
                io.dafter.head_rows(head, &whole).pack(simd, d);
            }
            for first in (0..all.len()).step_by(part).rev() {
                let chunks = first..all.len().min(first + part);
                for states in &self.heads {
                    states.copy(states.part(first / part), states.chunk(0));
                    for (at, number) in chunks.clone().skip(1).enumerate() {
                        let step = (states.chunk(at), states.chunk(at + 1));
                        self.step(simd, states.head, number - 1, step);
                    }
                }
                for number in chunks.rev() {
                    self.chunk(simd, number, number - first);
                }
            }
            for states in &self.heads {
                store(simd, &io.dbefore.head_rows(states.head, &whole), states.d);
            }
            simd.fence();
        }
    }

    /// Computes the state after a chunk from the state before it.
    ///
    /// # Safety
    /// The caller guarantees the scratch and the arrays, as [`GroupTask`] says, and that `from` and
    /// `to` are states of the head.
    #[inline(always)]
    unsafe fn step<S: Simd>(
        &self,
        simd: S,
        head: (usize, usize),
        number: usize,
        (from, to): (Matrix, Matrix),
    ) {
        let BackwardGroup { io, .. } = *self.group;
        let GroupScratch { k, v, .. } = self.scratch;
        let rows = &self.all[number];
        let shared = |array| head_of(array, &io.log_decay, head);
        let mut prefetch = Prefetch::none();
        if let Some(next) = self.all.get(number + 1) {
            for array in [&io.k, &io.v] {
                prefetch = prefetch.and(&array.head_rows(shared(array), next));
            }
        }
        // SAFETY: the caller guarantees the scratch and the arrays.
        unsafe {
            let decays = Decays::read(simd, &io.log_decay, head, rows);
            io.k.head_rows(shared(&io.k), rows).pack(simd, k);
            io.v.head_rows(shared(&io.v), rows).pack(simd, v);
            scale_rows(simd, k, &decays.to_end[..rows.len()]);
            let (size, write) = ((0..io.v.dim, decays.last()), decays.onto(from.at));
            product(simd, &mut prefetch.over(1), (v.transposed(), k), to, size, write);
        }
    }

    /// Computes the gradients of a chunk, which is chunk `at` of the current part.
    ///
    /// # Safety
    /// The caller guarantees the scratch and the arrays, as [`GroupTask`] says.
    #[inline(always)]
    unsafe fn chunk<S: Simd>(&self, simd: S, number: usize, at: usize) {
        let GroupTask { group: &BackwardGroup { io, .. }, scratch, ref heads, .. } = *self;
        let (rows, results) = (&self.all[number], [&io.dq, &io.dk, &io.dv]);
        let GroupScratch { k, v, columns, own, sums, .. } = scratch;
        // SAFETY: the caller guarantees the scratch and the arrays.
        unsafe {
            for (member, states) in heads.iter().enumerate() {
                let (head, count) = (states.head, rows.len());
                for (array, packed, turned) in [(&io.k, k, columns[0]), (&io.v, v, columns[1])] {
                    if self.begins(array, head) {
                        let shared = head_of(array, &io.log_decay, head);
                        array.head_rows(shared, rows).pack(simd, packed);
                        transpose(simd, packed, (count, packed.row), turned);
                    }
                }
                let begins = results.map(|result| self.begins(result, head));
                let targets = [0, 1, 2].map(|i| if begins[i] { sums[i] } else { own[i] });
                let chunk = HeadChunk { io, scratch, states, rows, at };
                chunk.gradients(simd, &mut self.prefetch(number, at, member).over(7), targets);
                for (i, result) in results.into_iter().enumerate() {
                    if !begins[i] {
                        add_rows(simd, sums[i], own[i], count);
                    }
                    if self.begins(result, (head.0, head.1 + 1)) {
                        let shared = head_of(result, &io.log_decay, head);
                        store(simd, &result.head_rows(shared, rows), sums[i]);
                    }
                }
            }
        }
    }

    /// Whether a head is the first one that uses its head of an array.
    fn begins(&self, array: &HostArray, head: (usize, usize)) -> bool {
        head.1.is_multiple_of(self.group.io.log_decay.heads / array.heads)
    }

    /// Returns the rows that are read after the `member` of the group in a chunk.
    fn prefetch(&self, number: usize, at: usize, member: usize) -> Prefetch {
        let (io, heads) = (self.group.io, &self.heads);
        let (number, at, member) = match (heads.get(member + 1), at) {
            (Some(_), _) => (number, at, member + 1),
            (None, 0) => return Prefetch::none(),
            (None, _) => (number - 1, at - 1, 0),
        };
        let (rows, states) = (&self.all[number], &heads[member]);
        let begun = [&io.q, &io.dout, &io.k, &io.v].into_iter();
        begun.filter(|array| self.begins(array, states.head)).fold(
            Prefetch::none().and_scratch(states.chunk(at), io.v.dim),
            |prefetch, array| {
                let shared = head_of(array, &io.log_decay, states.head);
                prefetch.and(&array.head_rows(shared, rows))
            },
        )
    }
}

/// Adds a += b.
///
/// # Safety
/// The caller guarantees that both have these rows, of the same number of whole vectors, are this
/// thread's and do not overlap.
#[inline(always)]
unsafe fn add_rows<S: Simd>(simd: S, a: Matrix, b: Matrix, rows: usize) {
    for row in 0..rows {
        for d in (0..a.row).step_by(S::LANES) {
            // SAFETY: the caller guarantees that both have this row of whole vectors.
            unsafe {
                let (a, b) = (a.at.add(row * a.row + d), b.at.add(row * b.row + d));
                simd.store(a, simd.add(simd.load(a), simd.load(b)));
            }
        }
    }
}
