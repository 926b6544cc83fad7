//! Schedules taken through their check, and what they compute at each step.

use burst_attention::problem::Problem;
use burst_attention::schedule::{Family, Schedule, check};

use super::needs::made;
use super::passes_and_sides;

/// Checks the schedules of the families that `families` returns for a number of ranks, in both
/// passes with both sides. Each core has a thread with a part of the problems.
pub fn assert_all_proven(problems: &[Problem], families: impl Fn(usize) -> Vec<Family> + Sync) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for part in problems.chunks(problems.len().div_ceil(threads)) {
            scope.spawn(|| part.iter().for_each(|p| assert_proven(p, families(p.world_size))));
        }
    });
}

fn assert_proven(problem: &Problem, families: Vec<Family>) {
    for family in families {
        for (pass, travels) in passes_and_sides() {
            if let Err(violation) = check(problem, &made(problem, family, pass, travels)) {
                panic!("{family}, {pass:?}, {travels:?} travel, {problem:?}: {violation}");
            }
        }
    }
}

/// Pairs that each rank computes at each step at which any rank computes.
pub fn work(schedules: &[Schedule]) -> Vec<Vec<usize>> {
    let last = schedules.iter().flat_map(|s| &s.steps).map(|step| step.index).max().unwrap_or(0);
    let at = |index: usize| {
        let rank = |schedule: &Schedule| -> usize {
            let steps = schedule.steps.iter().filter(|step| step.index == index);
            let tiles = steps.flat_map(|step| &step.tiles);
            tiles.map(|tile| tile.band.pairs(&tile.queries.rows, &tile.keys.rows)).sum()
        };
        schedules.iter().map(rank).collect()
    };
    let steps: Vec<Vec<usize>> = (0..=last).map(at).collect();
    steps.into_iter().filter(|ranks| ranks.iter().any(|pairs| *pairs > 0)).collect()
}
