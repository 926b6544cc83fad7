//! What moves chunks between GPUs: exchanges become operations on the tape.

use std::ops::Range;

use super::driver::{Block, Copy};
use super::memory::{Buffer, Region};
use super::nccl::{Group, Message};
use super::rank::Memory;
use super::recording::{Recording, reads, writes};
use super::tape::{Op, Queue, Work};
use crate::error::{Error, Result};
use crate::schedule::{Chunk, Exchange, Payload, Place, Schedule, Transfer};
use crate::transport::Transport;

/// Pieces of memory that go to, or come from, other ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pieces {
    /// Rank at the other end and memory of each piece that is sent.
    pub sends: Vec<(usize, Block)>,
    /// Likewise of each that comes; none of them has gaps.
    pub receives: Vec<(usize, Block)>,
}

/// Puts the exchanges of one rank on a tape, as [`Work::Pieces`].
#[derive(Debug)]
pub struct TapeTransport<'a> {
    schedule: &'a Schedule,
    memory: Memory<'a>,
    tape: &'a Recording,
    bytes: u64,
}

impl<'a> TapeTransport<'a> {
    /// For one rank.
    pub fn new(
        schedule: &'a Schedule,
        memory: Memory<'a>,
        tape: &'a Recording,
    ) -> TapeTransport<'a> {
        TapeTransport { schedule, memory, tape, bytes: 0 }
    }

    /// Are these all rows of a shard?
    fn is_whole(&self, Chunk { payload, rows, .. }: &Chunk) -> bool {
        let all: Range<usize> = match payload {
            Payload::Keys | Payload::KeyGrads => 0..self.memory.problem.kv_len,
            _ => 0..self.memory.problem.q_len,
        };
        *rows == all
    }

    fn slot(&self, transfer: &Transfer) -> Result<Buffer> {
        let Chunk { payload, rows, .. } = &transfer.chunk;
        let slot = match transfer.place {
            Place::Slot(slot) => self.memory.slot(*payload, slot, rows),
            Place::Home => None,
        };
        slot.ok_or_else(|| Error::BrokenSchedule {
            rank: self.schedule.rank,
            step: self.tape.step(),
            what: format!("the workspace has no place for {}", transfer.chunk),
        })
    }
}

impl Transport<Buffer> for TapeTransport<'_> {
    type Ticket = Vec<Buffer>;

    fn start(&mut self, exchange: &Exchange, outgoing: Vec<Buffer>) -> Result<Vec<Buffer>> {
        let (mut pieces, mut uses) = (Pieces::default(), Vec::new());
        for (send, buffer) in exchange.sends.iter().zip(outgoing) {
            let problem = self.memory.problem;
            let row = problem.row_bytes(send.chunk.payload, self.schedule.pass);
            self.bytes += (row * send.chunk.rows.len()) as u64;
            let blocks = buffer.blocks(&send.chunk.rows, self.is_whole(&send.chunk));
            pieces.sends.extend(blocks.into_iter().map(|block| (send.peer, block)));
            uses.push(reads(buffer.region));
        }
        let mut arriving = Vec::new();
        for receive in &exchange.receives {
            let buffer = self.slot(receive)?;
            let blocks = buffer.blocks(&receive.chunk.rows, self.is_whole(&receive.chunk));
            pieces.receives.extend(blocks.into_iter().map(|block| (receive.peer, block)));
            uses.push(writes(buffer.region));
            arriving.push(buffer);
        }
        let queue = Queue::of(exchange, self.tape.step());
        self.tape.push(queue, Work::Pieces(pieces), uses);
        Ok(arriving)
    }

    /// Nothing to do: whoever uses what arrives is made to wait for it.
    fn finish(&mut self, arriving: Vec<Buffer>) -> Result<Vec<Buffer>> {
        Ok(arriving)
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes
    }
}

/// Turns pieces into messages. Those with gaps are first put together in the queue's staging memory,
/// which its next exchange may use again, as both run in order.
///
/// # Errors
/// If there is no such memory.
pub fn to_messages(ops: Vec<Op>, staging: impl Fn(Queue) -> Option<u64>) -> Result<Vec<Op>> {
    let mut lowered = Vec::with_capacity(ops.len());
    for op in ops {
        let Op { queue, step, work: Work::Pieces(pieces), mut uses } = op else {
            lowered.push(op);
            continue;
        };
        let mut next = staging(queue);
        let mut group = Group::default();
        for (peer, block) in pieces.sends {
            let mut address = block.address;
            if !block.is_run() {
                address = next.ok_or(Error::Workspace {
                    name: "staging memory",
                    expected: block.bytes(),
                    got: 0,
                })?;
                next = Some(address + block.bytes());
                let mut uses = uses.clone();
                uses.retain(|used| !used.writes);
                uses.push(writes(Region::Staging(queue)));
                let copy = Work::Copy(Copy { from: block, to: block.packed_at(address) });
                lowered.push(Op { queue, step, work: copy, uses });
            }
            group.sends.push(Message { address, bytes: block.bytes(), peer });
        }
        let receives = pieces.receives.into_iter();
        group.receives = receives
            .map(|(peer, block)| Message { address: block.address, bytes: block.bytes(), peer })
            .collect();
        uses.push(reads(Region::Staging(queue)));
        lowered.push(Op { queue, step, work: Work::Exchange(group), uses });
    }
    Ok(lowered)
}
