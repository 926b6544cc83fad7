//! The engine walks the schedule of one rank over an [`AttentionKernel`] and a [`Transport`].
//!
//! It knows the order of things and nothing else: not where memory lies, not how a tile is
//! computed, not how a chunk travels.

use std::collections::HashMap;

use crate::error::{Error, Result};
use crate::kernel::{AttentionKernel, BackwardOperands};
use crate::problem::Pass;
use crate::schedule::{Due, Exchange, Payload, Place, Schedule, Step, Tile};
use crate::transport::Transport;

/// Carries out `schedule` on one rank, from the first step to the outputs.
///
/// # Errors
/// What the kernel or the transport reports, or [`Error::BrokenSchedule`] if a step uses a buffer
/// that nothing was put into.
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

/// An exchange that was started: what to do with it when it is due.
struct InFlight<'a, K> {
    exchange: &'a Exchange,
    ticket: K,
}

struct Walk<'a, K: AttentionKernel, T: Transport<K::Buffer>> {
    schedule: &'a Schedule,
    kernel: &'a mut K,
    transport: &'a mut T,
    step: usize,
    slots: HashMap<(Payload, usize), K::Buffer>,
    in_flight: Vec<InFlight<'a, T::Ticket>>,
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

    /// Tiles whose state is at home run while accumulators arrive; the others wait for them.
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
        let (queries, keys) = (Payload::QueryGrads, Payload::KeyGrads);
        for tile in &step.tiles {
            let query_grads = self.at_home(queries, tile.query_state.place)?;
            let key_grads = self.at_home(keys, tile.key_state.place)?;
            let operands = BackwardOperands {
                queries: &self.buffer(Payload::Queries, tile.queries.place)?,
                keys: &self.buffer(Payload::Keys, tile.keys.place)?,
                query_grads: query_grads.as_ref(),
                key_grads: key_grads.as_ref(),
            };
            self.kernel.backward_begin(tile, operands)?;
        }
        self.complete(Due::Fold(step.index))?;
        for tile in &step.tiles {
            let operands = BackwardOperands {
                queries: &self.buffer(Payload::Queries, tile.queries.place)?,
                keys: &self.buffer(Payload::Keys, tile.keys.place)?,
                query_grads: Some(&self.buffer(queries, tile.query_state.place)?),
                key_grads: Some(&self.buffer(keys, tile.key_state.place)?),
            };
            self.kernel.backward_finish(tile, operands)?;
        }
        Ok(())
    }

    fn start(&mut self, exchange: &'a Exchange) -> Result<()> {
        let sends = exchange.sends.iter();
        let outgoing = sends.map(|send| self.buffer(send.chunk.payload, send.place));
        let outgoing = outgoing.collect::<Result<Vec<_>>>()?;
        let ticket = self.transport.start(exchange, outgoing)?;
        self.in_flight.push(InFlight { exchange, ticket });
        Ok(())
    }

    /// Waits for every exchange that is due by `now` and puts what came where it belongs.
    fn complete(&mut self, now: Due) -> Result<()> {
        let flying = std::mem::take(&mut self.in_flight);
        let (due, later): (Vec<_>, Vec<_>) =
            flying.into_iter().partition(|flight| flight.exchange.due.reached_by(now));
        self.in_flight = later;
        for InFlight { exchange, ticket } in due {
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

    fn at_home(&mut self, payload: Payload, place: Place) -> Result<Option<K::Buffer>> {
        (place == Place::Home).then(|| self.kernel.home(payload)).transpose()
    }

    fn buffer(&mut self, payload: Payload, place: Place) -> Result<K::Buffer> {
        let slot = match place {
            Place::Home => return self.kernel.home(payload),
            Place::Slot(slot) => slot,
        };
        match self.slots.get(&(payload, slot)) {
            Some(buffer) => Ok(buffer.clone()),
            None => self.broken(format!("nothing was put into slot {slot} of {payload:?}")),
        }
    }

    fn broken<R>(&self, what: String) -> Result<R> {
        Err(Error::BrokenSchedule { rank: self.schedule.rank, step: self.step, what })
    }
}
