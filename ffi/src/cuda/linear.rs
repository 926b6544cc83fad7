//! Linear attention of one device's tokens on a GPU, as launches on XLA's stream.

use burst_attention::Dtype;
use burst_attention_kernels::instances::Element;
use burst_attention_kernels::launch::{
    ChannelPairs, LINEAR_TILE, LinearAttend, LinearState, Part, TileOperation, column_tiles,
};
use burst_attention_kernels::variant::Decays;

use super::delta;
use super::explain::explain;
use super::told::Told;
use super::turn::Turn;
use super::{Platform, Stage};
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::frame::CallFrame;
use crate::shapes::split;
use crate::{handler, sys};

/// Levels of blocks in which the tokens of a tile meet, where channels have decays.
pub(super) const LEVELS: usize = 6;

/// The computation of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinearKind {
    /// The states after each part of the tokens.
    State,
    /// The outputs of the tokens.
    Attend,
    /// The pairs of tiles under decays of channels.
    Pairs,
    /// The inverses of tiles, in the delta rule.
    DeltaInverse,
    /// What parts of the tokens do to states, or corrected values, in the delta rule.
    DeltaState,
    /// What parts of the tokens do to gradients of states, or dY, in the delta rule.
    DeltaGrad,
    /// The gradient of keys from gradients of states, in the delta rule.
    DeltaKeys,
}

/// Handles the initialize or the execute stage on `platform`.
///
/// # Safety
/// The caller must guarantee the same as the caller of [`run`](super::run).
pub unsafe fn run_linear(
    raw: *mut sys::XLA_FFI_CallFrame,
    kind: LinearKind,
    stage: Stage,
    platform: impl FnOnce() -> Result<&'static Platform>,
) -> *mut sys::XLA_FFI_Error {
    let body = |frame: &mut CallFrame<'_>, platform: &'static Platform, told: &Told<'_>| {
        let Some(operation) = decode(frame, kind)? else { return Ok(()) };
        let executor = &platform.executor;
        Turn::run(frame, platform, told, None, |turn| {
            let operation = |_| operation;
            if stage == Stage::Execute {
                executor.launch(turn.stream, operation)?;
                return turn.issued();
            }
            let choices = executor.prepare(turn.stream, operation)?;
            explain(&platform.write, "linear attention", &choices)
        })
    };
    // SAFETY: the caller of `run_linear` guarantees the frame.
    unsafe { handler::guard_stage(raw, stage.number(), |frame| Told::run(frame, platform(), body)) }
}

/// Reads a call with its memory; `None` for a call without a token.
fn decode(frame: &CallFrame<'_>, kind: LinearKind) -> Result<Option<TileOperation>> {
    let attributes = frame.attributes()?;
    let rows: i64 = attributes.get("part_rows")?;
    let part_rows = usize::try_from(rows).ok();
    let Some(part_rows) = part_rows.filter(|n| *n > 0 && n.is_multiple_of(LINEAR_TILE)) else {
        return Err(Error::mismatch("part_rows", format!("a multiple of {LINEAR_TILE}"), rows));
    };
    let decays = || match attributes.get::<i64>("decays")? {
        0 => Ok(Decays::Heads),
        1 => Ok(Decays::KeyChannels),
        2 => Ok(Decays::ValueChannels),
        other => Err(Error::mismatch("decays", "0, 1 or 2", other)),
    };
    let part = || -> Result<_> {
        Ok((Part { rows: part_rows, reverse: attributes.get("reverse")? }, decays()?))
    };
    let of_delta = || match decays()? {
        Decays::ValueChannels => Err(Error::mismatch("decays of the delta rule", "0 or 1", 2)),
        decays => Ok((part_rows, decays)),
    };
    let has_tokens = |tokens: &LinearState| tokens.batch > 0 && tokens.rows > 0;
    Ok(match kind {
        LinearKind::State => {
            let [k, v, sums] = frame.arguments()?;
            let [state] = frame.results()?;
            let (tokens, _) = tokens(part()?, [&k, &v, &sums, &state])?;
            has_tokens(&tokens).then_some(tokens.into())
        }
        LinearKind::Attend => {
            let outputs = attend(part()?, frame)?;
            has_tokens(&outputs.tokens).then_some(outputs.into())
        }
        LinearKind::Pairs => {
            let pairs = pairs(part_rows, frame)?;
            has_tokens(&pairs.tokens).then_some(pairs.into())
        }
        LinearKind::DeltaInverse => delta::inverse(of_delta()?, frame)?,
        LinearKind::DeltaState => delta::state(of_delta()?, frame)?,
        LinearKind::DeltaGrad => delta::grad(of_delta()?, frame)?,
        LinearKind::DeltaKeys => delta::keys(of_delta()?, frame)?,
    })
}

