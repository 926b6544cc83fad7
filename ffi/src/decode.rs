//! Attention of new queries to one device's part of a key/value cache, and the merge of such results,
//! on CPUs. The calls need no other rank.

pub(crate) mod arrays;

use std::ops::RangeInclusive;

use burst_attention::host::decode::{DecodeIo, event, merge_parts, partial};
use burst_attention::host::ring::Executor;
use burst_attention::host::trace;
use burst_attention::operands::DeviceKind;
use burst_attention::problem::Features;
use burst_attention_kernels::record::Size;

use self::arrays::Arrays;
use crate::attributes::Attributes;
use crate::call::MAX_WORLD_SIZE;
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
        let attributes = frame.attributes()?;
        let has_values = !values_in_keys(&attributes)?;
        let operands = frame.all_arguments()?;
        let arrays = Arrays::read(DeviceKind::Host, has_values, operands, frame.results()?)?;
        let io = decode(&arrays, &attributes)?;
        let device = || frame.runtime().device_ordinal(frame.context());
        let device = trace::is_active().then(device).transpose()?;
        // The event ends with this function.
        let _recorded = device.map(|device| event(&io, device));
        partial((*isa, pool), &io);
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
        let parts = parts.values("parts", &[count, rows, columns])?;
        merge_parts(parts, merged.values_mut("merged", &[rows, columns])?, columns);
        Ok(())
    };
    // SAFETY: the caller guarantees what `guard_stage` demands of the frame.
    unsafe { guard_stage(raw, sys::XLA_FFI_ExecutionStage_EXECUTE, body) }
}

/// Reads a call.
fn decode<'a>(arrays: &'a Arrays, attributes: &Attributes<'_>) -> Result<DecodeIo<'a>> {
    let (heads, kv_heads) = (arrays.length(Size::Heads), arrays.length(Size::KvHeads));
    if arrays.activation().activation().is_none() {
        let expected = "float32, bfloat16 or float16";
        return Err(Error::mismatch("dtype of query", expected, arrays.activation()));
    }
    if heads.checked_rem(kv_heads).is_none_or(|rest| rest != 0) {
        let expected = format!("a divisor of the heads of query ({heads})");
        return Err(Error::mismatch("heads of key_cache", expected, kv_heads));
    }
    let world_size = number("world_size", attributes, 1..=MAX_WORLD_SIZE as i64)?;
    let rank = i64::from(arrays.values::<i32>("rank")?[0]);
    if !(0..world_size).contains(&rank) {
        return Err(Error::mismatch("rank", format!("from 0 to {}", world_size - 1), rank));
    }
    let k = arrays.host("key_cache")?;
    let v = if arrays.has("value_cache") {
        arrays.host("value_cache")?
    } else {
        let value_dim = arrays.length(Size::ValueDim);
        if value_dim > k.dim {
            let expected = format!("at most those of key_cache ({})", k.dim);
            return Err(Error::mismatch("columns of o", expected, value_dim));
        }
        k.first_columns(value_dim)
    };
    Ok(DecodeIo {
        q: arrays.host("query")?,
        k,
        v,
        page_table: arrays.values("page_table")?,
        pages_per_source: arrays.length(Size::SourcePages),
        source: arrays.values("source")?,
        lengths: arrays.values("lengths")?,
        starts: arrays.values("starts")?,
        query_lengths: arrays.values("query_lengths")?,
        slopes: arrays.has("slopes").then(|| arrays.values("slopes")).transpose()?,
        scale: attributes.scale()?,
        soft_cap: soft_cap(attributes)?,
        window: u32::try_from(number("window", attributes, -1..=i64::from(i32::MAX))?).ok(),
        interleave: number("interleave", attributes, 1..=i64::from(i32::MAX))?,
        rank: (rank, world_size),
        o: arrays.host("o")?,
        lse: arrays.host("lse")?,
    })
}

/// Reads the soft cap of the scores, within the range that rings take; 0 for none.
fn soft_cap(attributes: &Attributes<'_>) -> Result<f32> {
    let soft_cap = attributes.get("soft_cap")?;
    Features::of_operands(soft_cap, 0.0, &[])?.validate()?;
    Ok(soft_cap)
}

/// Whether the values of a call are the first columns of its keys.
pub(crate) fn values_in_keys(attributes: &Attributes<'_>) -> Result<bool> {
    match attributes.get("values_in_keys")? {
        0i64 => Ok(false),
        1 => Ok(true),
        got => {
            let expected = "0 for a call with value_cache, or 1 for one whose values are the first \
                            columns of key_cache";
            Err(Error::mismatch("attribute values_in_keys", expected, got))
        }
    }
}

/// Reads a whole number in a range.
fn number(name: &str, attributes: &Attributes<'_>, range: RangeInclusive<i64>) -> Result<i64> {
    let value = attributes.get(name)?;
    if range.contains(&value) {
        return Ok(value);
    }
    let expected = format!("from {} to {}", range.start(), range.end());
    Err(Error::mismatch(format!("attribute {name}"), expected, value))
}
