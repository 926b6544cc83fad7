//! The forward tile: online softmax over blocks of keys.

use std::f32::consts::LOG2_E;
use std::f64::consts::LN_2;
use std::ops::Range;

use rayon::prelude::*;

use super::array::HostArray;
use super::isa::Isa;
use super::matmul::{Depth, Product, SameDepth, Write};
use super::pack::{self, Rows, Scratch};
use super::simd::{Simd, Task};
use super::softmax::{self, Online};
use crate::mask::{Band, Coverage};

/// Most queries per task. Every task packs the keys anew: 192 ms with 256, 200 ms with 128 (one
/// thread, 4096 causal rows of 8 heads × 64, Zen 4).
const BLOCK_QUERIES: usize = 256;
/// Fewest queries per task, where there are few tasks.
const SMALL_BLOCK_QUERIES: usize = 128;
/// Tasks that are enough to keep many threads busy evenly.
const MANY_TASKS: usize = 64;
/// Keys between two rescalings.
const BLOCK_KEYS: usize = 128;

/// The running state of query rows between tiles, float32. Only [`forward`] gives it a meaning.
#[derive(Debug, Clone, Copy)]
pub struct Partial<'a> {
    /// Σ 2^(s − m) v with s the logits times log2(e), `[batch, rows, heads, v's dim]`.
    pub acc: &'a HostArray,
    /// Largest s so far, dim 1; −∞ before the first.
    pub m: &'a HostArray,
    /// Σ 2^(s − m), dim 1.
    pub l: &'a HostArray,
}

/// A rectangle of queries × keys of one rank.
#[derive(Debug, Clone)]
pub struct ForwardTile<'a> {
    /// Queries.
    pub q: &'a HostArray,
    /// Keys; query head h uses key head h / group_size.
    pub k: &'a HostArray,
    /// Values.
    pub v: &'a HostArray,
    /// Read unless `first`, written unless `last`.
    pub state: Option<Partial<'a>>,
    /// o in q's type and lse (float32, dim 1); written if `last`.
    pub out: Option<(&'a HostArray, &'a HostArray)>,
    /// Query rows, counted from the start of their owner's shard.
    pub q_rows: Range<usize>,
    /// Key rows likewise; may be empty.
    pub k_rows: Range<usize>,
    /// Who sees whom, in the same counts.
    pub band: Band,
    /// No keys came before.
    pub first: bool,
    /// No keys come after.
    pub last: bool,
    /// Factor on q·k.
    pub softmax_scale: f32,
}

/// Folds the tile's keys into the state of its queries:
///
/// ```text
/// s = softmax_scale · log2(e) · q kᵀ, −∞ outside the band
/// m' = max(m, rowmax s);  l' = l·2^(m−m') + rowsum 2^(s−m');  acc' = acc·2^(m−m') + 2^(s−m') v
/// last: o = acc / l;  lse = (m + log2 l) · ln 2;  without any key o = 0 and lse = −∞
/// ```
///
/// The result does not depend on the number of threads.
///
/// # Panics
/// If the CPU lacks `isa`, or `state` or `out` is missing where it is needed.
pub fn forward(isa: Isa, pool: &rayon::ThreadPool, tile: &ForwardTile<'_>) {
    assert!(tile.state.is_some() || (tile.first && tile.last), "a tile of several has a state");
    assert!(tile.out.is_some() || !tile.last, "the last tile has somewhere to write to");
    let (batch, heads) = (tile.q.batch, tile.q.heads);
    let most = match tile.q_rows.len().div_ceil(BLOCK_QUERIES) * batch * heads {
        MANY_TASKS.. => BLOCK_QUERIES,
        _ => SMALL_BLOCK_QUERIES,
    };
    let blocks = tile.q_rows.len().div_ceil(most);
    let compute = |task: usize| {
        let (outer, block) = (task / blocks, task % blocks);
        let start = tile.q_rows.start + block * most;
        let rows = start..tile.q_rows.end.min(start + most);
        isa.run(Block { tile, batch: outer / heads, head: outer % heads, rows });
    };
    pool.install(|| {
        (0..batch * heads * blocks).into_par_iter().with_max_len(1).for_each(compute);
    });
}

/// A task: one block of queries of one head, with all keys of the tile.
struct Block<'a> {
    tile: &'a ForwardTile<'a>,
    batch: usize,
    head: usize,
    rows: Range<usize>,
}

/// A task's scratch.
struct Memory {
    /// Queries as columns, in panels.
    q: *mut f32,
    k: *mut f32,
    v: *mut f32,
    /// Logits, then probabilities, of one panel.
    p: *mut f32,
    acc: *mut f32,
    online: Online,
    /// Floats per row of k, and of v and acc.
    k_width: usize,
    v_width: usize,
}

impl Task for Block<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let k_width = self.tile.k.dim.next_multiple_of(S::LANES);
        let v_width = self.tile.v.dim.next_multiple_of(S::LANES);
        let lanes = self.rows.len().next_multiple_of(S::LANES);
        let sizes = [
            k_width * lanes,
            k_width * BLOCK_KEYS.max(self.rows.len()),
            v_width * BLOCK_KEYS,
            BLOCK_KEYS * S::LANES * S::TILE_VECTORS,
            v_width * lanes,
            lanes,
            lanes,
            lanes,
        ];
        let total = sizes.iter().map(|len| Scratch::footprint(*len)).sum();
        Scratch::with(total, |mut scratch| {
            let [q, k, v, p, acc, m, l, alpha] = sizes.map(|len| scratch.take(len));
            let online = Online { m, l, alpha };
            let memory = Memory { q, k, v, p, acc, online, k_width, v_width };
            simd.vectorize(Walk { block: &self, memory });
        });
    }
}

