//! The matrix products of the backward pass.

use std::ops::Range;

use super::super::matmul::{Depth, Product, Write};
use super::super::simd::Simd;
use super::walk::{Memory, Walk};

impl Walk<'_> {
    /// p = q kᵀ and ds = dout vᵀ for the packed queries in `rows` and the keys of `lanes`.
    ///
    /// # Safety
    /// Keys and queries are packed.
    #[inline(always)]
    pub(super) unsafe fn logits<S: Simd>(&self, simd: S, lanes: &Range<usize>, rows: Range<usize>) {
        let Memory { k_columns, v_columns, q, dout, p, ds, k_width, v_width, .. } = self.memory;
        let sides = [
            (q, k_width, k_columns, self.cell.tile.k.dim, p),
            (dout, v_width, v_columns, self.cell.tile.v.dim, ds),
        ];
        for (a, a_row, columns, dim, c) in sides {
            // SAFETY: all of it is scratch.
            unsafe {
                let product = Product {
                    a,
                    a_row,
                    a_depth: 1,
                    b: columns.add(lanes.start * dim),
                    b_depth: lanes.len(),
                    c,
                    c_row: lanes.len(),
                    rows: rows.clone(),
                    vectors: lanes.len() / S::LANES,
                    depth: Depth::All(0..dim),
                    write: Write::Set,
                };
                product.compute(simd);
            }
        }
    }

    /// dv += pᵀ dout and dk += dsᵀ q for the first `count` keys of `lanes`.
    ///
    /// # Safety
    /// The panels hold p and ds, and the queries are packed.
    #[inline(always)]
    pub(super) unsafe fn key_gradients<S: Simd>(
        &self,
        simd: S,
        lanes: &Range<usize>,
        count: usize,
        depth: Depth<'_>,
    ) {
        let Memory { q, dout, dk, dv, p, ds, k_width, v_width, .. } = self.memory;
        for (a, b, c, width) in [(p, dout, dv, v_width), (ds, q, dk, k_width)] {
            // SAFETY: all of it is scratch.
            unsafe {
                let product = Product {
                    a,
                    a_row: 1,
                    a_depth: lanes.len(),
                    b,
                    b_depth: width,
                    c: c.add(lanes.start * width),
                    c_row: width,
                    rows: 0..count,
                    vectors: width / S::LANES,
                    depth: depth.clone(),
                    write: Write::Add,
                };
                product.compute(simd);
            }
        }
    }

    /// dq += ds k for the packed queries in `rows` and the keys of `lanes`.
    ///
    /// # Safety
    /// The panel holds ds, and the keys are packed.
    #[inline(always)]
    pub(super) unsafe fn query_gradients<S: Simd>(
        &self,
        simd: S,
        lanes: &Range<usize>,
        rows: Range<usize>,
        depth: Depth<'_>,
    ) {
        let Memory { k, dq, ds, k_width, .. } = self.memory;
        // SAFETY: all of it is scratch.
        unsafe {
            let product = Product {
                a: ds,
                a_row: lanes.len(),
                a_depth: 1,
                b: k.add(lanes.start * k_width),
                b_depth: k_width,
                c: dq,
                c_row: k_width,
                rows,
                vectors: k_width / S::LANES,
                depth,
                write: Write::Add,
            };
            product.compute(simd);
        }
    }
}
