//! Schedules beside the single ring, proven without a device and without floating point.

mod common;

use std::collections::BTreeMap;
use std::ops::Range;

use burst_attention::problem::{Pass, Problem, Travels};
use burst_attention::schedule::{
    Chunk, Due, Exchange, Family, Payload, Place, Schedule, Step, Transfer, check, ring, schedule,
};
use burst_attention::{Layout, Window};
use common::needs::{families, needed, rows_sent};
use common::spoilers::assert_spoilers_noticed;
use common::{problem, problems, windowed, windows};

const PASSES: [Pass; 2] = [Pass::Forward, Pass::Backward];
const SIDES: [Travels; 2] = [Travels::Keys, Travels::Queries];

fn ways() -> impl Iterator<Item = (Pass, Travels)> {
    PASSES.into_iter().flat_map(|pass| SIDES.map(|side| (pass, side)))
}

fn made(problem: &Problem, family: Family, pass: Pass, travels: Travels) -> Vec<Schedule> {
    schedule(problem, family, pass, travels).expect("the family fits")
}

fn assert_proven(problem: &Problem) {
    for family in families(problem.world_size) {
        for (pass, travels) in ways() {
            if let Err(violation) = check(problem, &made(problem, family, pass, travels)) {
                panic!("{family}, {pass:?}, {travels:?} travel, {problem:?}: {violation}");
            }
        }
    }
}

/// A thread for each core, each with its part of the problems.
fn assert_all_proven(problems: &[Problem]) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for part in problems.chunks(problems.len().div_ceil(threads)) {
            scope.spawn(move || part.iter().for_each(assert_proven));
        }
    });
}

#[test]
fn every_allowed_pair_is_computed_exactly_once_and_returns_home() {
    assert_all_proven(&problems(1..=16, &[1, 2, 4, 6]));
}

#[test]
fn so_it_is_in_every_window_and_with_more_keys_or_queries() {
    let tokens = [(1, 1), (4, 4), (6, 6), (4, 6), (8, 2), (1, 3)];
    assert_all_proven(&windowed(2..=6, &tokens, &windows()));
    let few = [(None, Some(3)), (Some(2), Some(0)), (Some(1), Some(1)), (Some(17), Some(9))];
    let few = few.map(|(left, right)| Window { left, right });
    assert_all_proven(&windowed([8, 9, 12], &[(2, 2), (6, 4)], &few));
}

#[test]
fn every_family_s_spoiled_schedules_are_refused() {
    let few = [Window::CAUSAL, Window::FULL, Window { left: Some(9), right: Some(3) }];
    for problem in windowed([4, 5], &[(4, 4)], &few) {
        for family in families(problem.world_size) {
            for (pass, travels) in ways() {
                assert_spoilers_noticed(&problem, &made(&problem, family, pass, travels));
            }
        }
    }
    for (layout, inner) in [(Layout::Contiguous, 3), (Layout::Zigzag, 2)] {
        let problem = Problem { layout, ..problem(6, 4) };
        for (pass, travels) in ways() {
            let double = made(&problem, Family::DoubleRing { inner }, pass, travels);
            assert_spoilers_noticed(&problem, &double);
        }
    }
}

/// Adds a message from rank 0 to rank 1 in a step of both.
fn with_message(mut schedules: Vec<Schedule>, index: usize, due: Due) -> Vec<Schedule> {
    let chunk = Chunk { payload: Payload::Keys, owner: 0, rows: 0..2 };
    let send = Transfer { chunk: chunk.clone(), peer: 1, place: Place::Home };
    let receive = Transfer { chunk, peer: 0, place: Place::Slot(40) };
    let messages = [(vec![send], vec![]), (vec![], vec![receive])];
    for (schedule, (sends, receives)) in schedules.iter_mut().zip(messages) {
        let found = schedule.steps.iter_mut().find(|step| step.index == index);
        let step: &mut Step = found.expect("both ranks have that step");
        step.exchanges.push(Exchange { sends, receives, due });
    }
    schedules
}

