//! The steps in which the chunks of a sequence pass a state on.

use std::ops::Range;

use super::chunk::CHUNK;
use super::decays::{Decays, Take};
use super::prefetch::Prefetch;
use crate::host::array::HostArray;
use crate::host::matmul::Matrix;
use crate::host::simd::Simd;

/// Floats that every row of scratch is a multiple of: the lanes of the longest vectors.
const LANES: usize = 16;

/// Returns the floats of a row of scratch that holds `dim` floats.
pub(super) fn padded(dim: usize) -> usize {
    dim.next_multiple_of(LANES)
}

/// Some chunks of a sequence, in the order in which they pass a state on.
#[derive(Debug, Clone)]
pub(super) struct Chunks {
    /// Tokens of the sequence.
    pub tokens: usize,
    /// The chunks' numbers.
    pub numbers: Range<usize>,
    /// Whether to go from the last chunk to the first.
    pub backward: bool,
}

impl Chunks {
    /// Returns all chunks of a sequence.
    pub fn all(tokens: usize, backward: bool) -> Chunks {
        Chunks { tokens, numbers: 0..tokens.div_ceil(CHUNK), backward }
    }

    /// Returns the chunk at a place in the order, if there is one.
    pub fn at(&self, place: usize) -> Option<Chunk> {
        let Range { start, end } = self.numbers;
        let number = if self.backward { (end - start).checked_sub(place + 1)? } else { place };
        let first = (start + number) * CHUNK;
        let rows = first..self.tokens.min(first + CHUNK);
        (place < self.numbers.len()).then_some(Chunk { number: start + number, rows, member: 0 })
    }
}

/// A chunk of a head.
#[derive(Debug, Clone)]
pub(super) struct Chunk {
    pub number: usize,
    /// Its tokens.
    pub rows: Range<usize>,
    /// Which head of the steps' heads.
    pub member: usize,
}

/// The states of a head between chunks.
#[derive(Clone, Copy)]
pub(super) struct States {
    /// The state before the first chunk.
    pub first: Matrix,
    /// Rows from one state to the next.
    pub rows: usize,
    /// Number of states. Fewer than there are chunks are overwritten in turns.
    pub count: usize,
}

// SAFETY: `States` only describes memory. Each user of the memory states why it may access it.
unsafe impl Sync for States {}

impl States {
    /// Fills the rows of each state from row `rows` on with zeros. Steps write all others.
    ///
    /// # Safety
    /// The caller guarantees that the states are there and are this thread's.
    pub unsafe fn clear_padding(&self, rows: usize) {
        for place in 0..self.count {
            // SAFETY: the caller guarantees the states.
            unsafe { self.before(place).skip(rows).clear(self.rows - rows) }
        }
    }

    /// Returns the state before the chunk at a place in the order.
    pub fn before(&self, place: usize) -> Matrix {
        self.first.skip(place % self.count * self.rows)
    }
}

/// Takes memory for a number of states of these rows and columns. Whoever uses the states calls
/// [`States::clear_padding`].
pub(super) fn take_states(
    take: &mut Take<'_>,
    count: usize,
    [rows, columns]: [usize; 2],
) -> States {
    let rows = padded(rows);
    States { first: take(count * rows, columns), rows, count }
}

/// Copies a head's state from an array.
///
/// # Safety
/// The caller guarantees that the array has the state, and that `to` is this thread's.
pub(super) unsafe fn load_state(array: &HostArray, (batch, head): (usize, usize), to: Matrix) {
    // SAFETY: the caller guarantees both states.
    unsafe {
        to.clear(padded(array.rows.len()));
        for row in array.rows.clone() {
            let from = array.row(batch, row, head).cast::<f32>();
            from.copy_to_nonoverlapping(to.skip(row).at, array.dim);
        }
    }
}

