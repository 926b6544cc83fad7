//! The work on one tile: units, each of them a block of rows that share a head of keys.

use std::marker::PhantomData;
use std::ops::Range;

use super::element::Element;
use super::sums::{add, in_registers, products};
use super::tile::{Ahead, QUAD, QUADS, Seen, TILE};
use crate::host::matmul::Matrix;
use crate::host::simd::{Simd, Task};
use crate::host::softmax::SoftCap;

/// Rows of a block.
pub(super) const ROWS: usize = 4;
/// Scores of a block and a quad of keys: those of a row are adjacent.
pub(super) const SCORES: usize = ROWS * QUAD;
/// Vectors of an output that are summed at a time.
const COLUMNS: usize = 4;
/// Quads of values that are summed before the next unit's turn.
const VALUE_QUADS: usize = 2;
/// Quads between the prefetch of rows and their use.
const DISTANCE: usize = 1;

/// The running softmax of all units of a task, and the scratch of their scores. In [`SCORES`] floats,
/// each row of a unit has [`QUAD`].
#[derive(Clone, Copy)]
pub(super) struct State {
    /// Queries, times the scale: the rows of each unit.
    pub q: Matrix,
    /// Σ e^(score − m) v: the rows of each unit.
    pub o: Matrix,
    /// Largest score so far, −∞ before the first: [`SCORES`] floats for each unit.
    pub m: Matrix,
    /// Sums of e^(score − m), each over every fourth key: [`SCORES`] floats for each unit.
    pub l: Matrix,
    /// e^(old m − new m), the factor for sums that were made with the old m: [`SCORES`] floats for
    /// each unit.
    pub alpha: Matrix,
    /// Scores, then e^(score − m): [`SCORES`] floats for each unit and quad of keys.
    pub scores: Matrix,
    /// ALiBi's slopes: [`SCORES`] floats for each unit.
    pub slopes: Matrix,
    /// Distances of the tile's first row from the queries: [`SCORES`] floats for each block.
    pub queries: Matrix,
    /// Distances of the tile's keys from its first row: [`SCORES`] floats for each quad.
    pub keys: Matrix,
}

/// Folds a tile into the softmax of some units:
///
/// ```text
/// m' = max(m, max s);  alpha = e^(m − m');  l' = l·alpha + Σ e^(s − m')
/// o' = o·alpha + Σ e^(s − m') v
/// ```
#[derive(Clone)]
pub(super) struct Units<'a> {
    pub state: State,
    /// Units, by head, then by block.
    pub units: Range<usize>,
    /// Heads of keys of the task.
    pub heads: usize,
    /// Blocks of each head.
    pub blocks: usize,
    /// Rows of each head.
    pub rows: usize,
    /// The keys that each row of a block sees.
    pub seen: &'a [[Seen; ROWS]],
    pub keys: &'a [*const u8; TILE],
    pub values: &'a [*const u8; TILE],
    /// Bytes from a head to the next one, in keys and in values.
    pub skips: [usize; 2],
    pub cap: Option<SoftCap>,
    pub has_slopes: bool,
    /// Whether to read quad after quad, each for all heads. Else the units take turns, each with
    /// all rows.
    pub by_quad: bool,
    pub ahead: Ahead<'a>,
}

/// The fold of units whose keys and values have elements of type `E`.
struct Fold<'a, E>(Units<'a>, PhantomData<E>);

impl<E: Element> Task for Fold<'_, E> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        // SAFETY: the caller of `compute` guarantees the memory behind all pointers.
        unsafe { self.0.fold::<S, E>(simd) }
    }
}

