//! Decode over one device's pages on a GPU, as launches on XLA's stream.

use burst_attention::Dtype;
use burst_attention::cuda::driver::Stream;
use burst_attention::cuda::error::CudaError;
use burst_attention::operands::DeviceKind;
use burst_attention_kernels::instances::Element;
use burst_attention_kernels::launch::{Decode, Split};
use burst_attention_kernels::record::Size;

use super::explain::explain;
use super::told::Told;
use super::{Platform, Stage};
use crate::data_type::DataType;
use crate::decode::arrays::{Arrays, names};
use crate::decode::values_in_keys;
use crate::error::{Error, Result};
use crate::frame::CallFrame;
use crate::{handler, sys};

/// Handles the initialize or the execute stage on `platform`.
///
/// # Safety
/// The caller must guarantee the same as the caller of [`run`](super::run).
pub unsafe fn run_decode(
    raw: *mut sys::XLA_FFI_CallFrame,
    stage: Stage,
    platform: impl FnOnce() -> Result<&'static Platform>,
) -> *mut sys::XLA_FFI_Error {
    let body = |frame: &mut CallFrame<'_>, platform: &'static Platform, _: &Told<'_>| {
        let call = decode(frame)?;
        if call.units == 0 || call.rows == 0 {
            return Ok(());
        }
        let executor = &platform.executor;
        // The watch over rings is left out: the call may be recorded once and replayed many times.
        let stream = Stream(frame.runtime().stream(frame.context())?);
        let operation = |target| {
            let split = match call.split {
                Split::Runs(_) => Split::Runs(call.runs(target)),
                slices => slices,
            };
            Decode { split, ..call }.into()
        };
        if stage == Stage::Execute {
            return Ok(executor.launch(stream, operation)?);
        }
        let choices = executor.prepare(stream, operation)?;
        explain(&platform.write, "decoding", &choices)
    };
    // SAFETY: the caller of `run_decode` guarantees the frame.
    unsafe { handler::guard_stage(raw, stage.number(), |frame| Told::run(frame, platform(), body)) }
}

/// Reads a call with its memory. The device decides the number of runs later.
fn decode(frame: &CallFrame<'_>) -> Result<Decode> {
    let [o, lse, workspace] = frame.results()?;
    let attributes = frame.attributes()?;
    let values_in_keys = values_in_keys(&attributes)?;
    let operands = frame.all_arguments()?;
    let arrays = Arrays::read(DeviceKind::Cuda, !values_in_keys, operands, [o, lse])?;
    let element = match arrays.activation().activation() {
        Some(Dtype::Bf16) => Element::Bf16,
        Some(Dtype::F16) => Element::F16,
        _ => {
            let got = arrays.activation();
            return Err(Error::mismatch("dtype of query", "bfloat16 or float16", got));
        }
    };
    let count = |name: &str| -> Result<usize> {
        let got: i64 = attributes.get(name)?;
        usize::try_from(got).map_err(|_| Error::mismatch(name, "a natural number", got))
    };
    let split = match count("most_slices")? {
        0 => Split::Runs(1),
        most => Split::Slices(most),
    };
    let mut addresses = [0; Decode::ARRAYS.len()];
    for (to, name) in addresses.iter_mut().zip(names(DeviceKind::Cuda)) {
        *to = arrays.address(name)?;
    }
    let call = Decode {
        units: arrays.length(Size::Units),
        rows: arrays.length(Size::QLen),
        kv_heads: arrays.length(Size::KvHeads),
        head_dim: arrays.length(Size::HeadDim),
        value_dim: arrays.length(Size::ValueDim),
        values_in_keys,
        weights_in_memory: count("weights_in_memory")? != 0,
        element,
        pages: arrays.length(Size::Pages),
        page_rows: arrays.length(Size::PageRows),
        sources: arrays.length(Size::Sources),
        source_pages: arrays.length(Size::SourcePages),
        slice_tiles: count("slice_tiles")?,
        split,
        softmax_scale: attributes.get("scale")?,
        soft_cap: attributes.get("soft_cap")?,
        interleave: attributes.get("interleave")?,
        world_size: attributes.get("world_size")?,
        arrays: addresses,
        workspace: 0,
    };
    if call.units == 0 || call.rows == 0 {
        return Ok(call);
    }
    call.check().map_err(|error| burst_attention::Error::from(CudaError::Launch(error)))?;
    // Units count in tiles of this many keys.
    if count("tile_keys")? != call.page_tile() {
        let got = count("tile_keys")?;
        return Err(Error::mismatch("tile_keys", call.page_tile().to_string(), got));
    }
    let bytes = call.most_workspace_bytes() as usize;
    Ok(Decode { workspace: workspace.address("workspace", DataType::U8, &[bytes])?, ..call })
}
