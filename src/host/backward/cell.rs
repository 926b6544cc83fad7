//! A task of the backward pass: a cell, which takes one block of keys after another, and for each
//! block of keys all blocks of queries that see it.

use std::ops::Range;
use std::sync::atomic::AtomicU64;

use super::super::features::{FeatureScratch, PanelFeatures};
use super::super::matmul::{Depth, Matrix, even_parts};
use super::super::pack;
use super::super::scratch::{Scratch, ScratchTask};
use super::super::simd::Simd;
use super::super::softmax::{self, NoFeatures, SoftCap};
use super::{BackwardTile, slopes};
use crate::mask::Coverage;
use crate::operands::Side;

/// Most queries of an inner block: whole register tiles of 6 and 4 rows.
const BLOCK_QUERIES: usize = 96;
/// Most keys of a block.
const BLOCK_KEYS: usize = 256;
/// Most floats of a block of keys: five such blocks have to stay in the second-level cache.
const BLOCK_FLOATS: usize = 32768;

/// Some keys of a key head, with some queries of all heads that use it.
pub(super) struct Cell<'a> {
    pub tile: &'a BackwardTile<'a>,
    /// Batch entry and key/value head.
    pub kv_head: (usize, usize),
    pub queries: Range<usize>,
    pub keys: Range<usize>,
    /// Whether to overwrite dk and dv instead of adding to them.
    pub overwrite: bool,
    /// The cell's sums for the gradients of the slopes; none without slopes.
    pub slopes: &'a [AtomicU64],
}

/// The scratch of a cell.
#[derive(Clone, Copy)]
pub(super) struct CellScratch {
    /// Keys as rows.
    pub k: Matrix,
    /// Keys as columns, in panels.
    pub k_columns: *mut f32,
    /// Values as columns, in panels.
    pub v_columns: *mut f32,
    pub dk: Matrix,
    pub dv: Matrix,
    pub q: Matrix,
    pub dout: Matrix,
    pub dq: Matrix,
    /// Logits, then probabilities, of one panel.
    pub p: *mut f32,
    /// dp, then ds, of one panel.
    pub ds: *mut f32,
    pub lse: *mut f32,
    pub delta: *mut f32,
    pub features: FeatureScratch,
    /// Most keys of a block.
    pub block_keys: usize,
}

impl ScratchTask for Cell<'_> {
    type Parts = CellScratch;

    fn lay_out<S: Simd>(&self, scratch: &mut Scratch) -> CellScratch {
        let inputs = &self.tile.inputs;
        let [k_width, v_width] = [inputs.k, inputs.v].map(|x| x.dim.next_multiple_of(S::LANES));
        let lanes = S::LANES * S::TILE_VECTORS;
        let most = (BLOCK_FLOATS / k_width.max(v_width)).min(BLOCK_KEYS).next_multiple_of(lanes);
        let block_keys = most.min(self.keys.len().next_multiple_of(S::LANES));
        let (blocks, panel) = ([BLOCK_QUERIES, block_keys], lanes * BLOCK_QUERIES);
        CellScratch {
            k: Matrix::take(scratch, (block_keys, k_width)),
            k_columns: scratch.take(k_width * block_keys),
            v_columns: scratch.take(v_width * block_keys),
            dk: Matrix::take(scratch, (block_keys, k_width)),
            dv: Matrix::take(scratch, (block_keys, v_width)),
            q: Matrix::take(scratch, (BLOCK_QUERIES, k_width)),
            dout: Matrix::take(scratch, (BLOCK_QUERIES, v_width)),
            dq: Matrix::take(scratch, (BLOCK_QUERIES, k_width)),
            p: scratch.take(panel),
            ds: scratch.take(panel),
            lse: scratch.take(BLOCK_QUERIES),
            delta: scratch.take(BLOCK_QUERIES),
            features: FeatureScratch::take(scratch, &inputs.features, blocks, panel),
            block_keys,
        }
    }

    #[inline(always)]
    unsafe fn work<S: Simd>(&self, simd: S, scratch: CellScratch) {
        // SAFETY: the caller of `backward` guarantees that the arrays have the tile's rows, that
        // nothing writes its inputs meanwhile, and that this call alone uses the rows of the
        // gradients. `each_cell` runs no other cell with the same rows of them at a time. The
        // scratch is this task's.
        unsafe { CellTask { cell: self, scratch }.add(simd) }
    }
}

/// A cell with its scratch.
///
/// Every method relies on what [`Cell::work`] guarantees: the scratch is this task's, and the
/// arrays have the rows of the tile. The methods ask their callers for the rest.
pub(super) struct CellTask<'a> {
    pub cell: &'a Cell<'a>,
    pub scratch: CellScratch,
}

