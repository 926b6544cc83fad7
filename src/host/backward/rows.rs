//! The rows of a cell: from the arrays into scratch, and its gradients back into the arrays.

use std::ops::Range;

use super::super::pack;
use super::super::simd::Simd;
use super::cell::{Cell, CellScratch, CellTask};
use crate::operands::Side;

impl CellTask<'_> {
    /// Packs a block of keys and values, and clears their gradients.
    ///
    /// # Safety
    /// The caller guarantees that `keys` of k and v are readable.
    #[inline(always)]
    pub(super) unsafe fn start_keys<S: Simd>(&self, simd: S, keys: &Range<usize>) {
        let (inputs, count) = (&self.cell.tile.inputs, keys.len());
        let CellScratch { k, k_columns, v_columns, dk, dv, features, .. } = self.scratch;
        let head = self.cell.kv_head;
        // SAFETY: the caller guarantees the rows of the arrays, and the scratch has room for a
        // block of keys.
        unsafe {
            features.load((inputs, Side::Keys), head.0, keys, count.next_multiple_of(S::LANES));
            inputs.k.head_rows(head, keys).pack(simd, k);
            pack::transpose(simd, k, (count, inputs.k.dim), 1.0, k_columns);
            // The place of dv serves for the values as rows, which nothing needs later.
            inputs.v.head_rows(head, keys).pack(simd, dv);
            pack::transpose(simd, dv, (count, inputs.v.dim), 1.0, v_columns);
            dk.clear(count);
            dv.clear(count);
        }
    }

    /// Writes the gradients of a block of keys to the arrays.
    ///
    /// # Safety
    /// The caller guarantees that `keys` of dk and dv are this task's.
    #[inline(always)]
    pub(super) unsafe fn write_key_gradients<S: Simd>(&self, simd: S, keys: &Range<usize>) {
        let Cell { tile, kv_head, overwrite, .. } = *self.cell;
        let CellScratch { dk, dv, .. } = self.scratch;
        // SAFETY: the caller guarantees the rows of the arrays, and the scratch has these rows.
        unsafe {
            // dk sums queries that were scaled already.
            tile.key_grads[0].head_rows(kv_head, keys).unpack(simd, dk, 1.0, !overwrite);
            tile.key_grads[1].head_rows(kv_head, keys).unpack(simd, dv, 1.0, !overwrite);
        }
    }

    /// Packs a block of queries, scaled as in the forward pass, with dout, lse and delta, and
    /// clears the gradient of the queries.
    ///
    /// # Safety
    /// The caller guarantees that `queries` of q, dout, lse and delta are readable.
    #[inline(always)]
    pub(super) unsafe fn pack_queries<S: Simd>(
        &self,
        simd: S,
        head: usize,
        queries: &Range<usize>,
    ) {
        let tile = self.cell.tile;
        let CellScratch { q, dout, dq, lse, delta, features, .. } = self.scratch;
        let at = (self.cell.kv_head.0, head);
        // SAFETY: the caller guarantees the rows of the arrays, and the scratch has room for a
        // block of queries.
        unsafe {
            features.load((&tile.inputs, Side::Queries), at.0, queries, queries.len());
            tile.inputs.q.head_rows(at, queries).pack(simd, q);
            pack::scale(simd, q.at, queries.len() * q.row, tile.inputs.softmax_scale);
            tile.dout.head_rows(at, queries).pack(simd, dout);
            tile.delta.head_rows(at, queries).pack_column(delta);
            tile.lse.head_rows(at, queries).pack_column(lse);
            for i in 0..queries.len() {
                // e^(s − ∞) = 0 for a row that sees no key.
                if *lse.add(i) == f32::NEG_INFINITY {
                    *lse.add(i) = f32::INFINITY;
                }
            }
            dq.clear(queries.len());
        }
    }

    /// Adds the gradient of a block of queries to the array.
    ///
    /// # Safety
    /// The caller guarantees that `queries` of dq are this task's.
    #[inline(always)]
    pub(super) unsafe fn write_query_gradients<S: Simd>(
        &self,
        simd: S,
        head: usize,
        queries: &Range<usize>,
    ) {
        let tile = self.cell.tile;
        let rows = tile.query_grads[0].head_rows((self.cell.kv_head.0, head), queries);
        // SAFETY: the caller guarantees the rows of the array, and the scratch has these rows.
        unsafe { rows.unpack(simd, self.scratch.dq, tile.inputs.softmax_scale, true) }
    }
}
