//! What the library exports for CUDA. cbindgen makes the C header of this file, too.

use std::ffi::{CStr, c_char};
use std::panic::catch_unwind;

use burst_attention::Pass;

use crate::cuda::{self, Platform, Spread, Stage};
use crate::sys::{XLA_FFI_CallFrame, XLA_FFI_Error};

/// XLA's handler of target `burst_attention_forward`, platform `CUDA`, stage instantiate.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_forward_cuda_instantiate(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { cuda::instantiate(frame, Pass::Forward, Spread::Devices) }
}

/// XLA's handler of target `burst_attention_forward`, platform `CUDA`, stage prepare.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_forward_cuda_prepare(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { cuda::run(frame, Stage::Prepare, Platform::of_this_machine) }
}

/// XLA's handler of target `burst_attention_forward`, platform `CUDA`, stage initialize.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_forward_cuda_initialize(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { cuda::run(frame, Stage::Initialize, Platform::of_this_machine) }
}

/// XLA's handler of target `burst_attention_forward`, platform `CUDA`, stage execute.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_forward_cuda_execute(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { cuda::run(frame, Stage::Execute, Platform::of_this_machine) }
}

/// XLA's handler of target `burst_attention_backward`, platform `CUDA`, stage instantiate.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_backward_cuda_instantiate(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { cuda::instantiate(frame, Pass::Backward, Spread::Devices) }
}

/// XLA's handler of target `burst_attention_backward`, platform `CUDA`, stage prepare.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_backward_cuda_prepare(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { cuda::run(frame, Stage::Prepare, Platform::of_this_machine) }
}

/// XLA's handler of target `burst_attention_backward`, platform `CUDA`, stage initialize.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_backward_cuda_initialize(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { cuda::run(frame, Stage::Initialize, Platform::of_this_machine) }
}

/// XLA's handler of target `burst_attention_backward`, platform `CUDA`, stage execute.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_backward_cuda_execute(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { cuda::run(frame, Stage::Execute, Platform::of_this_machine) }
}

/// XLA's handler of a forward ring whose ranks are all on one device, platform `CUDA`, stage instantiate; for
/// tests and benchmarks. Operands and results hold the ranks' shards one after the other.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_virtual_forward_instantiate(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { cuda::instantiate(frame, Pass::Forward, Spread::Virtual) }
}

/// XLA's handler of a forward ring whose ranks are all on one device, platform `CUDA`, stage initialize; for
/// tests and benchmarks. Operands and results hold the ranks' shards one after the other.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_virtual_forward_initialize(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { cuda::run(frame, Stage::Initialize, Platform::of_this_machine) }
}

/// XLA's handler of a forward ring whose ranks are all on one device, platform `CUDA`, stage execute; for
/// tests and benchmarks. Operands and results hold the ranks' shards one after the other.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_virtual_forward_execute(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { cuda::run(frame, Stage::Execute, Platform::of_this_machine) }
}

/// XLA's handler of a backward ring whose ranks are all on one device, platform `CUDA`, stage instantiate; for
/// tests and benchmarks. Operands and results hold the ranks' shards one after the other.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_virtual_backward_instantiate(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { cuda::instantiate(frame, Pass::Backward, Spread::Virtual) }
}

/// XLA's handler of a backward ring whose ranks are all on one device, platform `CUDA`, stage initialize; for
/// tests and benchmarks. Operands and results hold the ranks' shards one after the other.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_virtual_backward_initialize(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { cuda::run(frame, Stage::Initialize, Platform::of_this_machine) }
}

/// XLA's handler of a backward ring whose ranks are all on one device, platform `CUDA`, stage execute; for
/// tests and benchmarks. Operands and results hold the ranks' shards one after the other.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_virtual_backward_execute(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { cuda::run(frame, Stage::Execute, Platform::of_this_machine) }
}

/// JSON with the `bytes` of workspace that a call on CUDA needs, which `request`, JSON too, describes;
/// or with an `error`. The string stays until the thread's next call.
///
/// # Safety
/// `request` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_workspace(request: *const c_char) -> *const c_char {
    // SAFETY: passed on.
    let request = unsafe { CStr::from_ptr(request) };
    catch_unwind(|| cuda::workspace(request))
        .unwrap_or(c"{\"error\": \"a panic; please report it\"}".as_ptr())
}
