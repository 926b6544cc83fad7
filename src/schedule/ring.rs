//! The single ring: one side of the attention stays, the other travels from rank to rank.
//!
//! On each [`Leg`] a rank holds, hop after hop, the chunk of the rank so many hops behind it,
//! computes its rectangles with the rows it keeps at home and meanwhile passes the chunk on. Legs
//! follow each other: while the last rectangles of one are computed, the next begins with each
//! rank's own chunk. So there is never more than one chunk at hand and another on its way.

use std::ops::Range;

use super::geometry::{Rectangle, rectangles};
use super::legs::{Leg, Part, legs};
use super::{
    Chunk, Due, Exchange, Operand, Payload, Place, Rows, Schedule, State, Step, Tile, Transfer,
    state,
};
use crate::mask::Coverage;
use crate::problem::{Pass, Problem, Travels};

/// The schedules of all ranks for one pass of `problem` on a single ring.
pub fn ring(problem: &Problem, pass: Pass, travels: Travels) -> Vec<Schedule> {
    let world_size = problem.world_size;
    let ring = Ring::new(problem, pass, travels);
    let hops: usize = ring.legs.iter().map(|leg| leg.hops).sum();
    let schedule = |rank| {
        // Accumulators of the last hop come home one step later.
        let mut steps: Vec<Step> = (0..=hops + 1).map(|t| ring.step(rank, t)).collect();
        state::mark(&mut steps, problem, pass, rank);
        steps.retain(|step| !step.is_idle());
        Schedule { rank, world_size, pass, travels, steps }
    };
    (0..world_size).map(schedule).collect()
}

/// Bytes that all ranks together send in one pass.
pub fn total_bytes(problem: &Problem, schedules: &[Schedule]) -> u64 {
    let bytes = |schedule: &Schedule| -> usize {
        let rows = |transfer: &Transfer| transfer.chunk.rows.len();
        let row = |transfer: &Transfer| problem.row_bytes(transfer.chunk.payload, schedule.pass);
        schedule.sends().map(|transfer| rows(transfer) * row(transfer)).sum()
    };
    schedules.iter().map(|schedule| bytes(schedule) as u64).sum()
}

/// The side whose travelling costs fewer bytes; keys where both cost the same.
pub fn choose_travels(problem: &Problem, pass: Pass) -> Travels {
    let cost = |travels| total_bytes(problem, &ring(problem, pass, travels));
    if cost(Travels::Queries) < cost(Travels::Keys) { Travels::Queries } else { Travels::Keys }
}

/// What is the same for all ranks of a ring.
pub(super) struct Ring {
    pub pass: Pass,
    pub travels: Travels,
    pub legs: Vec<Leg>,
    /// `[owner][rank]`: rectangles between the owner's chunk and what the rank keeps at home.
    meetings: Vec<Vec<Vec<Rectangle>>>,
}

/// A chunk on its way, as a rank holds it at one step.
#[derive(Clone, Copy)]
pub(super) struct Hop<'a> {
    pub leg: &'a Leg,
    /// Hops from home.
    pub number: usize,
}

/// Where the rows of a part lie at a step, of inputs and of accumulators that pass through. Every
/// third slot is left to accumulators that come home.
pub(super) fn slot(part: usize, step: usize) -> usize {
    3 * part + step % 2
}

impl Ring {
    fn new(problem: &Problem, pass: Pass, travels: Travels) -> Ring {
        let ranks = 0..problem.world_size;
        let meeting = |owner, rank| match travels {
            Travels::Keys => rectangles(problem, rank, owner),
            Travels::Queries => rectangles(problem, owner, rank),
        };
        let of = |owner| ranks.clone().map(|rank| meeting(owner, rank)).collect();
        let meetings: Vec<Vec<Vec<Rectangle>>> = ranks.clone().map(of).collect();
        let needed = |met: &Vec<Rectangle>| {
            let mut rows = Rows::default();
            met.iter().for_each(|met| rows.insert(met.travelling(travels).clone()));
            rows
        };
        let needs = meetings.iter().map(|of| of.iter().map(needed).collect()).collect();
        let len = match travels {
            Travels::Keys => problem.kv_len,
            Travels::Queries => problem.q_len,
        };
        Ring { pass, travels, legs: legs(&needs, len), meetings }
    }

    fn input(&self) -> Payload {
        match self.travels {
            Travels::Keys => Payload::Keys,
            Travels::Queries => Payload::Queries,
        }
    }

