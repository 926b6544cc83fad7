//! Tests of failures: each call of the driver and of NCCL fails in turn, on one rank. The rank raises
//! the error, and its peers do not wait for it for ever.

use burst_attention::cuda::nccl::{Group, Message};
use burst_attention_ffi::cuda::Stage;
use burst_attention_ffi::sys;
use burst_attention_recorder::{Exchange, Operation, Program, check};

use crate::calls::{Device, RankCall, forward, various};

/// Returns the rank's call before its stages.
fn instantiated(device: &Device, call: &burst_attention::cuda::call::Call) -> RankCall {
    let rank = device.rank(call);
    assert_eq!(rank.instantiate(call.pass), Ok(()));
    rank
}

#[test]
fn every_call_that_fails_becomes_an_error_and_the_next_run_works() {
    for call in various() {
        let ranks = call.problem.world_size;
        let whole = Device::new(0, ranks);
        let rank = instantiated(&whole, &call);
        let mut stage = |stage| assert_eq!(rank.stage(whole.platform, stage), Ok(()));
        [Stage::Prepare, Stage::Initialize].into_iter().for_each(&mut stage);
        let initialized = whole.recorder.calls().len();
        stage(Stage::Execute);
        let names = whole.recorder.calls();
        assert!(names.len() > 30, "driver and NCCL are called often: {names:?}");
        for (n, name) in names.iter().enumerate() {
            let device = Device::new(0, ranks);
            let rank = instantiated(&device, &call);
            device.recorder.fail_at(n);
            let outcome = device.stages(&rank);
            let expected = (0, false);
            assert_eq!(device.recorder.left_open(), expected, "{name}, call {n}: context, group");
            if ["ncclGroupStart", "ncclSend", "ncclRecv"].contains(name) {
                assert_eq!(outcome, Ok(()), "NCCL drops the group, which is issued once more");
                continue;
            }
            let Err((code, message)) = outcome else { panic!("{name}, call {n}, failed unseen") };
            device.told_of(&message);
            assert_eq!(code, sys::XLA_FFI_Error_Code_INTERNAL, "{message}");
            assert!(message.contains(name), "call {n}: {name} in {message}");
            assert!(message.contains("ring over mesh axis \"context\""), "{message}");
            let has_no_rank = ["cuStreamGetCtx", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"];
            if !name.starts_with("ncclComm") && !has_no_rank.contains(name) {
                assert!(message.contains(&format!("rank 0 of {ranks}")), "{message}");
            }
            // Everything that was enqueued is ordered before the next work of XLA's stream. The
            // check skips the initialize stage, whose scratch memory is not XLA's.
            let program = device.recorder.take();
            if name.starts_with("cuEvent") || *name == "cuStreamWaitEvent" {
                // The host waits instead, which a program does not show.
                let waits = device.recorder.calls().split_off(n);
                assert!(n < initialized || waits.contains(&"cuStreamSynchronize"), "{waits:?}");
            } else if let (true, Err(race)) = (n >= initialized, check(&program)) {
                panic!("after {name}, call {n}: {race}");
            }
            assert_eq!(device.stages(&rank), Ok(()), "after {name}, call {n}");
            assert_eq!(device.recorder.made(), whole.recorder.made(), "{name}, call {n}");
        }
    }
}

/// Returns the exchanges of a program.
fn exchanges(program: &Program) -> Vec<Exchange> {
    let exchanges = program.calls.iter().filter_map(|call| match &call.operation {
        Operation::Exchange(exchange) => Some(exchange.clone()),
        _ => None,
    });
    exchanges.collect()
}

#[test]
fn exchanges_go_on_after_a_failure_and_launches_do_not() {
    for call in various() {
        let device = Device::new(0, call.problem.world_size);
        let rank = device.after_a_run(&call);
        let calls_after = |n: usize| device.recorder.calls().split_off(n);
        let before = device.recorder.calls().len();
        assert_eq!(rank.stage(device.platform, Stage::Execute), Ok(()));
        let (names, all) = (calls_after(before), exchanges(&device.recorder.take()));
        let of_device = |name: &&str| name.starts_with("cuL") || name.starts_with("cuM");
        let of_events = |name: &&str| ["cuEventRecord", "cuStreamWaitEvent"].contains(name);
        for (n, name) in names.iter().enumerate() {
            if !of_device(name) && !of_events(name) {
                continue;
            }
            let before = device.recorder.calls().len();
            device.recorder.fail_at(n);
            let failed = rank.stage(device.platform, Stage::Execute);
            let (_, message) = failed.expect_err("failed");
            device.told_of(&message);
            assert!(message.contains(", step "), "{name} {n}: {message}");
            assert_eq!(exchanges(&device.recorder.take()), all, "{name} {n}");
            let after = calls_after(before + n + 1);
            assert_eq!(after.iter().filter(|name| of_device(name)).count(), 0, "{after:?}");
        }
    }
}

#[test]
fn a_rank_that_is_not_ready_contacts_its_peers_and_tells_them() {
    let call = forward(4);
    let prepared = |device: &Device| {
        let rank = instantiated(device, &call);
        assert_eq!(rank.stage(device.platform, Stage::Prepare), Ok(()));
        rank
    };
    let whole = Device::new(0, 4);
    let ready = prepared(&whole);
    assert_eq!(ready.stage(whole.platform, Stage::Initialize), Ok(()));
    let names = whole.recorder.calls();
    let contact = names.iter().position(|name| *name == "ncclGroupStart").expect("a contact");
    let made =
        ["cuMemHostAlloc", "cuStreamCreateWithPriority", "cuEventCreate", "cuModuleLoadData"];
    for name in made {
        let last = names.iter().rposition(|found| *found == name);
        assert!(last.is_some_and(|last| last < contact), "{name} comes before the contact");
    }
    let connected = exchanges(&whole.recorder.take());
    let [(word, byte)] = whole.recorder.written()[..] else { panic!("one byte is written") };
    assert_eq!(byte, 1);
    // The answer of each rank comes from rank 3 and goes on to rank 1.
    for (distance, Exchange { group, .. }) in connected[..3].iter().enumerate() {
        let message =
            |distance: usize, peer| Message { address: word + distance as u64, bytes: 1, peer };
        let [sends, receives] =
            [message(distance, 1), message(distance + 1, 3)].map(|one| vec![one]);
        assert_eq!(*group, Group { sends, receives });
    }

    let first = names.iter().position(|name| *name == "cuMemHostAlloc").expect("memory");
    for (n, name) in names.iter().enumerate().take(contact).skip(first) {
        let device = Device::new(0, 4);
        let rank = prepared(&device);
        device.recorder.fail_at(n);
        let outcome = rank.stage(device.platform, Stage::Initialize);
        assert_eq!(outcome, Ok(()), "{name}: execute says");
        assert_eq!(exchanges(&device.recorder.take()).len(), 3, "{name}");
        assert_ne!(device.recorder.written()[0].1, 1, "{name}");
        let (_, message) = rank.stage(device.platform, Stage::Execute).expect_err("not ready");
        device.told_of(&message);
        assert!(message.contains(name) && message.contains("rank 0 of 4: "), "{message}");
        assert_eq!(device.recorder.take().calls, [], "the peers do not run the call either");
        assert_eq!(device.stages(&rank), Ok(()), "after {name}");
    }
}

#[test]
fn a_rank_that_is_ready_names_the_ranks_that_are_not() {
    let (device, call) = (Device::new(2, 4), forward(4));
    let rank = instantiated(&device, &call);
    assert_eq!(rank.stage(device.platform, Stage::Prepare), Ok(()));
    // The answers of ranks 1, 0 and 3.
    device.recorder.answer(vec![1, 0, 255]);
    assert_eq!(rank.stage(device.platform, Stage::Initialize), Ok(()));
    device.recorder.take();
    let (_, message) = rank.stage(device.platform, Stage::Execute).expect_err("not ready");
    assert!(message.contains("rank 2 of 4 is ready, but ranks [0, 3] are not"), "{message}");
    assert_eq!(device.recorder.take().calls, []);
    // The next run asks again, and then all ranks know that all are ready.
    assert_eq!(device.stages(&rank), Ok(()));
    assert_eq!(rank.stage(device.platform, Stage::Initialize), Ok(()));
    assert_eq!(exchanges(&device.recorder.take()).len(), 3, "only those of the run");
}

#[test]
fn a_failure_before_a_run_that_the_peers_make_too_does_not_keep_this_rank_from_it() {
    let (device, call) = (Device::new(0, 2), forward(2));
    let rank = device.after_a_run(&call);
    assert_eq!(rank.stage(device.platform, Stage::Execute), Ok(()));
    let whole = exchanges(&device.recorder.take());
    device.recorder.fail_at(0);
    assert_eq!(rank.stage(device.platform, Stage::Initialize), Ok(()));
    let (_, message) = rank.stage(device.platform, Stage::Execute).expect_err("failed");
    device.told_of(&message);
    assert!(message.contains("ncclCommUserRank"), "{message}");
    let made = exchanges(&device.recorder.take());
    assert!(made == whole && !made.is_empty());
}

#[test]
fn a_group_that_nccl_refuses_twice_is_an_error_with_its_peer() {
    let (device, call) = (Device::new(0, 2), forward(2));
    let rank = device.after_a_run(&call);
    for name in ["ncclSend", "ncclRecv"] {
        device.recorder.refuse(Some(name));
        let failed = rank.stage(device.platform, Stage::Execute);
        let (_, message) = failed.expect_err("refused");
        device.told_of(&message);
        assert!(message.contains("rank 0 of 2, step "), "{message}");
        let reason = "unhandled system error (code 2): it was made to fail";
        let expected = format!("peer rank 1: {name} failed: {reason}");
        assert!(message.contains(&expected), "{message}");
        device.recorder.refuse(None);
        assert_eq!(device.stages(&rank), Ok(()));
    }
}
