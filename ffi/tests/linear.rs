//! The handlers of linear attention and of the delta rule, called as XLA calls them, with a fake
//! runtime.

use std::ffi::c_void;

use burst_attention_ffi::handlers::*;
use burst_attention_ffi::sys;
use burst_attention_test_frames::{FakeAttribute, FakeBuffer, FakeFrame, FakeRuntime, take_error};

const F32: u32 = sys::XLA_FFI_DataType_F32;

type Handler = unsafe extern "C" fn(*mut sys::XLA_FFI_CallFrame) -> *mut sys::XLA_FFI_Error;

/// A call whose memory is never freed.
#[derive(Clone)]
struct Call {
    handler: Handler,
    args: Vec<FakeBuffer>,
    rets: Vec<FakeBuffer>,
    scale: f32,
}

fn leak(values: Vec<f32>) -> *mut c_void {
    Box::leak(values.into_boxed_slice()).as_mut_ptr().cast()
}

fn floats(dims: &[i64], value: f32) -> FakeBuffer {
    let count = dims.iter().product::<i64>() as usize;
    FakeBuffer::new(F32, dims, leak(vec![value; count]))
}

/// Returns the first float of an array.
fn first(buffer: &FakeBuffer) -> f32 {
    // SAFETY: `floats` made the array, which is never freed, and no call is running.
    unsafe { *buffer.data.cast::<f32>() }
}

const TOKENS: i64 = 3;
const Q: [i64; 5] = [2, 1, TOKENS, 4, 8];
const K: [i64; 5] = [2, 1, TOKENS, 2, 8];
const V: [i64; 5] = [2, 1, TOKENS, 2, 16];
const OUT: [i64; 5] = [2, 1, TOKENS, 4, 16];
const ROWS: [i64; 4] = [2, 1, TOKENS, 4];
const STATE: [i64; 5] = [2, 1, 4, 8, 16];
const TRANSFER: [i64; 5] = [2, 1, 4, 8, 24];

/// Keys of one 1/8 in each column and values of ones, of which nothing decays.
fn call(handler: Handler, args: &[(&[i64], f32)], rets: &[&[i64]]) -> Call {
    let args = args.iter().map(|(dims, value)| floats(dims, *value)).collect();
    let rets = rets.iter().map(|dims| floats(dims, f32::NAN)).collect();
    Call { handler, args, rets, scale: 1.0 }
}

const QUERY: (&[i64], f32) = (&Q, 1.0);
const KEY: (&[i64], f32) = (&K, 0.125);
const VALUE: (&[i64], f32) = (&V, 1.0);
const LOGS: (&[i64], f32) = (&ROWS, 0.0);
const BETA: (&[i64], f32) = (&ROWS, 1.0);
const ZEROS: (&[i64], f32) = (&STATE, 0.0);
const DOUT: (&[i64], f32) = (&OUT, 1.0);

/// Returns the calls of linear attention: the state, the outputs, the gradients.
fn linear_calls() -> [Call; 3] {
    [
        call(burst_attention_linear_state_execute, &[KEY, VALUE, LOGS], &[&STATE]),
        call(
            burst_attention_linear_forward_execute,
            &[QUERY, KEY, VALUE, LOGS, ZEROS],
            &[&OUT, &STATE],
        ),
        call(
            burst_attention_linear_backward_execute,
            &[QUERY, KEY, VALUE, LOGS, ZEROS, DOUT, ZEROS],
            &[&Q, &K, &V, &ROWS, &STATE],
        ),
    ]
}

/// Returns the calls of the delta rule: the state, its gradient, the outputs, the gradients.
fn delta_calls() -> [Call; 4] {
    [
        call(burst_attention_delta_state_execute, &[KEY, VALUE, LOGS, BETA], &[&TRANSFER]),
        call(burst_attention_delta_grad_state_execute, &[QUERY, KEY, DOUT, LOGS, BETA], &[&STATE]),
        call(
            burst_attention_delta_forward_execute,
            &[QUERY, KEY, VALUE, LOGS, BETA, ZEROS],
            &[&OUT, &STATE],
        ),
        call(
            burst_attention_delta_backward_execute,
            &[QUERY, KEY, VALUE, LOGS, BETA, ZEROS, DOUT, ZEROS],
            &[&Q, &K, &V, &ROWS, &ROWS, &STATE],
        ),
    ]
}

impl Call {
    /// Runs the call, and returns the message of its error.
    fn run(&self) -> Result<(), String> {
        let runtime = FakeRuntime::new(5, 1, 0);
        let scale = FakeAttribute::Scalar(F32, self.scale.to_ne_bytes().into());
        let backward = FakeAttribute::Scalar(sys::XLA_FFI_DataType_PRED, vec![0]);
        let attributes = vec![("scale".into(), scale), ("backward".into(), backward)];
        let mut frame = FakeFrame::new(&self.args, &self.rets, attributes, &runtime);
        // SAFETY: `FakeFrame` makes valid frames, whose memory is never freed.
        let error = take_error(unsafe { (self.handler)(frame.address()) });
        error.map_or(Ok(()), |(_, message)| Err(message))
    }

