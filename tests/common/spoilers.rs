//! Ways to spoil a schedule. The check must notice all of them.

use burst_attention::mask::Band;
use burst_attention::problem::Problem;
use burst_attention::schedule::{Place, Schedule, check};

/// Spoils each step of each schedule in every way that applies.
pub fn assert_spoilers_noticed(problem: &Problem, good: &[Schedule]) {
    assert_eq!(check(problem, good), Ok(()));
    for (rank, schedule) in good.iter().enumerate() {
        for step in 0..schedule.steps.len() {
            for (name, spoil) in SPOILERS {
                let mut bad = good.to_vec();
                if spoil(&mut bad[rank], step) {
                    let Schedule { pass, travels, .. } = schedule;
                    let what = format!("{name}: {pass:?} {travels:?} {rank}/{step} {problem:?}");
                    assert!(check(problem, &bad).is_err(), "{what}");
                }
            }
        }
    }
}

type Spoiler = fn(&mut Schedule, usize) -> bool;

/// Each spoiler returns whether it changed anything that matters.
const SPOILERS: [(&str, Spoiler); 10] = [
    ("step dropped", |schedule, step| {
        schedule.steps.remove(step);
        true
    }),
    ("peer swapped", |schedule, step| {
        let world_size = schedule.world_size;
        let exchange = schedule.steps[step].exchanges.first_mut();
        let send = exchange.and_then(|exchange| exchange.sends.first_mut());
        send.map(|send| send.peer = (send.peer + 1) % world_size).is_some()
    }),
    ("mask shifted", |schedule, step| {
        let tile = schedule.steps[step].tiles.iter_mut().find(|tile| tile.band != Band::FULL);
        let Some(tile) = tile else { return false };
        let before = tile.band.pairs(&tile.queries.rows, &tile.keys.rows);
        tile.band = Band { upper: tile.band.upper - 1, ..tile.band };
        before != tile.band.pairs(&tile.queries.rows, &tile.keys.rows)
    }),
    ("tile repeated", |schedule, step| {
        let Some(tile) = schedule.steps[step].tiles.first().cloned() else { return false };
        schedule.steps[step].tiles.push(tile);
        true
    }),
    ("slot confused", |schedule, step| {
        let exchange = schedule.steps[step].exchanges.first_mut();
        let Some(receive) = exchange.and_then(|exchange| exchange.receives.first_mut()) else {
            return false;
        };
        receive.place = Place::Slot(7);
        true
    }),
    ("state taken for first", |schedule, step| {
        let tile = schedule.steps[step].tiles.iter_mut().find(|tile| !tile.query_state.first);
        tile.map(|tile| tile.query_state.first = true).is_some()
    }),
    ("merge forgotten", |schedule, step| schedule.steps[step].merges.pop().is_some()),
    ("merge taken for the last, or not", |schedule, step| {
        let merge = schedule.steps[step].merges.first_mut();
        merge.map(|merge| merge.last = !merge.last).is_some()
    }),
    ("accumulator not opened", |schedule, step| schedule.steps[step].opens.pop().is_some()),
    ("receive forgotten", |schedule, step| {
        let exchange = schedule.steps[step].exchanges.first_mut();
        exchange.and_then(|exchange| exchange.receives.pop()).is_some()
    }),
];
