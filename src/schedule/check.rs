//! Proves schedules right by carrying them out on sets instead of numbers.
//!
//! All ranks are walked step by step. A buffer holds, for each row, the set of global positions
//! whose contribution it contains; so at the end the home accumulators show whether every allowed
//! pair was computed exactly once by someone who held both sides and found its way home.

use std::collections::HashMap;
use std::ops::Range;

use super::held::{Content, Flight, Rank};
use super::positions::Positions;
use super::{Chunk, Due, Merge, Operand, Payload, Place, Rows, Schedule, State, Tile, Transfer};
use crate::problem::{Pass, Problem};

/// What is wrong with a set of schedules.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank}, step {step}: {what}")]
pub struct Violation {
    /// The rank that showed it.
    pub rank: usize,
    /// The step at which it showed.
    pub step: usize,
    /// The contradiction, with the buffers involved.
    pub what: String,
}

/// A message on its way, with its deadline and what it carries.
type Departure = (Transfer, Due, Content);

/// Walks all ranks' schedules of one problem.
///
/// # Errors
/// The first [`Violation`] of: every allowed (query, key) pair exactly once, by someone who holds
/// both; every send met by a receive of the same step, chunk and deadline, and started by both in the
/// order of deadlines, so that nobody waits for another's next; nothing sent that its receiver
/// neither computes with nor sends on; no buffer written while it is sent, none read or written
/// while something lands in it; `first` and `last` true to what was written; every accumulator home
/// at the end.
pub fn check(problem: &Problem, schedules: &[Schedule]) -> Result<(), Violation> {
    let mut checker = Checker {
        problem,
        step: 0,
        ranks: schedules.iter().map(|schedule| Rank::new(problem, schedule)).collect(),
    };
    let last = schedules.iter().flat_map(|schedule| &schedule.steps).map(|step| step.index).max();
    for index in 0..=last.unwrap_or(0) {
        checker.walk(index)?;
    }
    checker.end(last.unwrap_or(0) + 1)
}

struct Checker<'a> {
    problem: &'a Problem,
    step: usize,
    ranks: Vec<Rank<'a>>,
}

