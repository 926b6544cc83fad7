//! The CUDA kernels as other programs see them: what there is, how it is launched, the images.

use std::ffi::{CStr, CString};
use std::sync::LazyLock;

use burst_attention_kernels::instances::{Instance, Target};
use burst_attention_kernels::launch::{
    Delta, Finish, Forward, Join, KeyGrads, Launch, LaunchError, LinearAttend, LinearState, Merge,
    QueryGrads, layout,
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::answer::{read, tell};
use crate::images;

/// What is to be computed.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Request {
    Forward(Forward),
    KeyGrads(KeyGrads),
    QueryGrads(QueryGrads),
    Delta(Delta),
    Finish(Finish),
    Merge(Merge),
    Join(Join),
    LinearState(LinearState),
    LinearAttend(LinearAttend),
}

impl Request {
    fn launches(&self, target: Target) -> Result<Vec<Launch>, LaunchError> {
        match self {
            Request::Forward(description) => description.launches(target),
            Request::KeyGrads(description) => description.launches(target),
            Request::QueryGrads(description) => description.launches(target),
            Request::Delta(description) => description.launches(target),
            Request::Finish(description) => description.launches(target),
            Request::Merge(description) => description.launches(target),
            Request::Join(description) => description.launches(target),
            Request::LinearState(description) => description.launches(target),
            Request::LinearAttend(description) => description.launches(target),
        }
    }
}

/// All images that there can be: `{"images": [{"name", "kernel", …, "arguments": […]}]}`.
pub fn describe() -> &'static CStr {
    static TEXT: LazyLock<CString> = LazyLock::new(|| {
        let images: Vec<Value> = Instance::all().map(|instance| image_json(&instance)).collect();
        c_string(json!({ "images": images }).to_string())
    });
    &TEXT
}

fn image_json(instance: &Instance) -> Value {
    let arguments = instance.kernel.arguments();
    let tile = instance.tile();
    let arguments: Vec<Value> = arguments
        .iter()
        .zip(layout(arguments))
        .map(|(argument, place)| {
            json!({
                "name": argument.name,
                "kind": format!("{:?}", argument.kind).to_lowercase(),
                "offset": place.offset,
                "bytes": place.size,
                "divisor": argument.divisor,
                "doc": argument.doc.trim(),
            })
        })
        .collect();
    json!({
        "name": instance.to_string(),
        "kernel": instance.kernel,
        "element": instance.element,
        "width": instance.width,
        "target": instance.target,
        "rows": tile.rows,
        "keys": tile.keys,
        "warps": tile.warps,
        "entry": instance.entry(),
        "arguments": arguments,
    })
}

/// The launches that compute `request` on a device of `target`, or `{"error": …}`. The string
/// stays until the thread asks again.
pub fn launches(target: &CStr, request: &CStr) -> *const std::ffi::c_char {
    tell(answer(target, request).map(|launches| json!({ "launches": launches })))
}

fn answer(target: &CStr, request: &CStr) -> Result<Vec<Launch>, String> {
    let target = Target::of_name(&target.to_string_lossy())?;
    let request: Request = read(request)?;
    request.launches(target).map_err(|error| error.to_string())
}

/// The image of that name, if there is a file with it beside the library.
pub fn image(name: &CStr) -> Option<&'static [u8]> {
    let name = name.to_str().ok()?;
    let instance = Instance::all().find(|instance| instance.to_string() == name)?;
    images::find(&instance).ok()
}

fn c_string(text: String) -> CString {
    CString::new(text).expect("JSON has no zero bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(target: &CStr, request: &str) -> Value {
        let request = CString::new(request).unwrap();
        let answer = launches(target, &request);
        // SAFETY: the thread does not ask again before it is parsed.
        let answer = unsafe { CStr::from_ptr(answer) };
        serde_json::from_slice(answer.to_bytes()).unwrap()
    }

    const FINISH: &str = r#"{"finish": {"batch": 2, "rows": 70, "heads": 3, "head_dim": 96,
        "element": "bf16", "a": {"address": 4096, "batch_stride": 20160},
        "out": {"address": 8192, "batch_stride": 20160}}}"#;

    #[test]
    fn describes_every_image_with_its_arguments() {
        let text: Value = serde_json::from_slice(describe().to_bytes()).unwrap();
        let images = text["images"].as_array().unwrap();
        assert_eq!(images.len(), Instance::all().count());
        let forward = images.iter().find(|i| i["name"] == "attention_fwd_bf16_d128_sm_90").unwrap();
        assert_eq!(forward["entry"], "attention_fwd_entry");
        assert_eq!(forward["arguments"][0]["name"], "q");
        assert_eq!(forward["arguments"][0]["kind"], "activations");
        assert_eq!(forward["arguments"][8]["offset"], 64);
    }

    #[test]
    fn answers_a_request_with_launches() {
        let answer = ask(c"sm_90", FINISH);
        let launch = &answer["launches"][0];
        assert_eq!(launch["image"], "finish_bf16_d128_sm_90", "{answer}");
        assert_eq!(launch["grid"], json!([2 * 3 * 2, 1, 1]));
        assert_eq!(launch["values"][0], json!({ "pointer": 4096 }));
    }

    #[test]
    fn answers_what_is_wrong_with_a_request() {
        let error = |answer: Value| answer["error"].as_str().unwrap().to_owned();
        assert!(error(ask(c"sm_70", FINISH)).contains("expected a target of sm_80"));
        assert!(error(ask(c"sm_90", "{")).contains("can't be read"));
        let odd = FINISH.replace("96", "100");
        assert!(error(ask(c"sm_90", &odd)).contains("multiple of 8"), "{}", ask(c"sm_90", &odd));
    }
}
