//! Tests of what the handlers of linear attention refuse.

use std::ptr;

use burst_attention_ffi::cuda::{LinearKind, Stage, run_linear};
use burst_attention_ffi::sys;
use burst_attention_recorder::Recorder;
use burst_attention_test_frames::gpu::FakeGpu;
use burst_attention_test_frames::{FakeAttribute, FakeBuffer, FakeFrame, FakeRuntime, take_error};

use crate::calls::{Device, number};

const BF16: u32 = sys::XLA_FFI_DataType_BF16;
const F32: u32 = sys::XLA_FFI_DataType_F32;

/// Runs a stage of the call that computes outputs with decays of heads.
fn attend(
    device: &Device,
    stage: Stage,
    args: &[FakeBuffer],
    rets: &[FakeBuffer],
) -> Result<(), String> {
    run(device, stage, (LinearKind::Attend, 0), args, rets)
}

/// Runs a stage of a call of a kind, with what has a decay.
fn run(
    device: &Device,
    stage: Stage,
    (kind, decays): (LinearKind, i64),
    args: &[FakeBuffer],
    rets: &[FakeBuffer],
) -> Result<(), String> {
    let runtime = FakeRuntime::new(5, 1, 0).on_gpu(FakeGpu::new(Recorder::COMPUTE.0, &[]));
    let rows = FakeAttribute::Scalar(sys::XLA_FFI_DataType_S64, 64i64.to_ne_bytes().into());
    let reverse = FakeAttribute::Scalar(sys::XLA_FFI_DataType_PRED, vec![0]);
    let strict = FakeAttribute::Scalar(sys::XLA_FFI_DataType_PRED, vec![0]);
    let decays = FakeAttribute::Scalar(sys::XLA_FFI_DataType_S64, decays.to_ne_bytes().into());
    let attributes = vec![
        ("part_rows".into(), rows),
        ("reverse".into(), reverse),
        ("strict".into(), strict),
        ("decays".into(), decays),
    ];
    let mut frame = FakeFrame::new(args, rets, attributes, &runtime);
    frame.raw.stage = number(stage);
    // SAFETY: `FakeFrame` makes a frame as the header says, which lives for the call. The recorder
    // keeps addresses and follows none of them.
    let error = unsafe { run_linear(frame.address(), kind, stage, || Ok(device.platform)) };
    take_error(error).map_or(Ok(()), |(_, message)| Err(message))
}

#[test]
fn arrays_of_wrong_shapes_and_types_are_refused() {
    let device = Device::new(0, 1);
    let array = |dtype, dims: &[i64], n: usize| {
        FakeBuffer::new(dtype, dims, ptr::without_provenance_mut(n << 20))
    };
    let args = [
        array(BF16, &[2, 150, 4, 16], 1),
        array(BF16, &[2, 150, 2, 16], 2),
        array(BF16, &[2, 150, 2, 24], 3),
        array(F32, &[2, 4, 192], 4),
        array(F32, &[2, 3, 4, 16, 24], 5),
        array(BF16, &[2, 150, 4, 24], 6),
    ];
    let rets = [array(BF16, &[2, 150, 4, 24], 7), array(F32, &[2, 4, 192], 8)];
    let refused = |change: &dyn Fn(&mut [FakeBuffer], &mut Vec<FakeBuffer>), words: &str| {
        let (mut args, mut rets) = (args.clone(), rets.to_vec());
        change(&mut args, &mut rets);
        let error = attend(&device, Stage::Execute, &args, &rets).expect_err("refused");
        assert!(error.contains(words), "{words} in {error}");
        error
    };
    device.told_of(&refused(&|_, _| {}, "was not initialised"));
    assert_eq!(attend(&device, Stage::Initialize, &args, &rets), Ok(()));
    assert_eq!(attend(&device, Stage::Execute, &args, &rets), Ok(()));
    refused(&|args, _| args[2].dims[1] -= 1, "shape of value must be [2, 150, 2, 24]");
    refused(&|args, _| args[3].dims[2] = 150, "shape of sums must be [2, 4, 192]");
    refused(&|args, _| args[4].dims[1] = 2, "shape of state must be [2, 3, 4, 16, 24]");
    refused(&|_, rets| rets[1].dims[1] = 8, "shape of dots must be [2, 4, 192]");
    let words = "dtype of key must be bfloat16 or float16, got float32";
    refused(&|args, _| args[1].dtype = F32, words);
    refused(
        &|_, rets| drop(rets.pop()),
        "5 and 1, or 6 and 2; with decays of channels 6 and 1, or 8 and 2, got 6 and 1",
    );
    let null =
        refused(&|args, _| args[0].data = ptr::null_mut(), "must be the address of an array");
    device.told_of(&null);
}

