//! The handlers for CUDA, called as XLA calls them: a ring of devices that a recorder stands for.
#![allow(dead_code, reason = "each test uses a part")]

use std::ffi::c_void;
use std::ptr;

use burst_attention::cuda::driver::Stream;
use burst_attention::cuda::nccl::Comm;
use burst_attention::cuda::rank::{Arrays, Extras};
use burst_attention::cuda::record::{Recorder, images, nccl};
use burst_attention::cuda::ring::Call;
use burst_attention::schedule::Family;
use burst_attention::{Dtype, Order, Pass, Problem, Travels};
use burst_attention_ffi::cuda::{Platform, Spread, Stage, instantiate, run};
use burst_attention_ffi::sys;

use crate::fake::gpu::FakeGpu;
use crate::fake::{FakeAttribute, FakeBuffer, FakeFrame, FakeRuntime, take_error};

pub const STAGES: [Stage; 3] = [Stage::Prepare, Stage::Initialize, Stage::Execute];
pub const COMMUNICATION_ID: i64 = 77;

/// Code and message of an XLA error.
pub type XlaError = (u32, String);

/// One ring on recorded devices.
pub struct Handlers {
    pub recorder: Recorder,
    pub platform: &'static Platform,
    /// Stream and two communicators of each.
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
        // Handlers want it for as long as the process.
        Handlers { recorder, platform: Box::leak(Box::new(platform)), devices }
    }

    /// A rank's call, not instantiated yet.
    pub fn rank(&self, call: &Call, rank: usize, arrays: Arrays, workspace: u64) -> RankCall {
        let (stream, comms) = self.devices[rank];
        let gpu = FakeGpu::new(stream.0, &comms.map(|comm| comm.0));
        let runtime = FakeRuntime::new(5, 1, rank as i32).on_gpu(gpu);
        let (args, rets) = buffers(call, arrays, workspace);
        RankCall { runtime, attributes: attributes(call), args, rets, spread: Spread::Devices }
    }
}

/// What XLA calls the handlers of one rank with.
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
        // SAFETY: the frame is as the header says.
        answer(unsafe { instantiate(frame.address(), pass, self.spread) })
    }

    pub fn stage(&self, platform: &'static Platform, stage: Stage) -> Result<(), XlaError> {
        let mut frame = self.frame();
        frame.raw.stage = match stage {
            Stage::Prepare => sys::XLA_FFI_ExecutionStage_PREPARE,
            Stage::Initialize => sys::XLA_FFI_ExecutionStage_INITIALIZE,
            Stage::Execute => sys::XLA_FFI_ExecutionStage_EXECUTE,
        };
        // SAFETY: the frame is as the header says; the recorder keeps addresses and follows none.
        answer(unsafe { run(frame.address(), stage, || Ok(platform)) })
    }

    /// All that XLA calls when a program that is new to it runs.
    pub fn all(&self, platform: &'static Platform, pass: Pass) -> Result<(), XlaError> {
        self.instantiate(pass)?;
        STAGES.into_iter().try_for_each(|stage| self.stage(platform, stage))
    }
}

fn answer(error: *mut sys::XLA_FFI_Error) -> Result<(), XlaError> {
    take_error(error).map_or(Ok(()), Err)
}

