//! Tests of failures: each call of the driver and of NCCL fails in turn, on one rank. The rank raises
//! the error, and its peers do not wait for it for ever.

mod calls;

use burst_attention::cuda::nccl::{Group, Message};
use burst_attention::{Pass, Travels};
use burst_attention_ffi::cuda::Stage;
use burst_attention_ffi::sys;
use burst_attention_recorder::{
    self as recorder, Exchange, Operation, Program, check, group_is_open,
};
use calls::{Handlers, backward, double, forward, rank, stages};

#[test]
fn every_call_that_fails_becomes_an_error_and_the_next_run_works() {
    let double = double(Pass::Backward, Some(Travels::Keys));
    for call in [forward(2), backward(Travels::Keys), backward(Travels::Queries), double] {
        let ranks = call.problem.world_size;
        let whole = Handlers::new(ranks);
        let rank_of = |handlers: &Handlers| {
            let rank = rank(handlers, &call, 0);
            assert_eq!(rank.instantiate(call.pass), Ok(()));
            rank
        };
        let rank = rank_of(&whole);
        let mut stage = |stage| assert_eq!(rank.stage(whole.platform, stage), Ok(()));
        [Stage::Prepare, Stage::Initialize].into_iter().for_each(&mut stage);
        let initialized = whole.recorder.calls().len();
        stage(Stage::Execute);
        let names = whole.recorder.calls();
        assert!(names.len() > 30, "driver and NCCL are called often: {names:?}");
        for (n, name) in names.iter().enumerate() {
            let handlers = Handlers::new(ranks);
            let rank = rank_of(&handlers);
            handlers.recorder.fail_at(n);
            let outcome = stages(&handlers, &rank);
            assert!(!group_is_open(), "{name}, call {n}, leaves a group open");
            assert_eq!(handlers.recorder.pushed(), 0, "{name}, call {n}, leaves its context");
            if ["ncclGroupStart", "ncclSend", "ncclRecv"].contains(name) {
                assert_eq!(outcome, Ok(()), "NCCL drops the group, which is issued once more");
                continue;
            }
            let Err((code, message)) = outcome else { panic!("{name}, call {n}, failed unseen") };
            assert_eq!(code, sys::XLA_FFI_Error_Code_INTERNAL, "{message}");
            assert!(message.contains(name), "call {n}: {name} in {message}");
            assert!(message.contains("ring over mesh axis \"context\""), "{message}");
            let has_no_rank = ["cuStreamGetCtx", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"];
            if !name.starts_with("ncclComm") && !has_no_rank.contains(name) {
                assert!(message.contains(&format!("rank 0 of {ranks}")), "{message}");
            }
            // Everything that was enqueued is ordered before the next work of XLA's stream. The
            // check skips the initialize stage, whose scratch memory is not XLA's.
            let program = &handlers.recorder.take()[0];
            if name.starts_with("cuEvent") || *name == "cuStreamWaitEvent" {
                // The host waits instead, which a program does not show.
                let waits = handlers.recorder.calls().split_off(n);
                assert!(n < initialized || waits.contains(&"cuStreamSynchronize"), "{waits:?}");
            } else if let (true, Err(race)) = (n >= initialized, check(program)) {
                panic!("after {name}, call {n}: {race}");
            }
            assert_eq!(stages(&handlers, &rank), Ok(()), "after {name}, call {n}");
            assert_eq!(handlers.recorder.created(), whole.recorder.created(), "{name}, call {n}");
        }
    }
}

/// Returns the calls of a recorder after the first `n` calls.
fn calls_after(handlers: &Handlers, n: usize) -> Vec<&'static str> {
    handlers.recorder.calls().split_off(n)
}

/// Returns the exchanges of a program.
fn exchanges(program: &Program) -> Vec<Exchange> {
    let exchange = |call: &recorder::Call| match &call.operation {
        Operation::Exchange(exchange) => Some(exchange.clone()),
        _ => None,
    };
    program.calls.iter().filter_map(exchange).collect()
}

#[test]
fn exchanges_go_on_after_a_failure_and_launches_do_not() {
    let double = double(Pass::Backward, Some(Travels::Keys));
    for call in [forward(2), backward(Travels::Keys), backward(Travels::Queries), double] {
        let handlers = Handlers::new(call.problem.world_size);
        let rank = rank(&handlers, &call, 0);
        assert_eq!(rank.all(handlers.platform, call.pass), Ok(()));
        handlers.recorder.take();
        let before = handlers.recorder.calls().len();
        assert_eq!(rank.stage(handlers.platform, Stage::Execute), Ok(()));
        let names = calls_after(&handlers, before);
        let all = exchanges(&handlers.recorder.take()[0]);
        let of_device = |name: &&str| name.starts_with("cuL") || name.starts_with("cuM");
        let of_events = |name: &&str| ["cuEventRecord", "cuStreamWaitEvent"].contains(name);
        for (n, name) in names.iter().enumerate() {
            if !of_device(name) && !of_events(name) {
                continue;
            }
            let before = handlers.recorder.calls().len();
            handlers.recorder.fail_at(n);
            let failed = rank.stage(handlers.platform, Stage::Execute);
            assert!(failed.is_err_and(|(_, message)| message.contains(", step ")), "{name} {n}");
            let program = &handlers.recorder.take()[0];
            assert_eq!(exchanges(program), all, "{name} {n}");
            let after = calls_after(&handlers, before + n + 1);
            assert_eq!(after.iter().filter(|name| of_device(name)).count(), 0, "{after:?}");
        }
    }
}

