//! Linear attention of one device's tokens on a GPU: launches on XLA's stream.

use burst_attention::Dtype;
use burst_attention::cuda::driver::Stream;
use burst_attention_kernels::instances::{Element, Kernel};
use burst_attention_kernels::launch::{LINEAR_TILE, LinearAttend, LinearState, Part, column_tiles};

use super::{Platform, Stage};
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::frame::CallFrame;
use crate::shapes::split;
use crate::{handler, sys};

/// What a call computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinearKind {
    /// The states that parts of the tokens leave.
    State,
    /// What tokens get.
    Attend,
}

/// The handler of a stage, initialize or execute, on `platform`.
///
/// # Safety
/// As [`run`](super::run).
pub unsafe fn run_linear(
    raw: *mut sys::XLA_FFI_CallFrame,
    kind: LinearKind,
    stage: Stage,
    platform: impl FnOnce() -> Result<&'static Platform>,
) -> *mut sys::XLA_FFI_Error {
    let body = |frame: &mut CallFrame<'_>| {
        let call = LinearCall::decode(frame, kind)?;
        let LinearState { batch, rows, .. } = call.tokens();
        if batch == 0 || rows == 0 {
            return Ok(());
        }
        let stream = Stream(frame.runtime().stream(frame.context())?);
        let executor = &platform()?.executor;
        match stage {
            Stage::Execute => executor.launch(stream, |target| match &call {
                LinearCall::State(call) => call.launches(target),
                LinearCall::Attend(call) => call.launches(target),
            })?,
            _ => executor.prepare(stream, |target| {
                let instance = call.tokens().instance(call.kernel(), target);
                instance.unwrap_or_else(|| unreachable!("sizes were checked"))
            })?,
        }
        Ok(())
    };
    // SAFETY: passed on.
    unsafe { handler::guard_stage(raw, stage.number(), body) }
}

/// A call with its memory.
enum LinearCall {
    State(LinearState),
    Attend(LinearAttend),
}

impl LinearCall {
    fn tokens(&self) -> LinearState {
        match self {
            LinearCall::State(call) => *call,
            LinearCall::Attend(call) => call.tokens,
        }
    }

    fn kernel(&self) -> Kernel {
        match self {
            LinearCall::State(_) => Kernel::LinearState,
            LinearCall::Attend(_) => Kernel::LinearAttend,
        }
    }

    fn decode(frame: &CallFrame<'_>, kind: LinearKind) -> Result<LinearCall> {
        let attributes = frame.attributes()?;
        let rows: i64 = attributes.get("part_rows")?;
        let rows = usize::try_from(rows).ok().filter(|n| *n > 0 && n.is_multiple_of(LINEAR_TILE));
        let Some(rows) = rows else {
            let (name, expected) = ("part_rows", format!("a multiple of {LINEAR_TILE}"));
            return Err(Error::mismatch(name, expected, attributes.get::<i64>(name)?));
        };
        let part = Part { rows, reverse: attributes.get("reverse")? };
        match kind {
            LinearKind::State => {
                let [k, v, sums] = frame.arguments()?;
                let [state] = frame.results()?;
                Ok(LinearCall::State(tokens(part, &k, &v, &sums, &state)?))
            }
            LinearKind::Attend => attend(part, frame),
        }
    }
}

