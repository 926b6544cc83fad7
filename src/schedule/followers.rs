//! Accumulators that follow the chunks of a ring.
//!
//! An accumulator follows its chunk one step behind: it is opened at the first rank of a leg that
//! adds to it, leaves a rank during the step after the one that wrote it, arrives before the next
//! rank's tiles are folded into it, and takes a last hop home from the last rank that adds to it,
//! row by row. What the owner itself adds never travels: it stays at home until the accumulator
//! returns, once from each leg.

use std::ops::Range;

use super::geometry::Rectangle;
use super::ring::{Hop, Ring, exchange, slot};
use super::{Chunk, Due, Merge, Payload, Place, Rows, Step, Tile, Transfer};
use crate::mask::Band;
use crate::problem::{Pass, Travels};

/// Where the accumulator lands that is the `index`-th to come home at a step; the other slots are
/// for those that pass through.
fn return_slot(index: usize) -> usize {
    3 * index + 2
}

impl Ring {
    /// The accumulator that follows the chunk, if there is one.
    fn follower(&self) -> Option<Payload> {
        match (self.travels, self.pass) {
            (Travels::Keys, Pass::Forward) => None,
            (Travels::Keys, Pass::Backward) => Some(Payload::KeyGrads),
            (Travels::Queries, Pass::Forward) => Some(Payload::Partial),
            (Travels::Queries, Pass::Backward) => Some(Payload::QueryGrads),
        }
    }

    /// Opens the accumulators that begin at this hop, each with all rows that the leg adds to, and
    /// defines those that only later ranks add to.
    pub fn open_followers(&self, rank: usize, Hop { leg, number }: Hop<'_>, step: &mut Step) {
        let Some(payload) = self.follower() else { return };
        let owner = leg.back(rank, number);
        for (index, part) in leg.parts(owner).iter().enumerate().filter(|(_, p)| p.opens(number)) {
            let (rows, slot) = (part.summed(number), slot(index, step.index));
            let place = Place::Slot(slot);
            let missing = unwritten(&step.tiles, place, self.travels, &rows);
            let blank = |rows| self.tile(rank, owner, place, nothing_to_see(self.travels, rows));
            step.tiles.extend(missing.into_iter().map(blank));
            step.opens.push((Chunk { payload, owner, rows }, slot));
        }
    }

    /// Moves the accumulators that were written at the step before: onward if a rank from there on
    /// adds to them, home otherwise. Both are needed before this step's tiles are folded.
    pub fn move_followers(&self, rank: usize, step: &mut Step) {
        let Some(payload) = self.follower() else { return };
        let t = step.index;
        let Some(Hop { leg, number }) = t.checked_sub(1).and_then(|before| self.hop(before)) else {
            return;
        };
        let transfer = |owner, peer, slot, rows: Range<usize>| {
            let chunk = Chunk { payload, owner, rows };
            (!chunk.rows.is_empty()).then_some(Transfer { chunk, peer, place: Place::Slot(slot) })
        };
        let (next, before) = (leg.onward(rank, 1), leg.back(rank, 1));
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        let written = leg.back(rank, number);
        for (index, part) in leg.parts(written).iter().enumerate() {
            let send = |peer, rows| transfer(written, peer, slot(index, t - 1), rows);
            sends.extend(send(next, part.summed_onward(number)));
            sends.extend(
                part.summed_home(number).into_iter().filter_map(|rows| send(written, rows)),
            );
        }
        let coming = leg.back(rank, number + 1);
        for (index, part) in leg.parts(coming).iter().enumerate() {
            let rows = part.summed_onward(number);
            receives.extend(transfer(coming, before, slot(index, t), rows));
        }
        let home = leg.parts(rank).iter().flat_map(|part| part.summed_home(number));
        let from = leg.onward(rank, number);
        for (index, rows) in home.enumerate() {
            let returned = transfer(rank, from, return_slot(index), rows);
            step.merges.extend(returned.iter().map(|returned| Merge {
                chunk: returned.chunk.clone(),
                slot: return_slot(index),
                last: false,
            }));
            receives.extend(returned);
        }
        step.exchanges.extend(exchange(sends, receives, Due::Fold(t)));
    }
}

/// Those of `rows` of the travelling side that no tile writes in `place`.
fn unwritten(
    tiles: &[Tile],
    place: Place,
    travels: Travels,
    rows: &Range<usize>,
) -> Vec<Range<usize>> {
    let mut written = Rows::default();
    for tile in tiles {
        let (operand, state) = match travels {
            Travels::Keys => (&tile.keys, tile.key_state),
            Travels::Queries => (&tile.queries, tile.query_state),
        };
        if state.place == place {
            written.insert(operand.rows.clone());
        }
    }
    written.missing(rows)
}

/// Rows of the travelling side with nothing to compute with.
fn nothing_to_see(travels: Travels, rows: Range<usize>) -> Rectangle {
    let (queries, keys) = match travels {
        Travels::Keys => (0..0, rows),
        Travels::Queries => (rows, 0..0),
    };
    Rectangle { queries, keys, band: Band::FULL }
}