    /// The hop whose chunks are computed with at step `t`; none at home and after the last.
    pub fn hop(&self, t: usize) -> Option<Hop<'_>> {
        let on_its_way = |leg: &&Leg| leg.start < t && t <= leg.start + leg.hops;
        self.legs.iter().find(on_its_way).map(|leg| Hop { leg, number: t - leg.start })
    }

    /// What `rank` does at step `t`.
    fn step(&self, rank: usize, t: usize) -> Step {
        let mut step = Step::new(t);
        self.move_followers(rank, &mut step);
        step.exchanges.extend(self.exchange_inputs(rank, t));
        match self.hop(t) {
            Some(hop) => {
                step.tiles = self.tiles_away(rank, hop, t);
                self.open_followers(rank, hop, &mut step);
            }
            None if t == 0 => {
                let own = self.meetings[rank][rank].iter().cloned();
                step.tiles = own.map(|own| self.tile(rank, rank, Place::Home, own)).collect();
            }
            None => {}
        }
        step
    }

    /// Passes on the chunk held at step `t` and receives the next.
    fn exchange_inputs(&self, rank: usize, t: usize) -> Option<Exchange> {
        let Hop { leg, number } = self.hop(t + 1)?;
        let transfers = |owner: usize, peer: usize, place: &dyn Fn(usize) -> Place| {
            let transfer = |(part, rows): (usize, Range<usize>)| {
                let chunk = Chunk { payload: self.input(), owner, rows };
                (!chunk.rows.is_empty()).then_some(Transfer { chunk, peer, place: place(part) })
            };
            let carried = leg.parts(owner).iter().map(|part| part.carried(number));
            carried.enumerate().filter_map(transfer).collect()
        };
        let held = |part| if number == 1 { Place::Home } else { Place::Slot(slot(part, t)) };
        let sends = transfers(leg.back(rank, number - 1), leg.onward(rank, 1), &held);
        let lands = |part| Place::Slot(slot(part, t + 1));
        let receives = transfers(leg.back(rank, number), leg.back(rank, 1), &lands);
        exchange(sends, receives, Due::Begin(t + 1))
    }

    /// The rectangles with the chunk that is there after a hop, cut where its parts are.
    fn tiles_away(&self, rank: usize, Hop { leg, number }: Hop<'_>, t: usize) -> Vec<Tile> {
        let owner = leg.back(rank, number);
        let cut = |rectangle: &Rectangle| {
            let tile = |(index, part): (usize, &Part)| {
                let rectangle = rectangle.within(self.travels, &part.rows)?;
                Some(self.tile(rank, owner, Place::Slot(slot(index, t)), rectangle))
            };
            leg.parts(owner).iter().enumerate().filter_map(tile).collect::<Vec<_>>()
        };
        self.meetings[owner][rank].iter().flat_map(cut).collect()
    }

    /// The tile of a rectangle between the chunk of `owner`, which lies in `place`, and what `rank`
    /// keeps at home.
    pub fn tile(&self, rank: usize, owner: usize, place: Place, rectangle: Rectangle) -> Tile {
        let Rectangle { queries, keys, band } = rectangle;
        let state = |place| State { place, first: false, last: false };
        let (home, away) = (state(Place::Home), state(place));
        match self.travels {
            Travels::Keys => Tile {
                queries: Operand { owner: rank, place: Place::Home, rows: queries },
                keys: Operand { owner, place, rows: keys },
                band,
                query_state: home,
                key_state: away,
            },
            Travels::Queries => Tile {
                queries: Operand { owner, place, rows: queries },
                keys: Operand { owner: rank, place: Place::Home, rows: keys },
                band,
                query_state: away,
                key_state: home,
            },
        }
    }
}

impl Rectangle {
    /// The side that travels.
    pub(super) fn travelling(&self, travels: Travels) -> &Range<usize> {
        match travels {
            Travels::Keys => &self.keys,
            Travels::Queries => &self.queries,
        }
    }

    /// With only those of the travelling rows that are in `part`; none without any pair.
    fn within(&self, travels: Travels, part: &Range<usize>) -> Option<Rectangle> {
        let rows = self.travelling(travels);
        let rows = rows.start.max(part.start)..rows.end.min(part.end);
        let cut = match travels {
            Travels::Keys => Rectangle { keys: rows, ..self.clone() },
            Travels::Queries => Rectangle { queries: rows, ..self.clone() },
        };
        (cut.band.coverage(&cut.queries, &cut.keys) != Coverage::Empty).then_some(cut)
    }
}

/// An exchange of these messages, if there are any.
pub(super) fn exchange(
    sends: Vec<Transfer>,
    receives: Vec<Transfer>,
    due: Due,
) -> Option<Exchange> {
    let idle = sends.is_empty() && receives.is_empty();
    (!idle).then_some(Exchange { sends, receives, due })
}
