//! The CUDA kernels as other programs see them: images, their arguments and launches.

use burst_attention_kernels::instances::{Instance, Target};
use burst_attention_kernels::launch::TileOperation;
use burst_attention_kernels::record::layout;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::answer::Result;
use crate::images;

/// A computation, and the kind of device that does it, such as `sm_90`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Request {
    target: String,
    compute: TileOperation,
}

impl Request {
    /// Returns `{"launches": […]}`.
    pub(crate) fn answer(&self) -> Result<Value> {
        let target = Target::of_name(&self.target)?;
        Ok(json!({ "launches": self.compute.launches(target)? }))
    }
}

/// Returns `{"images": [{"name", "kernel", …, "arguments": […]}]}` with all images that there can
/// be.
pub(crate) fn describe() -> Value {
    let images: Vec<Value> = Instance::all().map(|instance| image_json(&instance)).collect();
    json!({ "images": images })
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
        "kernel": instance.kernel.name(),
        "element": instance.element.name(),
        "width": instance.width,
        "target": instance.target.name(),
        "rows": tile.rows,
        "keys": tile.keys,
        "warps": tile.warps,
        "entry": instance.entry(),
        "arguments": arguments,
    })
}

/// Returns the image of that name, if a file in the library's folder has it.
pub(crate) fn image(name: &str) -> Option<&'static [u8]> {
    let instance = Instance::all().find(|instance| instance.to_string() == name)?;
    images::find(&instance).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json;

    fn ask(target: &str, compute: &Value) -> Value {
        let request = json!({ "ask": "kernel_launches", "target": target, "compute": compute });
        json::answer(request.to_string().as_bytes())
    }

    fn cast() -> Value {
        json!({ "cast": {
            "batch": 2, "rows": 70, "heads": 3, "head_dim": 96, "element": "bf16",
            "a": { "address": 4096, "batch_stride": 20160 },
            "out": { "address": 8192, "batch_stride": 20160 },
        } })
    }

    #[test]
    fn describes_every_image_with_its_arguments() {
        let answer = json::answer(br#"{"ask": "kernels"}"#);
        let images = answer["images"].as_array().unwrap();
        assert_eq!(images.len(), Instance::all().count());
        let forward = images.iter().find(|i| i["name"] == "attention_fwd_bf16_d128_sm_90").unwrap();
        assert_eq!(forward["entry"], "attention_fwd_entry");
        assert_eq!(forward["arguments"][0]["name"], "q");
        assert_eq!(forward["arguments"][0]["kind"], "activations");
        assert_eq!(forward["arguments"][8]["offset"], 64);
    }

    #[test]
    fn answers_a_request_with_launches() {
        let answer = ask("sm_90", &cast());
        let launch = &answer["launches"][0];
        assert_eq!(launch["image"], "cast_bf16_d128_sm_90", "{answer}");
        assert_eq!(launch["grid"], json!([2 * 3 * 2, 1, 1]));
        assert_eq!(launch["values"][0], json!({ "pointer": 4096 }));
    }

    #[test]
    fn answers_what_is_wrong_with_a_request() {
        let error = |answer: Value| answer["error"].as_str().unwrap().to_owned();
        assert!(error(ask("sm_70", &cast())).contains("expected a target of sm_80"));
        assert!(error(ask("sm_90", &json!({}))).contains("can't be read"));
        let mut odd = cast();
        odd["cast"]["head_dim"] = 100.into();
        assert!(error(ask("sm_90", &odd)).contains("multiple of 8"), "{}", ask("sm_90", &odd));
    }
}
