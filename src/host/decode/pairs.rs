//! Row blocks in bfloat16, on CPUs that multiply pairs of bfloat16 elements.
//!
//! Where many rows share a head of keys, as with latents, the CPU's products are what takes time, and
//! those of pairs take half of it. Pairs of a query and a key are neighbours in a row. A pair of values is one column of two
//! keys, and the two keys' weights are rounded to bfloat16. All sums are float32.

use super::DecodeIo;
use super::element::whole_loads;
use super::row_blocks::{COLUMNS, ROWS, RowBlocks, SCORES};
use super::tile::{QUAD, QUADS, Seen, TILE};
use crate::host::matmul::Matrix;
use crate::host::simd::{Simd, Task};
use crate::problem::Dtype;

/// Keys of a pair.
const PAIR: usize = 2;

/// Whether a call's products are those of pairs. The shapes of its arrays decide it, so that the bits
/// of a query's result do not depend on other queries.
#[inline(always)]
pub(super) fn in_pairs<S: Simd>(simd: S, io: &DecodeIo<'_>, blocks: usize) -> bool {
    let many = io.group() > (blocks - 1) * ROWS;
    let whole = io.k.dtype == Dtype::Bf16 && whole_loads(io, S::LANES);
    many && whole && simd.has_pairs()
}

/// Writes the values of two keys as pairs: for each load of 32-bit lanes, those of the even columns
/// and then those of the odd columns.
///
/// # Safety
/// The caller guarantees that both rows have `dim` elements, whole loads, and that `to` has as many
/// floats.
#[inline(always)]
pub(super) unsafe fn pair_values<S: Simd>(rows: [*const u8; PAIR], dim: usize, to: Matrix) {
    let [first, second] = rows.map(|row| row.cast::<u32>());
    let to = to.at.cast::<u32>();
    for load in (0..dim / 2).step_by(S::LANES) {
        for lane in 0..S::LANES {
            // SAFETY: the caller guarantees the rows and the room for the pairs.
            unsafe {
                let at = load + lane;
                let (a, b) = (first.add(at).read_unaligned(), second.add(at).read_unaligned());
                *to.add(load + at) = a & 0xffff | b << 16;
                *to.add(load + at + S::LANES) = a >> 16 | b & 0xffff_0000;
            }
        }
    }
}

/// The fold of row blocks over pairs, whose products of queries and keys `scale` multiplies.
struct Fold<'a> {
    blocks: RowBlocks<'a>,
    scale: f32,
}

impl Task for Fold<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        // SAFETY: the caller of `compute_pairs` guarantees the memory and the instructions.
        unsafe { self.blocks.fold_pairs(simd, self.scale) }
    }
}

