//! How much workspace a call needs: what Python declares as one more result.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};

use burst_attention::cuda::ring::Call;
use burst_attention::{Dtype, Pass, Problem};
use serde::Deserialize;
use serde_json::json;

use crate::call::travels_of;
use crate::options::Options;

/// The shapes and attributes of a call.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    pass: Name,
    batch: usize,
    q_len: usize,
    kv_len: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    dtype: String,
    value_dim: usize,
    softmax_scale: f32,
    options: Options,
    layout: String,
    world_size: usize,
    backward: String,
}

#[derive(Deserialize, Clone, Copy, PartialEq)]
#[serde(rename_all = "snake_case")]
enum Name {
    Forward,
    Backward,
}

impl Request {
    fn call(&self) -> Result<Call, String> {
        let dtype = match self.dtype.as_str() {
            "bfloat16" => Dtype::Bf16,
            "float16" => Dtype::F16,
            other => return Err(format!("dtype must be bfloat16 or float16, got {other}")),
        };
        let problem = Problem {
            batch: self.batch,
            q_len: self.q_len,
            kv_len: self.kv_len,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            dtype,
            value_dim: self.value_dim,
            window: self.options.window(),
            softmax_scale: self.softmax_scale,
            features: self.options.features(),
            layout: self.layout.parse().map_err(|error| format!("{error}"))?,
            world_size: self.world_size,
        };
        problem.validate().map_err(|error| error.to_string())?;
        let travels = travels_of(&self.backward).map_err(|error| error.to_string())?;
        let (pass, travels) = match self.pass {
            Name::Forward => (Pass::Forward, None),
            Name::Backward => (Pass::Backward, travels),
        };
        let family = self.options.family();
        family.validate(problem.world_size).map_err(|error| error.to_string())?;
        Ok(Call { problem, family, pass, travels })
    }
}

/// `{"bytes": …}`, or `{"error": …}`. The string stays until the thread asks again.
pub fn workspace(request: &CStr) -> *const c_char {
    thread_local! {
        static ANSWER: RefCell<CString> = RefCell::default();
    }
    let call = serde_json::from_slice(request.to_bytes())
        .map_err(|error| format!("the request can't be read: {error}"))
        .and_then(|request: Request| request.call());
    let answer = match call {
        Ok(call) => json!({ "bytes": call.workspace_bytes() }),
        Err(error) => json!({ "error": error }),
    };
    ANSWER.with_borrow_mut(|text| {
        *text = CString::new(answer.to_string()).expect("JSON has no zero bytes");
        text.as_ptr()
    })
}
