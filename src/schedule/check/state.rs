//! The check's state of one rank: what its buffers hold and what is in flight.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use super::super::payload::shard_rows;
use super::super::{
    Accumulator, Chunk, Due, Exchange, Merge, Payload, Place, Rows, Schedule, Step, Tile, TileRows,
    Transfer,
};
use super::position_set::PositionSet;
use crate::problem::{Problem, Travels};

const SIDES: [Travels; 2] = [Travels::Queries, Travels::Keys];

/// What went wrong, in words.
type Result<T> = std::result::Result<T, String>;

/// Fails with `what` unless `holds`.
fn ensure(holds: bool, what: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(what()) }
}

/// What a buffer or a message holds.
#[derive(Debug, Clone)]
struct Content {
    chunk: Chunk,
    /// Rows of an input that the rank has neither computed with nor sent on yet.
    unused: Rows,
    /// The positions added to each row of an accumulator. Rows that were not written are absent.
    sums: HashMap<usize, PositionSet>,
}

impl Content {
    fn new(chunk: Chunk) -> Content {
        Content { chunk, unused: Rows::default(), sums: HashMap::new() }
    }

    fn covers(&self, Chunk { owner, rows, .. }: &Chunk) -> bool {
        let held = &self.chunk;
        held.owner == *owner && held.rows.start <= rows.start && rows.end <= held.rows.end
    }

    /// Fails if the rank neither computed with an input row nor sent it on.
    fn check_used(&self) -> Result<()> {
        self.unused.first().map_or(Ok(()), |rows| {
            let chunk = Chunk { rows: rows.clone(), ..self.chunk.clone() };
            Err(format!("{chunk} came, but this rank neither uses it nor sends it on"))
        })
    }
}

/// A message on its way to its receiver.
pub(super) struct Message {
    pub chunk: Chunk,
    due: Due,
    content: Content,
}

/// A buffer that an exchange in flight uses.
struct InFlight {
    payload: Payload,
    place: Place,
    due: Due,
    /// What lands there; `None` for a send, during which the buffer may still be read.
    arriving: Option<Content>,
}

/// One rank in the middle of its schedule.
pub(super) struct RankState<'a> {
    problem: &'a Problem,
    pub schedule: &'a Schedule,
    buffers: HashMap<(Payload, Place), Content>,
    in_flight: Vec<InFlight>,
    /// Rows at home that a tile or merge marked last has touched. In the forward pass, o and lse of
    /// these rows are written.
    finished: HashSet<(Payload, usize)>,
    /// Rows at home that an accumulator was merged into.
    merged: HashSet<(Payload, usize)>,
}

