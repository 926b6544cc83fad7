//! Tests of the choice among backends, with a library that serves a part of the operations.

mod common;

use burst_attention::Result;
use burst_attention::cuda::call::Call;
use burst_attention::problem::{Features, Order, Pass, Problem, Travels};
use burst_attention::schedule::Family;
use burst_attention::{Layout, Window};
use burst_attention_kernels::backend::{
    BACKENDS, Backend, Computation, Kernels, LibraryCall, Reason, tile,
};
use burst_attention_kernels::instances::Target;
use burst_attention_kernels::launch::TileOperation;
use burst_attention_kernels::launch::{Features as LaunchFeatures, Forward, Rows};
use burst_attention_recorder::{self as recorder, Operation, Program, check, replay};
use common::devices::{Devices, in_bfloat16};
use common::needs::families_with_inner;
use common::{problem, problems};

/// A library that computes forward tiles without features. It touches the arrays of the kernel.
const LIBRARY: Backend = Backend {
    name: "library",
    serves: |operation, _| match operation {
        TileOperation::Forward(tile) if tile.features == LaunchFeatures::default() => Ok(()),
        TileOperation::Forward(_) => Err(Reason("features are not served".into())),
        _ => Err(Reason("only the forward pass is served".into())),
    },
    scratch_bytes: |_, _| 0,
    lower: |operation, target, _| {
        let TileOperation::Forward(tile) = operation else { unreachable!("it is not served") };
        let call = |launch: burst_attention_kernels::launch::Launch| {
            let arrays = launch.footprint().into_iter().zip(0..);
            Computation::Library(LibraryCall {
                library: "recorder",
                plan: format!("{:?}, first {}, last {}", tile.rectangle, tile.first, tile.last),
                arrays: arrays.map(|(array, number)| (number, array)).collect(),
            })
        };
        Ok(operation.launches(target)?.into_iter().map(call).collect())
    },
};
static BOTH: &[Backend] = &[LIBRARY, tile::BACKEND];
static NONE: &[Backend] = &[LIBRARY];
static TILE: &[Backend] = &[tile::BACKEND];

fn call(problem: Problem, pass: Pass) -> Call {
    let travels = (pass == Pass::Backward).then_some(Travels::Keys);
    let problem = in_bfloat16(problem);
    Call { travels, kernels: Kernels::Cudnn, ..Call::new(problem, Family::Ring, pass) }
}

fn count(program: &Program, wanted: fn(&Operation) -> bool) -> usize {
    program.calls.iter().filter(|call| wanted(&call.operation)).count()
}

const IS_LIBRARY: fn(&Operation) -> bool = |operation| matches!(operation, Operation::Library(_));
const IS_FORWARD: fn(&Operation) -> bool = |operation| match operation {
    Operation::Launch(launch) => launch.code.to_string().starts_with("attention_fwd"),
    _ => false,
};
const IS_EXCHANGE: fn(&Operation) -> bool = |operation| matches!(operation, Operation::Exchange(_));

#[test]
fn each_operation_goes_to_the_first_backend_that_serves_it() {
    for problem in problems(1..=8, &[2, 6]) {
        let call = call(problem, Pass::Forward);
        let (alone, both) = (
            Devices::with_backends(call.problem.world_size, TILE).programs(&call),
            Devices::with_backends(call.problem.world_size, BOTH).programs(&call),
        );
        assert_eq!(replay(&both), Ok(()), "{call:?}");
        for (alone, both) in alone.iter().zip(&both) {
            check(both).unwrap_or_else(|race| panic!("{call:?}: {race}\n{both}"));
            assert_eq!(count(both, IS_LIBRARY), count(alone, IS_FORWARD), "{call:?}");
            assert_eq!(count(both, IS_FORWARD), 0);
            assert_eq!(both.calls.len(), alone.calls.len(), "nothing else changes: {call:?}");
        }
    }
}

#[test]
fn what_a_library_refuses_is_as_if_there_were_none() {
    let features = Features { segments: true, slopes: true, ..Features::default() };
    let featured = Problem { features, ..problem(4, 6) };
    for call in [call(featured, Pass::Forward), call(problem(4, 6), Pass::Backward)] {
        let computed = |backends| {
            let programs = Devices::with_backends(4, backends).programs(&call);
            let calls = programs.into_iter().flat_map(|program| program.calls);
            let operations = calls.map(|call| call.operation);
            operations.filter(|one| !IS_EXCHANGE(one)).collect::<Vec<_>>()
        };
        assert!(computed(BOTH) == computed(TILE), "{call:?}");
    }
}

#[test]
fn the_choices_of_a_call_name_every_reason() {
    let features = Features { segments: true, ..Features::default() };
    let featured = call(Problem { features, ..problem(2, 6) }, Pass::Forward);
    let devices = Devices::with_backends(2, BOTH);
    let choices = devices.choices(&featured).expect("nothing refuses");
    assert_eq!(choices.to_string(), "forward by tile (library: features are not served)");
    assert!(devices.choices(&featured).expect("it is ready").is_empty(), "once");
    let backward = call(problem(2, 6), Pass::Backward);
    for (choice, _) in devices.choices(&backward).expect("nothing refuses").iter() {
        let expected = "by tile (library: only the forward pass is served)";
        assert!(choice.to_string().ends_with(expected), "{choice}");
    }
    let error = Devices::with_backends(2, NONE).choices(&backward).expect_err("nobody serves");
    let expected = "no backend computes an operation: delta by none (library: only the forward \
                    pass is served)";
    assert!(error.to_string().contains(expected), "{error}");
}

