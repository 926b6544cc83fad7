//! The work on one tile: row blocks, each of them some rows that share a head of keys.

use std::marker::PhantomData;
use std::ops::Range;

use super::element::Element;
use super::sums::{add, in_registers, products};
use super::tile::{Ahead, QUAD, QUADS, Seen, TILE};
use crate::host::matmul::Matrix;
use crate::host::simd::{Simd, Task};
use crate::host::softmax::SoftCap;

/// Rows of a row block.
pub(super) const ROWS: usize = 4;
/// Scores of a row block and a quad of keys: those of a row are adjacent.
pub(super) const SCORES: usize = ROWS * QUAD;
/// Vectors of an output that are summed at a time.
pub(super) const COLUMNS: usize = 4;
/// Quads of values that are summed before the next row block's turn.
const VALUE_QUADS: usize = 2;
/// Quads between the prefetch of rows and their use.
const DISTANCE: usize = 1;

/// The running softmax of all row blocks of a task, and the scratch of their scores. In [`SCORES`]
/// floats, each row of a row block has [`QUAD`].
#[derive(Clone, Copy)]
pub(super) struct State {
    /// Queries, times the scale: the rows of each row block. Many rows lie side by side instead
    /// ([`lay_beside`](super::many_rows::lay_beside)).
    pub q: Matrix,
    /// Σ e^(score − m) v: the rows of each row block.
    pub o: Matrix,
    /// Largest score so far, −∞ before the first: [`SCORES`] floats for each row block.
    pub m: Matrix,
    /// Sums of e^(score − m), each over every fourth key: [`SCORES`] floats for each row block.
    pub l: Matrix,
    /// As `l`, of weights that are rounded to bfloat16; used with pairs alone.
    pub rounded: Matrix,
    /// e^(old m − new m), the factor for sums that were made with the old m: [`SCORES`] floats for
    /// each row block.
    pub alpha: Matrix,
    /// Scores, then e^(score − m): [`SCORES`] floats for each row block and quad of keys.
    pub scores: Matrix,
    /// ALiBi's slopes: [`SCORES`] floats for each row block.
    pub slopes: Matrix,
    /// Distances of the tile's first row from the queries: [`SCORES`] floats for each row block of a
    /// head.
    pub queries: Matrix,
    /// Distances of the tile's keys from its first row: [`SCORES`] floats for each quad.
    pub keys: Matrix,
}

/// Folds a tile into the softmax of some row blocks:
///
/// ```text
/// m' = max(m, max s);  alpha = e^(m − m');  l' = l·alpha + Σ e^(s − m')
/// o' = o·alpha + Σ e^(s − m') v
/// ```
#[derive(Clone)]
pub(super) struct RowBlocks<'a> {
    pub state: State,
    /// The row blocks, head after head.
    pub blocks: Range<usize>,
    /// Heads of keys of the task.
    pub heads: usize,
    /// Row blocks of each head.
    pub per_head: usize,
    /// Rows of each head.
    pub rows: usize,
    /// The keys that each row of a head sees, by row block.
    pub seen: &'a [[Seen; ROWS]],
    pub keys: &'a [*const u8; TILE],
    pub values: &'a [*const u8; TILE],
    /// Bytes from a head to the next one, in keys and in values.
    pub skips: [usize; 2],
    pub cap: Option<SoftCap>,
    pub has_slopes: bool,
    /// Whether to read quad after quad, each for all heads. Else the row blocks take turns, each
    /// with all rows.
    pub by_quad: bool,
    pub ahead: Ahead<'a>,
}

/// The fold of row blocks whose keys and values have elements of type `E`.
struct Fold<'a, E>(RowBlocks<'a>, PhantomData<E>);

impl<E: Element> Task for Fold<'_, E> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        // SAFETY: the caller of `compute` guarantees the memory behind all pointers.
        unsafe { self.0.fold::<S, E>(simd) }
    }
}

impl<'a> RowBlocks<'a> {
    /// Returns the row blocks of one head, whose keys and values have addresses of their own.
    #[inline(always)]
    pub fn of_head<'b>(
        &'b self,
        head: usize,
        [keys, values]: [&'b [*const u8; TILE]; 2],
    ) -> RowBlocks<'b>
    where
        'a: 'b,
    {
        let first = head * self.per_head;
        RowBlocks { blocks: first..first + self.per_head, keys, values, ..self.clone() }
    }

    /// Folds the tile, in a function of its own.
    ///
    /// # Safety
    /// The caller guarantees that keys and values are readable, with elements of type `E`, and that
    /// the state has the row blocks and is this thread's.
    #[inline(always)]
    pub unsafe fn compute<S: Simd, E: Element>(self, simd: S) {
        simd.vectorize(Fold(self, PhantomData::<E>));
    }

    /// Folds the tile.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute`] asks for.
    #[inline(always)]
    unsafe fn fold<S: Simd, E: Element>(&self, simd: S) {
        // SAFETY: the caller guarantees the memory behind all pointers.
        unsafe {
            let (turn, step) =
                if self.by_quad { (self.blocks.len(), VALUE_QUADS) } else { (1, QUADS) };
            for first in self.blocks.clone().step_by(turn.max(1)) {
                let blocks = first..first + turn;
                if !self.by_quad {
                    self.fetch_next(simd, first);
                }
                for quad in 0..QUADS {
                    for block in blocks.clone() {
                        self.fetch(simd, block, quad + DISTANCE);
                        self.scores::<S, E>(simd, block, quad);
                    }
                }
                for block in blocks.clone() {
                    self.softmax(simd, block);
                }
                for quads in (0..QUADS).step_by(step).map(|first| first..first + step) {
                    for block in blocks.clone() {
                        for quad in quads.clone() {
                            self.fetch(simd, block, QUADS + quad + DISTANCE);
                        }
                        self.outputs::<S, E>(simd, block, quads.clone());
                    }
                }
            }
        }
    }

