//! Schedules proven without a device and without floating point.

mod common;

use burst_attention::problem::{Dtype, Pass, Problem, Travels};
use burst_attention::schedule::{
    Family, Payload, QUERY_GRAIN, Schedule, Transfer, ring, schedule, total_bytes,
};
use burst_attention::{Layout, Window};
use common::needs::{families, made, needed, rows_sent};
use common::proofs::{assert_all_proven, work};
use common::spoilers::assert_spoilers_noticed;
use common::{PASSES, SIDES, passes_and_sides, problem, problems, windowed, windows};

#[test]
fn every_allowed_pair_is_computed_exactly_once_and_returns_home() {
    assert_all_proven(&problems(1..=16, &[1, 2, 3, 4, 6]), |_| vec![Family::Ring]);
}

#[test]
fn schedules_are_right_in_every_window_and_with_more_keys_or_queries() {
    let alike = [(1, 1), (2, 2), (3, 3), (4, 4), (6, 6)];
    let unlike = [(4, 6), (6, 4), (2, 8), (8, 2), (1, 3), (3, 1)];
    let mut problems = windowed(1..=8, &[alike.as_slice(), &unlike].concat(), &windows());
    problems.extend(windowed(1..=4, &[(12, 12), (10, 14), (14, 5)], &windows()));
    let few = [(None, Some(3)), (Some(2), Some(0)), (Some(1), Some(1)), (Some(70), Some(9))];
    let few = few.map(|(left, right)| Window { left, right });
    problems.extend(windowed([11, 16], &[(2, 2), (6, 6), (4, 6), (8, 2)], &few));
    assert_all_proven(&problems, |_| vec![Family::Ring]);
}

/// Counts the row hops of chunks and of their accumulators, from the definition of the mask alone.
fn row_hops(problem: &Problem, travels: Travels, down: bool) -> (usize, usize) {
    let Problem { world_size, q_len: n, window, .. } = *problem;
    let position = |rank, row| problem.layout.position(rank, row, world_size, n);
    let meets = |owner: usize, rows: &std::ops::Range<usize>, at: usize| {
        rows.clone().any(|row| {
            (0..n).any(|other| match travels {
                Travels::Keys => window.allows(position(at, other), position(owner, row)),
                Travels::Queries => window.allows(position(owner, row), position(at, other)),
            })
        })
    };
    let (mut chunk, mut accumulator) = (0, 0);
    for owner in 0..world_size {
        for range in problem.layout.strided_ranges(owner, world_size, n) {
            let at = |hop: usize| (owner + if down { world_size - hop } else { hop }) % world_size;
            let needing: Vec<usize> =
                (1..world_size).filter(|&hop| meets(owner, &range.rows, at(hop))).collect();
            chunk += range.rows.len() * needing.last().unwrap_or(&0);
            accumulator += range.rows.len() * needing.len();
        }
    }
    (chunk, accumulator)
}

#[test]
fn bytes_sent_equal_the_hops_to_the_last_rank_that_needs_a_chunk() {
    for problem in problems(1..=16, &[1, 2, 5, 8]) {
        for travels in SIDES {
            let (up, down) =
                (row_hops(&problem, travels, false), row_hops(&problem, travels, true));
            let (chunk, accumulator) = if down.0 < up.0 { down } else { up };
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
                let expected = problem.batch * (chunk * input + accumulator * state);
                let sent = total_bytes(&problem, &ring(&problem, pass, travels));
                assert_eq!(sent, expected as u64, "{pass:?} {travels:?} {problem:?}");
            }
        }
    }
}

/// Counts row hops with `ups` hops up and the rest down: the hops of chunks, and the fewest and the
/// most that their accumulators may make.
fn split_hops(problem: &Problem, travels: Travels, ups: usize) -> [usize; 3] {
    let world_size = problem.world_size;
    let mut hops = [0; 3];
    for (owner, down) in (0..world_size).flat_map(|owner| [(owner, false), (owner, true)]) {
        let hops_of = 1..=if down { world_size - 1 - ups } else { ups };
        let at = |hop: usize| (owner + if down { world_size - hop } else { hop }) % world_size;
        let needs: Vec<Vec<bool>> =
            hops_of.map(|hop| needed(problem, travels, owner, at(hop))).collect();
        let first = needs.iter().position(|rows| rows.contains(&true));
        for row in 0..needs.first().map_or(0, Vec::len) {
            let needing = |rows: &Vec<bool>| rows[row];
            let Some(last) = needs.iter().rposition(needing) else { continue };
            let own_first = needs.iter().position(needing);
            hops[0] += last + 1;
            // The hops from the first rank that adds to this row, or to any row of the chunk, and
            // the hop home.
            hops[1] += last + 1 - own_first.unwrap_or(0);
            hops[2] += last + 1 - first.unwrap_or(0);
        }
    }
    hops
}

