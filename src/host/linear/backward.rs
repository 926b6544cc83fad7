//! The gradients of a group of heads.

use std::ops::Range;

use super::BackwardIo;
use super::gradients::{AllGradients, GradientSteps};
use super::sequence::{Workers, run};
use super::states::StateSteps;
use super::steps::{Chunks, States, copy_state, load_state, padded, store_state, take_states};
use crate::host::matmul::Matrix;
use crate::host::scratch::Scratch;

/// Most floats of a head's states that are kept at once, if one part of the chunks may be so large.
/// If the states do not all fit, most are computed twice: 9 % more time for both passes, head_dim
/// 64.
const KEPT_FLOATS: usize = 1 << 21;

/// Returns the largest number of groups, of consecutive heads that share no head of q, k or v with
/// other heads: the greatest common divisor of the heads of q, k and v.
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

/// A head's states and their gradient.
struct HeadStates {
    /// Batch entry and head of decays.
    head: (usize, usize),
    /// Gradient of the state after a chunk.
    d: States,
    /// The state before each part of the chunks.
    parts: States,
    /// The state before each chunk of a part.
    chunks: States,
}

/// Computes the gradients of the heads of a group in a batch entry.
pub(super) fn group(workers: Workers, io: &BackwardIo, (batch, group): (usize, usize)) {
    let size = io.log_decay.heads / groups(io);
    let heads = group * size..(group + 1) * size;
    let all = Chunks::all(io.q.rows.len(), true);
    let dims = [io.k.dim, padded(io.v.dim)];
    let part = part_chunks(all.numbers.len(), dims[0] * dims[1]);
    let parts = all.numbers.len().div_ceil(part).max(1);
    let lay_out = |scratch: &mut Scratch| {
        let mut take = |rows, row| Matrix::take(scratch, (rows, row));
        let of_head = |head| HeadStates {
            head: (batch, head),
            d: take_states(&mut take, 1, dims),
            parts: take_states(&mut take, parts, dims),
            chunks: take_states(&mut take, part, dims),
        };
        heads.clone().map(of_head).collect::<Vec<_>>()
    };
    Scratch::with(lay_out, |heads| {
        // SAFETY: the states are this task's. The caller of `backward` guarantees that the arrays
        // have the rows that the problem asks for, and that this call alone uses the results. This
        // task alone uses the results of its heads.
        unsafe { Group { workers, io, heads, all, part, parts }.gradients() }
    });
}

/// A group with its states and its chunks.
///
/// Every method relies on what [`group`] guarantees: the states are this task's, the arrays have the
/// rows of all chunks, and the results of the group's heads are this task's.
struct Group<'a> {
    workers: Workers,
    io: &'a BackwardIo,
    heads: Vec<HeadStates>,
    all: Chunks,
    /// Chunks of a part.
    part: usize,
    parts: usize,
}

impl Group<'_> {
    /// Computes all gradients.
    ///
    /// # Safety
    /// The caller guarantees the states and the arrays, as [`Group`] says.
    unsafe fn gradients(&self) {
        let (all, part, io) = (self.all.clone(), self.part, self.io);
        let count = all.numbers.len();
        // SAFETY: the caller guarantees the states and the arrays.
        unsafe {
            for HeadStates { head, d, parts, chunks } in &self.heads {
                chunks.clear_padding(io.k.dim);
                parts.clear_padding(io.k.dim);
                load_state(&io.before, *head, parts.first);
                for index in 1..self.parts {
                    let (from, to) = (parts.before(index - 1), parts.before(index));
                    copy_state(from, to, parts.rows);
                    let states = States { first: to, count: 1, ..*parts };
                    self.states(*head, (index - 1) * part..index * part, states);
                }
                load_state(&io.dafter, *head, d.first);
            }
            for index in (0..self.parts).rev() {
                let numbers = index * part..count.min((index + 1) * part);
                for HeadStates { head, parts, chunks, .. } in &self.heads {
                    copy_state(parts.before(index), chunks.first, parts.rows);
                    let all_but_last = numbers.start..numbers.end.max(1) - 1;
                    self.states(*head, all_but_last, *chunks);
                }
                self.part(numbers);
            }
            for HeadStates { head, d, .. } in &self.heads {
                store_state(d.first, &io.dbefore, *head);
            }
        }
    }

    /// Computes the gradients of the chunks of a part, whose states are there.
    ///
    /// # Safety
    /// The caller guarantees the states and the arrays, as [`Group`] says.
    unsafe fn part(&self, numbers: Range<usize>) {
        let io = self.io;
        let states: Vec<_> = self.heads.iter().map(|head| head.chunks).collect();
        let gradients: Vec<_> = self.heads.iter().map(|head| head.d).collect();
        let (batch, first) = self.heads[0].head;
        let steps = GradientSteps {
            q: &io.q,
            k: Some(&io.k),
            scale: io.scale,
            dout: &io.dout,
            log_decay: &io.log_decay,
            beta: io.beta.as_ref(),
            heads: (batch, first..first + self.heads.len()),
            all: Some(AllGradients { io, states: &states, first: numbers.start }),
        };
        let chunks = Chunks { numbers, ..self.all.clone() };
        // SAFETY: the caller guarantees the states and the arrays.
        unsafe { run(self.workers, &steps, &chunks, &gradients) }
    }

    /// Passes the state of a head over some chunks.
    ///
    /// # Safety
    /// The caller guarantees the states and the arrays, as [`Group`] says.
    unsafe fn states(&self, head: (usize, usize), numbers: Range<usize>, states: States) {
        let BackwardIo { k, v, log_decay, beta, .. } = self.io;
        let (beta, outputs) = (beta.as_ref(), None);
        let steps = StateSteps { outputs, k, scale: 1.0, v, log_decay, beta, head, zeros: 0 };
        let chunks = Chunks { numbers, backward: false, ..self.all.clone() };
        // SAFETY: the caller guarantees the states and the arrays.
        unsafe { run(self.workers, &steps, &chunks, &[states]) }
    }
}