/// Copies a head's state to an array.
///
/// # Safety
/// The caller guarantees that the array has the state, and that no other thread uses either.
pub(super) unsafe fn store_state(from: Matrix, array: &HostArray, (batch, head): (usize, usize)) {
    for row in array.rows.clone() {
        let to = array.row(batch, row, head).cast::<f32>();
        // SAFETY: the caller guarantees both states.
        unsafe { from.skip(row).at.copy_to_nonoverlapping(to, array.dim) }
    }
}

/// Copies a state of a number of rows to another.
///
/// # Safety
/// The caller guarantees that both states are this thread's, and differ.
pub(super) unsafe fn copy_state(from: Matrix, to: Matrix, rows: usize) {
    // SAFETY: the caller guarantees both states.
    unsafe { to.at.copy_from_nonoverlapping(from.at, rows * from.row) }
}

/// Memory for a chunk of a head, and its decays.
pub(super) struct Slot<P> {
    pub parts: P,
    /// The decays, once the chunk is prepared.
    pub decays: Option<Decays>,
}

impl<P> Slot<P> {
    /// Returns the decays.
    ///
    /// # Panics
    /// If the chunk was not prepared.
    pub fn decays(&self) -> &Decays {
        self.decays.as_ref().expect("a prepared chunk")
    }
}

/// How chunks pass states on, and what else they compute. The four steps of a chunk follow each
/// other. Only `correct` and `update` have to wait for the chunk before, and both work on each
/// column of the state alone.
///
/// Every method relies on its caller: the slot and the temporary memory come from the method that
/// takes them, are this thread's, and hold what the steps before have written. The arrays of the
/// call have the rows of the chunk, and no other task uses its rows of results.
pub(super) trait Steps: Sync {
    /// The memory of a chunk.
    type Parts: Copy;
    /// Memory that a step uses and leaves.
    type Temporary: Copy;

    /// Returns the number of heads, each with a state of its own.
    fn members(&self) -> usize;
    /// Whether what a chunk adds to the state depends on the state before. Otherwise `update` can
    /// come before `correct`.
    fn corrects(&self) -> bool;
    /// Takes the memory of a chunk.
    fn take_parts(&self, take: &mut Take<'_>) -> Self::Parts;
    /// Takes temporary memory.
    fn take_temporary(&self, take: &mut Take<'_>) -> Self::Temporary;
    /// Returns the rows and columns of a state.
    fn state(&self) -> [usize; 2];
    /// Returns the rows that the steps of a chunk read, spread over them.
    fn prefetch(&self, chunk: &Chunk) -> Prefetch;

    /// Computes what depends on no state.
    ///
    /// # Safety
    /// The caller guarantees the memory and the arrays, as [`Steps`] says.
    unsafe fn prepare<S: Simd>(
        &self,
        simd: S,
        prefetch: &mut Prefetch,
        chunk: &Chunk,
        slot: &mut Slot<Self::Parts>,
        temporary: Self::Temporary,
    );

    /// Corrects what the chunk adds to some columns of the state by the state before.
    ///
    /// # Safety
    /// The caller guarantees the memory and the arrays, as [`Steps`] says.
    unsafe fn correct<S: Simd>(
        &self,
        simd: S,
        prefetch: &mut Prefetch,
        slot: &Slot<Self::Parts>,
        state: Matrix,
        columns: Range<usize>,
    );

    /// Computes the results of the chunk from the state before.
    ///
    /// # Safety
    /// The caller guarantees the memory and the arrays, as [`Steps`] says.
    unsafe fn finish<S: Simd>(
        &self,
        simd: S,
        prefetch: &mut Prefetch,
        chunk: &Chunk,
        memory: (&mut Slot<Self::Parts>, Self::Temporary),
        state: Matrix,
    );

    /// Computes some columns of the state after the chunk, the second of the states, from the state
    /// before, which may be the same memory; without it what the chunk adds.
    ///
    /// # Safety
    /// The caller guarantees the memory and the arrays, as [`Steps`] says.
    unsafe fn update<S: Simd>(
        &self,
        simd: S,
        prefetch: &mut Prefetch,
        slot: &Slot<Self::Parts>,
        states: (Option<Matrix>, Matrix),
        columns: Range<usize>,
    );
}
