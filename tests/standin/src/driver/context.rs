//! Contexts: each device has its primary one.

#![allow(non_snake_case)]

use std::ffi::{c_int, c_uint, c_ulonglong};

use cudarc::driver::sys::CUcontext;

use crate::call::{c_functions, put};
use crate::device::{Device, current, device, pop_current, push_current, set_current};

c_functions! {
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, index: c_int) {
        put(context, device(index)?.context());
    }

    fn cuDevicePrimaryCtxRelease_v2(index: c_int) {
        device(index)?;
    }

    fn cuDevicePrimaryCtxReset_v2(index: c_int) {
        device(index)?;
    }

    fn cuDevicePrimaryCtxSetFlags_v2(index: c_int, _flags: c_uint) {
        device(index)?;
    }

    fn cuDevicePrimaryCtxGetState(index: c_int, flags: *mut c_uint, active: *mut c_int) {
        device(index)?;
        put(flags, 0);
        put(active, 1);
    }

    fn cuCtxGetCurrent(context: *mut CUcontext) {
        let found = current().map_or(std::ptr::null_mut(), Device::context);
        put(context, found);
    }

    fn cuCtxSetCurrent(context: CUcontext) {
        let index = match context.is_null() {
            true => None,
            false => Some(Device::of_context(context)?.index),
        };
        set_current(index);
    }

    fn cuCtxPushCurrent_v2(context: CUcontext) {
        push_current(Device::of_context(context)?.index);
    }

    fn cuCtxPopCurrent_v2(context: *mut CUcontext) {
        put(context, device(pop_current()? as c_int)?.context());
    }

    fn cuCtxGetDevice(index: *mut c_int) {
        put(index, current()?.index as c_int);
    }

    fn cuCtxGetDevice_v2(index: *mut c_int, context: CUcontext) {
        let found = if context.is_null() { current()? } else { Device::of_context(context)? };
        put(index, found.index as c_int);
    }

    fn cuCtxGetFlags(flags: *mut c_uint) {
        put(flags, 0);
    }

    fn cuCtxGetApiVersion(_context: CUcontext, version: *mut c_uint) {
        put(version, 13_000);
    }

    fn cuCtxGetId(context: CUcontext, id: *mut c_ulonglong) {
        let found = if context.is_null() { current()? } else { Device::of_context(context)? };
        put(id, found.index as c_ulonglong + 1);
    }

    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        put(least, 0);
        put(greatest, -5);
    }

    fn cuCtxGetLimit(value: *mut usize, _limit: c_int) {
        put(value, 1024);
    }

    fn cuCtxSetLimit(_limit: c_int, _value: usize) {}

    fn cuCtxEnablePeerAccess(context: CUcontext, _flags: c_uint) {
        Device::of_context(context)?;
    }

    fn cuCtxSynchronize() {
        let device = current()?;
        device.synchronize();
        device.works()?;
    }
}
