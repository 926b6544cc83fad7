//! Which tile is the last to touch rows of an accumulator at home, so that it can write the result
//! (merges are told by the schedule), and which rows are left to be written after the last step.

use std::collections::HashSet;
use std::ops::Range;

use super::workspace::own;
use crate::problem::{Pass, Problem};
use crate::schedule::{Payload, Place, Rows, Schedule, State, Tile};

/// For one rank.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Last {
    /// (payload, step, tile within the step): tiles that write results.
    tiles: HashSet<(Payload, usize, usize)>,
    /// Rows at home whose sums are still sums after the last step.
    unfinished: Vec<(Payload, Range<usize>)>,
    /// Accumulators that hold a state between two operations.
    states: HashSet<Payload>,
}

impl Last {
    /// Walks the schedule backwards. With `fused`, tiles add to dq at home, and none writes it.
    pub fn of(problem: &Problem, schedule: &Schedule, fused: bool) -> Last {
        let mut last = Last::default();
        for (payload, len) in own(problem, schedule.pass) {
            if fused && payload == Payload::QueryGrads {
                last.states.insert(payload);
                last.unfinished.push((payload, 0..len));
            } else {
                last.of_payload(payload, len, schedule);
            }
        }
        last
    }

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
                let (rows, state) = touched(payload, tile);
                if state.place != Place::Home || rows.is_empty() {
                    continue;
                }
                let is_last = later.common(rows).next().is_none();
                if is_last {
                    self.tiles.insert((payload, step.index, index));
                    finished.insert(rows.clone());
                }
                if !(is_last && state.first) {
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

    /// Does this tile write the results of its rows of `payload`?
    pub fn is_tile(&self, payload: Payload, step: usize, tile: usize) -> bool {
        self.tiles.contains(&(payload, step, tile))
    }

    /// Rows that are left after the last step.
    pub fn unfinished(&self) -> &[(Payload, Range<usize>)] {
        &self.unfinished
    }

    /// Has the accumulator at home to be kept between operations?
    pub fn needs_state(&self, payload: Payload) -> bool {
        self.states.contains(&payload)
    }
}

/// The rows of a tile that belong to `payload`, and their state.
fn touched(payload: Payload, tile: &Tile) -> (&Range<usize>, State) {
    match payload {
        Payload::KeyGrads => (&tile.keys.rows, tile.key_state),
        _ => (&tile.queries.rows, tile.query_state),
    }
}
