//! Tests of cuDNN's plans with the real library, which need no GPU. `make test-cudnn` runs them, with
//! cuDNN from PyPI and a stand-in for the driver.

use std::collections::BTreeMap;
use std::time::Instant;

use burst_attention::cuda::cudnn::{CompiledPlan, DeviceProperties, Functions};
use burst_attention_kernels::backend::cudnn::{Sdpa, SdpaArray, SdpaPass};
use burst_attention_kernels::instances::Element;

/// Devices: their compute capability times 100, and their multiprocessors.
const DEVICES: [(&str, i64, i64); 3] =
    [("NVIDIA H200", 900, 132), ("NVIDIA B200", 1000, 148), ("NVIDIA B300", 1030, 148)];

/// Returns the properties of a device, with the keys that XLA writes.
fn properties(name: &str, version: i64, multiprocessors: i64) -> String {
    let limits = "\"maxBlockSize\":[1024,1024,64],\"maxGridSize\":[2147483647,65535,65535]";
    let numbers = [
        ("deviceVer", version),
        ("multiProcessorCount", multiprocessors),
        ("warpSize", 32),
        ("maxSharedMemoryPerBlock", 49_152),
        ("maxSharedMemoryPerBlockOptin", 232_448),
        ("oversizedSharedMemoryPerBlock", 0),
        ("reservedSharedMemoryPerBlock", 1024),
        ("maxRegistersPerSM", 65_536),
        ("maxCtasPerSM", 32),
        ("maxThreadsPerBlock", 1024),
        ("maxThreadsPerSM", 2048),
        ("regsPerBlock", 65_536),
        ("totalGlobalMem", 150_000_000_000),
        ("smClockRateKHz", 1_980_000),
        ("memClockRateKHz", 3_200_000),
        ("memoryBusWidth", 6144),
        ("l2CacheSize", 62_914_560),
        ("supportCoopLaunch", 1),
        ("pciDeviceId", 0),
        ("isTccDriver", 0),
        ("cudaDeviceId", 0),
        ("driverVer", 13_000),
    ];
    let numbers = numbers.map(|(key, number)| format!("\"{key}\":{number}")).join(",");
    format!("{{{numbers},{limits},\"deviceName\":\"{name}\"}}")
}

fn sdpa(pass: SdpaPass, element: Element, columns: i64, kv_heads: i64, is_causal: bool) -> Sdpa {
    use SdpaArray::{Delta, Key, KeyGrad, Lse, Out, OutGrad, Query, QueryGrad, Value, ValueGrad};
    let heads_share = kv_heads < 8;
    let mut plan = Sdpa {
        pass,
        element,
        batch: 2,
        q_len: 4096,
        kv_len: 4096,
        heads: 8,
        kv_heads,
        head_dim: columns,
        value_dim: columns,
        is_causal,
        softmax_scale: 0.125,
        workspace_bytes: 4096 + if heads_share { 2 * 2 * 2 * 4096 * 8 * columns } else { 0 },
        strides: BTreeMap::new(),
    };
    let backward = [OutGrad, QueryGrad, KeyGrad, ValueGrad, Delta];
    let arrays = [Query, Key, Value, Out, Lse];
    let backward = backward.into_iter().filter(|_| pass == SdpaPass::Backward);
    for array in arrays.into_iter().chain(backward) {
        let [_, heads, rows, columns] = plan.dims(array);
        let strides = match array {
            Delta => [heads * rows, rows, 1, 1],
            _ => [rows * heads * columns, columns, heads * columns, 1],
        };
        plan.strides.insert(array, strides);
    }
    plan
}

#[test]
#[ignore = "needs cuDNN"]
fn real_cudnn_has_a_plan_for_every_operation_that_is_served() {
    let functions = Functions::load().expect("cuDNN");
    for (name, version, multiprocessors) in DEVICES {
        let text = properties(name, version, multiprocessors);
        let device = DeviceProperties::from_json(functions, &text).expect("known keys");
        for pass in SdpaPass::ALL {
            for element in Element::ALL {
                for (columns, kv_heads) in [(64, 8), (64, 2), (128, 8), (128, 2)] {
                    for is_causal in [false, true] {
                        let sdpa = sdpa(pass, element, columns, kv_heads, is_causal);
                        let began = Instant::now();
                        CompiledPlan::new(functions, &sdpa, &device).expect("a plan");
                        let took = began.elapsed();
                        println!("{name} {pass:?} {element:?} {columns} {kv_heads}: {took:?}");
                    }
                }
            }
        }
    }
}

#[test]
#[ignore = "needs cuDNN"]
fn real_cudnn_gets_enough_workspace_or_is_refused() {
    let functions = Functions::load().expect("cuDNN");
    let (name, version, multiprocessors) = DEVICES[0];
    let text = properties(name, version, multiprocessors);
    let device = DeviceProperties::from_json(functions, &text).expect("known keys");
    let grouped = sdpa(SdpaPass::Backward, Element::Bf16, 64, 2, true);
    let little = Sdpa { workspace_bytes: 4096, ..grouped };
    let error = CompiledPlan::new(functions, &little, &device).expect_err("it needs more");
    assert!(error.to_string().contains("expected at most 4096 bytes of workspace"), "{error}");
}

#[test]
#[ignore = "needs cuDNN"]
fn real_cudnn_does_not_know_everything() {
    let functions = Functions::load().expect("cuDNN");
    let error = DeviceProperties::from_json(functions, "{}").expect_err("nothing is said");
    assert!(error.to_string().contains("cudnnBackendFinalize failed"), "{error}");
    let (name, version, multiprocessors) = DEVICES[0];
    let text = properties(name, version, multiprocessors);
    let device = DeviceProperties::from_json(functions, &text).expect("known keys");
    let odd = Sdpa { head_dim: 60, ..sdpa(SdpaPass::Forward, Element::Bf16, 64, 8, false) };
    assert!(CompiledPlan::new(functions, &odd, &device).is_err());
}
