//! The handlers of attention to a cache and of the merge, called as XLA calls them, with a fake
//! runtime.

use std::ffi::{CString, c_void};
use std::ptr;

use burst_attention::host::trace::RECORDING;
use burst_attention_ffi::exports::burst_attention_trace;
use burst_attention_ffi::handlers::{
    burst_attention_decode_execute, burst_attention_decode_merge_execute,
};
use burst_attention_ffi::sys;
use burst_attention_test_frames::{FakeAttribute, FakeBuffer, FakeFrame, FakeRuntime, take_error};

const F32: u32 = sys::XLA_FFI_DataType_F32;
const S32: u32 = sys::XLA_FFI_DataType_S32;

/// A call whose memory is never freed.
struct Call {
    handler: unsafe extern "C" fn(*mut sys::XLA_FFI_CallFrame) -> *mut sys::XLA_FFI_Error,
    args: Vec<FakeBuffer>,
    rets: Vec<FakeBuffer>,
    attributes: Vec<(String, FakeAttribute)>,
}

fn leak<T>(values: Vec<T>) -> *mut c_void {
    Box::leak(values.into_boxed_slice()).as_mut_ptr().cast()
}

fn floats(dims: &[i64], value: &dyn Fn(usize) -> f32) -> FakeBuffer {
    let count = dims.iter().product::<i64>() as usize;
    FakeBuffer::new(F32, dims, leak((0..count).map(value).collect::<Vec<_>>()))
}

impl Call {
    /// A call of one entry on the second of two ranks, with pages of two rows.
    fn new() -> Call {
        let ints = |dims: &[i64], values: &[i32]| FakeBuffer::new(S32, dims, leak(values.to_vec()));
        let args = vec![
            floats(&[1, 1, 2, 8], &|_| 1.0),
            floats(&[3, 2, 1, 8], &|_| 0.5),
            floats(&[3, 2, 1, 4], &|i| (i / 4) as f32),
            ints(&[1, 2], &[2, -1]),
            ints(&[1], &[0]),
            ints(&[1], &[4]),
            ints(&[1], &[3]),
            ints(&[1], &[1]),
            ints(&[], &[1]),
            floats(&[2], &|_| 0.0),
        ];
        let rets = vec![floats(&[1, 1, 2, 4], &|_| f32::NAN), floats(&[1, 1, 2], &|_| f32::NAN)];
        let attributes = vec![
            ("values_in_keys".into(), int(0)),
            ("scale".into(), float(1.0)),
            ("soft_cap".into(), float(0.0)),
            ("window".into(), int(-1)),
            ("interleave".into(), int(2)),
            ("world_size".into(), int(2)),
        ];
        Call { handler: burst_attention_decode_execute, args, rets, attributes }
    }

    /// The same call without a cache of values, and without slopes.
    fn without_values() -> Call {
        let mut call = Call::new();
        call.args[1] = floats(&[3, 2, 1, 8], &|i| if i % 8 < 4 { (i / 8) as f32 } else { 0.5 });
        call.args[0] = floats(&[1, 1, 2, 8], &|_| 0.0);
        call.args.remove(2);
        call.args.pop();
        call.attributes[0].1 = int(1);
        call
    }

    /// A merge of two parts of one row, whose out are 0 and 1 and whose lse are 1 and 2.
    fn merge() -> Call {
        let args = vec![floats(&[2, 1, 2], &|i| [0.0, 1.0, 1.0, 2.0][i])];
        let rets = vec![floats(&[1, 2], &|_| f32::NAN)];
        let handler = burst_attention_decode_merge_execute;
        Call { handler, args, rets, attributes: Vec::new() }
    }

    /// Returns the address of the first result.
    fn result(&self) -> *const f32 {
        self.rets[0].data.cast_const().cast()
    }

    fn run(self) -> Option<(u32, String)> {
        self.run_on(0)
    }

