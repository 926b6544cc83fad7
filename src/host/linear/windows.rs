//! The chunks of a head, shared by all workers: windows of chunks.
//!
//! While the state passes over a window, other workers finish the window before and prepare the one
//! after it. With two workers this takes 0.8 of the time of both in turn (the delta rule, one head,
//! 65,536 tokens).

use std::ops::Range;

use rayon::prelude::*;

use super::prefetch::Prefetch;
use super::sequence::Workers;
use super::steps::{Chunk, Chunks, Slot, States, Steps, copy_state, take_states};
use crate::host::matmul::{Matrix, even_parts};
use crate::host::scratch::{InScratch, Scratch, ScratchTask};
use crate::host::simd::{Simd, Task};

/// Most floats of the chunks of a window.
const FLOATS: usize = 1 << 20;
/// Most chunks of a window for each worker, without the delta rule and with it. The workers wait for
/// each other once a window. With the rule none of 2, 8 and 12 chunks was faster than 4.
const CHUNKS: [usize; 2] = [8, 4];
/// Columns of a state that a worker takes at least: the lanes of the longest vectors.
const COLUMNS: usize = 16;
/// The least columns of a state for one worker, while other workers have the windows beside to do.
/// Products of fewer columns are slower, and each worker reads all chunks.
const FULL: usize = 64;

/// A value that threads share. It holds pointers to scratch memory.
#[repr(transparent)]
struct Shared<T>(T);

// SAFETY: the memory that the pointers lead to belongs to the call that shares the value. Each step
// of a window says which parts of it each task uses.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

/// The memory of windows.
struct Memory<P> {
    /// The states between chunks, of each member, for three windows in turns.
    states: [Vec<States>; 3],
    /// The slots of two windows in turns: the members of the first chunk, then those of the second,
    /// and so on.
    slots: [Vec<Shared<Slot<P>>>; 2],
}

/// Takes all steps of some chunks, with the results of [`run`](super::sequence::run).
///
/// # Safety
/// The caller guarantees the states, and the arrays as [`Steps`] says.
pub(super) unsafe fn run<T: Steps>(
    workers: Workers,
    steps: &T,
    chunks: &Chunks,
    states: &[States],
) {
    let (members, all) = (steps.members(), chunks.numbers.len());
    let count = window_chunks(workers.threads, steps, all);
    let lay_out = |scratch: &mut Scratch| {
        let mut take = |rows, row| Matrix::take(scratch, (rows, row));
        let mut own = |_| take_states(&mut take, count + 1, steps.state());
        let states = [(); 3].map(|()| (0..members).map(&mut own).collect());
        let mut slot = || Slot { parts: steps.take_parts(&mut take), decays: None, fresh: true };
        let slots = [(); 2].map(|()| (0..count * members).map(|_| Shared(slot())).collect());
        Memory { states, slots }
    };
    Scratch::with(lay_out, |Memory { states: own, slots: [mut slots, mut others] }| {
        let window = |number: usize| {
            let (first, own) = (number * count, &own[number % 3]);
            let between = |(given, own): (&States, &States)| match given.step {
                0 => *own,
                step => States { first: given.before(first), step },
            };
            let states = states.iter().zip(own).map(between).collect();
            let places = first..all.min(first + count);
            (first < all).then_some(Window { workers, steps, chunks, places, states })
        };
        let overwritten = |index: &usize| states[*index].step == 0;
        // SAFETY: the memory is this call's. The caller guarantees the states and the arrays. Two
        // windows in turn have slots of their own, and three have states of their own.
        unsafe {
            for own in own.iter().flatten() {
                own.clear_padding(count + 1, steps.state()[0]);
            }
            let (mut number, mut last, mut now) = (0, None, window(0));
            for (index, states) in states.iter().enumerate().filter(|(index, _)| overwritten(index))
            {
                copy_state(states.first, own[0][index].first, own[0][index].step);
            }
            turn(&mut slots, None, now.as_ref());
            while let Some(this) = now {
                number += 1;
                let next = window(number);
                rayon::join(
                    || this.pass(&slots),
                    || turn(&mut others, last.as_ref(), next.as_ref()),
                );
                for index in (0..members).filter(overwritten) {
                    let end = this.states[index].before(this.places.len());
                    let to = next.as_ref().map_or(states[index].first, |x| x.states[index].first);
                    copy_state(end, to, own[0][index].step);
                }
                std::mem::swap(&mut slots, &mut others);
                (last, now) = (Some(this), next);
            }
            turn(&mut others, last.as_ref(), None);
        }
    });
}

