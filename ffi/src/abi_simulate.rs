//! What the library exports for predictions. cbindgen makes the C header of this file, too.

use std::ffi::{CStr, c_char};
use std::panic::catch_unwind;

use crate::{choose, simulate};

/// JSON with the schedules of a problem and what they would take on a machine, both of which
/// `request`, JSON too, describes; or with an `error`. The string stays until the thread's next
/// call.
///
/// # Safety
/// `request` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_simulate(request: *const c_char) -> *const c_char {
    // SAFETY: passed on.
    let request = unsafe { CStr::from_ptr(request) };
    catch_unwind(|| simulate::simulate(request))
        .unwrap_or(c"{\"error\": \"a panic; please report it\"}".as_ptr())
}

/// JSON with the schedule that takes least time for a problem on a machine, both of which `request`,
/// JSON too, describes, and with what each would take; or with an `error`. The string stays until
/// the thread's next call.
///
/// # Safety
/// `request` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn burst_attention_choose(request: *const c_char) -> *const c_char {
    // SAFETY: passed on.
    let request = unsafe { CStr::from_ptr(request) };
    catch_unwind(|| choose::choose(request))
        .unwrap_or(c"{\"error\": \"a panic; please report it\"}".as_ptr())
}
