//! A task of the forward pass: a block of queries, which takes one block of keys after another.

use std::ops::Range;

use super::super::features::{FeatureScratch, PanelFeatures};
use super::super::matmul::{Depth, Matrix, Product, Write};
use super::super::pack;
use super::super::scratch::{Scratch, ScratchTask};
use super::super::simd::Simd;
use super::super::softmax::{self, Online, SoftCap};
use super::ForwardTile;
use crate::mask::Coverage;
use crate::operands::Side;

/// Keys between two rescalings.
const BLOCK_KEYS: usize = 128;

/// A block of queries of one head, with all keys of the tile.
pub(super) struct Block<'a> {
    pub tile: &'a ForwardTile<'a>,
    /// Batch entry and query head.
    pub head: (usize, usize),
    pub rows: Range<usize>,
}

/// The scratch of a block.
pub(super) struct BlockScratch {
    /// Queries as columns, in panels.
    q: *mut f32,
    k: Matrix,
    v: Matrix,
    /// Logits, then probabilities, of one panel.
    p: *mut f32,
    acc: Matrix,
    online: Online,
    features: FeatureScratch,
}

impl ScratchTask for Block<'_> {
    type Parts = BlockScratch;

    fn lay_out<S: Simd>(&self, scratch: &mut Scratch) -> BlockScratch {
        let inputs = &self.tile.inputs;
        let [k_width, v_width] = [inputs.k, inputs.v].map(|x| x.dim.next_multiple_of(S::LANES));
        let lanes = self.rows.len().next_multiple_of(S::LANES);
        let panel = BLOCK_KEYS * S::LANES * S::TILE_VECTORS;
        BlockScratch {
            q: scratch.take(k_width * lanes),
            k: Matrix::take(scratch, (BLOCK_KEYS.max(self.rows.len()), k_width)),
            v: Matrix::take(scratch, (BLOCK_KEYS, v_width)),
            p: scratch.take(panel),
            acc: Matrix::take(scratch, (lanes, v_width)),
            online: Online {
                m: scratch.take(lanes),
                l: scratch.take(lanes),
                alpha: scratch.take(lanes),
            },
            features: FeatureScratch::take(scratch, &inputs.features, [lanes, BLOCK_KEYS], panel),
        }
    }

    #[inline(always)]
    unsafe fn work<S: Simd>(&self, simd: S, scratch: BlockScratch) {
        let inputs = &self.tile.inputs;
        let features = PanelFeatures::new(inputs, self.head, Side::Queries, scratch.features);
        // SAFETY: the caller of `forward` guarantees that the arrays have the tile's rows, that
        // nothing writes its inputs meanwhile, and that this call alone uses the rows of the state
        // and of the outputs. This task alone uses its block of them. The scratch is this task's.
        unsafe { BlockTask { block: self, scratch, features }.fold(simd) }
    }
}

/// A block with its scratch and the features of its head.
///
/// Every method relies on what [`Block::work`] guarantees: the scratch is this task's, and the
/// arrays have the rows of the tile. The methods ask their callers for the rest.
struct BlockTask<'a> {
    block: &'a Block<'a>,
    scratch: BlockScratch,
    features: Option<PanelFeatures>,
}

