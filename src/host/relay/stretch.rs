//! Kernel and transport of one stretch: what the engine asks for outside of it is left undone.

use std::cell::Cell;
use std::ptr::NonNull;

use rayon::ThreadPool;

use super::arena::Blocks;
use super::plan::{Plan, Stowed};
use crate::error::{Error, Result};
use crate::host::buffer::{HostBuffer, items};
use crate::host::cast;
use crate::host::kernel::HostKernel;
use crate::kernel::{AttentionKernel, BackwardOperands};
use crate::schedule::{Chunk, Due, Exchange, Merge, Payload, Place, Tile, Transfer};
use crate::transport::Transport;

/// Computes what belongs to one stretch.
#[derive(Debug)]
pub struct StretchKernel<'a> {
    pub kernel: HostKernel<'a>,
    pub plan: &'a Plan,
    /// The stretch to compute.
    pub own: usize,
    /// The stretch that the walk is in.
    pub now: &'a Cell<usize>,
}

impl StretchKernel<'_> {
    fn is_in_own(&self) -> bool {
        self.now.get() == self.own
    }
}

impl AttentionKernel for StretchKernel<'_> {
    type Buffer = HostBuffer;

    fn home(&mut self, payload: Payload) -> Result<HostBuffer> {
        self.kernel.home(payload)
    }

    fn accumulator(&mut self, chunk: &Chunk, slot: usize) -> Result<HostBuffer> {
        self.kernel.accumulator(chunk, slot)
    }

    fn forward(
        &mut self,
        tile: &Tile,
        queries: &HostBuffer,
        keys: &HostBuffer,
        partial: &HostBuffer,
    ) -> Result<()> {
        if self.is_in_own() { self.kernel.forward(tile, queries, keys, partial) } else { Ok(()) }
    }

    fn delta(&mut self) -> Result<()> {
        if self.own == 0 { self.kernel.delta() } else { Ok(()) }
    }

    fn backward_begin(
        &mut self,
        tile: &Tile,
        operands: BackwardOperands<'_, HostBuffer>,
    ) -> Result<()> {
        if self.is_in_own() { self.kernel.backward_begin(tile, operands) } else { Ok(()) }
    }

    fn backward_finish(
        &mut self,
        tile: &Tile,
        operands: BackwardOperands<'_, HostBuffer>,
    ) -> Result<()> {
        if self.is_in_own() { self.kernel.backward_finish(tile, operands) } else { Ok(()) }
    }

    fn merge(&mut self, merge: &Merge, arrived: &HostBuffer) -> Result<()> {
        if self.is_in_own() { self.kernel.merge(merge, arrived) } else { Ok(()) }
    }

    fn finish(&mut self) -> Result<()> {
        if self.own + 1 == self.plan.stretches() { self.kernel.finish() } else { Ok(()) }
    }

    fn step(&mut self, index: usize, name: std::fmt::Arguments<'_>) {
        self.now.set(self.plan.stretch_at(Due::Begin(index)));
        if self.is_in_own() {
            self.kernel.step(index, name);
        }
    }
}

/// Fills the parcels that leave in a stretch and empties those that come.
#[derive(Debug)]
pub struct StretchTransport<'a> {
    plan: &'a Plan,
    own: usize,
    now: &'a Cell<usize>,
    rank: usize,
    pool: &'a ThreadPool,
    blocks: Blocks<'a>,
    /// Of each hop of the plan, the parcels if they are at hand in this stretch.
    parcels: Vec<Option<NonNull<u8>>>,
    sent: usize,
    received: usize,
    bytes: u64,
}

/// What is expected, each message with its place in a parcel.
type Ticket = (Due, Vec<(Transfer, Stowed)>);

