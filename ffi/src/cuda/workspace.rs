//! How much workspace a call needs: what Python declares as one more result.

use std::ffi::{CStr, c_char};

use burst_attention::Dtype;
use burst_attention::cuda::ring::Call;
use serde_json::{Value, json};

use crate::answer::tell;
use crate::request::{self, Described};

/// `{"bytes": …}`, or `{"error": …}`. The string stays until the thread asks again.
pub fn workspace(request: &CStr) -> *const c_char {
    tell(answer(request))
}

fn answer(request: &CStr) -> Result<Value, String> {
    let Described { problem, family, pass, travels, backward_order } = request::read(request)?;
    if problem.dtype == Dtype::F32 {
        return Err("dtype must be bfloat16 or float16, got float32".into());
    }
    let call = Call { problem, family, pass, travels, backward_order };
    Ok(json!({ "bytes": call.workspace_bytes() }))
}
