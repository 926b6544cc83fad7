//! The walk through a cell of the backward pass: block of keys by block of keys, and for each all
//! blocks of queries that see it.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::super::array::HostArray;
use super::super::matmul::{Depth, Product, SameDepth, Write, even_parts};
use super::super::pack::{self, Rows};
use super::super::simd::{Simd, Task};
use super::super::softmax;
use super::{BLOCK_QUERIES, Cell};
use crate::mask::Coverage;

/// A task's scratch.
pub(super) struct Memory {
    /// Keys, as rows, and keys and values as columns in panels.
    pub k: *mut f32,
    pub k_columns: *mut f32,
    pub v_columns: *mut f32,
    pub dk: *mut f32,
    pub dv: *mut f32,
    pub q: *mut f32,
    pub dout: *mut f32,
    pub dq: *mut f32,
    /// Logits, then probabilities, of one panel.
    pub p: *mut f32,
    /// dp, then ds, of one panel.
    pub ds: *mut f32,
    pub lse_log2: *mut f32,
    pub delta: *mut f32,
    /// Floats per row of q, k and their gradients, and of v, dout and dv.
    pub k_width: usize,
    pub v_width: usize,
    pub block_keys: usize,
}

/// A cell with its scratch.
pub(super) struct Walk<'a> {
    pub cell: &'a Cell<'a>,
    pub memory: Memory,
}

impl Task for Walk<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Cell { tile, kv_head, ref queries, ref keys, .. } = *self.cell;
        let group_size = tile.q.heads / tile.k.heads;
        for start in keys.clone().step_by(self.memory.block_keys) {
            let keys = start..keys.end.min(start + self.memory.block_keys);
            // The band's edges rise with the row, so the first and the last row bound the rest.
            let seeing = tile.band.queries_of(keys.start, queries).start
                ..tile.band.queries_of(keys.end - 1, queries).end;
            if seeing.is_empty() && !self.cell.overwrite {
                continue;
            }
            // SAFETY: the scratch is this thread's; the cell's rows of the gradients are this
            // task's to write, and nobody writes its inputs meanwhile.
            unsafe {
                self.begin(simd, &keys);
                for head in kv_head * group_size..(kv_head + 1) * group_size {
                    for part in even_parts(seeing.len(), BLOCK_QUERIES) {
                        let queries = seeing.start + part.start..seeing.start + part.end;
                        match tile.band.coverage(&queries, &keys) {
                            Coverage::Empty => {}
                            Coverage::Full => self.full(simd, head, queries, &keys),
                            Coverage::Partial => self.partial(simd, head, queries, &keys),
                        }
                    }
                }
                self.finish(simd, keys);
            }
        }
    }
}

