//! Row blocks of many rows that share a head of keys, as with latents.
//!
//! Here the CPU's products take the time, not the reads. So the rows of all row blocks lie side by
//! side in the lanes of vectors: a key's element meets a vector of rows, and no lanes are summed. The
//! values of some columns meet all row blocks before the next columns' turn, so they stay in the cache
//! next to the core.
//!
//! bfloat16 elements are multiplied in pairs where the CPU can ([`Pair`](super::lane::Pair)). The
//! weights are then rounded to bfloat16, and all sums are float32.

use std::marker::PhantomData;
use std::ops::Range;

use super::lane::Lane;
use super::row_blocks::{COLUMNS, ROWS, RowBlocks, SCORES};
use super::sums::in_registers;
use super::tile::{QUAD, QUADS, Seen, TILE};
use crate::host::matmul::Matrix;
use crate::host::simd::{Simd, Task};

/// The most lanes of a vector.
const MOST_LANES: usize = 16;
/// Keys whose products with a vector of rows are summed at a time.
const KEYS: usize = 8;
/// Lanes of rows whose products are summed before they are added to the score. Long sums of float32
/// lose digits.
const DEPTH: usize = 96;

/// Returns the rows that queries of a head of keys take in scratch: whole vectors.
pub(super) const fn row_places(per_head: usize) -> usize {
    (per_head * ROWS).next_multiple_of(MOST_LANES)
}

/// Writes the lanes of a row of queries, whose rows lie side by side in `to`: those of each vector of
/// rows, and in it lane after lane.
///
/// # Safety
/// The caller guarantees that the row has `depth` lanes, and that `to` has [`row_places`].
#[inline(always)]
pub(super) unsafe fn lay_beside<S: Simd>(
    from: *const f32,
    depth: usize,
    (to, row): (*mut f32, usize),
) {
    let to = to.wrapping_add(row / S::LANES * S::LANES * depth + row % S::LANES);
    for at in 0..depth {
        // SAFETY: the caller guarantees the lanes and the room for them.
        unsafe { *to.add(at * S::LANES) = from.add(at).read_unaligned() };
    }
}

/// Writes the values of two keys as pairs: for each load of 32-bit lanes, those of the even columns
/// and then those of the odd columns.
///
/// # Safety
/// The caller guarantees that both rows have `dim` elements, whole loads, and that `to` has as many
/// floats.
#[inline(always)]
pub(super) unsafe fn pair_values<S: Simd>(simd: S, rows: [*const u8; 2], dim: usize, to: Matrix) {
    for load in (0..dim / 2).step_by(S::LANES) {
        // SAFETY: the caller guarantees the rows and the room for the pairs.
        unsafe {
            let [a, b] = rows.map(|row| simd.load(row.cast::<f32>().add(load)));
            let to = to.at.add(2 * load);
            simd.store(to, simd.low_halves(a, b));
            simd.store(to.add(S::LANES), simd.high_halves(a, b));
        }
    }
}

/// The fold of row blocks over lanes of type `L`. `scale` multiplies the products of queries and keys.
struct Fold<'a, L> {
    blocks: RowBlocks<'a>,
    scale: f32,
    lane: PhantomData<L>,
}

impl<L: Lane> Task for Fold<'_, L> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        // SAFETY: the caller of `compute_many` guarantees the memory and the instructions.
        unsafe { self.blocks.fold_many::<S, L>(simd, self.scale) }
    }
}

