//! The schedule builder: from placements to what each rank computes, sends and receives.

use std::ops::Range;

use super::geometry::Rectangle;
use super::payload::shard_rows;
use super::placement::Placement;
use super::rank_pairs::RankPairs;
use super::row_ranges::{RowRange, branches, row_ranges};
use super::slots::{InputSlots, Slots};
use super::{
    Accumulator, Chunk, Due, Exchange, Family, Payload, Place, Rows, Schedule, Step, Tile,
    TileRows, Transfer, marks,
};
use crate::error::Result;
use crate::problem::{Pass, Problem, Travels};

/// Ranks whose schedules the builder makes together, because neighbours read the same data. They are
/// few, so that schedules which the caller drops stay in caches.
const NEIGHBOURS: usize = 16;

/// Makes the schedules of all ranks for one pass of `problem`. Without `travels`, the side travels
/// that costs fewer bytes, and keys where both cost the same.
///
/// # Errors
/// If the family does not fit the number of ranks.
pub fn schedule(
    problem: &Problem,
    family: Family,
    pass: Pass,
    travels: impl Into<Option<Travels>>,
) -> Result<Vec<Schedule>> {
    let mut schedules = Vec::with_capacity(problem.world_size);
    for_each_rank(problem, family, pass, travels.into(), |schedule| schedules.push(schedule))?;
    Ok(schedules)
}

/// Makes the schedules that [`schedule`] returns one after the other, for callers who need not keep
/// them: the schedules of a thousand ranks take gigabytes. Returns the side that travels.
///
/// # Errors
/// If the family does not fit the number of ranks.
pub fn for_each_rank(
    problem: &Problem,
    family: Family,
    pass: Pass,
    travels: Option<Travels>,
    take: impl FnMut(Schedule),
) -> Result<Travels> {
    family.validate(problem.world_size)?;
    let pairs = RankPairs::new(problem);
    let builder = |travels| Builder::new(problem, &pairs, family, travels, pass);
    let builder = match travels {
        Some(travels) => builder(travels),
        None => {
            let [keys, queries] = [Travels::Keys, Travels::Queries].map(builder);
            if queries.bytes() < keys.bytes() { queries } else { keys }
        }
    };
    let travels = builder.travels;
    builder.build(take);
    Ok(travels)
}

/// Makes the schedules of all ranks for one pass of `problem` on a single ring.
pub fn ring(problem: &Problem, pass: Pass, travels: Travels) -> Vec<Schedule> {
    schedule(problem, Family::Ring, pass, travels).expect("a ring has any number of ranks")
}

/// What the schedules of all ranks have in common.
pub(super) struct Builder<'a> {
    problem: &'a Problem,
    pub pass: Pass,
    travels: Travels,
    pub placements: Vec<Placement>,
    /// `[step]`: the placements for which chunks leave at the step.
    leaving: Vec<Vec<usize>>,
    /// `[step]`: the placements whose accumulators are home by the step.
    pub returning: Vec<Vec<usize>>,
    /// `[placement][owner]`
    pub chunks: Vec<Vec<ChunkAtRank<'a>>>,
    /// `[rank]`
    pub slots: Vec<Slots>,
}

/// The chunk of one owner at one placement.
pub(super) struct ChunkAtRank<'a> {
    /// The side of the chunk.
    pub side: Travels,
    /// The rectangles of the chunk with the rank's own rows of the other side.
    rectangles: &'a [Rectangle],
    /// The chunk's row ranges. At home there are none.
    pub ranges: Vec<RowRange>,
}

