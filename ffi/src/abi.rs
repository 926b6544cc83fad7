//! What the library exports beside the handlers for CUDA. cbindgen makes the C header of this file.

use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::panic::catch_unwind;
use std::path::Path;

use burst_attention::Pass;
use burst_attention::host::trace;

use crate::sys::{XLA_FFI_CallFrame, XLA_FFI_Error};
use crate::{answer, describe, handler, kernels, limit};

/// XLA's handler of target `burst_attention_forward`, platform `cpu`, stage instantiate.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_forward_instantiate(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { handler::instantiate(frame, Pass::Forward) }
}

/// XLA's handler of target `burst_attention_forward`, platform `cpu`, stage execute.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_forward_execute(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { handler::execute(frame) }
}

/// XLA's handler of target `burst_attention_backward`, platform `cpu`, stage instantiate.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_backward_instantiate(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { handler::instantiate(frame, Pass::Backward) }
}

/// XLA's handler of target `burst_attention_backward`, platform `cpu`, stage execute.
///
/// # Safety
/// Only XLA calls it, with a frame that is valid for the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_backward_execute(
    frame: *mut XLA_FFI_CallFrame,
) -> *mut XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { handler::execute(frame) }
}

/// Version of the library. The string is constant.
#[unsafe(no_mangle)]
pub extern "C" fn burst_attention_version() -> *const c_char {
    describe::version().as_ptr()
}

/// JSON about the library, the instruction sets and threads it computes with, and the version of
/// the XLA interface it was built for. The string stays until the thread's next call.
#[unsafe(no_mangle)]
pub extern "C" fn burst_attention_describe() -> *const c_char {
    catch_unwind(|| answer::tell(Ok(describe::describe()))).unwrap_or(c"{}".as_ptr())
}

/// Bytes that all ranks of all rings sent since the library was loaded.
#[unsafe(no_mangle)]
pub extern "C" fn burst_attention_bytes_sent() -> u64 {
    handler::bytes_sent()
}

/// Sets how many seconds ranks of a ring may be late before the call fails; time in which rings
/// compute does not count. Infinity waits for ever; what is not positive restores the default, 20.
#[unsafe(no_mangle)]
pub extern "C" fn burst_attention_set_rank_timeout(seconds: f64) {
    // Nothing in there panics, and there is nobody to tell.
    let _ = catch_unwind(|| handler::set_rank_timeout(limit::from_seconds(seconds)));
}

/// Opens the Chrome trace file `path` and records the steps of all rings from now on; NULL stops
/// and writes the file. Returns 0, or the error number of the system (`errno`), or -1 for an error
/// that has none.
///
/// # Safety
/// `path` is NULL or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_trace(path: *const c_char) -> i32 {
    let traced = catch_unwind(|| {
        if path.is_null() {
            return trace::stop();
        }
        // SAFETY: the caller gives a C string.
        let path = unsafe { CStr::from_ptr(path) };
        trace::start(Path::new(OsStr::from_bytes(path.to_bytes())))
    });
    match traced {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => error.raw_os_error().unwrap_or(-1),
        Err(_) => -1,
    }
}

/// JSON about the CUDA kernels: every image's name, tile and arguments. The string is constant.
#[unsafe(no_mangle)]
pub extern "C" fn burst_attention_kernels() -> *const c_char {
    catch_unwind(|| kernels::describe().as_ptr()).unwrap_or(c"{}".as_ptr())
}

/// JSON with the kernel launches that compute what `request`, JSON too, describes, on a device of
/// `target`, such as `sm_90`; or with an `error`. The string stays until the thread's next call.
///
/// # Safety
/// Both are C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_kernel_launches(
    target: *const c_char,
    request: *const c_char,
) -> *const c_char {
    // SAFETY: passed on.
    let (target, request) = unsafe { (CStr::from_ptr(target), CStr::from_ptr(request)) };
    catch_unwind(|| kernels::launches(target, request))
        .unwrap_or(c"{\"error\": \"a panic; please report it\"}".as_ptr())
}

/// The image of that name, as the CUDA driver loads it, and its length; NULL if no file in the
/// library's folder has it. The bytes stay.
///
/// # Safety
/// `name` is a C string, `bytes` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_kernel_image(
    name: *const c_char,
    bytes: *mut u64,
) -> *const u8 {
    // SAFETY: passed on.
    let name = unsafe { CStr::from_ptr(name) };
    match catch_unwind(|| kernels::image(name)) {
        Ok(Some(image)) => {
            // SAFETY: passed on.
            unsafe { bytes.write(image.len() as u64) };
            image.as_ptr()
        }
        _ => std::ptr::null(),
    }
}
