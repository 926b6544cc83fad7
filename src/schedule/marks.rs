//! Marks which tiles and merges touch the rows of an accumulator first and last.
//!
//! A tile or merge that is first or last for some of its rows only is cut, so that a kernel decides
//! once for all of its rows. Rows at home that no tile touches get a tile without pairs, so that
//! every output is defined.

use std::collections::BTreeMap;
use std::ops::Range;

use super::geometry::Rectangle;
use super::payload::shard_rows;
use super::{Chunk, Merge, Payload, Place, Rows, Step, Tile, TileRows};
use crate::problem::{Pass, Problem, Travels};

/// Rows that were written since their buffer was opened or received.
type Written = BTreeMap<(Payload, Place), Rows>;

/// Sets `first` and `last` of all tiles and merges of one rank.
pub(super) fn mark(steps: &mut [Step], problem: &Problem, pass: Pass, rank: usize) {
    let side = |side| Some((side, Payload::accumulator(side, pass)?));
    let sides: Vec<_> = [Travels::Queries, Travels::Keys].into_iter().filter_map(side).collect();
    for &(side, payload) in &sides {
        for rows in undefined(steps, side, payload, shard_rows(problem, side)) {
            let rectangle = Rectangle::without_pairs(side, rows);
            steps[0].tiles.push(Tile::new(side, rank, rank, [Place::Home; 2], rectangle));
        }
    }
    mark_first(steps, &sides);
    sides.into_iter().for_each(|(side, payload)| mark_last(steps, side, payload));
}

/// Returns the rows at home that no tile writes before the first accumulator that came home is
/// merged into them.
fn undefined(steps: &[Step], side: Travels, payload: Payload, len: usize) -> Vec<Range<usize>> {
    let (mut written, mut merged) = (Rows::default(), Rows::default());
    for step in steps {
        for (operand, accumulator) in step.tiles.iter().map(|tile| tile.side(side)) {
            if accumulator.place == Place::Home {
                let first = merged.missing(&operand.rows);
                first.into_iter().for_each(|rows| written.insert(rows));
            }
        }
        let merges = step.merges.iter().filter(|merge| merge.chunk.payload == payload);
        for rows in merges.flat_map(|merge| written.missing(&merge.chunk.rows)) {
            merged.insert(rows);
        }
    }
    written.missing(&(0..len))
}

/// Marks tiles as first for rows that nothing wrote since their buffer was opened or received.
fn mark_first(steps: &mut [Step], sides: &[(Travels, Payload)]) {
    let mut written = Written::default();
    for step in steps {
        for (chunk, slot) in &step.opens {
            written.insert((chunk.payload, Place::Slot(*slot)), Rows::default());
        }
        for receive in step.exchanges.iter().flat_map(|exchange| &exchange.receives) {
            let rows = Rows::from_iter([receive.chunk.rows.clone()]);
            written.insert((receive.chunk.payload, receive.place), rows);
        }
        let mut index = 0;
        while let Some(tile) = step.tiles.get_mut(index) {
            let parts = sides.iter().find_map(|&(side, payload)| {
                let (operand, accumulator) = tile.side(side);
                let written = written.entry((payload, accumulator.place)).or_default();
                let parts = cut(&operand.rows, written)?.into_iter();
                Some(parts.map(|(rows, _)| tile.with_rows(side, rows)).collect::<Vec<_>>())
            });
            if let Some(parts) = parts {
                step.tiles.splice(index..=index, parts);
                continue;
            }
            for &(side, payload) in sides {
                let (operand, accumulator) = tile.side_mut(side);
                let written = written.entry((payload, accumulator.place)).or_default();
                accumulator.first = written.common(&operand.rows).next().is_none();
                written.insert(operand.rows.clone());
            }
            index += 1;
        }
    }
}

/// Marks merges as last for rows that nothing touches later, and in the forward pass tiles at home.
/// Goes backwards.
fn mark_last(steps: &mut [Step], side: Travels, payload: Payload) {
    let mut later = Rows::default();
    for step in steps.iter_mut().rev() {
        replace_from_end(&mut step.merges, |merge| {
            let Merge { chunk, slot, last } = merge;
            if chunk.payload != payload {
                return None;
            }
            let parts = cut(&chunk.rows, &later);
            *last = later.common(&chunk.rows).next().is_none();
            later.insert(chunk.rows.clone());
            let part = |(rows, touched): (_, bool)| {
                let chunk = Chunk { rows, ..chunk.clone() };
                Merge { chunk, slot: *slot, last: !touched }
            };
            Some(parts?.into_iter().map(part).collect())
        });
        replace_from_end(&mut step.tiles, |tile| {
            let (TileRows { rows, .. }, accumulator) = tile.side_mut(side);
            if accumulator.place != Place::Home {
                return None;
            }
            let is_told = payload == Payload::Partial;
            let parts = cut(rows, &later).filter(|_| is_told);
            accumulator.last = is_told && later.common(rows).next().is_none();
            later.insert(rows.clone());
            let part = |(rows, touched): (_, bool)| {
                let mut part = tile.with_rows(side, rows);
                part.side_mut(side).1.last = !touched;
                part
            };
            Some(parts?.into_iter().map(part).collect())
        });
    }
}

/// Replaces each item for which `parts` returns parts by them, last part first. Starts with the
/// last item.
fn replace_from_end<T>(items: &mut Vec<T>, mut parts: impl FnMut(&mut T) -> Option<Vec<T>>) {
    for index in (0..items.len()).rev() {
        if let Some(parts) = parts(&mut items[index]) {
            items.splice(index..=index, parts.into_iter().rev());
        }
    }
}

/// Cuts `rows` at the borders of `set`. Each part comes with whether it is in the set. Returns
/// `None` if all rows are in the set or none is.
fn cut(rows: &Range<usize>, set: &Rows) -> Option<Vec<(Range<usize>, bool)>> {
    set.common(rows).next().filter(|common| common != rows)?;
    let mut parts: Vec<_> = set.common(rows).map(|part| (part, true)).collect();
    parts.extend(set.missing(rows).into_iter().map(|part| (part, false)));
    parts.sort_by_key(|(rows, _)| rows.start);
    Some(parts)
}
