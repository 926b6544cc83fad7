//! Calls the CUDA handlers as XLA calls them, with a recorder in place of the devices.
#![allow(dead_code, reason = "each test uses some of the functions")]

use std::ffi::c_void;
use std::ptr;

use burst_attention::cuda::call::Call;
use burst_attention::cuda::driver::Stream;
use burst_attention::cuda::nccl::Comm;
use burst_attention::operands::{Arrays, Backend, ElementType, Operand};
use burst_attention::schedule::Family;
use burst_attention::{Dtype, Features, Layout, Order, Pass, Problem, Travels, Window};
use burst_attention_device_tests::Shard;
use burst_attention_ffi::cuda::{Platform, Spread, Stage, instantiate, run};
use burst_attention_ffi::sys;
use burst_attention_interpreter::Address;
use burst_attention_recorder::{Recorder, images, nccl};
use burst_attention_test_frames::gpu::FakeGpu;
use burst_attention_test_frames::{FakeAttribute, FakeBuffer, FakeFrame, FakeRuntime, take_error};

pub const STAGES: [Stage; 3] = [Stage::Prepare, Stage::Initialize, Stage::Execute];
pub const COMMUNICATION_ID: i64 = 77;

/// The code and the message of an XLA error.
pub type XlaError = (u32, String);

/// A ring on recorded devices.
pub struct Handlers {
    pub recorder: Recorder,
    pub platform: &'static Platform,
    /// The stream and the two communicators of each device.
    pub devices: Vec<(Stream, [Comm; 2])>,
}

impl Handlers {
    pub fn new(world_size: usize) -> Handlers {
        let recorder = Recorder::new();
        let platform = Platform::new(Box::new(recorder.clone()), images, || Ok(nccl()));
        let device = |rank| {
            let stream = recorder.add_device();
            (stream, [(); 2].map(|()| recorder.add_comm(rank, world_size, stream)))
        };
        let devices = (0..world_size).map(device).collect();
        // Handlers need a platform that lives as long as the process.
        Handlers { recorder, platform: Box::leak(Box::new(platform)), devices }
    }

    /// A rank's call, not instantiated yet.
    pub fn rank(&self, call: &Call, rank: usize, arrays: Arrays<u64>, workspace: u64) -> RankCall {
        let (stream, comms) = self.devices[rank];
        let gpu = FakeGpu::new(stream.0, &comms.map(|comm| comm.0));
        let runtime = FakeRuntime::new(5, 1, rank as i32).on_gpu(gpu);
        let (args, rets) = buffers(call, arrays, workspace);
        RankCall { runtime, attributes: attributes(call), args, rets, spread: Spread::Devices }
    }
}

/// The arguments with which XLA calls the handlers of one rank.
pub struct RankCall {
    pub runtime: FakeRuntime,
    pub attributes: Vec<(String, FakeAttribute)>,
    pub args: Vec<FakeBuffer>,
    pub rets: Vec<FakeBuffer>,
    pub spread: Spread,
}

impl RankCall {
    fn frame(&self) -> FakeFrame {
        FakeFrame::new(&self.args, &self.rets, self.attributes.clone(), &self.runtime)
    }

    pub fn instantiate(&self, pass: Pass) -> Result<(), XlaError> {
        let mut frame = self.frame();
        frame.raw.stage = sys::XLA_FFI_ExecutionStage_INSTANTIATE;
        // SAFETY: `FakeFrame` makes a frame as the header says, which lives for the call.
        outcome(unsafe { instantiate(frame.address(), pass, self.spread) })
    }

    pub fn stage(&self, platform: &'static Platform, stage: Stage) -> Result<(), XlaError> {
        let mut frame = self.frame();
        frame.raw.stage = match stage {
            Stage::Prepare => sys::XLA_FFI_ExecutionStage_PREPARE,
            Stage::Initialize => sys::XLA_FFI_ExecutionStage_INITIALIZE,
            Stage::Execute => sys::XLA_FFI_ExecutionStage_EXECUTE,
        };
        // SAFETY: `FakeFrame` makes a frame as the header says, which lives for the call. The
        // recorder keeps addresses and follows none of them.
        outcome(unsafe { run(frame.address(), stage, || Ok(platform)) })
    }

    /// All that XLA calls when a program that is new to it runs.
    pub fn all(&self, platform: &'static Platform, pass: Pass) -> Result<(), XlaError> {
        self.instantiate(pass)?;
        STAGES.into_iter().try_for_each(|stage| self.stage(platform, stage))
    }
}

fn outcome(error: *mut sys::XLA_FFI_Error) -> Result<(), XlaError> {
    take_error(error).map_or(Ok(()), Err)
}

