//! The JSON interface: a question comes in, an answer goes out.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::catch_unwind;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::answer::Result;
use crate::{backends, choose, describe, kernels, simulate, travels, workspace};

/// A question. Its field `ask` names the variant, and the other fields are the variant's.
#[derive(Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case", deny_unknown_fields)]
enum Question {
    Describe {},
    Interface {},
    Kernels {},
    KernelLaunches(Box<kernels::Request>),
    Backends(backends::Request),
    Workspace(workspace::Request),
    Travels(travels::Request),
    Simulate(simulate::Request),
    Choose(choose::Request),
}

impl Question {
    fn answer(&self) -> Result<Value> {
        match self {
            Question::Describe {} => Ok(describe::describe()),
            Question::Interface {} => Ok(describe::interface()),
            Question::Kernels {} => Ok(kernels::describe()),
            Question::KernelLaunches(request) => request.answer(),
            Question::Backends(request) => request.answer(),
            Question::Workspace(request) => request.answer(),
            Question::Travels(request) => request.answer(),
            Question::Simulate(request) => request.answer(),
            Question::Choose(request) => request.answer(),
        }
    }
}

/// Returns the answer to `question` as a string that stays until this thread asks again.
pub(crate) fn ask(question: &CStr) -> *const c_char {
    thread_local! {
        static ANSWER: RefCell<CString> = RefCell::default();
    }
    let answered = catch_unwind(|| {
        let answer = answer(question.to_bytes()).to_string();
        ANSWER.with_borrow_mut(|kept| {
            *kept = CString::new(answer).expect("JSON has no zero bytes");
            kept.as_ptr()
        })
    });
    answered.unwrap_or(c"{\"error\": \"a panic; please report it\"}".as_ptr())
}

/// Returns the answer to `question`, or `{"error": …}`.
pub(crate) fn answer(question: &[u8]) -> Value {
    let answer = match read(question) {
        Ok(question) => question.answer(),
        Err(error) => Err(format!("the request can't be read: {error}").into()),
    };
    answer.unwrap_or_else(|error| json!({ "error": error.to_string() }))
}

fn read(question: &[u8]) -> serde_json::Result<Question> {
    Question::deserialize(serde_json::from_slice::<Value>(question)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_malformed_question_gets_what_was_expected_and_what_came() {
        let cases = [
            ("{", "EOF while parsing an object"),
            ("", "EOF while parsing a value"),
            ("5", "invalid type: integer `5`"),
            ("{}", "missing field `ask`"),
            (r#"{"ask": "weather"}"#, "unknown variant `weather`, expected one of `describe`, "),
            (r#"{"ask": 7}"#, "invalid type: integer `7`, expected variant identifier"),
            (r#"{"ask": "kernels", "of": 1}"#, "unknown field `of`"),
            (r#"{"ask": "workspace"}"#, "missing field `pass`"),
        ];
        for (question, expected) in cases {
            let answer = answer(question.as_bytes());
            let error = answer["error"].as_str().unwrap();
            assert!(error.starts_with("the request can't be read: "), "{error}");
            assert!(error.contains(expected), "{question}: {error}");
        }
        assert!(answer(b"\xff")["error"].is_string());
    }

    #[test]
    fn an_answer_stays_until_the_thread_asks_again() {
        let first = ask(c"{");
        // Another thread's answer has memory of its own.
        std::thread::spawn(|| assert!(!ask(c"5").is_null())).join().unwrap();
        // SAFETY: this thread has not asked again.
        let answer = unsafe { CStr::from_ptr(first) }.to_str().unwrap();
        assert!(answer.contains("EOF while parsing an object"), "{answer}");
    }
}