impl<'a> Builder<'a> {
    fn new(
        problem: &'a Problem,
        pairs: &'a RankPairs,
        family: Family,
        travels: Travels,
        pass: Pass,
    ) -> Builder<'a> {
        let placements = family.placements(pairs, travels);
        let branches = branches(&placements);
        let mut chunks: Vec<Vec<ChunkAtRank>> = placements.iter().map(|_| vec![]).collect();
        for owner in 0..problem.world_size {
            let side = |placement: &Placement| placement.sides[owner].unwrap_or(Travels::Keys);
            let rectangles = |placement: &Placement| match placement.sides[owner] {
                Some(side) => pairs.of(side, owner, placement.ranks[owner]),
                None => &[],
            };
            let needed = placements.iter().map(|placement| match placement.sides[owner] {
                Some(side) => pairs.needed(side, owner, placement.ranks[owner]),
                None => Rows::default(),
            });
            let needed: Vec<Rows> = needed.collect();
            let len = |number: usize| shard_rows(problem, side(&placements[number]));
            let ranges = row_ranges(&placements, &branches, &needed, len);
            for ((chunks, placement), ranges) in chunks.iter_mut().zip(&placements).zip(ranges) {
                let rectangles = rectangles(placement);
                chunks.push(ChunkAtRank { side: side(placement), rectangles, ranges });
            }
        }
        let by_step = |step: fn(&Placement) -> usize| {
            let last = placements.iter().map(step).max().unwrap_or(0);
            let mut by_step = vec![vec![]; last + 1];
            let numbered = placements.iter().enumerate().skip(1);
            numbered.for_each(|(number, placement)| by_step[step(placement)].push(number));
            by_step
        };
        let (leaving, returning) = (by_step(|p| p.leaves), by_step(|p| p.returns));
        let slots = vec![];
        Builder { problem, pass, travels, placements, leaving, returning, chunks, slots }
    }

    /// Bytes that all ranks together send.
    fn bytes(&self) -> u64 {
        let mut bytes = 0;
        for chunk in self.chunks.iter().skip(1).flatten() {
            let row = |payload: Payload| payload.row_bytes(self.problem, self.pass);
            let inputs: usize = chunk.ranges.iter().map(|range| range.carried.len()).sum();
            // A live row of an accumulator makes one hop after each placement, onward or home.
            let live: usize = chunk.ranges.iter().map(|range| range.live.len()).sum();
            let accumulator = chunk.accumulator(self.pass).map_or(0, row);
            bytes += (inputs * row(Payload::input(chunk.side)) + live * accumulator) as u64;
        }
        bytes
    }

    /// Makes the schedules of all ranks, one after the other.
    fn build(mut self, mut take: impl FnMut(Schedule)) {
        let Builder { problem: &Problem { world_size, .. }, pass, travels, .. } = self;
        self.slots = self.slots_of_ranks();
        for first in (0..world_size).step_by(NEIGHBOURS) {
            let ranks = first..world_size.min(first + NEIGHBOURS);
            for (rank, mut steps) in ranks.clone().zip(self.steps(ranks)) {
                marks::mark(&mut steps, self.problem, pass, rank);
                steps.retain(|step| !step.is_idle());
                take(Schedule { rank, world_size, pass, travels, steps });
            }
        }
    }

    /// What some ranks do, step by step. Only the first step may be idle.
    fn steps(&self, ranks: Range<usize>) -> Vec<Vec<Step>> {
        // The accumulators of the last placement come home after it.
        let last = self.placements.iter().map(|placement| placement.returns).max().unwrap_or(0);
        let mut steps: Vec<Vec<Step>> = vec![vec![]; ranks.len()];
        for index in 0..=last {
            for (rank, steps) in ranks.clone().zip(&mut steps) {
                let step = self.step(rank, index);
                if index == 0 || !step.is_idle() {
                    steps.push(step);
                }
            }
        }
        steps
    }

    fn slots_of_ranks(&self) -> Vec<Slots> {
        let homeward =
            |placement: usize, owner: usize| self.homeward(placement, owner).next().is_some();
        let inputs = InputSlots::new(&self.placements);
        let slots = |rank: usize| {
            let leave = |number: usize| homeward(number, self.placements[number].owners[rank]);
            Slots::new(&self.placements, &inputs, leave, |number| homeward(number, rank))
        };
        (0..self.problem.world_size).map(slots).collect()
    }

    /// What `rank` does at step `index`.
    fn step(&self, rank: usize, index: usize) -> Step {
        let mut step = Step::new(index);
        self.move_accumulators(rank, &mut step);
        self.move_inputs(rank, &mut step);
        // All ranks start the exchanges that they share in the same order.
        step.exchanges.sort_by_key(|exchange| exchange.due.moment());
        if index < self.placements.len() {
            step.tiles = self.tiles(rank, index);
            self.open_accumulators(rank, &mut step);
        }
        step.merges = self.merges(rank, index);
        step
    }

    /// Adds the messages of chunks that leave for another placement at this step.
    fn move_inputs(&self, rank: usize, step: &mut Step) {
        for &number in self.leaving.get(step.index).into_iter().flatten() {
            let to = &self.placements[number];
            let from = &self.placements[to.source];
            let carried = |owner: usize| {
                let ChunkAtRank { side, ranges, .. } = &self.chunks[number][owner];
                let rows = ranges.iter().map(|range| range.carried.clone()).enumerate();
                let chunk = move |rows| Chunk { payload: Payload::input(*side), owner, rows };
                let rows = rows.filter(|(_, rows)| !rows.is_empty());
                rows.map(move |(range, rows)| (range, chunk(rows)))
            };
            let (sent, awaited) = (from.owners[rank], to.owners[rank]);
            let send = |(range, chunk)| {
                let place = match to.source {
                    0 => Place::Home,
                    source => Place::Slot(self.slots[rank].input(source, range)),
                };
                Transfer { chunk, peer: to.ranks[sent], place }
            };
            let receive = |(range, chunk)| {
                let place = Place::Slot(self.slots[rank].input(number, range));
                Transfer { chunk, peer: from.ranks[awaited], place }
            };
            let sends: Vec<_> = carried(sent).map(send).collect();
            let receives: Vec<_> = carried(awaited).map(receive).collect();
            if !(sends.is_empty() && receives.is_empty()) {
                step.exchanges.push(Exchange { sends, receives, due: Due::Begin(number) });
            }
        }
    }

    /// The rectangles of the chunk that `rank` has at a placement, cut where its row ranges are.
    fn tiles(&self, rank: usize, placement: usize) -> Vec<Tile> {
        let owner = self.placements[placement].owners[rank];
        let chunk = &self.chunks[placement][owner];
        if placement == 0 {
            let own = chunk.rectangles.iter().cloned();
            return own
                .map(|own| Tile::new(chunk.side, rank, owner, [Place::Home; 2], own))
                .collect();
        }
        let pairs = chunk.rectangles.iter().flat_map(|rectangle| {
            chunk.ranges.iter().enumerate().map(move |(index, range)| (rectangle, index, range))
        });
        let cut = |(rectangle, index, range): (&Rectangle, usize, &RowRange)| {
            let rectangle = rectangle.within(chunk.side, &range.rows)?;
            let places = self.places(rank, placement, index);
            Some(Tile::new(chunk.side, rank, owner, places, rectangle))
        };
        pairs.filter_map(cut).collect()
    }

    /// Where a rank has the inputs and the accumulator of a row range at a placement.
    pub fn places(&self, rank: usize, placement: usize, range: usize) -> [Place; 2] {
        let slots = &self.slots[rank];
        [slots.input(placement, range), slots.travelling(placement, range)].map(Place::Slot)
    }
}

impl ChunkAtRank<'_> {
    /// The accumulator that travels with the chunk, if one does.
    pub fn accumulator(&self, pass: Pass) -> Option<Payload> {
        Payload::accumulator(self.side, pass)
    }
}

impl Tile {
    /// The tile of a rectangle that combines the rows of `owner` on `side` with the own rows of
    /// `rank`. `input` and `accumulator` are where the owner's rows and their accumulator lie.
    pub(super) fn new(
        side: Travels,
        rank: usize,
        owner: usize,
        [input, accumulator]: [Place; 2],
        Rectangle { queries, keys, band }: Rectangle,
    ) -> Tile {
        let home = Place::Home;
        let own = |rows| (TileRows { owner: rank, place: home, rows }, Accumulator::at(home));
        let other = |rows| (TileRows { owner, place: input, rows }, Accumulator::at(accumulator));
        let ((queries, query_state), (keys, key_state)) = match side {
            Travels::Keys => (own(queries), other(keys)),
            Travels::Queries => (other(queries), own(keys)),
        };
        Tile { queries, keys, band, query_state, key_state }
    }
}
