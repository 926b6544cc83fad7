//! From visits to steps: what each rank computes, and what it sends and receives meanwhile.

use std::ops::Range;

use super::geometry::Rectangle;
use super::meetings::Meetings;
use super::parts::{Part, parts};
use super::slots::Slots;
use super::visits::Visit;
use super::{
    Chunk, Due, Exchange, Operand, Payload, Place, Rows, Schedule, State, Step, Tile, Transfer,
    state,
};
use crate::problem::{Pass, Problem, Travels};

/// What is the same for all ranks.
pub(super) struct Tour {
    pub pass: Pass,
    pub visits: Vec<Visit>,
    /// `[visit][owner]`
    pub stops: Vec<Vec<Stop>>,
    /// `[rank]`
    pub slots: Vec<Slots>,
}

/// The chunk of one owner at one visit.
pub(super) struct Stop {
    /// What it is a chunk of.
    pub travels: Travels,
    /// Its rectangles with what the rank there keeps at home.
    rectangles: Vec<Rectangle>,
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

impl Tour {
    pub fn new(problem: &Problem, meetings: &Meetings, visits: Vec<Visit>, pass: Pass) -> Tour {
        let mut stops: Vec<Vec<Stop>> = visits.iter().map(|_| vec![]).collect();
        for owner in 0..problem.world_size {
            let met = |visit: &Visit| match visit.sides[owner] {
                Some(side) => meetings.of(side, owner, visit.ranks[owner]).to_vec(),
                None => vec![],
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
            let parts = parts(&visits, &needed, len);
            for ((stops, visit), parts) in stops.iter_mut().zip(&visits).zip(parts) {
                stops.push(Stop { travels: side(visit), rectangles: met(visit), parts });
            }
        }
        let mut tour = Tour { pass, visits, stops, slots: vec![] };
        let homes = |visit: usize, owner: usize| !tour.sums_home(visit, owner).is_empty();
        let slots = |rank: usize| {
            let leave = |visit: usize| homes(visit, tour.visits[visit].owners[rank]);
            Slots::new(&tour.visits, leave, |visit| homes(visit, rank))
        };
        tour.slots = (0..problem.world_size).map(slots).collect();
        tour
    }

    pub fn schedules(&self, problem: &Problem, travels: Travels) -> Vec<Schedule> {
        let world_size = problem.world_size;
        // The sums of the last visit come home later.
        let last = self.visits.iter().map(|visit| visit.returns).max().unwrap_or(0);
        let schedule = |rank| {
            let mut steps: Vec<Step> = (0..=last).map(|t| self.step(rank, t)).collect();
            state::mark(&mut steps, problem, self.pass, rank);
            steps.retain(|step| !step.is_idle());
            Schedule { rank, world_size, pass: self.pass, travels, steps }
        };
        (0..world_size).map(schedule).collect()
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
        let leaving = self.visits.iter().enumerate().skip(1).filter(|(_, to)| to.leaves == t);
        for (number, to) in leaving {
            let from = &self.visits[to.source];
            let due = Due::Begin(number);
            let transfers = |owner: usize, peer: usize, place: &dyn Fn(usize) -> Place| {
                let stop = &self.stops[number][owner];
                let transfer = |(part, rows): (usize, Range<usize>)| {
                    let chunk = Chunk { payload: input(stop.travels), owner, rows };
                    (!chunk.rows.is_empty()).then_some(Transfer { chunk, peer, place: place(part) })
                };
                let carried = stop.parts.iter().map(|part| part.carried.clone());
                carried.enumerate().filter_map(transfer).collect::<Vec<_>>()
            };
            let held = |part| match to.source {
                0 => Place::Home,
                source => Place::Slot(self.slots[rank].input(source, part)),
            };
            let lands = |part| Place::Slot(self.slots[rank].input(number, part));
            let (sent, awaited) = (from.owners[rank], to.owners[rank]);
            let sends = transfers(sent, to.ranks[sent], &held);
            sends.into_iter().for_each(|transfer| mail.send(due, transfer));
            let receives = transfers(awaited, from.ranks[awaited], &lands);
            receives.into_iter().for_each(|transfer| mail.receive(due, transfer));
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
        let cut = |rectangle: &Rectangle| {
            let of_part = |(index, part): (usize, &Part)| {
                let rectangle = rectangle.within(stop.travels, &part.rows)?;
                Some(stop.tile(rank, owner, self.places(rank, visit, index), rectangle))
            };
            stop.parts.iter().enumerate().filter_map(of_part).collect::<Vec<_>>()
        };
        stop.rectangles.iter().flat_map(cut).collect()
    }

    /// Where a rank has a part of the chunk of a visit, and where the sums of that.
    pub fn places(&self, rank: usize, visit: usize, part: usize) -> [Place; 2] {
        let slots = &self.slots[rank];
        [slots.input(visit, part), slots.sums(visit, part)].map(Place::Slot)
    }
}

impl Stop {
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