    /// Runs the call on a device of that number.
    fn run_on(self, device: i32) -> Option<(u32, String)> {
        let runtime = FakeRuntime::new(5, 1, device);
        let mut frame = FakeFrame::new(&self.args, &self.rets, self.attributes, &runtime);
        // SAFETY: `FakeFrame` makes valid frames, whose memory is never freed.
        take_error(unsafe { (self.handler)(frame.address()) })
    }
}

fn float(value: f32) -> FakeAttribute {
    FakeAttribute::Scalar(F32, value.to_ne_bytes().into())
}

fn int(value: i64) -> FakeAttribute {
    FakeAttribute::Scalar(sys::XLA_FFI_DataType_S64, value.to_ne_bytes().into())
}

/// Rank 1 of two holds the positions 2 and 3 in page 2, whose rows are 4 and 5.
#[test]
fn a_call_computes_the_partial_result_of_its_rank() {
    let call = Call::new();
    let o = call.result();
    assert_eq!(call.run(), None);
    // SAFETY: the call has ended, and its memory is never freed.
    assert_eq!(unsafe { *o }, 4.5, "the mean of two values with equal scores");
}

/// The values are the first four columns of the keys in rows 4 and 5.
#[test]
fn values_are_the_first_columns_of_keys_without_a_cache_of_their_own() {
    let call = Call::without_values();
    let o = call.result();
    assert_eq!(call.run(), None);
    // SAFETY: the call has ended, and its memory is never freed.
    assert_eq!(unsafe { *o.cast::<[f32; 8]>() }, [4.5; 8], "two heads of four columns");
    let refused =
        |change: &dyn Fn(&mut Call), words: &str| refused(Call::without_values(), change, words);
    refused(
        &|call| call.rets[0].dims[3] = 16,
        "columns of o must be at most those of key_cache (8)",
    );
    refused(&|call| drop(call.args.pop()), "operands must be 8, or 9 with slopes, got 7");
}

/// Other tests of this file run meanwhile, on device 0.
#[test]
fn the_timeline_has_an_event_of_each_call_in_a_process_of_its_own() {
    let path = concat!(env!("CARGO_TARGET_TMPDIR"), "/decode-trace.json");
    let name = CString::new(path).expect("no zero bytes");
    assert_eq!(Call::new().run_on(2), None);
    // SAFETY: the path is a C string.
    let start = || unsafe { burst_attention_trace(name.as_ptr()) };
    assert_eq!([start(), start()], [0, RECORDING]);
    assert_eq!(Call::new().run_on(3), None);
    assert_eq!(Call::without_values().run_on(4), None);
    // SAFETY: NULL is allowed.
    assert_eq!(unsafe { burst_attention_trace(ptr::null()) }, 0);
    let text = std::fs::read_to_string(path).expect("the file is written");
    for (device, count, bytes) in [(2, 0, 0), (3, 1, 2 * (8 + 4) * 4), (4, 1, 2 * 8 * 4)] {
        let thread = format!("\"pid\":1,\"tid\":{device},");
        let events: Vec<_> = text.lines().filter(|line| line.contains(&thread)).collect();
        assert_eq!(events.len(), count, "{text}");
        let args = format!(
            "\"args\":{{\"pairs\":4,\"sequences\":1,\"heads\":2,\"rows\":2,\"bytes\":{bytes},\"rank\":1}}"
        );
        for event in events {
            assert!(event.contains("\"name\":\"Decode 1 sequence, 2 positions\""), "{event}");
            assert!(event.contains(&args), "{args} in {event}");
        }
    }
    let process =
        "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":1,\"args\":{\"name\":\"Decode\"}}]}";
    assert!(text.trim_end().ends_with(process), "{text}");
}

#[test]
fn a_merge_weighs_the_parts_of_a_row() {
    let call = Call::merge();
    let merged = call.result();
    assert_eq!(call.run(), None);
    // SAFETY: the call has ended, and its memory is never freed.
    let [out, lse] = unsafe { *merged.cast::<[f32; 2]>() };
    let total = 1f32.exp() + 2f32.exp();
    assert!((out - 2f32.exp() / total).abs() < 1e-6, "{out}");
    assert!((lse - total.ln()).abs() < 1e-6, "{lse}");
}

