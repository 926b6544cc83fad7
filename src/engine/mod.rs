//! The engine walks the schedule of one rank over an [`AttentionKernel`] and a [`Transport`].
//!
//! The engine knows only the order of operations. The kernel knows where memory is and how to compute
//! a tile, and the transport knows how a chunk travels.

use std::collections::HashMap;

use crate::error::{Error, Result};
use crate::kernel::{AttentionKernel, BackwardOperands};
use crate::problem::Pass;
use crate::schedule::{Due, Exchange, Payload, Place, Schedule, Step, Tile};
use crate::transport::Transport;

/// Carries out `schedule` on one rank, from the first step to the outputs.
///
/// # Errors
/// The errors of the kernel and of the transport, or [`Error::BrokenSchedule`] if a step uses a
/// slot that holds nothing.
pub fn walk<K, T>(schedule: &Schedule, kernel: &mut K, transport: &mut T) -> Result<()>
where
    K: AttentionKernel,
    T: Transport<K::Buffer>,
{
    let mut walk =
        Walk { schedule, kernel, transport, step: 0, slots: HashMap::new(), in_flight: vec![] };
    if schedule.pass == Pass::Backward {
        walk.kernel.delta()?;
    }
    for step in &schedule.steps {
        walk.step(step)?;
    }
    walk.complete(Due::Begin(usize::MAX / 2))?;
    walk.kernel.finish()
}

struct Walk<'a, K: AttentionKernel, T: Transport<K::Buffer>> {
    schedule: &'a Schedule,
    kernel: &'a mut K,
    transport: &'a mut T,
    step: usize,
    slots: HashMap<(Payload, usize), K::Buffer>,
    /// Exchanges that were started, with their tickets.
    in_flight: Vec<(&'a Exchange, T::Ticket)>,
}

impl<'a, K: AttentionKernel, T: Transport<K::Buffer>> Walk<'a, K, T> {
    fn step(&mut self, step: &'a Step) -> Result<()> {
        self.step = step.index;
        let Schedule { pass, travels, world_size, .. } = self.schedule;
        let name = format_args!("{pass:?} {travels:?} step {} of {world_size}", step.index);
        self.kernel.step(step.index, name);
        self.complete(Due::Begin(step.index))?;
        for (chunk, slot) in &step.opens {
            let buffer = self.kernel.accumulator(chunk, *slot)?;
            self.slots.insert((chunk.payload, *slot), buffer);
        }
        for exchange in &step.exchanges {
            self.start(exchange)?;
        }
        match self.schedule.pass {
            Pass::Forward => self.forward(step)?,
            Pass::Backward => self.backward(step)?,
        }
        for merge in &step.merges {
            let arrived = self.buffer(merge.chunk.payload, Place::Slot(merge.slot))?;
            self.kernel.merge(merge, &arrived)?;
        }
        Ok(())
    }

    /// Runs tiles whose state is at home while accumulators arrive. The other tiles wait for them.
    fn forward(&mut self, step: &Step) -> Result<()> {
        let at_home = |tile: &&Tile| tile.query_state.place == Place::Home;
        for tile in step.tiles.iter().filter(at_home) {
            self.forward_tile(tile)?;
        }
        self.complete(Due::Fold(step.index))?;
        for tile in step.tiles.iter().filter(|tile| !at_home(tile)) {
            self.forward_tile(tile)?;
        }
        Ok(())
    }

    fn forward_tile(&mut self, tile: &Tile) -> Result<()> {
        let queries = self.buffer(Payload::Queries, tile.queries.place)?;
        let keys = self.buffer(Payload::Keys, tile.keys.place)?;
        let partial = self.buffer(Payload::Partial, tile.query_state.place)?;
        self.kernel.forward(tile, &queries, &keys, &partial)
    }

    fn backward(&mut self, step: &Step) -> Result<()> {
        step.tiles.iter().try_for_each(|tile| self.backward_tile(tile, false))?;
        self.complete(Due::Fold(step.index))?;
        step.tiles.iter().try_for_each(|tile| self.backward_tile(tile, true))
    }

    /// Begins a tile with the accumulators at home, or finishes it with all accumulators.
    fn backward_tile(&mut self, tile: &Tile, finishes: bool) -> Result<()> {
        let mut accumulator = |payload, place| {
            let is_there = finishes || place == Place::Home;
            is_there.then(|| self.buffer(payload, place)).transpose()
        };
        let query_grads = accumulator(Payload::QueryGrads, tile.query_state.place)?;
        let key_grads = accumulator(Payload::KeyGrads, tile.key_state.place)?;
        let operands = BackwardOperands {
            queries: &self.buffer(Payload::Queries, tile.queries.place)?,
            keys: &self.buffer(Payload::Keys, tile.keys.place)?,
            query_grads: query_grads.as_ref(),
            key_grads: key_grads.as_ref(),
        };
        match finishes {
            false => self.kernel.backward_begin(tile, operands),
            true => self.kernel.backward_finish(tile, operands),
        }
    }

    fn start(&mut self, exchange: &'a Exchange) -> Result<()> {
        let sends = exchange.sends.iter();
        let outgoing = sends.map(|send| self.buffer(send.chunk.payload, send.place));
        let outgoing = outgoing.collect::<Result<Vec<_>>>()?;
        let ticket = self.transport.start(exchange, outgoing)?;
        self.in_flight.push((exchange, ticket));
        Ok(())
    }

    /// Waits for every exchange that is due by `now`, and puts what arrived into its slots.
    fn complete(&mut self, now: Due) -> Result<()> {
        let due = self.in_flight.extract_if(.., |(exchange, _)| exchange.due.reached_by(now));
        for (exchange, ticket) in Vec::from_iter(due) {
            let arrived = self.transport.finish(ticket)?;
            for (receive, buffer) in exchange.receives.iter().zip(arrived) {
                match receive.place {
                    Place::Slot(slot) => {
                        self.slots.insert((receive.chunk.payload, slot), buffer);
                    }
                    Place::Home => return self.broken(format!("{} lands at home", receive.chunk)),
                }
            }
        }
        Ok(())
    }

    fn buffer(&mut self, payload: Payload, place: Place) -> Result<K::Buffer> {
        let slot = match place {
            Place::Home => return self.kernel.home(payload),
            Place::Slot(slot) => slot,
        };
        match self.slots.get(&(payload, slot)) {
            Some(buffer) => Ok(buffer.clone()),
            None => self.broken(format!("slot {slot} of {payload:?} holds nothing")),
        }
    }

    fn broken<R>(&self, what: String) -> Result<R> {
        Err(Error::BrokenSchedule { rank: self.schedule.rank, step: self.step, what })
    }
}