#[test]
fn a_library_that_fails_on_one_rank_keeps_no_peer_waiting() -> Result<()> {
    let call = call(problem(4, 6), Pass::Forward);
    let devices = Devices::with_backends(4, BOTH);
    devices.recorder(0).refuse(Some("prepare"));
    let error = devices.run_rank(&call, 0).expect_err("the plan is refused").to_string();
    assert!(error.contains("rank 0 of 4: prepare failed"), "{error}");
    let told = devices.recorder(0).written();
    assert_ne!(told[0].1, 1, "it tells its peers that it is not ready");
    devices.recorder(0).refuse(None);
    devices.run_rank(&call, 0)?;
    let whole = devices.recorder(0).take();
    devices.recorder(0).refuse(Some("enqueue"));
    let error = devices.run_rank(&call, 0).expect_err("the call is refused").to_string();
    assert!(error.contains("rank 0 of 4, step 0: enqueue failed"), "{error}");
    let failed = devices.recorder(0).take();
    assert_eq!(count(&failed, IS_EXCHANGE), count(&whole, IS_EXCHANGE));
    assert_eq!(count(&failed, IS_LIBRARY), 0);
    Ok(())
}

#[test]
fn a_call_of_a_library_that_the_executor_lacks_is_an_error() {
    let devices = Devices::with_backends(1, BOTH).without_libraries(BOTH);
    let error = devices.choices(&call(problem(1, 6), Pass::Forward)).expect_err("no library");
    assert!(error.to_string().contains("recorder is missing"), "{error}");
}

#[test]
fn a_choice_does_not_depend_on_addresses() {
    let devices = Devices::new(1);
    for pass in [Pass::Forward, Pass::Backward] {
        for order in [Order::Fixed, Order::Any] {
            let call = Call { backward_order: order, ..call(problem(1, 6), pass) };
            devices.choices(&call).expect("nothing refuses");
            // The run has other addresses than the preparation. It fails if it lacks an object.
            devices.run_rank(&call, 0).expect("the objects of the preparation are enough");
        }
    }
    let at = |address| Rows { address, batch_stride: 0 };
    let rectangle = burst_attention_kernels::launch::Rectangle {
        batch: 1,
        q_len: 64,
        kv_len: 64,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        value_dim: 64,
        element: burst_attention_kernels::instances::Element::Bf16,
        lower: i64::MIN,
        upper: 0,
        softmax_scale: 1.0,
    };
    for backend in BACKENDS {
        for target in Target::ALL {
            let choice = |address| {
                let rows = Some(at(address));
                let tile = Forward {
                    rectangle,
                    features: LaunchFeatures::default(),
                    q: at(address),
                    k: at(address),
                    v: at(address),
                    acc: rows,
                    row_max: None,
                    row_sum: None,
                    o: rows,
                    lse: rows,
                    first: true,
                    last: true,
                };
                (backend.serves)(&tile.into(), target)
            };
            assert_eq!(choice(1 << 20), choice(1 << 30), "{}", backend.name);
        }
    }
}

/// Returns a call whose tiles cuDNN serves.
fn of_cudnn(problem: Problem, pass: Pass, family: Family) -> Call {
    let problem = Problem { head_dim: 64, value_dim: 64, ..in_bfloat16(problem) };
    let travels = (pass == Pass::Backward).then_some(Travels::Keys);
    let (backward_order, kernels, lse_gradient) = (Order::Any, Kernels::Cudnn, false);
    Call { travels, backward_order, kernels, lse_gradient, ..Call::new(problem, family, pass) }
}

#[test]
fn rings_of_cudnn_and_of_kernels_have_no_race_and_end() {
    let mut served = 0;
    for problem in problems(1..=8, &[2, 6]) {
        for pass in [Pass::Forward, Pass::Backward] {
            for family in families_with_inner(problem.world_size, 2) {
                let call = of_cudnn(problem.clone(), pass, family);
                let programs = Devices::new(call.problem.world_size).programs(&call);
                assert_eq!(replay(&programs), Ok(()), "{call:?}");
                for program in &programs {
                    check(program).unwrap_or_else(|race| panic!("{call:?}: {race}\n{program}"));
                    served += count(program, IS_LIBRARY);
                }
                let all = Devices::new(1).virtual_program(&call);
                check(&all).unwrap_or_else(|race| panic!("{call:?}: {race}\n{all}"));
            }
        }
    }
    assert!(served > 1000, "{served}");
}