fn attributes(call: &Call) -> Vec<(String, FakeAttribute)> {
    let Problem { world_size, layout, window, softmax_scale, features, .. } = call.problem;
    let s64 =
        |value: i64| FakeAttribute::Scalar(sys::XLA_FFI_DataType_S64, value.to_ne_bytes().into());
    let text = |text: &str| FakeAttribute::Text(text.into());
    let f32 =
        |value: f32| FakeAttribute::Scalar(sys::XLA_FFI_DataType_F32, value.to_ne_bytes().into());
    let operands: Vec<_> = Operand::of(&features).map(Operand::name).collect();
    let limit = |limit: Option<usize>| s64(limit.map_or(-1, |limit| limit as i64));
    // The mesh has two rings, so there is more than one group.
    let ids: Vec<u8> = (0..2 * world_size as i64).flat_map(i64::to_ne_bytes).collect();
    let (schedule, inner) = (call.family.name(), call.family.inner().unwrap_or(0));
    let groups = FakeAttribute::Array(sys::XLA_FFI_DataType_S64, 2 * world_size, ids);
    let mut entries = vec![
        ("world_size".into(), s64(world_size as i64)),
        ("layout".into(), text(layout.name())),
        ("window_left".into(), limit(window.left)),
        ("window_right".into(), limit(window.right)),
        ("softmax_scale".into(), f32(softmax_scale)),
        ("logits_soft_cap".into(), f32(features.soft_cap.unwrap_or(0.0))),
        ("dropout_rate".into(), f32(features.dropout.unwrap_or(0.0))),
        ("feature_operands".into(), text(&operands.join(","))),
        ("schedule".into(), text(schedule)),
        ("inner_size".into(), s64(inner as i64)),
        ("axis_name".into(), text("context")),
        ("groups".into(), groups),
        ("communication_id".into(), s64(COMMUNICATION_ID)),
    ];
    if call.pass == Pass::Backward {
        let travels = match call.travels {
            None => "auto",
            Some(Travels::Keys) => "keys",
            Some(Travels::Queries) => "queries",
        };
        let order = match call.backward_order {
            Order::Fixed => "fixed",
            Order::Any => "any",
        };
        entries.push(("backward".into(), text(travels)));
        entries.push(("backward_order".into(), text(order)));
    }
    entries
}

/// Operands and results.
fn buffers(call: &Call, arrays: Arrays<u64>, workspace: u64) -> (Vec<FakeBuffer>, Vec<FakeBuffer>) {
    let Problem { batch, features, dtype, .. } = call.problem;
    let at = |address: u64| ptr::without_provenance_mut::<c_void>(address as usize);
    let buffer = |operand: Operand| {
        let dtype = match (operand.element(Backend::Cuda), dtype) {
            (ElementType::Float32, _) => sys::XLA_FFI_DataType_F32,
            (ElementType::Int32, _) => sys::XLA_FFI_DataType_S32,
            (ElementType::Uint32, _) => sys::XLA_FFI_DataType_U32,
            (_, Dtype::F16) => sys::XLA_FFI_DataType_F16,
            _ => sys::XLA_FFI_DataType_BF16,
        };
        let inner = operand.dims(Backend::Cuda).iter().map(|dim| call.problem.length(*dim));
        let dims: Vec<i64> = [batch].into_iter().chain(inner).map(|dim| dim as i64).collect();
        FakeBuffer::new(dtype, &dims, at(arrays[operand]))
    };
    let mut inputs: Vec<_> = Operand::inputs(call.pass, &features).map(buffer).collect();
    let mut results: Vec<_> = Operand::results(call.pass, &features).map(buffer).collect();
    // In place: the result is the operand.
    inputs.extend(arrays.get(Operand::SlopeGrad).map(|_| buffer(Operand::SlopeGrad)));
    let bytes = [call.workspace_bytes() as i64];
    results.push(FakeBuffer::new(sys::XLA_FFI_DataType_U8, &bytes, at(workspace)));
    (inputs, results)
}

pub fn problem(world_size: usize, layout: Layout) -> Problem {
    Problem {
        batch: 2,
        q_len: 12,
        kv_len: 12,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        value_dim: 16,
        dtype: Dtype::Bf16,
        window: Window::CAUSAL,
        softmax_scale: 0.25,
        features: Features::default(),
        layout,
        world_size,
    }
}

pub fn call(problem: Problem, family: Family, pass: Pass, travels: Option<Travels>) -> Call {
    Call { problem, family, pass, travels, backward_order: Order::Fixed }
}

pub fn forward(world_size: usize) -> Call {
    let problem = problem(world_size, Layout::Zigzag);
    call(problem, Family::Ring, Pass::Forward, None)
}

/// Returns a call over two nodes of two ranks.
pub fn double(pass: Pass, travels: Option<Travels>) -> Call {
    let problem = problem(4, Layout::Zigzag);
    call(problem, Family::DoubleRing { inner: 2 }, pass, travels)
}

pub fn backward(travels: Travels) -> Call {
    let problem = problem(2, Layout::Zigzag);
    call(problem, Family::Ring, Pass::Backward, Some(travels))
}

/// Returns a rank's call over memory that is never read.
pub fn rank(handlers: &Handlers, call: &Call, rank: usize) -> RankCall {
    let at = |n: u64| (n + 1) << 40;
    let shard = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].map(|n| Address(at(n)));
    let [q, k, v, o, lse, dout, dlse, dq, dk, dv] = shard;
    let extras = [Address(0); 5];
    let shard = Shard { q, k, v, o, lse, dout, dlse, dq, dk, dv, extras };
    handlers.rank(call, rank, shard.arrays(call.pass, &call.problem.features), 1 << 46)
}

/// Returns the first error of a rank's stages. The program of the last stage stays recorded.
pub fn stages(handlers: &Handlers, rank: &RankCall) -> Result<(), XlaError> {
    STAGES.into_iter().try_for_each(|stage| {
        handlers.recorder.take();
        rank.stage(handlers.platform, stage)
    })
}