impl Units<'_> {
    /// Folds the tile, in a function of its own.
    ///
    /// # Safety
    /// The caller guarantees that keys and values are readable, with elements of type `E`, and that
    /// the state has the units and is this thread's.
    #[inline(always)]
    pub unsafe fn compute<S: Simd, E: Element>(self, simd: S) {
        simd.vectorize(Fold(self, PhantomData::<E>));
    }

    /// Folds the tile.
    ///
    /// # Safety
    /// The caller guarantees what [`Units::compute`] asks for.
    #[inline(always)]
    unsafe fn fold<S: Simd, E: Element>(&self, simd: S) {
        // SAFETY: the caller guarantees the memory behind all pointers.
        unsafe {
            let (turn, step) =
                if self.by_quad { (self.units.len(), VALUE_QUADS) } else { (1, QUADS) };
            for first in self.units.clone().step_by(turn.max(1)) {
                let units = first..first + turn;
                if !self.by_quad {
                    self.fetch_next(simd, first);
                }
                for quad in 0..QUADS {
                    for unit in units.clone() {
                        self.fetch(simd, unit, quad + DISTANCE);
                        self.scores::<S, E>(simd, unit, quad);
                    }
                }
                for unit in units.clone() {
                    self.softmax(simd, unit);
                }
                for quads in (0..QUADS).step_by(step).map(|first| first..first + step) {
                    for unit in units.clone() {
                        for quad in quads.clone() {
                            self.fetch(simd, unit, QUADS + quad + DISTANCE);
                        }
                        self.outputs::<S, E>(simd, unit, quads.clone());
                    }
                }
            }
        }
    }

    /// Asks for a quad of rows of a unit's head, if quads are read one after the other. The units
    /// of a head ask once.
    #[inline(always)]
    fn fetch<S: Simd>(&self, simd: S, unit: usize, quad: usize) {
        if self.by_quad && unit.is_multiple_of(self.blocks) {
            self.ahead.fetch(simd, quad, unit / self.blocks);
        }
    }

    /// Asks for a unit's part of the rows of the next head, which may be the first head of the next
    /// tile.
    #[inline(always)]
    fn fetch_next<S: Simd>(&self, simd: S, unit: usize) {
        let part = |end: usize| end * 2 * QUADS / self.blocks;
        for quad in part(unit - self.units.start)..part(unit - self.units.start + 1) {
            match self.units.end / self.blocks {
                head if head == self.heads => self.ahead.fetch(simd, 2 * QUADS + quad, 0),
                head => self.ahead.fetch(simd, quad, head),
            }
        }
    }

    /// Returns the keys that each row of a unit sees.
    #[inline(always)]
    pub(super) fn seen(&self, unit: usize) -> &[Seen] {
        let block = unit % self.blocks;
        &self.seen[block][..(self.rows - block * ROWS).min(ROWS)]
    }

    /// Returns the place of the score of a key.
    #[inline(always)]
    pub(super) fn place(&self, unit: usize, row: usize, key: usize) -> *mut f32 {
        let quad = self.state.scores.skip(unit * QUADS + key / QUAD).at;
        quad.wrapping_add(row * QUAD + key % QUAD)
    }

    /// Returns the bytes from the first head to the head of a unit, in keys and in values.
    #[inline(always)]
    fn skips(&self, unit: usize) -> [usize; 2] {
        let head = (unit - self.units.start) / self.blocks;
        [head * self.skips[0], head * self.skips[1]]
    }

    /// Computes the products of a unit's queries and a quad of keys.
    ///
    /// # Safety
    /// The caller guarantees what [`Units::compute`] asks for.
    #[inline(always)]
    unsafe fn scores<S: Simd, E: Element>(&self, simd: S, unit: usize, quad: usize) {
        // SAFETY: the caller guarantees the memory behind all pointers.
        unsafe {
            match self.seen(unit).len() {
                1 => self.products::<S, E, 1>(simd, unit, quad),
                2 => self.products::<S, E, 2>(simd, unit, quad),
                3 => self.products::<S, E, 3>(simd, unit, quad),
                _ => self.products::<S, E, 4>(simd, unit, quad),
            }
        }
    }

    /// Computes the products of `R` rows and a quad of keys.
    ///
    /// # Safety
    /// The caller guarantees what [`Units::compute`] asks for.
    #[inline(always)]
    unsafe fn products<S: Simd, E: Element, const R: usize>(
        &self,
        simd: S,
        unit: usize,
        quad: usize,
    ) {
        let (q, skip) = (self.state.q.skip(unit * ROWS), self.skips(unit)[0]);
        let mut rows = [std::ptr::null(); QUAD];
        for (row, key) in rows.iter_mut().zip(&self.keys[quad * QUAD..]) {
            *row = key.wrapping_add(skip);
        }
        let mut sums = [simd.zero(); SCORES];
        // SAFETY: the caller guarantees the queries, the keys and the room for the scores.
        unsafe {
            if in_registers::<S, R, QUAD>() {
                let found = products::<S, E, R, QUAD>(simd, q, rows);
                for (to, from) in sums.iter_mut().zip(found.as_flattened()) {
                    *to = *from;
                }
            } else {
                let halves = [
                    products::<S, E, R, 2>(simd, q, [rows[0], rows[1]]),
                    products::<S, E, R, 2>(simd, q, [rows[2], rows[3]]),
                ];
                for (index, to) in sums[..R * QUAD].iter_mut().enumerate() {
                    let (r, key) = (index / QUAD, index % QUAD);
                    *to = halves[key / 2][r][key % 2];
                }
            }
            let scores = self.place(unit, 0, quad * QUAD);
            for first in (0..R * QUAD).step_by(S::LANES) {
                let mut all = [simd.zero(); SCORES];
                all[..S::LANES].copy_from_slice(&sums[first..first + S::LANES]);
                simd.store(scores.add(first), simd.sum_each(all));
            }
        }
    }

    /// Adds some quads of values to a unit's outputs. Keys that a row does not see are left out,
    /// since 0 · NaN is NaN.
    ///
    /// # Safety
    /// The caller guarantees what [`Units::compute`] asks for.
    #[inline(always)]
    unsafe fn outputs<S: Simd, E: Element>(&self, simd: S, unit: usize, quads: Range<usize>) {
        let seen = self.seen(unit);
        // SAFETY: the caller guarantees the memory behind all pointers.
        unsafe {
            let alike = seen.iter().all(|other| *other == seen[0]);
            let rows = if alike { seen.len() } else { 1 };
            for row in (0..seen.len()).step_by(rows.max(1)) {
                match rows {
                    1 => self.block::<S, E, 1>(simd, unit, row, quads.clone()),
                    2 => self.block::<S, E, 2>(simd, unit, row, quads.clone()),
                    3 => self.block::<S, E, 3>(simd, unit, row, quads.clone()),
                    _ => self.block::<S, E, 4>(simd, unit, row, quads.clone()),
                }
            }
        }
    }

    /// Adds values to `R` rows that see the same keys.
    ///
    /// # Safety
    /// The caller guarantees what [`Units::compute`] asks for.
    #[inline(always)]
    unsafe fn block<S: Simd, E: Element, const R: usize>(
        &self,
        simd: S,
        unit: usize,
        row: usize,
        quads: Range<usize>,
    ) {
        let (vectors, mut first) = (self.state.o.row / S::LANES, 0);
        let most = if in_registers::<S, R, COLUMNS>() { COLUMNS } else { 2 };
        while first < vectors {
            let place = (unit, row, first / E::VECTORS);
            // SAFETY: the caller guarantees the memory behind all pointers.
            first += unsafe {
                match most.min(vectors - first) {
                    1 => self.columns::<S, E, R, 1>(simd, place, quads.clone()),
                    2 | 3 => self.columns::<S, E, R, 2>(simd, place, quads.clone()),
                    _ => self.columns::<S, E, R, COLUMNS>(simd, place, quads.clone()),
                }
            };
        }
    }

    /// Adds values to `N` vectors of `R` rows, from load `load` on, and returns `N`.
    ///
    /// # Safety
    /// The caller guarantees what [`Units::compute`] asks for.
    #[inline(always)]
    unsafe fn columns<S: Simd, E: Element, const R: usize, const N: usize>(
        &self,
        simd: S,
        (unit, row, load): (usize, usize, usize),
        quads: Range<usize>,
    ) -> usize {
        if !N.is_multiple_of(E::VECTORS) {
            return N;
        }
        let (o, skip) = (self.state.o.skip(unit * ROWS + row), self.skips(unit)[1]);
        let at = |r: usize, n: usize| o.skip(r).at.wrapping_add((load * E::VECTORS + n) * S::LANES);
        let alpha = self.state.alpha.skip(unit).at.wrapping_add(row * QUAD);
        let seen = self.seen(unit)[row];
        let mut sums = [[simd.zero(); N]; R];
        // SAFETY: the caller guarantees the memory behind all pointers.
        unsafe {
            for (r, sums) in sums.iter_mut().enumerate() {
                let factor = if quads.start == 0 { *alpha.add(r * QUAD) } else { 1.0 };
                for (n, sum) in sums.iter_mut().enumerate() {
                    *sum = simd.mul(simd.load(at(r, n)), simd.splat(factor));
                }
            }
            for quad in quads {
                let values = &self.values[quad * QUAD..][..QUAD];
                let weights = self.place(unit, row, quad * QUAD);
                let mut seen = seen >> (quad * QUAD) & 0xf;
                if seen == 0xf {
                    for (key, value) in values.iter().enumerate() {
                        let value = value.wrapping_add(skip);
                        add::<S, E, R, N>(simd, &mut sums, (value, load), weights.add(key));
                    }
                    continue;
                }
                while seen != 0 {
                    let key = seen.trailing_zeros() as usize;
                    let value = values[key].wrapping_add(skip);
                    seen &= seen - 1;
                    add::<S, E, R, N>(simd, &mut sums, (value, load), weights.add(key));
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                for (n, sum) in sums.iter().enumerate() {
                    simd.store(at(r, n), *sum);
                }
            }
        }
        N
    }
}