/// Returns the number of chunks of a window.
fn window_chunks<T: Steps>(threads: usize, steps: &T, all: usize) -> usize {
    let mut floats = 0;
    steps.take_parts(&mut |rows, row| {
        floats += rows * row;
        Matrix { at: std::ptr::null_mut(), row }
    });
    let most = (FLOATS / (floats * steps.members()).max(1)).max(threads);
    let each = CHUNKS[usize::from(steps.corrects())];
    most.min(each * threads).min(all)
}

/// Finishes the chunks of a window, and prepares those of another in the same slots.
///
/// # Safety
/// The caller guarantees the memory and the arrays, as [`Window`] says.
unsafe fn turn<T: Steps>(
    slots: &mut [Shared<Slot<T::Parts>>],
    last: Option<&Window<'_, T>>,
    next: Option<&Window<'_, T>>,
) {
    let Some(Window { workers: Workers { isa, .. }, steps, .. }) = last.or(next) else { return };
    let places = slots.par_chunks_mut(steps.members()).enumerate().with_max_len(1);
    places.for_each(|(place, slots)| {
        // A shared slot is laid out as the slot.
        let slots = slots.as_mut_ptr().cast();
        if let Some(window) = last.filter(|window| place < window.places.len()) {
            isa.run(InScratch(Finish { window, slots, place }));
        }
        if let Some(window) = next.filter(|window| place < window.places.len()) {
            isa.run(InScratch(Prepare { window, slots, place }));
        }
    });
}

/// Consecutive chunks.
///
/// Every method relies on what [`run`] guarantees: the states and the slots are this call's, and the
/// arrays have the rows of the chunks.
struct Window<'a, T> {
    workers: Workers,
    steps: &'a T,
    chunks: &'a Chunks,
    places: Range<usize>,
    /// The states between the chunks of the window, of each member.
    states: Vec<States>,
}

impl<T: Steps> Window<'_, T> {
    /// Passes the states over the window, whose chunks are prepared.
    ///
    /// # Safety
    /// The caller guarantees the memory and the arrays, as [`Window`] says.
    unsafe fn pass(&self, slots: &[Shared<Slot<T::Parts>>]) {
        let (isa, members) = (self.workers.isa, self.steps.members());
        let slots = &slots[..self.places.len() * members];
        let (columns, threads) = (self.steps.state()[1], self.workers.threads.div_ceil(members));
        let parts = threads.min((threads / 2).max(columns / FULL)).max(1);
        let vectors = columns / COLUMNS;
        let parts: Vec<_> = even_parts(vectors, vectors.div_ceil(parts).max(1)).collect();
        (0..members * parts.len()).into_par_iter().for_each(|index| {
            let (part, member) = (&parts[index % parts.len()], index / parts.len());
            let columns = part.start * COLUMNS..part.end * COLUMNS;
            let (steps, states) = (self.steps, self.states[member]);
            isa.run(Pass { steps, slots, states, member, columns });
        });
    }

    /// Returns a chunk of a member, unless the window has no such place.
    fn chunk(&self, place: usize, member: usize) -> Option<Chunk> {
        let chunk = self.chunks.at(self.places.start + place);
        let chunk = chunk.filter(|_| place < self.places.len());
        chunk.map(|chunk| Chunk { member, ..chunk })
    }

    /// Returns the chunks of all members at a place.
    fn chunks(&self, place: usize) -> impl Iterator<Item = Chunk> {
        (0..self.steps.members()).filter_map(move |member| self.chunk(place, member))
    }
}

/// The first step of a chunk, for all members.
struct Prepare<'a, T: Steps> {
    window: &'a Window<'a, T>,
    slots: *mut Slot<T::Parts>,
    place: usize,
}

