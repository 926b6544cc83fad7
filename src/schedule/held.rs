//! What a rank holds while its schedule is checked.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use super::positions::Positions;
use super::{Chunk, Due, Payload, Place, Rows, Schedule};
use crate::problem::{Pass, Problem};

/// What a buffer holds.
#[derive(Debug, Clone)]
pub(super) enum Content {
    /// Rows of an input, and which of them were not yet computed with or sent on.
    Input(Chunk, Rows),
    /// Rows of an accumulator with what they contain; rows not yet written are absent.
    Sums(Chunk, HashMap<usize, Positions>),
}

impl Content {
    /// Rows of an input that were neither computed with nor sent on.
    fn useless(&self) -> Option<Chunk> {
        let Content::Input(chunk, unused) = self else { return None };
        let rows = unused.ranges().next()?.clone();
        Some(Chunk { rows, ..chunk.clone() })
    }
}

/// Use of a buffer by an exchange in flight.
#[derive(Debug)]
pub(super) struct Flight {
    pub payload: Payload,
    pub place: Place,
    pub due: Due,
    /// What lands there; `None` for a send, during which the buffer may still be read.
    pub arriving: Option<Content>,
}

/// One rank in the middle of its schedule.
pub(super) struct Rank<'a> {
    pub schedule: &'a Schedule,
    pub buffers: HashMap<(Payload, Place), Content>,
    pub flights: Vec<Flight>,
    /// Rows at home that something marked last has touched. Forward: o and lse were written.
    pub finished: HashSet<(Payload, usize)>,
    /// Rows at home with a merge that was not the last.
    pub unfinished: HashSet<(Payload, usize)>,
}

impl<'a> Rank<'a> {
    /// Before the first step.
    pub fn new(problem: &Problem, schedule: &'a Schedule) -> Rank<'a> {
        let owner = schedule.rank;
        let chunk = |payload, len| Chunk { payload, owner, rows: 0..len };
        let input = |payload, len| {
            ((payload, Place::Home), Content::Input(chunk(payload, len), Rows::default()))
        };
        let sums = |payload, len| {
            ((payload, Place::Home), Content::Sums(chunk(payload, len), HashMap::new()))
        };
        let (q_len, kv_len) = (problem.q_len, problem.kv_len);
        let mut buffers =
            HashMap::from([input(Payload::Queries, q_len), input(Payload::Keys, kv_len)]);
        match schedule.pass {
            Pass::Forward => buffers.extend([sums(Payload::Partial, q_len)]),
            Pass::Backward => {
                buffers.extend([sums(Payload::QueryGrads, q_len), sums(Payload::KeyGrads, kv_len)])
            }
        }
        let (finished, unfinished) = (HashSet::new(), HashSet::new());
        Rank { schedule, buffers, flights: vec![], finished, unfinished }
    }

    /// Lands what is due. Returns rows that lay where it lands and were of no use.
    pub fn land(&mut self, now: Due) -> Option<Chunk> {
        let (due, flying) = std::mem::take(&mut self.flights)
            .into_iter()
            .partition(|flight| flight.due.reached_by(now));
        self.flights = flying;
        let due: Vec<Flight> = due;
        let mut useless = None;
        for Flight { payload, place, arriving, .. } in due {
            if let Some(content) = arriving {
                let before = self.buffers.insert((payload, place), content);
                useless = useless.or(before.and_then(|before| before.useless()));
            }
        }
        useless
    }

    /// Rows that came and were of no use.
    pub fn useless(&self) -> Option<Chunk> {
        self.buffers.values().find_map(Content::useless)
    }

    /// Notes that rows of an input were of use.
    pub fn use_input(&mut self, payload: Payload, place: Place, rows: &Range<usize>) {
        if let Some(Content::Input(_, unused)) = self.buffers.get_mut(&(payload, place)) {
            unused.remove(rows);
        }
    }

    /// Does something land in that buffer or, if it shall be written, is it also being sent?
    pub fn in_flight(&self, payload: Payload, place: Place, writing: bool) -> bool {
        self.flights.iter().any(|flight| {
            (flight.payload, flight.place) == (payload, place)
                && (writing || flight.arriving.is_some())
        })
    }
}
