//! Tests on small programs that are written by hand.

use burst_attention::cuda::driver::{Block, Copy, Event, Stream};
use burst_attention::cuda::nccl::{Comm, Group, Message};

use super::touch::common;
use super::{Call, Exchange, Operation, Program, check, replay, unneeded};

const COMPUTE: Stream = Stream(1);
const OTHER: Stream = Stream(2);

fn copy(from: u64, to: u64, bytes: u64) -> Operation {
    Operation::Copy(Copy { from: Block::one_line(from, bytes), to: Block::one_line(to, bytes) })
}

/// An exchange of a rank. Each message is (peer, address, bytes).
fn exchange(rank: usize, sends: &[(usize, u64, u64)], receives: &[(usize, u64, u64)]) -> Operation {
    let message = |&(peer, address, bytes): &(usize, u64, u64)| Message { address, bytes, peer };
    let [sends, receives] = [sends, receives].map(|all| all.iter().map(message).collect());
    Operation::Exchange(Exchange { comm: Comm(9), ring: 0, rank, group: Group { sends, receives } })
}

fn record(event: usize) -> Operation {
    Operation::Record(Event(event))
}

fn wait(event: usize) -> Operation {
    Operation::Wait(Event(event))
}

fn program(calls: &[(Stream, Operation)]) -> Program {
    let call = |(stream, operation): &(Stream, Operation)| Call {
        stream: *stream,
        operation: operation.clone(),
    };
    Program { compute: COMPUTE, calls: calls.iter().map(call).collect() }
}

/// One step of a ring: a copy writes, the other stream sends the result and receives other bytes,
/// and a copy reads the received bytes.
fn ring_step() -> Vec<(Stream, Operation)> {
    vec![
        (COMPUTE, copy(0x1000, 0x2000, 64)),
        (COMPUTE, record(1)),
        (OTHER, wait(1)),
        (OTHER, exchange(0, &[(1, 0x2000, 64)], &[(1, 0x3000, 128)])),
        (OTHER, record(2)),
        (COMPUTE, copy(0x1000, 0x4000, 64)),
        (COMPUTE, wait(2)),
        (COMPUTE, copy(0x3000, 0x4000, 64)),
    ]
}

#[test]
fn ordered_streams_do_not_race_and_each_event_is_needed() {
    assert_eq!(check(&program(&ring_step())), Ok(()));
    assert_eq!(unneeded(&program(&ring_step())), [""; 0]);
    let mut more = ring_step();
    more.splice(3..3, [(COMPUTE, record(3)), (OTHER, wait(3))]);
    // The second wait is for a later record, so each of the two pairs can be left out.
    assert_eq!(unneeded(&program(&more)).len(), 4);
}

#[test]
fn a_race_names_both_calls_and_their_bytes() {
    let mut calls = ring_step();
    calls.swap(6, 7);
    let race = check(&program(&calls)).unwrap_err();
    let parts =
        ["call 3, ", "(writes receive from rank 1)", "call 6, ", "(reads source)", "3000.."];
    assert!(parts.iter().all(|part| race.contains(part)), "{race}");
    // An event stands for what came before its record.
    let mut calls = ring_step();
    calls.swap(3, 4);
    assert!(check(&program(&calls)).is_err());
}

#[test]
fn other_streams_wait_for_the_program_before_and_are_awaited_by_the_one_after() {
    let alone = (OTHER, copy(0x1000, 0x2000, 16));
    let race = check(&program(std::slice::from_ref(&alone))).unwrap_err();
    assert!(race.contains("the program before this one"), "{race}");
    let begun = [(COMPUTE, record(1)), (OTHER, wait(1)), alone];
    let race = check(&program(&begun)).unwrap_err();
    assert!(race.contains("the program after this one"), "{race}");
    let ended = [&begun[..], &[(OTHER, record(2)), (COMPUTE, wait(2))]].concat();
    assert_eq!(check(&program(&ended)), Ok(()));
}

#[test]
fn a_wait_means_the_latest_record_before_it() {
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
    assert_eq!(replay(&[program(&calls)]), Ok(()));
    let mut early = calls.clone();
    early.swap(3, 4);
    assert!(check(&program(&early)).is_err());
    let none = [(OTHER, wait(1)), (COMPUTE, record(1))];
    assert_eq!(program(&none).idle_waits(), [0]);
}

