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

/// What a plan has: columns of queries and keys, columns of values, and key/value heads.
type Sizes = (i64, i64, i64);

/// The limits of a band.
type Limits = (Option<i64>, Option<i64>);

const FULL: Limits = (None, None);
const CAUSAL: Limits = (None, Some(0));
/// A causal window; its corner between two ranks; a band on both sides; a part of a causal mask.
const BANDS: [Limits; 4] =
    [(Some(-1023), Some(0)), (Some(0), None), (Some(-1023), Some(512)), (None, Some(512))];

fn sdpa(
    pass: SdpaPass,
    element: Element,
    (head_dim, value_dim, kv_heads): Sizes,
    (lower, upper): Limits,
) -> Sdpa {
    use SdpaArray::{Delta, Key, KeyGrad, Lse, Out, OutGrad, Query, QueryGrad, Value, ValueGrad};
    let mut plan = Sdpa {
        pass,
        fixed_order: false,
        element,
        batch: 2,
        q_len: 4096,
        kv_len: 4096,
        heads: 8,
        kv_heads,
        head_dim,
        value_dim,
        lower,
        upper,
        softmax_scale: 0.125,
        workspace_bytes: 4096,
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

/// Returns the properties of each device, with its name and its version.
fn devices(functions: &'static Functions) -> Vec<(&'static str, i64, DeviceProperties)> {
    let device = |(name, version, multiprocessors)| {
        let text = properties(name, version, multiprocessors);
        let device = DeviceProperties::from_json(functions, &text).expect("known keys");
        (name, version, device)
    };
    DEVICES.map(device).into()
}

/// Compiles plans for all devices that `serves`, by their version, and prints the times.
fn compile(functions: &'static Functions, plans: &[Sdpa], serves: impl Fn(i64, &Sdpa) -> bool) {
    for (name, version, device) in devices(functions) {
        for sdpa in plans.iter().filter(|sdpa| serves(version, sdpa)) {
            let began = Instant::now();
            CompiledPlan::new(functions, sdpa, &device).expect("a plan");
            let took = began.elapsed();
            let Sdpa { pass, fixed_order, element, lower, upper, .. } = *sdpa;
            let sizes = (sdpa.head_dim, sdpa.value_dim, sdpa.kv_heads);
            let band = (lower, upper);
            println!("{name} {pass:?} {element:?} {sizes:?} {band:?} {fixed_order}: {took:?}");
        }
    }
}

#[test]
#[ignore = "needs cuDNN"]
fn real_cudnn_has_a_plan_for_every_operation_that_is_served() {
    let functions = Functions::load().expect("cuDNN");
    let narrow = [(64, 64, 8), (64, 64, 2), (128, 128, 8), (128, 128, 2)];
    let wide = [(192, 128, 8), (256, 256, 2)];
    let mut plans = Vec::new();
    for pass in SdpaPass::ALL {
        let mut add = |element, sizes: &[Sizes], bands: &[Limits]| {
            let each = |sizes| bands.iter().map(move |band| sdpa(pass, element, sizes, *band));
            plans.extend(sizes.iter().copied().flat_map(each));
        };
        add(Element::Bf16, &narrow, &[FULL, CAUSAL]);
        add(Element::F16, &narrow, &[CAUSAL]);
        add(Element::Bf16, &narrow[1..3], &BANDS);
        add(Element::Bf16, &wide, &[FULL, CAUSAL, BANDS[0]]);
    }
    compile(functions, &plans, |version, sdpa| {
        sdpa.head_dim < 256 || sdpa.pass == SdpaPass::Forward || version == 900
    });
}

#[test]
#[ignore = "needs cuDNN"]
fn real_cudnn_adds_in_a_fixed_order_with_little_workspace() {
    let functions = Functions::load().expect("cuDNN");
    let mut plans = Vec::new();
    for sizes in [(128, 128, 8), (192, 128, 2)] {
        for band in [FULL, CAUSAL, BANDS[0], BANDS[1]] {
            let sdpa = sdpa(SdpaPass::Backward, Element::Bf16, sizes, band);
            plans.push(Sdpa { fixed_order: true, ..sdpa });
        }
    }
    compile(functions, &plans, |version, _| version > 900);
}

/// The backend refuses these, see `has_columns` and `TARGETS` there.
#[test]
#[ignore = "needs cuDNN"]
fn real_cudnn_has_no_plan_with_256_columns_backward_on_blackwell() {
    let functions = Functions::load().expect("cuDNN");
    let wide = sdpa(SdpaPass::Backward, Element::Bf16, (256, 256, 8), CAUSAL);
    for (name, version, device) in devices(functions) {
        let has_plan = CompiledPlan::new(functions, &wide, &device).is_ok();
        assert_eq!(has_plan, version == 900, "{name}");
    }
}

#[test]
#[ignore = "needs cuDNN"]
fn real_cudnn_gets_enough_workspace_or_is_refused() {
    let functions = Functions::load().expect("cuDNN");
    let (name, version, multiprocessors) = DEVICES[0];
    let text = properties(name, version, multiprocessors);
    let device = DeviceProperties::from_json(functions, &text).expect("known keys");
    let plan = sdpa(SdpaPass::Backward, Element::Bf16, (64, 64, 2), CAUSAL);
    let little = Sdpa { workspace_bytes: 16, ..plan };
    let error = CompiledPlan::new(functions, &little, &device).expect_err("it needs more");
    assert!(error.to_string().contains("expected at most 16 bytes of workspace"), "{error}");
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
    let odd = Sdpa { head_dim: 60, ..sdpa(SdpaPass::Forward, Element::Bf16, (64, 64, 8), FULL) };
    assert!(CompiledPlan::new(functions, &odd, &device).is_err());
}
