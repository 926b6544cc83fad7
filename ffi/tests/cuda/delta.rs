//! Tests of what the handlers of the delta rule refuse.

use std::ptr;

use burst_attention_ffi::cuda::{LinearKind, Stage, run_linear};
use burst_attention_ffi::sys;
use burst_attention_recorder::Recorder;
use burst_attention_test_frames::gpu::FakeGpu;
use burst_attention_test_frames::{FakeAttribute, FakeBuffer, FakeFrame, FakeRuntime, take_error};

use crate::calls::{Device, number};

const BF16: u32 = sys::XLA_FFI_DataType_BF16;
const F32: u32 = sys::XLA_FFI_DataType_F32;

/// What has a decay: heads, channels of keys, or channels of values.
const HEADS: i64 = 0;
const CHANNELS: i64 = 1;

/// A call: its kind, what has a decay, operands and results.
#[derive(Clone)]
struct Call(LinearKind, i64, Vec<FakeBuffer>, Vec<FakeBuffer>);

fn run(device: &Device, stage: Stage, Call(kind, decays, args, rets): &Call) -> Result<(), String> {
    let runtime = FakeRuntime::new(5, 1, 0).on_gpu(FakeGpu::new(Recorder::COMPUTE.0, &[]));
    let rows = FakeAttribute::Scalar(sys::XLA_FFI_DataType_S64, 64i64.to_ne_bytes().into());
    let decays = FakeAttribute::Scalar(sys::XLA_FFI_DataType_S64, decays.to_ne_bytes().into());
    let attributes = vec![("part_rows".into(), rows), ("decays".into(), decays)];
    let mut frame = FakeFrame::new(args, rets, attributes, &runtime);
    frame.raw.stage = number(stage);
    // SAFETY: `FakeFrame` makes a frame as the header says, which lives for the call. The recorder
    // keeps addresses and follows none of them.
    let error = unsafe { run_linear(frame.address(), *kind, stage, || Ok(device.platform)) };
    take_error(error).map_or(Ok(()), |(_, message)| Err(message))
}

fn array(dtype: u32, dims: &[i64], n: usize) -> FakeBuffer {
    FakeBuffer::new(dtype, dims, ptr::without_provenance_mut(n << 20))
}

/// Returns one call of each kind, and of each set of results.
fn calls() -> Vec<Call> {
    let keys = |n| array(BF16, &[2, 150, 4, 16], n);
    let values = |n| array(BF16, &[2, 150, 4, 24], n);
    let statistics = |n| array(F32, &[2, 4, 192], n);
    let states = |n| array(F32, &[2, 3, 4, 16, 24], n);
    let inverse = |n| array(BF16, &[2, 150, 4, 64], n);
    let solved = || vec![keys(1), inverse(2), statistics(3), statistics(4)];
    let with = |others: Vec<FakeBuffer>| [solved(), others].concat();
    let transfer = || array(F32, &[2, 3, 4, 16, 16], 12);
    let turned = || array(F32, &[2, 3, 4, 24, 16], 10);
    let of_keys = |sums| vec![keys(1), sums, keys(5), values(6), values(7), values(8), turned()];
    let of_kind = |kind, args, rets| Call(kind, HEADS, args, rets);
    let heads = [
        of_kind(
            LinearKind::DeltaInverse,
            vec![keys(1), statistics(3), statistics(4)],
            vec![inverse(2)],
        ),
        of_kind(LinearKind::DeltaState, with(vec![values(5)]), vec![states(11), transfer()]),
        of_kind(LinearKind::DeltaState, with(vec![values(5), states(6)]), vec![values(11)]),
        of_kind(
            LinearKind::DeltaGrad,
            with(vec![keys(5), values(6)]),
            vec![states(11), transfer()],
        ),
        of_kind(LinearKind::DeltaGrad, with(vec![keys(5), values(6), states(7)]), vec![values(11)]),
        of_kind(LinearKind::DeltaKeys, of_keys(statistics(3)), vec![keys(11), statistics(12)]),
    ];
    // Decays of channels bring more operands, and sums of their own.
    let sums = array(F32, &[2, 192, 4, 16], 3);
    let (kh, pairs) = (|| keys(13), || array(F32, &[2, 192, 4, 64], 14));
    let level = |n| array(BF16, &[2, 150, 6, 4, 16], n);
    let brought = [
        vec![pairs()],
        vec![kh()],
        vec![kh()],
        vec![kh(), pairs()],
        vec![kh(), pairs()],
        vec![level(15), level(16), level(17)],
    ];
    let channels =
        heads.clone().into_iter().zip(brought).enumerate().map(|(n, (call, brought))| {
            let Call(kind, _, mut args, mut rets) = call;
            args[if n == 0 || n == 5 { 1 } else { 2 }] = sums.clone();
            args.extend(brought);
            if n == 5 {
                rets[1] = array(F32, &[2, 192, 4, 16], 12);
            }
            Call(kind, CHANNELS, args, rets)
        });
    heads.iter().cloned().chain(channels).collect()
}

