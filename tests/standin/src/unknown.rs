//! Functions that the library lacks.

use std::ffi::c_int;

use crate::code;
use crate::report::complain;

macro_rules! unknown {
    ($($name:ident)*) => {$(
        #[allow(non_snake_case)]
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> c_int {
            complain(concat!(stringify!($name), " is not there").into());
            code::NOT_SUPPORTED
        }
    )*};
}

include!(concat!(env!("OUT_DIR"), "/unknown.rs"));
