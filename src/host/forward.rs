//! The forward tile: online softmax over blocks of keys.

mod walk;

use std::ops::Range;

use rayon::prelude::*;

use super::array::HostArray;
use super::extras::{self, PanelExtras, Side, TileExtras, Which};
use super::isa::Isa;
use super::pack::Scratch;
use super::simd::{Simd, Task};
use super::softmax::Online;
use crate::mask::Band;
use walk::{Memory, Walk};

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
    /// Σ e^(s − m) v with s the logits, `[batch, rows, heads, v's dim]`.
    pub acc: &'a HostArray,
    /// Largest s so far, dim 1; −∞ before the first.
    pub m: &'a HostArray,
    /// Σ e^(s − m), dim 1.
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
    /// Logits become `cap · tanh(logit / cap)`; `None` leaves them.
    pub soft_cap: Option<f32>,
    /// What other features need.
    pub extras: TileExtras<'a>,
}

/// Folds the tile's keys into the state of its queries:
///
/// ```text
/// s = softmax_scale · q kᵀ, capped, −∞ outside the band
/// m' = max(m, rowmax s);  l' = l·e^(m−m') + rowsum e^(s−m');  acc' = acc·e^(m−m') + e^(s−m') v
/// last: o = acc / l;  lse = m + ln l;  without any key o = 0 and lse = −∞
/// ```
///
/// With a cap c, s becomes c · tanh(s / c); then a slope's share is added; pairs of different
/// segments are masked too. Weights e^(s−m') that are dropped count in l, but not in acc. The result does not depend on the number of threads.
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

impl Task for Block<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let k_width = self.tile.k.dim.next_multiple_of(S::LANES);
        let v_width = self.tile.v.dim.next_multiple_of(S::LANES);
        let lanes = self.rows.len().next_multiple_of(S::LANES);
        let (extras, panel) = (&self.tile.extras, S::LANES * S::TILE_VECTORS);
        let [of_query, ..] = Side::sizes(extras, lanes);
        let [of_key, ..] = Side::sizes(extras, BLOCK_KEYS);
        let sizes = [
            k_width * lanes,
            k_width * BLOCK_KEYS.max(self.rows.len()),
            v_width * BLOCK_KEYS,
            BLOCK_KEYS * panel,
            v_width * lanes,
            lanes,
            lanes,
            lanes,
            of_query,
            of_query,
            of_query,
            of_key,
            of_key,
            of_key,
            extras::keep_size(extras, BLOCK_KEYS, panel),
        ];
        let total = sizes.iter().map(|len| Scratch::footprint(*len)).sum();
        Scratch::with(total, |mut scratch| {
            let [q, k, v, p, acc, m, l, alpha, a0, a1, a2, b0, b1, b2, keep] =
                sizes.map(|len| scratch.take(len));
            let online = Online { m, l, alpha };
            let sides = (Side::new([a0, a1, a2]), Side::new([b0, b1, b2]));
            let at = [self.batch, self.head];
            let cap = self.tile.soft_cap;
            let extras = PanelExtras::new(extras, cap, at, Which::Queries, sides, keep);
            let memory = Memory { q, k, v, p, acc, online, sides, extras, k_width, v_width };
            simd.vectorize(Walk { block: &self, memory });
        });
    }
}
