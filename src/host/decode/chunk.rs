//! The task of a chunk: the online softmax of its queries, tile after tile.

use std::ops::Range;

use super::element::{Bf16, Element, F16, F32, whole_loads};
use super::lane::{Lane, Pair, in_pairs};
use super::many_rows::{lay_beside, row_places};
use super::merge::{Partials, write};
use super::plan::{Part, Plan, Query, position};
use super::row_blocks::{ROWS, RowBlocks, SCORES, State};
use super::tile::{Ahead, QUAD, QUADS, Seen, TILE, Tile, row_of};
use super::{DecodeIo, MANY};
use crate::host::matmul::Matrix;
use crate::host::pack;
use crate::host::scratch::{Scratch, ScratchTask};
use crate::host::simd::Simd;
use crate::host::softmax::SoftCap;
use crate::problem::Dtype;

/// Blocks of rows from which on a tile is copied to float32 before its products.
const COPY_FROM: usize = 3;

/// A chunk of a source's rows in some heads, and the queries that read the source.
pub(super) struct ChunkTask<'a> {
    pub io: &'a DecodeIo<'a>,
    partials: &'a Partials,
    queries: &'a [Query],
    pub part: &'a Part,
    /// Rows of the chunk.
    chunk: Range<usize>,
    /// The slopes of all heads, if some are not 0.
    slopes: Option<&'a [f32]>,
}

/// The scratch of a task. A row is one head of one query. The rows of a row block share a head of
/// keys.
#[derive(Clone, Copy)]
pub(super) struct ChunkScratch {
    state: State,
    /// A row of zeros, of any type.
    zeros: Matrix,
    /// Copies of a tile's keys and values.
    pub keys: Matrix,
    pub values: Matrix,
}

impl<'a> ChunkTask<'a> {
    pub fn new(
        io: &'a DecodeIo<'a>,
        plan: &'a Plan,
        partials: &'a Partials,
        index: usize,
    ) -> ChunkTask<'a> {
        let part = &plan.tasks[index];
        let start = part.chunk * plan.chunk_rows;
        ChunkTask {
            io,
            partials,
            queries: &plan.queries[part.queries.clone()],
            part,
            chunk: start..start + plan.chunk_rows,
            slopes: io.slopes.filter(|slopes| slopes.iter().any(|slope| *slope != 0.0)),
        }
    }

    /// Returns the row blocks of each head of keys, for a number of queries.
    fn blocks_per_head(&self, queries: usize) -> usize {
        (queries * self.io.group()).div_ceil(ROWS)
    }

    /// Returns the bytes from a head to the next one, in keys and in values.
    pub(super) fn skips(&self) -> [usize; 2] {
        [&self.io.k, &self.io.v].map(|array| array.head_stride * array.dtype.bytes())
    }

    /// Returns the query and the head of a row.
    fn row<'q>(&self, queries: &[&'q Query], head: usize, row: usize) -> (&'q Query, usize) {
        let group = self.io.group();
        (queries[row / group], (self.part.kv_heads.start + head) * group + row % group)
    }
}

impl ScratchTask for ChunkTask<'_> {
    type Parts = ChunkScratch;

    fn lay_out<S: Simd>(&self, scratch: &mut Scratch) -> ChunkScratch {
        let [width, value_width] =
            [&self.io.k, &self.io.v].map(|array| array.dim.next_multiple_of(S::LANES));
        let (heads, per_head) =
            (self.part.kv_heads.len(), self.blocks_per_head(self.queries.len()));
        let blocks = heads * per_head;
        let mut take = |rows, row| Matrix::take(scratch, (rows, row));
        ChunkScratch {
            state: State {
                q: take(heads * row_places(per_head), width),
                o: take(blocks * ROWS, value_width),
                m: take(blocks, SCORES),
                l: take(blocks, SCORES),
                rounded: take(blocks, SCORES),
                alpha: take(blocks, SCORES),
                scores: take(blocks * QUADS, SCORES),
                slopes: take(blocks, SCORES),
                queries: take(per_head, SCORES),
                keys: take(QUADS, SCORES),
            },
            zeros: take(1, heads * width.max(value_width)),
            keys: take(TILE, width),
            // Rows whose distance is a power of two would share few places of the cache.
            values: take(TILE, value_width + 16),
        }
    }

    #[inline(always)]
    unsafe fn work<S: Simd>(&self, simd: S, scratch: ChunkScratch) {
        let queries: Vec<&Query> =
            self.queries.iter().filter(|query| query.chunks.contains(&self.part.chunk)).collect();
        // SAFETY: the scratch is this task's. The caller of `partial` guarantees that the arrays
        // have the memory that they describe, and that this call alone uses the results. This task
        // alone writes the results of its queries, heads and chunk.
        unsafe {
            if !queries.is_empty() {
                match self.io.k.dtype {
                    Dtype::F32 => self.typed::<S, F32>(simd, scratch, &queries),
                    Dtype::Bf16 => self.typed::<S, Bf16>(simd, scratch, &queries),
                    Dtype::F16 => self.typed::<S, F16>(simd, scratch, &queries),
                }
            }
        }
    }
}

