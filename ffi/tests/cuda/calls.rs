//! Calls the CUDA handlers of one rank as XLA calls them, with a recorder in place of its device.

use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex};

use burst_attention::cuda::call::Call;
use burst_attention::cuda::nccl::Comm;
use burst_attention::operands::{DeviceKind, ElementType, Operand};
use burst_attention::schedule::Family;
use burst_attention::{Dtype, Features, Layout, Pass, Problem, Travels, Window};
use burst_attention_ffi::cuda::{Platform, Spread, Stage, instantiate, run};
use burst_attention_ffi::sys;
use burst_attention_recorder::{Recorder, images, nccl};
use burst_attention_test_frames::gpu::FakeGpu;
use burst_attention_test_frames::{FakeAttribute, FakeBuffer, FakeFrame, FakeRuntime, take_error};

pub const STAGES: [Stage; 3] = [Stage::Prepare, Stage::Initialize, Stage::Execute];
pub const COMMUNICATION_ID: i64 = 77;

/// The code and the message of an XLA error.
pub type XlaError = (u32, String);

/// The device of one rank, and the platform of its handlers. A test fails if it leaves lines about
/// errors unread.
pub struct Device {
    pub recorder: Recorder,
    pub platform: &'static Platform,
    pub comms: [Comm; 2],
    lines: Arc<Mutex<Vec<String>>>,
}

impl Drop for Device {
    fn drop(&mut self) {
        let unread = self.told();
        assert!(unread.is_empty() || std::thread::panicking(), "{unread:?}");
    }
}

impl Device {
    pub fn new(rank: usize, world_size: usize) -> Device {
        Device::of_capability((9, 0), rank, world_size)
    }

    pub fn of_capability(capability: (i32, i32), rank: usize, world_size: usize) -> Device {
        let recorder = Recorder::new(capability);
        let lines = Arc::<Mutex<Vec<String>>>::default();
        let written = lines.clone();
        let write = move |line: &str| written.lock().expect("no poison").push(line.to_owned());
        let driver = Box::new(recorder.clone());
        let platform = Platform::new(driver, images, || Ok(nccl()), Box::new(write));
        let comms = [(); 2].map(|()| recorder.add_comm(rank, world_size));
        // Handlers need a platform that lives as long as the process.
        Device { recorder, platform: Box::leak(Box::new(platform)), comms, lines }
    }

    /// Returns the lines about errors since the last call.
    pub fn told(&self) -> Vec<String> {
        std::mem::take(&mut *self.lines.lock().expect("no poison"))
    }

    /// Takes the one line that tells of an error of this device.
    pub fn told_of(&self, message: &str) {
        assert_eq!(self.told(), [format!("device 0: {message}")]);
    }

    /// Returns the rank's call, not instantiated yet, over memory that is never used.
    pub fn rank(&self, call: &Call) -> RankCall {
        let gpu = FakeGpu::new(Recorder::COMPUTE.0, &self.comms.map(|comm| comm.0));
        let runtime = FakeRuntime::new(5, 1, 0).on_gpu(gpu);
        let (args, rets) = buffers(call);
        RankCall { runtime, attributes: attributes(call), args, rets }
    }

    /// Returns the rank's call after its first run.
    pub fn after_a_run(&self, call: &Call) -> RankCall {
        let rank = self.rank(call);
        assert_eq!(rank.all(self.platform, call.pass), Ok(()));
        self.recorder.take();
        rank
    }

    /// Returns the first error of a rank's stages. The program of the last stage stays recorded.
    pub fn stages(&self, rank: &RankCall) -> Result<(), XlaError> {
        STAGES.into_iter().try_for_each(|stage| {
            self.recorder.take();
            rank.stage(self.platform, stage)
        })
    }
}

/// The arguments with which XLA calls the handlers of one rank.
pub struct RankCall {
    pub runtime: FakeRuntime,
    pub attributes: Vec<(String, FakeAttribute)>,
    pub args: Vec<FakeBuffer>,
    pub rets: Vec<FakeBuffer>,
}

impl RankCall {
    fn frame(&self) -> FakeFrame {
        FakeFrame::new(&self.args, &self.rets, self.attributes.clone(), &self.runtime)
    }

    pub fn instantiate(&self, pass: Pass) -> Result<(), XlaError> {
        let mut frame = self.frame();
        frame.raw.stage = sys::XLA_FFI_ExecutionStage_INSTANTIATE;
        // SAFETY: `FakeFrame` makes a frame as the header says, which lives for the call.
        outcome(unsafe { instantiate(frame.address(), pass, Spread::Devices) })
    }