#[test]
fn a_rank_that_is_not_ready_contacts_its_peers_and_tells_them() {
    let call = forward(4);
    let whole = Handlers::new(4);
    let rank_of = |handlers: &Handlers, number| {
        let rank = rank(handlers, &call, number);
        assert_eq!(rank.instantiate(call.pass), Ok(()));
        assert_eq!(rank.stage(handlers.platform, Stage::Prepare), Ok(()));
        rank
    };
    let ready = rank_of(&whole, 0);
    assert_eq!(ready.stage(whole.platform, Stage::Initialize), Ok(()));
    let names = whole.recorder.calls();
    let contact = names.iter().position(|name| *name == "ncclGroupStart").expect("a contact");
    let made =
        ["cuMemHostAlloc", "cuStreamCreateWithPriority", "cuEventCreate", "cuModuleLoadData"];
    for name in made {
        let last = names.iter().rposition(|found| *found == name);
        assert!(last.is_some_and(|last| last < contact), "{name} comes before the contact");
    }
    let connected = exchanges(&whole.recorder.take()[0]);
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
        let handlers = Handlers::new(4);
        let rank = rank_of(&handlers, 0);
        handlers.recorder.fail_at(n);
        assert_eq!(
            rank.stage(handlers.platform, Stage::Initialize),
            Ok(()),
            "{name}: execute says"
        );
        let contacts = exchanges(&handlers.recorder.take()[0]).len();
        assert_eq!((contacts, handlers.recorder.written()[0].1 == 1), (3, false), "{name}");
        let (_, message) = rank.stage(handlers.platform, Stage::Execute).expect_err("not ready");
        assert!(message.contains(name) && message.contains("rank 0 of 4: "), "{message}");
        assert_eq!(handlers.recorder.take()[0].calls, [], "the peers do not run the call either");
        assert_eq!(stages(&handlers, &rank), Ok(()), "after {name}");
    }
}

#[test]
fn a_rank_that_is_ready_names_the_ranks_that_are_not() {
    let (handlers, call) = (Handlers::new(4), forward(4));
    let rank = rank(&handlers, &call, 2);
    assert_eq!(rank.instantiate(call.pass), Ok(()));
    assert_eq!(rank.stage(handlers.platform, Stage::Prepare), Ok(()));
    // The answers of ranks 1, 0 and 3.
    handlers.recorder.answer(vec![1, 0, 255]);
    assert_eq!(rank.stage(handlers.platform, Stage::Initialize), Ok(()));
    handlers.recorder.take();
    let (_, message) = rank.stage(handlers.platform, Stage::Execute).expect_err("not ready");
    assert!(message.contains("rank 2 of 4 is ready, but ranks [0, 3] are not"), "{message}");
    assert_eq!(handlers.recorder.take()[2].calls, []);
    // The next run asks again, and then all ranks know that all are ready.
    assert_eq!(stages(&handlers, &rank), Ok(()));
    assert_eq!(rank.stage(handlers.platform, Stage::Initialize), Ok(()));
    assert_eq!(exchanges(&handlers.recorder.take()[2]).len(), 3, "only those of the run");
}

#[test]
fn a_failure_before_a_run_that_the_peers_make_too_does_not_keep_this_rank_from_it() {
    let (handlers, call) = (Handlers::new(2), forward(2));
    let rank = rank(&handlers, &call, 0);
    assert_eq!(rank.all(handlers.platform, Pass::Forward), Ok(()));
    let whole = handlers.recorder.take();
    handlers.recorder.fail_at(0);
    assert_eq!(rank.stage(handlers.platform, Stage::Initialize), Ok(()));
    let failed = rank.stage(handlers.platform, Stage::Execute);
    assert!(failed.is_err_and(|(_, message)| message.contains("ncclCommUserRank")));
    let made = exchanges(&handlers.recorder.take()[0]);
    assert!(exchanges(&whole[0]).ends_with(&made) && !made.is_empty());
}

#[test]
fn a_group_that_nccl_refuses_twice_is_an_error_with_its_peer() {
    let (handlers, call) = (Handlers::new(2), forward(2));
    let rank = rank(&handlers, &call, 0);
    assert_eq!(rank.all(handlers.platform, Pass::Forward), Ok(()));
    for name in ["ncclSend", "ncclRecv"] {
        handlers.recorder.refuse(Some(name));
        let failed = rank.stage(handlers.platform, Stage::Execute);
        let (_, message) = failed.expect_err("refused");
        assert!(message.contains(name) && message.contains("rank 0 of 2, step "), "{message}");
        assert!(message.contains("peer rank 1"), "{message}");
        handlers.recorder.refuse(None);
        assert_eq!(stages(&handlers, &rank), Ok(()));
    }
}
