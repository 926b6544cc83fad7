//! From visits to steps: what each rank computes, and what it sends and receives meanwhile.

use std::ops::Range;

use super::geometry::Rectangle;
use super::meetings::Meetings;
use super::parts::{Part, branches, parts};
use super::slots::{Inputs, Slots};
use super::visits::{Visit, visits};
use super::{
    Chunk, Due, Exchange, Family, Operand, Payload, Place, Rows, Schedule, State, Step, Tile,
    Transfer, state,
};
use crate::problem::{Pass, Problem, Travels};

/// Ranks whose steps are made at once, because what they need lies side by side. They are few, so
/// that schedules which nobody keeps stay in caches.
const NEIGHBOURS: usize = 16;

/// What is the same for all ranks.
pub(super) struct Tour<'a> {
    pub pass: Pass,
    pub visits: Vec<Visit>,
    /// `[step]`: the visits for which chunks leave at it.
    leaving: Vec<Vec<usize>>,
    /// `[step]`: the visits from which sums are home by it.
    pub returning: Vec<Vec<usize>>,
    /// `[visit][owner]`
    pub stops: Vec<Vec<Stop<'a>>>,
    /// `[rank]`
    pub slots: Vec<Slots>,
}

/// The chunk of one owner at one visit.
pub(super) struct Stop<'a> {
    /// What it is a chunk of.
    pub travels: Travels,
    /// Its rectangles with what the rank there keeps at home.
    rectangles: &'a [Rectangle],
    /// Its rows; none at home.
    pub parts: Vec<Part>,
}

/// The messages that start at a step, by the time at which they must be there.
#[derive(Default)]
pub(super) struct Mail(Vec<Exchange>);

impl Mail {
    pub fn send(&mut self, due: Due, transfer: Transfer) {
        self.due(due).sends.push(transfer);
    }

    pub fn receive(&mut self, due: Due, transfer: Transfer) {
        self.due(due).receives.push(transfer);
    }

    fn due(&mut self, due: Due) -> &mut Exchange {
        let index = self.0.iter().position(|exchange| exchange.due == due);
        let index = index.unwrap_or_else(|| {
            self.0.push(Exchange { sends: vec![], receives: vec![], due });
            self.0.len() - 1
        });
        &mut self.0[index]
    }

    /// What is due first starts first. So all ranks start in the same order what they have in
    /// common.
    fn exchanges(mut self) -> Vec<Exchange> {
        self.0.sort_by_key(|exchange| exchange.due.moment());
        self.0
    }
}

