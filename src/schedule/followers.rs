//! Accumulators that follow the chunks of a tour.
//!
//! An accumulator follows its chunk one step behind: it is opened at the first rank of a strand
//! that adds to it, leaves a rank during the step after the one that wrote it, arrives before the
//! next rank's tiles are folded into it, and takes a last hop home from the last rank that adds to
//! it, row by row. What the owner itself adds never travels: it stays at home until the accumulator
//! returns, once from each strand.

use std::ops::Range;

use super::geometry::Rectangle;
use super::parts::Part;
use super::tour::{Mail, Tour};
use super::visits::{Visit, continues};
use super::{Chunk, Due, Merge, Payload, Place, Rows, Step, Tile, Transfer};
use crate::mask::Band;
use crate::problem::{Pass, Travels};

impl Tour<'_> {
    /// The accumulator that follows a chunk, if there is one.
    pub fn follower(&self, visit: usize, owner: usize) -> Option<Payload> {
        match (self.stops[visit][owner].travels, self.pass) {
            (Travels::Keys, Pass::Forward) => None,
            (Travels::Keys, Pass::Backward) => Some(Payload::KeyGrads),
            (Travels::Queries, Pass::Forward) => Some(Payload::Partial),
            (Travels::Queries, Pass::Backward) => Some(Payload::QueryGrads),
        }
    }

    /// Opens the accumulators that begin at this step, each with all rows that the strand adds to,
    /// and defines those that only later ranks add to.
    pub fn open_sums(&self, rank: usize, step: &mut Step) {
        let visit = step.index;
        let owner = self.visits[visit].owners[rank];
        let Some(payload) = self.follower(visit, owner) else { return };
        let stop = &self.stops[visit][owner];
        for (index, part) in stop.parts.iter().enumerate().filter(|(_, part)| part.opens) {
            let rows = part.summed.clone();
            let places = self.places(rank, visit, index);
            let missing = unwritten(&step.tiles, places[1], stop.travels, &rows);
            let blank = |rows| stop.tile(rank, owner, places, nothing_to_see(stop.travels, rows));
            step.tiles.extend(missing.into_iter().map(blank));
            step.opens.push((Chunk { payload, owner, rows }, self.slots[rank].sums(visit, index)));
        }
    }

    /// Moves the accumulators that were written at the step before: onward if a rank from there on
    /// adds to them, home otherwise. What goes onward is needed before this step's tiles are folded.
    pub fn move_sums(&self, rank: usize, t: usize, mail: &mut Mail) {
        let Some(visit) = t.checked_sub(1).filter(|visit| (1..self.visits.len()).contains(visit))
        else {
            return;
        };
        let Visit { owners, returns, .. } = &self.visits[visit];
        let (on, home) = (Due::Fold(t), Due::Fold(*returns));
        let written = owners[rank];
        if let Some(payload) = self.follower(visit, written) {
            let chunk = |rows| Chunk { payload, owner: written, rows };
            for (index, part) in self.stops[visit][written].parts.iter().enumerate() {
                let next = self.next_part(visit, written, index);
                let place = Place::Slot(self.slots[rank].sums(visit, index));
                let onward = part.summed_onward(next);
                if !onward.is_empty() {
                    let peer = self.visits[t].ranks[written];
                    mail.send(on, Transfer { chunk: chunk(onward), peer, place });
                }
                for rows in part.summed_home(next) {
                    mail.send(home, Transfer { chunk: chunk(rows), peer: written, place });
                }
            }
        }
        if continues(&self.visits, t) {
            self.receive_onward(rank, t, mail);
        }
        for (chunk, slot) in self.coming_home(rank, visit) {
            let peer = self.visits[visit].ranks[rank];
            mail.receive(home, Transfer { chunk, peer, place: Place::Slot(slot) });
        }
    }

    /// What the rank before in the strand passes on at step `t`.
    fn receive_onward(&self, rank: usize, t: usize, mail: &mut Mail) {
        let coming = self.visits[t].owners[rank];
        let Some(payload) = self.follower(t - 1, coming) else { return };
        for (index, part) in self.stops[t - 1][coming].parts.iter().enumerate() {
            let next = self.next_part(t - 1, coming, index);
            let rows = part.summed_onward(next);
            if !rows.is_empty() {
                let chunk = Chunk { payload, owner: coming, rows };
                let peer = self.visits[t - 1].ranks[coming];
                let place = Place::Slot(self.slots[rank].sums(t, index));
                mail.receive(Due::Fold(t), Transfer { chunk, peer, place });
            }
        }
    }

    /// Accumulators of this rank's own rows that go home from a visit, and the slots they land in.
    fn coming_home(&self, rank: usize, visit: usize) -> Vec<(Chunk, usize)> {
        let Some(payload) = self.follower(visit, rank) else { return vec![] };
        let returns = self.visits[visit].returns;
        let mut home = self.sums_home(visit, rank).peekable();
        if home.peek().is_none() {
            return vec![];
        }
        let with_them = self.returning[returns].iter().take_while(|other| **other < visit);
        let before: usize = with_them.map(|other| self.sums_home(*other, rank).count()).sum();
        let land = |(index, rows)| {
            let slot = self.slots[rank].returned(returns, before + index);
            (Chunk { payload, owner: rank, rows }, slot)
        };
        home.enumerate().map(land).collect()
    }

    /// Merges of all that came home by step `t`.
    pub fn merges(&self, rank: usize, t: usize) -> Vec<Merge> {
        let back = self.returning.get(t).into_iter().flatten();
        let merge = |(chunk, slot)| Merge { chunk, slot, last: false };
        back.flat_map(|visit| self.coming_home(rank, *visit)).map(merge).collect()
    }

    /// Rows of an owner's accumulators that go home from a visit.
    pub fn sums_home(&self, visit: usize, owner: usize) -> impl Iterator<Item = Range<usize>> {
        let parts = self.stops[visit][owner].parts.iter().enumerate();
        parts.flat_map(move |(index, part)| part.summed_home(self.next_part(visit, owner, index)))
    }

    /// The same part at the next visit of the strand, if there is one.
    fn next_part(&self, visit: usize, owner: usize, part: usize) -> Option<&Part> {
        let next = visit + 1;
        continues(&self.visits, next).then(|| &self.stops[next][owner].parts[part])
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
