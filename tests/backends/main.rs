//! Tests of the choice among backends, with a library that serves a part of the operations.

#[path = "../common/mod.rs"]
mod common;
mod served;

use burst_attention::Result;
use burst_attention::cuda::call::Call;
use burst_attention::problem::{Features, Order, Pass, Problem, Travels};
use burst_attention::schedule::Family;
use burst_attention_kernels::backend::{
    BACKENDS, Backend, Choice, Computation, Kernels, LibraryCall, Reason, Refusal, tile,
};
use burst_attention_kernels::instances::Target;
use burst_attention_kernels::launch::{Features as LaunchFeatures, Forward, Rows, TileOperation};
use burst_attention_recorder::{Operation, Program, check, replay};
use common::devices::{Devices, in_bfloat16};
use common::{problem, problems};

/// A library that computes forward tiles without features. It touches the arrays of the kernel.
const LIBRARY: Backend = Backend {
    name: "library",
    serves: |operation, _| match operation {
        TileOperation::Forward(tile) if tile.features == LaunchFeatures::default() => Ok(()),
        TileOperation::Forward(_) => Err(Reason("features are not served".into())),
        _ => Err(Reason("only the forward pass is served".into())),
    },
    needs: |_, _| None,
    cost: |_, _| None,
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
    let refused = |choice: &Choice, reason| {
        assert_eq!(choice.backend, Some("tile"), "{choice}");
        assert_eq!(choice.refusals, [("library", Refusal::because(reason))], "{choice}");
    };
    for (choice, _) in choices.iter() {
        assert_eq!(choice.operation, "forward");
        refused(&choice, "features are not served");
    }
    assert!(devices.choices(&featured).expect("it is ready").is_empty(), "once");
    let backward = call(problem(2, 6), Pass::Backward);
    let choices = devices.choices(&backward).expect("nothing refuses");
    let mut choices: Vec<_> = choices.iter().map(|(choice, _)| choice).collect();
    let gradients = choices.remove(0);
    assert_eq!((gradients.operation, gradients.backend), ("gradients", Some("two operations")));
    let expected = "one operation in a fixed order: library: only the forward pass is served, \
                    tile: its fused kernel adds to dq in any order";
    assert!(gradients.to_string().contains(expected), "{gradients}");
    choices.iter().for_each(|choice| refused(choice, "only the forward pass is served"));
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