    fn refused(&self, change: impl Fn(&mut Call), words: &str) {
        let mut call = self.clone();
        change(&mut call);
        let message = call.run().expect_err("refused");
        assert!(message.contains(words), "{words} in {message}");
    }
}

/// Rings refuse the same numbers. What the delta rule's tokens do to a state has no scale.
#[test]
fn a_scale_that_is_not_finite_is_refused() {
    let [state, forward, backward] = linear_calls();
    let [_, delta_gradient, delta_forward, delta_backward] = delta_calls();
    for call in [state, forward, backward, delta_gradient, delta_forward, delta_backward] {
        for scale in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            call.refused(|call| call.scale = scale, "attribute scale must be finite, got ");
        }
    }
}

/// Each token of linear attention adds 1/8 to the state; q takes 8 · 1/8 of each token's value.
#[test]
fn linear_attention_computes() {
    let [state, forward, backward] = linear_calls();
    for call in [&state, &forward, &backward] {
        assert_eq!(call.run(), Ok(()));
    }
    assert_eq!(first(&state.rets[0]), 0.375);
    assert_eq!([first(&forward.rets[0]), first(&forward.rets[1])], [1.0, 0.375]);
    let gradients: Vec<f32> = backward.rets.iter().map(first).collect();
    assert_eq!(gradients, [2.0, 2.0 * 3.0 * 16.0, 2.0 * 3.0, 0.0, 3.0]);
}

/// The norm of a key is 1/√8, so each token writes what is left of its value: 7/8 of the error of
/// the token before.
#[test]
fn the_delta_rule_computes() {
    let [state, gradient, forward, backward] = delta_calls();
    for call in [&state, &gradient, &forward, &backward] {
        assert_eq!(call.run(), Ok(()));
        assert!(call.rets.iter().all(|result| first(result).is_finite()));
    }
    let left = 0.125 * (1.0 + 0.875 + 0.875 * 0.875);
    assert_eq!([first(&forward.rets[0]), first(&forward.rets[1])], [1.0, left]);
    // SAFETY: the result has 24 columns and is never freed.
    let moved = unsafe { *state.rets[0].data.cast::<f32>().add(8) };
    assert_eq!(moved, left);
    assert_eq!(first(&gradient.rets[0]), first(&backward.rets[5]));
}

/// Decays of each channel have the results of decays of each head, if all are alike.
#[test]
fn each_channel_may_have_a_decay() {
    let channels = [&ROWS[..], &[8]].concat();
    for call in linear_calls().into_iter().chain(delta_calls()) {
        let mut by_channel = call.clone();
        let at = call.args.iter().position(|array| array.dims == ROWS).expect("log decays");
        by_channel.args[at] = floats(&channels, 0.0);
        by_channel.rets = call.rets.iter().map(|result| floats(&result.dims, f32::NAN)).collect();
        if by_channel.rets.len() > 2 {
            by_channel.rets[3] = floats(&channels, f32::NAN);
        }
        assert_eq!([call.run(), by_channel.run()], [Ok(()), Ok(())]);
        assert_eq!(first(&call.rets[0]), first(&by_channel.rets[0]));
        call.refused(|call| call.args[at] = floats(&[2, 1, 3, 4, 16], 0.0), "[2, 1, 3, 4, 8]");
    }
}

#[test]
fn wrong_shapes_and_types_are_refused() {
    let [linear, ..] = linear_calls();
    linear.refused(
        |call| call.args[2].dims = vec![2],
        "[..., length, heads] or [..., length, heads, key head_dim], got [2]",
    );
    let [state, gradient, forward, backward] = delta_calls();
    state.refused(|call| drop(call.args.pop()), "operands must be 4, got 3");
    state.refused(|call| call.rets[0].dims[4] = 16, "shape of state must be [2, 1, 4, 8, 24]");
    gradient.refused(
        |call| call.rets[0].dims[4] = 24,
        "shape of gradient of the state must be [2, 1, 4, 8, 16]",
    );
    gradient.refused(|call| call.args[2].dims[3] = 2, "shape of dout must be [2, 1, 3, 4, ");
    forward.refused(|call| call.args[4].dims[3] = 2, "shape of beta must be [2, 1, 3, 4]");
    forward.refused(
        |call| call.args[4].dtype = sys::XLA_FFI_DataType_BF16,
        "dtype of beta must be float32",
    );
    forward.refused(|call| call.args[1].dims[3] = 3, "heads of key must be a divisor");
    backward.refused(|call| call.rets[4].dims[2] = 4, "shape of dbeta must be [2, 1, 3, 4]");
    backward.refused(|call| drop(call.rets.pop()), "results must be 6, got 5");
}
