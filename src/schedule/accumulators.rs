//! Travelling accumulators.
//!
//! An accumulator travels one step behind its chunk. It opens at the first rank of an accumulator
//! chain that adds to it, leaves a rank during the step after the one that wrote it, and arrives
//! before the next rank folds its tiles. From the last rank that adds to a row, that row goes home.
//! The owner's own contribution never travels: it stays at home, and the accumulators that come
//! home, one from each chain, are merged into it.

use std::ops::Range;

use super::builder::Builder;
use super::geometry::Rectangle;
use super::placement::continues;
use super::{Chunk, Due, Merge, Place, Rows, Step, Tile, Transfer};
use crate::problem::Travels;

impl Builder<'_> {
    /// Opens the accumulators that start at this step, each with all rows that the chain adds to,
    /// and adds tiles that define the rows that only later ranks add to.
    pub fn open_accumulators(&self, rank: usize, step: &mut Step) {
        let number = step.index;
        let owner = self.placements[number].owners[rank];
        let chunk = &self.chunks[number][owner];
        let Some(payload) = chunk.accumulator(self.pass) else { return };
        for (index, range) in chunk.ranges.iter().enumerate().filter(|(_, range)| range.opens) {
            let rows = range.live.clone();
            let places = self.places(rank, number, index);
            let undefined = unwritten(&step.tiles, places[1], chunk.side, &rows);
            let without_pairs = |rows| {
                let rectangle = Rectangle::without_pairs(chunk.side, rows);
                Tile::new(chunk.side, rank, owner, places, rectangle)
            };
            step.tiles.extend(undefined.into_iter().map(without_pairs));
            let slot = self.slots[rank].travelling(number, index);
            step.opens.push((Chunk { payload, owner, rows }, slot));
        }
    }

    /// Adds the messages of the accumulators that the step before wrote. Rows that a later rank of
    /// the chain adds to go on, and arrive before this step's tiles are folded. The other rows go
    /// home.
    pub fn move_accumulators(&self, rank: usize, step: &mut Step) {
        let next = step.index;
        let written = next.checked_sub(1).filter(|n| (1..self.placements.len()).contains(n));
        let Some(number) = written else { return };
        let from = &self.placements[number];
        let (on, home) = (Due::Fold(next), Due::Fold(from.returns));
        let owner = from.owners[rank];
        for (range, chunk, goes_home) in self.moving(number, owner) {
            let place = Place::Slot(self.slots[rank].travelling(number, range));
            match goes_home {
                true => step.exchange(home).sends.push(Transfer { chunk, peer: owner, place }),
                false => {
                    let peer = self.placements[next].ranks[owner];
                    step.exchange(on).sends.push(Transfer { chunk, peer, place });
                }
            }
        }
        if let Some(to) = self.placements.get(next) {
            let owner = to.owners[rank];
            for (range, chunk, _) in self.moving(number, owner).filter(|(.., home)| !home) {
                let place = Place::Slot(self.slots[rank].travelling(next, range));
                step.exchange(on).receives.push(Transfer { chunk, peer: from.ranks[owner], place });
            }
        }
        for (chunk, slot) in self.coming_home(rank, number) {
            let place = Place::Slot(slot);
            step.exchange(home).receives.push(Transfer { chunk, peer: from.ranks[rank], place });
        }
    }

    /// The merges of all accumulators that are home by step `index`.
    pub fn merges(&self, rank: usize, index: usize) -> Vec<Merge> {
        let back = self.returning.get(index).into_iter().flatten();
        let merge = |(chunk, slot)| Merge { chunk, slot, last: false };
        back.flat_map(|number| self.coming_home(rank, *number)).map(merge).collect()
    }

    /// The rows of an owner's accumulators that go home from a placement.
    pub fn homeward(&self, number: usize, owner: usize) -> impl Iterator<Item = Range<usize>> {
        self.moves(number, owner).filter_map(|(_, rows, goes_home)| goes_home.then_some(rows))
    }

    /// The accumulators of an owner that move after a placement: the row range of each, the chunk,
    /// and whether it goes home.
    fn moving(&self, number: usize, owner: usize) -> impl Iterator<Item = (usize, Chunk, bool)> {
        let payload = self.chunks[number][owner].accumulator(self.pass);
        payload.into_iter().flat_map(move |payload| {
            let chunk = move |rows| Chunk { payload, owner, rows };
            self.moves(number, owner).map(move |(range, rows, home)| (range, chunk(rows), home))
        })
    }

    /// The rows of an owner that an accumulator would move after a placement: the row range, the
    /// rows, and whether they go home.
    fn moves(
        &self,
        number: usize,
        owner: usize,
    ) -> impl Iterator<Item = (usize, Range<usize>, bool)> {
        let chain = continues(&self.placements, number + 1);
        let next = chain.then(|| &self.chunks[number + 1][owner].ranges);
        let ranges = self.chunks[number][owner].ranges.iter().enumerate();
        ranges.flat_map(move |(index, range)| {
            let moves = range.moves(next.map(|next| &next[index]));
            moves.map(move |(rows, goes_home)| (index, rows, goes_home))
        })
    }

    /// The accumulators of this rank's own rows that go home from a placement, each with the slot
    /// where it arrives.
    fn coming_home(&self, rank: usize, number: usize) -> Vec<(Chunk, usize)> {
        let returns = self.placements[number].returns;
        let before = || -> usize {
            let earlier = self.returning[returns].iter().take_while(|other| **other < number);
            earlier.map(|other| self.homeward(*other, rank).count()).sum()
        };
        let homeward = self.moving(number, rank).filter(|(.., goes_home)| *goes_home);
        let arrive =
            |(index, (_, chunk, _))| (chunk, self.slots[rank].returned(returns, before() + index));
        homeward.enumerate().map(arrive).collect()
    }
}

/// Returns the parts of `rows`, rows of `side`, that no tile writes in `place`.
fn unwritten(
    tiles: &[Tile],
    place: Place,
    side: Travels,
    rows: &Range<usize>,
) -> Vec<Range<usize>> {
    let written = tiles.iter().map(|tile| tile.side(side));
    let written = written.filter(|(_, accumulator)| accumulator.place == place);
    written.map(|(operand, _)| operand.rows.clone()).collect::<Rows>().missing(rows)
}
