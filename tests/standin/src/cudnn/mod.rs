//! The functions of cuDNN's backend interface that the product and XLA call. Graphs of attention
//! are carried out in host memory, operation by operation.

#![allow(non_snake_case)]

mod descriptor;
mod engine;
mod evaluate;
mod tensor;

use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Mutex};

use descriptor::{DESCRIPTORS, Descriptor, NOT_SUPPORTED};

use crate::call::{c_functions, put};
use crate::handles::Handles;
use crate::report::lock;
use crate::settings::settings;
use crate::stream::Stream;

/// Returns major, minor and patch of the version.
fn version() -> [c_int; 3] {
    let number = settings().cudnn as c_int;
    [number / 10_000, number / 100 % 100, number % 100]
}

/// A handle: the stream that it enqueues on.
struct Handle(Mutex<Option<Arc<Stream>>>);

static HANDLES: Handles<Handle> = Handles::new("handle of cuDNN");

#[unsafe(no_mangle)]
extern "C" fn cudnnGetVersion() -> usize {
    settings().cudnn as usize
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetErrorString(_code: c_int) -> *const c_char {
    c"an error of the stand-in for cuDNN".as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnGetLastErrorString(text: *mut c_char, length: usize) {
    let told = descriptor::last_error();
    let bytes: Vec<_> = told.bytes().take(length.saturating_sub(1)).chain([0]).collect();
    // SAFETY: the caller passes room for `length` characters.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), text, bytes.len().min(length)) };
}

c_functions! {
    fn cudnnGetProperty(which: c_int, value: *mut c_int) {
        put(value, version()[which.clamp(0, 2) as usize]);
    }

    fn cudnnCreate(handle: *mut usize) {
        put(handle, HANDLES.add(Arc::new(Handle(Mutex::default()))));
    }

    fn cudnnDestroy(handle: *mut c_void) {
        HANDLES.remove(handle)?;
    }

    fn cudnnSetStream(handle: *mut c_void, stream: *mut c_void) {
        *lock(&HANDLES.get(handle)?.0) = Some(Stream::of("cudnnSetStream", stream)?);
    }

    fn cudnnBackendCreateDescriptor(kind: c_int, descriptor: *mut usize) {
        put(descriptor, DESCRIPTORS.add(Arc::new(Descriptor::new(kind))));
    }

    fn cudnnBackendDestroyDescriptor(descriptor: *mut c_void) {
        DESCRIPTORS.remove(descriptor)?;
    }

    fn cudnnBackendSetAttribute(
        descriptor: *mut c_void,
        name: c_int,
        kind: c_int,
        count: i64,
        at: *const c_void,
    ) {
        // SAFETY: the caller passes the address of `count` values of the type.
        unsafe { DESCRIPTORS.get(descriptor)?.set(name, kind, count as usize, at) }?;
    }

    fn cudnnBackendGetAttribute(
        descriptor: *mut c_void,
        name: c_int,
        _kind: c_int,
        most: i64,
        count: *mut i64,
        at: *mut c_void,
    ) {
        // SAFETY: the caller passes room for `most` values.
        unsafe { DESCRIPTORS.get(descriptor)?.get(name, most as usize, count, at) }?;
    }

    fn cudnnBackendFinalize(descriptor: *mut c_void) ["{}", descriptor::word(descriptor)] {
        DESCRIPTORS.get(descriptor)?.finalize()?;
    }

    fn cudnnBackendExecute(handle: *mut c_void, plan: *mut c_void, pack: *mut c_void) {
        let stream = lock(&HANDLES.get(handle)?.0).clone().ok_or(NOT_SUPPORTED)?;
        stream.device().works()?;
        evaluate::enqueue(&stream, &*DESCRIPTORS.get(plan)?, &*DESCRIPTORS.get(pack)?)?;
    }
}
