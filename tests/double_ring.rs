//! Double rings: what crosses slow links, when, and what ranks hold meanwhile.

mod common;

use burst_attention::problem::{Problem, Travels};
use burst_attention::schedule::{Due, Family, Transfer, ring, schedule};
use burst_attention::{Layout, Pass, Window};
use common::held::slot_rows;
use common::needs::{made, needed, rows_sent};
use common::{PASSES, SIDES, passes_and_sides, problem, problems, windowed};

#[test]
fn a_double_ring_of_one_group_or_of_groups_of_one_is_the_ring() {
    let few = [Window::FULL, Window::CAUSAL, Window { left: Some(5), right: Some(2) }];
    for problem in windowed(1..=8, &[(1, 1), (4, 4), (6, 4)], &few) {
        for (pass, travels) in passes_and_sides() {
            let single = ring(&problem, pass, travels);
            for inner in [1, problem.world_size] {
                let double = made(&problem, Family::DoubleRing { inner }, pass, travels);
                assert!(double == single, "{inner} {pass:?} {travels:?} {problem:?}");
            }
        }
    }
}

#[test]
fn inner_rings_must_fit() {
    for (inner, got) in [(4, "4"), (0, "0"), (12, "12")] {
        let family = Family::DoubleRing { inner };
        let error = schedule(&problem(6, 4), family, Pass::Forward, Travels::Keys);
        let message = error.expect_err("does not divide 6").to_string();
        let expected = "ranks of an inner ring must be a divisor of the number of ranks (6), got ";
        assert_eq!(message, expected.to_owned() + got);
    }
}

/// Which rows of a chunk are needed at each of some places onward from it. The first place is where
/// the chunk begins, so its rows do not count.
type Onward = Vec<Vec<bool>>;

/// Counts the row hops of all chunks on the best split of directions, from the definition alone.
fn hops(chunks: &[Onward]) -> usize {
    let length = chunks[0].len();
    let last = |chunk: &Onward, row: usize, places: &[usize]| {
        places.iter().rposition(|place| chunk[*place][row]).map_or(0, |last| last + 1)
    };
    let split = |ups: usize| -> usize {
        let up: Vec<usize> = (1..=ups).collect();
        let down: Vec<usize> = (ups + 1..length).rev().collect();
        let of = |chunk: &Onward| -> usize {
            (0..chunk[0].len()).map(|row| last(chunk, row, &up) + last(chunk, row, &down)).sum()
        };
        chunks.iter().map(of).sum()
    };
    (0..length).map(split).min().unwrap_or(0)
}

/// For each owner, and for each number of groups and of ranks onward, the rows that are needed
/// there.
fn onward(problem: &Problem, travels: Travels, inner: usize) -> Vec<Vec<Onward>> {
    let (world_size, outer) = (problem.world_size, problem.world_size / inner);
    let at = |owner: usize, groups: usize, ranks: usize| {
        (owner / inner + groups) % outer * inner + (owner % inner + ranks) % inner
    };
    let of = |owner| {
        let ranks = |groups| {
            let rows = |ranks| needed(problem, travels, owner, at(owner, groups, ranks));
            (0..inner).map(rows).collect()
        };
        (0..outer).map(ranks).collect()
    };
    (0..world_size).map(of).collect()
}

fn any_of(rows: &Onward) -> Vec<bool> {
    (0..rows[0].len()).map(|row| rows.iter().any(|rank| rank[row])).collect()
}

#[test]
fn rows_sent_in_double_rings_equal_the_hops_on_both_kinds_of_links() {
    let tokens = [(1, 1), (4, 4), (6, 4), (8, 8)];
    let few =
        [(None, None), (None, Some(0)), (Some(3), Some(0)), (Some(9), Some(4)), (None, Some(5))];
    let few = few.map(|(left, right)| Window { left, right });
    for problem in windowed([4, 6, 8, 9, 12], &tokens, &few) {
        for inner in (1..=problem.world_size).filter(|n| problem.world_size.is_multiple_of(*n)) {
            for travels in SIDES {
                let needs = onward(&problem, travels, inner);
                let outer = problem.world_size / inner;
                let groups = |owner: &Vec<Onward>| owner.iter().map(any_of).collect();
                let slow = hops(&needs.iter().map(groups).collect::<Vec<Onward>>());
                let turn = |groups: usize| {
                    let of_turn = needs.iter().map(|owner| owner[groups].clone());
                    hops(&of_turn.collect::<Vec<_>>())
                };
                let fast: usize = (0..outer).map(turn).sum();
                for pass in PASSES {
                    let schedules = made(&problem, Family::DoubleRing { inner }, pass, travels);
                    let crosses = |rank: usize, send: &Transfer| rank / inner != send.peer / inner;
                    let [on_slow, _] = rows_sent(&schedules, crosses);
                    let [on_fast, _] = rows_sent(&schedules, |rank, send| !crosses(rank, send));
                    let what = format!("{inner} {pass:?} {travels:?} {problem:?}");
                    assert_eq!([on_slow, on_fast], [slow, fast], "{what}");
                }
            }
        }
    }
}

