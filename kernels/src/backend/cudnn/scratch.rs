//! Scratch memory of calls.

use std::ops::Range;

use crate::backend::TilePass;
use crate::launch::{Rectangle, Statistics};

/// Bytes of workspace of any plan.
const WORKSPACE_BYTES: usize = 4096;
/// Bytes that divide the addresses of scratch memory.
const ALIGNMENT: u64 = 256;

/// Scratch memory: addresses of its parts.
pub(super) struct Scratch {
    /// o, or the gradient of the queries.
    pub(super) rows: u64,
    /// lse, or delta.
    pub(super) statistics: u64,
    /// The gradients of keys and values, of each query head.
    pub(super) keys: [u64; 2],
    /// cuDNN's own workspace.
    pub(super) workspace: Range<u64>,
    /// The end.
    pub(super) end: u64,
}

impl Scratch {
    /// Lays out the memory of a pass over a rectangle from an address on.
    ///
    /// cuDNN's own workspace has room for what plans were seen to take, 256 bytes, rounded up.
    pub(super) fn new(rectangle: &Rectangle, pass: TilePass, address: u64) -> Scratch {
        let Rectangle { batch, q_len, kv_len, heads, head_dim, value_dim, element, .. } =
            *rectangle;
        let mut end = address;
        let mut take = |bytes: usize| {
            let start = end;
            end = (start + bytes as u64).next_multiple_of(ALIGNMENT);
            start
        };
        let (queries, keys) = (batch * q_len * heads, batch * kv_len * heads);
        let is_backward = pass == TilePass::Backward;
        let rows =
            take(queries * if is_backward { 4 * head_dim } else { element.bytes() * value_dim });
        let statistics = take(4 * batch * heads * padded(q_len));
        let columns = if is_backward { [head_dim, value_dim] } else { [0; 2] };
        let keys = columns.map(|columns| take(keys * columns * element.bytes()));
        let start = take(WORKSPACE_BYTES);
        Scratch { rows, statistics, keys, workspace: start..end, end }
    }
}

/// Returns the rows of a head in an array of statistics: each head is aligned to 16 bytes.
const fn padded(rows: usize) -> usize {
    rows.next_multiple_of(4)
}

/// Returns the place of statistics without gaps but the padding of each head.
pub(super) fn statistics_at(rectangle: &Rectangle, address: u64) -> Statistics {
    let head_stride = padded(rectangle.q_len) as u64;
    Statistics { address, batch_stride: rectangle.heads as u64 * head_stride, head_stride }
}
