//! The handlers, called as XLA calls them, with a fake runtime.

use std::ffi::c_void;
use std::ptr;

use burst_attention_ffi::exports::*;
use burst_attention_ffi::handlers::*;
use burst_attention_ffi::sys;
use burst_attention_test_frames::{
    FakeAttribute, FakeBuffer, FakeFrame, FakeRuntime, take_error, wait_for,
};

const F32: u32 = sys::XLA_FFI_DataType_F32;
const DIMS: [i64; 4] = [1, 2, 1, 8];

fn attributes(world_size: i64) -> Vec<(String, FakeAttribute)> {
    let text = |text: &str| FakeAttribute::Text(text.into());
    let scale = FakeAttribute::Scalar(F32, 0.5f32.to_ne_bytes().into());
    let s64 =
        |value: i64| FakeAttribute::Scalar(sys::XLA_FFI_DataType_S64, value.to_ne_bytes().into());
    let none = || FakeAttribute::Scalar(F32, 0f32.to_ne_bytes().into());
    vec![
        ("world_size".into(), s64(world_size)),
        ("layout".into(), text("contiguous")),
        ("window_left".into(), s64(i64::MIN)),
        ("window_right".into(), s64(i64::MIN)),
        ("feature_operands".into(), FakeAttribute::Text(String::new())),
        ("dropout_rate".into(), none()),
        ("schedule".into(), text("ring")),
        ("inner_size".into(), s64(0)),
        ("softmax_scale".into(), scale),
        ("logits_soft_cap".into(), none()),
        ("axis_name".into(), text("context")),
    ]
}

/// One rank of a forward call. Its memory is never freed.
struct Rank {
    runtime: FakeRuntime,
    o: *mut f32,
    args: Vec<FakeBuffer>,
    rets: Vec<FakeBuffer>,
}

impl Rank {
    fn new(run_id: i64, rank: i32, dims: [i64; 4]) -> Rank {
        let count = dims.iter().product::<i64>() as usize;
        let values = |value: f32| Box::leak(vec![value; count].into_boxed_slice()).as_mut_ptr();
        let array = |value: *mut f32| FakeBuffer::new(F32, &dims, value.cast());
        let place: *mut c_void = Box::leak(Box::new([rank, 0i32])).as_mut_ptr().cast();
        let o = values(f32::NAN);
        let mut args: Vec<_> = [1.0, 2.0, 3.0].map(values).map(array).into();
        args.push(FakeBuffer::new(sys::XLA_FFI_DataType_S32, &[2], place));
        let lse = FakeBuffer::new(F32, &dims[..3], values(0.0).cast());
        let runtime = FakeRuntime::new(5, run_id, rank);
        Rank { runtime, o, args, rets: vec![array(o), lse] }
    }

    fn frame(&self, world_size: i64) -> FakeFrame {
        FakeFrame::new(&self.args, &self.rets, attributes(world_size), &self.runtime)
    }

    /// Instantiates the call site, whose state all ranks of a ring share.
    fn instantiate(&self, world_size: i64) -> Option<(u32, String)> {
        let mut frame = self.frame(world_size);
        frame.raw.stage = sys::XLA_FFI_ExecutionStage_INSTANTIATE;
        // SAFETY: `FakeFrame` makes valid frames.
        take_error(unsafe { burst_attention_forward_instantiate(frame.address()) })
    }

    /// Executes the call, and returns its future or its error.
    fn execute(&self, mut frame: FakeFrame) -> Result<*mut sys::XLA_FFI_Future, (u32, String)> {
        // SAFETY: `FakeFrame` makes valid frames, and the ranks' memory is never freed.
        let error = take_error(unsafe { burst_attention_forward_execute(frame.address()) });
        error.map_or(Ok(frame.raw.future), Err)
    }
}

/// Returns the ranks of one ring, which share a call site.
fn ring(run_id: i64, count: i32) -> Vec<Rank> {
    let ranks: Vec<_> = (0..count).map(|rank| Rank::new(run_id, rank, DIMS)).collect();
    assert_eq!(ranks[0].instantiate(count.into()), None);
    let state = ranks[0].runtime.context.state.get();
    ranks.iter().for_each(|rank| rank.runtime.context.state.set(state));
    ranks
}

