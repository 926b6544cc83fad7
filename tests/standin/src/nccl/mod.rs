//! The functions of `libnccl.so.2`.

mod collective;
mod comm;
mod exchange;
mod mail;

use std::ffi::c_int;

pub use exchange::refused;

/// `ncclInvalidArgument` and `ncclInvalidUsage`.
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;