impl Walk<'_> {
    fn of_keys<'b>(&self, array: &'b HostArray, rows: Range<usize>) -> Rows<'b> {
        Rows { array, batch: self.cell.batch, head: self.cell.kv_head, rows }
    }

    fn of_queries<'b>(&self, array: &'b HostArray, head: usize, rows: Range<usize>) -> Rows<'b> {
        Rows { array, batch: self.cell.batch, head, rows }
    }

    /// Packs a block of keys and values and clears their gradients.
    ///
    /// # Safety
    /// `keys` of k and v may be read.
    #[inline(always)]
    unsafe fn begin<S: Simd>(&self, simd: S, keys: &Range<usize>) {
        let (tile, count) = (self.cell.tile, keys.len());
        let Memory { k, k_columns, v_columns, dk, dv, k_width, v_width, .. } = self.memory;
        let scale_log2 = tile.softmax_scale * LOG2_E;
        // SAFETY: the caller vouches for the arrays; the scratch is large enough.
        unsafe {
            self.of_keys(tile.k, keys.clone()).pack(simd, k, k_width);
            pack::transpose(simd, k, k_width, count, tile.k.dim, scale_log2, k_columns);
            // dv's place serves for the values as rows, which nothing needs later.
            self.of_keys(tile.v, keys.clone()).pack(simd, dv, v_width);
            pack::transpose(simd, dv, v_width, count, tile.v.dim, 1.0, v_columns);
            dk.write_bytes(0, count * k_width);
            dv.write_bytes(0, count * v_width);
        }
    }

    /// Writes the gradients of a block of keys.
    ///
    /// # Safety
    /// This task alone may write `keys` of dk and dv.
    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, simd: S, keys: Range<usize>) {
        let (tile, add) = (self.cell.tile, !self.cell.overwrite);
        let Memory { dk, dv, k_width, v_width, .. } = self.memory;
        // SAFETY: the caller vouches for the arrays.
        unsafe {
            let scale = tile.softmax_scale;
            self.of_keys(tile.dk, keys.clone()).unpack(simd, dk, k_width, scale, add);
            self.of_keys(tile.dv, keys).unpack(simd, dv, v_width, 1.0, add);
        }
    }

    /// A block of queries that see all keys of the block.
    ///
    /// # Safety
    /// As [`Walk::run`], for these queries.
    #[inline(always)]
    unsafe fn full<S: Simd>(
        &self,
        simd: S,
        head: usize,
        queries: Range<usize>,
        keys: &Range<usize>,
    ) {
        let count = queries.len();
        // SAFETY: the caller vouches for the arrays; the rest is scratch.
        unsafe {
            self.pack_queries(simd, head, &queries);
            for lanes in pack::panels::<S>(keys.len()) {
                self.logits(simd, &lanes, 0..count);
                let none: Option<SameDepth> = None;
                self.softmax(simd, &lanes, 0..count, none);
                let in_panel = lanes.end.min(keys.len()) - lanes.start;
                let depth: Depth<SameDepth> = Depth::All(0..count);
                self.key_gradients(simd, &lanes, in_panel, depth);
                let depth: Depth<SameDepth> = Depth::All(0..in_panel);
                self.query_gradients(simd, &lanes, 0..count, depth);
            }
            self.add_query_gradients(simd, head, queries);
        }
    }

    /// A block of queries and keys that the band cuts.
    ///
    /// # Safety
    /// As [`Walk::run`], for these queries.
    #[inline(always)]
    unsafe fn partial<S: Simd>(
        &self,
        simd: S,
        head: usize,
        queries: Range<usize>,
        keys: &Range<usize>,
    ) {
        let band = self.cell.tile.band;
        let shift = |seen: Range<usize>, by: usize| seen.start - by..seen.end - by;
        // SAFETY: the caller vouches for the arrays; the rest is scratch.
        unsafe {
            self.pack_queries(simd, head, &queries);
            let exact = !self.all_finite(simd, queries.len(), keys.len());
            for lanes in pack::panels::<S>(keys.len()) {
                let in_panel = keys.start + lanes.start..keys.end.min(keys.start + lanes.end);
                let seeing = |j: usize| shift(band.queries_of(j, &queries), queries.start);
                let seen = |row: usize| {
                    shift(band.keys_of(queries.start + row, &in_panel), in_panel.start)
                };
                let rows = seeing(in_panel.start).start..seeing(in_panel.end - 1).end;
                if rows.is_empty() {
                    continue;
                }
                self.logits(simd, &lanes, rows.clone());
                self.softmax(simd, &lanes, rows.clone(), Some(seen));
                let range = |key: usize| seeing(in_panel.start + key);
                let depth = Depth::Rows { range, exact };
                self.key_gradients(simd, &lanes, in_panel.len(), depth);
                let depth = Depth::Rows { range: seen, exact };
                self.query_gradients(simd, &lanes, rows, depth);
            }
            self.add_query_gradients(simd, head, queries);
        }
    }

    /// Packs a block of queries and what belongs to them, and clears their gradient.
    ///
    /// # Safety
    /// `queries` of q, dout, lse and delta may be read.
    #[inline(always)]
    unsafe fn pack_queries<S: Simd>(&self, simd: S, head: usize, queries: &Range<usize>) {
        let tile = self.cell.tile;
        let Memory { q, dout, dq, lse_log2, delta, k_width, v_width, .. } = self.memory;
        let of = |array| self.of_queries(array, head, queries.clone());
        // SAFETY: the caller vouches for the arrays; the scratch is large enough.
        unsafe {
            of(tile.q).pack(simd, q, k_width);
            of(tile.dout).pack(simd, dout, v_width);
            of(tile.delta).pack_column(delta);
            of(tile.lse).pack_column(lse_log2);
            for i in 0..queries.len() {
                let lse = *lse_log2.add(i);
                // 2^(s − ∞) = 0 for a row that sees nothing.
                let scaled = (f64::from(lse) * std::f64::consts::LOG2_E) as f32;
                *lse_log2.add(i) = if lse == f32::NEG_INFINITY { f32::INFINITY } else { scaled };
            }
            dq.write_bytes(0, queries.len() * k_width);
        }
    }

    /// Are all operands finite whose masked products are left to multiplications by 0?
    ///
    /// # Safety
    /// Keys and queries are packed.
    #[inline(always)]
    unsafe fn all_finite<S: Simd>(&self, simd: S, queries: usize, keys: usize) -> bool {
        let Memory { k, q, dout, k_width, v_width, .. } = self.memory;
        // SAFETY: all of it is scratch.
        unsafe {
            pack::all_finite(simd, k, keys * k_width)
                && pack::all_finite(simd, q, queries * k_width)
                && pack::all_finite(simd, dout, queries * v_width)
        }
    }

    /// p = q kᵀ and ds = dout vᵀ for the packed queries in `rows` and the keys of `lanes`.
    ///
    /// # Safety
    /// Keys and queries are packed.
    #[inline(always)]
    unsafe fn logits<S: Simd>(&self, simd: S, lanes: &Range<usize>, rows: Range<usize>) {
        let Memory { k_columns, v_columns, q, dout, p, ds, k_width, v_width, .. } = self.memory;
        let sides = [
            (q, k_width, k_columns, self.cell.tile.k.dim, p),
            (dout, v_width, v_columns, self.cell.tile.v.dim, ds),
        ];
        for (a, a_row, columns, dim, c) in sides {
            let depth: Depth<SameDepth> = Depth::All(0..dim);
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
                    depth,
                    write: Write::Set,
                };
                product.compute(simd);
            }
        }
    }

    /// # Safety
    /// The panels hold logits and dp of `rows`.
    #[inline(always)]
    unsafe fn softmax<S: Simd>(
        &self,
        simd: S,
        lanes: &Range<usize>,
        rows: Range<usize>,
        seen: Option<impl Fn(usize) -> Range<usize>>,
    ) {
        let Memory { p, ds, lse_log2, delta, .. } = self.memory;
        // SAFETY: the caller vouches for the panels.
        unsafe { softmax::gradients(simd, p, ds, lanes.len(), rows, lse_log2, delta, seen) }
    }

    /// dv += pᵀ dout and dk += dsᵀ q for the first `count` keys of `lanes`.
    ///
    /// # Safety
    /// The panels hold p and ds, and the queries are packed.
    #[inline(always)]
    unsafe fn key_gradients<S: Simd, F: Fn(usize) -> Range<usize> + Clone>(
        &self,
        simd: S,
        lanes: &Range<usize>,
        count: usize,
        depth: Depth<F>,
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
    unsafe fn query_gradients<S: Simd, F: Fn(usize) -> Range<usize>>(
        &self,
        simd: S,
        lanes: &Range<usize>,
        rows: Range<usize>,
        depth: Depth<F>,
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

    /// Adds the block's gradient of the queries to the array.
    ///
    /// # Safety
    /// This task alone may write `queries` of dq.
    #[inline(always)]
    unsafe fn add_query_gradients<S: Simd>(&self, simd: S, head: usize, queries: Range<usize>) {
        let tile = self.cell.tile;
        let Memory { dq, k_width, .. } = self.memory;
        // SAFETY: the caller vouches for the array.
        unsafe {
            let rows = self.of_queries(tile.dq, head, queries);
            rows.unpack(simd, dq, k_width, tile.softmax_scale, true);
        }
    }
}
