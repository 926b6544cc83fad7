//! Answers as text to those who ask through the C ABI.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Answers a request, JSON both; or with `{"error": …}`. The string stays until the thread is
/// answered again.
pub fn answered<Asked: DeserializeOwned>(
    request: &CStr,
    answer: impl FnOnce(&Asked) -> Result<Value, String>,
) -> *const c_char {
    tell(read(request).and_then(|request| answer(&request)))
}

/// What a request says.
///
/// # Errors
/// If it can't be read.
pub fn read<Asked: DeserializeOwned>(request: &CStr) -> Result<Asked, String> {
    serde_json::from_slice(request.to_bytes())
        .map_err(|error| format!("the request can't be read: {error}"))
}

/// The answer, or `{"error": …}`. The string stays until the thread is answered again.
pub fn tell(answer: Result<Value, String>) -> *const c_char {
    thread_local! {
        static ANSWER: RefCell<CString> = RefCell::default();
    }
    let answer = answer.unwrap_or_else(|error| json!({ "error": error }));
    ANSWER.with_borrow_mut(|text| {
        *text = CString::new(answer.to_string()).expect("JSON has no zero bytes");
        text.as_ptr()
    })
}
