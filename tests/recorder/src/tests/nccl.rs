//! Tests of NCCL's functions on recorders.

use std::ffi::{c_int, c_void};

use burst_attention::Result;
use burst_attention::cuda::driver::Driver;
use burst_attention::cuda::error::CudaError;
use burst_attention::cuda::nccl::Communicator;

use super::super::{Recorder, group_is_open, nccl};
use super::*;

/// A recorder with the devices of a ring and their communicators.
fn ring(size: usize) -> (Recorder, Vec<(Stream, Comm)>) {
    let recorder = Recorder::new();
    let rank = |rank| {
        let device = recorder.add_device();
        (device, recorder.add_comm(rank, size, device))
    };
    let ranks = (0..size).map(rank).collect();
    (recorder, ranks)
}

fn message(peer: usize) -> Message {
    Message { address: 0x1000, bytes: 8, peer }
}

/// A group of one message out and one in.
fn around(to: usize, from: usize) -> Group {
    Group { sends: vec![message(to)], receives: vec![message(from)] }
}

fn issue(comm: Comm, size: usize, stream: Stream, group: &Group) -> Result<()> {
    let communicator = Communicator::new(nccl(), comm, size)?;
    // SAFETY: the recorder reads and writes no memory of messages.
    unsafe { communicator.exchange(stream, Some(3), group) }
}

#[track_caller]
fn failed<T: std::fmt::Debug>(outcome: Result<T>, function: &str, why: &str) {
    let error = outcome.as_ref().expect_err(why);
    let Some(CudaError::Network { call, reason, .. } | CudaError::Driver { call, reason }) =
        CudaError::of(error)
    else {
        panic!("expected {why}: {error:?}")
    };
    assert_eq!(*call, function, "{reason}");
    assert!(reason.contains(why), "{reason}");
}

/// Calls `ncclSend` alone.
fn send(
    comm: Comm,
    stream: Stream,
    (address, count, kind): (usize, usize, c_int),
    peer: c_int,
) -> c_int {
    let (comm, stream) = (comm.0 as *mut c_void, stream.0 as *mut c_void);
    // SAFETY: the recorder reads and writes no memory of messages, and follows no handles.
    unsafe { (nccl().send)(address as *mut c_void, count, kind, peer, comm, stream) }
}

fn start() -> c_int {
    // SAFETY: the function takes no arguments.
    unsafe { (nccl().group_start)() }
}

fn end() -> c_int {
    // SAFETY: the function takes no arguments.
    unsafe { (nccl().group_end)() }
}

#[test]
fn a_group_is_recorded_as_one_on_the_stream_of_its_calls() {
    let (recorder, ranks) = ring(3);
    let (device, comm) = ranks[1];
    recorder.push_context(recorder.stream_context(device).unwrap()).unwrap();
    let own = recorder.create_stream().unwrap();
    let group = Group { sends: vec![message(2), message(0)], receives: vec![message(0)] };
    issue(comm, 3, own, &group).unwrap();
    let exchange = Exchange { comm, ring: 0, rank: 1, group };
    let call = Call { stream: own, operation: Operation::Exchange(exchange) };
    let programs = recorder.programs();
    assert_eq!(programs[1].calls, [call]);
    assert!(programs[0].calls.is_empty() && programs[2].calls.is_empty());
    assert_eq!(recorder.violations(), [""; 0]);
    assert!(!group_is_open());
}

#[test]
fn communicators_know_themselves() {
    let (_recorder, ranks) = ring(3);
    for (rank, (_, comm)) in ranks.iter().enumerate() {
        let communicator = Communicator::new(nccl(), *comm, 3).unwrap();
        assert_eq!((communicator.rank, communicator.size), (rank, 3));
    }
    failed(Communicator::new(nccl(), ranks[0].1, 4), "ncclCommCount", "of 4 ranks");
    failed(Communicator::new(nccl(), Comm(1), 4), "ncclCommUserRank", "no such communicator");
    assert_eq!(nccl().version().as_deref(), Some("2.30.7"));
}

#[test]
fn a_communicator_ends_with_its_recorder() {
    let (recorder, ranks) = ring(2);
    drop(recorder);
    failed(Communicator::new(nccl(), ranks[0].1, 2), "ncclCommUserRank", "no such communicator");
}

#[test]
fn rings_are_filled_rank_by_rank() {
    let recorder = Recorder::new();
    let device = recorder.add_device();
    let ring_of = |rank, size| {
        let comm = recorder.add_comm(rank, size, device);
        assert_eq!(send(comm, device, (0x1000, 8, 0), 0), 0);
        let calls = recorder.take().remove(0).calls;
        let [Call { operation: Operation::Exchange(Exchange { ring, .. }), .. }] = &calls[..]
        else {
            panic!("a message outside of a group is a group: {calls:?}")
        };
        *ring
    };
    let rings = [(0, 2), (1, 2), (1, 2), (0, 3), (0, 2)].map(|(rank, size)| ring_of(rank, size));
    assert_eq!(rings, [0, 0, 1, 2, 1]);
}

