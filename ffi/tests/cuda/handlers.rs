//! Tests of what the handlers ask of the runtime, and what they refuse.

use burst_attention::cuda::call::Call;
use burst_attention::{Pass, Travels};
use burst_attention_ffi::cuda::Stage;
use burst_attention_ffi::sys;
use burst_attention_test_frames::FakeAttribute;
use burst_attention_test_frames::gpu::Request;

use crate::calls::{COMMUNICATION_ID, Device, RankCall, backward, double, forward};

#[test]
fn the_communicators_have_numbers_of_the_library() {
    let requests = |call: Call| -> Vec<Request> {
        let device = Device::new(0, call.problem.world_size);
        let rank = device.after_a_run(&call);
        rank.runtime.context.gpu.as_deref().expect("it has one").requests()
    };
    let groups = vec![vec![0, 1], vec![2, 3]];
    assert_eq!(requests(forward(2)), [(groups, COMMUNICATION_ID)]);
    // Slow links have a communicator of their own, and a ring of one has none.
    let found = requests(double(Pass::Forward, None)).into_iter().map(|(_, number)| number);
    assert_eq!(found.collect::<Vec<_>>(), [COMMUNICATION_ID, COMMUNICATION_ID + 1]);
    assert_eq!(requests(forward(1)), []);
}

#[test]
fn a_missing_part_of_the_runtime_is_named() {
    let (device, call) = (Device::new(0, 2), forward(2));
    let refused = |change: &dyn Fn(&mut RankCall), stage: Stage, parts: &[&str]| {
        let mut rank = device.rank(&call);
        change(&mut rank);
        assert_eq!(rank.instantiate(Pass::Forward), Ok(()));
        if stage != Stage::Prepare {
            assert_eq!(rank.stage(device.platform, Stage::Prepare), Ok(()));
        }
        let (_, message) = rank.stage(device.platform, stage).expect_err("refused");
        parts.iter().for_each(|part| assert!(message.contains(part), "{part} in {message}"));
        message
    };
    let no_extension = |rank: &mut RankCall| {
        *rank.runtime.context.gpu.as_mut().expect("it has one").extension() = None;
    };
    let needed = ["context", "no Collectives extension", "jaxlib and jax-cuda13-plugin 0.11.2"];
    refused(&no_extension, Stage::Prepare, &needed);
    let newer = |rank: &mut RankCall| {
        let extension = rank.runtime.context.gpu.as_mut().expect("it has one").extension();
        extension.as_mut().expect("it has one").extension_base.id.major_version = 1;
    };
    refused(&newer, Stage::Prepare, &["major version 1", "expected 0"]);
    let old = |rank: &mut RankCall| {
        rank.runtime.table.XLA_FFI_InvokeContext_FindExtension = None;
    };
    refused(&old, Stage::Prepare, &["XLA_FFI_InvokeContext_FindExtension", "0.11.2"]);
    let float32 = |rank: &mut RankCall| {
        let buffers = rank.args.iter_mut().chain(&mut rank.rets[..2]);
        buffers.for_each(|buffer| buffer.dtype = sys::XLA_FFI_DataType_F32);
    };
    let words = ["float32 is not supported on CUDA", "bfloat16 or float16"];
    refused(&float32, Stage::Initialize, &words);
    let small = |rank: &mut RankCall| rank.rets[2].dims[0] -= 1;
    device.told_of(&refused(&small, Stage::Execute, &["workspace must have at least"]));
}

#[test]
fn the_backward_pass_needs_an_order_and_the_forward_pass_none() {
    let device = Device::new(0, 2);
    let mut rank = device.rank(&backward(Travels::Keys));
    let order = |(name, _): &(String, _)| name == "backward_order";
    let index = rank.attributes.iter().position(order).expect("the attribute is there");
    for name in ["any", "fixed"] {
        rank.attributes[index].1 = FakeAttribute::Text(name.into());
        assert_eq!(rank.all(device.platform, Pass::Backward), Ok(()));
    }
    rank.attributes[index].1 = FakeAttribute::Text("some".into());
    let refused = |rank: &RankCall, parts: [&str; 3]| {
        let (code, message) = rank.instantiate(Pass::Backward).expect_err("refused");
        assert_eq!(code, sys::XLA_FFI_Error_Code_INVALID_ARGUMENT, "{message}");
        parts.iter().for_each(|part| assert!(message.contains(part), "{part} in {message}"));
    };
    refused(&rank, ["backward_order", "fixed, any or auto", "some"]);
    rank.attributes.remove(index);
    refused(&rank, ["attribute backward_order", "given", "only ["]);
    let rank = device.rank(&forward(2));
    assert!(!rank.attributes.iter().any(order));
    assert_eq!(rank.instantiate(Pass::Forward), Ok(()));
}

#[test]
fn a_communicator_that_is_not_the_rings_or_is_broken_is_refused() {
    let (device, call) = (Device::new(0, 2), forward(2));
    let rank = device.after_a_run(&call);
    device.recorder.set_async_error(device.comms[0], 6);
    let (_, message) = rank.stage(device.platform, Stage::Execute).expect_err("refused");
    device.told_of(&message);
    for part in ["ncclCommGetAsyncError", "rank 0 of 2", "code 6"] {
        assert!(message.contains(part), "{part} in {message}");
    }
    let other = Device::new(0, 3);
    let refused = other.rank(&call).all(other.platform, Pass::Forward);
    let (_, message) = refused.expect_err("refused");
    other.told_of(&message);
    assert!(message.contains("expected a communicator of 2 ranks"), "{message}");
}

#[test]
fn a_communicator_that_does_not_block_is_asked_until_it_is_done() {
    let device = Device::new(0, 2);
    device.recorder.set_in_progress(device.comms[0], 3);
    device.after_a_run(&forward(2));
    assert_eq!(device.recorder.violations(), [""; 0]);
}

#[test]
fn unknown_gpus_are_refused() {
    let turing = Device::of_capability((7, 5), 0, 1);
    let refused = turing.rank(&forward(1)).all(turing.platform, Pass::Forward);
    let (code, message) = refused.expect_err("refused");
    assert_eq!(code, sys::XLA_FFI_Error_Code_UNIMPLEMENTED);
    for part in ["compute capability 7.5", "9.0 (H100, H200)"] {
        assert!(message.contains(part), "{part} in {message}");
    }
}