fn attributes(call: &Call) -> Vec<(String, FakeAttribute)> {
    let Problem { world_size, layout, window, softmax_scale, features, .. } = call.problem;
    let s64 =
        |value: i64| FakeAttribute::Scalar(sys::XLA_FFI_DataType_S64, value.to_ne_bytes().into());
    let text = |text: &str| FakeAttribute::Text(text.into());
    let f32 =
        |value: f32| FakeAttribute::Scalar(sys::XLA_FFI_DataType_F32, value.to_ne_bytes().into());
    let flag = |flag: bool| FakeAttribute::Scalar(sys::XLA_FFI_DataType_PRED, vec![flag.into()]);
    let limit = |limit: Option<usize>| s64(limit.map_or(-1, |limit| limit as i64));
    // Two rings, so that there is more than one group.
    let ids: Vec<u8> = (0..2 * world_size as i64).flat_map(i64::to_ne_bytes).collect();
    let (schedule, inner) = match call.family {
        Family::Ring => ("ring", 0),
        Family::DoubleRing { inner } => ("double_ring", inner),
        Family::Balanced => ("balanced", 0),
        Family::AllGather => ("all_gather", 0),
    };
    let groups = FakeAttribute::Array(sys::XLA_FFI_DataType_S64, 2 * world_size, ids);
    let mut entries = vec![
        ("world_size".into(), s64(world_size as i64)),
        ("layout".into(), text(layout.name())),
        ("window_left".into(), limit(window.left)),
        ("window_right".into(), limit(window.right)),
        ("softmax_scale".into(), f32(softmax_scale)),
        ("logits_soft_cap".into(), f32(features.soft_cap.unwrap_or(0.0))),
        ("has_segments".into(), flag(features.segments)),
        ("has_slopes".into(), flag(features.slopes)),
        ("dropout_rate".into(), f32(features.dropout.unwrap_or(0.0))),
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
fn buffers(call: &Call, arrays: Arrays, workspace: u64) -> (Vec<FakeBuffer>, Vec<FakeBuffer>) {
    let Problem { batch, q_len, kv_len, heads, kv_heads, features, .. } = call.problem;
    let Problem { head_dim, value_dim, .. } = call.problem;
    let dims =
        |len: usize, heads: usize, dim: usize| [batch, len, heads, dim].map(|dim| dim as i64);
    let dtype = match call.problem.dtype {
        Dtype::F16 => sys::XLA_FFI_DataType_F16,
        _ => sys::XLA_FFI_DataType_BF16,
    };
    let at = |address: u64| ptr::without_provenance_mut::<c_void>(address as usize);
    let array = |dims: [i64; 4]| move |address| FakeBuffer::new(dtype, &dims, at(address));
    let queries = array(dims(q_len, heads, head_dim));
    let outputs = array(dims(q_len, heads, value_dim));
    let keys = array(dims(kv_len, kv_heads, head_dim));
    let values = array(dims(kv_len, kv_heads, value_dim));
    let f32 = sys::XLA_FFI_DataType_F32;
    let rows = |address| FakeBuffer::new(f32, &dims(q_len, heads, 1)[..3], at(address));
    let Extras { q_segments, k_segments, slopes, dropout, dslopes } = arrays.extras();
    let mut extras = Vec::new();
    if features.segments {
        for (address, len) in [(q_segments, q_len), (k_segments, kv_len)] {
            let dims = &dims(len, 1, 1)[..2];
            extras.push(FakeBuffer::new(sys::XLA_FFI_DataType_S32, dims, at(address)));
        }
    }
    if features.slopes {
        extras.push(FakeBuffer::new(f32, &dims(heads, 1, 1)[..2], at(slopes)));
    }
    if features.dropout.is_some() {
        extras.push(FakeBuffer::new(sys::XLA_FFI_DataType_U32, &dims(4, 1, 1)[..2], at(dropout)));
    }
    let bytes = [call.workspace_bytes() as i64];
    let scratch = FakeBuffer::new(sys::XLA_FFI_DataType_U8, &bytes, at(workspace));
    match arrays {
        Arrays::Forward { q, k, v, o, lse, .. } => {
            let args = [queries(q), keys(k), values(v)];
            (args.into_iter().chain(extras).collect(), vec![outputs(o), rows(lse), scratch])
        }
        Arrays::Backward { q, k, v, o, lse, dout, dlse, dq, dk, dv, .. } => {
            let args = [queries(q), keys(k), values(v), outputs(o), rows(lse), outputs(dout)];
            let mut rets = vec![queries(dq), keys(dk), values(dv)];
            if features.slopes {
                // In place: the result is the operand.
                extras.push(rows(dslopes));
                rets.push(rows(dslopes));
            }
            rets.push(scratch);
            (args.into_iter().chain([rows(dlse)]).chain(extras).collect(), rets)
        }
    }
}
