//! Tests of the order checker.

use super::super::{Party, check, common, mutations, unneeded};
use super::*;

/// One step of a ring: a kernel writes, the other stream sends the result and receives other bytes,
/// and a kernel reads the received bytes.
fn ring_step() -> Vec<(Stream, Operation)> {
    vec![
        (COMPUTE, Operation::Launch(launch(0x1000, 0x2000, 4))),
        (COMPUTE, record(1)),
        (OTHER, wait(1)),
        (OTHER, exchange(0, &[(1, 0x2000, 64)], &[(1, 0x3000, 128)])),
        (OTHER, record(2)),
        (COMPUTE, Operation::Launch(launch(0x1000, 0x4000, 4))),
        (COMPUTE, wait(2)),
        (COMPUTE, Operation::Launch(launch(0x3000, 0x4000, 4))),
    ]
}

#[test]
fn ordered_streams_do_not_race() {
    assert_eq!(check(&program(&ring_step())), Ok(()));
    assert_eq!(check(&program(&[])), Ok(()));
}

#[test]
fn every_event_is_needed() {
    let all = mutations(&program(&ring_step()));
    assert_eq!(all.iter().map(|mutation| mutation.index).collect::<Vec<_>>(), [1, 2, 4, 6]);
    for mutation in all {
        assert!(check(&mutation.program).is_err(), "without {} nothing races", mutation.removed);
    }
    assert_eq!(unneeded(&program(&ring_step())), []);
}

#[test]
fn an_event_that_orders_nothing_is_unneeded() {
    let mut calls = ring_step();
    calls.splice(3..3, [(COMPUTE, record(3)), (OTHER, wait(3))]);
    let unneeded = unneeded(&program(&calls));
    assert_eq!(unneeded.iter().map(|mutation| mutation.index).collect::<Vec<_>>(), [1, 2, 3, 4]);
}

#[test]
fn a_race_names_both_calls_their_bytes_and_what_is_missing() {
    let mut calls = ring_step();
    calls.swap(6, 7);
    let race = check(&program(&calls)).unwrap_err();
    let call =
        |index| move |party: &Party| matches!(party, Party::Call { index: n, .. } if *n == index);
    assert!(call(3)(&race.first) && call(6)(&race.second), "{race}");
    assert_eq!(race.bytes, 0x3000..0x3080);
    let text = race.to_string();
    for part in ["writes receive from rank 1", "cast on stream 0x1 (reads a)", "0x3000..0x3080"] {
        assert!(text.contains(part), "{text}");
    }
    let missing = "stream 0x1 must wait, before the second, for an event that stream 0x2 records \
                   after the first: so far it has waited for nothing of it";
    assert_eq!(race.missing, missing);
}

#[test]
fn an_event_stands_for_what_came_before_its_record() {
    let mut calls = ring_step();
    calls.swap(3, 4);
    let race = check(&program(&calls)).unwrap_err();
    assert!(
        race.missing.ends_with("so far it has waited only for what ends with call 3"),
        "{race}"
    );
}

#[test]
fn other_streams_wait_for_the_program_before_and_are_awaited_by_the_one_after() {
    let alone = (OTHER, copy(0x1000, 0x2000, 16));
    let race = check(&program(std::slice::from_ref(&alone))).unwrap_err();
    assert_eq!(race.first, Party::Before);
    let begun = [(COMPUTE, record(1)), (OTHER, wait(1)), alone];
    let race = check(&program(&begun)).unwrap_err();
    assert_eq!(race.second, Party::After);
    let ended = [&begun[..], &[(OTHER, record(2)), (COMPUTE, wait(2))]].concat();
    assert_eq!(check(&program(&ended)), Ok(()));
}