impl CellTask<'_> {
    /// Adds the gradients of all pairs of the cell.
    ///
    /// # Safety
    /// The caller guarantees that the inputs are readable, and that the cell's rows of the
    /// gradients are this task's.
    #[inline(always)]
    unsafe fn add<S: Simd>(&self, simd: S) {
        let Cell { tile, kv_head, ref queries, ref keys, overwrite, .. } = *self.cell;
        let (batch, kv_head) = kv_head;
        let (inputs, block_keys) = (&tile.inputs, self.scratch.block_keys);
        let (group_size, visibility) =
            (inputs.q.heads / inputs.k.heads, &inputs.features.visibility);
        for start in keys.clone().step_by(block_keys) {
            let keys = start..keys.end.min(start + block_keys);
            // The band's edges rise with the row, so the first and the last row bound all rows
            // between.
            let seeing = inputs.band.queries_of(keys.start, queries).start
                ..inputs.band.queries_of(keys.end - 1, queries).end;
            // With packed documents most cells are empty. Packing the keys of empty cells made 64
            // documents take three times as long.
            let own = visibility.of_keys(batch, &keys);
            let coverage = |queries: &Range<usize>| {
                visibility.coverage(&visibility.of_queries(batch, queries), &own)
            };
            let meet = coverage(&seeing) != Coverage::Empty;
            if (seeing.is_empty() || !meet) && !overwrite {
                continue;
            }
            // SAFETY: the caller guarantees the inputs and the gradients.
            unsafe {
                self.start_keys(simd, &keys);
                for head in kv_head * group_size..(kv_head + 1) * group_size {
                    for part in even_parts(seeing.len(), BLOCK_QUERIES) {
                        let queries = seeing.start + part.start..seeing.start + part.end;
                        let data = coverage(&queries);
                        match inputs.band.coverage(&queries, &keys).and(data) {
                            Coverage::Empty => {}
                            Coverage::Full => self.add_full(simd, head, queries, &keys),
                            Coverage::Partial => {
                                self.add_partial(simd, (head, queries), &keys, data);
                            }
                        }
                    }
                }
                self.write_key_gradients(simd, &keys);
            }
        }
    }

    /// Adds the gradients of a block of queries that see all keys of the block.
    ///
    /// # Safety
    /// The caller guarantees that the keys are packed, that `queries` of the inputs are readable,
    /// and that `queries` of dq are this task's.
    #[inline(always)]
    unsafe fn add_full<S: Simd>(
        &self,
        simd: S,
        head: usize,
        queries: Range<usize>,
        keys: &Range<usize>,
    ) {
        let (tile, count) = (self.cell.tile, queries.len());
        // SAFETY: the caller guarantees the keys and the rows of the arrays, and `pack_queries`
        // packs the queries.
        unsafe {
            self.pack_queries(simd, head, &queries);
            for lanes in pack::panels::<S>(keys.len()) {
                self.logits(simd, &lanes, 0..count);
                let in_panel = lanes.end.min(keys.len()) - lanes.start;
                tile.inputs.count_pairs(count, in_panel);
                if !self.cell.slopes.is_empty() {
                    // Lanes beyond the keys may hold anything, but must not be part of a sum.
                    let all = Some(|_: usize| 0..in_panel);
                    self.softmax(simd, head, &lanes, 0..count, (all, false));
                } else {
                    let none: Option<fn(usize) -> Range<usize>> = None;
                    self.softmax(simd, head, &lanes, 0..count, (none, false));
                }
                self.key_gradients(simd, &lanes, in_panel, Depth::All(0..count));
                self.query_gradients(simd, &lanes, 0..count, Depth::All(0..in_panel));
            }
            self.write_query_gradients(simd, head, &queries);
        }
    }

    /// Adds the gradients of a block of queries and keys that the band or data cut.
    ///
    /// # Safety
    /// The caller guarantees that the keys are packed, that `queries` of the inputs are readable,
    /// and that `queries` of dq are this task's.
    #[inline(always)]
    unsafe fn add_partial<S: Simd>(
        &self,
        simd: S,
        (head, queries): (usize, Range<usize>),
        keys: &Range<usize>,
        data: Coverage,
    ) {
        let visibility = &self.cell.tile.inputs.features.visibility;
        let (batch, compares) = (self.cell.kv_head.0, data == Coverage::Partial);
        // SAFETY: the caller guarantees the keys and the rows of the arrays, and `pack_queries`
        // packs the queries.
        unsafe {
            self.pack_queries(simd, head, &queries);
            let exact = !self.all_finite(simd, queries.len(), keys.len());
            if !(exact && compares) {
                self.add_band(simd, (head, &queries), (keys, keys), (compares, exact));
                return;
            }
            // Each pair of ranges is added by itself, so that no row meets values that it does not
            // see.
            for range in visibility.key_ranges(batch, keys) {
                for queries in visibility.query_ranges(batch, &queries, range.start) {
                    self.pack_queries(simd, head, &queries);
                    self.add_band(simd, (head, &queries), (keys, &range), (false, exact));
                }
            }
        }
    }

    /// Adds the gradients of packed queries and a range of the block's keys, as far as the band and
    /// data allow.
    ///
    /// # Safety
    /// The caller guarantees that keys and queries are packed, and that `queries` of dq are this
    /// task's.
    #[inline(always)]
    unsafe fn add_band<S: Simd>(
        &self,
        simd: S,
        (head, queries): (usize, &Range<usize>),
        (keys, range): (&Range<usize>, &Range<usize>),
        (compares, exact): (bool, bool),
    ) {
        let inputs = &self.cell.tile.inputs;
        let (band, visibility, batch) =
            (inputs.band, &inputs.features.visibility, self.cell.kv_head.0);
        let shift = |seen: Range<usize>, by: usize| seen.start - by..seen.end - by;
        // SAFETY: the caller guarantees that keys and queries are packed, and the rows of dq.
        unsafe {
            for lanes in pack::panels::<S>(keys.len()) {
                let panel = keys.start + lanes.start..keys.end.min(keys.start + lanes.end);
                let within = panel.start.max(range.start)..panel.end.min(range.end);
                if within.is_empty() {
                    continue;
                }
                let mut some = band.queries_of(within.start, queries).start
                    ..band.queries_of(within.end - 1, queries).end;
                if compares {
                    let keys = visibility.of_keys(batch, &within);
                    some = visibility.trim_queries(batch, some, &keys);
                }
                if some.is_empty() {
                    continue;
                }
                let rows = shift(some.clone(), queries.start);
                let seeing = |j: usize| shift(band.queries_of(j, &some), queries.start);
                let seen =
                    |row: usize| shift(band.keys_of(queries.start + row, &within), panel.start);
                self.logits(simd, &lanes, rows.clone());
                inputs.count_pairs(rows.len(), panel.len());
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
            self.write_query_gradients(simd, head, queries);
        }
    }

    /// Whether all operands are finite whose masked products rely on multiplications by 0.
    ///
    /// # Safety
    /// The caller guarantees that keys and queries are packed.
    #[inline(always)]
    unsafe fn all_finite<S: Simd>(&self, simd: S, queries: usize, keys: usize) -> bool {
        let CellScratch { k, q, dout, .. } = self.scratch;
        // SAFETY: the caller guarantees that the scratch holds these rows.
        unsafe {
            pack::all_finite(simd, k.at, keys * k.row)
                && pack::all_finite(simd, q.at, queries * q.row)
                && pack::all_finite(simd, dout.at, queries * dout.row)
        }
    }

    /// Computes probabilities and ds in the panels. `seen`: the keys that each row sees, and
    /// whether data may hide pairs.
    ///
    /// # Safety
    /// The caller guarantees that the panels hold logits and dp of `rows`.
    #[inline(always)]
    unsafe fn softmax<S: Simd>(
        &self,
        simd: S,
        head: usize,
        lanes: &Range<usize>,
        rows: Range<usize>,
        (seen, compares): (Option<impl Fn(usize) -> Range<usize>>, bool),
    ) {
        let (Cell { tile, kv_head: (batch, _), slopes, .. }, scratch) = (self.cell, &self.scratch);
        let statistics = (scratch.lse.cast_const(), scratch.delta.cast_const());
        let panels = [scratch.p, scratch.ds].map(|at| Matrix { at, row: lanes.len() });
        let inputs = &tile.inputs;
        let features = PanelFeatures::new(inputs, (*batch, head), Side::Keys, scratch.features);
        // Each call compiles its own function, so a tile pays for the features that it has.
        // SAFETY: the caller guarantees the panels. `pack_queries` and `start_keys` loaded lse,
        // delta and the features.
        unsafe {
            if let Some(features) = features.and_then(|all| all.on(lanes, compares)) {
                features.fill_keep(rows.clone());
                let features = (features, !slopes.is_empty());
                let sum = softmax::gradients(simd, panels, rows, statistics, seen, features);
                if let Some(total) = slopes.get(batch * inputs.q.heads + head) {
                    // Distances are query − key position, so the sum is subtracted.
                    slopes::subtract(total, sum);
                }
            } else if let Some(cap) = inputs.soft_cap.map(SoftCap::new) {
                softmax::gradients(simd, panels, rows, statistics, seen, (cap, false));
            } else {
                softmax::gradients(simd, panels, rows, statistics, seen, (NoFeatures, false));
            }
        }
    }
}