#[test]
fn metadata_fit_the_runtime() {
    for (minor, expected) in [(1, -1), (2, 77), (4, 77), (5, 77), (9, 77)] {
        let runtime = FakeRuntime::new(minor, 0, 0);
        let mut metadata = sys::XLA_FFI_Metadata {
            struct_size: sys::XLA_FFI_Metadata_STRUCT_SIZE as usize,
            api_version: runtime.table.api_version,
            traits: 0xff,
            state_type_id: sys::XLA_FFI_TypeId { type_id: -1 },
        };
        let mut extension = sys::XLA_FFI_Metadata_Extension {
            extension_base: sys::XLA_FFI_InternalExtension {
                struct_size: sys::XLA_FFI_Metadata_Extension_STRUCT_SIZE as usize,
                type_: sys::XLA_FFI_Extension_Metadata,
                next: ptr::null_mut(),
            },
            metadata: &raw mut metadata,
        };
        let mut frame = FakeFrame::new(&[], &[], Vec::new(), &runtime);
        frame.raw.extension_start = (&raw mut extension).cast();
        // SAFETY: `FakeFrame` makes valid frames.
        assert!(unsafe { burst_attention_forward_instantiate(frame.address()) }.is_null());
        let version = metadata.api_version;
        assert_eq!((version.major_version, version.minor_version), (0, 1));
        assert_eq!(metadata.traits, 0);
        assert_eq!(metadata.state_type_id.type_id, expected, "runtime 0.{minor}");

        // SAFETY: the frame points to the live `extension`.
        unsafe { (*frame.raw.extension_start).struct_size = 8 };
        // SAFETY: the frame is valid except for the size that the handler must check.
        let refused = take_error(unsafe { burst_attention_backward_execute(frame.address()) });
        assert!(refused.is_some_and(|(_, message)| message.contains("got 8")));
    }
}

#[test]
fn a_ring_computes_and_each_future_completes_on_its_own_thread() {
    let ranks = ring(1, 3);
    let futures: Vec<_> = ranks.iter().map(|rank| rank.execute(rank.frame(3))).collect();
    let completed: Vec<_> =
        futures.into_iter().map(|future| wait_for(future.expect("no error"))).collect();
    assert!(completed.iter().all(|completed| completed.error.is_none()));
    for rank in &ranks {
        // SAFETY: the ring has ended, so no thread writes the memory, which is never freed.
        assert_eq!(unsafe { *rank.o }, 3.0, "all values are equal");
    }
    assert!(burst_attention_bytes_sent() > 0);
}

#[test]
fn a_ring_of_one_takes_the_same_path() {
    let ranks = ring(2, 1);
    let future = ranks[0].execute(ranks[0].frame(1)).expect("no error");
    assert!(!future.is_null());
    assert!(wait_for(future).error.is_none());
}

/// The arrays of a meeting are operands and results at once.
#[test]
fn ranks_meet_and_their_arrays_stay() {
    let ranks: Vec<_> = (0..3).map(|rank| Rank::new(20, rank, DIMS)).collect();
    let frame = |rank: &Rank, arrays: &[FakeBuffer], stage| {
        let args = [&rank.args[3..], &rank.args[..2]].concat();
        let mut frame = FakeFrame::new(&args, arrays, attributes(3), &rank.runtime);
        frame.raw.stage = stage;
        frame
    };
    let mut first = frame(&ranks[0], &[], sys::XLA_FFI_ExecutionStage_INSTANTIATE);
    // SAFETY: `FakeFrame` makes valid frames.
    let error = unsafe { burst_attention_linear_meeting_instantiate(first.address()) };
    assert_eq!(take_error(error), None);
    let state = ranks[0].runtime.context.state.get();
    ranks.iter().for_each(|rank| rank.runtime.context.state.set(state));
    let arrive = |rank: &Rank, arrays: &[FakeBuffer]| {
        let mut frame = frame(rank, arrays, sys::XLA_FFI_ExecutionStage_EXECUTE);
        // SAFETY: `FakeFrame` makes valid frames, and the ranks' memory is never freed.
        let error = unsafe { burst_attention_linear_meeting_execute(frame.address()) };
        take_error(error).map_or(Ok(frame.raw.future), |(_, message)| Err(message))
    };
    for others in [&ranks[0].rets[..], &ranks[1].args[..2], &ranks[0].args[..1]] {
        let message = arrive(&ranks[0], others).expect_err("refused");
        assert!(message.contains("results must be the operands behind the place"), "{message}");
    }
    let futures: Vec<_> = ranks.iter().map(|rank| arrive(rank, &rank.args[..2])).collect();
    for future in futures {
        assert_eq!(wait_for(future.expect("no error")).error, None);
    }
}

