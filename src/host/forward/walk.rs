//! The walk through a block of queries: block of keys by block of keys.

use std::ops::Range;

use super::super::array::HostArray;
use super::super::extras::{self, PanelExtras, Side, Which};
use super::super::matmul::{Depth, Product, Write};
use super::super::pack::{self, Rows};
use super::super::simd::{Simd, Task};
use super::super::softmax::{self, Online, SoftCap};
use super::{BLOCK_KEYS, Block};
use crate::mask::Coverage;

/// A task's scratch.
pub(super) struct Memory {
    /// Queries as columns, in panels.
    pub q: *mut f32,
    pub k: *mut f32,
    pub v: *mut f32,
    /// Logits, then probabilities, of one panel.
    pub p: *mut f32,
    pub acc: *mut f32,
    pub online: Online,
    /// What is known of the queries, and of a block of keys.
    pub sides: (Side, Side),
    pub extras: Option<PanelExtras>,
    /// Floats per row of k, and of v and acc.
    pub k_width: usize,
    pub v_width: usize,
}

/// A block with its scratch.
pub(super) struct Walk<'a> {
    pub block: &'a Block<'a>,
    pub memory: Memory,
}

impl Task for Walk<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (tile, queries) = (self.block.tile, &self.block.rows);
        // The band's edges rise with the row, so the first and the last row bound the rest.
        let seen = tile.band.keys_of(queries.start, &tile.k_rows).start
            ..tile.band.keys_of(queries.end - 1, &tile.k_rows).end;
        let meet = tile.extras.coverage(self.block.batch, queries, &seen) != Coverage::Empty;
        if (seen.is_empty() || !meet) && !tile.first && !tile.last {
            return;
        }
        // SAFETY: the scratch is this thread's; the tile's rows are this task's to write, and
        // nobody writes its inputs meanwhile.
        unsafe {
            self.begin(simd);
            for start in seen.clone().step_by(BLOCK_KEYS) {
                let keys = start..seen.end.min(start + BLOCK_KEYS);
                let segments = tile.extras.coverage(self.block.batch, queries, &keys);
                match tile.band.coverage(queries, &keys).and(segments) {
                    Coverage::Empty => {}
                    Coverage::Full => self.full(simd, keys),
                    Coverage::Partial => self.partial(simd, keys, segments),
                }
            }
            if tile.last { self.finish(simd) } else { self.save(simd) }
        }
    }
}

