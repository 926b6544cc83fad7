//! Tests of the replay of all ranks together.

use std::collections::{HashMap, HashSet};

use super::super::{Action, Delivery, Stuck, replay};
use super::*;

/// Returns all actions in order, in words.
fn trace(programs: &[Program], seed: u64) -> Result<Vec<String>, Stuck> {
    let mut trace = vec![];
    replay(programs, seed, |action| {
        trace.push(match action {
            Action::Launch(device, launch) => format!("{device}: {:?}", launch.value("a")),
            Action::Copy(device, copy) => format!("{device}: {:#x}", copy.from.address),
            Action::Message(Delivery { from, to, bytes }) => {
                format!("{}>{}: {bytes}", from.0, to.0)
            }
        });
        Ok(())
    })?;
    Ok(trace)
}

/// Returns all orders that 200 seeds find.
fn orders(programs: &[Program]) -> HashSet<Vec<String>> {
    (0..200).map(|seed| trace(programs, seed).unwrap()).collect()
}

#[test]
fn a_stream_keeps_its_order_and_streams_have_none() {
    let calls = [
        (COMPUTE, copy(0x10, 0x1000, 1)),
        (OTHER, copy(0x20, 0x2000, 1)),
        (COMPUTE, copy(0x11, 0x1000, 1)),
        (OTHER, copy(0x21, 0x2000, 1)),
    ];
    let found = orders(&[program(&calls)]);
    assert_eq!(found.len(), 6, "2 of 4 places for one stream: {found:?}");
    for order in found {
        let at = |name| order.iter().position(|entry| entry == name).unwrap();
        assert!(at("0: 0x10") < at("0: 0x11") && at("0: 0x20") < at("0: 0x21"));
    }
}

#[test]
fn the_same_seed_gives_the_same_order() {
    let copies: Vec<_> = (1..40).map(|n| (Stream(1 + n % 5), copy(n as u64, 0x1000, 1))).collect();
    let programs = [program(&copies)];
    assert_eq!(trace(&programs, 7), trace(&programs, 7));
    assert_ne!(trace(&programs, 7), trace(&programs, 8));
}

#[test]
fn streams_run_far_ahead_of_each_other() {
    let copies = |stream: Stream| (1..16).map(move |n| (stream, copy(n, 0x1000, stream.0 as u64)));
    let calls: Vec<_> = copies(COMPUTE).chain(copies(OTHER)).collect();
    let programs = [program(&calls)];
    for first in [COMPUTE, OTHER] {
        let alone = |seed: &u64| {
            let mut bytes = vec![];
            let outcome = replay(&programs, *seed, |action| {
                let Action::Copy(_, copy) = action else { panic!("{action:?}") };
                bytes.push(copy.from.bytes());
                Ok(())
            });
            outcome == Ok(()) && bytes[..15].iter().all(|bytes| *bytes == first.0 as u64)
        };
        // With equally fast streams, this order would have a chance of 1 in 2^15.
        assert!((0..100).filter(alone).count() >= 3, "stream {first:?} is never first");
    }
}

#[test]
fn a_wait_holds_its_stream_until_the_record() {
    let calls = [
        (COMPUTE, copy(0x10, 0x1000, 1)),
        (COMPUTE, record(1)),
        (OTHER, wait(1)),
        (OTHER, copy(0x20, 0x2000, 1)),
    ];
    assert_eq!(orders(&[program(&calls)]).len(), 1);
    // A wait before the record does nothing, as in the driver.
    let mut idle = calls;
    idle.swap(1, 2);
    assert_eq!(orders(&[program(&idle)]).len(), 2);
}

#[test]
fn a_wait_is_for_the_latest_record_before_it_not_for_a_later_one() {
    let calls = [
        (COMPUTE, copy(0x10, 0x1000, 1)),
        (COMPUTE, record(1)),
        (OTHER, wait(1)),
        (OTHER, copy(0x20, 0x2000, 1)),
        (OTHER, record(2)),
        (COMPUTE, wait(2)),
        // If the first wait meant the record below, nothing could go on.
        (COMPUTE, copy(0x11, 0x1000, 1)),
        (COMPUTE, record(1)),
        (OTHER, wait(1)),
        (OTHER, copy(0x21, 0x2000, 1)),
    ];
    let found = orders(&[program(&calls)]);
    assert_eq!(found.len(), 1);
    let expected = ["0: 0x10", "0: 0x20", "0: 0x11", "0: 0x21"].map(String::from);
    assert!(found.contains(expected.as_slice()));
}