#[test]
fn nothing_to_compute_is_done_at_once() {
    for dims in [[0, 2, 1, 8], [1, 0, 1, 8]] {
        let rank = Rank::new(3, 0, dims);
        assert_eq!(rank.instantiate(2), None);
        assert_eq!(rank.execute(rank.frame(2)), Ok(ptr::null_mut()));
    }
}

#[test]
fn ranks_of_two_devices_are_told_apart() {
    let ranks = ring(4, 2);
    let again = Rank::new(4, 0, DIMS);
    let state = ranks[0].runtime.context.state.get();
    let twin = Rank { runtime: FakeRuntime::new(5, 4, 9), ..again };
    twin.runtime.context.state.set(state);
    let futures = [&ranks[0], &twin].map(|rank| rank.execute(rank.frame(2)).expect("no error"));
    for future in futures {
        let error = wait_for(future).error.expect("refused");
        assert!(error.contains("devices 0 and 9 both say they are rank 0"), "{error}");
    }
}

#[test]
fn wrong_operands_are_refused_with_what_was_expected() {
    let rank = Rank::new(5, 0, DIMS);
    assert_eq!(rank.instantiate(2), None);
    let refused = |change: &dyn Fn(&mut Vec<FakeBuffer>, &mut Vec<FakeBuffer>)| {
        let (mut args, mut rets) = (rank.args.clone(), rank.rets.clone());
        change(&mut args, &mut rets);
        let frame = FakeFrame::new(&args, &rets, attributes(2), &rank.runtime);
        let (code, message) = rank.execute(frame).expect_err("refused");
        assert_eq!(code, sys::XLA_FFI_Error_Code_INVALID_ARGUMENT, "{message}");
        message
    };
    let check = |message: String, parts: &[&str]| {
        for part in parts {
            assert!(message.contains(part), "{part} in {message}");
        }
    };
    check(refused(&|args, _| drop(args.pop())), &["operands must be 4, got 3"]);
    check(refused(&|_, rets| drop(rets.pop())), &["results must be 2, got 1"]);
    check(refused(&|args, _| args[0].dims.clear()), &["query", "[batch, length, heads", "got []"]);
    check(refused(&|args, _| args[1].dims[3] = 16), &["key", "[1, 2, 1, 16]"]);
    check(refused(&|args, _| args[2].dims[1] = 3), &["value", "[1, 2, 1, 8]", "[1, 3, 1, 8]"]);
    check(refused(&|_, rets| rets[1].dims[1] = 3), &["lse", "[1, 2, 1]", "[1, 3, 1]"]);
    check(refused(&|args, _| args[0].dtype = 12), &["query", "bfloat16", "got float64"]);
    check(refused(&|args, _| args[1].dtype = 16), &["key", "float32", "got bfloat16"]);
    check(refused(&|args, _| args[3].dtype = 11), &["place", "int32", "got float32"]);
    check(refused(&|args, _| args[3].dims[0] = 3), &["place", "[..., 2]", "got [3]"]);
    check(refused(&|args, _| args[0].data = ptr::null_mut()), &["query", "null"]);
    check(refused(&|args, _| args[0].dims[0] = -1), &["natural number", "got -1"]);
    check(refused(&|args, _| args[0].dims = vec![i64::MAX; 4]), &["address space"]);
    check(refused(&|args, _| args[0].struct_size = 8), &["bytes, got 8"]);
    check(refused(&|args, _| args[0].kind = 9), &["a buffer, got XLA type 9"]);
}

