//! Answers as text to those who ask through the C ABI.

use std::cell::RefCell;
use std::ffi::{CString, c_char};

use serde_json::{Value, json};

/// The answer, or `{"error": …}`. The string stays until the thread gives its next answer.
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
