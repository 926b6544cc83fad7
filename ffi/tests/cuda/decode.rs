//! Tests of what the handlers of decode refuse.

use std::ptr;

use burst_attention_ffi::cuda::{Stage, run_decode};
use burst_attention_ffi::sys;
use burst_attention_kernels::instances::Kernel;
use burst_attention_recorder::{Operation, Recorder};
use burst_attention_test_frames::gpu::FakeGpu;
use burst_attention_test_frames::{FakeAttribute, FakeBuffer, FakeFrame, FakeRuntime, take_error};

use crate::calls::{Device, number};

const BF16: u32 = sys::XLA_FFI_DataType_BF16;
const F32: u32 = sys::XLA_FFI_DataType_F32;
const S32: u32 = sys::XLA_FFI_DataType_S32;
const S64: u32 = sys::XLA_FFI_DataType_S64;
const U8: u32 = sys::XLA_FFI_DataType_U8;

/// A call: its integers and its arrays.
#[derive(Clone)]
struct Call {
    integers: Vec<(&'static str, i64)>,
    args: Vec<FakeBuffer>,
    rets: Vec<FakeBuffer>,
}

/// Runs a stage of a call.
fn decode(device: &Device, stage: Stage, call: &Call) -> Result<(), String> {
    let runtime = FakeRuntime::new(5, 1, 0).on_gpu(FakeGpu::new(Recorder::COMPUTE.0, &[]));
    let scalar = |dtype, bytes: &[u8]| FakeAttribute::Scalar(dtype, bytes.to_vec());
    let integers = call.integers.iter();
    let mut attributes: Vec<(String, FakeAttribute)> =
        integers.map(|(name, value)| ((*name).into(), scalar(S64, &value.to_ne_bytes()))).collect();
    attributes.push(("scale".into(), scalar(F32, &0.25f32.to_ne_bytes())));
    attributes.push(("soft_cap".into(), scalar(F32, &0f32.to_ne_bytes())));
    let mut frame = FakeFrame::new(&call.args, &call.rets, attributes, &runtime);
    frame.raw.stage = number(stage);
    // SAFETY: `FakeFrame` makes a frame as the header says, which lives for the call. The recorder
    // keeps addresses and follows none of them.
    let error = unsafe { run_decode(frame.address(), stage, || Ok(device.platform)) };
    take_error(error).map_or(Ok(()), |(_, message)| Err(message))
}

/// Returns a call with pages of 64 rows, four sequences and two key heads of three heads each.
fn call() -> Call {
    let array = |dtype, dims: &[i64], n: usize| {
        FakeBuffer::new(dtype, dims, ptr::without_provenance_mut(n << 24))
    };
    // Room for 4 · 188 runs and 8 pairs, with 16 rows of 24 columns and two numbers each.
    let workspace = (4 * 188 + 8) * 16 * (24 + 2) * 4;
    let integers = [
        ("slice_tiles", 1),
        ("most_slices", 0),
        ("tile_keys", 64),
        ("interleave", 64),
        ("world_size", 2),
        ("values_in_keys", 0),
        ("weights_in_memory", 0),
    ];
    Call {
        integers: integers.into(),
        args: vec![
            array(BF16, &[4, 2, 3, 16], 1),
            array(BF16, &[23, 64, 2, 16], 2),
            array(BF16, &[23, 64, 2, 24], 3),
            array(S32, &[4, 5], 4),
            array(S32, &[4, 4], 5),
            array(S32, &[4, 2, 3], 6),
            array(S32, &[], 7),
            array(S32, &[4, 3], 8),
            array(F32, &[4, 2, 3], 9),
        ],
        rets: vec![
            array(F32, &[4, 2, 3, 24], 10),
            array(F32, &[4, 2, 3], 11),
            array(U8, &[workspace], 12),
        ],
    }
}

/// Returns a call over latents of 576 columns that 128 heads share, whose first 512 are the values.
fn latents() -> Call {
    let mut call = call();
    call.integers[5].1 = 1;
    call.args[0].dims = vec![4, 1, 128, 576];
    call.args[1].dims = vec![23, 64, 1, 576];
    call.args.remove(2);
    call.args[4].dims = vec![4, 2, 128];
    call.args[6].dims = vec![4, 128];
    call.args[7].dims = vec![4, 1, 128];
    call.rets[0].dims = vec![4, 1, 128, 512];
    call.rets[1].dims = vec![4, 1, 128];
    // Two tiles of 64 rows of each unit.
    call.rets[2].dims = vec![(4 * 188 + 8) * 64 * (512 + 2) * 4];
    call
}

#[test]
fn calls_with_and_without_slopes_and_with_fixed_slices_are_launched() {
    let device = Device::new(0, 1);
    let call = call();
    let unprepared = decode(&device, Stage::Execute, &call).expect_err("refused");
    device.told_of(&unprepared);
    assert!(unprepared.contains("was not initialised"), "{unprepared}");
    assert_eq!(decode(&device, Stage::Initialize, &call), Ok(()));
    assert_eq!(decode(&device, Stage::Execute, &call), Ok(()));
    let mut plain = call.clone();
    plain.args.truncate(7);
    assert_eq!(decode(&device, Stage::Execute, &plain), Ok(()));
    let mut fixed = call;
    (fixed.integers[0].1, fixed.integers[1].1) = (2, 3);
    fixed.rets[2].dims[0] = 3 * 8 * 16 * (24 + 2) * 4;
    assert_eq!(decode(&device, Stage::Execute, &fixed), Ok(()));
}

/// The recorder's device has 132 multiprocessors, and each piece has a block for each half of the
/// values.
#[test]
fn latents_are_read_for_values_too() {
    let device = Device::new(0, 1);
    let mut plain = latents();
    plain.args.truncate(6);
    for call in [latents(), plain] {
        assert_eq!(decode(&device, Stage::Initialize, &call), Ok(()));
        device.recorder.take();
        assert_eq!(decode(&device, Stage::Execute, &call), Ok(()));
        let calls = device.recorder.take().calls;
        let launches = calls.iter().map(|call| match &call.operation {
            Operation::Launch(launch) => (launch.instance().kernel, launch.grid[0]),
            other => panic!("{other:?}"),
        });
        let expected = [(Kernel::DecodeLatents, 132), (Kernel::DecodeMerge, 4 * 128)];
        assert_eq!(launches.collect::<Vec<_>>(), expected);
    }
}

/// The weights of 5 pages of 64 keys have 2 bytes each, and each tile two numbers of 4 bytes.
#[test]
fn weights_of_latents_go_through_memory_where_the_call_says_so() {
    let device = Device::new(0, 1);
    let mut call = latents();
    call.integers[6].1 = 1;
    let refused = decode(&device, Stage::Initialize, &call).expect_err("refused");
    assert!(refused.contains("workspace"), "{refused}");
    let rows = 4 * 128;
    call.rets[2].dims[0] += rows * 5 * (64 * 2 + 8);
    assert_eq!(decode(&device, Stage::Initialize, &call), Ok(()));
    device.recorder.take();
    assert_eq!(decode(&device, Stage::Execute, &call), Ok(()));
    let calls = device.recorder.take().calls;
    let kernels = calls.iter().map(|call| match &call.operation {
        Operation::Launch(launch) => launch.instance().kernel,
        other => panic!("{other:?}"),
    });
    let expected = [Kernel::LatentWeights, Kernel::LatentValues, Kernel::DecodeMerge];
    assert_eq!(kernels.collect::<Vec<_>>(), expected);
}

#[test]
fn latents_that_do_not_fit_are_refused() {
    let device = Device::new(0, 1);
    let refused = |change: &dyn Fn(&mut Call), words: &str| {
        let mut call = latents();
        change(&mut call);
        let error = decode(&device, Stage::Initialize, &call).expect_err("refused");
        assert!(error.contains(words), "{words} in {error}");
        error
    };
    let told = |change: &dyn Fn(&mut Call), words: &str| device.told_of(&refused(change, words));
    for got in [-1, 2, i64::MAX] {
        let words = format!(
            "attribute values_in_keys must be 0 for a call with value_cache, or 1 for one whose \
             values are the first columns of key_cache, got {got}"
        );
        refused(&|call| call.integers[5].1 = got, &words);
    }
    refused(&|call| call.integers.truncate(5), "attribute values_in_keys must be given");
    refused(&|call| call.integers[5].1 = 0, "operands must be 7, or 9 with slopes, got 8");
    refused(&|call| drop(call.args.pop()), "operands must be 6, or 8 with slopes, got 7");
    refused(&|call| call.integers[2].1 = 16, "tile_keys must be 64, got 16");
    let wide = |head_dim, value_dim| {
        move |call: &mut Call| {
            call.args[0].dims[3] = head_dim;
            call.args[1].dims[3] = head_dim;
            call.rets[0].dims[3] = value_dim;
        }
    };
    told(&wide(584, 512), "head_dim must be a multiple of 8 from 8 to 576, got 584");
    told(&wide(576, 520), "value_dim must be a multiple of 8 from 8 to 512, got 520");
    told(&wide(64, 72), "value_dim must be a multiple of 8 from 8 to 64, got 72");
}

#[test]
fn arrays_and_numbers_that_do_not_fit_are_refused() {
    let device = Device::new(0, 1);
    let refused = |change: &dyn Fn(&mut Call), words: &str| {
        let mut call = call();
        change(&mut call);
        let error = decode(&device, Stage::Initialize, &call).expect_err("refused");
        assert!(error.contains(words), "{words} in {error}");
        error
    };
    let told = |change: &dyn Fn(&mut Call), words: &str| device.told_of(&refused(change, words));
    refused(&|call| call.args[2].dims[1] = 32, "shape of value_cache must be [23, 64, 2, 24]");
    refused(&|call| call.args[4].dims[1] = 3, "shape of units must be [4, 4]");
    refused(&|call| call.args[5].dims[2] = 4, "shape of intervals must be [4, 2, 3]");
    refused(&|call| call.args[8].dims[1] = 1, "shape of slopes must be [4, 2, 3]");
    refused(&|call| call.args[3].dtype = S64, "dtype of page_table must be int32, got int64");
    refused(&|call| call.args[0].dtype = F32, "dtype of query must be bfloat16 or float16");
    refused(&|call| call.rets[2].dims[0] -= 1, "shape of workspace must be");
    refused(&|call| drop(call.args.pop()), "operands must be 7, or 9 with slopes, got 8");
    told(&|call| call.integers[0].1 = 2, "slice_tiles must be 1");
    refused(&|call| call.integers[1].1 = -1, "most_slices must be a natural number, got -1");
    refused(&|call| call.integers[2].1 = 32, "tile_keys must be 64, got 32");
    told(&|call| call.integers[4].1 = 0, "interleave and world_size must be at least 1");
    let uneven = |call: &mut Call| {
        call.args[1].dims[1] = 72;
        call.args[2].dims[1] = 72;
    };
    told(&uneven, "page_rows must be a power of two");
}
