//! Marks which tile touches the rows of an accumulator first and which last.
//!
//! A tile or merge whose rows differ in that is split, so that a kernel decides once for each. Rows
//! at home that no tile touches get a tile without keys (or without queries), so that every output
//! is defined.

use std::ops::Range;

use super::{Chunk, Merge, Operand, Payload, Place, Rows, State, Step, Tile};
use crate::mask::Band;
use crate::problem::{Pass, Problem};

/// Which side of a tile an accumulator belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Queries,
    Keys,
}

impl Side {
    fn operand(self, tile: &Tile) -> &Operand {
        match self {
            Side::Queries => &tile.queries,
            Side::Keys => &tile.keys,
        }
    }

    fn state(self, tile: &mut Tile) -> &mut State {
        match self {
            Side::Queries => &mut tile.query_state,
            Side::Keys => &mut tile.key_state,
        }
    }

    fn with_rows(self, tile: &Tile, rows: Range<usize>) -> Tile {
        let mut part = tile.clone();
        match self {
            Side::Queries => part.queries.rows = rows,
            Side::Keys => part.keys.rows = rows,
        }
        part
    }
}

/// Sets `first` and `last` of all tiles and merges of one rank, in place.
pub(super) fn mark(steps: &mut [Step], problem: &Problem, pass: Pass, rank: usize) {
    let sides: &[(Side, Payload)] = match pass {
        Pass::Forward => &[(Side::Queries, Payload::Partial)],
        Pass::Backward => &[(Side::Queries, Payload::QueryGrads), (Side::Keys, Payload::KeyGrads)],
    };
    for &(side, payload) in sides {
        let len = match side {
            Side::Queries => problem.q_len,
            Side::Keys => problem.kv_len,
        };
        define_untouched(steps, side, payload, rank, len);
    }
    mark_first(steps, sides);
    for &(side, payload) in sides {
        let mut merges = steps.iter().flat_map(|step| &step.merges);
        if pass == Pass::Forward || merges.any(|merge| merge.chunk.payload == payload) {
            mark_last(steps, side, payload);
        }
    }
}

/// Adds a tile with nothing to see for the rows at home that no tile writes, or none before what
/// came home is added to them.
fn define_untouched(steps: &mut [Step], side: Side, payload: Payload, rank: usize, len: usize) {
    let (mut touched, mut merged) = (Rows::default(), Rows::default());
    for step in steps.iter_mut() {
        for tile in &mut step.tiles {
            if side.state(tile).place == Place::Home {
                let first = merged.missing(&side.operand(tile).rows);
                first.into_iter().for_each(|rows| touched.insert(rows));
            }
        }
        let merges = step.merges.iter().filter(|merge| merge.chunk.payload == payload);
        for rows in merges.flat_map(|merge| touched.missing(&merge.chunk.rows)) {
            merged.insert(rows);
        }
    }
    for rows in touched.missing(&(0..len)) {
        let operand = |rows| Operand { owner: rank, place: Place::Home, rows };
        let state = State { place: Place::Home, first: false, last: false };
        let (queries, keys) = match side {
            Side::Queries => (operand(rows), operand(0..0)),
            Side::Keys => (operand(0..0), operand(rows)),
        };
        let band = Band::FULL;
        let tile = Tile { queries, keys, band, query_state: state, key_state: state };
        steps[0].tiles.push(tile);
    }
}

/// A tile is first for rows that nothing wrote since their buffer was opened or received.
fn mark_first(steps: &mut [Step], sides: &[(Side, Payload)]) {
    let mut written = Written::default();
    for step in steps {
        for (chunk, slot) in &step.opens {
            *written.rows(chunk.payload, Place::Slot(*slot)) = Rows::default();
        }
        for transfer in step.exchanges.iter().flat_map(|exchange| &exchange.receives) {
            let rows = Rows::from(transfer.chunk.rows.clone());
            *written.rows(transfer.chunk.payload, transfer.place) = rows;
        }
        let mut index = 0;
        while let Some(tile) = step.tiles.get_mut(index) {
            let mixed = sides.iter().find_map(|&(side, payload)| {
                let seen = written.rows(payload, side.state(tile).place);
                is_mixed(&side.operand(tile).rows, seen)
                    .then(|| split(tile, side, seen, |state, seen| state.first = !seen))
            });
            if let Some(parts) = mixed {
                step.tiles.splice(index..=index, parts);
                continue;
            }
            for &(side, payload) in sides {
                let rows = side.operand(tile).rows.clone();
                let state = side.state(tile);
                let seen = written.rows(payload, state.place);
                state.first = seen.common(&rows).next().is_none();
                seen.insert(rows);
            }
            index += 1;
        }
    }
}