/// For masks where no chunk goes in both directions, and where ranks need no row early that they do
/// not need late.
#[test]
fn sums_cross_slow_links_once_from_each_group_that_adds_to_them() {
    for problem in problems([4, 6, 8, 9, 12], &[1, 4, 8]) {
        for inner in (2..=problem.world_size).filter(|n| problem.world_size.is_multiple_of(*n)) {
            for (pass, travels) in passes_and_sides() {
                let of_groups = |owner: &Vec<Onward>| -> usize {
                    let others = owner[1..].iter().map(any_of);
                    others.flatten().filter(|needed| *needed).count()
                };
                let once: usize = onward(&problem, travels, inner).iter().map(of_groups).sum();
                let has_sums = (pass, travels) != (Pass::Forward, Travels::Keys);
                let schedules = made(&problem, Family::DoubleRing { inner }, pass, travels);
                let crosses = |rank: usize, send: &Transfer| rank / inner != send.peer / inner;
                let [_, sums] = rows_sent(&schedules, crosses);
                let expected = if has_sums { once } else { 0 };
                assert_eq!(sums, expected, "{inner} {pass:?} {travels:?} {problem:?}");
            }
        }
    }
}

#[test]
fn with_a_full_mask_each_rank_sends_one_chunk_less_than_groups_over_slow_links() {
    for (outer, inner) in (2..=5).flat_map(|outer| (2..=5).map(move |inner| (outer, inner))) {
        let problem = Problem { window: Window::FULL, ..problem(outer * inner, 2) };
        for (pass, travels) in passes_and_sides() {
            for schedule in made(&problem, Family::DoubleRing { inner }, pass, travels) {
                let crosses = |rank: usize, send: &Transfer| rank / inner != send.peer / inner;
                let ranks = [schedule];
                let sums = if (pass, travels) == (Pass::Forward, Travels::Keys) { 0 } else { 1 };
                let chunks = |rows: [usize; 2]| rows.map(|rows| rows / 2);
                assert_eq!(chunks(rows_sent(&ranks, crosses)), [outer - 1, sums * (outer - 1)]);
                let fast = rows_sent(&ranks, |rank, send| !crosses(rank, send));
                let each = outer * (inner - 1);
                assert_eq!(chunks(fast), [each, sums * each]);
            }
        }
    }
}

#[test]
fn slow_links_have_a_whole_turn_for_each_chunk() {
    let (outer, inner) = (4, 3);
    let problem = Problem { window: Window::FULL, ..problem(outer * inner, 2) };
    for (pass, travels) in passes_and_sides() {
        for schedule in made(&problem, Family::DoubleRing { inner }, pass, travels) {
            for step in &schedule.steps {
                for exchange in &step.exchanges {
                    let messages = exchange.sends.iter().chain(&exchange.receives);
                    let far = |m: &Transfer| schedule.rank / inner != m.peer / inner;
                    let crossing = messages.clone().filter(|m| far(m)).count();
                    let sums = messages.clone().any(|m| m.chunk.payload.is_accumulator());
                    let steps = match exchange.due {
                        Due::Begin(step) => step,
                        Due::Fold(step) => step + 1,
                    } - step.index;
                    let last = step.index == outer * inner;
                    match crossing {
                        0 => assert_eq!(steps, 1),
                        _ if last => assert!(sums && steps == 1),
                        _ => assert_eq!(steps, inner),
                    }
                    assert!(crossing == 0 || last || crossing == messages.count());
                }
            }
        }
    }
}

#[test]
fn double_rings_hold_two_chunks_of_each_ring_and_no_more() {
    for (outer, inner) in (1..=5).flat_map(|outer| (1..=5).map(move |inner| (outer, inner))) {
        for (layout, window) in
            Layout::ALL.into_iter().flat_map(|l| [Window::FULL, Window::CAUSAL].map(|w| (l, w)))
        {
            let problem = Problem { window, layout, ..problem(outer * inner, 4) };
            for (pass, travels) in passes_and_sides() {
                let schedules = made(&problem, Family::DoubleRing { inner }, pass, travels);
                let held = schedules.iter().map(slot_rows);
                let [inputs, sums] = held.fold([0, 0], |most, rows| {
                    [0, 1].map(|kind: usize| rows[kind].max(most[kind]))
                });
                // A rank computes with one chunk while another is on its way. No chunk follows the
                // last.
                let [chunks, most] = [inputs.div_ceil(4), sums.div_ceil(4)];
                let expected = (inner - 1).min(2) + (outer - 1).min(2);
                let what = format!("{outer} × {inner} {pass:?} {travels:?} {layout} {window:?}");
                assert!(chunks <= expected, "{what}: {chunks} chunks, not {expected}");
                // There are two in the inner ring, one that comes home, and if there is time one
                // that leaves.
                let of_sums = match (outer, inner, outer * inner) {
                    _ if (pass, travels) == (Pass::Forward, Travels::Keys) => 0,
                    (_, _, 1) => 0,
                    (_, _, 2) => 2,
                    (3.., 2.., _) => 4,
                    _ => 3,
                };
                assert!(most <= of_sums, "{what}: {most} sums, not {of_sums}");
                if window == Window::FULL {
                    assert_eq!([chunks, most], [expected, of_sums], "{what}");
                }
            }
        }
    }
}
