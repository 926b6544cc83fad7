//! What the library says of itself.

use std::iter;

use burst_attention::Family;
use burst_attention::cuda::cudnn;
use burst_attention::cuda::libcuda::LibCuda;
use burst_attention::cuda::nccl::Nccl;
use burst_attention::host::isa::Isa;
use burst_attention::host::ring::Executor;
use burst_attention::operands::{DeviceKind, Dim, Operand};
use burst_attention_kernels::instances::{LATENT_VALUES, LATENT_WIDTH};
use burst_attention_kernels::launch;
use serde_json::{Value, json};

use crate::decode::arrays::names;
use crate::{images, sys};

/// Returns the version, and what computes on CPUs and on GPUs. Starts the compute threads.
pub(crate) fn describe() -> Value {
    let available: Vec<_> = Isa::available().iter().map(|isa| isa.name()).collect();
    let mut text = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "available_instruction_sets": available,
        "cuda": cuda(),
        "xla_ffi_api": format!("{}.{}", sys::XLA_FFI_API_MAJOR, sys::XLA_FFI_API_MINOR),
    });
    match Executor::global() {
        Ok(executor) => {
            text["instruction_set"] = executor.isa.name().into();
            text["compute_threads"] = executor.pool.current_num_threads().into();
        }
        Err(error) => text["instruction_set"] = error.to_string().into(),
    }
    text
}

/// Returns what a call may name and take: the families of schedules, the operands of features and
/// the arrays of decode in their order, and the sizes by which decode on GPUs cuts queries and keys.
pub(crate) fn interface() -> Value {
    let dims = |operand: Operand, kind| -> Vec<Value> {
        let batch = iter::once(Value::from("batch"));
        let name = |dim: &Dim| match *dim {
            Dim::Number(number) => Value::from(number),
            dim => Value::from(dim.name()),
        };
        batch.chain(operand.dims(kind).iter().map(name)).collect()
    };
    let operand = |operand: Operand| {
        let gradient = operand.gradient().map(
            |it| json!({ "cpu": dims(it, DeviceKind::Host), "cuda": dims(it, DeviceKind::Cuda) }),
        );
        json!({
            "name": operand.name(),
            "shape": dims(operand, DeviceKind::Host),
            "dtype": operand.element(DeviceKind::Host).to_string(),
            "gradient": gradient,
            "flag": operand.flag(),
        })
    };
    let schedule = |family: Family| json!({ "name": family.name(), "doc": family.doc() });
    let schedules = Family::ALL.map(schedule);
    let features: Vec<_> = Operand::of_features().map(operand).collect();
    let of = |kind| names(kind).collect::<Vec<_>>();
    let decode = json!({
        "few_rows": launch::FEW_ROWS,
        "many_rows": launch::MANY_ROWS,
        "most_runs": launch::MOST_RUNS,
        "latent_columns": LATENT_WIDTH,
        "latent_values": LATENT_VALUES,
        "page_elements": launch::PAGE_ELEMENTS,
        "arrays": {"cpu": of(DeviceKind::Host), "cuda": of(DeviceKind::Cuda)},
    });
    json!({ "schedules": schedules, "feature_operands": features, "decode": decode })
}

/// Returns the versions of the driver, NCCL and cuDNN, and the images. Does not start the driver.
fn cuda() -> Value {
    let known = |version: Option<String>| version.unwrap_or_else(|| "of unknown version".into());
    let driver = match LibCuda::find() {
        Ok(driver) => format!("CUDA {}", known(driver.version())),
        Err(error) => error.to_string(),
    };
    let nccl = match Nccl::load() {
        Ok(nccl) => known(nccl.version()),
        Err(error) => error.to_string(),
    };
    let cudnn = match cudnn::Functions::load() {
        Ok(cudnn) => cudnn.version().to_string(),
        Err(error) => error.to_string(),
    };
    json!({ "driver": driver, "nccl": nccl, "cudnn": cudnn, "kernels": images::describe() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_what_computes() {
        let text = describe().to_string();
        let parts = [
            "\"version\":\"",
            "\"instruction_set\":\"",
            "\"portable\"",
            "\"kernels\":\"",
            "\"xla_ffi_api\":\"",
            "\"driver\":\"",
            "\"nccl\":\"",
            "\"cudnn\":\"",
        ];
        for part in parts {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn the_interface_states_each_feature_operand() {
        let operands = &interface()["feature_operands"];
        let slopes = json!({
            "name": "alibi_slopes",
            "shape": ["batch", "heads"],
            "dtype": "float32",
            "gradient": { "cpu": ["batch", "heads"], "cuda": ["batch", "q_len", "heads"] },
            "flag": "slopes",
        });
        assert_eq!(operands[2], slopes);
        assert_eq!(operands[3]["shape"], json!(["batch", "kv_len", 2]));
    }
}
