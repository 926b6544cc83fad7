//! Decode over one device's pages on a GPU, as launches on XLA's stream.

use burst_attention::Dtype;
use burst_attention::cuda::driver::Stream;
use burst_attention::cuda::error::CudaError;
use burst_attention_kernels::instances::Element;
use burst_attention_kernels::launch::{Decode, Split};

use super::told::Told;
use super::{Platform, Stage};
use crate::buffer::Buffer;
use crate::data_type::DataType;
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
        if stage == Stage::Execute {
            executor.launch(stream, |target| {
                let split = match call.split {
                    Split::Runs(_) => Split::Runs(call.runs(target)),
                    slices => slices,
                };
                Decode { split, ..call }.launches(target)
            })?;
            return Ok(());
        }
        for kernel in 0..2 {
            executor.prepare(stream, |target| call.instances(target)[kernel])?;
        }
        Ok(())
    };
    // SAFETY: the caller of `run_decode` guarantees the frame.
    unsafe { handler::guard_stage(raw, stage.number(), |frame| Told::run(frame, platform(), body)) }
}

/// Reads a call with its memory. The device decides the number of runs later.
fn decode(frame: &CallFrame<'_>) -> Result<Decode> {
    let (arguments, [o, lse, workspace]) = (frame.all_arguments()?, frame.results()?);
    let (inputs, slopes) = match arguments.as_slice() {
        [inputs @ .., places, slopes] if inputs.len() == 7 => (inputs, Some((places, slopes))),
        inputs => (inputs, None),
    };
    let [q, k, v, page_table, table, intervals, rank] = inputs else {
        return Err(Error::mismatch("operands", "7, or 9 with slopes", arguments.len()));
    };
    let (element, dtype) = match q.dtype.activation() {
        Some(Dtype::Bf16) => (Element::Bf16, DataType::BF16),
        Some(Dtype::F16) => (Element::F16, DataType::F16),
        _ => return Err(Error::mismatch("dtype of query", "bfloat16 or float16", q.dtype)),
    };
    let [units, kv_heads, rows, head_dim] = q.ranked("query")?;
    let [pages, page_rows, _, _] = k.ranked("key_cache")?;
    let [_, _, _, value_dim] = v.ranked("value_cache")?;
    let [sources, source_pages] = page_table.ranked("page_table")?;
    let heads = [units, kv_heads, rows];
    let integers = DataType::S32;
    let slopes = slopes.map(|(places, slopes)| -> Result<_> {
        let places = address("places", places, integers, &[units, rows])?;
        Ok((places, address("slopes", slopes, DataType::F32, &heads)?))
    });
    let attributes = frame.attributes()?;
    let count = |name: &str| -> Result<usize> {
        let got: i64 = attributes.get(name)?;
        usize::try_from(got).map_err(|_| Error::mismatch(name, "a natural number", got))
    };
    let split = match count("most_slices")? {
        0 => Split::Runs(1),
        most => Split::Slices(most),
    };
    let call = Decode {
        units,
        rows,
        kv_heads,
        head_dim,
        value_dim,
        element,
        pages,
        page_rows,
        sources,
        source_pages,
        slice_tiles: count("slice_tiles")?,
        split,
        softmax_scale: attributes.get("scale")?,
        soft_cap: attributes.get("soft_cap")?,
        interleave: attributes.get("interleave")?,
        world_size: attributes.get("world_size")?,
        q: address("query", q, dtype, &q.dims)?,
        k: address("key_cache", k, dtype, &[pages, page_rows, kv_heads, head_dim])?,
        v: address("value_cache", v, dtype, &[pages, page_rows, kv_heads, value_dim])?,
        page_table: address("page_table", page_table, integers, &[sources, source_pages])?,
        table: address("units", table, integers, &[units, 4])?,
        intervals: address("intervals", intervals, integers, &[units, 2, rows])?,
        slopes: slopes.transpose()?,
        rank: address("rank", rank, integers, &[])?,
        workspace: 0,
        o: address("out", &o, DataType::F32, &[&heads[..], &[value_dim]].concat())?,
        lse: address("lse", &lse, DataType::F32, &heads)?,
    };
    if units == 0 || rows == 0 {
        return Ok(call);
    }
    call.check().map_err(|error| burst_attention::Error::from(CudaError::Launch(error)))?;
    // Units count in tiles of this many keys.
    if count("tile_keys")? != call.page_tile() {
        let got = count("tile_keys")?;
        return Err(Error::mismatch("tile_keys", call.page_tile().to_string(), got));
    }
    let bytes = call.most_workspace_bytes() as usize;
    Ok(Decode { workspace: address("workspace", &workspace, DataType::U8, &[bytes])?, ..call })
}

/// Returns the address of a buffer after checking its shape and type.
fn address(name: &str, buffer: &Buffer, dtype: DataType, dims: &[usize]) -> Result<u64> {
    if buffer.dims != dims {
        let (expected, got) = (format!("{dims:?}"), format!("{:?}", buffer.dims));
        return Err(Error::mismatch(format!("shape of {name}"), expected, got));
    }
    // The initialize stage has no memory yet. Launches refuse null.
    let data = buffer.typed(name, dtype)?.data(name);
    Ok(data.map_or(0, |data| data.as_ptr() as u64))
}
