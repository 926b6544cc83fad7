//! Which memory a call touches, and whether two calls touch the same memory.

use std::borrow::Cow;
use std::ops::Range;

use burst_attention::cuda::driver::Block;
use burst_attention::cuda::nccl::Message;
use burst_attention_kernels::launch::Footprint;

use super::Operation;

/// Memory that a call touches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Touch {
    /// The name of the memory in the call.
    pub name: Cow<'static, str>,
    /// The memory.
    pub block: Block,
    /// Whether the call writes it; otherwise the call only reads it.
    pub writes: bool,
}

impl Operation {
    /// Returns all memory that the operation touches. A launch counts as touching each array from
    /// its first to its last byte; copies and messages touch exactly the bytes that move.
    pub fn touches(&self) -> Vec<Touch> {
        let touch = |name, block, writes| Touch { name: Cow::Borrowed(name), block, writes };
        let array = |Footprint { name, bytes, writes, .. }: Footprint| {
            touch(name, Block::one_line(bytes.start, bytes.end - bytes.start), writes)
        };
        match self {
            Operation::Launch(launch) => launch.footprint().into_iter().map(array).collect(),
            Operation::Library(call) => call.footprint().map(array).collect(),
            Operation::Copy(copy) => {
                vec![touch("source", copy.from, false), touch("target", copy.to, true)]
            }
            Operation::Exchange(exchange) => {
                let message = |message: &Message, writes: bool| {
                    let verb = if writes { "receive from" } else { "send to" };
                    let name = Cow::Owned(format!("{verb} rank {}", message.peer));
                    Touch { name, block: Block::one_line(message.address, message.bytes), writes }
                };
                let sends = exchange.group.sends.iter().map(|send| message(send, false));
                let receives = exchange.group.receives.iter();
                sends.chain(receives.map(|receive| message(receive, true))).collect()
            }
            Operation::Record(_) | Operation::Wait(_) => vec![],
        }
    }
}

/// Returns the first bytes, within one line of each block, that two blocks have in common.
pub fn common(one: &Block, other: &Block) -> Option<Range<u64>> {
    let (one, other) = (merged(one), merged(other));
    let start = one.address.max(other.address);
    // Lines ascend, so the line that ends first meets no later line of the other block.
    let (mut n, mut m) = (first_beyond(&one, start), first_beyond(&other, start));
    while n < one.height && m < other.height {
        let (a, b) = (line(&one, n), line(&other, m));
        let both = a.start.max(b.start)..a.end.min(b.end);
        if !both.is_empty() {
            return Some(both);
        }
        if a.end <= b.end { n += 1 } else { m += 1 }
    }
    None
}

/// Returns the block as one line if it has no gaps.
fn merged(block: &Block) -> Block {
    if block.is_contiguous() { Block::one_line(block.address, block.bytes()) } else { *block }
}

fn line(block: &Block, index: u64) -> Range<u64> {
    let start = block.address + index * block.pitch;
    start..start.saturating_add(block.width)
}

/// Returns the index of the first line that may end beyond `address`.
fn first_beyond(block: &Block, address: u64) -> u64 {
    address.saturating_sub(block.address) / block.pitch.max(1)
}