#[test]
fn wrong_attributes_are_refused_when_the_call_is_compiled() {
    let refused = |name: &str, value: Option<FakeAttribute>, parts: &[&str]| {
        let rank = Rank::new(6, 0, DIMS);
        let mut entries = attributes(2);
        entries.retain(|(entry, _)| entry != name);
        entries.extend(value.map(|value| (name.to_string(), value)));
        let mut frame = FakeFrame::new(&[], &[], entries, &rank.runtime);
        frame.raw.stage = sys::XLA_FFI_ExecutionStage_INSTANTIATE;
        // SAFETY: `FakeFrame` makes valid frames.
        let error = take_error(unsafe { burst_attention_forward_instantiate(frame.address()) });
        let (_, message) = error.expect("refused");
        for part in parts {
            assert!(message.contains(part), "{part} in {message}");
        }
    };
    let int = |value: i64| {
        Some(FakeAttribute::Scalar(sys::XLA_FFI_DataType_S64, value.to_ne_bytes().into()))
    };
    refused("layout", None, &["attribute layout must be given", "axis_name"]);
    refused("layout", Some(FakeAttribute::Text("zagzig".into())), &["zigzag", "zagzig"]);
    refused("layout", int(1), &["attribute layout", "a string, got a scalar"]);
    refused("world_size", int(0), &["world_size", "from 1", "got 0"]);
    refused("world_size", int(i64::MAX), &["world_size", "65536"]);
    let names = FakeAttribute::Text("key_segment_ids,biases".into());
    let expected = "[query_segment_ids, key_segment_ids], got [key_segment_ids, biases]";
    refused("feature_operands", Some(names), &[expected]);
    refused("dropout_rate", int(0), &["attribute dropout_rate"]);
}

#[test]
fn features_take_their_operands_and_no_others() {
    let names = FakeAttribute::Text("query_segment_ids,key_segment_ids".into());
    let rank = Rank::new(10, 0, DIMS);
    let mut entries = attributes(1);
    entries.retain(|(entry, _)| entry != "feature_operands");
    entries.push(("feature_operands".into(), names));
    let mut frame = FakeFrame::new(&[], &[], entries, &rank.runtime);
    frame.raw.stage = sys::XLA_FFI_ExecutionStage_INSTANTIATE;
    // SAFETY: `FakeFrame` makes valid frames.
    let error = take_error(unsafe { burst_attention_forward_instantiate(frame.address()) });
    assert_eq!(error, None);
    let (_, message) = rank.execute(rank.frame(1)).expect_err("there are no segments");
    assert!(message.contains("number of operands must be 6, got 4"), "{message}");
}

#[test]
fn a_call_without_state_or_on_an_old_runtime_says_so() {
    let rank = Rank::new(7, 0, DIMS);
    let (_, message) = rank.execute(rank.frame(2)).expect_err("nothing was instantiated");
    assert!(message.contains("XLA_FFI_State_Get failed: no state is set"), "{message}");

    let rank = Rank { runtime: FakeRuntime::new(3, 0, 0), ..rank };
    let (_, message) = rank.instantiate(2).expect("refused");
    assert!(message.contains("0.3") && message.contains("jaxlib 0.11.2"), "{message}");
}

#[test]
fn a_short_table_is_not_read_beyond_its_end() {
    let mut rank = Rank::new(8, 0, DIMS);
    assert_eq!(rank.instantiate(2), None);
    rank.runtime.table.struct_size = std::mem::offset_of!(sys::XLA_FFI_Api, XLA_FFI_RunId_Get);
    let (code, message) = rank.execute(rank.frame(2)).expect_err("no run ids");
    assert_eq!(code, sys::XLA_FFI_Error_Code_UNIMPLEMENTED);
    assert!(message.contains("without XLA_FFI_RunId_Get"), "{message}");
}

#[test]
fn the_wrong_stage_is_refused() {
    let rank = Rank::new(9, 0, DIMS);
    let mut frame = rank.frame(2);
    frame.raw.stage = sys::XLA_FFI_ExecutionStage_PREPARE;
    let (_, message) = rank.execute(frame).expect_err("refused");
    assert!(message.contains("stage must be execute, got prepare"), "{message}");
}