impl ChunkTask<'_> {
    /// Does the work, with elements of type `E`.
    ///
    /// # Safety
    /// The caller guarantees what [`ScratchTask::work`] asks for.
    #[inline(always)]
    unsafe fn typed<S: Simd, E: Element>(
        &self,
        simd: S,
        scratch: ChunkScratch,
        queries: &[&Query],
    ) {
        // SAFETY: the caller guarantees the scratch and the arrays.
        unsafe {
            self.begin::<S, E>(simd, scratch, queries);
            self.tiles::<S, E>(simd, scratch, queries);
            self.end(simd, scratch, queries);
        }
    }

    /// Loads the queries, and starts their softmax.
    ///
    /// # Safety
    /// The caller guarantees what [`ScratchTask::work`] asks for.
    #[inline(always)]
    unsafe fn begin<S: Simd, E: Element>(
        &self,
        simd: S,
        scratch: ChunkScratch,
        queries: &[&Query],
    ) {
        let State { q, o, m, l, rounded, slopes, .. } = scratch.state;
        let per_head = self.blocks_per_head(queries.len());
        // SAFETY: the caller guarantees the scratch and the queries.
        unsafe {
            scratch.zeros.clear(1);
            for head in 0..self.part.kv_heads.len() {
                let first = head * per_head;
                o.skip(first * ROWS).clear(per_head * ROWS);
                q.skip(head * row_places(per_head)).clear(row_places(per_head));
                for lanes in (0..per_head * SCORES).step_by(S::LANES) {
                    simd.store(m.skip(first).at.add(lanes), simd.splat(f32::NEG_INFINITY));
                    simd.store(l.skip(first).at.add(lanes), simd.zero());
                    simd.store(rounded.skip(first).at.add(lanes), simd.zero());
                }
                for row in 0..queries.len() * self.io.group() {
                    let (query, q_head) = self.row(queries, head, row);
                    let (entry, t) = query.at;
                    let from = self.io.q.row(entry, t, q_head).cast_const();
                    if self.io.group() < MANY {
                        let to = q.skip(first * ROWS + row);
                        self.load::<S, E>(simd, from, self.io.q.dim, to);
                        pack::scale(simd, to.at, to.row, self.io.scale);
                    } else {
                        let to = q.skip(head * row_places(per_head)).at;
                        let copy = scratch.keys;
                        if in_pairs(simd, self.io) {
                            lay_beside::<S>(from.cast(), q.row / Pair::ELEMENTS, (to, row));
                        } else {
                            self.load::<S, E>(simd, from, self.io.q.dim, copy);
                            lay_beside::<S>(copy.at, q.row, (to, row));
                        }
                    }
                    if let Some(of_heads) = self.slopes {
                        let lanes = slopes.skip(first).at.add(row * QUAD);
                        (0..QUAD).for_each(|lane| *lanes.add(lane) = of_heads[q_head]);
                    }
                }
            }
        }
    }

    /// Goes through all tiles that a query sees.
    ///
    /// # Safety
    /// The caller guarantees what [`ScratchTask::work`] asks for, and elements of type `E`.
    #[inline(always)]
    unsafe fn tiles<S: Simd, E: Element>(
        &self,
        simd: S,
        scratch: ChunkScratch,
        queries: &[&Query],
    ) {
        let io = self.io;
        let start = self.queries.iter().map(|query| query.rows.start).min().unwrap_or(0);
        let end = self.queries.iter().map(|query| query.rows.end).max().unwrap_or(0);
        let find = |first| {
            let head = (self.queries[0].source, self.part.kv_heads.start);
            Tile::find(io, head, (first, &(start..end)), scratch.zeros.at.cast())
        };
        let per_head = self.blocks_per_head(queries.len());
        let mut seen = vec![[0; ROWS]; per_head];
        let [key_bytes, value_bytes] = [&io.k, &io.v].map(|array| array.dim * array.dtype.bytes());
        let read = [key_bytes, if io.values_in_keys() { 0 } else { value_bytes }];
        let copies = per_head >= COPY_FROM || !whole_loads(io, S::LANES);
        let first = self.chunk.start.max(start / TILE * TILE);
        let mut next = find(first);
        for first in (first..self.chunk.end.min(end)).step_by(TILE) {
            let tile = next;
            next = find(first + TILE);
            // SAFETY: the caller guarantees the scratch, the queries and the caches.
            unsafe {
                self.see(scratch.state, queries, &tile, &mut seen);
                let blocks = RowBlocks {
                    state: scratch.state,
                    blocks: 0..self.part.kv_heads.len() * per_head,
                    heads: self.part.kv_heads.len(),
                    per_head,
                    rows: queries.len() * io.group(),
                    seen: &seen,
                    keys: &tile.keys,
                    values: &tile.values,
                    skips: self.skips(),
                    cap: (io.soft_cap > 0.0).then(|| SoftCap::new(io.soft_cap)),
                    has_slopes: self.slopes.is_some(),
                    by_quad: !copies,
                    ahead: Ahead { tiles: [&tile, &next], skips: self.skips(), bytes: read },
                };
                if in_pairs(simd, io) {
                    self.pair(simd, scratch, blocks);
                } else if copies {
                    self.copy::<S, E>(simd, scratch, blocks);
                } else {
                    blocks.compute::<S, E>(simd);
                }
            }
        }
    }

    /// Finds what each row sees of a tile, and its distances for ALiBi.
    ///
    /// # Safety
    /// The caller guarantees that the state is this thread's.
    #[inline(always)]
    unsafe fn see(&self, state: State, queries: &[&Query], tile: &Tile, seen: &mut [[Seen; ROWS]]) {
        let (io, first) = (self.io, position(self.io, tile.first));
        for row in 0..queries.len() * io.group() {
            let query = queries[row / io.group()];
            seen[row / ROWS][row % ROWS] = tile.seen(&query.rows);
            if self.slopes.is_some() {
                let distance = first.wrapping_sub(query.position) as f32;
                // SAFETY: the state has lanes for each row.
                unsafe {
                    let lanes = state.queries.at.add(row * QUAD);
                    (0..QUAD).for_each(|lane| *lanes.add(lane) = distance);
                }
            }
        }
        if self.slopes.is_some() {
            for key in 0..TILE {
                let distance = position(io, tile.first + row_of(key)).wrapping_sub(first) as f32;
                let lanes = state.keys.skip(key / QUAD).at.wrapping_add(key % QUAD);
                // SAFETY: the state has a lane for each key and row of a block.
                (0..ROWS).for_each(|row| unsafe { *lanes.add(row * QUAD) = distance });
            }
        }
    }

    /// Writes the results, or the partial results of queries that see several chunks.
    ///
    /// # Safety
    /// The caller guarantees what [`ScratchTask::work`] asks for.
    #[inline(always)]
    unsafe fn end<S: Simd>(&self, simd: S, scratch: ChunkScratch, queries: &[&Query]) {
        let State { o, m, l, rounded, .. } = scratch.state;
        let per_head = self.blocks_per_head(queries.len());
        for head in 0..self.part.kv_heads.len() {
            for row in 0..queries.len() * self.io.group() {
                let (query, q_head) = self.row(queries, head, row);
                let at = head * per_head * ROWS + row;
                // SAFETY: the caller guarantees the scratch, and that the results are this task's.
                unsafe {
                    let sum = |lanes: *const f32| {
                        (*lanes + *lanes.add(1)) + (*lanes.add(2) + *lanes.add(3))
                    };
                    let state = [*m.at.add(at * QUAD), sum(l.at.add(at * QUAD))];
                    let rounded = sum(rounded.at.add(at * QUAD));
                    if in_pairs(simd, self.io) && rounded > 0.0 {
                        let o = o.skip(at);
                        pack::scale(simd, o.at, o.row, state[1] / rounded);
                    }
                    if query.chunks.len() == 1 {
                        write(simd, self.io, (query.at, q_head), o.skip(at), state);
                    } else {
                        let partial = query.partial + self.part.chunk - query.chunks.start;
                        self.partials.set(simd, (partial, q_head), o.skip(at), state);
                    }
                }
            }
        }
    }
}
