//! The backward tile: all three gradients from one recomputation of the probabilities.

mod order;
mod products;
mod slopes;
mod walk;

use std::ops::Range;

use rayon::prelude::*;

use super::array::HostArray;
use super::extras::{self, Side, TileExtras};
use super::isa::Isa;
use super::pack::Scratch;
use super::simd::{Simd, Task};
use crate::mask::Band;
use slopes::SlopeSums;
use walk::{Memory, Walk};

/// Most queries per inner block: whole register tiles of 6 and 4 rows.
const BLOCK_QUERIES: usize = 96;
/// Most keys per block.
const BLOCK_KEYS: usize = 256;
/// Most floats per block of keys: five such blocks have to stay in the second-level cache.
const BLOCK_FLOATS: usize = 32768;
/// Cells to work on at a time, so that many threads find work.
const PARALLEL_CELLS: usize = 32;
/// Rows of a cell that are worth its overhead.
const CELL_ROWS: usize = 256;

/// A rectangle of queries × keys of one rank.
#[derive(Debug, Clone)]
pub struct BackwardTile<'a> {
    /// Queries.
    pub q: &'a HostArray,
    /// Keys; query head h uses key head h / group_size.
    pub k: &'a HostArray,
    /// Values.
    pub v: &'a HostArray,
    /// Gradient of o.
    pub dout: &'a HostArray,
    /// Final log-sum-exp of each query's logits, float32, dim 1.
    pub lse: &'a HostArray,
    /// rowsum(dout ∘ o) − dlse, float32, dim 1.
    pub delta: &'a HostArray,
    /// Gradient of q, float32.
    pub dq: &'a HostArray,
    /// Gradient of k, float32.
    pub dk: &'a HostArray,
    /// Gradient of v, float32.
    pub dv: &'a HostArray,
    /// Query rows, counted from the start of their owner's shard.
    pub q_rows: Range<usize>,
    /// Key rows likewise.
    pub k_rows: Range<usize>,
    /// Who sees whom, in the same counts.
    pub band: Band,
    /// Overwrite `q_rows` of dq instead of adding to them.
    pub dq_first: bool,
    /// Overwrite `k_rows` of dk and dv instead of adding to them.
    pub dkv_first: bool,
    /// Factor on q·k.
    pub softmax_scale: f32,
    /// Logits become `cap · tanh(logit / cap)`; `None` leaves them.
    pub soft_cap: Option<f32>,
    /// What other features need.
    pub extras: TileExtras<'a>,
}

/// Adds the tile's part of the gradients:
///
/// ```text
/// s = softmax_scale · q kᵀ, with the bits that it has in the forward pass
/// p = e^min(s − lse, 0), 0 outside the band;  ds = p ∘ (dout vᵀ − delta)
/// dv += pᵀ dout;  dk += softmax_scale · dsᵀ q;  dq += softmax_scale · ds k
/// ```
///
/// With a cap c, s becomes c · tanh(s / c), and ds gets the factor 1 − tanh²(s / c). With
/// dropout, the weights in dv and the products dout vᵀ get their factors 0 or 1 / (1 − rate). A slope
/// gets Σ ds · (key position − query position).
///
/// A (batch entry, key head) is cut into J × J cells of keys × queries. Cell (j, g) has the number
/// (g − j) mod J both among the cells with its keys and among those with its queries, and is
/// computed in that order. So no two threads write the same rows of dq, dk or dv, and every row
/// gets its sums in a fixed order: the result does not depend on the number of threads.
///
/// # Panics
/// If the CPU lacks `isa`.
pub fn backward(isa: Isa, pool: &rayon::ThreadPool, tile: &BackwardTile<'_>) {
    let (batch, kv_heads) = (tile.k.batch, tile.k.heads);
    pool.install(|| {
        if tile.dq_first {
            overwrite(tile.dq, &tile.q_rows);
        }
        if tile.k_rows.is_empty() {
            return;
        }
        let cells = cells(batch * kv_heads, tile.q_rows.len().min(tile.k_rows.len()));
        let mut slopes = SlopeSums::new(tile, cells);
        let sums = slopes.shared();
        let cut = |rows: &Range<usize>, index: usize| {
            let at = |i: usize| rows.start + i * rows.len() / cells;
            at(index)..at(index + 1)
        };
        order::each_cell(batch * kv_heads, cells, |at| {
            isa.run(Cell {
                tile,
                batch: at.square / kv_heads,
                kv_head: at.square % kv_heads,
                queries: cut(&tile.q_rows, at.row),
                keys: cut(&tile.k_rows, at.column),
                overwrite: tile.dkv_first && at.wave == 0,
                slopes: sums.of_cell(at.row * cells + at.column),
            });
        });
        slopes.add(tile);
    });
}