/// A call with decays of channels must bring what its kernel reads in place of decays.
#[test]
fn arrays_of_channels_of_wrong_shapes_are_refused() {
    let device = Device::new(0, 1);
    let array = |dtype, dims: &[i64], n: usize| {
        FakeBuffer::new(dtype, dims, ptr::without_provenance_mut(n << 20))
    };
    let keys = |n| array(BF16, &[2, 150, 4, 16], n);
    let values = |n| array(BF16, &[2, 150, 4, 24], n);
    let states = array(F32, &[2, 3, 4, 16, 24], 4);
    let sums = |dim| array(F32, &[2, 192, 4, dim], 5);
    let level = |dim, n| array(BF16, &[2, 150, 6, 4, dim], n);
    let pairs = || array(F32, &[2, 192, 4, 64], 6);
    let rows = || vec![keys(1), keys(2), values(3)];
    let of_keys = [rows(), vec![sums(16), states.clone(), pairs()]].concat();
    let of_values = vec![sums(24), states.clone(), values(7), level(24, 8), level(24, 9)];
    let of_values = [rows(), of_values].concat();
    let dots = array(F32, &[2, 192, 4, 24], 11);
    let parts = vec![keys(2), values(3), sums(16)];
    type Call = ((LinearKind, i64), Vec<FakeBuffer>, Vec<FakeBuffer>);
    let calls: [Call; 4] = [
        ((LinearKind::Attend, 1), of_keys, vec![values(10)]),
        ((LinearKind::Attend, 2), of_values, vec![values(10), dots]),
        ((LinearKind::Pairs, 0), vec![keys(1), keys(2), level(16, 8)], vec![pairs()]),
        ((LinearKind::State, 1), parts, vec![states]),
    ];
    for (kind, args, rets) in &calls {
        assert_eq!(run(&device, Stage::Initialize, *kind, args, rets), Ok(()), "{kind:?}");
        assert_eq!(run(&device, Stage::Execute, *kind, args, rets), Ok(()), "{kind:?}");
    }
    let refused = |n: usize, change: &dyn Fn(&mut Call), words: &str| {
        let mut call = calls[n].clone();
        change(&mut call);
        let (kind, args, rets) = &call;
        let error = run(&device, Stage::Initialize, *kind, args, rets).expect_err("refused");
        assert!(error.contains(words), "{words} in {error}");
    };
    let counts = "5 and 1, or 6 and 2; with decays of channels 6 and 1, or 8 and 2";
    refused(0, &|call| call.0.1 = 3, "decays must be 0, 1 or 2, got 3");
    refused(0, &|call| call.0.1 = 0, counts);
    refused(0, &|call| call.0.1 = 2, counts);
    refused(0, &|call| drop(call.1.pop()), counts);
    refused(0, &|call| call.1[3].dims = vec![2, 4, 192], "shape of sums must be [2, 192, 4, 16]");
    refused(0, &|call| call.1[5].dims[1] = 150, "shape of pairs must be [2, 192, 4, 64]");
    refused(0, &|call| call.1[5].dtype = BF16, "dtype of pairs must be float32");
    refused(1, &|call| drop(call.1.pop()), counts);
    refused(1, &|call| call.1[3].dims[3] = 16, "shape of sums must be [2, 192, 4, 24]");
    refused(1, &|call| call.1[6].dims[2] = 5, "shape of levels must be [2, 150, 6, 4, 24]");
    refused(1, &|call| call.1[7].dtype = F32, "dtype of levels must be bfloat16");
    refused(1, &|call| call.2[1].dims = vec![2, 4, 192], "shape of dots must be [2, 192, 4, 24]");
    refused(2, &|call| call.1[0].dims[3] = 8, "shape of query must be [2, 150, 4, 16]");
    refused(2, &|call| call.1[2].dims[4] = 24, "shape of met must be [2, 150, 6, 4, 16]");
    refused(2, &|call| call.2[0].dims[3] = 16, "shape of pairs must be [2, 192, 4, 64]");
    refused(3, &|call| call.1[2].dims[3] = 24, "shape of sums must be [2, 192, 4, 16]");
}
