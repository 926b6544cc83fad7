//! The chunks of a head, shared by all workers: windows of chunks.

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
/// Most chunks of a window for each worker. The workers wait for each other three times a window.
const CHUNKS: usize = 4;
/// Columns of a state that a worker takes at least: the lanes of the longest vectors.
const COLUMNS: usize = 16;

/// A value that threads share. It holds pointers to scratch memory.
#[repr(transparent)]
struct Shared<T>(T);

// SAFETY: the memory that the pointers lead to belongs to the call that shares the value. Each step
// of a window says which parts of it each task uses.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

/// The memory of a window.
struct Memory<P> {
    /// The states between chunks, of each member.
    states: Vec<States>,
    /// The members of the first chunk, then those of the second, and so on.
    slots: Vec<Shared<Slot<P>>>,
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
    let mut floats = 0;
    steps.take_parts(&mut |rows, row| {
        floats += rows * row;
        Matrix { at: std::ptr::null_mut(), row }
    });
    let most = (FLOATS / (floats * members).max(1)).max(workers.threads);
    let count = most.min(CHUNKS * workers.threads).min(all);
    let lay_out = |scratch: &mut Scratch| {
        let mut take = |rows, row| Matrix::take(scratch, (rows, row));
        let own = |_| take_states(&mut take, count + 1, steps.state());
        let states = (0..members).map(own).collect();
        let mut slot = || Slot { parts: steps.take_parts(&mut take), decays: None, fresh: true };
        Memory { states, slots: (0..count * members).map(|_| Shared(slot())).collect() }
    };
    Scratch::with(lay_out, |Memory { states: own, mut slots }| {
        // SAFETY: the memory is this call's. The caller guarantees the states and the arrays.
        unsafe {
            for own in &own {
                own.clear_padding(count + 1, steps.state()[0]);
            }
            for first in (0..all).step_by(count) {
                let places = first..all.min(first + count);
                let between = |(given, own): (&States, &States)| match given.step {
                    0 => *own,
                    step => States { first: given.before(first), step },
                };
                let between: Vec<_> = states.iter().zip(&own).map(between).collect();
                let window = Window { workers, steps, chunks, places, states: &between };
                let slots = &mut slots[..window.places.len() * members];
                window.all(slots, states);
            }
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
    states: &'a [States],
}

impl<T: Steps> Window<'_, T> {
    /// Takes all steps of the window's chunks. `given` has the states of the caller.
    ///
    /// # Safety
    /// The caller guarantees the memory and the arrays, as [`Window`] says.
    unsafe fn all(&self, slots: &mut [Shared<Slot<T::Parts>>], given: &[States]) {
        let (isa, members) = (self.workers.isa, self.steps.members());
        let overwritten = || given.iter().zip(self.states).filter(|(given, _)| given.step == 0);
        // SAFETY: the caller guarantees the states.
        unsafe {
            overwritten().for_each(|(given, own)| copy_state(given.first, own.first, own.step));
        }
        let (steps, states) = (self.steps, self.states);
        let count = slots.len();
        slots.par_iter_mut().enumerate().for_each(|(index, slot)| {
            let (slot, chunk) = (&raw mut slot.0, self.chunk(index));
            let next = (index + 1 < count).then(|| self.chunk(index + 1));
            isa.run(InScratch(Prepare { steps, chunk, next, slot }));
        });
        let vectors = steps.state()[1] / COLUMNS;
        let parts = self.workers.threads.div_ceil(members);
        let parts: Vec<_> = even_parts(vectors, vectors.div_ceil(parts).max(1)).collect();
        let shared = &*slots;
        (0..members * parts.len()).into_par_iter().for_each(|index| {
            let part = &parts[index % parts.len()];
            let columns = part.start * COLUMNS..part.end * COLUMNS;
            let member = index / parts.len();
            let states = states[member];
            isa.run(Pass { steps, slots: shared, states, member, columns });
        });
        slots.par_chunks_mut(members).enumerate().for_each(|(place, slots)| {
            let chunks = (0..members).map(|member| self.chunk(place * members + member)).collect();
            // A shared slot is laid out as the slot.
            let slots = slots.as_mut_ptr().cast();
            isa.run(InScratch(Finish { steps, chunks, slots, states, place }));
        });
        // SAFETY: the caller guarantees the states.
        unsafe {
            for (given, own) in overwritten() {
                copy_state(own.before(self.places.len()), given.first, own.step);
            }
        }
    }

    /// Returns the chunk and the member of a slot.
    fn chunk(&self, slot: usize) -> Chunk {
        let members = self.steps.members();
        let chunk = self.chunks.at(self.places.start + slot / members);
        Chunk { member: slot % members, ..chunk.expect("a chunk of the window") }
    }
}

/// The first step of a chunk.
struct Prepare<'a, T: Steps> {
    steps: &'a T,
    chunk: Chunk,
    /// The chunk whose rows this thread is likely to read next.
    next: Option<Chunk>,
    slot: *mut Slot<T::Parts>,
}

impl<T: Steps> ScratchTask for Prepare<'_, T> {
    type Parts = T::Temporary;

    fn lay_out<S: Simd>(&self, scratch: &mut Scratch) -> T::Temporary {
        self.steps.take_temporary(&mut |rows, row| Matrix::take(scratch, (rows, row)))
    }

    #[inline(always)]
    unsafe fn work<S: Simd>(&self, simd: S, temporary: T::Temporary) {
        let next = self.next.as_ref();
        let prefetch = &mut next.map_or_else(Prefetch::none, |next| self.steps.prefetch(next));
        // SAFETY: `Window::all` gives each task a slot of its own, and its caller guarantees the
        // arrays.
        unsafe { self.steps.prepare(simd, prefetch, &self.chunk, &mut *self.slot, temporary) }
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
                steps.correct(simd, prefetch, slot, before, columns.clone());
                steps.update(simd, prefetch, slot, (before, after), columns.clone());
            }
        }
    }
}

/// The last step of a chunk, for all members.
struct Finish<'a, T: Steps> {
    steps: &'a T,
    chunks: Vec<Chunk>,
    slots: *mut Slot<T::Parts>,
    states: &'a [States],
    place: usize,
}

impl<T: Steps> ScratchTask for Finish<'_, T> {
    type Parts = T::Temporary;

    fn lay_out<S: Simd>(&self, scratch: &mut Scratch) -> T::Temporary {
        self.steps.take_temporary(&mut |rows, row| Matrix::take(scratch, (rows, row)))
    }

    #[inline(always)]
    unsafe fn work<S: Simd>(&self, simd: S, temporary: T::Temporary) {
        let prefetch = &mut Prefetch::none();
        for chunk in &self.chunks {
            let state = self.states[chunk.member].before(self.place);
            // SAFETY: `Window::all` gives each task the slots of a chunk, a slot for each member,
            // whose other steps are done. Its caller guarantees the states and the arrays.
            unsafe {
                let memory = (&mut *self.slots.add(chunk.member), temporary);
                self.steps.finish(simd, prefetch, chunk, memory, state);
            }
        }
        simd.fence();
    }
}
