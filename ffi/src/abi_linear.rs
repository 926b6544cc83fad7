//! What the library exports for linear attention. cbindgen makes the C header of this file, too.

use crate::cuda::{LinearKind, Platform, Stage, run_linear};
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

/// XLA's handler of target `burst_attention_linear_parts`, platform `CUDA`, stage initialize.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_linear_parts_cuda_initialize(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { run_linear(frame, LinearKind::State, Stage::Initialize, Platform::of_this_machine) }
}

/// XLA's handler of target `burst_attention_linear_parts`, platform `CUDA`, stage execute.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_linear_parts_cuda_execute(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { run_linear(frame, LinearKind::State, Stage::Execute, Platform::of_this_machine) }
}

/// XLA's handler of target `burst_attention_linear_attend`, platform `CUDA`, stage initialize.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_linear_attend_cuda_initialize(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { run_linear(frame, LinearKind::Attend, Stage::Initialize, Platform::of_this_machine) }
}

/// XLA's handler of target `burst_attention_linear_attend`, platform `CUDA`, stage execute.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_linear_attend_cuda_execute(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { run_linear(frame, LinearKind::Attend, Stage::Execute, Platform::of_this_machine) }
}
