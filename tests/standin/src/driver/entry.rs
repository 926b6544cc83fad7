//! Errors and entry points.

#![allow(non_snake_case)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use crate::call::{c_functions, put};
use crate::code;

/// Returns the address of a function of this library, in its newest version.
fn find(name: &str) -> Option<*mut c_void> {
    let symbol = |suffix: &str| CString::new(format!("{name}{suffix}")).ok();
    ["_v4", "_v3", "_v2", ""].into_iter().filter_map(symbol).find_map(|name| {
        // SAFETY: the name is a C string, and the library of this code stays loaded.
        let found = unsafe { libc::dlsym(own(), name.as_ptr()) };
        (!found.is_null()).then_some(found)
    })
}

/// Returns this library, as the dynamic linker knows it.
fn own() -> *mut c_void {
    // SAFETY: zero is a value of each field: numbers and pointers.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: the address lies in this library, and `info` can be written.
    unsafe {
        libc::dladdr(own as *const c_void, &raw mut info);
        libc::dlopen(info.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD)
    }
}

c_functions! {
    fn cuGetErrorName(error: c_int, text: *mut *const c_char) {
        put(text, code::describe(error).0.as_ptr());
    }

    fn cuGetErrorString(error: c_int, text: *mut *const c_char) {
        put(text, code::describe(error).1.as_ptr());
    }

    fn cuGetExportTable(table: *mut *const c_void, _id: *const c_void) {
        put(table, std::ptr::null());
        return Err(code::NOT_FOUND);
    }

    fn cuGetProcAddress_v2(
        name: *const c_char, function: *mut *mut c_void, _version: c_int, _flags: u64,
        status: *mut c_int
    ) {
        // SAFETY: the caller passes a C string.
        let found = find(&unsafe { CStr::from_ptr(name) }.to_string_lossy());
        put(function, found.unwrap_or(std::ptr::null_mut()));
        // CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND is 1.
        put(status, found.is_none().into());
    }
}
