//! Tests of cuDNN's plans with the real library, which need no GPU. `make test-cudnn` runs them, with
//! cuDNN from PyPI and a stand-in for the driver.

use std::time::Instant;

use burst_attention::cuda::cudnn::{CompiledPlan, DeviceProperties, Functions};
use burst_attention_kernels::backend::Computation;
use burst_attention_kernels::backend::cudnn::{BACKEND, Sdpa, Version};
use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{
    Features, Forward, ForwardResults, KeyGrads, Rectangle, Rows, Statistics, TileOperation,
};
use rayon::prelude::*;

/// Devices: their targets, their compute capability times 100, and their multiprocessors.
const DEVICES: [(&str, Target, i64, i64); 3] = [
    ("NVIDIA H200", Target::Sm90, 900, 132),
    ("NVIDIA B200", Target::Sm100, 1000, 148),
    ("NVIDIA B300", Target::Sm103, 1030, 148),
];

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

/// A kind of device, without a device.
struct Device {
    target: Target,
    properties: DeviceProperties,
}

/// Returns all kinds of devices.
fn devices(functions: &'static Functions) -> [Device; 3] {
    DEVICES.map(|(name, target, version, multiprocessors)| {
        let text = properties(name, version, multiprocessors);
        let properties = DeviceProperties::from_json(functions, &text).expect("known keys");
        Device { target, properties }
    })
}

/// What a tile has: columns of queries and keys, columns of values, and key/value heads.
type Sizes = (usize, usize, usize);

/// The limits of a band.
type Limits = (i64, i64);

const FULL: Limits = (i64::MIN, i64::MAX);
const CAUSAL: Limits = (i64::MIN, 0);
/// A causal window; its corner between two ranks; a band on both sides; a part of a causal mask.
const BANDS: [Limits; 4] = [(-1023, 0), (0, i64::MAX), (-1023, 512), (i64::MIN, 512)];

/// What a tile asks of cuDNN.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Asked {
    Forward,
    /// Gradients, in a fixed order or in any.
    Backward {
        fixed_order: bool,
    },
}

const ANY: Asked = Asked::Backward { fixed_order: false };
const FIXED: Asked = Asked::Backward { fixed_order: true };

fn rectangle(element: Element, (head_dim, value_dim, kv_heads): Sizes, band: Limits) -> Rectangle {
    let (lower, upper) = band;
    Rectangle {
        batch: 2,
        q_len: 4096,
        kv_len: 4096,
        heads: 8,
        kv_heads,
        head_dim,
        value_dim,
        element,
        lower,
        upper,
        softmax_scale: 0.125,
    }
}

/// Returns an operation over a rectangle, the first of several. Its arrays lie anywhere.
fn operation(asked: Asked, rectangle: Rectangle) -> TileOperation {
    let Rectangle { q_len, heads, .. } = rectangle;
    let at = |n: u64| Rows { address: n << 40, batch_stride: 1 << 30 };
    let statistics = |n: u64| Statistics {
        address: n << 40,
        batch_stride: (heads * q_len) as u64,
        head_stride: q_len as u64,
    };
    match asked {
        Asked::Forward => Forward {
            rectangle,
            features: Features::default(),
            q: at(1),
            k: at(2),
            v: at(3),
            acc: Some(at(4)),
            row_max: Some(statistics(5)),
            row_sum: Some(statistics(6)),
            o: None,
            lse: None,
            first: true,
            last: false,
        }
        .into(),
        Asked::Backward { fixed_order } => KeyGrads {
            q: at(1),
            k: at(2),
            v: at(3),
            dout: at(4),
            lse_log2: statistics(5),
            delta: statistics(6),
            dq_acc: Some(at(7)),
            fixed_order,
            results: Some(ForwardResults { o: at(8), lse: at(9) }),
            dk_acc: Some(at(10)),
            dv_acc: Some(at(11)),
            first: true,
            last: false,
            ..KeyGrads::fused(rectangle, Features::default())
        }
        .into(),
    }
}

/// Returns the plan of the call that computes an operation.
fn plan(operation: &TileOperation, target: Target) -> Sdpa {
    let computations = (BACKEND.lower)(operation, target, 1 << 50).expect("it is served");
    let call = computations.iter().find_map(|computation| match computation {
        Computation::Library(call) => Some(call),
        Computation::Launch(_) => None,
    });
    serde_json::from_str(&call.expect("a call of cuDNN").plan).expect("a plan")
}

/// Whether a version computes an operation, which is served on a target.
fn has(version: Version, operation: &TileOperation, target: Target) -> bool {
    (BACKEND.needs)(operation, target).is_some_and(|oldest| oldest <= version)
}

/// Returns operations: each pass over tiles of many sizes, types and masks.
fn operations() -> Vec<TileOperation> {
    let narrow = [(64, 64, 8), (64, 64, 2), (128, 128, 8), (128, 128, 2)];
    let wide = [(192, 128, 8), (256, 256, 2)];
    let mut all = Vec::new();
    for asked in [Asked::Forward, ANY, FIXED] {
        let mut add = |element, sizes: &[Sizes], bands: &[Limits]| {
            let each = |sizes: &Sizes, band| operation(asked, rectangle(element, *sizes, band));
            all.extend(sizes.iter().flat_map(|sizes| bands.iter().map(|band| each(sizes, *band))));
        };
        if asked == FIXED {
            add(Element::Bf16, &narrow[1..3], &[FULL, CAUSAL, BANDS[0], BANDS[1]]);
            add(Element::F16, &narrow[3..], &[CAUSAL]);
        } else {
            add(Element::Bf16, &narrow, &[FULL, CAUSAL]);
            add(Element::F16, &narrow, &[CAUSAL]);
            add(Element::Bf16, &narrow[1..3], &BANDS);
        }
        add(Element::Bf16, &wide, &[FULL, CAUSAL, BANDS[0]]);
    }
    all
}