#[test]
fn messages_meet_in_the_order_of_both_programs() {
    let sends = [
        (OTHER, exchange(0, &[(1, 0x1000, 10), (1, 0x2000, 20)], &[(1, 0x3000, 5)])),
        (OTHER, exchange(0, &[(1, 0x4000, 30)], &[])),
    ];
    let receives = [
        (OTHER, exchange(1, &[(0, 0x6000, 5)], &[(0, 0x1100, 10), (0, 0x2200, 20)])),
        (OTHER, exchange(1, &[], &[(0, 0x4400, 30)])),
    ];
    let programs = [program(&sends), program(&receives)];
    let mut orders = HashSet::new();
    for seed in 0..100 {
        let mut seen = HashMap::new();
        let mut order = vec![];
        let found = replay(&programs, seed, |action| {
            let Action::Message(Delivery { from, to, bytes }) = action else {
                return Err("no message".into());
            };
            seen.insert(bytes, (from, to));
            order.push(bytes);
            Ok(())
        });
        assert_eq!(found, Ok(()));
        let expected = [
            (10, ((0, 0x1000), (1, 0x1100))),
            (20, ((0, 0x2000), (1, 0x2200))),
            (5, ((1, 0x6000), (0, 0x3000))),
            (30, ((0, 0x4000), (1, 0x4400))),
        ];
        assert_eq!(seen, HashMap::from(expected));
        assert_eq!(order[3], 30, "a group starts when the previous one is done");
        orders.insert(order);
    }
    assert_eq!(orders.len(), 6, "messages of one group arrive in any order");
}

/// Returns programs in which rank 0 sends, then receives. Rank 1 receives, then sends; if
/// `crossed`, it sends first too.
fn two_groups(crossed: bool) -> [Program; 2] {
    let calls = |rank: usize, first_sends: bool| {
        let peer = 1 - rank;
        let send = (OTHER, exchange(rank, &[(peer, 0x1000, 8)], &[]));
        let receive = (OTHER, exchange(rank, &[], &[(peer, 0x2000, 8)]));
        program(&if first_sends { [send, receive] } else { [receive, send] })
    };
    [calls(0, true), calls(1, crossed)]
}

#[test]
fn groups_that_wait_for_each_other_are_a_deadlock() {
    assert!(trace(&two_groups(false), 1).is_ok());
    let Err(Stuck::Deadlock(waiting)) = trace(&two_groups(true), 1) else {
        panic!("both send first, and no one receives")
    };
    assert_eq!(waiting.len(), 2);
    let expected = "device 0, call 0, exchange of rank 0 to [1] from [] on stream 0x2, waits for \
                    device 1, call 1, exchange of rank 1 to [] from [0] on stream 0x2";
    assert_eq!(waiting[0], expected);
}

#[test]
fn a_stream_that_waits_for_itself_is_a_deadlock() {
    let (receives, sends) = (&[(1, 0x1000, 8)][..], &[(0, 0x1000, 8)][..]);
    let waits = [
        (OTHER, exchange(0, &[], receives)),
        (OTHER, record(1)),
        (COMPUTE, wait(1)),
        (COMPUTE, copy(0x10, 0x20, 1)),
        (COMPUTE, record(2)),
    ];
    let late = [(COMPUTE, wait(9)), (OTHER, exchange(1, sends, &[]))];
    let fine = [program(&waits), program(&late)];
    assert!(trace(&fine, 3).is_ok());
    // The other rank sends only after it has received this rank's second group.
    let mut more = waits.to_vec();
    more.push((OTHER, wait(2)));
    more.push((OTHER, exchange(0, sends_to_one(), &[])));
    let answer = [(OTHER, exchange(1, &[], &[(0, 0x3000, 8)])), (OTHER, exchange(1, sends, &[]))];
    let Err(Stuck::Deadlock(waiting)) = trace(&[program(&more), program(&answer)], 3) else {
        panic!("rank 0 sends after it has received, rank 1 too")
    };
    let text = waiting.join("\n");
    assert!(text.contains("call 2, wait for event 0x1 on stream 0x1, waits for call 1"), "{text}");
}

