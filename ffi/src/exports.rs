//! The functions that a C program can call. cbindgen makes the C header of this file.
//!
//! A function that returns JSON returns a string that stays until the thread's next call. Where it
//! can't answer, the JSON is an object with an `error`.

use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::panic::{UnwindSafe, catch_unwind};
use std::path::Path;

use burst_attention::host::trace;

use crate::{answer, choose, cuda, describe, handler, kernels, limit, simulate};

/// Returns what `answer` says, or an error where it panics.
fn answered(answer: impl FnOnce() -> *const c_char + UnwindSafe) -> *const c_char {
    catch_unwind(answer).unwrap_or(c"{\"error\": \"a panic; please report it\"}".as_ptr())
}

/// Returns the version of the library. The string is constant.
#[unsafe(no_mangle)]
pub extern "C" fn burst_attention_version() -> *const c_char {
    describe::version().as_ptr()
}

/// Returns JSON about the library, the instruction sets and threads it computes with, and the version
/// of the XLA interface it was built for.
#[unsafe(no_mangle)]
pub extern "C" fn burst_attention_describe() -> *const c_char {
    catch_unwind(|| answer::tell(Ok(describe::describe()))).unwrap_or(c"{}".as_ptr())
}

/// Returns how many bytes all ranks of all rings have sent since the library was loaded.
#[unsafe(no_mangle)]
pub extern "C" fn burst_attention_bytes_sent() -> u64 {
    handler::bytes_sent()
}

/// Sets how many seconds ranks of a ring may be late before the call fails. Time in which rings
/// compute does not count. Infinity waits for ever. A number that is not positive restores the
/// default, 20.
#[unsafe(no_mangle)]
pub extern "C" fn burst_attention_set_rank_timeout(seconds: f64) {
    // Nothing in there panics, and there is nobody to tell.
    let _ = catch_unwind(|| handler::set_rank_timeout(limit::from_seconds(seconds)));
}

/// Opens the Chrome trace file `path` and records the steps of all rings from now on. NULL stops the
/// recording and writes the file. Returns 0, or the error number of the system (`errno`), or -1 for an
/// error that has none.
///
/// # Safety
/// `path` is NULL or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_trace(path: *const c_char) -> i32 {
    let traced = catch_unwind(|| {
        if path.is_null() {
            return trace::stop();
        }
        // SAFETY: the caller guarantees a C string.
        let path = unsafe { CStr::from_ptr(path) };
        trace::start(Path::new(OsStr::from_bytes(path.to_bytes())))
    });
    match traced {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => error.raw_os_error().unwrap_or(-1),
        Err(_) => -1,
    }
}

/// Returns JSON about the CUDA kernels: every image's name, tile and arguments. The string is constant.
#[unsafe(no_mangle)]
pub extern "C" fn burst_attention_kernels() -> *const c_char {
    catch_unwind(|| kernels::describe().as_ptr()).unwrap_or(c"{}".as_ptr())
}

/// Returns JSON with the kernel launches that compute what the JSON `request` describes, on a device
/// of `target`, such as `sm_90`.
///
/// # Safety
/// `target` and `request` are C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_kernel_launches(
    target: *const c_char,
    request: *const c_char,
) -> *const c_char {
    // SAFETY: the caller guarantees C strings.
    let (target, request) = unsafe { (CStr::from_ptr(target), CStr::from_ptr(request)) };
    answered(|| kernels::launches(target, request))
}

/// Returns the image of that name, as the CUDA driver loads it, and its length. Returns NULL if no
/// file in the library's folder has it. The bytes stay.
///
/// # Safety
/// `name` is a C string, and `bytes` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_kernel_image(
    name: *const c_char,
    bytes: *mut u64,
) -> *const u8 {
    // SAFETY: the caller guarantees a C string.
    let name = unsafe { CStr::from_ptr(name) };
    match catch_unwind(|| kernels::image(name)) {
        Ok(Some(image)) => {
            // SAFETY: the caller guarantees that the number can be written.
            unsafe { bytes.write(image.len() as u64) };
            image.as_ptr()
        }
        _ => std::ptr::null(),
    }
}

/// Returns JSON with the `bytes` of workspace that the call on CUDA needs which the JSON `request`
/// describes.
///
/// # Safety
/// `request` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_workspace(request: *const c_char) -> *const c_char {
    // SAFETY: the caller guarantees a C string.
    let request = unsafe { CStr::from_ptr(request) };
    answered(|| cuda::workspace(request))
}

/// Returns JSON with the schedules of a problem, and what they would take on a machine. The JSON
/// `request` describes both.
///
/// # Safety
/// `request` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_simulate(request: *const c_char) -> *const c_char {
    // SAFETY: the caller guarantees a C string.
    let request = unsafe { CStr::from_ptr(request) };
    answered(|| simulate::simulate(request))
}

/// Returns JSON with the schedule that takes the least time for a problem on a machine, and what each
/// schedule would take. The JSON `request` describes both.
///
/// # Safety
/// `request` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_choose(request: *const c_char) -> *const c_char {
    // SAFETY: the caller guarantees a C string.
    let request = unsafe { CStr::from_ptr(request) };
    answered(|| choose::choose(request))
}
