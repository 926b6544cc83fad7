//! What the library exports for rings of several processes. cbindgen makes the C header of this
//! file, too.

use std::ffi::{CStr, c_char};
use std::panic::catch_unwind;

use burst_attention::Pass;

use crate::relay;
use crate::sys::{XLA_FFI_CallFrame, XLA_FFI_Error};

/// XLA's handler of target `burst_attention_forward_stretch`, platform `cpu`, stage instantiate.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_forward_stretch_instantiate(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { relay::instantiate(frame, Pass::Forward) }
}

/// XLA's handler of target `burst_attention_forward_stretch`, platform `cpu`, stage execute.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_forward_stretch_execute(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { relay::execute(frame) }
}

/// XLA's handler of target `burst_attention_backward_stretch`, platform `cpu`, stage instantiate.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_backward_stretch_instantiate(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { relay::instantiate(frame, Pass::Backward) }
}

/// XLA's handler of target `burst_attention_backward_stretch`, platform `cpu`, stage execute.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_backward_stretch_execute(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { relay::execute(frame) }
}

/// JSON with the stretches of the pass that `request`, JSON too, describes, and the collective
/// permutes between them; or with an `error`. The string stays until the thread's next call.
///
/// # Safety
/// `request` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_relay(request: *const c_char) -> *const c_char {
    // SAFETY: passed on.
    let request = unsafe { CStr::from_ptr(request) };
    catch_unwind(|| relay::plan(request))
        .unwrap_or(c"{\"error\": \"a panic; please report it\"}".as_ptr())
}
