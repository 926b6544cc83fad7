//! What ranks hold beyond their shards.

use std::collections::BTreeMap;
use std::ops::Range;

use burst_attention::schedule::{Chunk, Due, Payload, Place, Schedule, Transfer};

/// The rows of all slots of a schedule, as many as a device needs memory for: of inputs and of
/// accumulators.
pub fn slot_rows(schedule: &Schedule) -> [usize; 2] {
    let mut slots: BTreeMap<(Payload, usize), usize> = BTreeMap::new();
    let mut hold = |chunk: &Chunk, slot: usize| {
        let rows = slots.entry((chunk.payload, slot)).or_default();
        *rows = chunk.rows.len().max(*rows);
    };
    for step in &schedule.steps {
        step.opens.iter().for_each(|(chunk, slot)| hold(chunk, *slot));
        for receive in step.exchanges.iter().flat_map(|exchange| &exchange.receives) {
            let Place::Slot(slot) = receive.place else { panic!("nothing lands at home") };
            hold(&receive.chunk, slot);
        }
    }
    [false, true].map(|accumulators| {
        let of_kind = slots.iter().filter(|((p, _), _)| p.is_accumulator() == accumulators);
        of_kind.map(|(_, rows)| rows).sum()
    })
}

/// The most rows that arrive or lie in slots at one step, among the transfers that `counts`. A
/// chunk lies in its slot until the last step that uses it.
pub fn most_held(schedule: &Schedule, counts: impl Fn(&Transfer) -> bool) -> usize {
    let mut spans: Vec<(Range<usize>, usize)> = Vec::new();
    for (at, step) in schedule.steps.iter().enumerate() {
        for receive in step.exchanges.iter().flat_map(|exchange| &exchange.receives) {
            if counts(receive) {
                let until = last_use(schedule, at, receive);
                spans.push((step.index..until + 1, receive.chunk.rows.len()));
            }
        }
        for (chunk, slot) in &step.opens {
            let opened = Transfer { chunk: chunk.clone(), peer: 0, place: Place::Slot(*slot) };
            if counts(&opened) {
                let until = last_use(schedule, at, &opened);
                spans.push((step.index..until + 1, chunk.rows.len()));
            }
        }
    }
    let last = schedule.steps.last().map_or(0, |step| step.index);
    let held = |step: usize| -> usize {
        spans.iter().filter(|(span, _)| span.contains(&step)).map(|(_, rows)| rows).sum()
    };
    (0..=last).map(held).max().unwrap_or(0)
}

/// The last step that uses a chunk that arrives, or is opened, at a step.
fn last_use(schedule: &Schedule, at: usize, arrived: &Transfer) -> usize {
    let mut last = schedule.steps[at].index;
    for (number, step) in schedule.steps.iter().enumerate().skip(at) {
        let same =
            |m: &&Transfer| (m.chunk.payload, m.place) == (arrived.chunk.payload, arrived.place);
        let mut receives = step.exchanges.iter().flat_map(|exchange| &exchange.receives);
        let opened = step.opens.iter().any(|(chunk, slot)| {
            (chunk.payload, Place::Slot(*slot)) == (arrived.chunk.payload, arrived.place)
        });
        if number > at && (opened || receives.any(|m| same(&m))) {
            break;
        }
        let tiles = step.tiles.iter().any(|tile| match arrived.chunk.payload {
            Payload::Queries => tile.queries.place == arrived.place,
            Payload::Keys => tile.keys.place == arrived.place,
            Payload::KeyGrads => tile.key_state.place == arrived.place,
            Payload::Partial | Payload::QueryGrads => tile.query_state.place == arrived.place,
        });
        let merged = step.merges.iter().any(|merge| {
            (merge.chunk.payload, Place::Slot(merge.slot)) == (arrived.chunk.payload, arrived.place)
        });
        let sent = step.exchanges.iter().filter(|e| e.sends.iter().any(|m| same(&m)));
        let until = sent.map(|exchange| match exchange.due {
            Due::Begin(step) => step - 1,
            Due::Fold(step) => step,
        });
        let used = (tiles || merged).then_some(step.index);
        last = until.chain(used).fold(last, usize::max);
    }
    last
}
