//! Tests of linear attention on GPUs, from XLA's handlers to results in memory.

use std::ffi::c_void;
use std::ptr;

use burst_attention::cuda::driver::Stream;
use burst_attention_device_tests::World;
use burst_attention_ffi::cuda::{LinearKind, Platform, Stage, run_linear};
use burst_attention_ffi::sys;
use burst_attention_interpreter::Address;
use burst_attention_recorder::{Recorder, images, nccl};
use burst_attention_reference::linear::{Head, add_rows, rows_of};
use burst_attention_test_frames::gpu::FakeGpu;
use burst_attention_test_frames::{FakeAttribute, FakeBuffer, FakeFrame, FakeRuntime, take_error};
use half::bf16;

const BATCH: usize = 2;
const ROWS: usize = 150;
const PADDED: usize = 192;
const PART: usize = 64;
const PARTS: usize = 3;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 16;
/// Columns of values.
const WIDE: usize = 24;
/// The log decay of every token, in base 2.
const LOG: f32 = -0.03;

/// One device, its memory, and the platform of the handlers.
struct Gpu {
    recorder: Recorder,
    platform: &'static Platform,
    stream: Stream,
    world: World,
}

/// Returns numbers between −1 and 1 in bfloat16.
fn numbers(count: usize, seed: usize) -> Vec<bf16> {
    let number = |n: usize| ((n * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0;
    (0..count).map(|n| bf16::from_f32(number(n))).collect()
}

impl Gpu {
    fn new() -> Gpu {
        let recorder = Recorder::new();
        let platform = Platform::new(Box::new(recorder.clone()), images, || Ok(nccl()));
        let stream = recorder.add_device();
        // Handlers need a platform that lives as long as the process.
        Gpu { recorder, platform: Box::leak(Box::new(platform)), stream, world: World::new() }
    }

    fn array(&mut self, name: &str, dims: &[usize], dtype: u32) -> (FakeBuffer, Address) {
        let bytes = if dtype == sys::XLA_FFI_DataType_F32 { 4 } else { 2 };
        let count: usize = dims.iter().product();
        let at = self.world.allocate(0, name, (count * bytes) as u64);
        let dims: Vec<_> = dims.iter().map(|&dim| dim as i64).collect();
        (FakeBuffer::new(dtype, &dims, pointer(at.0)), at)
    }

    fn tokens(&mut self, name: &str, heads: usize, dim: usize, seed: usize) -> FakeBuffer {
        let dims = [BATCH, ROWS, heads, dim];
        let (buffer, at) = self.array(name, &dims, sys::XLA_FFI_DataType_BF16);
        self.world.memory.write_bf16(at, &numbers(dims.iter().product(), seed));
        buffer
    }

    fn sums(&mut self) -> FakeBuffer {
        let (buffer, at) = self.array("sums", &[BATCH, HEADS, PADDED], sys::XLA_FFI_DataType_F32);
        let sum = |row: usize| (row.min(ROWS - 1) % 64 + 1) as f32 * LOG;
        let sums: Vec<_> = (0..BATCH * HEADS * PADDED).map(|n| sum(n % PADDED)).collect();
        self.world.memory.write_f32(at, &sums);
        buffer
    }

    fn call(
        &self,
        kind: LinearKind,
        stage: Stage,
        args: &[FakeBuffer],
        rets: &[FakeBuffer],
    ) -> Result<(), String> {
        let gpu = FakeGpu::new(self.stream.0, &[]);
        let runtime = FakeRuntime::new(5, 1, 0).on_gpu(gpu);
        let rows =
            FakeAttribute::Scalar(sys::XLA_FFI_DataType_S64, (PART as i64).to_ne_bytes().into());
        let reverse = FakeAttribute::Scalar(sys::XLA_FFI_DataType_PRED, vec![0]);
        let attributes = vec![("part_rows".into(), rows), ("reverse".into(), reverse)];
        let mut frame = FakeFrame::new(args, rets, attributes, &runtime);
        frame.raw.stage = match stage {
            Stage::Initialize => sys::XLA_FFI_ExecutionStage_INITIALIZE,
            _ => sys::XLA_FFI_ExecutionStage_EXECUTE,
        };
        // SAFETY: `FakeFrame` makes a frame as the header says, which lives for the call. The
        // recorder keeps addresses and follows none of them.
        let error = unsafe { run_linear(frame.address(), kind, stage, || Ok(self.platform)) };
        take_error(error).map_or(Ok(()), |(_, message)| Err(message))
    }

    /// Runs both stages and carries out the program that they enqueue.
    fn run(&mut self, kind: LinearKind, args: &[FakeBuffer], rets: &[FakeBuffer]) {
        let without_memory = |buffers: &[FakeBuffer]| -> Vec<FakeBuffer> {
            buffers.iter().map(|x| FakeBuffer { data: ptr::null_mut(), ..x.clone() }).collect()
        };
        let early = [args, rets].map(without_memory);
        assert_eq!(self.call(kind, Stage::Initialize, &early[0], &early[1]), Ok(()));
        assert_eq!(self.call(kind, Stage::Execute, args, rets), Ok(()));
        let programs = self.recorder.take();
        self.world.carry_out(&programs, 1).expect("kernels run");
        assert_eq!(self.recorder.violations(), [""; 0]);
    }
}

fn pointer(address: u64) -> *mut c_void {
    ptr::without_provenance_mut(address as usize)
}

/// The operands of the second call, and the addresses of its results o and dots.
struct Attend {
    args: Vec<FakeBuffer>,
    rets: Vec<FakeBuffer>,
    o: Address,
    dots: Address,
}

/// Runs the first call, which returns the state after each part, and prepares the second call with
/// the state before each part.
fn attend(gpu: &mut Gpu) -> Attend {
    let (k, v) = (gpu.tokens("k", KV_HEADS, DIM, 1), gpu.tokens("v", KV_HEADS, WIDE, 2));
    let sums = gpu.sums();
    let states = [BATCH, PARTS, HEADS, DIM, WIDE];
    let (left, at) = gpu.array("left", &states, sys::XLA_FFI_DataType_F32);
    gpu.run(LinearKind::State, &[k.clone(), v.clone(), sums.clone()], &[left]);
    let count = states.iter().product();
    let left = gpu.world.memory.read_f32(at, count);
    let (before, at) = gpu.array("before", &states, sys::XLA_FFI_DataType_F32);
    gpu.world.memory.write_f32(at, &prefixes(&left));
    let (q, other) = (gpu.tokens("q", HEADS, DIM, 3), gpu.tokens("other", HEADS, WIDE, 4));
    let (o, at_o) = gpu.array("o", &[BATCH, ROWS, HEADS, WIDE], sys::XLA_FFI_DataType_BF16);
    let (dots, at_dots) = gpu.array("dots", &[BATCH, HEADS, PADDED], sys::XLA_FFI_DataType_F32);
    let args = vec![q, k, v, sums, before, other];
    Attend { args, rets: vec![o, dots], o: at_o, dots: at_dots }
}

/// Returns the state before each part. All parts but the last are complete.
fn prefixes(left: &[f32]) -> Vec<f32> {
    let state = HEADS * DIM * WIDE;
    let decay = (PART as f32 * LOG).exp2();
    let mut before = vec![0.0; left.len()];
    for at in (0..left.len()).filter(|at| !(at / state).is_multiple_of(PARTS)) {
        before[at] = decay * before[at - state] + left[at - state];
    }
    before
}

/// Returns o and its products with `other`, by the reference.
fn recurrence() -> (Vec<f64>, Vec<f64>) {
    let tokens = |heads, dim, seed| numbers(BATCH * ROWS * heads * dim, seed);
    let (k, v) = (tokens(KV_HEADS, DIM, 1), tokens(KV_HEADS, WIDE, 2));
    let (q, other) = (tokens(HEADS, DIM, 3), tokens(HEADS, WIDE, 4));
    let mut o = vec![0.0; BATCH * ROWS * HEADS * WIDE];
    let mut dots = vec![0.0; BATCH * HEADS * PADDED];
    for (b, h) in (0..BATCH).flat_map(|b| (0..HEADS).map(move |h| (b, h))) {
        let of = |array: &[bf16], heads, dim| {
            rows_of(array, [ROWS, heads, dim], (b, h * heads / HEADS), 0..ROWS)
        };
        let head = Head {
            dims: [DIM, WIDE],
            q: of(&q, HEADS, DIM),
            k: of(&k, KV_HEADS, DIM),
            v: of(&v, KV_HEADS, WIDE),
            dout: of(&other, HEADS, WIDE),
            decays: vec![f64::from(LOG).exp2(); ROWS],
        };
        let zeros = [0.0; DIM * WIDE];
        let found = head.recurrence(&zeros, &zeros).o;
        add_rows(&mut o, [ROWS, HEADS, WIDE], (b, h), 0..ROWS, &found);
        for (at, (x, other)) in found.iter().zip(&head.dout).enumerate() {
            dots[(b * HEADS + h) * PADDED + at / WIDE] += x * other;
        }
    }
    (o, dots)
}

fn assert_near(name: &str, got: impl Iterator<Item = f64>, want: &[f64]) {
    let size: f64 = want.iter().map(|x| x * x).sum();
    let error: f64 = got.zip(want).map(|(got, want)| (got - want).powi(2)).sum();
    let error = (error / size).sqrt();
    assert!(error < 2f64.powi(-8), "{name} is off by {error:.1e}");
}

#[test]
fn both_calls_together_compute_the_recurrence() {
    let mut gpu = Gpu::new();
    let Attend { args, rets, o, dots } = attend(&mut gpu);
    gpu.run(LinearKind::Attend, &args, &rets);
    let (want_o, want_dots) = recurrence();
    let o = gpu.world.memory.read_bf16(o, want_o.len());
    assert_near("o", o.into_iter().map(bf16::to_f64), &want_o);
    let dots = gpu.world.memory.read_f32(dots, want_dots.len());
    assert_near("dots", dots.into_iter().map(f64::from), &want_dots);
}

#[test]
fn without_products_the_other_array_is_not_needed() {
    let mut gpu = Gpu::new();
    let Attend { args, rets, o, .. } = attend(&mut gpu);
    gpu.run(LinearKind::Attend, &args[..5], &rets[..1]);
    let (want, _) = recurrence();
    let o = gpu.world.memory.read_bf16(o, want.len());
    assert_near("o", o.into_iter().map(bf16::to_f64), &want);
}

#[test]
fn arrays_of_wrong_shapes_and_types_are_refused() {
    let mut gpu = Gpu::new();
    let Attend { args, rets, .. } = attend(&mut gpu);
    let refused = |change: &dyn Fn(&mut Vec<FakeBuffer>, &mut Vec<FakeBuffer>), words: &str| {
        let (mut args, mut rets) = (args.clone(), rets.clone());
        change(&mut args, &mut rets);
        let error = gpu.call(LinearKind::Attend, Stage::Execute, &args, &rets);
        let error = error.expect_err("refused");
        assert!(error.contains(words), "{words} in {error}");
    };
    refused(&|args, _| args[2].dims[1] -= 1, "shape of value must be [2, 150, 2, 24]");
    refused(&|args, _| args[3].dims[2] = 150, "shape of sums must be [2, 4, 192]");
    refused(&|args, _| args[4].dims[1] = 2, "shape of state must be [2, 3, 4, 16, 24]");
    refused(&|_, rets| rets[1].dims[1] = 8, "shape of dots must be [2, 4, 192]");
    refused(
        &|args, _| args[1].dtype = sys::XLA_FFI_DataType_F32,
        "dtype of key must be bfloat16 or float16, got float32",
    );
    refused(&|_, rets| drop(rets.pop()), "5 and 1, or 6 and 2, got 6 and 1");
    refused(&|args, _| args[0].data = ptr::null_mut(), "must be the address of an array");
    let launched = gpu.call(LinearKind::Attend, Stage::Execute, &args, &rets);
    let error = launched.expect_err("the kernel was never loaded");
    assert!(error.contains("was not initialised"), "{error}");
}