    /// Asks for a quad of rows of a row block's head, if quads are read one after the other. The
    /// row blocks of a head ask once.
    #[inline(always)]
    fn fetch<S: Simd>(&self, simd: S, block: usize, quad: usize) {
        if self.by_quad && block.is_multiple_of(self.per_head) {
            self.ahead.fetch(simd, quad, block / self.per_head);
        }
    }

    /// Asks for a row block's part of the rows of the next head, which may be the first head of the
    /// next tile.
    #[inline(always)]
    fn fetch_next<S: Simd>(&self, simd: S, block: usize) {
        let part = |end: usize| end * 2 * QUADS / self.per_head;
        for quad in part(block - self.blocks.start)..part(block - self.blocks.start + 1) {
            match self.blocks.end / self.per_head {
                head if head == self.heads => self.ahead.fetch(simd, 2 * QUADS + quad, 0),
                head => self.ahead.fetch(simd, quad, head),
            }
        }
    }

    /// Returns the keys that each row of a row block sees.
    #[inline(always)]
    pub(super) fn seen(&self, block: usize) -> &[Seen] {
        let in_head = block % self.per_head;
        &self.seen[in_head][..(self.rows - in_head * ROWS).min(ROWS)]
    }

    /// Returns the place of the score of a key.
    #[inline(always)]
    pub(super) fn place(&self, block: usize, row: usize, key: usize) -> *mut f32 {
        let quad = self.state.scores.skip(block * QUADS + key / QUAD).at;
        quad.wrapping_add(row * QUAD + key % QUAD)
    }

    /// Returns the bytes from the first head to the head of a row block, in keys and in values.
    #[inline(always)]
    fn skips(&self, block: usize) -> [usize; 2] {
        let head = (block - self.blocks.start) / self.per_head;
        [head * self.skips[0], head * self.skips[1]]
    }

    /// Computes the products of a row block's queries and a quad of keys.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute`] asks for.
    #[inline(always)]
    unsafe fn scores<S: Simd, E: Element>(&self, simd: S, block: usize, quad: usize) {
        // SAFETY: the caller guarantees the memory behind all pointers.
        unsafe {
            match self.seen(block).len() {
                1 => self.products::<S, E, 1>(simd, block, quad),
                2 => self.products::<S, E, 2>(simd, block, quad),
                3 => self.products::<S, E, 3>(simd, block, quad),
                _ => self.products::<S, E, 4>(simd, block, quad),
            }
        }
    }

    /// Computes the products of `R` rows and a quad of keys.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute`] asks for.
    #[inline(always)]
    unsafe fn products<S: Simd, E: Element, const R: usize>(
        &self,
        simd: S,
        block: usize,
        quad: usize,
    ) {
        let (q, skip) = (self.state.q.skip(block * ROWS), self.skips(block)[0]);
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
            let scores = self.place(block, 0, quad * QUAD);
            for first in (0..R * QUAD).step_by(S::LANES) {
                let mut all = [simd.zero(); SCORES];
                all[..S::LANES].copy_from_slice(&sums[first..first + S::LANES]);
                simd.store(scores.add(first), simd.sum_each(all));
            }
        }
    }

    /// Adds some quads of values to a row block's outputs. Keys that a row does not see are left
    /// out, since 0 · NaN is NaN.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute`] asks for.
    #[inline(always)]
    unsafe fn outputs<S: Simd, E: Element>(&self, simd: S, block: usize, quads: Range<usize>) {
        let seen = self.seen(block);
        // SAFETY: the caller guarantees the memory behind all pointers.
        unsafe {
            let alike = seen.iter().all(|other| *other == seen[0]);
            let rows = if alike { seen.len() } else { 1 };
            for row in (0..seen.len()).step_by(rows.max(1)) {
                match rows {
                    1 => self.row_outputs::<S, E, 1>(simd, block, row, quads.clone()),
                    2 => self.row_outputs::<S, E, 2>(simd, block, row, quads.clone()),
                    3 => self.row_outputs::<S, E, 3>(simd, block, row, quads.clone()),
                    _ => self.row_outputs::<S, E, 4>(simd, block, row, quads.clone()),
                }
            }
        }
    }

    /// Adds values to `R` rows that see the same keys.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute`] asks for.
    #[inline(always)]
    unsafe fn row_outputs<S: Simd, E: Element, const R: usize>(
        &self,
        simd: S,
        block: usize,
        row: usize,
        quads: Range<usize>,
    ) {
        let (vectors, mut first) = (self.state.o.row / S::LANES, 0);
        let most = if in_registers::<S, R, COLUMNS>() { COLUMNS } else { 2 };
        while first < vectors {
            let place = (block, row, first / E::VECTORS);
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
    /// The caller guarantees what [`RowBlocks::compute`] asks for.
    #[inline(always)]
    unsafe fn columns<S: Simd, E: Element, const R: usize, const N: usize>(
        &self,
        simd: S,
        (block, row, load): (usize, usize, usize),
        quads: Range<usize>,
    ) -> usize {
        if !N.is_multiple_of(E::VECTORS) {
            return N;
        }
        let (o, skip) = (self.state.o.skip(block * ROWS + row), self.skips(block)[1]);
        let at = |r: usize, n: usize| o.skip(r).at.wrapping_add((load * E::VECTORS + n) * S::LANES);
        let alpha = self.state.alpha.skip(block).at.wrapping_add(row * QUAD);
        let seen = self.seen(block)[row];
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
                let weights = self.place(block, row, quad * QUAD);
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
