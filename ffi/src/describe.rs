//! What a report of a problem should say about this library.

use std::ffi::CStr;

use burst_attention::cuda::libcuda::LibCuda;
use burst_attention::cuda::nccl::Nccl;
use burst_attention::host::isa::Isa;
use burst_attention::host::ring::Executor;
use serde_json::{Value, json};

use crate::{images, sys};

/// The version of the package, as a C string.
pub fn version() -> &'static CStr {
    let version = concat!(env!("CARGO_PKG_VERSION"), "\0");
    CStr::from_bytes_with_nul(version.as_bytes()).expect("one zero byte, at the end")
}

/// A JSON object. Asking for it starts the compute threads.
pub fn describe() -> Value {
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
        Err(error) => text["error"] = error.to_string().into(),
    }
    text
}

/// What there is to run on GPUs with. It does not start the driver.
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
    json!({ "driver": driver, "nccl": nccl, "kernels": images::describe() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_what_computes() {
        let text = describe().to_string();
        let parts = [
            "\"version\":\"",
            "\"instruction_set\":\"",
            "\"portable\"",
            "\"kernels\":\"",
            "\"xla_ffi_api\":\"",
            "\"driver\":\"",
            "\"nccl\":\"",
        ];
        for part in parts {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
