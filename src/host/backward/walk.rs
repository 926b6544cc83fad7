//! The walk through a cell of the backward pass: block of keys by block of keys, and for each all
//! blocks of queries that see it.

use std::ops::Range;

use super::super::array::HostArray;
use super::super::extras::{self, PanelExtras, Side, Which};
use super::super::matmul::{Depth, even_parts};
use super::super::pack::{self, Rows};
use super::super::simd::{Simd, Task};
use super::super::softmax::{self, Nothing, Panels, SoftCap};
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
    pub lse: *mut f32,
    pub delta: *mut f32,
    /// Floats per row of q, k and their gradients, and of v, dout and dv.
    pub k_width: usize,
    pub v_width: usize,
    pub block_keys: usize,
    /// What features need to know of a block of queries and of one of keys.
    pub queries: Side,
    pub keys: Side,
    /// Factors of the weights of one panel.
    pub keep: *mut f32,
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
            // With packed documents most cells are empty; packing their keys all the same made 64
            // documents take three times as long.
            let meet = tile.extras.coverage(self.cell.batch, &seeing, &keys) != Coverage::Empty;
            if (seeing.is_empty() || !meet) && !self.cell.overwrite {
                continue;
            }
            // SAFETY: the scratch is this thread's; the cell's rows of the gradients are this
            // task's to write, and nobody writes its inputs meanwhile.
            unsafe {
                self.begin(simd, &keys);
                for head in kv_head * group_size..(kv_head + 1) * group_size {
                    for part in even_parts(seeing.len(), BLOCK_QUERIES) {
                        let queries = seeing.start + part.start..seeing.start + part.end;
                        let segments = tile.extras.coverage(self.cell.batch, &queries, &keys);
                        match tile.band.coverage(&queries, &keys).and(segments) {
                            Coverage::Empty => {}
                            Coverage::Full => self.full(simd, head, queries, &keys),
                            Coverage::Partial => {
                                self.partial(simd, (head, queries), &keys, segments);
                            }
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
        self.load_side(Which::Keys, keys, count.next_multiple_of(S::LANES));
        // SAFETY: the caller vouches for the arrays; the scratch is large enough.
        unsafe {
            self.of_keys(tile.k, keys.clone()).pack(simd, k, k_width);
            pack::transpose(simd, k, k_width, count, tile.k.dim, 1.0, k_columns);
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
            // The queries that dk is a sum of were scaled.
            self.of_keys(tile.dk, keys.clone()).unpack(simd, dk, k_width, 1.0, add);
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
        let (tile, count) = (self.cell.tile, queries.len());
        // SAFETY: the caller vouches for the arrays; the rest is scratch.
        unsafe {
            self.pack_queries(simd, head, &queries);
            for lanes in pack::panels::<S>(keys.len()) {
                self.logits(simd, &lanes, 0..count);
                let in_panel = lanes.end.min(keys.len()) - lanes.start;
                if tile.extras.dslopes.is_some() {
                    // Lanes beyond the keys may hold anything, but not be part of a sum.
                    let all = Some(|_: usize| 0..in_panel);
                    self.softmax(simd, head, &lanes, 0..count, (all, false));
                } else {
                    let none: Option<fn(usize) -> Range<usize>> = None;
                    self.softmax(simd, head, &lanes, 0..count, (none, false));
                }
                self.key_gradients(simd, &lanes, in_panel, Depth::All(0..count));
                self.query_gradients(simd, &lanes, 0..count, Depth::All(0..in_panel));
            }
            self.add_query_gradients(simd, head, queries);
        }
    }

    /// A block of queries and keys that the band or segments cut.
    ///
    /// # Safety
    /// As [`Walk::run`], for these queries.
    #[inline(always)]
    unsafe fn partial<S: Simd>(
        &self,
        simd: S,
        (head, queries): (usize, Range<usize>),
        keys: &Range<usize>,
        segments: Coverage,
    ) {
        let (tile, batch) = (self.cell.tile, self.cell.batch);
        let compares = segments == Coverage::Partial;
        // SAFETY: the caller vouches for the arrays; the rest is scratch.
        unsafe {
            self.pack_queries(simd, head, &queries);
            let exact = !self.all_finite(simd, queries.len(), keys.len());
            if !(exact && compares) {
                self.band(simd, (head, &queries), (keys, keys), (compares, exact));
                return;
            }
            // Each pair of runs by itself, so that nothing meets values of another segment.
            let runs = tile.extras.runs(Which::Keys, batch, keys);
            for (queries, id) in tile.extras.runs(Which::Queries, batch, &queries) {
                self.pack_queries(simd, head, &queries);
                for (run, _) in runs.iter().filter(|(_, other)| *other == id) {
                    self.band(simd, (head, &queries), (keys, run), (false, exact));
                    self.clear_query_gradients(queries.len());
                }
            }
        }
    }

    /// Packed queries and a run of the block's keys, which they see as far as the band allows.
    ///
    /// # Safety
    /// As [`Walk::run`], for these queries.
    #[inline(always)]
    unsafe fn band<S: Simd>(
        &self,
        simd: S,
        (head, queries): (usize, &Range<usize>),
        (keys, run): (&Range<usize>, &Range<usize>),
        (compares, exact): (bool, bool),
    ) {
        let band = self.cell.tile.band;
        let shift = |seen: Range<usize>, by: usize| seen.start - by..seen.end - by;
        // SAFETY: the caller vouches for the arrays; the rest is scratch.
        unsafe {
            for lanes in pack::panels::<S>(keys.len()) {
                let panel = keys.start + lanes.start..keys.end.min(keys.start + lanes.end);
                let within = panel.start.max(run.start)..panel.end.min(run.end);
                if within.is_empty() {
                    continue;
                }
                let seeing = |j: usize| shift(band.queries_of(j, queries), queries.start);
                let seen =
                    |row: usize| shift(band.keys_of(queries.start + row, &within), panel.start);
                let rows = seeing(within.start).start..seeing(within.end - 1).end;
                if rows.is_empty() {
                    continue;
                }
                self.logits(simd, &lanes, rows.clone());
                self.softmax(simd, head, &lanes, rows.clone(), (Some(seen), compares));
                let range = |key: usize| {
                    let key = panel.start + key;
                    if within.contains(&key) { seeing(key) } else { 0..0 }
                };
                let depth = Depth::Rows { range: &range, exact };
                self.key_gradients(simd, &lanes, panel.len(), depth);
                let depth = Depth::Rows { range: &seen, exact };
                self.query_gradients(simd, &lanes, rows, depth);
            }
            self.add_query_gradients(simd, head, queries.clone());
        }
    }

    /// Packs a block of queries, scaled as in the forward pass, and what belongs to them, and clears
    /// their gradient.
    ///
    /// # Safety
    /// `queries` of q, dout, lse and delta may be read.
    #[inline(always)]
    unsafe fn pack_queries<S: Simd>(&self, simd: S, head: usize, queries: &Range<usize>) {
        let tile = self.cell.tile;
        let Memory { q, dout, lse, delta, k_width, v_width, .. } = self.memory;
        self.load_side(Which::Queries, queries, queries.len());
        let of = |array| self.of_queries(array, head, queries.clone());
        // SAFETY: the caller vouches for the arrays; the scratch is large enough.
        unsafe {
            of(tile.q).pack(simd, q, k_width);
            pack::scale(simd, q, queries.len() * k_width, tile.softmax_scale);
            of(tile.dout).pack(simd, dout, v_width);
            of(tile.delta).pack_column(delta);
            of(tile.lse).pack_column(lse);
            for i in 0..queries.len() {
                // e^(s − ∞) = 0 for a row that sees nothing.
                if *lse.add(i) == f32::NEG_INFINITY {
                    *lse.add(i) = f32::INFINITY;
                }
            }
        }
        self.clear_query_gradients(queries.len());
    }

    /// Starts the gradients of the packed queries anew.
    fn clear_query_gradients(&self, count: usize) {
        let Memory { dq, k_width, .. } = self.memory;
        // SAFETY: the scratch has room for a block of queries.
        unsafe { dq.write_bytes(0, count * k_width) }
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

    /// Reads what features need to know of rows.
    fn load_side(&self, which: Which, rows: &Range<usize>, padded: usize) {
        let (tile, memory) = (self.cell.tile, &self.memory);
        let side = if which == Which::Queries { memory.queries } else { memory.keys };
        let at = (self.cell.batch, extras::base(&tile.extras, &tile.q_rows));
        // SAFETY: the scratch is this thread's.
        unsafe { extras::load_side((&tile.extras, which), at, rows, padded, side) }
    }

    /// `seen`: which keys each row sees, and whether segments have to be compared.
    ///
    /// # Safety
    /// The panels hold logits and dp of `rows`.
    #[inline(always)]
    unsafe fn softmax<S: Simd>(
        &self,
        simd: S,
        head: usize,
        lanes: &Range<usize>,
        rows: Range<usize>,
        (seen, compares): (Option<impl Fn(usize) -> Range<usize>>, bool),
    ) {
        let Memory { p, ds, lse, delta, queries, keys, keep, .. } = self.memory;
        let (tile, statistics) = (self.cell.tile, (lse.cast_const(), delta.cast_const()));
        let panels = Panels { logits: p, dp: ds, across: lanes.len() };
        let (at, sides) = ([self.cell.batch, head], (keys, queries));
        let extras = PanelExtras::new(&tile.extras, tile.soft_cap, at, Which::Keys, sides, keep);
        // Functions of their own, so that nobody pays for what others need.
        // SAFETY: the caller vouches for the panels; the cell's sums are this task's.
        unsafe {
            if let Some(extras) = extras {
                let extras = extras.on(lanes, compares);
                extras.fill_keep(rows.clone());
                let sums = self.cell.slopes;
                let between = (extras, !sums.is_null());
                let sum = softmax::gradients(simd, panels, rows, statistics, seen, between);
                if !sums.is_null() {
                    // Distances are those of queries from keys.
                    *sums.add(at[0] * tile.q.heads + head) -= sum;
                }
            } else if let Some(cap) = tile.soft_cap.map(SoftCap::new) {
                softmax::gradients(simd, panels, rows, statistics, seen, (cap, false));
            } else {
                softmax::gradients(simd, panels, rows, statistics, seen, (Nothing, false));
            }
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