/// J: into how many columns of keys and groups of queries a head is cut.
fn cells(heads: usize, rows: usize) -> usize {
    (PARALLEL_CELLS / heads.max(1)).min(rows / CELL_ROWS).max(1)
}

/// Fills rows of a float32 array with zeros.
fn overwrite(array: &HostArray, rows: &Range<usize>) {
    (0..array.batch * rows.len()).into_par_iter().with_min_len(64).for_each(|task| {
        for head in 0..array.heads {
            let row = array.row(task / rows.len(), rows.start + task % rows.len(), head);
            // SAFETY: the tile's rows are the caller's to write, each by one task.
            unsafe { row.cast::<f32>().write_bytes(0, array.dim) }
        }
    });
}

/// A task: some keys of a key head, with some queries of all heads that use it.
struct Cell<'a> {
    tile: &'a BackwardTile<'a>,
    batch: usize,
    kv_head: usize,
    queries: Range<usize>,
    keys: Range<usize>,
    overwrite: bool,
    /// Where the sums of its heads for the slopes are, null without slopes.
    slopes: *mut f64,
}

impl Task for Cell<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let k_width = self.tile.k.dim.next_multiple_of(S::LANES);
        let v_width = self.tile.v.dim.next_multiple_of(S::LANES);
        let panel = S::LANES * S::TILE_VECTORS;
        let most = (BLOCK_FLOATS / k_width.max(v_width)).min(BLOCK_KEYS).next_multiple_of(panel);
        let block_keys = most.min(self.keys.len().next_multiple_of(S::LANES));
        let extras = &self.tile.extras;
        let [of_query, ..] = Side::sizes(extras, BLOCK_QUERIES);
        let [of_key, ..] = Side::sizes(extras, block_keys);
        let sizes = [
            k_width * block_keys,
            k_width * block_keys,
            v_width * block_keys,
            k_width * block_keys,
            v_width * block_keys,
            k_width * BLOCK_QUERIES,
            v_width * BLOCK_QUERIES,
            k_width * BLOCK_QUERIES,
            panel * BLOCK_QUERIES,
            panel * BLOCK_QUERIES,
            BLOCK_QUERIES,
            BLOCK_QUERIES,
            of_query,
            of_query,
            of_query,
            of_key,
            of_key,
            of_key,
            extras::keep_size(extras, BLOCK_QUERIES, panel),
        ];
        let total = sizes.iter().map(|len| Scratch::footprint(*len)).sum();
        Scratch::with(total, |mut scratch| {
            #[rustfmt::skip]
            let [
                k, k_columns, v_columns, dk, dv, q, dout, dq, p, ds, lse, delta,
                a0, a1, a2, b0, b1, b2, keep,
            ] = sizes.map(|len| scratch.take(len));
            let (queries, keys) = (Side::new([a0, a1, a2]), Side::new([b0, b1, b2]));
            #[rustfmt::skip]
            let memory = Memory {
                k, k_columns, v_columns, dk, dv, q, dout, dq, p, ds, lse, delta,
                k_width, v_width, block_keys, queries, keys, keep,
            };
            simd.vectorize(Walk { cell: &self, memory });
        });
    }
}