/// Rows of buffers that were written since these were opened or received. There are few buffers.
#[derive(Default)]
struct Written(Vec<(Payload, Place, Rows)>);

impl Written {
    fn rows(&mut self, payload: Payload, place: Place) -> &mut Rows {
        let known = self.0.iter().position(|(p, at, _)| (*p, *at) == (payload, place));
        let index = known.unwrap_or_else(|| {
            self.0.push((payload, place, Rows::default()));
            self.0.len() - 1
        });
        &mut self.0[index].2
    }
}

/// Going backwards, a tile or merge at home is last for rows that nothing later touches. Tiles are
/// told so in the forward pass only.
fn mark_last(steps: &mut [Step], side: Side, payload: Payload) {
    let mut later = Rows::default();
    for step in steps.iter_mut().rev() {
        replace_from_end(&mut step.merges, |merge| last_merges(merge, payload, &mut later));
        replace_from_end(&mut step.tiles, |tile| last_tiles(tile, side, payload, &mut later));
    }
}

/// Puts parts, the last one first, in the place of the items that have some. The last item's turn
/// is first.
fn replace_from_end<T>(items: &mut Vec<T>, mut parts: impl FnMut(&mut T) -> Option<Vec<T>>) {
    for index in (0..items.len()).rev() {
        if let Some(parts) = parts(&mut items[index]) {
            items.splice(index..=index, parts.into_iter().rev());
        }
    }
}

fn last_merges(merge: &mut Merge, payload: Payload, later: &mut Rows) -> Option<Vec<Merge>> {
    let Merge { chunk: Chunk { owner, rows, .. }, slot, .. } = merge.clone();
    if merge.chunk.payload != payload {
        return None;
    }
    let part = |(rows, followed): (Range<usize>, bool)| {
        let chunk = Chunk { payload, owner, rows };
        Merge { chunk, slot, last: !followed }
    };
    let parts =
        is_mixed(&rows, later).then(|| cut(rows.clone(), later).into_iter().map(part).collect());
    merge.last = later.common(&rows).next().is_none();
    later.insert(rows);
    parts
}

fn last_tiles(
    tile: &mut Tile,
    side: Side,
    payload: Payload,
    later: &mut Rows,
) -> Option<Vec<Tile>> {
    if side.state(tile).place != Place::Home {
        return None;
    }
    let rows = side.operand(tile).rows.clone();
    let is_told = payload == Payload::Partial;
    let parts = (is_told && is_mixed(&rows, later))
        .then(|| split(tile, side, later, |state, seen| state.last = !seen));
    side.state(tile).last = is_told && later.common(&rows).next().is_none();
    later.insert(rows);
    parts
}

/// Are some of `rows` seen and others not?
fn is_mixed(rows: &Range<usize>, seen: &Rows) -> bool {
    seen.common(rows).next().is_some_and(|common| common != *rows)
}

/// `rows` cut at the borders of `seen`, each part with whether it was seen; at least one part.
fn cut(rows: Range<usize>, seen: &Rows) -> Vec<(Range<usize>, bool)> {
    let mut parts: Vec<(Range<usize>, bool)> = seen.common(&rows).map(|r| (r, true)).collect();
    parts.extend(seen.missing(&rows).into_iter().map(|r| (r, false)));
    parts.sort_by_key(|(rows, _)| rows.start);
    if parts.is_empty() {
        parts.push((rows, false));
    }
    parts
}

/// Cuts `tile` at the borders of `seen` and tells each part whether it was seen.
fn split(tile: &Tile, side: Side, seen: &Rows, tell: impl Fn(&mut State, bool)) -> Vec<Tile> {
    let part = |(rows, seen)| {
        let mut part = side.with_rows(tile, rows);
        tell(side.state(&mut part), seen);
        part
    };
    cut(side.operand(tile).rows.clone(), seen).into_iter().map(part).collect()
}