#[test]
fn messages_that_nobody_needs_or_that_cross_each_other_are_refused() {
    let problem = Problem { window: Window::FULL, ..problem(4, 4) };
    let good = ring(&problem, Pass::Forward, Travels::Keys);
    let refused = |due| {
        let schedules = with_message(good.clone(), 1, due);
        check(&problem, &schedules).expect_err("refused").to_string()
    };
    let useless = refused(Due::Begin(3));
    assert!(useless.ends_with("Keys[0..2] of rank 0 came and nobody needed it"), "{useless}");
    let crossed = refused(Due::Fold(1));
    assert!(crossed.contains("do not start in the order of their ends"), "{crossed}");
}

#[test]
fn a_double_ring_of_one_group_or_of_groups_of_one_is_the_ring() {
    let few = [Window::FULL, Window::CAUSAL, Window { left: Some(5), right: Some(2) }];
    for problem in windowed(1..=8, &[(1, 1), (4, 4), (6, 4)], &few) {
        for (pass, travels) in ways() {
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

/// Which rows of a chunk are needed at each of some places onward from it; those at the first are
/// of no interest.
type Onward = Vec<Vec<bool>>;

/// Row hops of all chunks on the better split of ways, from the definition alone.
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

/// For each owner, the rows needed at each rank so many groups and so many ranks onward.
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

/// No chunk goes both ways, and nothing of it is needed early and not late.
fn plain(problem: &Problem) -> bool {
    let masks = [Window::FULL, Window::CAUSAL];
    masks.contains(&problem.window) && problem.q_len == problem.kv_len
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
                    let [on_slow, sums] = rows_sent(&schedules, crosses);
                    let [on_fast, _] = rows_sent(&schedules, |rank, send| !crosses(rank, send));
                    let what = format!("{inner} {pass:?} {travels:?} {problem:?}");
                    assert_eq!([on_slow, on_fast], [slow, fast], "{what}");
                    // Of each chunk the sums of each other group come home, once from each way
                    // round it.
                    let of_groups = |owner: &Vec<Onward>| -> usize {
                        let others = owner[1..].iter().map(any_of);
                        others.flatten().filter(|needed| *needed).count()
                    };
                    let least: usize = needs.iter().map(of_groups).sum();
                    if (pass, travels) == (Pass::Forward, Travels::Keys) {
                        assert_eq!(sums, 0, "{what}");
                    } else if plain(&problem) && inner > 1 {
                        assert_eq!(sums, least, "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn with_a_full_mask_each_rank_sends_one_chunk_less_than_groups_over_slow_links() {
    for (outer, inner) in (2..=5).flat_map(|outer| (2..=5).map(move |inner| (outer, inner))) {
        let problem = Problem { window: Window::FULL, ..problem(outer * inner, 2) };
        for (pass, travels) in ways() {
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
    for (pass, travels) in ways() {
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

/// Rows of each slot that a schedule uses, as a device has memory for them, of inputs and of
/// accumulators.
fn slot_rows(schedule: &Schedule) -> [usize; 2] {
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

#[test]
fn double_rings_hold_two_chunks_of_each_ring_and_no_more() {
    for (outer, inner) in (1..=5).flat_map(|outer| (1..=5).map(move |inner| (outer, inner))) {
        for (layout, window) in
            Layout::ALL.into_iter().flat_map(|l| [Window::FULL, Window::CAUSAL].map(|w| (l, w)))
        {
            let problem = Problem { window, layout, ..problem(outer * inner, 4) };
            for (pass, travels) in ways() {
                let schedules = made(&problem, Family::DoubleRing { inner }, pass, travels);
                let held = schedules.iter().map(slot_rows);
                let [inputs, sums] = held.fold([0, 0], |most, rows| {
                    [0, 1].map(|kind: usize| rows[kind].max(most[kind]))
                });
                // One at hand and one on its way; the last one has none behind it.
                let [chunks, most] = [inputs.div_ceil(4), sums.div_ceil(4)];
                let expected = (inner - 1).min(2) + (outer - 1).min(2);
                let what = format!("{outer} × {inner} {pass:?} {travels:?} {layout} {window:?}");
                assert!(chunks <= expected, "{what}: {chunks} chunks, not {expected}");
                // Two in the inner ring, one that leaves for home and one that came.
                assert!(most <= 4, "{what}: {most} sums");
                if window == Window::FULL {
                    assert_eq!(chunks, expected, "{what}");
                }
            }
        }
    }
}

/// Pairs computed by each rank at each step.
fn work(schedules: &[Schedule]) -> Vec<Vec<usize>> {
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

#[test]
fn a_balanced_schedule_leaves_half_of_an_even_number_of_ranks_idle_at_its_last_step() {
    for (world_size, n) in (1..=17).flat_map(|world_size| [1, 4, 6].map(|n| (world_size, n))) {
        let problem = problem(world_size, n);
        for (pass, travels) in ways() {
            // With up to two ranks nobody is helped.
            let steps = work(&made(&problem, Family::Balanced, pass, travels));
            let what = format!("{world_size} × {n} {pass:?} {travels:?}");
            assert_eq!(steps.len(), world_size / 2 + 1, "{what}");
            let idle = steps.iter().flatten().filter(|pairs| **pairs == 0).count();
            let slots = steps.len() * world_size;
            // 1 / (P + 2) of all, or none.
            assert_eq!(
                idle * (world_size + 2),
                if world_size % 2 == 0 { slots } else { 0 },
                "{what}"
            );
            // In pairs, where the diagonal is half as much; exactly 1 / (P + 1) without its own
            // diagonal, which the larger n the less matters.
            let time: usize = steps.iter().map(|ranks| ranks.iter().max().unwrap_or(&0)).sum();
            let pairs: usize = steps.iter().flatten().sum();
            let wasted = if world_size % 2 == 0 { world_size / 2 * n * n } else { 0 };
            assert_eq!(time * world_size - pairs, wasted, "{what}");
            assert_eq!(pairs, world_size * n * (world_size * n + 1) / 2, "{what}");
        }
    }
}

#[test]
fn a_balanced_schedule_sends_what_its_distances_say() {
    for (world_size, (q_len, kv_len)) in
        (3..=13).flat_map(|world_size| [(4, 4), (2, 2)].map(|tokens| (world_size, tokens)))
    {
        let problem = Problem { kv_len, ..problem(world_size, q_len) };
        for (pass, travels) in ways() {
            let schedules = made(&problem, Family::Balanced, pass, travels);
            let chunks = |payload: Payload| {
                let sends = schedules.iter().flat_map(Schedule::sends);
                let rows = sends.filter(|send| send.chunk.payload == payload);
                rows.map(|send| send.chunk.rows.len()).sum::<usize>() / q_len
            };
            // Up to half the way round, those who have the side that stays, t of it at step t.
            let own: usize = (1..=world_size / 2).map(|t| world_size - t).sum();
            let helped: usize = (1..world_size.div_ceil(2)).sum();
            let (keys, queries) = match travels {
                Travels::Keys => (own, helped),
                Travels::Queries => (helped, own),
            };
            let what = format!("{world_size} {pass:?} {travels:?}");
            assert_eq!([Payload::Keys, Payload::Queries].map(chunks), [keys, queries], "{what}");
            let sums = [Payload::Partial, Payload::QueryGrads, Payload::KeyGrads].map(chunks);
            match pass {
                Pass::Forward => assert_eq!(sums, [queries, 0, 0], "{what}"),
                Pass::Backward => assert_eq!(sums, [0, queries, keys], "{what}"),
            }
        }
    }
}

#[test]
fn where_nobody_would_be_helped_balanced_is_the_ring() {
    let ahead = Window { left: None, right: Some(1) };
    let near = Window { left: Some(9), right: Some(0) };
    let far = Window { left: Some(19), right: Some(0) };
    let alike = |problem: &Problem| {
        ways().all(|(pass, travels)| {
            made(problem, Family::Balanced, pass, travels) == ring(problem, pass, travels)
        })
    };
    for (layout, window, is_ring) in [
        (Layout::Contiguous, Window::CAUSAL, false),
        (Layout::Contiguous, Window::FULL, true),
        (Layout::Contiguous, ahead, true),
        (Layout::Contiguous, near, true),
        (Layout::Contiguous, far, false),
        (Layout::Zigzag, Window::CAUSAL, true),
        (Layout::Striped, Window::CAUSAL, true),
    ] {
        let problem = Problem { layout, window, ..problem(6, 4) };
        assert_eq!(alike(&problem), is_ring, "{layout} {window:?}");
    }
}

fn is_input(transfer: &Transfer) -> bool {
    !transfer.chunk.payload.is_accumulator()
}

#[test]
fn all_gather_takes_each_row_from_its_owner_to_those_who_need_it() {
    let few = [(None, None), (None, Some(0)), (Some(3), Some(0)), (Some(9), Some(4))];
    let few = few.map(|(left, right)| Window { left, right });
    for problem in windowed(1..=8, &[(1, 1), (4, 4), (6, 4), (8, 8)], &few) {
        for (pass, travels) in ways() {
            let schedules = made(&problem, Family::AllGather, pass, travels);
            let pairs = (0..problem.world_size)
                .flat_map(|owner| (0..problem.world_size).map(move |at| (owner, at)))
                .filter(|(owner, at)| owner != at);
            let rows = pairs.map(|(owner, at)| needed(&problem, travels, owner, at));
            let rows = rows.flatten().filter(|needed| *needed).count();
            let has_sums = (pass, travels) != (Pass::Forward, Travels::Keys);
            let sent = rows_sent(&schedules, |_, _| true);
            let what = format!("{pass:?} {travels:?} {problem:?}");
            assert_eq!(sent[0], rows, "{what}");
            // Sums between two rows of a part are sent as well.
            assert!(!has_sums && sent[1] == 0 || has_sums && sent[1] >= rows, "{what}");
            for schedule in &schedules {
                for send in schedule.sends() {
                    let is_direct = match is_input(send) {
                        true => send.place == Place::Home && send.chunk.owner == schedule.rank,
                        false => send.peer == send.chunk.owner,
                    };
                    assert!(is_direct, "{what}: {send:?}");
                }
            }
        }
    }
}

#[test]
fn all_gather_and_balanced_hold_two_chunks_beyond_the_shard() {
    for family in [Family::AllGather, Family::Balanced] {
        for problem in problems(3..=9, &[4]) {
            for (pass, travels) in ways() {
                let schedules = made(&problem, family, pass, travels);
                let most = schedules.iter().map(|schedule| most_held(schedule, is_input)).max();
                let what = format!("{family} {pass:?} {travels:?} {problem:?}");
                assert!(most.is_some_and(|rows| 0 < rows && rows <= 2 * 4), "{what}: {most:?}");
                let sums = |transfer: &Transfer| !is_input(transfer);
                let most = schedules.iter().map(|schedule| most_held(schedule, sums)).max();
                assert!(most.is_some_and(|rows| rows <= 3 * 4), "{what}: {most:?}");
            }
        }
    }
}

/// The most rows that arrive or lie in slots at one step, of what `counts` when it arrives. It lies
/// there to the last step that uses it.
fn most_held(schedule: &Schedule, counts: impl Fn(&Transfer) -> bool) -> usize {
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

/// The last step at which something that arrives, or is opened, at a step is used there.
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
