//! The task of a chunk: the online softmax of its queries, tile after tile.

use std::marker::PhantomData;
use std::ops::Range;

use super::DecodeIo;
use super::element::{Bf16, Element, F16, F32};
use super::merge::{Partials, write};
use super::plan::{Part, Plan, Query, position};
use super::scores::{Alibi, MOST_ROWS, Online, Scores, block_rows};
use super::tile::{Ahead, QUAD, Seen, TILE, Tile};
use super::values::{Values, units};
use crate::host::matmul::Matrix;
use crate::host::pack::{self, load_row};
use crate::host::scratch::{Scratch, ScratchTask};
use crate::host::simd::Simd;
use crate::host::softmax::SoftCap;
use crate::problem::Dtype;

/// Blocks of rows from which on a tile is copied to float32 before its products.
const COPY_FROM: usize = 3;

/// A chunk of a source's rows in some heads, and the queries that read the source.
pub(super) struct ChunkTask<'a> {
    io: &'a DecodeIo<'a>,
    partials: &'a Partials,
    queries: &'a [Query],
    part: &'a Part,
    /// Rows of the chunk.
    chunk: Range<usize>,
    /// Whether there are slopes other than 0.
    slopes: bool,
}

/// The scratch of a task. A row is one head of one query, and a block is some rows that share a head
/// of keys.
#[derive(Clone, Copy)]
pub(super) struct ChunkScratch {
    /// Queries, times the scale.
    q: Matrix,
    o: Matrix,
    /// m, l and alpha of each block, as [`Online`] has them.
    online: *mut f32,
    scores: *mut f32,
    /// Positions of the tile's keys, as [`Alibi`] has them.
    positions: *mut f32,
    /// A row of zeros, of any type.
    zeros: Matrix,
    /// Copies of a tile's keys and values.
    keys: Matrix,
    values: Matrix,
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
            slopes: io.slopes.iter().any(|slope| *slope != 0.0),
        }
    }

    /// Returns the blocks of each head of keys, for a number of queries.
    fn blocks<S: Simd>(&self, queries: usize) -> usize {
        (queries * self.io.group()).div_ceil(block_rows::<S>())
    }

    /// Returns the query and the head of a row.
    fn row<'q>(&self, queries: &[&'q Query], head: usize, row: usize) -> (&'q Query, usize) {
        let group = self.io.group();
        (queries[row / group], (self.part.kv_heads.start + head) * group + row % group)
    }
}

impl ScratchTask for ChunkTask<'_> {
    type Pieces = ChunkScratch;

    fn lay_out<S: Simd>(&self, scratch: &mut Scratch) -> ChunkScratch {
        let [width, value_width] =
            [&self.io.k, &self.io.v].map(|array| array.dim.next_multiple_of(S::LANES));
        let (heads, blocks) = (self.part.kv_heads.len(), self.blocks::<S>(self.queries.len()));
        let rows = heads * blocks * block_rows::<S>();
        let lanes = TILE / QUAD * S::LANES;
        ChunkScratch {
            q: Matrix::take(scratch, (rows, width)),
            o: Matrix::take(scratch, (rows, value_width)),
            online: scratch.take(heads * blocks * 3 * S::LANES),
            scores: scratch.take(lanes),
            positions: scratch.take(lanes),
            zeros: Matrix::take(scratch, (1, heads * width.max(value_width))),
            keys: Matrix::take(scratch, (TILE, width)),
            values: Matrix::take(scratch, (TILE, value_width)),
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
                self.begin(simd, scratch, &queries);
                match self.io.k.dtype {
                    Dtype::F32 => self.tiles::<S, F32>(simd, scratch, &queries),
                    Dtype::Bf16 => self.tiles::<S, Bf16>(simd, scratch, &queries),
                    Dtype::F16 => self.tiles::<S, F16>(simd, scratch, &queries),
                }
                self.end(simd, scratch, &queries);
            }
        }
    }
}