fn sends_to_one() -> &'static [(usize, u64, u64)] {
    &[(1, 0x2000, 8)]
}

#[test]
fn messages_without_an_end_or_of_two_sizes_are_errors() {
    let of = |calls: &[Operation]| {
        program(&calls.iter().map(|call| (OTHER, call.clone())).collect::<Vec<_>>())
    };
    let unmatched = |one: &[Operation], other: &[Operation]| match trace(&[of(one), of(other)], 0) {
        Err(Stuck::Unmatched { ring: 0, from, to, number, what }) => (from, to, number, what),
        found => panic!("{found:?}"),
    };
    let send = |bytes| exchange(0, &[(1, 0x1000, bytes)], &[]);
    let receive = |bytes| exchange(1, &[], &[(0, 0x1000, bytes)]);
    let (from, to, number, what) = unmatched(&[send(4), send(8)], &[receive(4)]);
    assert_eq!((from, to, number), (0, 1, 1));
    assert!(what.contains("never received"), "{what}");
    let (.., what) = unmatched(&[], &[receive(4)]);
    assert!(what.contains("never sent"), "{what}");
    let (.., number, what) = unmatched(&[send(4), send(8)], &[receive(4), receive(9)]);
    assert_eq!(number, 1);
    assert!(what.contains("8 bytes of") && what.contains("9 bytes of"), "{what}");
}

#[test]
fn rings_and_communicators_are_their_own() {
    let of_ring = |ring: usize, mut operation: Operation| {
        let Operation::Exchange(exchange) = &mut operation else { panic!("an exchange") };
        exchange.ring = ring;
        exchange.comm = Comm(ring);
        (OTHER, operation)
    };
    let rank = |rank: usize, ring| {
        let peer = 1 - rank;
        of_ring(ring, exchange(rank, &[(peer, 0x1000 + rank as u64, 1)], &[(peer, 0x2000, 1)]))
    };
    let programs = [(0, 5), (1, 5), (0, 6), (1, 6)].map(|(n, ring)| program(&[rank(n, ring)]));
    let mut met = HashSet::new();
    let act = |action: Action<'_>| {
        let Action::Message(Delivery { from, to, .. }) = action else { panic!("{action:?}") };
        met.insert((from.0, to.0));
        Ok(())
    };
    assert_eq!(replay(&programs, 0, act), Ok(()));
    assert_eq!(met, HashSet::from([(0, 1), (1, 0), (2, 3), (3, 2)]));
}

#[test]
fn groups_of_one_communicator_keep_their_order_across_streams() {
    // The groups are on two streams, but the second one starts only after the first is done.
    let crossed = [
        program(&[
            (COMPUTE, exchange(0, &[(1, 0x1000, 8)], &[])),
            (OTHER, exchange(0, &[], &[(1, 0x2000, 8)])),
        ]),
        program(&[
            (COMPUTE, exchange(1, &[(0, 0x1000, 8)], &[])),
            (OTHER, exchange(1, &[], &[(0, 0x2000, 8)])),
        ]),
    ];
    assert!(matches!(trace(&crossed, 0), Err(Stuck::Deadlock(_))));
}

#[test]
fn a_refused_action_is_named() {
    let programs = [program(&[]), program(&[(OTHER, copy(0x10, 0x20, 1))])];
    let Err(Stuck::Failed { device, call, reason }) =
        replay(&programs, 0, |_| Err("no memory there".into()))
    else {
        panic!("the copy fails")
    };
    assert_eq!((device, reason.as_str()), (1, "no memory there"));
    assert!(call.starts_with("call 0, copy of 1 bytes"), "{call}");
}