impl<'a> StretchTransport<'a> {
    /// With the parcels of all hops to and from the stretch.
    ///
    /// # Errors
    /// If there are more or fewer.
    pub fn new(
        (plan, own, now): (&'a Plan, usize, &'a Cell<usize>),
        rank: usize,
        (pool, blocks): (&'a ThreadPool, Blocks<'a>),
        arrivals: &[NonNull<u8>],
        departures: &[NonNull<u8>],
    ) -> Result<StretchTransport<'a>> {
        let mut sides = [("parcels that come", arrivals), ("parcels that leave", departures)];
        let mut next = |side: usize| {
            let (name, given) = &mut sides[side];
            let missing = || Error::InvalidProblem {
                name,
                expected: "one for each hop of the stretch".into(),
                got: "fewer".into(),
            };
            let (first, rest) = given.split_first().ok_or_else(missing)?;
            *given = rest;
            Ok(Some(*first))
        };
        let parcels = plan.hops.iter().map(|hop| match (hop.to == own, hop.from == own) {
            (true, _) => next(0),
            (_, true) => next(1),
            _ => Ok(None),
        });
        let parcels = parcels.collect::<Result<_>>()?;
        if let Some((name, left)) = sides.iter().find(|(_, left)| !left.is_empty()) {
            let expected = "one for each hop of the stretch".into();
            return Err(Error::InvalidProblem {
                name,
                expected,
                got: format!("{} more", left.len()),
            });
        }
        let (sent, received, bytes) = (0, 0, 0);
        Ok(StretchTransport { plan, own, now, rank, pool, blocks, parcels, sent, received, bytes })
    }

    /// The message as it lies in its parcel: array behind array, none with gaps.
    fn in_parcel(&self, chunk: &Chunk, Stowed { hop, offset }: Stowed) -> Result<HostBuffer> {
        let (problem, Plan { hops, .. }) = (self.blocks.problem, self.plan);
        let Some(first) = self.parcels.get(hop).copied().flatten() else {
            return self.broken(format!("there is no parcel for {chunk}"));
        };
        // SAFETY: the plan's offsets lie within its parcels.
        let mut next = unsafe { first.add(offset) };
        let items = items(problem, chunk.payload, self.pass());
        let arrays = items.iter().map(|item| {
            let memory = next;
            // SAFETY: as above; what is behind the last item is at most the parcel's end.
            next = unsafe { next.add(item.bytes(chunk.rows.len())) };
            item.view(memory, (problem.batch, chunk.rows.clone()), hops[hop].bytes)
        });
        Ok(HostBuffer { arrays: arrays.collect() })
    }

    fn pass(&self) -> crate::problem::Pass {
        self.blocks.arena.pass
    }

    fn copy(&self, from: &HostBuffer, to: &HostBuffer) {
        for (from, to) in from.arrays.iter().zip(&to.arrays) {
            cast::copy(self.pool, from, to);
        }
    }

    fn broken<R>(&self, what: String) -> Result<R> {
        Err(Error::BrokenSchedule { rank: self.rank, step: self.now.get(), what })
    }
}

impl Transport<HostBuffer> for StretchTransport<'_> {
    type Ticket = Ticket;

    fn start(&mut self, exchange: &Exchange, outgoing: Vec<HostBuffer>) -> Result<Ticket> {
        for (send, buffer) in exchange.sends.iter().zip(outgoing) {
            let Some(stowed) = self.plan.send(self.rank, self.sent) else {
                return self.broken(format!("the plan does not know of {}", send.chunk));
            };
            self.sent += 1;
            if self.now.get() == self.own {
                let rows = &send.chunk.rows;
                self.copy(&buffer.slice(rows), &self.in_parcel(&send.chunk, stowed)?);
                self.bytes += buffer.bytes(rows) as u64;
            }
        }
        let mut expected = Vec::new();
        for receive in &exchange.receives {
            let Some(stowed) = self.plan.receive(self.rank, self.received) else {
                return self.broken(format!("the plan does not know of {}", receive.chunk));
            };
            self.received += 1;
            expected.push((receive.clone(), stowed));
        }
        Ok((exchange.due, expected))
    }

    fn finish(&mut self, (due, expected): Ticket) -> Result<Vec<HostBuffer>> {
        self.now.set(self.now.get().max(self.plan.stretch_at(due)));
        let mut arrived = Vec::new();
        for (Transfer { chunk, place, .. }, stowed) in expected {
            let Place::Slot(slot) = place else {
                return self.broken(format!("{chunk} lands at home"));
            };
            let buffer = self.blocks.slot(chunk.payload, slot, &chunk.rows);
            if self.plan.hops.get(stowed.hop).is_some_and(|hop| hop.to == self.own) {
                self.copy(&self.in_parcel(&chunk, stowed)?, &buffer);
            }
            arrived.push(buffer);
        }
        Ok(arrived)
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes
    }
}