/// Compiles the plans of operations on all devices that serve them, if the version has them.
#[test]
#[ignore = "needs cuDNN"]
fn real_cudnn_has_a_plan_for_every_operation_that_is_served() {
    let functions = Functions::load().expect("cuDNN");
    let version = functions.version();
    let operations = operations();
    for Device { target, properties } in &devices(functions) {
        let is_served = |one: &&TileOperation| (BACKEND.serves)(one, *target).is_ok();
        let served: Vec<_> = operations.iter().filter(is_served).collect();
        assert!(served.len() + 6 >= operations.len(), "{} on {}", served.len(), target.name());
        served.par_iter().filter(|one| has(version, one, *target)).for_each(|one| {
            let sdpa = plan(one, *target);
            let began = Instant::now();
            let compiled = CompiledPlan::new(functions, &sdpa, properties);
            compiled.unwrap_or_else(|error| panic!("{version} on {}: {error}", target.name()));
            let (took, Sdpa { pass, order, element, lower, upper, .. }) = (began.elapsed(), &sdpa);
            let sizes = (sdpa.head_dim, sdpa.value_dim, sdpa.kv_heads);
            let name = target.name();
            println!(
                "{name} {pass:?} {order:?} {element:?} {sizes:?} {lower:?} {upper:?}: {took:?}"
            );
        });
    }
}

/// What [`BACKEND`] refuses to do with older versions, they refuse to do.
#[test]
#[ignore = "needs cuDNN"]
fn real_cudnn_has_no_plan_before_the_version_that_an_operation_needs() {
    let functions = Functions::load().expect("cuDNN");
    let version = functions.version();
    let (narrow, wide) = ((128, 128, 8), (256, 256, 8));
    for Device { target, properties } in &devices(functions) {
        for sizes in [narrow, wide] {
            let one = operation(FIXED, rectangle(Element::Bf16, sizes, CAUSAL));
            let compiled = CompiledPlan::new(functions, &plan(&one, *target), properties);
            let name = target.name();
            assert_eq!(
                compiled.is_ok(),
                has(version, &one, *target),
                "{version}, {name}, {sizes:?}"
            );
        }
    }
}

/// Sums of 256 columns in any order are refused on Blackwell, where cuDNN proposes nothing that it
/// can compile.
#[test]
#[ignore = "needs cuDNN"]
fn real_cudnn_has_no_plan_with_256_columns_in_any_order_on_blackwell() {
    let functions = Functions::load().expect("cuDNN");
    let one = operation(ANY, rectangle(Element::Bf16, (256, 256, 8), CAUSAL));
    for Device { target, properties } in &devices(functions) {
        let compiled = CompiledPlan::new(functions, &plan(&one, *target), properties);
        assert_eq!(compiled.is_ok(), (BACKEND.serves)(&one, *target).is_ok(), "{}", target.name());
    }
}

/// The workspace of a fixed order on Hopper grows with the rows: 256 bytes, and 8 for each 64 query
/// rows of a head.
#[test]
#[ignore = "needs cuDNN"]
fn real_cudnn_gets_enough_workspace_or_is_refused() {
    let functions = Functions::load().expect("cuDNN");
    let [Device { target, properties }, ..] = &devices(functions);
    let square = rectangle(Element::Bf16, (64, 64, 2), FULL);
    let little = Sdpa { workspace_bytes: 16, ..plan(&operation(ANY, square), *target) };
    let error = CompiledPlan::new(functions, &little, properties).expect_err("it needs more");
    assert!(error.to_string().contains("expected at most 16 bytes of workspace"), "{error}");
    for (q_len, kv_len) in [(32_768, 4096), (130, 32_768), (8193, 70)] {
        let one = operation(FIXED, Rectangle { q_len, kv_len, ..square });
        if !has(functions.version(), &one, *target) {
            return;
        }
        let sdpa = plan(&one, *target);
        CompiledPlan::new(functions, &sdpa, properties).expect("the backend knows the workspace");
        let workspace_bytes = 256 + 8 * 16 * q_len.div_ceil(64) as i64;
        println!("{q_len} {kv_len}: {workspace_bytes}");
        let less = Sdpa { workspace_bytes: workspace_bytes - 1, ..sdpa };
        CompiledPlan::new(functions, &less, properties).expect_err("it needs more");
    }
}

#[test]
#[ignore = "needs cuDNN"]
fn real_cudnn_does_not_know_everything() {
    let functions = Functions::load().expect("cuDNN");
    let error = DeviceProperties::from_json(functions, "{}").expect_err("nothing is said");
    assert!(error.to_string().contains("cudnnBackendFinalize failed"), "{error}");
    let [Device { target, properties }, ..] = &devices(functions);
    let known = operation(Asked::Forward, rectangle(Element::Bf16, (64, 64, 8), FULL));
    let odd = Sdpa { head_dim: 60, ..plan(&known, *target) };
    assert!(CompiledPlan::new(functions, &odd, properties).is_err());
}
