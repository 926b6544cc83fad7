//! Exchange between the ranks of one process: buffers change hands, nothing is copied.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::buffer::HostBuffer;
use crate::error::{Error, Result};
use crate::schedule::{Exchange, Transfer};
use crate::transport::Transport;

/// A message's way: from, to, and how many went that way before.
type Address = (usize, usize, usize);

/// The post office of one ring.
#[derive(Debug, Default)]
pub struct Mailboxes {
    state: Mutex<Post>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct Post {
    waiting: HashMap<Address, HostBuffer>,
    /// The first rank that failed, and why.
    broken: Option<(usize, String)>,
}

impl Mailboxes {
    /// Lets every rank that waits, or will wait, fail because `rank` did.
    pub fn break_ring(&self, rank: usize, reason: String) {
        let mut post = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        post.broken.get_or_insert((rank, reason));
        self.arrived.notify_all();
    }

    fn put(&self, address: Address, buffer: HostBuffer) {
        let mut post = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        post.waiting.insert(address, buffer);
        self.arrived.notify_all();
    }

    fn take(&self, address: Address, world_size: usize) -> Result<HostBuffer> {
        let mut post = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(buffer) = post.waiting.remove(&address) {
                return Ok(buffer);
            }
            if let Some((peer, reason)) = &post.broken {
                let (peer, reason) = (*peer, reason.clone());
                return Err(Error::RingBroken { rank: address.1, peer, world_size, reason });
            }
            post = self.arrived.wait(post).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// One rank's end of the in-process exchange. A send hands over the buffer itself: the sender's
/// schedule leaves it alone from then on, or both only read it.
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
    /// The end of `rank` in a ring of `world_size`.
    pub fn new(rank: usize, world_size: usize, mailboxes: Arc<Mailboxes>) -> HostTransport {
        let (sent, received) = (HashMap::new(), HashMap::new());
        HostTransport { rank, world_size, mailboxes, sent, received, bytes: 0 }
    }
}

/// Number of this message on its way.
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
