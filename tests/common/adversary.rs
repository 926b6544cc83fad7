//! A transport that behaves like the worst network. It copies chunks through fixed slots, as a
//! device does, late or early, delayed and out of order. It fills released memory, and slots that
//! are about to receive, with NaN.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use burst_attention::Result;
use burst_attention::host::array::HostArray;
use burst_attention::host::buffer::HostBuffer;
use burst_attention::schedule::{Chunk, Exchange, Payload, Place, Transfer};
use burst_attention::transport::Transport;

use super::data::Random;

type Address = (usize, usize, usize);

/// The network between the ranks.
#[derive(Default)]
pub struct Network {
    post: Mutex<HashMap<Address, (Chunk, HostBuffer)>>,
    arrived: Condvar,
    /// The most slots in which inputs of one side landed on any rank.
    held: AtomicUsize,
}

impl Network {
    /// The most chunks of keys, or of queries, that a rank held or awaited at the same time.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }
}

pub struct Adversary {
    rank: usize,
    network: Arc<Network>,
    random: Random,
    slots: HashMap<(Payload, Place), HostBuffer>,
    counters: HashMap<(usize, bool), usize>,
    bytes: u64,
}

/// An exchange in flight: sends that were read early or will be read late, and awaited receives.
pub struct Ticket {
    late: Vec<(Address, Transfer, HostBuffer)>,
    early: Vec<(Transfer, HostBuffer)>,
    receives: Vec<(Address, Transfer)>,
}

impl Adversary {
    pub fn new(rank: usize, network: Arc<Network>, seed: u64) -> Adversary {
        let random = Random::new(seed * 1000 + rank as u64);
        let (slots, counters) = (HashMap::new(), HashMap::new());
        Adversary { rank, network, random, slots, counters, bytes: 0 }
    }

    fn count(&mut self, peer: usize, sending: bool) -> usize {
        let counter = self.counters.entry((peer, sending)).or_default();
        *counter += 1;
        *counter - 1
    }

    /// Updates the count of held chunks. A slot is memory of a device, so it holds its chunk until
    /// another chunk lands there.
    fn count_held(&self, payload: Payload) {
        let held = self.slots.keys().filter(|(of, _)| *of == payload).count();
        if !payload.is_accumulator() {
            self.network.held.fetch_max(held, Ordering::Relaxed);
        }
    }

    /// Copies the rows, and posts them after a while.
    fn post(&mut self, address: Address, send: &Transfer, buffer: &HostBuffer) {
        let copy = copied(&buffer.slice(&send.chunk.rows));
        std::thread::sleep(Duration::from_micros(self.random.below(200) as u64));
        self.network.post.lock().unwrap().insert(address, (send.chunk.clone(), copy));
        self.network.arrived.notify_all();
    }

    fn wait(&self, address: Address) -> (Chunk, HostBuffer) {
        let mut post = self.network.post.lock().unwrap();
        loop {
            if let Some(message) = post.remove(&address) {
                return message;
            }
            let (guard, timeout) =
                self.network.arrived.wait_timeout(post, Duration::from_secs(5)).unwrap();
            assert!(!timeout.timed_out(), "rank {}: message {address:?} never arrived", self.rank);
            post = guard;
        }
    }
}

/// Returns a copy in memory of its own, as a network delivers it.
fn copied(buffer: &HostBuffer) -> HostBuffer {
    let copy = |source: &HostArray| {
        let &HostArray { dtype, batch, ref rows, heads, dim, .. } = source;
        let bytes = source.bytes(rows);
        let memory = HostArray::accumulator(1, 0..bytes.div_ceil(4), 1, 1);
        let packed = HostArray::jax(memory.ptr, dtype, [batch, rows.len(), heads, dim]);
        let target = HostArray { rows: rows.clone(), storage: memory.storage, ..packed };
        for (batch, row, head) in indices(source) {
            let (from, to) = (source.row(batch, row, head), target.row(batch, row, head));
            // SAFETY: both arrays have this row of `dim` elements, and the target is new memory.
            unsafe { from.copy_to_nonoverlapping(to, dim * dtype.bytes()) }
        }
        target
    };
    HostBuffer { arrays: buffer.arrays.iter().map(copy).collect() }
}

/// Overwrites all elements with NaN, so that use after release shows.
fn poison(buffer: &HostBuffer) {
    for array in &buffer.arrays {
        for (batch, row, head) in indices(array) {
            let row = array.row(batch, row, head);
            // SAFETY: the array has this row. All bits set are NaN in every element type.
            unsafe { row.write_bytes(0xff, array.dim * array.dtype.bytes()) }
        }
    }
}

/// Batch entry, row and head of each row of an array.
fn indices(array: &HostArray) -> Vec<(usize, usize, usize)> {
    let (rows, heads) = (&array.rows, array.heads);
    let rows =
        |batch| rows.clone().flat_map(move |row| (0..heads).map(move |head| (batch, row, head)));
    (0..array.batch).flat_map(rows).collect()
}

impl Transport<HostBuffer> for Adversary {
    type Ticket = Ticket;

    fn start(&mut self, exchange: &Exchange, outgoing: Vec<HostBuffer>) -> Result<Ticket> {
        let mut ticket = Ticket { late: vec![], early: vec![], receives: vec![] };
        for (send, buffer) in exchange.sends.iter().zip(outgoing) {
            self.bytes += buffer.bytes(&send.chunk.rows) as u64;
            let address = (self.rank, send.peer, self.count(send.peer, true));
            ticket.late.push((address, send.clone(), buffer));
        }
        for receive in &exchange.receives {
            let address = (receive.peer, self.rank, self.count(receive.peer, false));
            if let Some(slot) = self.slots.remove(&(receive.chunk.payload, receive.place)) {
                poison(&slot);
            }
            ticket.receives.push((address, receive.clone()));
        }
        if self.random.below(2) == 0 {
            while !ticket.late.is_empty() {
                let index = self.random.below(ticket.late.len());
                let (address, send, buffer) = ticket.late.swap_remove(index);
                self.post(address, &send, &buffer);
                ticket.early.push((send, buffer));
            }
        }
        Ok(ticket)
    }

    fn finish(&mut self, ticket: Ticket) -> Result<Vec<HostBuffer>> {
        for (address, send, buffer) in &ticket.late {
            self.post(*address, send, buffer);
        }
        let sent = ticket.late.into_iter().map(|(_, send, buffer)| (send, buffer));
        for (send, buffer) in sent.chain(ticket.early) {
            // Accumulators are gone. The rank may read an input and send it again until another
            // chunk lands there.
            if send.place != Place::Home && send.chunk.payload.is_accumulator() {
                poison(&buffer.slice(&send.chunk.rows));
            }
        }
        let mut arrived = Vec::new();
        for (address, receive) in ticket.receives {
            let (chunk, buffer) = self.wait(address);
            assert_eq!(chunk, receive.chunk, "rank {}", self.rank);
            self.slots.insert((chunk.payload, receive.place), buffer.clone());
            self.count_held(chunk.payload);
            arrived.push(buffer);
        }
        Ok(arrived)
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes
    }
}
