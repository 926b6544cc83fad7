//! The functions that a C program can call. cbindgen makes the C header of this file.

use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::panic::catch_unwind;
use std::path::Path;

use burst_attention::host::trace;

use crate::{cuda, handler, json, kernels, rank_timeout};

/// Returns the version of the library. The string is constant.
#[unsafe(no_mangle)]
pub extern "C" fn burst_attention_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Answers a question; question and answer are JSON objects. The answer stays until this thread
/// asks again. Where there is no answer, the object is `{"error": …}`, which says why.
///
/// The field `ask` of the question is one of:
///
/// - `describe`: the version, what computes on CPUs and on GPUs, and the schedules;
/// - `kernels`: the name, tile and arguments of every image of a CUDA kernel;
/// - `kernel_launches`: the launches that compute what `compute` says on a device of `target`, such
///   as `sm_90`;
/// - `workspace`: the `bytes` of workspace that a call on CUDA needs;
/// - `simulate`: the predicted time of a schedule on a machine;
/// - `choose`: the schedule that takes the least time on a machine, and the times of all schedules.
///
/// # Safety
/// `question` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_ask(question: *const c_char) -> *const c_char {
    // SAFETY: the caller guarantees a C string.
    let question = unsafe { CStr::from_ptr(question) };
    json::ask(question)
}

/// Returns the bytes that all ranks of all rings have sent since the library was loaded.
#[unsafe(no_mangle)]
pub extern "C" fn burst_attention_bytes_sent() -> u64 {
    handler::bytes_sent()
}

/// Sets how many seconds ranks of a ring may be late before the call fails. Time in which rings
/// compute does not count. Infinity waits for ever. A number that is not positive restores the
/// default, 20.
#[unsafe(no_mangle)]
pub extern "C" fn burst_attention_set_rank_timeout(seconds: f64) {
    // The body can't panic, and the function has no way to report an error.
    let _ = catch_unwind(|| handler::set_rank_timeout(rank_timeout::from_seconds(seconds)));
}

/// Stops the thread that watches rings of several GPUs. Call it before the runtime gives up the GPUs
/// at the end of the process.
#[unsafe(no_mangle)]
pub extern "C" fn burst_attention_stop_watch() {
    // The body can't panic, and the function has no way to report an error.
    let _ = catch_unwind(cuda::stop_watch);
}

/// Opens the Chrome trace file `path` and records the steps of all rings and the calls of decode on
/// CPU devices from now on. NULL stops the recording and writes the file. Returns 0, or the system's
/// error number (`errno`), which is EALREADY while another file is being recorded, or -1 for an
/// error without a number.
///
/// # Safety
/// `path` is NULL or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_trace(path: *const c_char) -> i32 {
    let traced = catch_unwind(|| {
        if path.is_null() {
            return trace::stop();
        }
        // SAFETY: the caller guarantees NULL or a C string, and the pointer is not null.
        let path = unsafe { CStr::from_ptr(path) };
        trace::start(Path::new(OsStr::from_bytes(path.to_bytes())))
    });
    match traced {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => error.raw_os_error().unwrap_or(-1),
        Err(_) => -1,
    }
}

/// Returns the image of that name, as the CUDA driver loads it, and writes its length to `bytes`.
/// Returns NULL if no file in the library's folder has it. The image stays.
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
    match catch_unwind(|| kernels::image(name.to_str().ok()?)) {
        Ok(Some(image)) => {
            // SAFETY: the caller guarantees that the number can be written.
            unsafe { bytes.write(image.len() as u64) };
            image.as_ptr()
        }
        _ => std::ptr::null(),
    }
}
