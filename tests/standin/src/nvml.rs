//! The functions of `libnvidia-ml.so.1` that XLA calls.

#![allow(non_snake_case)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::call::{c_functions, put};
use crate::driver::{bus_id, copy_text};
use crate::settings::settings;

/// `NVML_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: c_int = 3;

c_functions! {
    fn nvmlInit() {}
    fn nvmlInit_v2() {}
    fn nvmlInitWithFlags(_flags: c_uint) {}
    fn nvmlShutdown() {}

    fn nvmlDeviceGetCount_v2(count: *mut c_uint) {
        put(count, settings().devices as c_uint);
    }

    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut *mut c_void) {
        put(device, (index as usize + 1) as *mut c_void);
    }

    fn nvmlDeviceGetHandleByPciBusId_v2(text: *const c_char, device: *mut *mut c_void) {
        // SAFETY: the caller passes a C string.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy().to_lowercase();
        let index = (0..settings().devices as c_int).find(|index| text.ends_with(&bus_id(*index)));
        put(device, (index.ok_or(NOT_SUPPORTED)? as usize + 1) as *mut c_void);
    }

    fn nvmlSystemGetDriverVersion(text: *mut c_char, room: c_uint) {
        copy_text("580.65.06", text, room as c_int);
    }

    fn nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) {
        put(version, 13_000);
    }

    fn nvmlDeviceGetFieldValues(_device: *mut c_void, _count: c_int, _values: *mut c_void) {
        return Err(NOT_SUPPORTED);
    }

    fn nvmlDeviceGetGpuFabricInfoV(_device: *mut c_void, _info: *mut c_void) {
        return Err(NOT_SUPPORTED);
    }

    fn nvmlSystemGetConfComputeState(_state: *mut c_void) {
        return Err(NOT_SUPPORTED);
    }

    fn nvmlDeviceGetMigMode(_device: *mut c_void, now: *mut c_uint, next: *mut c_uint) {
        put(now, 0);
        put(next, 0);
    }

    fn nvmlDeviceGetCurrPcieLinkGeneration(_device: *mut c_void, value: *mut c_uint) {
        put(value, 5);
    }

    fn nvmlDeviceGetMaxPcieLinkGeneration(_device: *mut c_void, value: *mut c_uint) {
        put(value, 5);
    }

    fn nvmlDeviceGetCurrPcieLinkWidth(_device: *mut c_void, value: *mut c_uint) {
        put(value, 16);
    }

    fn nvmlDeviceGetMaxPcieLinkWidth(_device: *mut c_void, value: *mut c_uint) {
        put(value, 16);
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: c_int) -> *const c_char {
    if code == 0 { c"success" } else { c"not supported" }.as_ptr()
}