/// A block with its scratch.
struct Walk<'a> {
    block: &'a Block<'a>,
    memory: Memory,
}

impl Task for Walk<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (tile, queries) = (self.block.tile, &self.block.rows);
        // SAFETY: the scratch is this thread's; the tile's rows are this task's to write, and
        // nobody writes its inputs meanwhile.
        unsafe {
            self.begin(simd);
            // The band's edges rise with the row, so the first and the last row bound the rest.
            let seen = tile.band.keys_of(queries.start, &tile.k_rows).start
                ..tile.band.keys_of(queries.end - 1, &tile.k_rows).end;
            for start in seen.clone().step_by(BLOCK_KEYS) {
                let keys = start..seen.end.min(start + BLOCK_KEYS);
                match tile.band.coverage(queries, &keys) {
                    Coverage::Empty => {}
                    Coverage::Full => self.full(simd, keys),
                    Coverage::Partial => self.partial(simd, keys),
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
        let scale_log2 = tile.softmax_scale * LOG2_E;
        // SAFETY: the caller vouches for the arrays; the scratch is large enough.
        unsafe {
            self.rows_of(tile.q).pack(simd, memory.k, memory.k_width);
            let dim = tile.q.dim;
            pack::transpose(simd, memory.k, memory.k_width, len, dim, scale_log2, memory.q);
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
                self.logits(simd, &lanes, 0..count);
                self.softmax(simd, &lanes, 0..count);
                let depth: Depth<SameDepth> = Depth::All(0..count);
                self.accumulate(simd, &lanes, depth);
            }
        }
    }

    /// Folds in a block of keys that the band cuts.
    ///
    /// # Safety
    /// `keys` of k and v may be read.
    #[inline(always)]
    unsafe fn partial<S: Simd>(&self, simd: S, keys: Range<usize>) {
        let (band, queries) = (self.block.tile.band, &self.block.rows);
        let shift = |seen: Range<usize>, by: usize| seen.start - by..seen.end - by;
        // SAFETY: the caller vouches for the arrays.
        unsafe {
            self.pack_keys(simd, &keys);
            let exact = !pack::all_finite(simd, self.memory.v, keys.len() * self.memory.v_width);
            for lanes in pack::panels::<S>(queries.len()) {
                let first = queries.start + lanes.start;
                let last = queries.end.min(queries.start + lanes.end) - 1;
                let seen_by = |i: usize| shift(band.keys_of(i, &keys), keys.start);
                let seen = seen_by(first).start..seen_by(last).end;
                if seen.is_empty() {
                    continue;
                }
                self.logits(simd, &lanes, seen.clone());
                let across = queries.start + lanes.start..queries.start + lanes.end;
                softmax::mask(simd, self.memory.p, lanes.len(), seen.clone(), |j| {
                    shift(band.queries_of(keys.start + j, &across), across.start)
                });
                self.softmax(simd, &lanes, seen);
                let range = |row: usize| seen_by(first + row);
                self.accumulate(simd, &lanes, Depth::Rows { range, exact });
            }
        }
    }

    /// # Safety
    /// `keys` of k and v may be read.
    #[inline(always)]
    unsafe fn pack_keys<S: Simd>(&self, simd: S, keys: &Range<usize>) {
        let (tile, memory) = (self.block.tile, &self.memory);
        // SAFETY: the caller vouches for the arrays; the scratch is large enough.
        unsafe {
            self.keys_of(tile.k, keys.clone()).pack(simd, memory.k, memory.k_width);
            self.keys_of(tile.v, keys.clone()).pack(simd, memory.v, memory.v_width);
        }
    }

    /// p = k qᵀ for the packed keys in `keys`, with the queries of `lanes` in lanes.
    ///
    /// # Safety
    /// Keys and queries are packed.
    #[inline(always)]
    unsafe fn logits<S: Simd>(&self, simd: S, lanes: &Range<usize>, keys: Range<usize>) {
        let (memory, dim) = (&self.memory, self.block.tile.q.dim);
        let depth: Depth<SameDepth> = Depth::All(0..dim);
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
                rows: keys,
                vectors: lanes.len() / S::LANES,
                depth,
                write: Write::Set,
            };
            product.compute(simd);
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
            softmax::online(simd, self.memory.p, lanes.len(), keys, &Online { m, l, alpha });
        }
    }

    /// acc = acc·alpha + pᵀ v for the queries of `lanes`.
    ///
    /// # Safety
    /// The panel holds probabilities, and the values are packed.
    #[inline(always)]
    unsafe fn accumulate<S: Simd, F: Fn(usize) -> Range<usize>>(
        &self,
        simd: S,
        lanes: &Range<usize>,
        depth: Depth<F>,
    ) {
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
                let value = (f64::from(m) + f64::from(l).log2()) * LN_2;
                *lse.row(batch, row, head).cast::<f32>() = value as f32;
            }
        }
    }
}
