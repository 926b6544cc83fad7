//! The frame of every C function: it logs the call, lets it fail where a test wants that, and turns
//! its outcome into a code.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::device::current_or_none;
use crate::nccl::refused;
use crate::report::{complain, fault, has_log, log};

/// The outcome of a call: a code other than 0 is an error.
pub type Outcome<T = ()> = Result<T, c_int>;

/// Declares C functions. The body of each is a block that may return an error early with `?`. A text
/// after the arguments describes the call, for the log and for faults.
macro_rules! c_functions {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $([$($about:tt)+])? $body:block)*) => {$(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $type),*) -> std::ffi::c_int {
            let about = || $crate::call::c_functions!(@about $($($about)+)?);
            $crate::call::answer(stringify!($name), about, || {
                $body
                #[allow(unreachable_code)]
                Ok(())
            })
        }
    )*};
    (@about) => { String::new() };
    (@about $($about:tt)+) => { format!($($about)+) };
}
pub(crate) use c_functions;

/// Runs the body of a C function.
pub fn answer(name: &str, about: impl Fn() -> String, body: impl FnOnce() -> Outcome) -> c_int {
    let device = current_or_none().unwrap_or(0);
    // The names of faults have no version, as in the header.
    let plain = name.rsplit_once("_v").map_or(name, |(plain, _)| plain);
    let text = about();
    if let Some(code) = fault(plain, device, &text) {
        refused(plain);
        return code;
    }
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        complain(format!("{name} panicked"));
        Err(crate::code::NOT_SUPPORTED)
    });
    let code = outcome.err().unwrap_or(0);
    if has_log() {
        log(&format!("device {device}: {name} {text}: {code}"));
    }
    code
}

/// Writes an answer where the caller wants it, unless the caller wants none.
pub fn put<T>(place: *mut T, value: T) {
    if !place.is_null() {
        // SAFETY: callers of the libraries pass null or a place for one value.
        unsafe { place.write(value) };
    }
}

/// Reads a structure of the caller.
pub fn take<T: Copy>(place: *const T) -> Outcome<T> {
    if place.is_null() {
        return Err(crate::code::INVALID_VALUE);
    }
    // SAFETY: callers of the libraries pass null or the address of a value.
    Ok(unsafe { place.read() })
}
