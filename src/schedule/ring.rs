//! The single ring: one side of the attention stays, the other travels from rank to rank.
//!
//! At step t a rank holds the chunk of the rank t hops behind it, computes its rectangles with the
//! rows it keeps at home and meanwhile passes the chunk on. An accumulator follows its chunk one
//! step behind: it leaves a rank during the step after the one that wrote it, arrives before the
//! next rank's tile is folded into it, and takes a last hop home from the last rank that adds to
//! it. What the owner itself adds never travels: it stays at home until the accumulator returns.

use std::ops::Range;

use super::geometry::{Rectangle, rectangles};
use super::{
    Chunk, Due, Exchange, Merge, Operand, Payload, Place, Schedule, State, Step, Tile, Transfer,
    state,
};
use crate::problem::{Pass, Problem, Travels};

/// Where accumulators that come home land; 0 and 1 are for those that pass through.
const RETURN_SLOT: usize = 2;

/// Which neighbour a rank sends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Rank r sends to r + 1.
    Up,
    /// Rank r sends to r − 1.
    Down,
}

/// The schedules of all ranks for one pass of `problem` on a single ring.
pub fn ring(problem: &Problem, pass: Pass, travels: Travels) -> Vec<Schedule> {
    let world_size = problem.world_size;
    let ring = Ring::new(problem, pass, travels);
    let schedule = |rank| {
        let mut steps: Vec<Step> = (0..=world_size).map(|t| ring.step(rank, t)).collect();
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
struct Ring<'a> {
    problem: &'a Problem,
    pass: Pass,
    travels: Travels,
    direction: Direction,
    /// By owner and hop: rows of the owner's chunk that are computed with at that rank.
    needed: Vec<Vec<Range<usize>>>,
    /// By owner and hop: rows that make the hop because somebody from there on needs them.
    carried: Vec<Vec<Range<usize>>>,
}

impl<'a> Ring<'a> {
    /// Takes the direction in which chunks have fewer hops to the last rank that needs them; up
    /// where both are equal. With a causal mask that makes the ranks that need a piece the first
    /// ones it meets.
    fn new(problem: &'a Problem, pass: Pass, travels: Travels) -> Ring<'a> {
        let ranks = 0..problem.world_size;
        let at = |owner| ranks.clone().map(move |rank| rows_needed(problem, travels, owner, rank));
        let needs: Vec<Vec<Range<usize>>> =
            ranks.clone().map(|owner| at(owner).collect()).collect();
        let toward = |direction| {
            let mut ring =
                Ring { problem, pass, travels, direction, needed: vec![], carried: vec![] };
            for owner in ranks.clone() {
                let at = |t| needs[owner][ring.onward(owner, t)].clone();
                let needed: Vec<_> = ranks.clone().map(at).collect();
                let mut carried = needed.clone();
                for t in (1..problem.world_size).rev() {
                    carried[t - 1] = join(carried[t - 1].clone(), carried[t].clone());
                }
                ring.needed.push(needed);
                ring.carried.push(carried);
            }
            ring
        };
        let hops = |ring: &Ring<'_>| -> usize {
            ring.carried.iter().flat_map(|hops| &hops[1..]).map(ExactSizeIterator::len).sum()
        };
        let (up, down) = (toward(Direction::Up), toward(Direction::Down));
        if hops(&down) < hops(&up) { down } else { up }
    }

    /// The rank `hops` hops onward from `rank`.
    fn onward(&self, rank: usize, hops: usize) -> usize {
        let world_size = self.problem.world_size;
        match self.direction {
            Direction::Up => (rank + hops) % world_size,
            Direction::Down => (rank + world_size - hops % world_size) % world_size,
        }
    }

    /// The rank `hops` hops back from `rank`.
    fn back(&self, rank: usize, hops: usize) -> usize {
        self.onward(rank, self.problem.world_size - hops % self.problem.world_size)
    }

    fn input(&self) -> Payload {
        match self.travels {
            Travels::Keys => Payload::Keys,
            Travels::Queries => Payload::Queries,
        }
    }

    /// The accumulator that follows the chunk, if there is one.
    fn follower(&self) -> Option<Payload> {
        match (self.travels, self.pass) {
            (Travels::Keys, Pass::Forward) => None,
            (Travels::Keys, Pass::Backward) => Some(Payload::KeyGrads),
            (Travels::Queries, Pass::Forward) => Some(Payload::Partial),
            (Travels::Queries, Pass::Backward) => Some(Payload::QueryGrads),
        }
    }

    /// Rows of `owner`'s chunk that are computed with at the rank `t` hops onward.
    fn needed(&self, owner: usize, t: usize) -> Range<usize> {
        self.needed[owner].get(t).cloned().unwrap_or(0..0)
    }

    /// Rows of `owner`'s chunk that make hop `t` because somebody from there on needs them.
    fn carried(&self, owner: usize, t: usize) -> Range<usize> {
        self.carried[owner].get(t).cloned().unwrap_or(0..0)
    }

    /// What `rank` does at step `t`. Step `world_size` only brings accumulators home.
    fn step(&self, rank: usize, t: usize) -> Step {
        let mut step = Step::new(t);
        step.exchanges.extend(self.exchange_followers(rank, t, &mut step.merges));
        if t < self.problem.world_size {
            step.exchanges.extend(self.exchange_inputs(rank, t));
            let owner = self.back(rank, t);
            step.tiles = self.tiles(rank, owner, t);
            step.opens.extend(self.open_follower(owner, t));
        }
        step
    }

    /// Passes on the chunk held at step `t` and receives the next.
    fn exchange_inputs(&self, rank: usize, t: usize) -> Option<Exchange> {
        let place = |t: usize| if t == 0 { Place::Home } else { Place::Slot(t % 2) };
        let hop = |owner: usize, peer: usize, place: Place| {
            let rows = self.carried(owner, t + 1);
            let chunk = Chunk { payload: self.input(), owner, rows };
            (!chunk.rows.is_empty()).then_some(Transfer { chunk, peer, place })
        };
        let sends = hop(self.back(rank, t), self.onward(rank, 1), place(t));
        let receives = hop(self.back(rank, t + 1), self.back(rank, 1), place(t + 1));
        exchange(sends.into_iter().collect(), receives.into_iter().collect(), Due::Begin(t + 1))
    }

    fn open_follower(&self, owner: usize, t: usize) -> Option<(Chunk, usize)> {
        let payload = self.follower()?;
        let rows = self.needed(owner, t);
        (t == 1 && !rows.is_empty()).then_some((Chunk { payload, owner, rows }, t % 2))
    }

    /// Moves the accumulators that were written at step `t` − 1: onward if the next rank adds to
    /// them, home otherwise. Both are needed before this step's tiles are folded.
    fn exchange_followers(
        &self,
        rank: usize,
        t: usize,
        merges: &mut Vec<Merge>,
    ) -> Option<Exchange> {
        let payload = self.follower()?;
        if t < 2 {
            return None;
        }
        let transfer = |owner: usize, rows: Range<usize>, peer: usize, slot: usize| {
            let chunk = Chunk { payload, owner, rows };
            (!chunk.rows.is_empty()).then_some(Transfer { chunk, peer, place: Place::Slot(slot) })
        };
        let written = self.back(rank, t - 1);
        let (on, home) = self.split_follower(written, t);
        let mut sends = Vec::from_iter(transfer(written, on, self.onward(rank, 1), (t - 1) % 2));
        sends.extend(transfer(written, home, written, (t - 1) % 2));

        let coming = self.back(rank, t);
        let (on, _) = self.split_follower(coming, t);
        let mut receives = Vec::from_iter(transfer(coming, on, self.back(rank, 1), t % 2));
        let (_, home) = self.split_follower(rank, t);
        let back_home = transfer(rank, home, self.onward(rank, t - 1), RETURN_SLOT);
        merges.extend(back_home.iter().map(|transfer| Merge {
            chunk: transfer.chunk.clone(),
            slot: RETURN_SLOT,
            last: false,
        }));
        receives.extend(back_home);
        exchange(sends, receives, Due::Fold(t))
    }

    /// Rows of `owner`'s accumulator written at step `t` − 1: those that go on, those that go home.
    fn split_follower(&self, owner: usize, t: usize) -> (Range<usize>, Range<usize>) {
        let written = self.needed(owner, t - 1);
        let on = self.needed(owner, t);
        if on.is_empty() {
            return (0..0, written);
        }
        assert!(
            written.start <= on.start && on.end <= written.end,
            "ranks that add to a row follow each other round the ring"
        );
        let home =
            if on.start == written.start { on.end..written.end } else { written.start..on.start };
        assert_eq!(home.len() + on.len(), written.len(), "what goes home is one run of rows");
        (on, home)
    }

    fn tiles(&self, rank: usize, owner: usize, t: usize) -> Vec<Tile> {
        let place = if t == 0 { Place::Home } else { Place::Slot(t % 2) };
        let state = |place| State { place, first: false, last: false };
        let (home, away) = (state(Place::Home), state(place));
        let tile = |Rectangle { queries, keys, band }| match self.travels {
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
        };
        meeting(self.problem, self.travels, owner, rank).into_iter().map(tile).collect()
    }
}

/// Rectangles between the chunk of `owner` and what rank `at` keeps at home.
fn meeting(problem: &Problem, travels: Travels, owner: usize, at: usize) -> Vec<Rectangle> {
    match travels {
        Travels::Keys => rectangles(problem, at, owner),
        Travels::Queries => rectangles(problem, owner, at),
    }
}

/// Rows of the chunk of `owner` that rank `at` computes with.
fn rows_needed(problem: &Problem, travels: Travels, owner: usize, at: usize) -> Range<usize> {
    let rows = meeting(problem, travels, owner, at).into_iter().map(|rectangle| match travels {
        Travels::Keys => rectangle.keys,
        Travels::Queries => rectangle.queries,
    });
    rows.reduce(join).unwrap_or(0..0)
}

fn exchange(sends: Vec<Transfer>, receives: Vec<Transfer>, due: Due) -> Option<Exchange> {
    let idle = sends.is_empty() && receives.is_empty();
    (!idle).then_some(Exchange { sends, receives, due })
}

/// The smallest range that contains both; an empty range adds nothing.
fn join(a: Range<usize>, b: Range<usize>) -> Range<usize> {
    match (a.is_empty(), b.is_empty()) {
        (true, _) => b,
        (_, true) => a,
        _ => a.start.min(b.start)..a.end.max(b.end),
    }
}
