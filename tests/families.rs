//! The schedules of all families, proven without a device and without floating point.

mod common;

use burst_attention::problem::{Pass, Problem, Travels};
use burst_attention::schedule::{
    Chunk, Due, Exchange, Family, Payload, Place, Schedule, Step, Transfer, check, ring,
};
use burst_attention::{Layout, Window};
use common::held::most_held;
use common::needs::{families, made, needed, rows_sent};
use common::proofs::{assert_all_proven, work};
use common::spoilers::assert_spoilers_noticed;
use common::{passes_and_sides, problem, problems, windowed, windows};

#[test]
fn a_family_is_found_by_the_name_that_it_prints() {
    for family in Family::ALL {
        assert_eq!(Family::named(family.name(), 3), Ok(family.with_inner(3)));
        assert!(family.to_string().starts_with(family.name()), "{family}");
        let same = Family::ALL.iter().filter(|other| other.name() == family.name());
        assert_eq!(same.count(), 1, "{family}");
    }
    let error = Family::named("maypole", 3).expect_err("no family has this name").to_string();
    assert!(Family::ALL.iter().all(|family| error.contains(family.name())), "{error}");
    assert!(error.starts_with("schedule must be ring, double_ring, "), "{error}");
    assert!(error.ends_with(", got \"maypole\""), "{error}");
}

#[test]
fn every_allowed_pair_is_computed_exactly_once_and_returns_home() {
    assert_all_proven(&problems(1..=16, &[1, 2, 4, 6]), families);
}

#[test]
fn schedules_are_right_in_every_window_and_with_more_keys_or_queries() {
    let tokens = [(1, 1), (4, 4), (6, 6), (4, 6), (8, 2), (1, 3)];
    assert_all_proven(&windowed(2..=6, &tokens, &windows()), families);
    let few = [(None, Some(3)), (Some(2), Some(0)), (Some(1), Some(1)), (Some(17), Some(9))];
    let few = few.map(|(left, right)| Window { left, right });
    assert_all_proven(&windowed([8, 9, 12], &[(2, 2), (6, 4)], &few), families);
}

#[test]
fn every_family_s_spoiled_schedules_are_refused() {
    let few = [Window::CAUSAL, Window::FULL, Window { left: Some(9), right: Some(3) }];
    for problem in windowed([4, 5], &[(4, 4)], &few) {
        for family in families(problem.world_size) {
            for (pass, travels) in passes_and_sides() {
                assert_spoilers_noticed(&problem, &made(&problem, family, pass, travels));
            }
        }
    }
    for (layout, inner) in [(Layout::Contiguous, 3), (Layout::Zigzag, 2)] {
        let problem = Problem { layout, ..problem(6, 4) };
        for (pass, travels) in passes_and_sides() {
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
fn messages_without_use_or_that_cross_each_other_are_refused() {
    let problem = Problem { window: Window::FULL, ..problem(4, 4) };
    let good = ring(&problem, Pass::Forward, Travels::Keys);
    let refused = |due| {
        let schedules = with_message(good.clone(), 1, due);
        check(&problem, &schedules).expect_err("refused").to_string()
    };
    let useless = refused(Due::Begin(3));
    assert!(
        useless
            .contains("Keys[0..2] of rank 0 came, but this rank neither uses it nor sends it on"),
        "{useless}"
    );
    let crossed = refused(Due::Fold(1));
    assert!(crossed.contains("do not start in the order of their deadlines"), "{crossed}");
}

#[test]
fn causal_work_is_equal_on_all_ranks_at_every_step_in_zigzag_layout() {
    for world_size in 1..=12 {
        let problem = Problem { layout: Layout::Zigzag, ..problem(world_size, 4) };
        for family in families(world_size) {
            for (pass, travels) in passes_and_sides() {
                for ranks in work(&made(&problem, family, pass, travels)) {
                    let alike = ranks.iter().all(|pairs| *pairs == ranks[0]);
                    assert!(alike, "{family} {world_size} {pass:?} {travels:?}: {ranks:?}");
                }
            }
        }
    }
}

#[test]
fn a_balanced_schedule_leaves_half_of_an_even_number_of_ranks_idle_at_its_last_step() {
    for (world_size, n) in (1..=17).flat_map(|world_size| [1, 4, 6].map(|n| (world_size, n))) {
        let problem = problem(world_size, n);
        for (pass, travels) in passes_and_sides() {
            // Of up to two ranks, none is helped.
            let steps = work(&made(&problem, Family::Balanced, pass, travels));
            let what = format!("{world_size} × {n} {pass:?} {travels:?}");
            assert_eq!(steps.len(), world_size / 2 + 1, "{what}");
            let idle = steps.iter().flatten().filter(|pairs| **pairs == 0).count();
            let slots = steps.len() * world_size;
            // One of P + 2 slots is idle, or none.
            assert_eq!(
                idle * (world_size + 2),
                if world_size % 2 == 0 { slots } else { 0 },
                "{what}"
            );
            // The waste in pairs. On the diagonal a rank computes half as many, so the share of
            // the waste comes closer to 1 / (P + 1) with larger n.
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
        for (pass, travels) in passes_and_sides() {
            let schedules = made(&problem, Family::Balanced, pass, travels);
            let chunks = |payload: Payload| {
                let sends = schedules.iter().flat_map(Schedule::sends);
                let rows = sends.filter(|send| send.chunk.payload == payload);
                rows.map(|send| send.chunk.rows.len()).sum::<usize>() / q_len
            };
            // Up to halfway round, all but t ranks compute at step t with the side that stays.
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
fn where_no_rank_would_be_helped_balanced_is_the_ring() {
    let ahead = Window { left: None, right: Some(1) };
    let near = Window { left: Some(9), right: Some(0) };
    let far = Window { left: Some(19), right: Some(0) };
    let alike = |problem: &Problem| {
        passes_and_sides().all(|(pass, travels)| {
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
fn all_gather_takes_each_row_from_its_owner_to_the_ranks_that_need_it() {
    let few = [(None, None), (None, Some(0)), (Some(3), Some(0)), (Some(9), Some(4))];
    let few = few.map(|(left, right)| Window { left, right });
    for problem in windowed(1..=8, &[(1, 1), (4, 4), (6, 4), (8, 8)], &few) {
        for (pass, travels) in passes_and_sides() {
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
            // Accumulators of rows between two rows of a row range are sent as well.
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
            for (pass, travels) in passes_and_sides() {
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
