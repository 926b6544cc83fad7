//! The part of a tile that both passes have in common.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::array::HostArray;
use super::features::TileFeatures;
use crate::mask::Band;

/// A rectangle of queries × keys, and how their scores come about.
#[derive(Debug, Clone)]
pub struct TileInputs<'a> {
    /// Queries.
    pub q: &'a HostArray,
    /// Keys; query head h uses key head h / group_size.
    pub k: &'a HostArray,
    /// Values, with the heads of the keys.
    pub v: &'a HostArray,
    /// Query rows, counted from the start of their owner's shard.
    pub q_rows: Range<usize>,
    /// Key rows, counted from the start of their owner's shard. May be empty.
    pub k_rows: Range<usize>,
    /// The pairs that may see each other, in the same row numbers.
    pub band: Band,
    /// Factor on q·k.
    pub softmax_scale: f32,
    /// Logits become `cap · tanh(logit / cap)`; `None` leaves them as they are.
    pub soft_cap: Option<f32>,
    /// The arrays of other features.
    pub features: TileFeatures<'a>,
    /// Counts the pairs of query and key that the kernel computes scores of, where they are wanted.
    pub pairs: Option<&'a AtomicU64>,
}

impl TileInputs<'_> {
    /// Counts pairs of queries and keys.
    pub(super) fn count_pairs(&self, queries: usize, keys: usize) {
        if let Some(pairs) = self.pairs {
            pairs.fetch_add((queries * keys) as u64, Ordering::Relaxed);
        }
    }
}