fn attend(part: (Part, Decays), frame: &CallFrame<'_>) -> Result<LinearAttend> {
    let (arguments, results) = (frame.all_arguments()?, frame.all_results()?);
    let ([q, k, v, sums, state, others @ ..], [o, dots @ ..]) =
        (arguments.as_slice(), results.as_slice())
    else {
        return Err(wrong_counts(&arguments, &results));
    };
    let (other, pairs, levels) = match (part.1, others, dots) {
        (Decays::Heads, [], []) => (None, None, None),
        (Decays::Heads, [other], [_]) => (Some(other), None, None),
        (Decays::KeyChannels, [pairs], []) => (None, Some(pairs), None),
        (Decays::ValueChannels, [other, levels @ ..], [_]) if levels.len() == 2 => {
            (Some(other), None, Some(levels))
        }
        _ => return Err(wrong_counts(&arguments, &results)),
    };
    let (tokens, dtype) = tokens(part, [k, v, sums, state])?;
    let LinearState { rows, heads, head_dim, value_dim, decays, .. } = tokens;
    let (outer, [_, q_heads, _]) = split("query", q)?;
    let like = |name: &str, buffer: &Buffer, dtype: Dtype, inner: &[usize]| {
        buffer.address(name, dtype.into(), &[outer, inner].concat())
    };
    let of_dots = match decays {
        Decays::ValueChannels => vec![tokens.padded_rows(), heads, value_dim],
        _ => {
            let columns = column_tiles(head_dim, value_dim);
            let columns = columns.unwrap_or_else(|| unreachable!("sizes were checked"));
            vec![heads * columns, tokens.padded_rows()]
        }
    };
    let dots = other.zip(dots.first()).map(|(other, dots)| -> Result<_> {
        let other = like("other", other, dtype, &[rows, q_heads, value_dim])?;
        Ok((other, like("dots", dots, Dtype::F32, &of_dots)?))
    });
    let of_pairs = [tokens.padded_rows(), heads, LINEAR_TILE];
    let pairs = pairs.map_or(Ok(0), |pairs| like("pairs", pairs, Dtype::F32, &of_pairs))?;
    let of_levels = [rows, LEVELS, heads, value_dim];
    let level = |buffer| like("levels", buffer, dtype, &of_levels);
    let levels = match levels {
        Some([met, fades]) => [level(met)?, level(fades)?],
        _ => [0; 2],
    };
    Ok(LinearAttend {
        tokens,
        q_heads,
        pairs,
        levels,
        dots: dots.transpose()?,
        strict: frame.attributes()?.get("strict")?,
        q: like("query", q, dtype, &[rows, q_heads, head_dim])?,
        o: like("out", o, dtype, &[rows, heads, value_dim])?,
    })
}

fn wrong_counts(arguments: &[Buffer], results: &[Buffer]) -> Error {
    let got = format!("{} and {}", arguments.len(), results.len());
    let expected = "5 and 1, or 6 and 2; with decays of channels 6 and 1, or 8 and 2";
    Error::mismatch("operands and results", expected, got)
}

