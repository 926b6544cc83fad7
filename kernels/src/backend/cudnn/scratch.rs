//! Scratch memory of calls.

use std::ops::Range;

use crate::backend::TilePass;
use crate::launch::{Rectangle, Statistics};

/// Bytes of workspace of most plans, rounded up: plans were seen to take 256.
const WORKSPACE_BYTES: usize = 4096;
/// Bytes that divide the addresses of scratch memory.
const ALIGNMENT: u64 = 256;

/// Scratch memory: addresses of its parts.
pub(super) struct Scratch {
    /// o, or the gradient of the queries.
    pub(super) rows: u64,
    /// lse.
    pub(super) lse: u64,
    /// delta.
    pub(super) delta: u64,
    /// The gradients of keys and values, of each query head.
    pub(super) keys: [u64; 2],
    /// cuDNN's own workspace.
    pub(super) workspace: Range<u64>,
    /// The end.
    pub(super) end: u64,
}

impl Scratch {
    /// Lays out the memory of a pass over a rectangle from an address on.
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
        let lse = take(4 * batch * heads * padded(q_len));
        let delta = take(if is_backward { 4 * queries } else { 0 });
        let columns = if is_backward { [head_dim, value_dim] } else { [0; 2] };
        let keys = columns.map(|columns| take(keys * columns * element.bytes()));
        let start = take(workspace_bytes(rectangle, pass));
        Scratch { rows, lse, delta, keys, workspace: start..end, end }
    }
}

/// Returns enough bytes for cuDNN's own workspace. A fixed order on Hopper takes 8 bytes for each 64
/// query rows of a head.
fn workspace_bytes(rectangle: &Rectangle, pass: TilePass) -> usize {
    let Rectangle { batch, q_len, heads, .. } = *rectangle;
    let blocks = batch * heads * q_len.div_ceil(64);
    match pass {
        TilePass::Forward => WORKSPACE_BYTES,
        TilePass::Backward => WORKSPACE_BYTES.max(256 + 8 * blocks),
    }
}

/// Returns the rows of a head in statistics that kernels read: each head is aligned to 16 bytes.
const fn padded(rows: usize) -> usize {
    rows.next_multiple_of(4)
}

/// Returns the place of statistics without gaps but the padding of each head.
pub(super) fn padded_at(rectangle: &Rectangle, address: u64) -> Statistics {
    of_heads(rectangle, padded(rectangle.q_len), address)
}

/// Returns the place of statistics without gaps. Before version 9.26 cuDNN reads no others in the
/// backward pass, although it accepts them.
pub(super) fn packed_at(rectangle: &Rectangle, address: u64) -> Statistics {
    of_heads(rectangle, rectangle.q_len, address)
}

fn of_heads(rectangle: &Rectangle, rows: usize, address: u64) -> Statistics {
    let head_stride = rows as u64;
    Statistics { address, batch_stride: rectangle.heads as u64 * head_stride, head_stride }
}