fn attend(part: Part, frame: &CallFrame<'_>) -> Result<LinearCall> {
    let (arguments, results) = (frame.all_arguments()?, frame.all_results()?);
    let ([q, k, v, sums, state], o, products) = match (arguments.as_slice(), results.as_slice()) {
        ([q, k, v, sums, state], [o]) => ([q, k, v, sums, state], o, None),
        ([q, k, v, sums, state, other], [o, dots]) => {
            ([q, k, v, sums, state], o, Some((other, dots)))
        }
        _ => {
            let got = format!("{} and {}", arguments.len(), results.len());
            return Err(Error::mismatch("operands and results", "5 and 1, or 6 and 2", got));
        }
    };
    let tokens = tokens(part, k, v, sums, state)?;
    let LinearState { rows, heads, head_dim, value_dim, .. } = tokens;
    let (outer, [_, q_heads, _]) = split("query", q)?;
    let like = |name: &str, buffer: &Buffer, dtype: Dtype, inner: &[usize]| {
        address(name, buffer, dtype, &[outer, inner].concat())
    };
    let dtype = dtype_of(tokens.element);
    let dots = match products {
        None => None,
        Some((other, dots)) => {
            let columns = column_tiles(head_dim, value_dim);
            let columns = columns.unwrap_or_else(|| unreachable!("sizes were checked"));
            let of_columns = [heads * columns, tokens.padded_rows()];
            Some((
                like("other", other, dtype, &[rows, q_heads, value_dim])?,
                like("dots", dots, Dtype::F32, &of_columns)?,
            ))
        }
    };
    Ok(LinearCall::Attend(LinearAttend {
        tokens,
        q_heads,
        q: like("query", q, dtype, &[rows, q_heads, head_dim])?,
        o: like("out", o, dtype, &[rows, heads, value_dim])?,
        dots,
    }))
}

/// What both calls have; leading dimensions are folded into the batch.
fn tokens(
    part: Part,
    k: &Buffer,
    v: &Buffer,
    sums: &Buffer,
    state: &Buffer,
) -> Result<LinearState> {
    let (outer, [rows, kv_heads, head_dim]) = split("key", k)?;
    let (_, [_, _, value_dim]) = split("value", v)?;
    let element = match k.dtype.activation() {
        Some(Dtype::Bf16) => Element::Bf16,
        Some(Dtype::F16) => Element::F16,
        _ => return Err(Error::mismatch("dtype of key", "bfloat16 or float16", k.dtype)),
    };
    let dtype = dtype_of(element);
    let [.., heads, _] = *sums.dims.as_slice() else {
        let got = format!("{:?}", sums.dims);
        return Err(Error::mismatch("shape of sums", "[..., heads, padded length]", got));
    };
    for (name, count) in [("key heads", kv_heads), ("heads", heads)] {
        if count == 0 || !heads.is_multiple_of(count) {
            return Err(Error::mismatch(name, format!("a divisor of heads ({heads})"), count));
        }
    }
    for (name, dim) in [("head_dim of key", head_dim), ("head_dim of value", value_dim)] {
        if !dim.is_multiple_of(8) || !(8..=256).contains(&dim) {
            return Err(Error::mismatch(name, "a multiple of 8 from 8 to 256", dim));
        }
    }
    let call = LinearState {
        batch: outer.iter().product(),
        rows,
        heads,
        kv_heads,
        head_dim,
        value_dim,
        element,
        part,
        k: address("key", k, dtype, &k.dims)?,
        v: address("value", v, dtype, &[outer, &[rows, kv_heads, value_dim]].concat())?,
        sums: 0,
        state: 0,
    };
    let padded = [outer, &[heads, call.padded_rows()]].concat();
    let states = [outer, &[call.parts(), heads, head_dim, value_dim]].concat();
    Ok(LinearState {
        sums: address("sums", sums, Dtype::F32, &padded)?,
        state: address("state", state, Dtype::F32, &states)?,
        ..call
    })
}

fn dtype_of(element: Element) -> Dtype {
    match element {
        Element::Bf16 => Dtype::Bf16,
        Element::F16 => Dtype::F16,
    }
}

fn address(name: &str, buffer: &Buffer, dtype: Dtype, dims: &[usize]) -> Result<u64> {
    if buffer.dims != dims {
        let (expected, got) = (format!("{dims:?}"), format!("{:?}", buffer.dims));
        return Err(Error::mismatch(format!("shape of {name}"), expected, got));
    }
    // There is no memory yet when a call is initialized; launches refuse null.
    let data = buffer.typed(name, dtype.into())?.data(name);
    Ok(data.map_or(0, |data| data.as_ptr() as u64))
}
