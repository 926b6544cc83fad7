//! A meeting of the ranks of a recurrence on CPUs: each rank goes on once all ranks have come.
//!
//! XLA ends the process if a device waits in a collective for longer than its limit. So ranks whose
//! peers compute for long wait here before, where only time counts in which nothing computes.

use std::sync::Arc;

use burst_attention::Pass;
use burst_attention::operands::Arrays;

use crate::call::{read_rank_and_ring, world_size_of};
use crate::coordinator::Member;
use crate::error::Error;
use crate::frame::CallFrame;
use crate::handler::{COORDINATOR, guard_stage, instantiate_as, new_site};
use crate::rendezvous::{Call, Key, RankDevice};
use crate::state::{self, CallState, Kind};
use crate::sys;

/// The state of a meeting in a compiled program. All local devices share it.
#[derive(Debug)]
struct Meeting {
    site: u64,
    call: Call,
}

impl Drop for Meeting {
    fn drop(&mut self) {
        COORDINATOR.forget(self.site);
    }
}

impl CallState for Meeting {
    fn kind() -> &'static Kind {
        static KIND: Kind = Kind::of::<Meeting>("Meeting");
        &KIND
    }
}

/// Handles the instantiate stage.
///
/// # Safety
/// `raw` is a frame as XLA passes it to a handler, for the duration of this call.
pub(crate) unsafe fn instantiate(raw: *mut sys::XLA_FFI_CallFrame) -> *mut sys::XLA_FFI_Error {
    // SAFETY: the caller guarantees what `instantiate_as` demands of the frame.
    unsafe {
        instantiate_as(raw, |attributes| {
            let axis: Arc<str> = attributes.get::<&str>("axis_name")?.into();
            let call = Call { work: None, world_size: world_size_of(attributes)?, axis };
            Ok(Meeting { site: new_site(), call })
        })
    }
}

/// Handles the execute stage: registers the rank and returns. The operands are the place of the rank,
/// and arrays that are the results, in the same memory.
///
/// # Safety
/// `raw` is a frame as XLA passes it to a handler, for the duration of this call.
pub(crate) unsafe fn execute(raw: *mut sys::XLA_FFI_CallFrame) -> *mut sys::XLA_FFI_Error {
    let body = |frame: &mut CallFrame<'_>| {
        let api = frame.runtime();
        let &Meeting { site, ref call } = state::get(api, frame.context())?;
        let call = call.clone();
        let (operands, results) = (frame.all_arguments()?, frame.all_results()?);
        let placed = operands.split_first().filter(|(_, arrays)| arrays.iter().eq(&results));
        let Some((place, _)) = placed else {
            let expected = "the operands behind the place of the rank, in the same memory";
            return Err(Error::mismatch("results", expected, format!("{results:?}")));
        };
        let [rank, ring] = read_rank_and_ring(place)?;
        let key = Key { site, run: api.run_id(frame.context())?, ring };
        let arriving = RankDevice { rank, device: api.device_ordinal(frame.context())? };
        let join = || {
            let promise = api.future()?;
            frame.set_future(&promise);
            Ok(Member { buffers: Arrays::none(Pass::Forward), completion: promise })
        };
        COORDINATOR.arrive(key, arriving, &call, join, |_| Ok(()))
    };
    // SAFETY: the caller guarantees what `guard_stage` demands of the frame.
    unsafe { guard_stage(raw, sys::XLA_FFI_ExecutionStage_EXECUTE, body) }
}