impl ChunkTask<'_> {
    /// Loads the queries, and starts their softmax.
    ///
    /// # Safety
    /// The caller guarantees what [`ScratchTask::work`] asks for.
    #[inline(always)]
    unsafe fn begin<S: Simd>(&self, simd: S, scratch: ChunkScratch, queries: &[&Query]) {
        let ChunkScratch { q, o, online, zeros, .. } = scratch;
        let blocks = self.blocks::<S>(queries.len());
        // SAFETY: the caller guarantees the scratch and the queries.
        unsafe {
            zeros.clear(1);
            for head in 0..self.part.kv_heads.len() {
                let first = head * blocks * block_rows::<S>();
                o.skip(first).clear(blocks * block_rows::<S>());
                for row in 0..queries.len() * self.io.group() {
                    let (query, q_head) = self.row(queries, head, row);
                    let (entry, t) = query.at;
                    let to = q.skip(first + row);
                    self.io.q.head_rows((entry, q_head), &(t..t + 1)).pack(simd, to);
                    pack::scale(simd, to.at, to.row, self.io.scale);
                }
                for block in 0..blocks {
                    let Online { m, l, .. } = online_of::<S>(online, head * blocks + block);
                    simd.store(m, simd.splat(f32::NEG_INFINITY));
                    simd.store(l, simd.zero());
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
        let [start, end] = [
            self.queries.iter().map(|query| query.rows.start).min(),
            self.queries.iter().map(|query| query.rows.end).max(),
        ];
        let rows = start.unwrap_or(0)..end.unwrap_or(0);
        let (heads, blocks) = (self.part.kv_heads.len(), self.blocks::<S>(queries.len()));
        let bytes = [&io.k, &io.v].map(|array| heads * array.dim * array.dtype.bytes());
        let whole = |dim: usize| dim.is_multiple_of(S::LANES);
        let copies = blocks >= COPY_FROM || !whole(io.k.dim) || !whole(io.v.dim);
        let find = |first| {
            let head = (self.queries[0].source, self.part.kv_heads.start);
            Tile::find(io, head, (first, &rows), scratch.zeros.at.cast())
        };
        let first = self.chunk.start.max(rows.start / TILE * TILE);
        let mut next = find(first);
        for first in (first..self.chunk.end.min(rows.end)).step_by(TILE) {
            let tile = next;
            next = find(first + TILE);
            let work = heads * blocks * (2 * TILE / QUAD + units(scratch.o.row / S::LANES));
            let mut step = Step { task: self, scratch, queries, tile: &tile, blocks };
            // SAFETY: the caller guarantees the scratch, the queries and the caches.
            unsafe {
                let ahead = &mut Ahead::new(next, bytes, work);
                if self.slopes {
                    step.positions(S::LANES);
                }
                for head in 0..heads {
                    if copies {
                        step.head_of_copies::<S, E>(simd, head, ahead);
                    } else {
                        let skips = [&io.k, &io.v].map(|x| head * x.head_stride * x.dtype.bytes());
                        let sides = Sides { keys: &tile.keys, values: &tile.values, skips };
                        step.head::<S, E>(simd, head, sides, ahead);
                    }
                }
            }
        }
    }

    /// Writes the results, or the partial results of queries that see several chunks.
    ///
    /// # Safety
    /// The caller guarantees what [`ScratchTask::work`] asks for.
    #[inline(always)]
    unsafe fn end<S: Simd>(&self, simd: S, scratch: ChunkScratch, queries: &[&Query]) {
        let blocks = self.blocks::<S>(queries.len());
        for head in 0..self.part.kv_heads.len() {
            for row in 0..queries.len() * self.io.group() {
                let (query, q_head) = self.row(queries, head, row);
                let block = head * blocks + row / block_rows::<S>();
                let lane = row % block_rows::<S>() * QUAD;
                // SAFETY: the caller guarantees the scratch, and that the results are this task's.
                unsafe {
                    let Online { m, l, .. } = online_of::<S>(scratch.online, block);
                    let l = l.add(lane);
                    let sum = (*l + *l.add(1)) + (*l.add(2) + *l.add(3));
                    let state = [*m.add(lane), sum];
                    let o = scratch.o.skip(head * blocks * block_rows::<S>() + row);
                    if query.chunks.len() == 1 {
                        write(simd, self.io, (query.at, q_head), o, state);
                    } else {
                        let partial = query.partial + self.part.chunk - query.chunks.start;
                        self.partials.set(simd, (partial, q_head), o, state);
                    }
                }
            }
        }
    }
}

/// Returns the softmax of a block.
#[inline(always)]
fn online_of<S: Simd>(online: *mut f32, block: usize) -> Online {
    let m = online.wrapping_add(block * 3 * S::LANES);
    Online { m, l: m.wrapping_add(S::LANES), alpha: m.wrapping_add(2 * S::LANES) }
}

/// Addresses of a tile's keys and values, and the bytes from there to a head.
#[derive(Clone, Copy)]
struct Sides<'a> {
    keys: &'a [*const u8; TILE],
    values: &'a [*const u8; TILE],
    skips: [usize; 2],
}

/// A task's work on one tile.
struct Step<'a> {
    task: &'a ChunkTask<'a>,
    scratch: ChunkScratch,
    queries: &'a [&'a Query],
    tile: &'a Tile,
    blocks: usize,
}

