//! The chunks of a head, which workers take in turns.
//!
//! A worker takes the next chunk, prepares it, waits for the state before it, hands the state after
//! it on, and finishes the chunk. Only states go from core to core; all else of a chunk stays in one
//! core's cache. A worker only waits for chunks that other workers have taken. These workers never
//! leave a chunk for other work, so the first unfinished chunk always proceeds.

use std::hint::spin_loop;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{panicking, yield_now};

use rayon::prelude::*;

use super::prefetch::Prefetch;
use super::sequence::Workers;
use super::steps::{Chunk, Chunks, Slot, States, Steps, copy_state, take_states};
use crate::host::matmul::{Matrix, even_parts};
use crate::host::scratch::{InScratch, Scratch, ScratchTask};
use crate::host::simd::Simd;

/// States for each worker, if a head keeps one state. They are overwritten in turns, and a worker
/// waits until the chunk that has read the oldest is finished.
const STATES: usize = 2;
/// A worker passes on at least this many columns of a state at a time: the lanes of the longest
/// vectors.
const COLUMNS: usize = 16;
/// A worker passes on at least this many columns at a time, unless so many workers share a head that
/// they would wait for each other. Products of fewer columns are slower: with two workers, 32 columns at a time
/// instead of 64 make both passes of the delta rule take a tenth longer.
const FULL: usize = 64;
/// Times that a worker looks for a state, about as long as two chunks take, before it lets other
/// threads run.
const LOOKS: usize = 1 << 12;

/// Takes all steps of some chunks, with the results of [`run`](super::sequence::run).
///
/// # Safety
/// The caller guarantees the states, and the arrays as [`Steps`] says.
pub(super) unsafe fn run<T: Steps>(
    Workers { isa, threads }: Workers,
    steps: &T,
    chunks: &Chunks,
    states: &[States],
) {
    let ([rows, columns], count) = (steps.state(), chunks.numbers.len());
    let lay_out = |scratch: &mut Scratch| {
        let mut take = |rows, row| Matrix::take(scratch, (rows, row));
        let own = |states: &States| match states.count {
            1 => take_states(&mut take, STATES * threads, [rows, columns]),
            _ => *states,
        };
        states.iter().map(own).collect::<Vec<_>>()
    };
    Scratch::with(lay_out, |own| {
        let given = || states.iter().zip(&own).filter(|(given, _)| given.count == 1);
        let (vectors, parts) = (columns / COLUMNS, (threads / 2).max(columns / FULL).max(1));
        let parts = even_parts(vectors, vectors.div_ceil(parts).max(1));
        let columns: Vec<_> = parts.map(|part| part.start * COLUMNS..part.end * COLUMNS).collect();
        let zeros = |count| (0..count).map(|_| AtomicUsize::new(0)).collect();
        let turns = Turns {
            steps,
            chunks,
            threads,
            states: &own,
            next: AtomicUsize::new(0),
            passed: zeros(states.len() * columns.len()),
            finished: zeros(STATES * threads),
            has_failed: AtomicBool::new(false),
            columns,
        };
        // SAFETY: the caller guarantees the states and the arrays. The memory is this call's.
        unsafe {
            for (given, own) in given() {
                own.clear_padding(rows);
                copy_state(given.first, own.first, own.rows);
            }
            let tasks = (0..threads.min(count)).into_par_iter();
            tasks.with_max_len(1).for_each(|_| isa.run(InScratch(&turns)));
            for (given, own) in given() {
                copy_state(own.before(count), given.first, own.rows);
            }
        }
    });
}

/// The chunks, and how far the workers are.
struct Turns<'a, T> {
    steps: &'a T,
    chunks: &'a Chunks,
    threads: usize,
    /// The states between chunks, of each member.
    states: &'a [States],
    /// The next chunk to take.
    next: AtomicUsize,
    /// Columns that pass at a time.
    columns: Vec<Range<usize>>,
    /// For each member and each range of columns, the number of chunks that the state has passed.
    passed: Vec<AtomicUsize>,
    /// For each state in turns, the place behind the last finished chunk that has read it.
    finished: Vec<AtomicUsize>,
    /// Whether a worker has panicked. The other workers then panic instead of waiting for it.
    has_failed: AtomicBool,
}

impl<T> Turns<'_, T> {
    /// Waits for other workers.
    fn wait(&self, until: impl Fn() -> bool) {
        let mut looks = 0;
        while !until() {
            assert!(!self.has_failed.load(Ordering::Relaxed), "another worker panicked");
            looks += 1;
            if looks < LOOKS { spin_loop() } else { yield_now() }
        }
    }
}

/// Tells the other workers when this one panics.
struct Alarm<'a>(&'a AtomicBool);

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        if panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

impl<T: Steps> ScratchTask for &Turns<'_, T> {
    type Parts = (T::Parts, T::Temporary);

    fn lay_out<S: Simd>(&self, scratch: &mut Scratch) -> Self::Parts {
        let mut take = |rows, row| Matrix::take(scratch, (rows, row));
        (self.steps.take_parts(&mut take), self.steps.take_temporary(&mut take))
    }

    #[inline(always)]
    unsafe fn work<S: Simd>(&self, simd: S, (parts, temporary): Self::Parts) {
        let Turns { steps, chunks, threads, states, next, columns, passed, finished, .. } = self;
        let _alarm = Alarm(&self.has_failed);
        let (members, [rows, all]) = (steps.members(), steps.state());
        let mut slot = Slot { parts, decays: None };
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(chunk) = chunks.at(place) else { break };
            // The state after the chunk takes the memory of one that a chunk before has read.
            let free = &finished[(place + 1) % finished.len()];
            self.wait(|| free.load(Ordering::Acquire) + finished.len() > place + 1);
            for member in 0..members {
                let chunk = Chunk { member, ..chunk.clone() };
                // The chunk that this worker is likely to take next.
                let following = match member + 1 {
                    next if next < members => Some(Chunk { member: next, ..chunk.clone() }),
                    _ => chunks.at(place + threads),
                };
                let prefetch =
                    &mut following.map_or_else(Prefetch::none, |next| steps.prefetch(&next));
                let (before, after) =
                    (states[member].before(place), states[member].before(place + 1));
                // SAFETY: the slot is this task's. The state before the chunk is there once it has
                // passed the chunks before, and stays until this chunk is finished; the state after
                // it is this task's until it has passed this chunk. `run` is the only user, and its
                // caller guarantees the arrays.
                unsafe {
                    steps.prepare(simd, prefetch, &chunk, &mut slot, temporary);
                    if !steps.corrects() {
                        steps.update(simd, prefetch, &slot, (None, after), 0..all);
                    }
                    let of_member = &passed[member * columns.len()..];
                    for (columns, passed) in columns.iter().zip(of_member) {
                        self.wait(|| passed.load(Ordering::Acquire) == place);
                        if steps.corrects() {
                            steps.correct(simd, prefetch, &slot, before, columns.clone());
                            let states = (Some(before), after);
                            steps.update(simd, prefetch, &slot, states, columns.clone());
                        } else if let Some(carry) = slot.decays().carry() {
                            add_rest(simd, (before, carry), after, rows, columns);
                        }
                        passed.store(place + 1, Ordering::Release);
                    }
                    if !steps.corrects() {
                        steps.correct(simd, prefetch, &slot, before, 0..all);
                    }
                    steps.finish(simd, prefetch, &chunk, (&mut slot, temporary), before);
                }
            }
            finished[place % finished.len()].store(place + 1, Ordering::Release);
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
