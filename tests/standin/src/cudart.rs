//! The functions of `libcudart.so.13` that XLA's plugin calls: its own precompiled kernels register
//! here, and none of them runs. The real library needs undocumented tables of the driver.

#![allow(non_snake_case)]

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Mutex;

use cudarc::driver::sys::CUstream;

use crate::call::{c_functions, put};
use crate::code;
use crate::device::{current_or_none, device, set_current};
use crate::driver::copies::copy;
use crate::driver::streams::synchronize;
use crate::report::{complain, lock};
use crate::settings::settings;

/// The names of registered kernels, by the host function that stands for each.
static KERNELS: Mutex<Option<HashMap<usize, String>>> = Mutex::new(None);

c_functions! {
    fn __cudaRegisterFatBinaryEnd(_handle: *mut *mut c_void) {}
    fn __cudaUnregisterFatBinary(_handle: *mut *mut c_void) {}
    fn __cudaInitModule(_handle: *mut *mut c_void) {}

    fn cudaRuntimeGetVersion(version: *mut c_int) {
        put(version, 13_000);
    }

    fn cudaDriverGetVersion(version: *mut c_int) {
        put(version, 13_000);
    }

    fn cudaGetLastError() {}
    fn cudaPeekAtLastError() {}

    fn cudaGetDeviceCount(count: *mut c_int) {
        put(count, settings().devices as c_int);
    }

    fn cudaSetDevice(index: c_int) {
        set_current(Some(device(index)?.index));
    }

    fn cudaGetDevice(index: *mut c_int) {
        put(index, current_or_none().unwrap_or(0) as c_int);
    }

    // JAX's callbacks of the host call these two.
    fn cudaMemcpyAsync(to: u64, from: u64, bytes: usize, _kind: c_int, stream: CUstream) {
        copy("cudaMemcpyAsync", to, from, bytes, stream)?;
    }

    fn cudaStreamSynchronize(stream: CUstream) {
        synchronize("cudaStreamSynchronize", stream)?;
    }

    fn cudaGetFuncBySymbol(_function: *mut *mut c_void, symbol: *const c_void) {
        let name = lock(&KERNELS).as_ref().and_then(|kernels| kernels.get(&(symbol as usize)).cloned());
        complain(format!("XLA's precompiled kernel {name:?} can't run here"));
        return Err(code::NOT_SUPPORTED);
    }
}

#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterFatBinary(_binary: *mut c_void) -> *mut *mut c_void {
    static HANDLE: Mutex<usize> = Mutex::new(0);
    (&raw const HANDLE).cast_mut().cast()
}

/// # Safety
/// The caller must pass C strings for the names.
#[unsafe(no_mangle)]
unsafe extern "C" fn __cudaRegisterFunction(
    _handle: *mut *mut c_void,
    symbol: *const c_void,
    _device_function: *mut c_char,
    name: *const c_char,
) {
    // SAFETY: the caller passes a C string.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    lock(&KERNELS).get_or_insert_default().insert(symbol as usize, name);
}

#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterVar(
    _handle: *mut *mut c_void,
    _host: *mut c_char,
    _device: *mut c_char,
    _name: *const c_char,
) {
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetErrorString(code: c_int) -> *const c_char {
    code::describe(code).1.as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetErrorName(code: c_int) -> *const c_char {
    code::describe(code).0.as_ptr()
}