impl<T: Steps> ScratchTask for Prepare<'_, T> {
    type Parts = T::Temporary;

    fn lay_out<S: Simd>(&self, scratch: &mut Scratch) -> T::Temporary {
        self.window.steps.take_temporary(&mut |rows, row| Matrix::take(scratch, (rows, row)))
    }

    #[inline(always)]
    unsafe fn work<S: Simd>(&self, simd: S, temporary: T::Temporary) {
        let Prepare { window, slots, place } = *self;
        let (steps, members) = (window.steps, window.steps.members());
        for chunk in window.chunks(place) {
            // The chunk whose rows this thread is likely to read next.
            let following = (chunk.member + 1) % members;
            let next = window.chunk(place + usize::from(following == 0), following);
            let prefetch = &mut next.map_or_else(Prefetch::none, |next| steps.prefetch(&next));
            // SAFETY: `turn` gives each task the slots and the states of a place of its own, and its
            // caller guarantees the arrays.
            unsafe {
                let slot = &mut *slots.add(chunk.member);
                steps.prepare(simd, prefetch, &chunk, slot, temporary);
                if !steps.corrects() {
                    let after = window.states[chunk.member].before(place + 1);
                    steps.update(simd, prefetch, slot, (None, after), 0..steps.state()[1]);
                }
            }
        }
    }
}

/// The steps that pass some columns of a member's state over the window.
struct Pass<'a, T: Steps> {
    steps: &'a T,
    slots: &'a [Shared<Slot<T::Parts>>],
    states: States,
    member: usize,
    columns: Range<usize>,
}

impl<T: Steps> Task for Pass<'_, T> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Pass { steps, slots, states, member, columns } = self;
        let prefetch = &mut Prefetch::none();
        let of_member = slots.iter().skip(member).step_by(steps.members());
        for (place, Shared(slot)) in of_member.enumerate() {
            let (before, after) = (states.before(place), states.before(place + 1));
            // SAFETY: `Window::all` gives each task columns of its own, and has prepared the slots.
            // Its caller guarantees the states.
            unsafe {
                if steps.corrects() {
                    steps.correct(simd, prefetch, slot, before, columns.clone());
                    steps.update(simd, prefetch, slot, (Some(before), after), columns.clone());
                } else if let Some(carry) = slot.decays().carry() {
                    add_rest(simd, (before, carry), after, steps.state()[0], &columns);
                }
            }
        }
    }
}

/// The last step of a chunk, for all members.
struct Finish<'a, T: Steps> {
    window: &'a Window<'a, T>,
    slots: *mut Slot<T::Parts>,
    place: usize,
}

impl<T: Steps> ScratchTask for Finish<'_, T> {
    type Parts = T::Temporary;

    fn lay_out<S: Simd>(&self, scratch: &mut Scratch) -> T::Temporary {
        self.window.steps.take_temporary(&mut |rows, row| Matrix::take(scratch, (rows, row)))
    }

    #[inline(always)]
    unsafe fn work<S: Simd>(&self, simd: S, temporary: T::Temporary) {
        let Finish { window, slots, place } = *self;
        let (steps, prefetch) = (window.steps, &mut Prefetch::none());
        for chunk in window.chunks(place) {
            let state = window.states[chunk.member].before(place);
            // SAFETY: `turn` gives each task the slots of a place, a slot for each member, whose
            // other steps are done. Its caller guarantees the states and the arrays.
            unsafe {
                let slot = &mut *slots.add(chunk.member);
                if !steps.corrects() {
                    steps.correct(simd, prefetch, slot, state, 0..steps.state()[1]);
                }
                steps.finish(simd, prefetch, &chunk, (slot, temporary), state);
            }
        }
        simd.fence();
    }
}

/// Adds what a chunk leaves of the state before it, in some columns, to what the chunk adds. The
/// numbers are those of a product that writes [`Write::Onto`](crate::host::matmul::Write::Onto).
///
/// # Safety
/// The caller guarantees both states, `carry` for each of their rows, and that `after` is this
/// thread's.
#[inline(always)]
unsafe fn add_rest<S: Simd>(
    simd: S,
    (before, carry): (Matrix, *const f32),
    after: Matrix,
    rows: usize,
    columns: &Range<usize>,
) {
    for row in 0..rows {
        for column in columns.clone().step_by(S::LANES) {
            // SAFETY: the caller guarantees the row of both states.
            unsafe {
                let factor = simd.splat(*carry.add(row));
                let (from, to) = (before.skip(row).at.add(column), after.skip(row).at.add(column));
                simd.store(to, simd.mul_add(simd.load(from), factor, simd.load(to)));
            }
        }
    }
}