/// Rings refuse the same numbers.
#[test]
fn numbers_that_scores_cannot_have_are_refused() {
    for number in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        refused(Call::new(), &|call| call.attributes[1].1 = float(number), "scale must be finite");
    }
    for number in [f32::NAN, f32::INFINITY, -1.0, 1e-38, 1e31] {
        let change = |call: &mut Call| call.attributes[2].1 = float(number);
        refused(Call::new(), &change, "soft cap must be from 1e-30 to 1e30");
    }
}

/// Asserts that a call is refused after a change.
fn refused(mut call: Call, change: &dyn Fn(&mut Call), words: &str) {
    change(&mut call);
    let (code, message) = call.run().expect("refused");
    assert_eq!(code, sys::XLA_FFI_Error_Code_INVALID_ARGUMENT, "{message}");
    assert!(message.contains(words), "{words} in {message}");
}

#[test]
fn wrong_merges_are_refused_with_what_was_expected() {
    let refused = |change: &dyn Fn(&mut Call), words| refused(Call::merge(), change, words);
    refused(&|call| drop(call.args.pop()), "operands must be 1, got 0");
    refused(&|call| call.args[0].dims = vec![2, 2], "rank of parts must be 3");
    refused(&|call| call.args[0].dims[2] = 0, "columns of parts must be at least 1");
    refused(&|call| call.args[0].dtype = S32, "parts must be float32");
    refused(&|call| call.rets[0].dims[0] = 2, "merged must be [1, 2], got [2, 2]");
    refused(&|call| call.rets[0].data = ptr::null_mut(), "merged");
}

#[test]
fn wrong_calls_are_refused_with_what_was_expected() {
    let refused = |change: &dyn Fn(&mut Call), words: &str| refused(Call::new(), change, words);
    refused(&|call| call.args.truncate(8), "operands must be 9, or 10 with slopes, got 8");
    refused(&|call| drop(call.rets.pop()), "results must be 2, got 1");
    refused(&|call| call.args[0].dtype = S32, "query must be float32, bfloat16 or float16");
    refused(&|call| call.args[1].dims[3] = 16, "key_cache must be [3, 2, 1, 8]");
    refused(&|call| call.args[1].dims[2] = 3, "a divisor of the heads of query (2), got 3");
    refused(&|call| call.args[1].dims[2] = 0, "heads of key_cache");
    refused(&|call| call.args[2].dims[0] = 2, "value_cache must be [3, 2, 1, 4]");
    refused(&|call| call.args[3].dims = vec![2], "rank of page_table must be 2");
    refused(&|call| call.args[5].dims[0] = 2, "lengths must be [1], got [2]");
    refused(&|call| call.args[6].dtype = F32, "starts must be int32");
    refused(&|call| call.args[8] = call.args[5].clone(), "rank");
    refused(&|call| call.args[8].data = call.args[5].data, "rank must be from 0 to 1, got 4");
    refused(&|call| call.args[9].dims[0] = 1, "slopes must be [2]");
    refused(&|call| call.args[4].data = ptr::null_mut(), "source");
    refused(&|call| call.rets[0].dims[3] = 8, "o must be [1, 1, 2, 4]");
    refused(&|call| call.rets[1].dims[2] = 1, "lse must be [1, 1, 2]");
    for (name, value, words) in [
        ("window", -2, "window must be from -1"),
        ("interleave", 0, "interleave must be from 1"),
        ("world_size", 0, "world_size must be from 1 to 65536"),
        ("values_in_keys", 2, "values_in_keys must be 0 for a call with value_cache, or 1"),
    ] {
        let change = |call: &mut Call| {
            call.attributes.retain(|(entry, _)| entry != name);
            call.attributes.push((name.into(), int(value)));
        };
        refused(&change, words);
    }
    refused(&|call| call.attributes.truncate(3), "attribute world_size must be given");
}