#[test]
fn a_wait_means_the_latest_record_before_it() {
    // The event is recorded three times. Each wait means the latest record before it.
    let calls = [
        (COMPUTE, record(1)),
        (OTHER, wait(1)),
        (COMPUTE, copy(0x1000, 0x2000, 16)),
        (COMPUTE, record(1)),
        (OTHER, wait(1)),
        (OTHER, copy(0x2000, 0x3000, 16)),
        (OTHER, record(1)),
        (COMPUTE, wait(1)),
    ];
    assert_eq!(check(&program(&calls)), Ok(()));
    let mut early = calls.clone();
    early.swap(3, 4);
    let race = check(&program(&early)).unwrap_err();
    assert_eq!(race.bytes, 0x2000..0x2010);
    for mutation in mutations(&program(&calls)) {
        // The first record and wait are not needed, since the second record is later.
        let found = check(&mutation.program).is_err();
        assert_eq!(found, mutation.index > 1, "without {}", mutation.removed);
    }
}

#[test]
fn order_passes_through_a_third_stream() {
    let third = Stream(3);
    let calls = [
        (COMPUTE, copy(0x1000, 0x2000, 16)),
        (COMPUTE, record(1)),
        (third, wait(1)),
        (third, record(2)),
        (OTHER, wait(2)),
        (OTHER, copy(0x2000, 0x3000, 16)),
        (OTHER, record(3)),
        (third, wait(3)),
        (third, record(4)),
        (COMPUTE, wait(4)),
    ];
    assert_eq!(check(&program(&calls)), Ok(()));
    assert!(mutations(&program(&calls)).iter().all(|mutation| check(&mutation.program).is_err()));
}

#[test]
fn a_wait_for_an_unrecorded_event_orders_nothing() {
    let calls = [(OTHER, wait(1)), (OTHER, copy(0x1000, 0x2000, 16)), (COMPUTE, record(1))];
    assert_eq!(program(&calls).idle_waits(), [0]);
    assert!(check(&program(&calls)).is_err());
}

#[test]
fn two_reads_do_not_race() {
    let begin = [(COMPUTE, record(1)), (OTHER, wait(1))];
    let end = [(OTHER, record(2)), (COMPUTE, wait(2))];
    let sends = |address| {
        let both = [
            (COMPUTE, Operation::Launch(launch(0x1000, 0x2000, 4))),
            (OTHER, exchange(0, &[(1, address, 16)], &[])),
        ];
        program(&[&begin[..], &both, &end].concat())
    };
    assert_eq!(check(&sends(0x1000)), Ok(()));
    assert!(check(&sends(0x2000)).is_err());
}

#[test]
fn one_call_must_not_conflict_with_itself() {
    let calls = [(COMPUTE, exchange(0, &[(1, 0x2000, 16)], &[(1, 0x200f, 16)]))];
    let race = check(&program(&calls)).unwrap_err();
    assert_eq!(race.bytes, 0x200f..0x2010);
    assert!(check(&program(&[(COMPUTE, Operation::Launch(launch(0x1000, 0x1000, 4)))])).is_err());
}

#[test]
fn blocks_meet_in_their_lines_only() {
    let block = |address, width, height, pitch| Block { address, width, height, pitch };
    let columns = block(100, 4, 5, 10);
    assert_eq!(common(&columns, &block(104, 6, 5, 10)), None);
    assert_eq!(common(&columns, &block(104, 7, 5, 10)), Some(110..111));
    assert_eq!(common(&block(104, 7, 5, 10), &columns), Some(110..111));
    assert_eq!(common(&columns, &Block::run(143, 5)), Some(143..144));
    assert_eq!(common(&columns, &Block::run(144, 100)), None);
    assert_eq!(common(&columns, &Block::run(0, u64::MAX)), Some(100..104));
    // Compare other pitches with a search over all bytes.
    for pitch in 3..9 {
        for start in 0..60 {
            let (one, other) = (block(20, 2, 6, 7), block(start, 2, 4, pitch));
            let bytes = |block: Block| {
                let lines = 0..block.height;
                lines.flat_map(move |n| (0..2).map(move |at| block.address + n * block.pitch + at))
            };
            let meet = bytes(one).find(|byte| bytes(other).any(|other| other == *byte));
            assert_eq!(common(&one, &other).map(|both| both.start), meet, "{one:?} {other:?}");
        }
    }
}