impl Checker<'_> {
    fn fail<T>(&self, rank: usize, what: impl Into<String>) -> Result<T, Violation> {
        Err(Violation { rank, step: self.step, what: what.into() })
    }

    /// Global positions of rows of a rank's queries or keys, or of sums that belong to them.
    fn positions(&self, payload: Payload, rank: usize, rows: &Range<usize>) -> Vec<(usize, usize)> {
        let Problem { layout, world_size, .. } = *self.problem;
        let pieces = layout.pieces(rank, world_size, self.rows_of(payload));
        let piece_of = |row| pieces.iter().find(|piece| piece.rows.contains(&row));
        let position = |row| Some((row, piece_of(row)?.position(row)));
        rows.clone().filter_map(position).collect()
    }

    /// Rows that each rank has.
    fn rows_of(&self, payload: Payload) -> usize {
        match payload {
            Payload::Keys | Payload::KeyGrads => self.problem.kv_len,
            Payload::Queries | Payload::Partial | Payload::QueryGrads => self.problem.q_len,
        }
    }

    /// How many positions a row of an accumulator may meet: those of the other side.
    fn total(&self, payload: Payload) -> usize {
        let other = if payload == Payload::KeyGrads { Payload::Queries } else { Payload::Keys };
        self.rows_of(other) * self.problem.world_size
    }

    /// One step of all ranks.
    fn walk(&mut self, index: usize) -> Result<(), Violation> {
        self.step = index;
        let steps: Vec<_> = (self.ranks.iter())
            .map(|rank| rank.schedule.steps.iter().find(|step| step.index == index))
            .collect();
        self.land(Due::Begin(index))?;
        for (rank, step) in steps.iter().enumerate() {
            for (chunk, slot) in step.iter().flat_map(|step| &step.opens) {
                self.open(rank, chunk, *slot)?;
            }
        }
        self.exchange(index)?;
        self.land(Due::Fold(index))?;
        for (rank, step) in steps.iter().enumerate() {
            for tile in step.iter().flat_map(|step| &step.tiles) {
                self.tile(rank, tile)?;
            }
            for merge in step.iter().flat_map(|step| &step.merges) {
                self.merge(rank, merge)?;
            }
        }
        Ok(())
    }

    /// Lands on all ranks what is due.
    fn land(&mut self, now: Due) -> Result<(), Violation> {
        for rank in 0..self.ranks.len() {
            if let Some(chunk) = self.ranks[rank].land(now) {
                return self.fail(rank, format!("{chunk} came and nobody needed it"));
            }
        }
        Ok(())
    }

    fn open(&mut self, rank: usize, chunk: &Chunk, slot: usize) -> Result<(), Violation> {
        let place = Place::Slot(slot);
        if self.ranks[rank].in_flight(chunk.payload, place, true) {
            return self.fail(rank, format!("{chunk} is opened in slot {slot} while that is used"));
        }
        let content = Content::Sums(chunk.clone(), HashMap::new());
        self.ranks[rank].buffers.insert((chunk.payload, place), content);
        Ok(())
    }

    /// Starts all exchanges of step `index` and pairs sends with receives.
    fn exchange(&mut self, index: usize) -> Result<(), Violation> {
        let mut sent: HashMap<(usize, usize), Vec<Departure>> = HashMap::new();
        let mut expected: Vec<(usize, Transfer, Due)> = Vec::new();
        for rank in 0..self.ranks.len() {
            let schedule = self.ranks[rank].schedule;
            let step = schedule.steps.iter().find(|step| step.index == index);
            let exchanges = step.map_or(&[][..], |step| &step.exchanges);
            if !exchanges.is_sorted_by(|a, b| a.due.moment() < b.due.moment()) {
                return self
                    .fail(rank, "exchanges of a step do not start in the order of their ends");
            }
            for exchange in step.iter().flat_map(|step| &step.exchanges) {
                for send in &exchange.sends {
                    let content = self.departing(rank, send)?;
                    let route = sent.entry((rank, send.peer)).or_default();
                    route.push((send.clone(), exchange.due, content));
                    self.fly(rank, send, exchange.due, None);
                }
                let receives = exchange.receives.iter();
                expected.extend(receives.map(|receive| (rank, receive.clone(), exchange.due)));
            }
        }
        for (rank, receive, due) in expected {
            if self.ranks[rank].in_flight(receive.chunk.payload, receive.place, true) {
                return self.fail(rank, format!("{} lands in a buffer in use", receive.chunk));
            }
            let route = sent.entry((receive.peer, rank)).or_default();
            if route.is_empty() {
                return self.fail(rank, format!("{} was never sent", receive.chunk));
            }
            let (send, send_due, content) = route.remove(0);
            if send.chunk != receive.chunk || send_due != due {
                let what = format!("expects {} by {due:?}, got {}", receive.chunk, send.chunk);
                return self.fail(rank, what);
            }
            self.fly(rank, &receive, due, Some(content));
        }
        match sent.into_iter().find(|(_, route)| !route.is_empty()) {
            Some(((rank, peer), route)) => {
                self.fail(rank, format!("rank {peer} does not receive {}", route[0].0.chunk))
            }
            None => Ok(()),
        }
    }

    fn fly(&mut self, rank: usize, transfer: &Transfer, due: Due, arriving: Option<Content>) {
        let (payload, place) = (transfer.chunk.payload, transfer.place);
        self.ranks[rank].flights.push(Flight { payload, place, due, arriving });
    }

    /// What a send carries away.
    fn departing(&mut self, rank: usize, send: &Transfer) -> Result<Content, Violation> {
        let chunk = &send.chunk;
        if self.ranks[rank].in_flight(chunk.payload, send.place, false) {
            return self.fail(rank, format!("{chunk} is sent before it arrived"));
        }
        self.ranks[rank].use_input(chunk.payload, send.place, &chunk.rows);
        match self.ranks[rank].buffers.get(&(chunk.payload, send.place)) {
            Some(Content::Input(held, _)) if holds(held, chunk.owner, &chunk.rows) => {
                Ok(Content::Input(chunk.clone(), Rows::from(chunk.rows.clone())))
            }
            Some(Content::Sums(held, rows)) if holds(held, chunk.owner, &chunk.rows) => {
                let sums = chunk.rows.clone().map(|row| Some((row, rows.get(&row)?.clone())));
                match sums.collect() {
                    Some(sums) => Ok(Content::Sums(chunk.clone(), sums)),
                    None => self.fail(rank, format!("{chunk} is sent before it was written")),
                }
            }
            _ => self.fail(rank, format!("{chunk} is sent but not held in {:?}", send.place)),
        }
    }

    fn tile(&mut self, rank: usize, tile: &Tile) -> Result<(), Violation> {
        self.reads(rank, Payload::Queries, &tile.queries)?;
        self.reads(rank, Payload::Keys, &tile.keys)?;
        if tile.band.pairs(&tile.queries.rows, &tile.keys.rows) > 0 {
            let sides = [(Payload::Queries, &tile.queries), (Payload::Keys, &tile.keys)];
            for (payload, Operand { place, rows, .. }) in sides {
                self.ranks[rank].use_input(payload, *place, rows);
            }
        }
        let of =
            |payload, Operand { owner, rows, .. }: &Operand| self.positions(payload, *owner, rows);
        let query_positions = of(Payload::Queries, &tile.queries);
        let key_positions = of(Payload::Keys, &tile.keys);
        let pass = self.ranks[rank].schedule.pass;
        let payload = if pass == Pass::Forward { Payload::Partial } else { Payload::QueryGrads };
        let seen = |row| (key_positions.iter()).filter(move |(k, _)| tile.band.allows(row, *k));
        let sums = query_positions.iter().map(|(row, _)| (*row, seen(*row).map(|(_, p)| *p)));
        let sums = sums.map(|(row, seen)| (row, seen.collect())).collect();
        self.add(rank, payload, &tile.queries, tile.query_state, sums)?;
        if pass == Pass::Backward {
            let seen = |key| query_positions.iter().filter(move |(q, _)| tile.band.allows(*q, key));
            let sums = key_positions.iter().map(|(row, _)| (*row, seen(*row).map(|(_, p)| *p)));
            let sums = sums.map(|(row, seen)| (row, seen.collect())).collect();
            self.add(rank, Payload::KeyGrads, &tile.keys, tile.key_state, sums)?;
        } else if tile.query_state.last {
            self.finish(rank, payload, &tile.queries.rows)?;
        }
        Ok(())
    }

    fn reads(&self, rank: usize, payload: Payload, operand: &Operand) -> Result<(), Violation> {
        let Operand { owner, place, rows } = operand;
        let wanted = Chunk { payload, owner: *owner, rows: rows.clone() };
        if rows.is_empty() {
            return Ok(());
        }
        if self.ranks[rank].in_flight(payload, *place, false) {
            return self.fail(rank, format!("{wanted} is read while something lands there"));
        }
        match self.ranks[rank].buffers.get(&(payload, *place)) {
            Some(Content::Input(held, _)) if holds(held, *owner, rows) => Ok(()),
            _ => self.fail(rank, format!("{wanted} is not held in {place:?}")),
        }
    }

    /// Adds positions to rows of an accumulator.
    fn add(
        &mut self,
        rank: usize,
        payload: Payload,
        operand: &Operand,
        state: State,
        sums: Vec<(usize, Vec<usize>)>,
    ) -> Result<(), Violation> {
        let name = Chunk { payload, owner: operand.owner, rows: operand.rows.clone() };
        if operand.rows.is_empty() {
            return Ok(());
        }
        if self.ranks[rank].in_flight(payload, state.place, true) {
            return self.fail(rank, format!("{name} is written while it is exchanged"));
        }
        let total = self.total(payload);
        let Some(Content::Sums(held, _)) = self.ranks[rank].buffers.get(&(payload, state.place))
        else {
            return self.fail(rank, format!("{name} has no accumulator in {:?}", state.place));
        };
        if !holds(held, operand.owner, &operand.rows) {
            let what = format!("{name} is added to {held}");
            return self.fail(rank, what);
        }
        let finished = |row: &usize| self.ranks[rank].finished.contains(&(payload, *row));
        let after_end = operand.rows.clone().find(finished);
        if let Some(row) = after_end.filter(|_| state.place == Place::Home) {
            return self.fail(rank, format!("{name}: row {row} is touched after its end"));
        }
        let buffer = self.ranks[rank].buffers.get_mut(&(payload, state.place));
        let Some(Content::Sums(_, rows)) = buffer else { unreachable!("found above") };
        for (row, seen) in sums {
            if state.first == rows.contains_key(&row) {
                let what = format!("{name}: first is {} for row {row}", state.first);
                return self.fail(rank, what);
            }
            let sum = rows.entry(row).or_insert_with(|| Positions::none(total));
            if let Some(twice) = seen.into_iter().find(|position| !sum.insert(*position)) {
                return self.fail(rank, format!("{name}: row {row} meets {twice} twice"));
            }
        }
        Ok(())
    }

    fn merge(&mut self, rank: usize, merge: &Merge) -> Result<(), Violation> {
        let Chunk { payload, owner, rows } = &merge.chunk;
        let place = Place::Slot(merge.slot);
        if self.ranks[rank].in_flight(*payload, place, false) {
            return self.fail(rank, format!("{} is merged before it arrived", merge.chunk));
        }
        let arrived = match self.ranks[rank].buffers.get(&(*payload, place)) {
            Some(Content::Sums(held, sums)) if holds(held, *owner, rows) => sums.clone(),
            _ => return self.fail(rank, format!("{} is not held in {place:?}", merge.chunk)),
        };
        let unpack = |row| (row, arrived[&row].members().collect());
        let sums = rows.clone().map(unpack).collect();
        let operand = Operand { owner: *owner, place: Place::Home, rows: rows.clone() };
        let state = State { place: Place::Home, first: false, last: merge.last };
        self.add(rank, *payload, &operand, state, sums)?;
        if merge.last {
            return self.finish(rank, *payload, rows);
        }
        self.ranks[rank].unfinished.extend(rows.clone().map(|row| (*payload, row)));
        Ok(())
    }

    fn finish(
        &mut self,
        rank: usize,
        payload: Payload,
        rows: &Range<usize>,
    ) -> Result<(), Violation> {
        for row in rows.clone().map(|row| (payload, row)) {
            self.ranks[rank].unfinished.remove(&row);
            if !self.ranks[rank].finished.insert(row) {
                return self.fail(rank, format!("row {} of {payload:?} is finished twice", row.1));
            }
        }
        Ok(())
    }

    /// After the last step everything has landed and every accumulator at home is complete.
    fn end(&mut self, index: usize) -> Result<(), Violation> {
        self.step = index;
        self.land(Due::Begin(index))?;
        for rank in 0..self.ranks.len() {
            if let Some(chunk) = self.ranks[rank].useless() {
                return self.fail(rank, format!("{chunk} came and nobody needed it"));
            }
            if !self.ranks[rank].flights.is_empty() {
                return self.fail(rank, "an exchange is due after the last step");
            }
            if let Some((payload, row)) = self.ranks[rank].unfinished.iter().next() {
                return self.fail(rank, format!("row {row} of {payload:?} waits for a last merge"));
            }
            match self.ranks[rank].schedule.pass {
                Pass::Forward => {
                    let finished = &self.ranks[rank].finished;
                    let row = |row: &usize| !finished.contains(&(Payload::Partial, *row));
                    if let Some(row) = (0..self.problem.q_len).find(row) {
                        return self.fail(rank, format!("row {row} is never finished"));
                    }
                    self.complete(rank, Payload::Partial)?;
                }
                Pass::Backward => {
                    self.complete(rank, Payload::QueryGrads)?;
                    self.complete(rank, Payload::KeyGrads)?;
                }
            }
        }
        Ok(())
    }

    /// Every row of a home accumulator holds exactly the positions the mask allows.
    fn complete(&self, rank: usize, payload: Payload) -> Result<(), Violation> {
        let Content::Sums(chunk, rows) = &self.ranks[rank].buffers[&(payload, Place::Home)] else {
            return self.fail(rank, "an accumulator at home was replaced by an input");
        };
        let total = self.total(payload);
        for (row, own) in self.positions(payload, rank, &chunk.rows) {
            let allowed = |other: &usize| match payload {
                Payload::KeyGrads => self.problem.window.allows(*other, own),
                _ => self.problem.window.allows(own, *other),
            };
            let mut wanted = Positions::none(total);
            (0..total).filter(allowed).for_each(|other| {
                wanted.insert(other);
            });
            if rows.get(&row) != Some(&wanted) {
                return self.fail(rank, format!("row {row} of {payload:?} misses positions"));
            }
        }
        Ok(())
    }
}

fn holds(held: &Chunk, owner: usize, rows: &Range<usize>) -> bool {
    held.owner == owner && held.rows.start <= rows.start && rows.end <= held.rows.end
}
