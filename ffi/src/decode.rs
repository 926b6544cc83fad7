//! Attention of new queries to one device's part of a key/value cache, and the merge of such results,
//! on CPUs. The calls need no other rank.

use std::ptr::NonNull;
use std::slice;

use burst_attention::Dtype;
use burst_attention::host::array::HostArray;
use burst_attention::host::decode::{DecodeIo, merge_parts, partial};
use burst_attention::host::ring::Executor;

use crate::attributes::Attributes;
use crate::buffer::Buffer;
use crate::call::MAX_WORLD_SIZE;
use crate::data_type::DataType;
use crate::error::{Error, Result};
use crate::frame::CallFrame;
use crate::handler::guard_stage;
use crate::sys;

/// Handles the execute stage: computes on XLA's thread and on the workers that all calls share, and
/// waits for no other device.
///
/// # Safety
/// `raw` is a frame as XLA passes it to a handler, for the duration of this call.
pub(crate) unsafe fn execute(raw: *mut sys::XLA_FFI_CallFrame) -> *mut sys::XLA_FFI_Error {
    let body = |frame: &mut CallFrame<'_>| {
        let Executor { isa, pool } = Executor::global()?;
        let (arguments, results) = (frame.arguments()?, frame.results()?);
        partial((*isa, pool), &decode(&arguments, &results, &frame.attributes()?)?);
        Ok(())
    };
    // SAFETY: the caller guarantees what `guard_stage` demands of the frame.
    unsafe { guard_stage(raw, sys::XLA_FFI_ExecutionStage_EXECUTE, body) }
}

/// Handles the execute stage of a merge: `[parts, rows, columns]` become `[rows, columns]`, as
/// [`merge_parts`] says.
///
/// # Safety
/// `raw` is a frame as XLA passes it to a handler, for the duration of this call.
pub(crate) unsafe fn merge(raw: *mut sys::XLA_FFI_CallFrame) -> *mut sys::XLA_FFI_Error {
    let body = |frame: &mut CallFrame<'_>| {
        let ([parts], [mut merged]) = (frame.arguments()?, frame.results()?);
        let [count, rows, columns] = parts.ranked("parts")?;
        if columns == 0 {
            return Err(Error::mismatch("columns of parts", "at least 1, that of lse", columns));
        }
        let parts = values("parts", &parts, DataType::F32, &[count, rows, columns])?;
        merge_parts(parts, values_mut("merged", &mut merged, &[rows, columns])?, columns);
        Ok(())
    };
    // SAFETY: the caller guarantees what `guard_stage` demands of the frame.
    unsafe { guard_stage(raw, sys::XLA_FFI_ExecutionStage_EXECUTE, body) }
}