impl BlockTask<'_> {
    /// Folds all keys of the tile that the block sees.
    ///
    /// # Safety
    /// The caller guarantees that the inputs are readable, and that the block's rows of the state
    /// and of the outputs are this task's.
    #[inline(always)]
    unsafe fn fold<S: Simd>(&self, simd: S) {
        let Block { tile, head: (batch, _), rows: ref queries } = *self.block;
        let inputs = &tile.inputs;
        // The band's edges rise with the row, so the first and the last row bound all rows between.
        let seen = inputs.band.keys_of(queries.start, &inputs.k_rows).start
            ..inputs.band.keys_of(queries.end - 1, &inputs.k_rows).end;
        let visibility = &inputs.features.visibility;
        let own = visibility.of_queries(batch, queries);
        let coverage =
            |keys: &Range<usize>| visibility.coverage(&own, &visibility.of_keys(batch, keys));
        let meet = coverage(&seen) != Coverage::Empty;
        if (seen.is_empty() || !meet) && !tile.first && !tile.last {
            return;
        }
        // SAFETY: the caller guarantees the inputs, the state and the outputs.
        unsafe {
            self.start(simd);
            for start in seen.clone().step_by(BLOCK_KEYS) {
                let keys = start..seen.end.min(start + BLOCK_KEYS);
                let data = coverage(&keys);
                match inputs.band.coverage(queries, &keys).and(data) {
                    Coverage::Empty => {}
                    Coverage::Full => self.fold_full(simd, keys),
                    Coverage::Partial => self.fold_partial(simd, keys, data),
                }
            }
            if tile.last { self.write_outputs(simd) } else { self.save_state(simd) }
        }
    }

    /// Packs the queries, and loads their state or starts a new one.
    ///
    /// # Safety
    /// The caller guarantees that the block's rows of q and of the state are readable.
    #[inline(always)]
    unsafe fn start<S: Simd>(&self, simd: S) {
        let (&Block { tile, head, ref rows }, scratch) = (self.block, &self.scratch);
        let (len, online) = (rows.len(), &scratch.online);
        let (q, scale) = (tile.inputs.q, tile.inputs.softmax_scale);
        let lanes = len.next_multiple_of(S::LANES);
        // SAFETY: the caller guarantees the rows of the arrays, and the scratch has room for a
        // block of queries.
        unsafe {
            scratch.features.load((&tile.inputs, Side::Queries), head.0, rows, lanes);
            q.head_rows(head, rows).pack(simd, scratch.k);
            pack::transpose(simd, scratch.k, (len, q.dim), scale, scratch.q);
            for lane in 0..lanes {
                *online.m.add(lane) = f32::NEG_INFINITY;
                *online.l.add(lane) = 0.0;
                *online.alpha.add(lane) = 1.0;
            }
            match &tile.state {
                Some(state) if !tile.first => {
                    state.acc.head_rows(head, rows).pack(simd, scratch.acc);
                    state.m.head_rows(head, rows).pack_column(online.m);
                    state.l.head_rows(head, rows).pack_column(online.l);
                }
                _ => scratch.acc.clear(len),
            }
        }
    }

    /// Returns the panel of logits or probabilities of the queries of `lanes`.
    fn panel(&self, lanes: &Range<usize>) -> Matrix {
        Matrix { at: self.scratch.p, row: lanes.len() }
    }

    /// Folds a block of keys that every query sees.
    ///
    /// # Safety
    /// The caller guarantees that `keys` of k and v are readable.
    #[inline(always)]
    unsafe fn fold_full<S: Simd>(&self, simd: S, keys: Range<usize>) {
        let count = keys.len();
        // SAFETY: the caller guarantees the keys and values, and `pack_keys` packs them.
        unsafe {
            self.pack_keys(simd, &keys);
            for lanes in pack::panels::<S>(self.block.rows.len()) {
                self.logits(simd, &lanes, 0..count, false);
                self.softmax(simd, &lanes, 0..count);
                self.fold_values(simd, &lanes, Depth::All(0..count));
            }
        }
    }

    /// Folds a block of keys that the band or data cut.
    ///
    /// # Safety
    /// The caller guarantees that `keys` of k and v are readable.
    #[inline(always)]
    unsafe fn fold_partial<S: Simd>(&self, simd: S, keys: Range<usize>, data: Coverage) {
        let visibility = &self.block.tile.inputs.features.visibility;
        let (compares, v) = (data == Coverage::Partial, self.scratch.v);
        // SAFETY: the caller guarantees the keys and values, and `pack_keys` packs them.
        unsafe {
            self.pack_keys(simd, &keys);
            let exact = !pack::all_finite(simd, v.at, keys.len() * v.row);
            if exact && compares {
                // Each range is folded by itself, so that no row meets values that it does not see.
                for range in visibility.key_ranges(self.block.head.0, &keys) {
                    self.fold_band(simd, (&keys, range), (compares, exact));
                }
            } else {
                self.fold_band(simd, (&keys, keys.clone()), (compares, exact));
            }
        }
    }

    /// Folds a range of the block's keys, as far as the band and data allow. With `compares` and
    /// `exact`, data treat all keys of the range alike, and only queries that see them take part.
    ///
    /// # Safety
    /// The caller guarantees that the keys and values are packed.
    #[inline(always)]
    unsafe fn fold_band<S: Simd>(
        &self,
        simd: S,
        (keys, range): (&Range<usize>, Range<usize>),
        (compares, exact): (bool, bool),
    ) {
        let Block { tile, head: (batch, _), rows: ref queries } = *self.block;
        let (band, visibility) = (tile.inputs.band, &tile.inputs.features.visibility);
        let shift = |seen: Range<usize>, by: usize| seen.start - by..seen.end - by;
        let hidden = |row: usize| compares && exact && !visibility.sees(batch, row, range.start);
        for lanes in pack::panels::<S>(queries.len()) {
            let first = queries.start + lanes.start;
            let end = queries.end.min(queries.start + lanes.end);
            let mut seen = band.keys_of(first, &range).start..band.keys_of(end - 1, &range).end;
            if compares {
                seen =
                    visibility.trim_keys(batch, &visibility.of_queries(batch, &(first..end)), seen);
            }
            if seen.is_empty() {
                continue;
            }
            let within = seen.clone();
            let seen = shift(seen, keys.start);
            // SAFETY: the caller guarantees that the keys and values are packed; `start` has packed
            // the queries.
            unsafe {
                self.logits(simd, &lanes, seen.clone(), compares);
                let across = queries.start + lanes.start..queries.start + lanes.end;
                softmax::mask(simd, self.panel(&lanes), seen.clone(), |j| {
                    shift(band.queries_of(keys.start + j, &across), across.start)
                });
                self.softmax(simd, &lanes, seen);
                let range = |row: usize| match hidden(first + row) {
                    true => 0..0,
                    false => shift(band.keys_of(first + row, &within), keys.start),
                };
                self.fold_values(simd, &lanes, Depth::Rows { range: &range, exact });
            }
        }
    }

    /// Packs a block of keys and values.
    ///
    /// # Safety
    /// The caller guarantees that `keys` of k and v are readable.
    #[inline(always)]
    unsafe fn pack_keys<S: Simd>(&self, simd: S, keys: &Range<usize>) {
        let (inputs, scratch) = (&self.block.tile.inputs, &self.scratch);
        let (batch, head) = self.block.head;
        let head = (batch, head / (inputs.q.heads / inputs.k.heads));
        // SAFETY: the caller guarantees the rows of the arrays, and the scratch has room for a
        // block of keys.
        unsafe {
            scratch.features.load((inputs, Side::Keys), batch, keys, keys.len());
            inputs.k.head_rows(head, keys).pack(simd, scratch.k);
            inputs.v.head_rows(head, keys).pack(simd, scratch.v);
        }
    }

    /// Computes p = k qᵀ, as features change it, for the packed keys in `keys` and the queries of
    /// `lanes`. `compares`: whether data may hide pairs.
    ///
    /// # Safety
    /// The caller guarantees that keys and queries are packed.
    #[inline(always)]
    unsafe fn logits<S: Simd>(
        &self,
        simd: S,
        lanes: &Range<usize>,
        keys: Range<usize>,
        compares: bool,
    ) {
        let (scratch, inputs) = (&self.scratch, &self.block.tile.inputs);
        let (dim, p) = (inputs.q.dim, self.panel(lanes));
        inputs.count_pairs(lanes.end.min(self.block.rows.len()) - lanes.start, keys.len());
        // SAFETY: all three matrices are scratch of this task, and the caller guarantees that keys
        // and queries are packed.
        unsafe {
            let product = Product {
                a: scratch.k.left(),
                b: pack::panel(scratch.q, lanes, dim),
                c: p,
                rows: keys.clone(),
                vectors: lanes.len() / S::LANES,
                depth: Depth::All(0..dim),
                write: Write::Set,
            };
            product.compute(simd);
            if let Some(features) = self.features.and_then(|all| all.on(lanes, compares)) {
                softmax::adjust(simd, p, keys, features);
            } else if let Some(cap) = inputs.soft_cap {
                softmax::adjust(simd, p, keys, SoftCap::new(cap));
            }
        }
    }

    /// Makes probabilities of the logits of a panel, and drops weights.
    ///
    /// # Safety
    /// The caller guarantees that the panel holds logits of `keys`.
    #[inline(always)]
    unsafe fn softmax<S: Simd>(&self, simd: S, lanes: &Range<usize>, keys: Range<usize>) {
        let Online { m, l, alpha } = self.scratch.online;
        // SAFETY: the panel and the state are scratch of this task, and the state has all lanes.
        unsafe {
            let (m, l, alpha) = (m.add(lanes.start), l.add(lanes.start), alpha.add(lanes.start));
            let p = self.panel(lanes);
            softmax::online(simd, p, keys.clone(), &Online { m, l, alpha });
            let features = self.features.filter(PanelFeatures::drops);
            if let Some(features) = features.and_then(|all| all.on(lanes, false)) {
                features.fill_keep(keys.clone());
                softmax::drop_out(simd, p, keys, features);
            }
        }
    }

    /// Computes acc = acc·alpha + pᵀ v for the queries of `lanes`.
    ///
    /// # Safety
    /// The caller guarantees that the panel holds probabilities, and that the values are packed.
    #[inline(always)]
    unsafe fn fold_values<S: Simd>(&self, simd: S, lanes: &Range<usize>, depth: Depth<'_>) {
        let scratch = &self.scratch;
        // SAFETY: all three matrices are scratch of this task, and the caller guarantees what the
        // panel and the values hold.
        unsafe {
            let product = Product {
                a: self.panel(lanes).transposed(),
                b: scratch.v,
                c: scratch.acc.skip(lanes.start),
                rows: 0..lanes.end.min(self.block.rows.len()) - lanes.start,
                vectors: scratch.v.row / S::LANES,
                depth,
                write: Write::Rescale(scratch.online.alpha.add(lanes.start)),
            };
            product.compute(simd);
        }
    }

    /// Writes the state for the next tile.
    ///
    /// # Safety
    /// The caller guarantees that the block's rows of the state are this task's.
    #[inline(always)]
    unsafe fn save_state<S: Simd>(&self, simd: S) {
        let (&Block { tile, head, ref rows }, scratch) = (self.block, &self.scratch);
        let Some(state) = &tile.state else { return };
        // SAFETY: the caller guarantees the rows of the state, and the scratch has all rows.
        unsafe {
            state.acc.head_rows(head, rows).unpack(simd, scratch.acc, 1.0, false);
            state.m.head_rows(head, rows).unpack_column(scratch.online.m);
            state.l.head_rows(head, rows).unpack_column(scratch.online.l);
        }
    }

    /// Writes o and lse.
    ///
    /// # Safety
    /// The caller guarantees that the block's rows of the outputs are this task's.
    #[inline(always)]
    unsafe fn write_outputs<S: Simd>(&self, simd: S) {
        let Block { tile, head: (batch, head), ref rows } = *self.block;
        let (scratch, Some(out)) = (&self.scratch, tile.out) else { return };
        for (i, row) in rows.clone().enumerate() {
            // SAFETY: the caller guarantees the row of the outputs, and the scratch has all rows.
            unsafe {
                let state = (*scratch.online.m.add(i), *scratch.online.l.add(i));
                out.write(simd, (batch, row, head), scratch.acc.skip(i).at, state);
            }
        }
    }
}