fn pairs(part_rows: usize, frame: &CallFrame<'_>) -> Result<ChannelPairs> {
    let [q, k, met] = frame.arguments()?;
    let [pairs] = frame.results()?;
    let (outer, [rows, heads, head_dim]) = split("key", &k)?;
    let (element, dtype) = activation(&k)?;
    check_columns(head_dim, head_dim)?;
    let tokens = LinearState {
        batch: outer.iter().product(),
        rows,
        heads,
        kv_heads: heads,
        head_dim,
        // The call has no values.
        value_dim: head_dim,
        element,
        part: Part { rows: part_rows, reverse: false },
        decays: Decays::KeyChannels,
        k: k.address("key", dtype.into(), &k.dims)?,
        v: 0,
        sums: 0,
        state: 0,
    };
    let of_pairs = [outer, &[tokens.padded_rows(), heads, LINEAR_TILE]].concat();
    Ok(ChannelPairs {
        tokens,
        q: q.address("query", dtype.into(), &k.dims)?,
        met: met.address(
            "met",
            dtype.into(),
            &[outer, &[rows, LEVELS, heads, head_dim]].concat(),
        )?,
        pairs: pairs.address("pairs", Dtype::F32.into(), &of_pairs)?,
    })
}

/// Reads the operands that both computations have, and the type of the activations. Leading
/// dimensions are folded into the batch.
fn tokens(
    (part, decays): (Part, Decays),
    [k, v, sums, state]: [&Buffer; 4],
) -> Result<(LinearState, Dtype)> {
    let (outer, [rows, kv_heads, head_dim]) = split("key", k)?;
    let (_, [_, _, value_dim]) = split("value", v)?;
    let (element, dtype) = activation(k)?;
    let [.., heads, _] = *sums.dims.as_slice() else {
        let got = format!("{:?}", sums.dims);
        return Err(Error::mismatch("shape of sums", "[..., heads, padded length]", got));
    };
    for (name, count) in [("key heads", kv_heads), ("heads", heads)] {
        if count == 0 || !heads.is_multiple_of(count) {
            return Err(Error::mismatch(name, format!("a divisor of heads ({heads})"), count));
        }
    }
    check_columns(head_dim, value_dim)?;
    let call = LinearState {
        batch: outer.iter().product(),
        rows,
        heads,
        kv_heads,
        head_dim,
        value_dim,
        element,
        part,
        decays,
        k: k.address("key", dtype.into(), &k.dims)?,
        v: v.address("value", dtype.into(), &[outer, &[rows, kv_heads, value_dim]].concat())?,
        sums: 0,
        state: 0,
    };
    let of_sums = match decays {
        Decays::Heads => vec![heads, call.padded_rows()],
        Decays::KeyChannels => vec![call.padded_rows(), heads, head_dim],
        Decays::ValueChannels => vec![call.padded_rows(), heads, value_dim],
    };
    let padded = [outer, of_sums.as_slice()].concat();
    let states = [outer, &[call.parts(), heads, head_dim, value_dim]].concat();
    let sums = sums.address("sums", Dtype::F32.into(), &padded)?;
    let state = state.address("state", Dtype::F32.into(), &states)?;
    Ok((LinearState { sums, state, ..call }, dtype))
}

/// Returns the type of keys, as kernels and as calls name it.
pub(super) fn activation(k: &Buffer) -> Result<(Element, Dtype)> {
    match k.dtype.activation() {
        Some(Dtype::Bf16) => Ok((Element::Bf16, Dtype::Bf16)),
        Some(Dtype::F16) => Ok((Element::F16, Dtype::F16)),
        _ => Err(Error::mismatch("dtype of key", "bfloat16 or float16", k.dtype)),
    }
}

/// Checks that kernels take these numbers of columns.
pub(super) fn check_columns(head_dim: usize, value_dim: usize) -> Result<()> {
    for (name, dim) in [("head_dim of key", head_dim), ("head_dim of value", value_dim)] {
        if !dim.is_multiple_of(8) || !(8..=256).contains(&dim) {
            return Err(Error::mismatch(name, "a multiple of 8 from 8 to 256", dim));
        }
    }
    Ok(())
}
