//! Schedules proven without a device and without floating point.

mod common;

use burst_attention::mask::Band;
use burst_attention::problem::{Dtype, Pass, Problem, Travels};
use burst_attention::schedule::{Place, Schedule, check, choose_travels, ring, total_bytes};
use burst_attention::{Layout, mask};
use common::{problem, problems};

const PASSES: [Pass; 2] = [Pass::Forward, Pass::Backward];
const SIDES: [Travels; 2] = [Travels::Keys, Travels::Queries];

#[test]
fn every_allowed_pair_is_computed_exactly_once_and_returns_home() {
    for problem in problems(1..=16, &[1, 2, 3, 4, 6]) {
        for pass in PASSES {
            for travels in SIDES {
                let schedules = ring(&problem, pass, travels);
                if let Err(violation) = check(&problem, &schedules) {
                    panic!("{pass:?}, {travels:?} travel, {problem:?}: {violation}");
                }
            }
        }
    }
}

/// Positions that a query at `position` sees, straight from the definition.
fn allowed(problem: &Problem, query: usize, key: usize) -> bool {
    !problem.causal || key <= query
}

/// Row hops of (chunks, followers) by counting, from the definition of the mask alone.
fn row_hops(problem: &Problem, travels: Travels, down: bool) -> (usize, usize) {
    let (world_size, n) = (problem.world_size, problem.q_len);
    let position = |rank, row| problem.layout.position(rank, row, world_size, n);
    let meets = |owner: usize, rows: &std::ops::Range<usize>, at: usize| {
        rows.clone().any(|row| {
            (0..n).any(|other| match travels {
                Travels::Keys => allowed(problem, position(at, other), position(owner, row)),
                Travels::Queries => allowed(problem, position(owner, row), position(at, other)),
            })
        })
    };
    let (mut chunk, mut follower) = (0, 0);
    for owner in 0..world_size {
        for piece in problem.layout.pieces(owner, world_size, n) {
            let at = |hop: usize| (owner + if down { world_size - hop } else { hop }) % world_size;
            let needing: Vec<usize> =
                (1..world_size).filter(|&hop| meets(owner, &piece.rows, at(hop))).collect();
            chunk += piece.rows.len() * needing.last().unwrap_or(&0);
            follower += piece.rows.len() * needing.len();
        }
    }
    (chunk, follower)
}

#[test]
fn bytes_sent_equal_the_hops_to_the_last_rank_that_needs_a_chunk() {
    for problem in problems(1..=16, &[1, 2, 5, 8]) {
        for travels in SIDES {
            let (up, down) =
                (row_hops(&problem, travels, false), row_hops(&problem, travels, true));
            let (chunk, follower) = if down.0 < up.0 { down } else { up };
            let (heads, kv_heads, dim) = (problem.heads, problem.kv_heads, problem.head_dim);
            let b = problem.dtype.bytes();
            let [input_fwd, input_bwd, state_fwd, state_bwd] = match travels {
                Travels::Keys => {
                    let kv = kv_heads * 2 * dim;
                    [kv * b, kv * b, 0, kv * 4]
                }
                Travels::Queries => {
                    let backward = heads * (2 * dim * b + 8);
                    [heads * dim * b, backward, heads * (dim + 2) * 4, heads * dim * 4]
                }
            };
            for (pass, input, state) in
                [(Pass::Forward, input_fwd, state_fwd), (Pass::Backward, input_bwd, state_bwd)]
            {
                let expected = problem.batch * (chunk * input + follower * state);
                let sent = total_bytes(&problem, &ring(&problem, pass, travels));
                assert_eq!(sent, expected as u64, "{pass:?} {travels:?} {problem:?}");
            }
        }
    }
}

#[test]
fn a_full_mask_takes_one_hop_less_than_ranks_for_chunk_and_accumulator() {
    let problem = Problem { causal: false, ..problem(8, 4) };
    let rows = 8 * 4 * 7;
    let keys = ring(&problem, Pass::Backward, Travels::Keys);
    let per_row = 2 * problem.kv_heads * problem.head_dim * (problem.dtype.bytes() + 4);
    assert_eq!(total_bytes(&problem, &keys), (problem.batch * rows * per_row) as u64);
}

