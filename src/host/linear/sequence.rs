//! Takes the steps of the chunks of a sequence, on one thread or on all workers.
//!
//! If there are fewer heads than workers, the workers share the chunks of each head. They prepare and
//! finish chunks in parallel, and pass the state on from chunk to chunk, all columns at once or some
//! at a time, which do not depend on each other. Without the delta rule, what a chunk adds to the
//! state is computed before the state arrives, and passing it on only adds states. Every number is
//! computed as on one thread, so results have the same bits.

use super::prefetch::Prefetch;
use super::steps::{Chunk, Chunks, Slot, States, Steps, load_state, store_state, take_states};
use super::turns;
use crate::host::array::HostArray;
use crate::host::isa::Isa;
use crate::host::matmul::Matrix;
use crate::host::scratch::{InScratch, Scratch, ScratchTask};
use crate::host::simd::Simd;

/// Who takes the steps.
#[derive(Debug, Clone, Copy)]
pub(super) struct Workers {
    pub isa: Isa,
    /// Number of threads that share the chunks of a head.
    pub threads: usize,
}

/// Passes a head's state over all chunks and stores the last one, from the state in `before`, or
/// else from a state that `first` writes over zeros.
pub(super) fn pass_on(
    workers: Workers,
    steps: &impl Steps,
    chunks: &Chunks,
    before: Option<&HostArray>,
    (after, head): (&HostArray, (usize, usize)),
    first: impl FnOnce(Matrix),
) {
    let lay_out = |scratch: &mut Scratch| {
        let mut take = |rows, row| Matrix::take(scratch, (rows, row));
        take_states(&mut take, 1, steps.state())
    };
    Scratch::with(lay_out, |state| {
        // SAFETY: the state is this task's. The caller of the pass guarantees that the arrays have
        // the rows that the problem asks for, and that this call alone uses the results. This task
        // alone uses its head's results.
        unsafe {
            match before {
                Some(array) => load_state(array, head, state.first),
                None => state.first.clear(state.rows),
            }
            first(state.first);
            run(workers, steps, chunks, &[state]);
            store_state(state.first, after, head);
        }
    });
}

/// Takes all steps of some chunks. `states` has the states of each member.
///
/// # Safety
/// The caller guarantees the states, and the arrays as [`Steps`] says.
pub(super) unsafe fn run<T: Steps>(
    Workers { isa, threads }: Workers,
    steps: &T,
    chunks: &Chunks,
    states: &[States],
) {
    if threads > 1 && chunks.numbers.len() > 1 {
        // SAFETY: the caller guarantees the states and the arrays.
        unsafe { turns::run(Workers { isa, threads }, steps, chunks, states) }
    } else {
        isa.run(InScratch(Alone { steps, chunks, states }));
    }
}

/// All steps of some chunks, on one thread.
struct Alone<'a, T> {
    steps: &'a T,
    chunks: &'a Chunks,
    states: &'a [States],
}

impl<T: Steps> ScratchTask for Alone<'_, T> {
    type Parts = (T::Parts, T::Temporary);

    fn lay_out<S: Simd>(&self, scratch: &mut Scratch) -> Self::Parts {
        let mut take = |rows, row| Matrix::take(scratch, (rows, row));
        (self.steps.take_parts(&mut take), self.steps.take_temporary(&mut take))
    }

    #[inline(always)]
    unsafe fn work<S: Simd>(&self, simd: S, (parts, temporary): Self::Parts) {
        let Alone { steps, chunks, states } = *self;
        let (members, columns) = (steps.members(), 0..steps.state()[1]);
        let mut slot = Slot { parts, decays: None };
        let at = |index| {
            let chunk = chunks.at(index / members)?;
            Some(Chunk { member: index % members, ..chunk })
        };
        for index in 0..chunks.numbers.len() * members {
            let (Some(chunk), place) = (at(index), index / members) else { return };
            let next = at(index + 1);
            let prefetch = &mut next.map_or_else(Prefetch::none, |next| steps.prefetch(&next));
            let of_member = states[chunk.member];
            let (before, after) = (of_member.before(place), of_member.before(place + 1));
            // SAFETY: the memory is this task's. `run` is the only user, and its caller guarantees
            // the states and the arrays.
            unsafe {
                steps.prepare(simd, prefetch, &chunk, &mut slot, temporary);
                steps.correct(simd, prefetch, &slot, before, columns.clone());
                steps.finish(simd, prefetch, &chunk, (&mut slot, temporary), before);
                steps.update(simd, prefetch, &slot, (Some(before), after), columns.clone());
            }
        }
        simd.fence();
    }
}