/// Reads a call.
fn decode<'a>(
    arguments: &'a [Buffer; 10],
    results: &[Buffer; 2],
    attributes: &Attributes<'_>,
) -> Result<DecodeIo<'a>> {
    let [q, k, v, page_table, source, lengths, starts, query_lengths, rank, slopes] = arguments;
    let [o, lse] = results;
    let [batch, len, heads, dim] = q.ranked("query")?;
    let [pages, page, kv_heads, _] = k.ranked("key_cache")?;
    let [.., value_dim] = v.ranked::<4>("value_cache")?;
    let [sources, pages_per_source] = page_table.ranked("page_table")?;
    let Some(dtype) = q.dtype.activation() else {
        return Err(Error::mismatch("dtype of query", "float32, bfloat16 or float16", q.dtype));
    };
    if heads.checked_rem(kv_heads).is_none_or(|rest| rest != 0) {
        let expected = format!("a divisor of the heads of query ({heads})");
        return Err(Error::mismatch("heads of key_cache", expected, kv_heads));
    }
    let array = |name: &str, buffer: &Buffer, dtype: Dtype, dims: [usize; 4]| -> Result<_> {
        Ok(HostArray::jax(buffer.memory(name, dtype.into(), &dims)?, dtype, dims))
    };
    let world_size = number("world_size", attributes, 1..=MAX_WORLD_SIZE as i64)?;
    let rank = i64::from(values::<i32>("rank", rank, DataType::S32, &[])?[0]);
    if !(0..world_size).contains(&rank) {
        return Err(Error::mismatch("rank", format!("from 0 to {}", world_size - 1), rank));
    }
    let per_entry = |name, buffer| values(name, buffer, DataType::S32, &[batch]);
    Ok(DecodeIo {
        q: array("query", q, dtype, [batch, len, heads, dim])?,
        k: array("key_cache", k, dtype, [pages, page, kv_heads, dim])?,
        v: array("value_cache", v, dtype, [pages, page, kv_heads, value_dim])?,
        page_table: values("page_table", page_table, DataType::S32, &[sources, pages_per_source])?,
        pages_per_source,
        source: per_entry("source", source)?,
        lengths: per_entry("lengths", lengths)?,
        starts: per_entry("starts", starts)?,
        query_lengths: per_entry("query_lengths", query_lengths)?,
        slopes: values("slopes", slopes, DataType::F32, &[heads])?,
        scale: attributes.get("scale")?,
        soft_cap: attributes.get("soft_cap")?,
        window: u32::try_from(number("window", attributes, -1..=i64::from(i32::MAX))?).ok(),
        interleave: number("interleave", attributes, 1..=i64::from(i32::MAX))?,
        rank: (rank, world_size),
        o: array("o", o, Dtype::F32, [batch, len, heads, value_dim])?,
        lse: HostArray::jax(
            lse.memory("lse", DataType::F32, &[batch, len, heads])?,
            Dtype::F32,
            [batch, len, heads, 1],
        ),
    })
}

/// Reads a whole number in a range.
fn number(
    name: &str,
    attributes: &Attributes<'_>,
    range: std::ops::RangeInclusive<i64>,
) -> Result<i64> {
    let value = attributes.get(name)?;
    if range.contains(&value) {
        return Ok(value);
    }
    let expected = format!("from {} to {}", range.start(), range.end());
    Err(Error::mismatch(format!("attribute {name}"), expected, value))
}

/// Returns the elements of an operand of 32-bit numbers of type `T`, which `dtype` names.
fn values<'a, T>(
    name: &str,
    buffer: &'a Buffer,
    dtype: DataType,
    dims: &[usize],
) -> Result<&'a [T]> {
    let data = aligned::<T>(name, buffer, dtype, dims)?;
    // SAFETY: XLA guarantees that the buffer has its elements for the duration of the call, which
    // the frame's arguments do not outlive. Their type is a `T`, and the address is aligned.
    Ok(unsafe { slice::from_raw_parts(data.as_ptr(), buffer.elements()) })
}

/// Returns the elements of a float32 result.
fn values_mut<'a>(name: &str, buffer: &'a mut Buffer, dims: &[usize]) -> Result<&'a mut [f32]> {
    let data = aligned::<f32>(name, buffer, DataType::F32, dims)?;
    // SAFETY: XLA guarantees that the buffer has its elements for the duration of the call, which
    // the frame's results do not outlive, and that this call alone uses the result meanwhile. Their
    // type is float32, the address is aligned, and any bits of XLA's memory are numbers.
    Ok(unsafe { slice::from_raw_parts_mut(data.as_ptr(), buffer.elements()) })
}

/// Returns the address of a buffer's elements, checked to be aligned for a `T`.
fn aligned<T>(name: &str, buffer: &Buffer, dtype: DataType, dims: &[usize]) -> Result<NonNull<T>> {
    let data = buffer.memory(name, dtype, dims)?.cast::<T>();
    if data.is_aligned() {
        return Ok(data);
    }
    Err(Error::malformed(name, "aligned memory", format!("{data:?}")))
}
