//! Attention of new queries to one rank's part of a key/value cache, on the CPU: the partial result
//! of the rank.
//!
//! A source is a sequence, or a prefix that sequences share. Its keys lie in pages, and its row i on
//! rank r of P has the position
//!
//! ```text
//! p(i) = ⌊i / I⌋ · P·I + r·I + i mod I
//! ```
//!
//! where I is the interleave. A task takes one chunk of a source's rows in some heads, and all
//! queries that read the source, so it reads memory once and in its order. The online softmax of
//! the task gives a partial result for each query, and a query's partial results are merged in the
//! order of the chunks.
//!
//! Chunks and tiles of rows begin at multiples of their length, and each sum has one order,
//! whichever kernel computes it. So the bits of a query's result depend on nothing but the query,
//! the keys that it sees and the shape of the call's arrays: not on other entries, on page ids or on
//! the number of threads.

mod chunk;
mod copies;
mod element;
mod event;
mod lane;
mod many_rows;
mod merge;
mod online;
mod parts;
mod plan;
mod row_blocks;
mod sums;
mod tile;

use rayon::ThreadPool;
use rayon::prelude::*;

use self::chunk::ChunkTask;
pub use self::event::event;
use self::merge::{MergeTask, Partials};
pub use self::parts::merge_parts;
use self::plan::Plan;
use super::array::HostArray;
use super::isa::Isa;
use super::scratch::InScratch;

/// Query heads from which on the rows that share a head of keys are many. Then the CPU's products take
/// the time, not the reads.
const MANY: usize = 16;

/// The arrays and numbers of a call.
#[derive(Debug)]
pub struct DecodeIo<'a> {
    /// Queries `[batch, seq, heads, dim]`.
    pub q: HostArray,
    /// Keys `[pages, page, kv_heads, dim]`, of the queries' type.
    pub k: HostArray,
    /// Values `[pages, page, kv_heads, value_dim]`, of the queries' type. They may be the first
    /// columns of the keys, and are then read once, with them.
    pub v: HostArray,
    /// The pages of each source, `[sources, pages_per_source]`. The rows of a page out of range are
    /// hidden.
    pub page_table: &'a [i32],
    /// Length of the second axis of `page_table`.
    pub pages_per_source: usize,
    /// For each entry of the batch, its source; an entry whose source is out of range sees nothing.
    pub source: &'a [i32],
    /// For each entry, the number of positions of its source that are in use.
    pub lengths: &'a [i32],
    /// For each entry, the position of its first query.
    pub starts: &'a [i32],
    /// For each entry, the number of queries in use; later queries see nothing.
    pub query_lengths: &'a [i32],
    /// ALiBi's slope of each head.
    pub slopes: Option<&'a [f32]>,
    /// Factor on the products of queries and keys.
    pub scale: f32,
    /// The soft cap of scores; 0 for none.
    pub soft_cap: f32,
    /// How many positions before its own a query sees; `None` for all.
    pub window: Option<u32>,
    /// The interleave, at least 1.
    pub interleave: i64,
    /// This device's rank, and the number of ranks.
    pub rank: (i64, i64),
    /// Result: the output over this rank's keys, float32 `[batch, seq, heads, value_dim]`; 0 for a
    /// query that sees no key.
    pub o: HostArray,
    /// Result: the logarithm of the sum of e^score, float32 `[batch, seq, heads, 1]`; −∞ for a
    /// query that sees no key.
    pub lse: HostArray,
}

impl DecodeIo<'_> {
    /// Returns the rows that each source has room for on this rank.
    fn capacity(&self) -> usize {
        self.pages_per_source * self.k.rows.len()
    }

    /// Whether the values are the first columns of the keys.
    fn values_in_keys(&self) -> bool {
        self.v.ptr == self.k.ptr && self.v.row_stride == self.k.row_stride
    }

    /// Returns the query heads that share a head of keys.
    fn group(&self) -> usize {
        self.q.heads / self.k.heads.max(1)
    }
}

/// Computes the partial result of one rank:
///
/// ```text
/// s = cap(scale · q·k) + slope · (p(key) − p(query));   lse = ln Σ e^s;   o = Σ e^(s − lse) v
/// ```
///
/// over the keys with p(key) < length, p(key) ≤ p(query) and p(query) − p(key) ≤ window.
///
/// # Panics
/// If the CPU lacks the instruction set.
pub fn partial((isa, pool): (Isa, &ThreadPool), io: &DecodeIo<'_>) {
    let plan = Plan::new(io, pool.current_num_threads());
    let partials = Partials::new(io, &plan);
    let chunk = |index| isa.run(InScratch(ChunkTask::new(io, &plan, &partials, index)));
    let merge = |index| isa.run(InScratch(MergeTask::new(io, &plan, &partials, index)));
    plan.blind.iter().for_each(|query| merge::write_nothing(io, *query));
    if plan.tasks.len() < 2 {
        return (0..plan.tasks.len()).for_each(chunk);
    }
    pool.install(|| {
        (0..plan.tasks.len()).into_par_iter().for_each(chunk);
        (0..plan.merges.len() * io.q.heads).into_par_iter().for_each(merge);
    });
}
