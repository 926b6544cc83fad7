//! Exchanges between the ranks of one process: buffers change hands, and no data is copied.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::buffer::HostBuffer;
use crate::error::{Error, Result};
use crate::schedule::{Exchange, Transfer};
use crate::transport::Transport;

/// The address of a message: sender, receiver, and the number of earlier messages between them.
type Address = (usize, usize, usize);

/// The messages that ranks of one ring have sent to each other.
#[derive(Debug, Default)]
pub struct Mailboxes {
    messages: Mutex<Messages>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct Messages {
    waiting: HashMap<Address, HostBuffer>,
    /// The first rank that failed, and the reason.
    broken: Option<(usize, String)>,
}

impl Mailboxes {
    /// Makes every rank that waits, or will wait, fail because `rank` failed.
    pub fn break_ring(&self, rank: usize, reason: String) {
        self.lock().broken.get_or_insert((rank, reason));
        self.arrived.notify_all();
    }

    fn put(&self, address: Address, buffer: HostBuffer) {
        self.lock().waiting.insert(address, buffer);
        self.arrived.notify_all();
    }

    fn take(&self, address: Address, world_size: usize) -> Result<HostBuffer> {
        let mut messages = self.lock();
        loop {
            if let Some(buffer) = messages.waiting.remove(&address) {
                return Ok(buffer);
            }
            if let Some((peer, reason)) = &messages.broken {
                let (peer, reason) = (*peer, reason.clone());
                return Err(Error::RingBroken { rank: address.1, peer, world_size, reason });
            }
            messages = self.arrived.wait(messages).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Messages> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One rank's end of the exchanges within a process. A send hands over the buffer itself: from then
/// on the sender's schedule leaves the buffer alone, or both ranks only read it.
#[derive(Debug)]
pub struct HostTransport {
    rank: usize,
    world_size: usize,
    mailboxes: Arc<Mailboxes>,
    sent: HashMap<usize, usize>,
    received: HashMap<usize, usize>,
    bytes: u64,
}

impl HostTransport {
    /// Makes the end of `rank` in a ring of `world_size` ranks.
    pub fn new(rank: usize, world_size: usize, mailboxes: Arc<Mailboxes>) -> HostTransport {
        let (sent, received) = (HashMap::new(), HashMap::new());
        HostTransport { rank, world_size, mailboxes, sent, received, bytes: 0 }
    }
}

/// Returns the number of earlier messages between the two ranks, and counts this one.
fn next(counters: &mut HashMap<usize, usize>, transfer: &Transfer) -> usize {
    let counter = counters.entry(transfer.peer).or_default();
    *counter += 1;
    *counter - 1
}

impl Transport<HostBuffer> for HostTransport {
    type Ticket = Vec<Address>;

    fn start(&mut self, exchange: &Exchange, outgoing: Vec<HostBuffer>) -> Result<Vec<Address>> {
        for (send, buffer) in exchange.sends.iter().zip(outgoing) {
            self.bytes += buffer.bytes(&send.chunk.rows) as u64;
            let address = (self.rank, send.peer, next(&mut self.sent, send));
            self.mailboxes.put(address, buffer.slice(&send.chunk.rows));
        }
        let receives = exchange.receives.iter();
        Ok(receives.map(|r| (r.peer, self.rank, next(&mut self.received, r))).collect())
    }

    fn finish(&mut self, ticket: Vec<Address>) -> Result<Vec<HostBuffer>> {
        ticket.into_iter().map(|address| self.mailboxes.take(address, self.world_size)).collect()
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes
    }
}
