//! Copies of a tile's keys and values, in the form in which many rows read them.

use super::MANY;
use super::chunk::{ChunkScratch, ChunkTask};
use super::element::{Element, F32, whole_loads};
use super::lane::{Float, Pair};
use super::many_rows::pair_values;
use super::row_blocks::RowBlocks;
use super::tile::TILE;
use crate::host::matmul::Matrix;
use crate::host::pack::load_row;
use crate::host::simd::Simd;
use crate::problem::Dtype;

impl ChunkTask<'_> {
    /// Converts a row of `dim` elements to float32, with zeros behind them.
    ///
    /// # Safety
    /// The caller guarantees that the row is readable, and that `to` has room for whole vectors.
    #[inline(always)]
    pub(super) unsafe fn load<S: Simd, E: Element>(
        &self,
        simd: S,
        row: *const u8,
        dim: usize,
        to: Matrix,
    ) {
        // SAFETY: the caller guarantees the row and the room for it.
        unsafe {
            if !whole_loads(self.io, S::LANES) {
                load_row(simd, row, E::DTYPE, to.at, dim);
                return to.at.add(dim).write_bytes(0, to.row - dim);
            }
            for load in 0..dim / (S::LANES * E::VECTORS) {
                for part in 0..E::VECTORS {
                    let to = to.at.add((load * E::VECTORS + part) * S::LANES);
                    simd.store(to, E::load(simd, row, load, part));
                }
            }
        }
    }

    /// Copies keys and values to float32, head after head, before the products of each head.
    ///
    /// # Safety
    /// The caller guarantees the scratch and what [`RowBlocks::compute`] asks for.
    #[inline(always)]
    pub(super) unsafe fn copy<S: Simd, E: Element>(
        &self,
        simd: S,
        scratch: ChunkScratch,
        blocks: RowBlocks<'_>,
    ) {
        let sides =
            [(&self.io.k, blocks.keys, scratch.keys), (&self.io.v, blocks.values, scratch.values)];
        let count = if self.io.values_in_keys() { 1 } else { 2 };
        let many = self.io.group() >= MANY;
        let in_place = many && E::DTYPE == Dtype::F32 && whole_loads(self.io, S::LANES);
        for head in 0..self.part.kv_heads.len() {
            let mut copies = [[std::ptr::null(); TILE]; 2];
            for (side, copies) in copies[..count].iter_mut().enumerate() {
                let ((array, rows, to), skip) = (sides[side], head * self.skips()[side]);
                for (row, copy) in copies.iter_mut().enumerate() {
                    let (from, to) = (rows[row].wrapping_add(skip), to.skip(row));
                    if in_place {
                        *copy = from;
                        continue;
                    }
                    // SAFETY: the caller guarantees the tile's rows. The scratch has one for each.
                    unsafe { self.load::<S, E>(simd, from, array.dim, to) }
                    *copy = to.at.cast_const().cast();
                }
            }
            let blocks = blocks.of_head(head, [&copies[0], &copies[count - 1]]);
            // SAFETY: the caller guarantees the state.
            unsafe {
                if many {
                    blocks.compute_many::<S, Float>(simd, self.io.scale);
                } else {
                    blocks.compute::<S, F32>(simd);
                }
            }
        }
    }

    /// Writes the values as pairs, head after head, before the products of each head.
    ///
    /// # Safety
    /// The caller guarantees the scratch and what [`RowBlocks::compute_many`] asks for.
    #[inline(always)]
    pub(super) unsafe fn pair<S: Simd>(
        &self,
        simd: S,
        scratch: ChunkScratch,
        blocks: RowBlocks<'_>,
    ) {
        let skips = self.skips();
        for head in 0..self.part.kv_heads.len() {
            let keys = blocks.keys.map(|row| row.wrapping_add(head * skips[0]));
            let mut values = blocks.values.map(|row| row.wrapping_add(head * skips[1]));
            for (pair, rows) in values.as_chunks_mut().0.iter_mut().enumerate() {
                let to = scratch.values.skip(pair);
                // SAFETY: the caller guarantees the tile's rows. The scratch has one for each pair.
                unsafe { pair_values(simd, *rows, self.io.v.dim, to) }
                rows.fill(to.at.cast_const().cast());
            }
            let blocks = blocks.of_head(head, [&keys, &values]);
            // SAFETY: the caller guarantees the state.
            unsafe { blocks.compute_many::<S, Pair>(simd, self.io.scale) }
        }
    }
}