impl RowBlocks<'_> {
    /// Folds the tile as [`RowBlocks::compute`] does. Queries are bfloat16 without the scale. The
    /// values of keys 2n and 2n + 1 are those of pair n.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute`] asks for, rows of whole loads, and that the
    /// CPU has pairs.
    #[inline(always)]
    pub unsafe fn compute_pairs<S: Simd>(self, simd: S, scale: f32) {
        // SAFETY: the caller guarantees that the CPU has pairs.
        unsafe { simd.vectorize_pairs(Fold { blocks: self, scale }) }
    }

    /// Folds the tile.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute_pairs`] asks for.
    #[inline(always)]
    unsafe fn fold_pairs<S: Simd>(&self, simd: S, scale: f32) {
        for block in self.blocks.clone() {
            self.fetch_next(simd, block);
            // SAFETY: the caller guarantees the memory and the instructions.
            unsafe {
                for quad in 0..QUADS {
                    self.pair_scores(simd, (block, quad), scale);
                }
                self.softmax(simd, block);
                self.round_weights(simd, block);
                let seen = self.seen(block);
                let alike = seen.iter().all(|other| *other == seen[0]);
                let rows = if alike { seen.len() } else { 1 };
                for row in (0..seen.len()).step_by(rows.max(1)) {
                    match rows {
                        1 => self.pair_outputs::<S, 1>(simd, (block, row)),
                        2 => self.pair_outputs::<S, 2>(simd, (block, row)),
                        3 => self.pair_outputs::<S, 3>(simd, (block, row)),
                        _ => self.pair_outputs::<S, 4>(simd, (block, row)),
                    }
                }
            }
        }
    }

    /// Computes the scores of a row block and a quad of keys. Rows that a block lacks have scratch
    /// of their own.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute_pairs`] asks for.
    #[inline(always)]
    unsafe fn pair_scores<S: Simd>(&self, simd: S, (block, quad): (usize, usize), scale: f32) {
        let (q, keys) = (self.state.q.skip(block * ROWS), &self.keys[quad * QUAD..][..QUAD]);
        let mut sums = [[simd.zero(); QUAD]; ROWS];
        // SAFETY: the caller guarantees the queries, the keys and the room for the scores.
        unsafe {
            for at in (0..q.row / PAIR).step_by(S::LANES) {
                let mut right = [simd.zero(); QUAD];
                for (right, key) in right.iter_mut().zip(keys) {
                    *right = simd.load(key.cast::<f32>().add(at));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let left = simd.load(q.skip(r).at.add(at));
                    for (sum, right) in sums.iter_mut().zip(right) {
                        *sum = simd.add_pairs(left, right, *sum);
                    }
                }
            }
            let (scores, factor) = (self.place(block, 0, quad * QUAD), simd.splat(scale));
            for (part, sums) in sums.as_flattened().chunks(S::LANES).enumerate() {
                let mut all = [simd.zero(); SCORES];
                all[..S::LANES].copy_from_slice(sums);
                let scaled = simd.mul(simd.sum_each(all), factor);
                simd.store(scores.add(part * S::LANES), scaled);
            }
        }
    }

    /// Rounds the weights of a row block, in place: those of a quad of keys become adjacent.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute_pairs`] asks for.
    #[inline(always)]
    unsafe fn round_weights<S: Simd>(&self, simd: S, block: usize) {
        for quad in 0..QUADS {
            let weights = self.place(block, 0, quad * QUAD);
            for lanes in (0..SCORES).step_by(S::LANES) {
                // SAFETY: the caller guarantees the weights. What is written was read before.
                unsafe {
                    let rounded = weights.cast::<u16>().add(lanes);
                    simd.store_bf16(rounded, simd.load(weights.add(lanes)));
                }
            }
        }
    }

    /// Adds the values to `R` rows that see the same keys.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute_pairs`] asks for.
    #[inline(always)]
    unsafe fn pair_outputs<S: Simd, const R: usize>(&self, simd: S, place: (usize, usize)) {
        let vectors = self.state.o.row / S::LANES;
        let whole = vectors / COLUMNS * COLUMNS;
        // SAFETY: the caller guarantees the memory and the instructions.
        unsafe {
            for first in (0..whole).step_by(COLUMNS) {
                self.pair_columns::<S, R, COLUMNS>(simd, place, first);
            }
            for first in whole..vectors {
                self.pair_columns::<S, R, 1>(simd, place, first);
            }
        }
    }

    /// Adds the values to `N` vectors of `R` rows, from vector `first` on.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute_pairs`] asks for.
    #[inline(always)]
    unsafe fn pair_columns<S: Simd, const R: usize, const N: usize>(
        &self,
        simd: S,
        (block, row): (usize, usize),
        first: usize,
    ) {
        let o = self.state.o.skip(block * ROWS + row);
        let at = |r: usize, n: usize| o.skip(r).at.wrapping_add((first + n) * S::LANES);
        let alpha = self.state.alpha.skip(block).at.wrapping_add(row * QUAD);
        let seen = self.seen(block)[row];
        let mut sums = [[simd.zero(); N]; R];
        // SAFETY: the caller guarantees the memory and the instructions.
        unsafe {
            for (r, sums) in sums.iter_mut().enumerate() {
                let factor = simd.splat(*alpha.add(r * QUAD));
                for (n, sum) in sums.iter_mut().enumerate() {
                    *sum = simd.mul(simd.load(at(r, n)), factor);
                }
            }
            // No branch is left in the loop over a tile that the rows see whole.
            let whole = seen == Seen::MAX;
            for key in (0..TILE).step_by(PAIR).filter(|_| whole) {
                self.add_pair(simd, &mut sums, (block, row, first), key, |pair| pair);
            }
            // 0 · NaN is NaN, so the value of a key that no row sees becomes 0.
            for key in (0..TILE).step_by(PAIR).filter(|_| !whole) {
                let (sums, place) = (&mut sums, (block, row, first));
                match seen >> key & 0b11 {
                    0b11 => self.add_pair(simd, sums, place, key, |pair| pair),
                    0b10 => self.add_pair(simd, sums, place, key, |pair| simd.high_bf16(pair)),
                    0b01 => self.add_pair(simd, sums, place, key, |pair| simd.low_bf16(pair)),
                    _ => (),
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                for (n, sum) in sums.iter().enumerate() {
                    simd.store(at(r, n), *sum);
                }
            }
        }
    }

    /// Adds a pair of values, times the weights of each row. `keep` leaves what counts of pairs.
    ///
    /// # Safety
    /// The caller guarantees what [`RowBlocks::compute_pairs`] asks for.
    #[inline(always)]
    unsafe fn add_pair<S: Simd, const R: usize, const N: usize>(
        &self,
        simd: S,
        sums: &mut [[S::Vector; N]; R],
        (block, row, first): (usize, usize, usize),
        key: usize,
        keep: impl Fn(S::Vector) -> S::Vector,
    ) {
        let values = self.values[key].cast::<f32>().wrapping_add(first * S::LANES);
        let weights = self.place(block, 0, key / QUAD * QUAD).cast_const();
        let weights = weights.wrapping_add((row * QUAD + key % QUAD) / PAIR);
        // SAFETY: the caller guarantees the memory and the instructions.
        unsafe {
            let mut right = [simd.zero(); N];
            for (n, right) in right.iter_mut().enumerate() {
                *right = keep(simd.load(values.add(n * S::LANES)));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let weight = keep(simd.splat(*weights.add(r * QUAD / PAIR)));
                for (sum, right) in sums.iter_mut().zip(right) {
                    *sum = simd.add_pairs(weight, right, *sum);
                }
            }
        }
    }
}