impl RowBlocks<'_> {
    /// Folds the tile into the row blocks of one head, as [`RowBlocks::compute`] does. The rows of
    /// queries lie side by side ([`lay_beside`]), without the scale. Lanes of values that hold
    /// elements of several keys lie at the address of each of these keys.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute`] asks for, and that the CPU has the products.
    #[inline(always)]
    pub unsafe fn compute_many<S: Simd, L: Lane>(self, simd: S, scale: f32) {
        let fold = Fold { blocks: self, scale, lane: PhantomData::<L> };
        // SAFETY: the caller guarantees that the CPU has the products.
        unsafe { L::vectorize(simd, fold) }
    }

    /// Folds the tile.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute_many`] asks for.
    #[inline(always)]
    unsafe fn fold_many<S: Simd, L: Lane>(&self, simd: S, scale: f32) {
        let rows = (self.blocks.len() * ROWS).div_ceil(S::LANES);
        // SAFETY: the caller guarantees the memory and the instructions.
        unsafe {
            let mut first = 0;
            while first < rows {
                let most = if in_registers::<S, 2, KEYS>() { 2 } else { 1 };
                first += match most.min(rows - first) {
                    2 => self.score_rows::<S, L, 2>(simd, first, scale),
                    _ => self.score_rows::<S, L, 1>(simd, first, scale),
                };
            }
            for block in self.blocks.clone() {
                self.softmax(simd, block);
                if L::ELEMENTS > 1 {
                    self.round_weights(simd, block);
                }
            }
            let (vectors, mut first) = (self.state.o.row / S::LANES, 0);
            let most = if in_registers::<S, ROWS, COLUMNS>() { COLUMNS } else { 2 };
            while first < vectors {
                let columns = most.min(vectors - first).next_power_of_two();
                let columns = if columns > vectors - first { columns / 2 } else { columns };
                for block in self.blocks.clone() {
                    let done = first * self.blocks.len() + (block - self.blocks.start) * columns;
                    let part = done..done + columns;
                    self.fetch_part(simd, part, vectors * self.blocks.len());
                    match columns {
                        1 => self.add_values::<S, L, 1>(simd, block, first),
                        2 => self.add_values::<S, L, 2>(simd, block, first),
                        _ => self.add_values::<S, L, COLUMNS>(simd, block, first),
                    }
                }
                first += columns;
            }
        }
    }

    /// Computes the scores of `V` vectors of rows, from vector `first` on, and returns `V`. A part of
    /// the rows' lanes meets all keys of the tile before the next part's turn, so it stays in the
    /// cache next to the core.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute_many`] asks for.
    #[inline(always)]
    unsafe fn score_rows<S: Simd, L: Lane, const V: usize>(
        &self,
        simd: S,
        first: usize,
        scale: f32,
    ) -> usize {
        let (head, depth) = (self.blocks.start / self.per_head, self.state.q.row / L::ELEMENTS);
        let q = self.state.q.skip(head * row_places(self.per_head)).at;
        let q: [_; V] = std::array::from_fn(|v| q.wrapping_add((first + v) * S::LANES * depth));
        let (mut columns, mut square) = ([[0f32; MOST_LANES * TILE]; V], [0f32; MOST_LANES.pow(2)]);
        // SAFETY: the caller guarantees the queries, the keys and the room for the scores. No vector
        // has more than MOST_LANES lanes, so columns and the square have room for whole vectors.
        unsafe {
            for from in (0..depth).step_by(DEPTH) {
                let to = depth.min(from + DEPTH);
                for key in (0..TILE).step_by(KEYS) {
                    let keys = self.keys[key..].first_chunk().unwrap();
                    let sums = products::<S, L, V>(simd, q, keys, from..to);
                    for (column, sums) in columns.iter_mut().zip(sums) {
                        for (k, sum) in sums.into_iter().enumerate() {
                            let at = column.as_mut_ptr().add((key + k) * S::LANES);
                            let score = simd.mul_add(sum, simd.splat(scale), simd.load(at));
                            simd.store(at, score);
                        }
                    }
                }
            }
            for part in 0..V * (TILE / S::LANES) {
                let (v, key) = (part % V, part / V * S::LANES);
                let column = columns[v].as_ptr().add(key * S::LANES);
                simd.transpose(column, S::LANES, square.as_mut_ptr(), S::LANES);
                for (row, scores) in square.chunks_exact(S::LANES).take(S::LANES).enumerate() {
                    let row = (first + v) * S::LANES + row;
                    let block = self.blocks.start + row / ROWS;
                    for (quad, scores) in scores.chunks_exact(QUAD).enumerate() {
                        if block < self.blocks.end {
                            let to = self.place(block, row % ROWS, key + quad * QUAD);
                            to.copy_from_nonoverlapping(scores.as_ptr(), QUAD);
                        }
                    }
                }
            }
        }
        V
    }

    /// Rounds the weights of a row block to bfloat16, in place, and adds them up: those of a quad of
    /// keys become adjacent.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute_many`] asks for.
    #[inline(always)]
    unsafe fn round_weights<S: Simd>(&self, simd: S, block: usize) {
        for lanes in (0..SCORES).step_by(S::LANES) {
            let [alpha, rounded] = [self.state.alpha, self.state.rounded]
                .map(|matrix| matrix.skip(block).at.wrapping_add(lanes));
            // SAFETY: the caller guarantees the weights. What is written was read before.
            unsafe {
                let mut sum = simd.mul(simd.load(rounded), simd.load(alpha));
                for quad in 0..QUADS {
                    let weights = self.place(block, 0, quad * QUAD);
                    let to = weights.cast::<u16>().add(lanes);
                    simd.store_bf16(to, simd.load(weights.add(lanes)));
                    sum = simd.add(sum, simd.load_bf16(to));
                }
                simd.store(rounded, sum);
            }
        }
    }

    /// Adds the values of `N` vectors of columns, from vector `first` on, to a row block.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute_many`] asks for.
    #[inline(always)]
    unsafe fn add_values<S: Simd, L: Lane, const N: usize>(
        &self,
        simd: S,
        block: usize,
        first: usize,
    ) {
        let seen = self.seen(block);
        let alike = seen.iter().all(|other| *other == seen[0]);
        let rows = if alike { seen.len() } else { 1 };
        for row in (0..seen.len()).step_by(rows.max(1)) {
            let place = (block, row, first);
            // SAFETY: the caller guarantees the memory and the instructions.
            unsafe {
                match rows {
                    1 => self.add_columns::<S, L, 1, N>(simd, place),
                    2 => self.add_columns::<S, L, 2, N>(simd, place),
                    3 => self.add_columns::<S, L, 3, N>(simd, place),
                    _ => self.add_columns::<S, L, 4, N>(simd, place),
                }
            }
        }
    }

    /// Adds the values of `N` vectors of columns to `R` rows that see the same keys.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute_many`] asks for.
    #[inline(always)]
    unsafe fn add_columns<S: Simd, L: Lane, const R: usize, const N: usize>(
        &self,
        simd: S,
        (block, row, first): (usize, usize, usize),
    ) {
        let o = self.state.o.skip(block * ROWS + row);
        let at = |r: usize, n: usize| o.skip(r).at.wrapping_add((first + n) * S::LANES);
        let alpha = self.state.alpha.skip(block).at.wrapping_add(row * QUAD);
        let seen = self.seen(block)[row];
        let mut sums = [[simd.zero(); N]; R];
        // SAFETY: the caller guarantees the memory and the instructions.
        unsafe {
            for (r, sums) in sums.iter_mut().enumerate() {
                for (n, sum) in sums.iter_mut().enumerate() {
                    *sum = simd.load(at(r, n));
                }
            }
            // Most tiles change no row's largest score.
            if (0..R).any(|r| *alpha.add(r * QUAD) != 1.0) {
                for (r, sums) in sums.iter_mut().enumerate() {
                    let factor = simd.splat(*alpha.add(r * QUAD));
                    for sum in sums {
                        *sum = simd.mul(*sum, factor);
                    }
                }
            }
            // No branch is left in the loop over a tile that the rows see whole.
            let (all, whole) = ((1 << L::ELEMENTS) - 1, seen == Seen::MAX);
            for key in (0..TILE).step_by(L::ELEMENTS).filter(|_| whole) {
                self.add_lanes::<S, L, R, N>(simd, &mut sums, (block, row, first), (key, all));
            }
            // 0 · NaN is NaN, so the value of a key that no row sees becomes 0.
            for key in (0..TILE).step_by(L::ELEMENTS).filter(|_| !whole) {
                match seen >> key & all {
                    0 => (),
                    some => self.add_lanes::<S, L, R, N>(
                        simd,
                        &mut sums,
                        (block, row, first),
                        (key, some),
                    ),
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                for (n, sum) in sums.iter().enumerate() {
                    simd.store(at(r, n), *sum);
                }
            }
        }
    }

    /// Adds lanes of values from a key on, times the weights of each row, as far as keys are seen.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute_many`] asks for.
    #[inline(always)]
    unsafe fn add_lanes<S: Simd, L: Lane, const R: usize, const N: usize>(
        &self,
        simd: S,
        sums: &mut [[S::Vector; N]; R],
        (block, row, first): (usize, usize, usize),
        (key, seen): (usize, Seen),
    ) {
        let values = self.values[key].cast::<f32>().wrapping_add(first * S::LANES);
        let weights = self.place(block, 0, key / QUAD * QUAD).cast_const();
        let weights = weights.wrapping_add((row * QUAD + key % QUAD) / L::ELEMENTS);
        // SAFETY: the caller guarantees the memory and the instructions.
        unsafe {
            let mut right = [simd.zero(); N];
            for (n, right) in right.iter_mut().enumerate() {
                *right = L::keep(simd, seen, simd.load(values.add(n * S::LANES)));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let weight = simd.splat(*weights.add(r * QUAD / L::ELEMENTS));
                let weight = L::keep(simd, seen, weight);
                for (sum, right) in sums.iter_mut().zip(right) {
                    *sum = L::add(simd, weight, right, *sum);
                }
            }
        }
    }

    /// Asks for a part of the rows of the next head, which may be the first head of the next tile.
    #[inline(always)]
    fn fetch_part<S: Simd>(&self, simd: S, part: Range<usize>, parts: usize) {
        let rows = TILE * part.start / parts..TILE * part.end / parts;
        match self.blocks.end / self.per_head {
            head if head == self.heads => self.ahead.fetch_rows(simd, (1, 0), rows),
            head => self.ahead.fetch_rows(simd, (0, head), rows),
        }
    }
}

/// Returns the products of `V` vectors of rows and some keys over a part of their lanes.
///
/// # Safety
/// The caller guarantees the memory and the instructions.
#[inline(always)]
unsafe fn products<S: Simd, L: Lane, const V: usize>(
    simd: S,
    q: [*mut f32; V],
    keys: &[*const u8; KEYS],
    lanes: Range<usize>,
) -> [[S::Vector; KEYS]; V] {
    let mut sums = [[simd.zero(); KEYS]; V];
    for at in lanes {
        // SAFETY: the caller guarantees the memory and the instructions.
        unsafe {
            let mut left = [simd.zero(); V];
            for (left, q) in left.iter_mut().zip(q) {
                *left = simd.load(q.add(at * S::LANES));
            }
            for (k, key) in keys.iter().enumerate() {
                let right = simd.splat(key.cast::<f32>().add(at).read_unaligned());
                for (sums, left) in sums.iter_mut().zip(left) {
                    sums[k] = L::add(simd, left, right, sums[k]);
                }
            }
        }
    }
    sums
}
