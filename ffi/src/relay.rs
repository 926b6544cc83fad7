//! Calls of a program that walks the schedule itself: each does one stretch of a rank's work.

use std::ffi::{CStr, c_char};
use std::ptr::NonNull;

use burst_attention::Pass;
use burst_attention::host::relay::{Hop, Memory, Relay, relay, run};
use serde_json::{Value, json};

use crate::answer::tell;
use crate::attributes::Attributes;
use crate::buffer::Buffer;
use crate::call::{CallSite, RankCall};
use crate::data_type::DataType;
use crate::error::{Error, Result};
use crate::frame::CallFrame;
use crate::handler::{count_bytes, guard_stage, instantiate_as};
use crate::request::{self, Described};
use crate::state::{self, CallState, Kind};
use crate::sys;

/// What a call of a compiled program keeps.
struct State {
    site: CallSite,
    stretch: usize,
}

impl CallState for State {
    fn kind() -> &'static Kind {
        static KIND: Kind = Kind::of::<State>("StretchState");
        &KIND
    }
}

impl State {
    fn decode(attributes: &Attributes<'_>, pass: Pass) -> Result<State> {
        let stretch: i64 = attributes.get("stretch")?;
        let natural = |_| Error::mismatch("stretch", "a natural number", stretch);
        Ok(State {
            site: CallSite::decode(attributes, pass)?,
            stretch: usize::try_from(stretch).map_err(natural)?,
        })
    }

    /// Operands are those of a ring's call, then, but in the first stretch, the arena and the
    /// outputs so far, then parcels that came. Results are the arena and the outputs, in the memory
    /// of those operands, then parcels that leave.
    fn run(&self, frame: &CallFrame<'_>) -> Result<()> {
        let [inputs, outputs] = self.site.counts();
        let (operands, rest) = divided("operands", frame.all_arguments()?, inputs)?;
        let (mut kept, departures) = divided("results", frame.all_results()?, 1 + outputs)?;
        let before = if self.stretch == 0 { 0 } else { kept.len() };
        let (before, arrivals) = divided("operands", rest, before)?;
        for (before, now) in before.iter().zip(&kept) {
            if before.data("operand")? != now.data("result")? {
                let expected = "the memory of an operand (input_output_aliases)";
                return Err(Error::mismatch("result", expected, "other memory"));
            }
        }
        let arena = kept.remove(0);
        let RankCall { call, place, buffers } = self.site.rank_call(operands, kept)?;
        let Some([rank, _]) = place else { return Ok(()) };
        let failed = |error| Error::Ring { axis: call.axis.to_string(), error: Box::new(error) };
        let relay = relay(&call.problem, call.family, call.pass, call.travels).map_err(failed)?;
        let sizes = Sizes { relay: &relay, stretch: self.stretch, batch: call.problem.batch };
        let memory = Memory {
            buffers,
            arena: sizes.memory("arena", &arena, relay.arena.bytes)?,
            arrivals: sizes.parcels("parcels that come", &arrivals, |hop| hop.to)?,
            departures: sizes.parcels("parcels that leave", &departures, |hop| hop.from)?,
        };
        let rank = usize::try_from(rank).unwrap_or(usize::MAX);
        count_bytes(run(&relay, &call.problem, rank, self.stretch, memory).map_err(failed)?);
        Ok(())
    }
}

/// The first `count`, and the rest.
fn divided(what: &str, mut all: Vec<Buffer>, count: usize) -> Result<(Vec<Buffer>, Vec<Buffer>)> {
    if all.len() < count {
        let expected = format!("at least {count}");
        return Err(Error::mismatch(format!("number of {what}"), expected, all.len()));
    }
    let rest = all.split_off(count);
    Ok((all, rest))
}

/// How large memory must be that a stretch is given.
struct Sizes<'a> {
    relay: &'a Relay,
    stretch: usize,
    batch: usize,
}

impl Sizes<'_> {
    /// Memory with so many bytes for each batch entry.
    fn memory(&self, name: &str, buffer: &Buffer, bytes: usize) -> Result<NonNull<u8>> {
        let data = buffer.typed(name, DataType(sys::XLA_FFI_DataType_U8))?.data(name)?;
        let expected = self.batch * bytes;
        if buffer.elements() != expected {
            return Err(Error::mismatch(
                format!("bytes of {name}"),
                expected.to_string(),
                buffer.elements(),
            ));
        }
        Ok(data)
    }

    /// One for each hop of which `end` is the stretch.
    fn parcels(
        &self,
        name: &str,
        buffers: &[Buffer],
        end: fn(&Hop) -> usize,
    ) -> Result<Vec<NonNull<u8>>> {
        let hops = self.relay.plan.hops.iter().filter(|hop| end(hop) == self.stretch);
        let hops: Vec<&Hop> = hops.collect();
        if hops.len() != buffers.len() {
            let expected = hops.len().to_string();
            return Err(Error::mismatch(format!("number of {name}"), expected, buffers.len()));
        }
        let each = hops.iter().zip(buffers);
        each.map(|(hop, buffer)| self.memory(name, buffer, hop.bytes)).collect()
    }
}

/// The handler of the instantiate stage.
///
/// # Safety
/// `raw` is a frame as XLA passes it to a handler, for the duration of this call.
pub(crate) unsafe fn instantiate(
    raw: *mut sys::XLA_FFI_CallFrame,
    pass: Pass,
) -> *mut sys::XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { instantiate_as(raw, |attributes| State::decode(attributes, pass)) }
}

/// The handler of the execute stage. It computes on XLA's thread and the workers that all rings
/// share, and waits for no other rank, so nothing can wait for it in turn.
///
/// # Safety
/// As [`instantiate`].
pub(crate) unsafe fn execute(raw: *mut sys::XLA_FFI_CallFrame) -> *mut sys::XLA_FFI_Error {
    let body = |frame: &mut CallFrame<'_>| {
        let state: &State = state::get(frame.runtime(), frame.context())?;
        state.run(frame)
    };
    // SAFETY: passed on.
    unsafe { guard_stage(raw, sys::XLA_FFI_ExecutionStage_EXECUTE, body) }
}

/// `{"stretches": …, "arena_bytes": …, "hops": [{"from", "to", "bytes", "pairs"}]}` with bytes for
/// each batch entry, or `{"error": …}`. The string stays until the thread asks again.
pub(crate) fn plan(request: &CStr) -> *const c_char {
    tell(answer(request))
}

fn answer(request: &CStr) -> std::result::Result<Value, String> {
    let Described { problem, family, pass, travels, .. } = request::read(request)?;
    let relay = relay(&problem, family, pass, travels).map_err(|error| error.to_string())?;
    let hop = |hop: &Hop| {
        let Hop { from, to, bytes, pairs } = hop;
        json!({ "from": from, "to": to, "bytes": bytes, "pairs": pairs })
    };
    let Relay { plan, arena, .. } = &*relay;
    let hops: Vec<Value> = plan.hops.iter().map(hop).collect();
    Ok(json!({ "stretches": plan.stretches(), "arena_bytes": arena.bytes, "hops": hops }))
}
