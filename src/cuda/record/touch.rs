//! Which memory a call touches, and whether two touch the same.

use std::borrow::Cow;
use std::ops::Range;

use super::What;
use crate::cuda::driver::Block;
use crate::cuda::nccl::Message;

/// A piece of memory that a call touches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Touch {
    /// What it is to the call.
    pub name: Cow<'static, str>,
    /// Where it lies.
    pub block: Block,
    /// Is it written, not only read?
    pub writes: bool,
}

impl What {
    /// All memory that it touches: of launches from the first to the last byte of each array, of
    /// copies and messages exactly what moves.
    pub fn touches(&self) -> Vec<Touch> {
        let touch = |name, block, writes| Touch { name: Cow::Borrowed(name), block, writes };
        match self {
            What::Launch(launch) => {
                let arrays = launch.footprint().into_iter();
                let run = |bytes: Range<u64>| Block::run(bytes.start, bytes.end - bytes.start);
                arrays.map(|array| touch(array.name, run(array.bytes), array.writes)).collect()
            }
            What::Copy(copy) => {
                vec![touch("source", copy.from, false), touch("target", copy.to, true)]
            }
            What::Exchange(exchange) => {
                let message = |message: &Message, writes: bool| {
                    let way = if writes { "receive from" } else { "send to" };
                    let name = Cow::Owned(format!("{way} rank {}", message.peer));
                    Touch { name, block: Block::run(message.address, message.bytes), writes }
                };
                let sends = exchange.group.sends.iter().map(|send| message(send, false));
                let receives = exchange.group.receives.iter();
                sends.chain(receives.map(|receive| message(receive, true))).collect()
            }
            What::Record(_) | What::Wait(_) => vec![],
        }
    }
}

/// The first bytes, in a piece of each, that two blocks have in common.
pub fn common(one: &Block, other: &Block) -> Option<Range<u64>> {
    let (one, other) = (merged(one), merged(other));
    let start = one.address.max(other.address);
    // Pieces ascend, so that of two the one that ends first meets nothing further.
    let (mut n, mut m) = (first_beyond(&one, start), first_beyond(&other, start));
    while n < one.height && m < other.height {
        let (a, b) = (piece(&one, n), piece(&other, m));
        let both = a.start.max(b.start)..a.end.min(b.end);
        if !both.is_empty() {
            return Some(both);
        }
        if a.end <= b.end { n += 1 } else { m += 1 }
    }
    None
}

/// Without gaps it is one piece.
fn merged(block: &Block) -> Block {
    if block.is_run() { Block::run(block.address, block.bytes()) } else { *block }
}

fn piece(block: &Block, index: u64) -> Range<u64> {
    let start = block.address + index * block.pitch;
    start..start.saturating_add(block.width)
}

/// The first piece that may end beyond `address`.
fn first_beyond(block: &Block, address: u64) -> u64 {
    address.saturating_sub(block.address) / block.pitch.max(1)
}
