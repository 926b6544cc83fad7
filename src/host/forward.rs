//! The forward tile: an online softmax over blocks of keys.

mod block;

use rayon::prelude::*;

use super::array::HostArray;
use super::isa::Isa;
use super::pack;
use super::scratch::InScratch;
use super::simd::Simd;
use super::tile::TileInputs;
use block::Block;

/// Most queries of a task. Every task packs the keys anew: 192 ms with 256, 200 ms with 128 (one
/// thread, 4096 causal rows of 8 heads × 64, Zen 4).
const BLOCK_QUERIES: usize = 256;
/// Most queries of a task, if there are few tasks.
const SMALL_BLOCK_QUERIES: usize = 128;
/// Number of tasks that keeps many threads evenly busy.
const MANY_TASKS: usize = 64;

/// The softmax state of query rows between tiles, float32.
#[derive(Debug, Clone, Copy)]
pub struct SoftmaxState<'a> {
    /// Σ e^(s − m) v with s the logits, `[batch, rows, heads, v's dim]`.
    pub acc: &'a HostArray,
    /// Largest s so far, dim 1; −∞ before the first.
    pub m: &'a HostArray,
    /// Σ e^(s − m), dim 1.
    pub l: &'a HostArray,
}

/// The results of query rows.
#[derive(Debug, Clone, Copy)]
pub struct Outputs<'a> {
    /// Output, in the type of the queries.
    pub o: &'a HostArray,
    /// Log-sum-exp of the logits, float32, dim 1.
    pub lse: &'a HostArray,
}

impl Outputs<'_> {
    /// Writes o = acc / l and lse = m + ln l of one row. Without any key, o = 0 and lse = −∞.
    ///
    /// # Safety
    /// The caller guarantees that `acc` has a row of o, that the arrays have the row, and that all
    /// three are this thread's.
    #[inline(always)]
    pub(super) unsafe fn write<S: Simd>(
        self,
        simd: S,
        (batch, row, head): (usize, usize, usize),
        acc: *mut f32,
        (m, l): (f32, f32),
    ) {
        let Outputs { o, lse } = self;
        let inverse = if l == 0.0 { 0.0 } else { 1.0 / l };
        // SAFETY: the caller guarantees the row of all three.
        unsafe {
            if l == 0.0 {
                acc.write_bytes(0, o.dim);
            }
            pack::store_row(simd, acc, inverse, o.row(batch, row, head), o.dtype, o.dim);
            // In float64, since every probability in the backward pass has the error of lse.
            let value = f64::from(m) + f64::from(l).ln();
            *lse.row(batch, row, head).cast::<f32>() = value as f32;
        }
    }
}

/// A tile of the forward pass.
#[derive(Debug, Clone)]
pub struct ForwardTile<'a> {
    /// Queries, keys and values.
    pub inputs: TileInputs<'a>,
    /// Read unless `first`, written unless `last`.
    pub state: Option<SoftmaxState<'a>>,
    /// Written if `last`.
    pub out: Option<Outputs<'a>>,
    /// Whether no tile of these queries came before.
    pub first: bool,
    /// Whether no tile of these queries comes after.
    pub last: bool,
}

/// Folds the tile's keys into the softmax state of its queries:
///
/// ```text
/// s = softmax_scale · q kᵀ, capped, −∞ outside the band
/// m' = max(m, rowmax s);  l' = l·e^(m−m') + rowsum e^(s−m');  acc' = acc·e^(m−m') + e^(s−m') v
/// last: o = acc / l;  lse = m + ln l;  without any key o = 0 and lse = −∞
/// ```
///
/// With a cap c, s becomes c · tanh(s / c). Then slope · (key position − query position) is added.
/// Segments mask pairs as the band does. Dropped weights e^(s−m') count in l, but not in acc. The
/// result does not depend on the number of threads.
///
/// # Panics
/// If the CPU lacks `isa`, or `state` or `out` is missing where it is needed.
pub fn forward(isa: Isa, pool: &rayon::ThreadPool, tile: &ForwardTile<'_>) {
    assert!(tile.state.is_some() || (tile.first && tile.last), "a tile of several has a state");
    assert!(tile.out.is_some() || !tile.last, "the last tile has somewhere to write to");
    let (q, q_rows) = (tile.inputs.q, &tile.inputs.q_rows);
    let (batch, heads) = (q.batch, q.heads);
    let most = match q_rows.len().div_ceil(BLOCK_QUERIES) * batch * heads {
        MANY_TASKS.. => BLOCK_QUERIES,
        _ => SMALL_BLOCK_QUERIES,
    };
    let blocks = q_rows.len().div_ceil(most);
    let compute = |task: usize| {
        let (outer, block) = (task / blocks, task % blocks);
        let start = q_rows.start + block * most;
        let rows = start..q_rows.end.min(start + most);
        isa.run(InScratch(Block { tile, head: (outer / heads, outer % heads), rows }));
    };
    pool.install(|| {
        (0..batch * heads * blocks).into_par_iter().with_max_len(1).for_each(compute);
    });
}