impl Walk<'_> {
    fn rows_of<'b>(&self, array: &'b HostArray) -> Rows<'b> {
        let Block { batch, head, ref rows, .. } = *self.block;
        Rows { array, batch, head, rows: rows.clone() }
    }

    fn keys_of<'b>(&self, array: &'b HostArray, rows: Range<usize>) -> Rows<'b> {
        let head = self.block.head / (self.block.tile.q.heads / array.heads);
        Rows { array, batch: self.block.batch, head, rows }
    }

    /// Packs the queries and loads or starts their state.
    ///
    /// # Safety
    /// The block's rows of q and of the state may be read.
    #[inline(always)]
    unsafe fn begin<S: Simd>(&self, simd: S) {
        let (tile, memory) = (self.block.tile, &self.memory);
        let (len, online) = (self.block.rows.len(), &memory.online);
        let lanes = len.next_multiple_of(S::LANES);
        self.load_side(Which::Queries, &self.block.rows, lanes);
        // SAFETY: the caller vouches for the arrays; the scratch is large enough.
        unsafe {
            self.rows_of(tile.q).pack(simd, memory.k, memory.k_width);
            let dim = tile.q.dim;
            pack::transpose(simd, memory.k, memory.k_width, len, dim, tile.softmax_scale, memory.q);
            for lane in 0..lanes {
                *online.m.add(lane) = f32::NEG_INFINITY;
                *online.l.add(lane) = 0.0;
                *online.alpha.add(lane) = 1.0;
            }
            match &tile.state {
                Some(state) if !tile.first => {
                    self.rows_of(state.acc).pack(simd, memory.acc, memory.v_width);
                    self.rows_of(state.m).pack_column(online.m);
                    self.rows_of(state.l).pack_column(online.l);
                }
                _ => memory.acc.write_bytes(0, len * memory.v_width),
            }
        }
    }

    /// Folds in a block of keys that every query sees.
    ///
    /// # Safety
    /// `keys` of k and v may be read.
    #[inline(always)]
    unsafe fn full<S: Simd>(&self, simd: S, keys: Range<usize>) {
        let count = keys.len();
        // SAFETY: the caller vouches for the arrays.
        unsafe {
            self.pack_keys(simd, &keys);
            for lanes in pack::panels::<S>(self.block.rows.len()) {
                self.logits(simd, &lanes, 0..count, false);
                self.softmax(simd, &lanes, 0..count);
                self.accumulate(simd, &lanes, Depth::All(0..count));
            }
        }
    }

    /// Folds in a block of keys that the band or segments cut.
    ///
    /// # Safety
    /// `keys` of k and v may be read.
    #[inline(always)]
    unsafe fn partial<S: Simd>(&self, simd: S, keys: Range<usize>, segments: Coverage) {
        let (extras, compares) = (&self.block.tile.extras, segments == Coverage::Partial);
        // SAFETY: the caller vouches for the arrays.
        unsafe {
            self.pack_keys(simd, &keys);
            let exact = !pack::all_finite(simd, self.memory.v, keys.len() * self.memory.v_width);
            if exact && compares {
                // Each run by itself, so that no row meets values of another segment.
                for (run, id) in extras.runs(Which::Keys, self.block.batch, &keys) {
                    self.band(simd, (&keys, run), (compares, exact), Some(id));
                }
            } else {
                self.band(simd, (&keys, keys.clone()), (compares, exact), None);
            }
        }
    }

    /// Folds in a run of the block's keys, which all queries see as far as the band allows, or those
    /// of segment `only`.
    ///
    /// # Safety
    /// The keys are packed.
    #[inline(always)]
    unsafe fn band<S: Simd>(
        &self,
        simd: S,
        (keys, run): (&Range<usize>, Range<usize>),
        (compares, exact): (bool, bool),
        only: Option<i32>,
    ) {
        let (tile, queries) = (self.block.tile, &self.block.rows);
        let band = tile.band;
        let shift = |seen: Range<usize>, by: usize| seen.start - by..seen.end - by;
        let hidden = |i: usize| {
            only.is_some_and(|id| tile.extras.query_segment(self.block.batch, i) != Some(id))
        };
        for lanes in pack::panels::<S>(queries.len()) {
            let first = queries.start + lanes.start;
            let last = queries.end.min(queries.start + lanes.end) - 1;
            let seen_by = |i: usize| shift(band.keys_of(i, &run), keys.start);
            let seen = seen_by(first).start..seen_by(last).end;
            if seen.is_empty() {
                continue;
            }
            // SAFETY: the caller vouches for the keys.
            unsafe {
                self.logits(simd, &lanes, seen.clone(), compares);
                let across = queries.start + lanes.start..queries.start + lanes.end;
                softmax::mask(simd, self.memory.p, lanes.len(), seen.clone(), |j| {
                    shift(band.queries_of(keys.start + j, &across), across.start)
                });
                self.softmax(simd, &lanes, seen);
                let range = |row: usize| {
                    if hidden(first + row) { 0..0 } else { seen_by(first + row) }
                };
                self.accumulate(simd, &lanes, Depth::Rows { range: &range, exact });
            }
        }
    }

    /// # Safety
    /// `keys` of k and v may be read.
    #[inline(always)]
    unsafe fn pack_keys<S: Simd>(&self, simd: S, keys: &Range<usize>) {
        let (tile, memory) = (self.block.tile, &self.memory);
        self.load_side(Which::Keys, keys, keys.len());
        // SAFETY: the caller vouches for the arrays; the scratch is large enough.
        unsafe {
            self.keys_of(tile.k, keys.clone()).pack(simd, memory.k, memory.k_width);
            self.keys_of(tile.v, keys.clone()).pack(simd, memory.v, memory.v_width);
        }
    }

    /// Reads what features need to know of rows.
    fn load_side(&self, which: Which, rows: &Range<usize>, padded: usize) {
        let (tile, (queries, keys)) = (self.block.tile, self.memory.sides);
        let side = if which == Which::Queries { queries } else { keys };
        let at = (self.block.batch, extras::base(&tile.extras, &tile.q_rows));
        // SAFETY: the scratch is this thread's.
        unsafe { extras::load_side((&tile.extras, which), at, rows, padded, side) }
    }

    /// p = k qᵀ with what features make of it, for the packed keys in `keys`, with the queries of
    /// `lanes` in lanes; `compares`: other segments are masked.
    ///
    /// # Safety
    /// Keys and queries are packed.
    #[inline(always)]
    unsafe fn logits<S: Simd>(
        &self,
        simd: S,
        lanes: &Range<usize>,
        keys: Range<usize>,
        compares: bool,
    ) {
        let (memory, dim) = (&self.memory, self.block.tile.q.dim);
        // SAFETY: all of it is this thread's scratch.
        unsafe {
            let product = Product {
                a: memory.k,
                a_row: memory.k_width,
                a_depth: 1,
                b: memory.q.add(lanes.start * dim),
                b_depth: lanes.len(),
                c: memory.p,
                c_row: lanes.len(),
                rows: keys.clone(),
                vectors: lanes.len() / S::LANES,
                depth: Depth::All(0..dim),
                write: Write::Set,
            };
            product.compute(simd);
            if let Some(extras) = memory.extras {
                softmax::adjust(simd, memory.p, lanes.len(), keys, extras.on(lanes, compares));
            } else if let Some(cap) = self.block.tile.soft_cap {
                softmax::adjust(simd, memory.p, lanes.len(), keys, SoftCap::new(cap));
            }
        }
    }

    /// # Safety
    /// The panel holds logits of `keys`.
    #[inline(always)]
    unsafe fn softmax<S: Simd>(&self, simd: S, lanes: &Range<usize>, keys: Range<usize>) {
        let Online { m, l, alpha } = self.memory.online;
        // SAFETY: the state has all lanes.
        unsafe {
            let (m, l, alpha) = (m.add(lanes.start), l.add(lanes.start), alpha.add(lanes.start));
            let (p, across) = (self.memory.p, lanes.len());
            softmax::online(simd, p, across, keys.clone(), &Online { m, l, alpha });
            if let Some(extras) = self.memory.extras.filter(PanelExtras::drops) {
                let extras = extras.on(lanes, false);
                extras.fill_keep(keys.clone());
                softmax::drop_out(simd, p, across, keys, extras);
            }
        }
    }

    /// acc = acc·alpha + pᵀ v for the queries of `lanes`.
    ///
    /// # Safety
    /// The panel holds probabilities, and the values are packed.
    #[inline(always)]
    unsafe fn accumulate<S: Simd>(&self, simd: S, lanes: &Range<usize>, depth: Depth<'_>) {
        let memory = &self.memory;
        // SAFETY: all of it is this thread's scratch.
        unsafe {
            let product = Product {
                a: memory.p,
                a_row: 1,
                a_depth: lanes.len(),
                b: memory.v,
                b_depth: memory.v_width,
                c: memory.acc.add(lanes.start * memory.v_width),
                c_row: memory.v_width,
                rows: 0..lanes.end.min(self.block.rows.len()) - lanes.start,
                vectors: memory.v_width / S::LANES,
                depth,
                write: Write::Rescale(memory.online.alpha.add(lanes.start)),
            };
            product.compute(simd);
        }
    }

    /// Writes the state for the next tile.
    ///
    /// # Safety
    /// This task alone may write the block's rows of the state.
    #[inline(always)]
    unsafe fn save<S: Simd>(&self, simd: S) {
        let (memory, state) = (&self.memory, self.block.tile.state.as_ref());
        let Some(state) = state else { return };
        // SAFETY: the caller vouches for the arrays.
        unsafe {
            self.rows_of(state.acc).unpack(simd, memory.acc, memory.v_width, 1.0, false);
            self.rows_of(state.m).unpack_column(memory.online.m);
            self.rows_of(state.l).unpack_column(memory.online.l);
        }
    }

    /// Writes o and lse.
    ///
    /// # Safety
    /// This task alone may write the block's rows of them.
    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, simd: S) {
        let Block { tile, batch, head, ref rows } = *self.block;
        let (memory, Some((o, lse))) = (&self.memory, tile.out) else { return };
        for (i, row) in rows.clone().enumerate() {
            // SAFETY: the caller vouches for the arrays, and the scratch has every row.
            unsafe {
                let (m, l) = (*memory.online.m.add(i), *memory.online.l.add(i));
                let acc = memory.acc.add(i * memory.v_width);
                if l == 0.0 {
                    acc.write_bytes(0, memory.v_width);
                }
                let inverse = if l == 0.0 { 0.0 } else { 1.0 / l };
                let target = o.row(batch, row, head);
                pack::store_row(simd, acc, inverse, target, o.dtype, o.dim);
                // In float64, as the error of lse is one of every probability in the backward pass.
                let value = f64::from(m) + f64::from(l).ln();
                *lse.row(batch, row, head).cast::<f32>() = value as f32;
            }
        }
    }
}