#[test]
#[ignore = "takes long: make test-full"]
fn rows_sent_in_windows_equal_the_hops_on_the_better_split_of_directions() {
    let tokens = [(1, 1), (2, 2), (5, 5), (8, 8), (4, 6), (6, 4), (2, 8), (8, 2), (14, 10)];
    let (mut exact, mut more) = (0, 0);
    for problem in windowed(1..=8, &tokens, &windows()) {
        for travels in SIDES {
            // All the way up or all the way down, if nothing else is better.
            let all = problem.world_size - 1;
            let splits = [all, 0].into_iter().chain(1..all);
            let splits = splits.map(|ups| split_hops(&problem, travels, ups));
            let [chunk, fewest, most] = splits.min_by_key(|hops| hops[0]).expect("a split");
            for pass in PASSES {
                let [inputs, sums] = rows_sent(&ring(&problem, pass, travels), |_, _| true);
                let what = format!("{pass:?} {travels:?} {problem:?}");
                assert_eq!(inputs, chunk, "{what}");
                if (pass, travels) == (Pass::Forward, Travels::Keys) {
                    assert_eq!(sums, 0, "{what}");
                    continue;
                }
                assert!(fewest <= sums && sums <= most, "{what}: {fewest} {sums} {most}");
                *(if sums == fewest { &mut exact } else { &mut more }) += 1;
            }
        }
    }
    assert!(0 < more && more < exact, "{exact} without a zero, {more} with some");
}

#[test]
fn a_window_reaches_no_farther_than_it_has_to() {
    let limits = [0_usize, 1, 3, 4, 5, 8, 9, 17];
    for (left, right) in limits.into_iter().flat_map(|left| limits.map(|right| (left, right))) {
        let window = Window { left: Some(left as i64), right: Some(right as i64) };
        for (world_size, n) in (2..=12).flat_map(|world_size| [1, 4, 6, 9].map(|n| (world_size, n)))
        {
            let problem = Problem { window, ..problem(world_size, n) };
            let schedules = ring(&problem, Pass::Forward, Travels::Keys);
            let chunks = left.div_ceil(n) + right.div_ceil(n);
            for schedule in &schedules {
                let sent = schedule.sends().count();
                assert!(sent <= chunks, "{sent} chunks, not {chunks}: {problem:?}");
            }
            if left < n && right < n {
                // Only the rows next to a border cross it.
                let rows = (world_size - 1) * (left + right);
                assert_eq!(rows_sent(&schedules, |_, _| true), [rows, 0], "{problem:?}");
            }
        }
    }
}

#[test]
fn queries_are_split_only_where_kernels_can_start() {
    let tokens = [(12, 12), (10, 10), (14, 5), (6, 9), (7, 7)];
    for problem in windowed(1..=5, &tokens, &windows()) {
        for (pass, travels) in passes_and_sides() {
            for schedule in ring(&problem, pass, travels) {
                let tiles = schedule.steps.iter().flat_map(|step| &step.tiles);
                let tiles = tiles.map(|tile| tile.queries.rows.clone());
                let chunks = schedule.sends().map(|send| &send.chunk);
                let merged = schedule.steps.iter().flat_map(|step| &step.merges);
                let chunks = chunks.chain(merged.map(|merge| &merge.chunk));
                let of_keys = [Payload::Keys, Payload::KeyGrads];
                let chunks = chunks.filter(|chunk| !of_keys.contains(&chunk.payload));
                for rows in tiles.chain(chunks.map(|chunk| chunk.rows.clone())) {
                    let Problem { layout, world_size, q_len, .. } = problem;
                    let ranges = layout.strided_ranges(0, world_size, q_len);
                    let fits = |row: usize| {
                        ranges.iter().any(|range| {
                            let from_start = row.checked_sub(range.rows.start);
                            let on_grain = from_start.is_some_and(|n| n % QUERY_GRAIN == 0);
                            row == range.rows.end || (row < range.rows.end && on_grain)
                        })
                    };
                    let fits = rows.is_empty() || (fits(rows.start) && fits(rows.end));
                    assert!(fits, "{rows:?}: {pass:?} {travels:?} {problem:?}");
                }
            }
        }
    }
}

#[test]
fn a_full_mask_takes_one_hop_less_than_ranks_for_chunk_and_accumulator() {
    let problem = Problem { window: Window::FULL, ..problem(8, 4) };
    let rows = 8 * 4 * 7;
    let keys = ring(&problem, Pass::Backward, Travels::Keys);
    let per_row = 2 * problem.kv_heads * problem.head_dim * (problem.dtype.bytes() + 4);
    assert_eq!(total_bytes(&problem, &keys), (problem.batch * rows * per_row) as u64);
}

