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

/// Runs a stage of the call that computes outputs.
fn attend(
    device: &Device,
    stage: Stage,
    args: &[FakeBuffer],
    rets: &[FakeBuffer],
) -> Result<(), String> {
    let runtime = FakeRuntime::new(5, 1, 0).on_gpu(FakeGpu::new(Recorder::COMPUTE.0, &[]));
    let rows = FakeAttribute::Scalar(sys::XLA_FFI_DataType_S64, 64i64.to_ne_bytes().into());
    let reverse = FakeAttribute::Scalar(sys::XLA_FFI_DataType_PRED, vec![0]);
    let strict = FakeAttribute::Scalar(sys::XLA_FFI_DataType_PRED, vec![0]);
    let decays = FakeAttribute::Scalar(sys::XLA_FFI_DataType_S64, 0i64.to_ne_bytes().into());
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
    let error =
        unsafe { run_linear(frame.address(), LinearKind::Attend, stage, || Ok(device.platform)) };
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