impl Step<'_> {
    /// Writes the distances of the tile's keys from its first row, for ALiBi.
    ///
    /// # Safety
    /// The caller guarantees the scratch.
    unsafe fn positions(&mut self, lanes: usize) {
        let (io, first) = (self.task.io, self.tile.first);
        for key in 0..TILE {
            let distance = position(io, first + key).wrapping_sub(position(io, first));
            for row in 0..lanes / QUAD {
                let at = super::scores::lane_of(key, row, lanes);
                // SAFETY: the caller guarantees the scratch, which has a lane for each key and row.
                unsafe { *self.scratch.positions.add(at) = distance as f32 };
            }
        }
    }

    /// Copies keys and values of a head to float32, then goes through its blocks.
    ///
    /// # Safety
    /// The caller guarantees the scratch, the queries and the tile, with elements of type `E`.
    #[inline(always)]
    unsafe fn head_of_copies<S: Simd, E: Element>(
        &mut self,
        simd: S,
        head: usize,
        ahead: &mut Ahead,
    ) {
        let (io, scratch) = (self.task.io, self.scratch);
        let keys = (&io.k, &self.tile.keys, scratch.keys);
        let values = (&io.v, &self.tile.values, scratch.values);
        let mut copies = [[std::ptr::null(); TILE]; 2];
        for ((array, rows, to), copies) in [keys, values].into_iter().zip(&mut copies) {
            let skip = head * array.head_stride * array.dtype.bytes();
            for (row, copy) in copies.iter_mut().enumerate() {
                let to = to.skip(row);
                // SAFETY: the caller guarantees the tile's rows, and the scratch has one for each.
                unsafe {
                    load_row(simd, rows[row].wrapping_add(skip), E::DTYPE, to.at, array.dim);
                    to.at.add(array.dim).write_bytes(0, to.row - array.dim);
                }
                *copy = to.at.cast_const().cast();
            }
        }
        let sides = Sides { keys: &copies[0], values: &copies[1], skips: [0; 2] };
        // SAFETY: the caller guarantees the scratch and the queries.
        unsafe { self.head::<S, F32>(simd, head, sides, ahead) }
    }

    /// Goes through the blocks of a head.
    ///
    /// # Safety
    /// The caller guarantees the scratch, the queries and both sides, with elements of type `E`.
    #[inline(always)]
    unsafe fn head<S: Simd, E: Element>(
        &mut self,
        simd: S,
        head: usize,
        Sides { keys, values, skips }: Sides<'_>,
        ahead: &mut Ahead,
    ) {
        let Step { task, scratch, queries, blocks, .. } = *self;
        let all = queries.len() * task.io.group();
        for block in 0..blocks {
            let first = block * block_rows::<S>();
            let rows = block_rows::<S>().min(all - first);
            let seen = self.seen(first..first + rows);
            let at = head * blocks * block_rows::<S>() + first;
            let online = online_of::<S>(scratch.online, head * blocks + block);
            let alibi = task.slopes.then(|| self.alibi(head, first..first + rows));
            // SAFETY: the caller guarantees the scratch, the queries and both sides.
            unsafe {
                Scores {
                    q: scratch.q.skip(at).at,
                    q_row: scratch.q.row,
                    vectors: scratch.q.row / S::LANES,
                    rows,
                    keys,
                    skip: skips[0],
                    seen,
                    cap: (task.io.soft_cap > 0.0).then(|| SoftCap::new(task.io.soft_cap)),
                    alibi: alibi.as_ref(),
                    scores: scratch.scores,
                    online,
                    ahead,
                    element: PhantomData::<E>,
                }
                .compute(simd);
                Values {
                    weights: scratch.scores,
                    alpha: online.alpha,
                    values,
                    skip: skips[1],
                    seen,
                    rows,
                    o: scratch.o.skip(at).at,
                    vectors: scratch.o.row / S::LANES,
                    ahead,
                    element: PhantomData::<E>,
                }
                .compute(simd);
            }
        }
    }

    /// Returns the keys that each row of a block sees.
    #[inline(always)]
    fn seen(&self, rows: Range<usize>) -> [Seen; MOST_ROWS] {
        let mut seen = [0; MOST_ROWS];
        for (row, seen) in rows.zip(&mut seen) {
            *seen = self.tile.seen(&self.queries[row / self.task.io.group()].rows);
        }
        seen
    }

    /// Returns ALiBi's part of the scores of a block.
    #[inline(always)]
    fn alibi(&self, head: usize, rows: Range<usize>) -> Alibi {
        let io = self.task.io;
        let first = position(io, self.tile.first);
        let keys = self.scratch.positions;
        let mut alibi = Alibi { keys, queries: [0.0; 16], slopes: [0.0; 16] };
        for (lanes, row) in rows.enumerate() {
            let (query, q_head) = self.task.row(self.queries, head, row);
            for lane in lanes * QUAD..(lanes + 1) * QUAD {
                alibi.queries[lane] = first.wrapping_sub(query.position) as f32;
                alibi.slopes[lane] = io.slopes[q_head];
            }
        }
        alibi
    }
}