    pub fn stage(&self, platform: &'static Platform, stage: Stage) -> Result<(), XlaError> {
        let mut frame = self.frame();
        frame.raw.stage = number(stage);
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

/// Returns XLA's number of a stage.
pub fn number(stage: Stage) -> sys::XLA_FFI_ExecutionStage {
    match stage {
        Stage::Prepare => sys::XLA_FFI_ExecutionStage_PREPARE,
        Stage::Initialize => sys::XLA_FFI_ExecutionStage_INITIALIZE,
        Stage::Execute => sys::XLA_FFI_ExecutionStage_EXECUTE,
    }
}

fn outcome(error: *mut sys::XLA_FFI_Error) -> Result<(), XlaError> {
    take_error(error).map_or(Ok(()), Err)
}

fn attributes(call: &Call) -> Vec<(String, FakeAttribute)> {
    let Problem { world_size, layout, softmax_scale, .. } = call.problem;
    let s64 =
        |value: i64| FakeAttribute::Scalar(sys::XLA_FFI_DataType_S64, value.to_ne_bytes().into());
    let text = |text: &str| FakeAttribute::Text(text.into());
    let f32 =
        |value: f32| FakeAttribute::Scalar(sys::XLA_FFI_DataType_F32, value.to_ne_bytes().into());
    // The mesh has two rings, so there is more than one group.
    let ids: Vec<u8> = (0..2 * world_size as i64).flat_map(i64::to_ne_bytes).collect();
    let mut entries = vec![
        ("world_size".into(), s64(world_size as i64)),
        ("layout".into(), text(layout.name())),
        ("window_left".into(), s64(i64::MIN)),
        ("window_right".into(), s64(0)),
        ("softmax_scale".into(), f32(softmax_scale)),
        ("logits_soft_cap".into(), f32(0.0)),
        ("dropout_rate".into(), f32(0.0)),
        ("feature_operands".into(), text("")),
        ("schedule".into(), text(call.family.name())),
        ("inner_size".into(), s64(call.family.inner().unwrap_or(0) as i64)),
        ("axis_name".into(), text("context")),
        ("kernels".into(), text(call.kernels.name())),
        ("groups".into(), FakeAttribute::Array(sys::XLA_FFI_DataType_S64, 2 * world_size, ids)),
        ("communication_id".into(), s64(COMMUNICATION_ID)),
    ];
    if call.pass == Pass::Backward {
        let travels = match call.travels {
            None => "auto",
            Some(Travels::Keys) => "keys",
            Some(Travels::Queries) => "queries",
        };
        entries.push(("backward".into(), text(travels)));
        entries.push(("backward_order".into(), text("fixed")));
        entries.push((
            "lse_gradient".into(),
            FakeAttribute::Scalar(sys::XLA_FFI_DataType_PRED, vec![call.lse_gradient.into()]),
        ));
    }
    entries
}

/// Returns operands and results.
fn buffers(call: &Call) -> (Vec<FakeBuffer>, Vec<FakeBuffer>) {
    let Call { problem, pass, .. } = call;
    let at = |address: u64| ptr::without_provenance_mut::<c_void>(address as usize);
    let buffer = |operand: Operand| {
        let dtype = match operand.element(DeviceKind::Cuda) {
            ElementType::Float32 => sys::XLA_FFI_DataType_F32,
            _ => sys::XLA_FFI_DataType_BF16,
        };
        let inner = operand.dims(DeviceKind::Cuda).iter().map(|dim| problem.length(*dim));
        let dims: Vec<i64> = [problem.batch].into_iter().chain(inner).map(|n| n as i64).collect();
        FakeBuffer::new(dtype, &dims, at((operand as u64 + 1) << 40))
    };
    let inputs = Operand::inputs(*pass, &problem.features).map(buffer).collect();
    let mut results: Vec<_> = Operand::results(*pass, &problem.features).map(buffer).collect();
    let bytes = [call.workspace_bytes() as i64];
    results.push(FakeBuffer::new(sys::XLA_FFI_DataType_U8, &bytes, at(1 << 46)));
    (inputs, results)
}

fn call(world_size: usize, family: Family, pass: Pass, travels: Option<Travels>) -> Call {
    let problem = Problem {
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
        layout: Layout::Zigzag,
        world_size,
    };
    Call { travels, ..Call::new(problem, family, pass) }
}

pub fn forward(world_size: usize) -> Call {
    call(world_size, Family::Ring, Pass::Forward, None)
}

pub fn backward(travels: Travels) -> Call {
    call(2, Family::Ring, Pass::Backward, Some(travels))
}

/// Returns a call over two nodes of two ranks.
pub fn double(pass: Pass, travels: Option<Travels>) -> Call {
    call(4, Family::DoubleRing { inner: 2 }, pass, travels)
}

/// Returns calls of both passes and directions.
pub fn various() -> [Call; 4] {
    let double = double(Pass::Backward, Some(Travels::Keys));
    [forward(2), backward(Travels::Keys), backward(Travels::Queries), double]
}