#[test]
fn calls_of_every_kind_run() {
    let device = Device::new(0, 1);
    for call in calls() {
        assert_eq!(run(&device, Stage::Initialize, &call), Ok(()));
        assert_eq!(run(&device, Stage::Execute, &call), Ok(()));
        let Call(kind, decays, mut args, mut rets) = call;
        args.iter_mut().chain(&mut rets).for_each(|buffer| buffer.dims[0] = 0);
        let empty = Call(kind, decays, args, rets);
        assert_eq!(run(&device, Stage::Execute, &empty), Ok(()), "{kind:?}");
    }
}

#[test]
fn arrays_of_wrong_shapes_and_types_are_refused() {
    let device = Device::new(0, 1);
    let refused = |n: usize, change: &dyn Fn(&mut Call), words: &str| {
        let mut call = calls()[n].clone();
        change(&mut call);
        let error = run(&device, Stage::Initialize, &call).expect_err("refused");
        assert!(error.contains(words), "{words} in {error}");
    };
    let words = "dtype of key must be bfloat16 or float16, got float32";
    refused(0, &|call| call.2[0].dtype = F32, words);
    refused(0, &|call| call.2[2].dims[1] = 2, "shape of beta must be [2, 4, 192]");
    refused(0, &|call| call.3[0].dims[3] = 16, "shape of inverse must be [2, 150, 4, 64]");
    refused(1, &|call| call.2[4].dims[2] = 2, "shape of value must be [2, 150, 4, 24]");
    refused(1, &|call| call.3[1].dims[4] = 24, "shape of transfer must be [2, 3, 4, 16, 16]");
    refused(1, &|call| drop(call.2.pop()), "operands must be 5 or 6, got 4");
    refused(2, &|call| drop(call.2.pop()), "otherwise 2, got 1");
    refused(2, &|call| call.2[5].dims[1] = 2, "shape of state of parts must be [2, 3, 4, 16, 24]");
    refused(3, &|call| call.2[4].dims[3] = 24, "shape of query must be [2, 150, 4, 16]");
    refused(3, &|call| drop(call.2.pop()), "operands must be 6 or 7, got 5");
    refused(4, &|call| call.3[0].dims[3] = 16, "shape of result must be [2, 150, 4, 24]");
    refused(5, &|call| call.2[6].dims.swap(3, 4), "shape of turned must be [2, 3, 4, 24, 16]");
    refused(5, &|call| call.3[1].dims[1] = 8, "shape of dots must be [2, 4, 192]");

    // With decays of channels.
    refused(0, &|call| call.1 = 2, "decays of the delta rule must be 0 or 1, got 2");
    refused(0, &|call| call.1 = CHANNELS, "operands must be 4, got 3");
    refused(6, &|call| call.1 = HEADS, "operands must be 3, got 4");
    refused(6, &|call| call.2[1].dims[3] = 8, "shape of sums must be [2, 192, 4, 16]");
    refused(6, &|call| call.2[3].dims[1] = 150, "shape of pairs must be [2, 192, 4, 64]");
    refused(6, &|call| call.2[3].dtype = BF16, "dtype of pairs must be float32");
    refused(7, &|call| drop(call.2.drain(4..)), "operands must be 6 or 7, got 4");
    refused(7, &|call| call.2[5].dims[3] = 24, "shape of kh must be [2, 150, 4, 16]");
    refused(9, &|call| drop(call.2.pop()), "operands must be 8 or 9, got 7");
    refused(10, &|call| call.2[8].dims[3] = 16, "shape of pairs must be [2, 192, 4, 64]");
    refused(11, &|call| drop(call.2.pop()), "operands must be 10, got 9");
    refused(11, &|call| call.2[7].dims[2] = 5, "shape of met must be [2, 150, 6, 4, 16]");
    refused(11, &|call| call.2[8].dims[1] = 192, "shape of keys_met must be [2, 150, 6, 4, 16]");
    refused(11, &|call| call.2[9].dtype = F32, "dtype of fades must be bfloat16");
    refused(11, &|call| call.3[1].dims = vec![2, 4, 192], "shape of dots must be [2, 192, 4, 16]");
}