#[test]
fn wrong_messages_are_invalid_arguments_and_drop_their_group() {
    let (recorder, ranks) = ring(2);
    let ((device, comm), (other, _)) = (ranks[0], ranks[1]);
    let right = (0x1000, 8, 0);
    let wrong = [
        (device, right, 2, "peer must be one of 2 ranks, got 2"),
        (device, right, -1, "got -1"),
        (device, (0, 8, 0), 1, "got null"),
        (device, (0x1000, 0, 0), 1, "must have bytes"),
        (device, (0x1000, 8, 7), 1, "data type 7"),
        (other, right, 1, "a stream of the communicator's device"),
    ];
    for (stream, message, peer, why) in wrong {
        assert_eq!(start(), 0);
        assert_eq!(send(comm, device, right, 1), 0);
        assert_eq!(send(comm, stream, message, peer), 4, "{why}");
        assert!(recorder.violations().last().unwrap().contains(why), "{why}");
        assert_eq!(send(comm, device, right, 1), 0);
        assert_eq!(end(), 4, "the end of a group says what failed in it");
        assert_eq!(recorder.programs()[0].calls, []);
    }
    assert_eq!(send(comm, device, right, 1), 0);
    assert_eq!(recorder.programs()[0].calls.len(), 1, "the dropped groups leave nothing");
    let bad = Group { sends: vec![message(1), message(9)], receives: vec![message(1)] };
    failed(issue(comm, 2, device, &bad), "ncclSend", "invalid argument (code 4): peer must be");
    assert!(!group_is_open());
}

#[test]
fn a_group_goes_to_one_stream() {
    let (recorder, ranks) = ring(2);
    let (device, comm) = ranks[0];
    recorder.push_context(recorder.stream_context(device).unwrap()).unwrap();
    let own = recorder.create_stream().unwrap();
    let sends = [device, own].map(|stream| move || send(comm, stream, (0x1000, 8, 0), 1));
    assert_eq!((start(), sends[0](), sends[1](), end()), (0, 0, 0, 5));
    assert_eq!(recorder.programs()[0].calls, []);
}

#[test]
fn a_group_that_is_left_open_shows_at_the_next_call() {
    let (recorder, ranks) = ring(2);
    let (device, comm) = ranks[0];
    assert_eq!(start(), 0);
    assert!(group_is_open());
    failed(Communicator::new(nccl(), comm, 2), "ncclCommUserRank", "has begun a group and not");
    assert_eq!(start(), 5);
    // The group does not concern another thread.
    std::thread::scope(|scope| {
        let fine = scope.spawn(|| issue(comm, 2, device, &around(1, 1)));
        assert_eq!(fine.join().unwrap(), Ok(()));
    });
    assert_eq!((end(), end()), (0, 5), "no group is open at the second end");
    assert_eq!(recorder.programs()[0].calls.len(), 1);
}

#[test]
fn errors_of_a_communicator_are_found() {
    let (recorder, ranks) = ring(2);
    let (device, comm) = ranks[0];
    recorder.set_async_error(comm, 6);
    failed(issue(comm, 2, device, &around(1, 1)), "ncclCommGetAsyncError", "remote process exited");
    recorder.set_async_error(comm, 0);
    issue(comm, 2, device, &around(1, 1)).unwrap();
    assert_eq!(recorder.violations(), [""; 0]);
}

#[test]
fn a_group_in_progress_is_enqueued_when_that_is_over() {
    let (recorder, ranks) = ring(2);
    let (device, comm) = ranks[0];
    let enqueued = || recorder.programs()[0].calls.len();
    recorder.set_in_progress(comm, 2, 0);
    assert_eq!(send(comm, device, (0x1000, 8, 0), 1), 7);
    let state = || {
        let mut state = -1;
        // SAFETY: the function writes one integer, into `state`.
        assert_eq!(unsafe { (nccl().async_error)(comm.0 as *mut c_void, &raw mut state) }, 0);
        state
    };
    assert!(recorder.violations()[0].contains("is still in progress"));
    assert_eq!((state(), state(), enqueued()), (7, 7, 0));
    assert_eq!((state(), enqueued(), state()), (0, 1, 0));
    assert_eq!(recorder.violations(), [""; 0]);
    // A group that was not asked for blocks the next one.
    assert_eq!(send(comm, device, (0x1000, 8, 0), 1), 7);
    assert_eq!(send(comm, device, (0x1000, 8, 0), 1), 5);
    while state() != 0 {}
    issue(comm, 2, device, &around(1, 1)).unwrap();
    assert_eq!(enqueued(), 3);
    recorder.set_in_progress(comm, 1, 6);
    failed(issue(comm, 2, device, &around(1, 1)), "ncclGroupEnd", "remote process exited");
    assert_eq!(enqueued(), 3, "the group is dropped");
    failed(issue(comm, 2, device, &around(1, 1)), "ncclCommGetAsyncError", "remote process exited");
}

#[test]
fn calls_fail_in_turn_and_leave_nothing_behind() {
    let run = |fail: &dyn Fn(&Recorder)| {
        let (recorder, ranks) = ring(2);
        let (device, comm) = ranks[0];
        recorder.stream_context(device).unwrap();
        fail(&recorder);
        let outcome = issue(comm, 2, device, &around(1, 1));
        assert!(!group_is_open());
        assert_eq!(recorder.violations(), [""; 0]);
        (outcome, recorder.calls().split_off(1), recorder.programs()[0].calls.len())
    };
    let (outcome, calls, enqueued) = run(&|_| ());
    assert_eq!((outcome, enqueued), (Ok(()), 1));
    let expected = [
        "ncclCommUserRank",
        "ncclCommCount",
        "ncclCommGetAsyncError",
        "ncclGroupStart",
        "ncclSend",
        "ncclRecv",
        "ncclGroupEnd",
    ];
    assert_eq!(calls, expected);
    for (n, name) in expected.into_iter().enumerate() {
        let (outcome, made, enqueued) = run(&|recorder| recorder.refuse(Some(name)));
        failed(outcome, name, "unhandled system error (code 2): it was made to fail");
        assert_eq!((made[n], enqueued), (name, 0));
        if ["ncclGroupStart", "ncclSend", "ncclRecv"].contains(&name) {
            let (outcome, _, enqueued) = run(&|recorder| recorder.fail_at(n));
            assert_eq!((outcome, enqueued), (Ok(()), 1), "the dropped group is issued once more");
        }
    }
}