/// Returns what a rank computes, in order.
fn names(call: &Call, rank: usize) -> Vec<&'static str> {
    let calls = Devices::new(call.problem.world_size).programs(call).swap_remove(rank).calls;
    let name = |call: &recorder::Call| match &call.operation {
        Operation::Library(_) => Some("cudnn"),
        Operation::Launch(launch) => Some(launch.instance().kernel.name()),
        _ => None,
    };
    calls.iter().filter_map(name).collect()
}

/// Alone, as after an all-to-all of heads, a rank meets all keys at once in every layout. The first
/// of causal shards in order meets no keys but its own, in every family. Chunks that `all_gather`
/// brings are tiles of their own.
#[test]
fn cudnn_writes_the_results_of_queries_that_meet_all_their_keys_at_once() {
    for layout in [Layout::Contiguous, Layout::Zigzag, Layout::Striped] {
        for window in [Window::FULL, Window::CAUSAL] {
            let alone = Problem { layout, window, ..problem(1, 8) };
            let call = of_cudnn(alone, Pass::Forward, Family::Ring);
            assert_eq!(names(&call, 0), ["cudnn"], "{call:?}");
        }
    }
    let in_order = Problem { layout: Layout::Contiguous, window: Window::CAUSAL, ..problem(4, 8) };
    for family in [Family::Ring, Family::AllGather, Family::DoubleRing { inner: 2 }] {
        let call = of_cudnn(in_order.clone(), Pass::Forward, family);
        assert_eq!(names(&call, 0), ["cudnn"], "{call:?}");
        let last = names(&call, 3);
        assert_eq!(last.iter().filter(|name| **name == "fold_result").count(), 4, "{last:?}");
    }
}

#[test]
fn parts_of_a_ring_are_folded_and_whole_results_are_not() {
    let names = |world_size, pass| {
        let problem = Problem { layout: Layout::Contiguous, ..problem(world_size, 8) };
        names(&of_cudnn(Problem { window: Window::FULL, ..problem }, pass, Family::Ring), 0)
    };
    assert_eq!(names(1, Pass::Forward), ["cudnn"]);
    assert_eq!(names(2, Pass::Forward), ["cudnn", "fold_result", "cudnn", "fold_result"]);
    assert_eq!(names(1, Pass::Backward), ["delta", "cudnn", "accumulate", "cast"]);
    let two = names(2, Pass::Backward);
    assert_eq!(two.iter().filter(|name| **name == "cudnn").count(), 2, "{two:?}");
    assert_eq!(two.iter().filter(|name| **name == "add_gradient").count(), 4, "{two:?}");
}

/// Gradients of keys arrive in the last two steps of four, while cuDNN computes the next part. Only
/// the kernel that adds it waits.
#[test]
fn cudnn_computes_while_sums_arrive() {
    let problem = Problem { window: Window::FULL, ..problem(4, 8) };
    let call = of_cudnn(problem, Pass::Backward, Family::Ring);
    for program in Devices::new(4).programs(&call) {
        let is_library = |call: &&recorder::Call| IS_LIBRARY(&call.operation);
        let compute = program.calls.iter().find(is_library).expect("cuDNN computes").stream;
        let of_compute = program.calls.iter().filter(|call| call.stream == compute);
        let names = of_compute.filter_map(|call| match &call.operation {
            Operation::Library(_) => Some("cudnn"),
            Operation::Launch(launch) => Some(launch.instance().kernel.name()),
            Operation::Wait(_) => Some("wait"),
            _ => None,
        });
        let names = names.collect::<Vec<_>>();
        let hidden = ["cudnn", "accumulate", "wait", "add_gradient"];
        let steps = names.windows(hidden.len()).filter(|names| *names == hidden).count();
        assert_eq!(steps, 2, "{names:?}");
    }
}

#[test]
fn without_leave_cudnn_computes_nothing() {
    for pass in [Pass::Forward, Pass::Backward] {
        let call = of_cudnn(problem(4, 6), pass, Family::Ring);
        let own = Call { kernels: Kernels::Tile, ..call };
        for program in Devices::new(4).programs(&own) {
            assert_eq!(count(&program, IS_LIBRARY), 0);
        }
    }
}

#[test]
fn what_cudnn_refuses_says_why() {
    let refusals = |call: &Call| Devices::new(2).choices(call).expect("kernels serve").to_string();
    let call = |pass| of_cudnn(problem(2, 6), pass, Family::Ring);
    let segments = Features { segments: true, ..Features::default() };
    let featured = Call {
        problem: Problem { features: segments, ..call(Pass::Forward).problem },
        ..call(Pass::Forward)
    };
    let expected = "forward by tile (cudnn: it serves no feature but a causal mask)";
    assert!(refusals(&featured).contains(expected), "{}", refusals(&featured));
    let with_gradient = Call { lse_gradient: true, ..call(Pass::Backward) };
    let expected = "key_grads by tile (cudnn: it needs the results of the queries, and a \
                    log-sum-exp without gradient)";
    assert!(refusals(&with_gradient).contains(expected), "{}", refusals(&with_gradient));
    let fixed = Call { backward_order: Order::Fixed, ..call(Pass::Backward) };
    let expected = "cudnn: it computes all gradients at once and in any order";
    assert!(refusals(&fixed).contains(expected), "{}", refusals(&fixed));
}
