//! What the library exports for linear attention. cbindgen makes the C header of this file, too.

use crate::linear::{self, Kind};
use crate::sys::{XLA_FFI_CallFrame, XLA_FFI_Error};

/// XLA's handler of target `burst_attention_linear_state`, platform `cpu`, stage execute.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_linear_state_execute(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { linear::execute(frame, Kind::State) }
}

/// XLA's handler of target `burst_attention_linear_forward`, platform `cpu`, stage execute.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_linear_forward_execute(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { linear::execute(frame, Kind::Forward) }
}

/// XLA's handler of target `burst_attention_linear_backward`, platform `cpu`, stage execute.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_linear_backward_execute(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { linear::execute(frame, Kind::Backward) }
}
