//! The matrix products of the backward pass.

use std::ops::Range;

use super::super::matmul::{Depth, Matrix, Product, Write};
use super::super::pack;
use super::super::simd::Simd;
use super::cell::{CellScratch, CellTask};

impl CellTask<'_> {
    /// Computes p = q kᵀ and ds = dout vᵀ for the packed queries in `rows` and the keys of `lanes`.
    ///
    /// # Safety
    /// The caller guarantees that keys and queries are packed.
    #[inline(always)]
    pub(super) unsafe fn logits<S: Simd>(&self, simd: S, lanes: &Range<usize>, rows: Range<usize>) {
        let CellScratch { k_columns, v_columns, q, dout, p, ds, .. } = self.scratch;
        let inputs = &self.cell.tile.inputs;
        let sides = [(q, k_columns, inputs.k.dim, p), (dout, v_columns, inputs.v.dim, ds)];
        for (a, columns, dim, c) in sides {
            let product = Product {
                a: a.left(),
                b: pack::panel(columns, lanes, dim),
                c: Matrix { at: c, row: lanes.len() },
                rows: rows.clone(),
                vectors: lanes.len() / S::LANES,
                depth: Depth::All(0..dim),
                write: Write::Set,
            };
            // SAFETY: all three matrices are scratch of this task, and the caller guarantees that
            // keys and queries are packed.
            unsafe { product.compute(simd) }
        }
    }

    /// Adds dv += pᵀ dout and dk += dsᵀ q for the first `count` keys of `lanes`.
    ///
    /// # Safety
    /// The caller guarantees that the panels hold p and ds, and that the queries are packed.
    #[inline(always)]
    pub(super) unsafe fn key_gradients<S: Simd>(
        &self,
        simd: S,
        lanes: &Range<usize>,
        count: usize,
        depth: Depth<'_>,
    ) {
        let CellScratch { q, dout, dk, dv, p, ds, .. } = self.scratch;
        for (a, b, c) in [(p, dout, dv), (ds, q, dk)] {
            let product = Product {
                a: Matrix { at: a, row: lanes.len() }.transposed(),
                b,
                c: c.skip(lanes.start),
                rows: 0..count,
                vectors: c.row / S::LANES,
                depth: depth.clone(),
                write: Write::Add,
            };
            // SAFETY: all three matrices are scratch of this task, and the caller guarantees the
            // panels and the queries.
            unsafe { product.compute(simd) }
        }
    }

    /// Adds dq += ds k for the packed queries in `rows` and the keys of `lanes`.
    ///
    /// # Safety
    /// The caller guarantees that the panel holds ds, and that the keys are packed.
    #[inline(always)]
    pub(super) unsafe fn query_gradients<S: Simd>(
        &self,
        simd: S,
        lanes: &Range<usize>,
        rows: Range<usize>,
        depth: Depth<'_>,
    ) {
        let CellScratch { k, dq, ds, .. } = self.scratch;
        let product = Product {
            a: Matrix { at: ds, row: lanes.len() }.left(),
            b: k.skip(lanes.start),
            c: dq,
            rows,
            vectors: k.row / S::LANES,
            depth,
            write: Write::Add,
        };
        // SAFETY: all three matrices are scratch of this task, and the caller guarantees the panel
        // and the keys.
        unsafe { product.compute(simd) }
    }
}