impl<'a> Tour<'a> {
    pub fn new(
        problem: &Problem,
        meetings: &'a Meetings,
        family: Family,
        travels: Travels,
        pass: Pass,
    ) -> Tour<'a> {
        let visits = visits(family, meetings, travels);
        let branches = branches(&visits);
        let mut stops: Vec<Vec<Stop>> =
            visits.iter().map(|_| Vec::with_capacity(problem.world_size)).collect();
        for owner in 0..problem.world_size {
            let met = |visit: &Visit| match visit.sides[owner] {
                Some(side) => meetings.of(side, owner, visit.ranks[owner]),
                None => &[],
            };
            let side = |visit: &Visit| visit.sides[owner].unwrap_or(Travels::Keys);
            let needed = |visit: &Visit| match visit.sides[owner] {
                Some(side) => meetings.needed(side, owner, visit.ranks[owner]),
                None => Rows::default(),
            };
            let needed: Vec<Rows> = visits.iter().map(needed).collect();
            let len = |number: usize| match side(&visits[number]) {
                Travels::Keys => problem.kv_len,
                Travels::Queries => problem.q_len,
            };
            let parts = parts(&visits, &branches, &needed, len);
            for ((stops, visit), parts) in stops.iter_mut().zip(&visits).zip(parts) {
                stops.push(Stop { travels: side(visit), rectangles: met(visit), parts });
            }
        }
        let by_step = |step: fn(&Visit) -> usize| {
            let last = visits.iter().map(step).max().unwrap_or(0);
            let mut by_step = vec![vec![]; last + 1];
            let numbered = visits.iter().enumerate().skip(1);
            numbered.for_each(|(number, visit)| by_step[step(visit)].push(number));
            by_step
        };
        let (leaving, returning) = (by_step(|visit| visit.leaves), by_step(|visit| visit.returns));
        Tour { pass, visits, leaving, returning, stops, slots: vec![] }
    }

    /// Bytes that all ranks together send.
    pub fn bytes(&self, problem: &Problem) -> u64 {
        let mut bytes = 0;
        for (visit, stops) in self.stops.iter().enumerate().skip(1) {
            for (owner, stop) in stops.iter().enumerate() {
                let row = |payload| problem.row_bytes(payload, self.pass);
                let inputs: usize = stop.parts.iter().map(|part| part.carried.len()).sum();
                // What is summed at a visit makes one hop after it, onward or home.
                let sums: usize = stop.parts.iter().map(|part| part.summed.len()).sum();
                let follower = self.follower(visit, owner).map_or(0, row);
                bytes += (inputs * row(input(stop.travels)) + sums * follower) as u64;
            }
        }
        bytes
    }

    /// Makes the schedules of all ranks, one after the other.
    pub fn each(mut self, problem: &Problem, travels: Travels, mut take: impl FnMut(Schedule)) {
        let (world_size, pass) = (problem.world_size, self.pass);
        self.slots = self.slots_of_ranks(world_size);
        for first in (0..world_size).step_by(NEIGHBOURS) {
            let ranks = first..world_size.min(first + NEIGHBOURS);
            for (rank, mut steps) in ranks.clone().zip(self.steps(ranks)) {
                state::mark(&mut steps, problem, pass, rank);
                steps.retain(|step| !step.is_idle());
                take(Schedule { rank, world_size, pass, travels, steps });
            }
        }
    }

    /// What neighbours do, step by step, but for steps after the first with nothing to do.
    fn steps(&self, ranks: Range<usize>) -> Vec<Vec<Step>> {
        // The sums of the last visit come home later.
        let last = self.visits.iter().map(|visit| visit.returns).max().unwrap_or(0);
        let mut steps: Vec<Vec<Step>> = vec![vec![]; ranks.len()];
        for t in 0..=last {
            for (rank, steps) in ranks.clone().zip(&mut steps) {
                let step = self.step(rank, t);
                if t == 0 || !step.is_idle() {
                    steps.push(step);
                }
            }
        }
        steps
    }

    fn slots_of_ranks(&self, world_size: usize) -> Vec<Slots> {
        let homes = |visit: usize, owner: usize| self.sums_home(visit, owner).next().is_some();
        let inputs = Inputs::new(&self.visits);
        let slots = |rank: usize| {
            let leave = |visit: usize| homes(visit, self.visits[visit].owners[rank]);
            Slots::new(&self.visits, &inputs, leave, |visit| homes(visit, rank))
        };
        (0..world_size).map(slots).collect()
    }

    /// What `rank` does at step `t`.
    fn step(&self, rank: usize, t: usize) -> Step {
        let mut step = Step::new(t);
        let mut mail = Mail::default();
        self.move_sums(rank, t, &mut mail);
        self.move_inputs(rank, t, &mut mail);
        step.exchanges = mail.exchanges();
        if t < self.visits.len() {
            step.tiles = self.tiles(rank, t);
            self.open_sums(rank, &mut step);
        }
        step.merges = self.merges(rank, t);
        step
    }

    /// Passes on the chunks that leave for another visit at step `t` and receives what others pass
    /// on.
    fn move_inputs(&self, rank: usize, t: usize, mail: &mut Mail) {
        for &number in self.leaving.get(t).into_iter().flatten() {
            let to = &self.visits[number];
            let from = &self.visits[to.source];
            let due = Due::Begin(number);
            let carried = |owner: usize| {
                let stop = &self.stops[number][owner];
                let parts = stop.parts.iter().map(|part| part.carried.clone()).enumerate();
                let chunk = move |rows| Chunk { payload: input(stop.travels), owner, rows };
                let parts = parts.filter(|(_, rows)| !rows.is_empty());
                parts.map(move |(part, rows)| (part, chunk(rows)))
            };
            let (sent, awaited) = (from.owners[rank], to.owners[rank]);
            for (part, chunk) in carried(sent) {
                let place = match to.source {
                    0 => Place::Home,
                    source => Place::Slot(self.slots[rank].input(source, part)),
                };
                mail.send(due, Transfer { chunk, peer: to.ranks[sent], place });
            }
            for (part, chunk) in carried(awaited) {
                let place = Place::Slot(self.slots[rank].input(number, part));
                mail.receive(due, Transfer { chunk, peer: from.ranks[awaited], place });
            }
        }
    }

    /// The rectangles with the chunk that `rank` has at a visit, cut where its parts are.
    fn tiles(&self, rank: usize, visit: usize) -> Vec<Tile> {
        let owner = self.visits[visit].owners[rank];
        let stop = &self.stops[visit][owner];
        if visit == 0 {
            let own = stop.rectangles.iter().cloned();
            return own.map(|own| stop.tile(rank, owner, [Place::Home; 2], own)).collect();
        }
        let pairs = stop.rectangles.iter().flat_map(|rectangle| {
            stop.parts.iter().enumerate().map(move |(index, part)| (rectangle, index, part))
        });
        let cut = |(rectangle, index, part): (&Rectangle, usize, &Part)| {
            let rectangle = rectangle.within(stop.travels, &part.rows)?;
            Some(stop.tile(rank, owner, self.places(rank, visit, index), rectangle))
        };
        pairs.filter_map(cut).collect()
    }

    /// Where a rank has a part of the chunk of a visit, and where the sums of that.
    pub fn places(&self, rank: usize, visit: usize, part: usize) -> [Place; 2] {
        let slots = &self.slots[rank];
        [slots.input(visit, part), slots.sums(visit, part)].map(Place::Slot)
    }
}

impl Stop<'_> {
    /// The tile of a rectangle between the chunk of `owner`, which lies in the first of `places`
    /// and its sums in the second, and what `rank` keeps at home.
    pub fn tile(
        &self,
        rank: usize,
        owner: usize,
        [place, sums]: [Place; 2],
        Rectangle { queries, keys, band }: Rectangle,
    ) -> Tile {
        let state = |place| State { place, first: false, last: false };
        let (home, away) = (state(Place::Home), state(sums));
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

/// What travels of a side.
fn input(travels: Travels) -> Payload {
    match travels {
        Travels::Keys => Payload::Keys,
        Travels::Queries => Payload::Queries,
    }
}