#[test]
fn auto_takes_the_cheaper_side() {
    // Queries win while group_size < 12/8 for 16-bit inputs, so for multi-head attention only.
    for (kv_heads, cheaper) in [(8, Travels::Queries), (4, Travels::Keys), (1, Travels::Keys)] {
        let base = problem(4, 8);
        let problem =
            Problem { heads: 8, kv_heads, dtype: Dtype::Bf16, causal: false, head_dim: 64, ..base };
        assert_eq!(choose_travels(&problem, Pass::Backward), cheaper);
        assert_eq!(choose_travels(&problem, Pass::Forward), Travels::Keys);
    }
}

/// Pairs computed by each rank at each step.
fn work(schedules: &[Schedule]) -> Vec<Vec<usize>> {
    let pairs = |tile: &burst_attention::schedule::Tile| {
        tile.band.pairs(&tile.queries.rows, &tile.keys.rows)
    };
    let steps = 0..schedules.len();
    let at = |step: usize| {
        let rank = |schedule: &Schedule| -> usize {
            let found = schedule.steps.iter().filter(|found| found.index == step);
            found.flat_map(|found| &found.tiles).map(pairs).sum()
        };
        schedules.iter().map(rank).collect()
    };
    steps.map(at).collect()
}

#[test]
fn causal_work_is_balanced_at_every_step() {
    for world_size in 1..=16 {
        for (layout, n, limit) in [(Layout::Zigzag, 64, 1.0), (Layout::Striped, 64, 1.04)] {
            for pass in PASSES {
                for travels in SIDES {
                    let problem = Problem { layout, causal: true, ..problem(world_size, n) };
                    for ranks in work(&ring(&problem, pass, travels)) {
                        let mean = ranks.iter().sum::<usize>() as f64 / world_size as f64;
                        let max = *ranks.iter().max().expect("a rank") as f64;
                        assert!(max <= limit * mean, "{layout} {world_size}: {ranks:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_mask_that_empties_steps_drops_them() {
    let problem = Problem { layout: Layout::Contiguous, causal: true, ..problem(8, 4) };
    for schedule in ring(&problem, Pass::Forward, Travels::Keys) {
        // Rank r computes with itself and the r ranks before it, and nothing else happens.
        let computing = schedule.steps.iter().filter(|step| !step.tiles.is_empty()).count();
        assert_eq!(computing, schedule.rank + 1);
        let received: usize = (schedule.steps.iter().flat_map(|step| &step.exchanges))
            .map(|exchange| exchange.receives.len())
            .sum();
        assert_eq!(received, schedule.rank);
    }
}

#[test]
fn nothing_is_exchanged_by_one_rank() {
    for problem in problems(1..=1, &[2, 7]) {
        for pass in PASSES {
            let schedules = ring(&problem, pass, Travels::Keys);
            assert_eq!(schedules[0].sends().count(), 0);
            assert_eq!(schedules[0].steps.len(), 1);
        }
    }
}

/// Every way to spoil one schedule of a set must be noticed.
#[test]
fn spoiled_schedules_are_refused() {
    for layout in Layout::ALL {
        for (pass, travels) in PASSES.into_iter().flat_map(|p| SIDES.map(|side| (p, side))) {
            let problem = Problem { layout, causal: true, ..problem(5, 4) };
            let good = ring(&problem, pass, travels);
            for rank in 0..5 {
                for step in 0..good[rank].steps.len() {
                    for (name, spoil) in SPOILERS {
                        let mut bad = good.clone();
                        if spoil(&mut bad[rank], step) {
                            let what =
                                format!("{name}: {pass:?} {travels:?} {layout} {rank}/{step}");
                            assert!(check(&problem, &bad).is_err(), "{what}");
                        }
                    }
                }
            }
        }
    }
}

type Spoiler = fn(&mut Schedule, usize) -> bool;

/// Each returns whether it changed anything that matters.
const SPOILERS: [(&str, Spoiler); 8] = [
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
        tile.band = mask::Band { upper: tile.band.upper - 1, ..tile.band };
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
    ("receive forgotten", |schedule, step| {
        let exchange = schedule.steps[step].exchanges.first_mut();
        exchange.and_then(|exchange| exchange.receives.pop()).is_some()
    }),
];

#[test]
fn steps_are_joined_into_one_tile_where_one_band_says_it_all() {
    for layout in Layout::ALL {
        let problem = Problem { layout, causal: true, ..problem(4, 8) };
        for schedule in ring(&problem, Pass::Backward, Travels::Keys) {
            assert!(schedule.steps.iter().all(|step| step.tiles.len() <= 1), "{layout}");
        }
    }
}
