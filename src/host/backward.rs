//! The backward tile: all three gradients from one recomputation of the probabilities.

mod cell;
mod order;
mod products;
mod rows;
mod slopes;

use std::ops::Range;

use super::array::HostArray;
use super::isa::Isa;
use super::per_row;
use super::scratch::InScratch;
use super::tile::TileInputs;
use cell::Cell;
use slopes::SlopeSums;

/// Number of cells that a tile is cut into, so that many threads find work.
const PARALLEL_CELLS: usize = 32;
/// Rows that make a cell worth its overhead.
const CELL_ROWS: usize = 256;

/// A tile of the backward pass.
#[derive(Debug, Clone)]
pub struct BackwardTile<'a> {
    /// Queries, keys and values.
    pub inputs: TileInputs<'a>,
    /// Gradient of o.
    pub dout: &'a HostArray,
    /// Final log-sum-exp of each query's logits, float32, dim 1.
    pub lse: &'a HostArray,
    /// rowsum(dout ∘ o) − dlse, float32, dim 1.
    pub delta: &'a HostArray,
    /// Gradients that have a row for each query, float32: dq, then those of features.
    pub query_grads: &'a [HostArray],
    /// Gradients that have a row for each key, float32: dk, dv, then those of features.
    pub key_grads: &'a [HostArray],
    /// Whether to overwrite the query rows of the gradients instead of adding to them.
    pub dq_first: bool,
    /// Whether to overwrite the key rows of the gradients instead of adding to them.
    pub dkv_first: bool,
}

/// Adds the tile's part of the gradients:
///
/// ```text
/// s = softmax_scale · q kᵀ, with the bits that it has in the forward pass
/// p = e^min(s − lse, 0), 0 outside the band;  ds = p ∘ (dout vᵀ − delta)
/// dv += pᵀ dout;  dk += softmax_scale · dsᵀ q;  dq += softmax_scale · ds k
/// ```
///
/// With a cap c, s becomes c · tanh(s / c), and ds gets the factor 1 − tanh²(s / c). With dropout,
/// the weights in dv and the products dout vᵀ get their factors, 0 or 1 / (1 − rate). The gradient
/// of a slope is Σ ds · (key position − query position).
///
/// The keys and queries of a (batch entry, key head) are cut into J parts each, which makes J × J
/// cells. Cell (j, g) has the number (g − j) mod J both among the cells with its keys and among the
/// cells with its queries, and is computed in that order. So no two threads write the same rows of
/// dq, dk or dv, and every row gets its sums in a fixed order: the result does not depend on the
/// number of threads.
///
/// # Panics
/// If the CPU lacks `isa`.
pub fn backward(isa: Isa, pool: &rayon::ThreadPool, tile: &BackwardTile<'_>) {
    let TileInputs { k, q_rows, k_rows, .. } = &tile.inputs;
    if tile.dq_first {
        tile.query_grads.iter().for_each(|sums| per_row::clear(pool, sums, q_rows));
    }
    if k_rows.is_empty() {
        return;
    }
    let heads = k.batch * k.heads;
    let cells = cells(heads, q_rows.len().min(k_rows.len()));
    let slopes = SlopeSums::new(tile, cells);
    let cut = |rows: &Range<usize>, index: usize| {
        let at = |i: usize| rows.start + i * rows.len() / cells;
        at(index)..at(index + 1)
    };
    pool.install(|| {
        order::each_cell(heads, cells, |at| {
            isa.run(InScratch(Cell {
                tile,
                kv_head: (at.square / k.heads, at.square % k.heads),
                queries: cut(q_rows, at.row),
                keys: cut(k_rows, at.column),
                overwrite: tile.dkv_first && at.wave == 0,
                slopes: slopes.of_cell(at.row * cells + at.column),
            }));
        });
    });
    slopes.add_to(tile);
}

/// Returns J, the number of parts that the keys and the queries of a head are each cut into.
fn cells(heads: usize, rows: usize) -> usize {
    (PARALLEL_CELLS / heads.max(1)).min(rows / CELL_ROWS).max(1)
}
