//! The final writes of a schedule: which tile is the last to touch rows of an accumulator at home,
//! so that it can write the result, and which rows remain to be written after the last step. Merges
//! learn from the schedule whether they are the last.

use std::collections::HashSet;
use std::ops::Range;

use crate::problem::{Pass, Problem};
use crate::schedule::{Payload, Place, Rows, Schedule};

/// The final writes of one rank.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FinalWrites {
    /// (payload, step, tile within the step) of the tiles that write results.
    tiles: HashSet<(Payload, usize, usize)>,
    /// Rows at home that are still sums after the last step.
    unfinished: Vec<(Payload, Range<usize>)>,
    /// Accumulators that hold a state between two commands.
    states: HashSet<Payload>,
}

impl FinalWrites {
    /// Finds the final writes of a schedule. With `fused`, tiles add to dq at home, and no tile
    /// writes it.
    pub fn of(problem: &Problem, schedule: &Schedule, fused: bool) -> FinalWrites {
        let mut found = FinalWrites::default();
        for (payload, len) in accumulators(problem, schedule.pass) {
            if fused && payload == Payload::QueryGrads {
                found.states.insert(payload);
                found.unfinished.push((payload, 0..len));
            } else {
                found.of_payload(payload, len, schedule);
            }
        }
        found
    }

    /// Walks the schedule backwards. The first tile or merge that this walk meets for a row is the
    /// last one that touches the row.
    fn of_payload(&mut self, payload: Payload, len: usize, schedule: &Schedule) {
        let (mut later, mut finished) = (Rows::default(), Rows::default());
        for step in schedule.steps.iter().rev() {
            for merge in step.merges.iter().rev().filter(|merge| merge.chunk.payload == payload) {
                let rows = merge.chunk.rows.clone();
                self.states.insert(payload);
                if merge.last {
                    finished.insert(rows.clone());
                }
                later.insert(rows);
            }
            for (index, tile) in step.tiles.iter().enumerate().rev() {
                let (rows, state) = match payload {
                    Payload::KeyGrads => (&tile.keys.rows, tile.key_state),
                    _ => (&tile.queries.rows, tile.query_state),
                };
                if state.place != Place::Home || rows.is_empty() {
                    continue;
                }
                let is_last = later.common(rows).next().is_none();
                if is_last {
                    self.tiles.insert((payload, step.index, index));
                    finished.insert(rows.clone());
                }
                if !state.first {
                    self.states.insert(payload);
                }
                later.insert(rows.clone());
            }
        }
        let left = finished.missing(&(0..len)).into_iter();
        self.unfinished.extend(left.map(|rows| (payload, rows)));
        if schedule.pass == Pass::Forward {
            debug_assert!(self.unfinished.is_empty(), "forward tiles know when they are last");
        }
    }

    /// Whether this tile writes the results of its rows of `payload`.
    pub fn is_tile(&self, payload: Payload, step: usize, tile: usize) -> bool {
        self.tiles.contains(&(payload, step, tile))
    }

    /// Returns the rows that remain to be written after the last step.
    pub fn unfinished(&self) -> &[(Payload, Range<usize>)] {
        &self.unfinished
    }

    /// Whether the accumulator at home must be kept between commands.
    pub fn needs_state(&self, payload: Payload) -> bool {
        self.states.contains(&payload)
    }
}

/// Returns the accumulators of a rank's own rows, each with its number of rows.
pub fn accumulators(problem: &Problem, pass: Pass) -> Vec<(Payload, usize)> {
    let Problem { q_len, kv_len, .. } = *problem;
    match pass {
        Pass::Forward => vec![(Payload::Partial, q_len)],
        Pass::Backward => vec![(Payload::QueryGrads, q_len), (Payload::KeyGrads, kv_len)],
    }
}