#[test]
fn one_call_must_not_conflict_with_itself() {
    let calls = [(COMPUTE, exchange(0, &[(1, 0x2000, 16)], &[(1, 0x200f, 16)]))];
    assert!(check(&program(&calls)).unwrap_err().contains("0x200f"));
    let reads = [(COMPUTE, exchange(0, &[(1, 0x2000, 16), (2, 0x2000, 16)], &[]))];
    assert_eq!(check(&program(&reads)), Ok(()));
}

#[test]
fn blocks_meet_in_their_lines_only() {
    let block = |address, width, height, pitch| Block { address, width, height, pitch };
    let columns = block(100, 4, 5, 10);
    assert_eq!(common(&columns, &block(104, 6, 5, 10)), None);
    assert_eq!(common(&block(104, 7, 5, 10), &columns), Some(110..111));
    assert_eq!(common(&columns, &Block::one_line(0, u64::MAX)), Some(100..104));
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

/// Returns programs in which rank 0 sends, then receives. Rank 1 receives, then sends; if
/// `crossed`, it sends first too.
fn two_groups(crossed: bool, streams: [Stream; 2]) -> [Program; 2] {
    let calls = |rank: usize, first_sends: bool| {
        let peer = 1 - rank;
        let send = exchange(rank, &[(peer, 0x1000, 8)], &[]);
        let receive = exchange(rank, &[], &[(peer, 0x2000, 8)]);
        let both = if first_sends { [send, receive] } else { [receive, send] };
        program(&streams.into_iter().zip(both).collect::<Vec<_>>())
    };
    [calls(0, true), calls(1, crossed)]
}

#[test]
fn groups_that_wait_for_each_other_are_a_deadlock() {
    assert_eq!(replay(&two_groups(false, [OTHER; 2])), Ok(()));
    // Groups of one communicator keep their order across streams.
    assert!(replay(&two_groups(true, [COMPUTE, OTHER])).is_err());
    let stuck = replay(&two_groups(true, [OTHER; 2])).unwrap_err();
    let expected = "device 0, call 0, exchange of rank 0 to [1] from [] on stream 0x2, waits for \
                    device 1, call 1, exchange of rank 1 to [] from [0] on stream 0x2";
    assert_eq!(stuck.lines().nth(1), Some(expected));
}

#[test]
fn a_stream_that_waits_for_itself_is_a_deadlock() {
    let receive = exchange(0, &[], &[(1, 0x1000, 8)]);
    let send = exchange(0, &[(1, 0x2000, 8)], &[]);
    let rank = [(OTHER, receive), (OTHER, record(1)), (COMPUTE, wait(1)), (COMPUTE, send)];
    let peer = |first: Operation, second| program(&[(OTHER, first), (OTHER, second)]);
    let (send, receive) =
        (exchange(1, &[(0, 0x1000, 8)], &[]), exchange(1, &[], &[(0, 0x3000, 8)]));
    assert_eq!(replay(&[program(&rank), peer(send.clone(), receive.clone())]), Ok(()));
    let stuck = replay(&[program(&rank), peer(receive, send)]).unwrap_err();
    let expected = "call 2, wait for event 0x1 on stream 0x1, waits for device 0, call 1";
    assert!(stuck.contains(expected), "{stuck}");
}

#[test]
fn messages_without_an_end_or_of_two_sizes_are_errors() {
    let of = |calls: &[Operation]| {
        program(&calls.iter().map(|call| (OTHER, call.clone())).collect::<Vec<_>>())
    };
    let send = |bytes| exchange(0, &[(1, 0x1000, bytes)], &[]);
    let receive = |bytes| exchange(1, &[], &[(0, 0x1000, bytes)]);
    let refused = |sends: &[Operation], receives: &[Operation], lengths| {
        let error = replay(&[of(sends), of(receives)]).unwrap_err();
        assert!(error.contains(lengths), "{lengths} in {error}");
    };
    assert_eq!(replay(&[of(&[send(4), send(8)]), of(&[receive(4), receive(8)])]), Ok(()));
    refused(&[send(4), send(8)], &[receive(4)], "[4, 8] bytes to rank 1, which receives [4]");
    refused(&[], &[receive(4)], "[] bytes to rank 1, which receives [4]");
    refused(&[send(8)], &[receive(9)], "[8] bytes to rank 1, which receives [9]");
}