#[test]
fn auto_takes_the_cheaper_side() {
    // With 16-bit inputs, queries win while group_size < 12/8: for multi-head attention only.
    for (kv_heads, cheaper) in [(8, Travels::Queries), (4, Travels::Keys), (1, Travels::Keys)] {
        let base = problem(4, 8);
        let problem = Problem {
            heads: 8,
            kv_heads,
            dtype: Dtype::Bf16,
            window: Window::FULL,
            head_dim: 64,
            ..base
        };
        let chosen =
            |pass| schedule(&problem, Family::Ring, pass, None).expect("a ring")[0].travels;
        assert_eq!(chosen(Pass::Backward), cheaper);
        assert_eq!(chosen(Pass::Forward), Travels::Keys);
    }
}

/// The choice counts bytes without schedules. The messages of the schedules have as many.
#[test]
fn auto_counts_what_would_be_sent() {
    let few = [(None, Some(0)), (None, None), (Some(2), Some(3)), (Some(9), Some(0))];
    let few = few.map(|(left, right)| Window { left, right });
    let mut won = [0, 0];
    for problem in windowed(1..=9, &[(2, 2), (6, 6), (4, 10), (12, 2)], &few) {
        for family in families(problem.world_size) {
            for pass in PASSES {
                let [keys, queries] =
                    SIDES.map(|side| total_bytes(&problem, &made(&problem, family, pass, side)));
                let side = if queries < keys { Travels::Queries } else { Travels::Keys };
                let schedules = schedule(&problem, family, pass, None).expect("the family fits");
                let what = format!("{family} {pass:?} {problem:?}: {keys} {queries}");
                assert_eq!(schedules[0].travels, side, "{what}");
                assert_eq!(schedules, made(&problem, family, pass, side), "{what}");
                won[usize::from(side == Travels::Queries)] += 1;
            }
        }
    }
    assert!(won.iter().all(|won| *won > 50), "{won:?}");
}

#[test]
fn causal_work_is_balanced_at_every_step() {
    for world_size in 1..=16 {
        for (layout, n, limit) in [(Layout::Zigzag, 64, 1.0), (Layout::Striped, 64, 1.04)] {
            for pass in PASSES {
                for travels in SIDES {
                    let problem =
                        Problem { layout, window: Window::CAUSAL, ..problem(world_size, n) };
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
    let problem = Problem { layout: Layout::Contiguous, window: Window::CAUSAL, ..problem(8, 4) };
    for schedule in ring(&problem, Pass::Forward, Travels::Keys) {
        // Rank r computes with its own keys and those of the r ranks before it.
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

/// The check notices every way to spoil one schedule of a set.
#[test]
fn spoiled_schedules_are_refused() {
    for layout in Layout::ALL {
        for (pass, travels) in passes_and_sides() {
            for window in [Window::CAUSAL, Window { left: Some(6), right: Some(3) }] {
                let problem = Problem { layout, window, ..problem(5, 4) };
                assert_spoilers_noticed(&problem, &ring(&problem, pass, travels));
            }
        }
    }
}

/// Here accumulators come home from two sides, chunks are cut, and accumulators open late.
#[test]
fn spoiled_schedules_whose_chunks_go_in_both_directions_are_refused() {
    let both_directions = |schedules: &[Schedule]| {
        let onward = |send: &Transfer| !send.chunk.payload.is_accumulator();
        let to = |schedule: &Schedule, peer: usize| {
            schedule.sends().filter(|send| onward(send)).any(|send| send.peer == peer)
        };
        let world_size = schedules.len();
        schedules.iter().any(|s| to(s, (s.rank + 1) % world_size))
            && schedules.iter().any(|s| to(s, (s.rank + world_size - 1) % world_size))
    };
    let window = |left, right| Window { left: Some(left), right: Some(right) };
    let cases = [
        (Layout::Contiguous, 5, (4, 4), window(6, 3)),
        (Layout::Contiguous, 4, (2, 8), window(3, 9)),
        (Layout::Zigzag, 5, (4, 4), window(3, 1)),
        (Layout::Zigzag, 4, (8, 8), window(6, 5)),
        (Layout::Striped, 6, (4, 4), window(1, 1)),
    ];
    let mut both = 0;
    for (layout, world_size, (q_len, kv_len), window) in cases {
        let problem = Problem { layout, window, kv_len, ..problem(world_size, q_len) };
        for (pass, travels) in passes_and_sides() {
            let good = ring(&problem, pass, travels);
            both += usize::from(both_directions(&good));
            assert_spoilers_noticed(&problem, &good);
        }
    }
    assert!(both >= 16, "only {both} of 20 go in both directions");
}

#[test]
fn steps_are_joined_into_one_tile_where_one_band_says_it_all() {
    for layout in Layout::ALL {
        let problem = Problem { layout, window: Window::CAUSAL, ..problem(4, 8) };
        for schedule in ring(&problem, Pass::Backward, Travels::Keys) {
            assert!(schedule.steps.iter().all(|step| step.tiles.len() <= 1), "{layout}");
        }
    }
}