impl<'a> RankState<'a> {
    /// The rank before its first step.
    pub fn new(problem: &'a Problem, schedule: &'a Schedule) -> RankState<'a> {
        let mut buffers = HashMap::new();
        for side in SIDES {
            let rows = 0..shard_rows(problem, side);
            let accumulator = Payload::accumulator(side, schedule.pass);
            for payload in [Some(Payload::input(side)), accumulator].into_iter().flatten() {
                let chunk = Chunk { payload, owner: schedule.rank, rows: rows.clone() };
                buffers.insert((payload, Place::Home), Content::new(chunk));
            }
        }
        let (in_flight, finished, merged) = (vec![], HashSet::new(), HashSet::new());
        RankState { problem, schedule, buffers, in_flight, finished, merged }
    }

    /// The step with this index; `None` if the rank is idle then.
    pub fn step(&self, index: usize) -> Option<&'a Step> {
        self.schedule.steps.iter().find(|step| step.index == index)
    }

    fn exchanges(&self, index: usize) -> &'a [Exchange] {
        self.step(index).map_or(&[], |step| &step.exchanges)
    }

    /// Lands the messages that are due.
    pub fn land(&mut self, now: Due) -> Result<()> {
        let due = self.in_flight.extract_if(.., |flight| flight.due.reached_by(now));
        for InFlight { payload, place, arriving, .. } in due {
            if let Some(content) = arriving {
                let before = self.buffers.insert((payload, place), content);
                before.map_or(Ok(()), |before| before.check_used())?;
            }
        }
        Ok(())
    }

    /// Opens the accumulators of a step.
    pub fn open(&mut self, index: usize) -> Result<()> {
        for (chunk, slot) in self.step(index).iter().flat_map(|step| &step.opens) {
            let place = Place::Slot(*slot);
            ensure(!self.is_in_flight(chunk.payload, place, true), || {
                format!("{chunk} is opened in slot {slot} while an exchange uses the slot")
            })?;
            self.buffers.insert((chunk.payload, place), Content::new(chunk.clone()));
        }
        Ok(())
    }

    /// Starts the sends of a step. Returns each message with its receiver.
    pub fn send(&mut self, index: usize) -> Result<Vec<(usize, Message)>> {
        let exchanges = self.exchanges(index);
        ensure(exchanges.is_sorted_by(|a, b| a.due.moment() < b.due.moment()), || {
            "exchanges of a step do not start in the order of their deadlines".into()
        })?;
        let mut messages = Vec::new();
        for (send, due) in exchanges.iter().flat_map(|e| e.sends.iter().map(|send| (send, e.due))) {
            let content = self.leaving(send)?;
            messages.push((send.peer, Message { chunk: send.chunk.clone(), due, content }));
            self.start(send, due, None);
        }
        Ok(messages)
    }

    /// Starts the receives of a step. `next` returns the next message from a peer.
    pub fn receive(
        &mut self,
        index: usize,
        mut next: impl FnMut(usize) -> Option<Message>,
    ) -> Result<()> {
        for Exchange { receives, due, .. } in self.exchanges(index) {
            for receive in receives {
                let chunk = &receive.chunk;
                ensure(!self.is_in_flight(chunk.payload, receive.place, true), || {
                    format!("{chunk} lands in a buffer that another exchange uses")
                })?;
                let sent = next(receive.peer).ok_or_else(|| format!("{chunk} was never sent"))?;
                ensure(sent.chunk == *chunk && sent.due == *due, || {
                    format!("expects {chunk} by {due:?}, got {} by {:?}", sent.chunk, sent.due)
                })?;
                self.start(receive, *due, Some(sent.content));
            }
        }
        Ok(())
    }

    fn start(&mut self, transfer: &Transfer, due: Due, arriving: Option<Content>) {
        let (payload, place) = (transfer.chunk.payload, transfer.place);
        self.in_flight.push(InFlight { payload, place, due, arriving });
    }

    /// What a send carries away.
    fn leaving(&mut self, Transfer { chunk, place, .. }: &Transfer) -> Result<Content> {
        self.use_input(chunk, *place);
        let held = self.held(chunk, *place)?;
        let mut content = Content::new(chunk.clone());
        for row in chunk.rows.clone().filter(|_| chunk.payload.is_accumulator()) {
            let sum = held.sums.get(&row);
            let sum = sum.ok_or_else(|| format!("{chunk} is sent before it was written"))?;
            content.sums.insert(row, sum.clone());
        }
        if !chunk.payload.is_accumulator() {
            content.unused.insert(chunk.rows.clone());
        }
        Ok(content)
    }

    /// Notes that the rank uses rows of an input.
    fn use_input(&mut self, chunk: &Chunk, place: Place) {
        if let Some(content) = self.buffers.get_mut(&(chunk.payload, place)) {
            content.unused.remove(&chunk.rows);
        }
    }

    /// What a place holds. Fails if it does not hold all of `chunk`, or if a message lands there.
    fn held(&self, chunk: &Chunk, place: Place) -> Result<&Content> {
        ensure(!self.is_in_flight(chunk.payload, place, false), || {
            format!("{chunk} is used in {place:?} before a message has arrived there")
        })?;
        let content = self.buffers.get(&(chunk.payload, place));
        let content = content.filter(|content| content.covers(chunk));
        content.ok_or_else(|| format!("{chunk} is not held in {place:?}"))
    }

    /// Whether a message lands in a buffer or, if the rank wants to write it, leaves from it.
    fn is_in_flight(&self, payload: Payload, place: Place, writes: bool) -> bool {
        self.in_flight.iter().any(|flight| {
            (flight.payload, flight.place) == (payload, place)
                && (writes || flight.arriving.is_some())
        })
    }

    /// Computes a tile.
    pub fn tile(&mut self, tile: &Tile) -> Result<()> {
        let has_pairs = tile.band.pairs(&tile.queries.rows, &tile.keys.rows) > 0;
        for side in SIDES {
            let (TileRows { owner, place, rows }, _) = tile.side(side);
            let (payload, owner, rows) = (Payload::input(side), *owner, rows.clone());
            let chunk = Chunk { payload, owner, rows };
            if !chunk.rows.is_empty() {
                self.held(&chunk, *place)?;
            }
            if has_pairs {
                self.use_input(&chunk, *place);
            }
        }
        let positions = |side| {
            let (TileRows { owner, rows, .. }, _) = tile.side(side);
            self.positions(side, *owner, rows)
        };
        let (queries, keys) = (positions(Travels::Queries), positions(Travels::Keys));
        for side in SIDES {
            let Some(payload) = Payload::accumulator(side, self.schedule.pass) else { continue };
            let (own, other) = match side {
                Travels::Queries => (&queries, &keys),
                Travels::Keys => (&keys, &queries),
            };
            let sees = |own, other| match side {
                Travels::Queries => tile.band.allows(own, other),
                Travels::Keys => tile.band.allows(other, own),
            };
            let seen = |own| other.iter().filter(move |(other, _)| sees(own, *other));
            let sums = own.iter().map(|(row, _)| (*row, seen(*row).map(|(_, p)| *p).collect()));
            let (TileRows { owner, rows, .. }, accumulator) = tile.side(side);
            let chunk = Chunk { payload, owner: *owner, rows: rows.clone() };
            self.add(&chunk, accumulator, sums.collect())?;
        }
        Ok(())
    }

    /// Adds positions to rows of an accumulator.
    fn add(
        &mut self,
        chunk: &Chunk,
        Accumulator { place, first, last }: Accumulator,
        sums: Vec<(usize, Vec<usize>)>,
    ) -> Result<()> {
        let payload = chunk.payload;
        if chunk.rows.is_empty() {
            return Ok(());
        }
        ensure(!self.is_in_flight(payload, place, true), || {
            format!("{chunk} is written while it is exchanged")
        })?;
        ensure(!last || place == Place::Home, || format!("{chunk} is last away from home"))?;
        let is_over = |row: &usize| self.finished.contains(&(payload, *row));
        let over = chunk.rows.clone().find(|row| place == Place::Home && is_over(row));
        if let Some(row) = over {
            return Err(format!("{chunk}: row {row} is touched after its last tile or merge"));
        }
        let total = self.total(payload);
        let content = self.buffers.get_mut(&(payload, place));
        let content = content.filter(|content| content.covers(chunk));
        let known =
            &mut content.ok_or_else(|| format!("{chunk} has no accumulator in {place:?}"))?.sums;
        for (row, seen) in sums {
            ensure(first != known.contains_key(&row), || {
                format!("{chunk}: first is {first} for row {row}")
            })?;
            let sum = known.entry(row).or_insert_with(|| PositionSet::empty(total));
            if let Some(twice) = seen.into_iter().find(|position| !sum.insert(*position)) {
                return Err(format!("{chunk}: row {row} meets position {twice} twice"));
            }
        }
        let finished = chunk.rows.clone().filter(|_| last);
        self.finished.extend(finished.map(|row| (payload, row)));
        Ok(())
    }

    /// Merges an accumulator that came home.
    pub fn merge(&mut self, Merge { chunk, slot, last }: &Merge) -> Result<()> {
        let arrived = self.held(chunk, Place::Slot(*slot))?;
        let sums = chunk.rows.clone().map(|row| (row, arrived.sums[&row].members().collect()));
        let sums = sums.collect();
        self.add(chunk, Accumulator { place: Place::Home, first: false, last: *last }, sums)?;
        self.merged.extend(chunk.rows.clone().map(|row| (chunk.payload, row)));
        Ok(())
    }

    /// Checks the rank after the last step: everything has landed, and every accumulator at home is
    /// complete.
    pub fn end(&self) -> Result<()> {
        self.buffers.values().try_for_each(Content::check_used)?;
        ensure(self.in_flight.is_empty(), || "an exchange is due after the last step".into())?;
        if let Some((payload, row)) = self.merged.difference(&self.finished).next() {
            return Err(format!("row {row} of {payload:?} waits for a last merge"));
        }
        let payloads = SIDES.map(|side| Payload::accumulator(side, self.schedule.pass));
        payloads.into_iter().flatten().try_for_each(|payload| self.complete(payload))
    }

    /// Checks that every row of an accumulator at home has exactly the positions that the mask
    /// allows, and that o and lse were written.
    fn complete(&self, payload: Payload) -> Result<()> {
        let Content { chunk, sums, .. } = &self.buffers[&(payload, Place::Home)];
        let (total, window, side) = (self.total(payload), self.problem.window, payload.side());
        for (row, own) in self.positions(side, chunk.owner, &chunk.rows) {
            let is_written = payload != Payload::Partial || self.finished.contains(&(payload, row));
            ensure(is_written, || format!("row {row} is never finished"))?;
            let mut wanted = PositionSet::empty(total);
            let allowed = |other: &usize| match side {
                Travels::Keys => window.allows(*other, own),
                Travels::Queries => window.allows(own, *other),
            };
            for other in (0..total).filter(allowed) {
                wanted.insert(other);
            }
            ensure(sums.get(&row) == Some(&wanted), || {
                format!("row {row} of {payload:?} misses positions")
            })?;
        }
        Ok(())
    }

    /// Rows of a shard on one side, each with its global position.
    fn positions(&self, side: Travels, rank: usize, rows: &Range<usize>) -> Vec<(usize, usize)> {
        let Problem { layout, world_size, .. } = *self.problem;
        let ranges = layout.strided_ranges(rank, world_size, shard_rows(self.problem, side));
        let range_of = |row| ranges.iter().find(|range| range.rows.contains(&row));
        let position = |row| Some((row, range_of(row)?.position(row)));
        rows.clone().filter_map(position).collect()
    }

    /// How many positions there are on the other side of an accumulator.
    fn total(&self, payload: Payload) -> usize {
        let other = match payload.side() {
            Travels::Keys => Travels::Queries,
            Travels::Queries => Travels::Keys,
        };
        shard_rows(self.problem, other) * self.problem.world_size
    }
}
