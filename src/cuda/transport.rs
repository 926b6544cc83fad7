//! One rank's transport: an exchange of chunks becomes a command on the command list.

use super::buffer::Buffer;
use super::commands::{CommandListBuilder, PeerBlocks, Work};
use super::driver::Block;
use super::rank::RankMemory;
use super::region::{Queue, reads, writes};
use crate::error::{Error, Result};
use crate::schedule::{Chunk, Exchange, Place, Schedule, Transfer};
use crate::transport::Transport;

/// Appends the exchanges of one rank to a command list, as [`Work::Blocks`].
#[derive(Debug)]
pub struct CommandTransport<'a> {
    pub(super) schedule: &'a Schedule,
    pub(super) memory: RankMemory<'a>,
    pub(super) list: &'a CommandListBuilder,
    /// The bytes sent so far.
    pub(super) bytes: u64,
}

impl CommandTransport<'_> {
    /// Returns each block of a transfer with the peer of the transfer.
    fn blocks(&self, transfer: &Transfer, buffer: &Buffer) -> Vec<(usize, Block)> {
        let Chunk { payload, rows, .. } = &transfer.chunk;
        let whole = *rows == (0..self.memory.heads_and_rows(*payload).1);
        let blocks = buffer.blocks(rows, whole).into_iter();
        blocks.map(|block| (transfer.peer, block)).collect()
    }

    fn slot(&self, transfer: &Transfer) -> Result<Buffer> {
        let Chunk { payload, rows, .. } = &transfer.chunk;
        let slot = match transfer.place {
            Place::Slot(slot) => self.memory.slot(*payload, slot, rows),
            Place::Home => None,
        };
        slot.ok_or_else(|| Error::BrokenSchedule {
            rank: self.schedule.rank,
            step: self.list.step(),
            what: format!("the workspace has no place for {}", transfer.chunk),
        })
    }
}

impl Transport<Buffer> for CommandTransport<'_> {
    type Ticket = Vec<Buffer>;

    fn start(&mut self, exchange: &Exchange, outgoing: Vec<Buffer>) -> Result<Vec<Buffer>> {
        let (mut blocks, mut uses) = (PeerBlocks::default(), Vec::new());
        for (send, buffer) in exchange.sends.iter().zip(outgoing) {
            let problem = self.memory.problem;
            let row = send.chunk.payload.row_bytes(problem, self.schedule.pass);
            self.bytes += (row * send.chunk.rows.len()) as u64;
            blocks.sends.extend(self.blocks(send, &buffer));
            uses.push(reads(buffer.region));
        }
        let mut arriving = Vec::new();
        for receive in &exchange.receives {
            let buffer = self.slot(receive)?;
            blocks.receives.extend(self.blocks(receive, &buffer));
            uses.push(writes(buffer.region));
            arriving.push(buffer);
        }
        let queue = Queue::of(exchange, self.list.step());
        self.list.push(queue, Work::Blocks(blocks), uses);
        Ok(arriving)
    }

    /// Returns the buffers at once: the events between queues make their readers wait.
    fn finish(&mut self, arriving: Vec<Buffer>) -> Result<Vec<Buffer>> {
        Ok(arriving)
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes
    }
}
