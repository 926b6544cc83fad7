//! What happens when XLA compiles a call and when a device runs it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Once};
use std::time::Duration;

use burst_attention::Pass;
use burst_attention::host::ring::{self, RankBuffers};
use burst_attention::host::threads;

use crate::api::{Api, Promise};
use crate::attributes::Attributes;
use crate::call::{self, CallSite, RankCall};
use crate::error::{Error, Result};
use crate::frame::CallFrame;
use crate::hub::{Completion, Hub, Member};
use crate::rendezvous::{Key, Place};
use crate::state::{self, CallState, Kind};
use crate::{limit, sys};

/// Where all ranks of this process meet.
static HUB: LazyLock<Hub<RankBuffers, Promise>> =
    LazyLock::new(|| Hub::new(limit::DEFAULT, threads::reserve));

/// Done once somebody has said how late ranks may be: the environment or the program.
static LIMIT_IS_SET: Once = Once::new();

/// Bytes that all ranks of all rings sent.
static BYTES_SENT: AtomicU64 = AtomicU64::new(0);

/// Counts bytes that a rank sent, or a ring.
pub(crate) fn count_bytes(sent: u64) {
    BYTES_SENT.fetch_add(sent, Ordering::Relaxed);
}

/// The oldest interface that offers all that is used: that of jaxlib 0.11.2.
const OLDEST_RUNTIME: (i32, i32) = (0, 4);

/// What a custom call of a compiled program keeps. All local devices share it.
#[derive(Debug)]
struct State {
    site: u64,
    call: CallSite,
}

impl State {
    fn new(call: CallSite) -> State {
        static SITES: AtomicU64 = AtomicU64::new(0);
        State { site: SITES.fetch_add(1, Ordering::Relaxed), call }
    }
}

impl Drop for State {
    fn drop(&mut self) {
        HUB.forget(self.site);
    }
}

impl CallState for State {
    fn kind() -> &'static Kind {
        static KIND: Kind = Kind::of::<State>("State");
        &KIND
    }
}

impl Completion for Promise {
    fn complete(self, outcome: std::result::Result<(), &Error>) {
        Promise::complete(self, outcome);
    }
}

/// Refuses runtimes that lack what all handlers use.
pub(crate) fn check_version(api: Api) -> Result<()> {
    let (major, minor) = api.version();
    if (major, minor) < OLDEST_RUNTIME {
        let missing = "XLA_FFI_Error_GetDetails";
        return Err(Error::OldRuntime { major, minor, missing });
    }
    Ok(())
}

/// Runs the body of a handler and turns what it returns, or its panic, into XLA's kind of error.
///
/// # Safety
/// `raw` is a frame as XLA passes it to a handler, for the duration of this call.
pub(crate) unsafe fn guard(
    raw: *mut sys::XLA_FFI_CallFrame,
    body: impl FnOnce(&mut CallFrame<'_>) -> Result<()>,
) -> *mut sys::XLA_FFI_Error {
    // SAFETY: passed on.
    let Some(api) = (unsafe { CallFrame::api(raw) }) else {
        // There is no way to report anything, and success would be a lie.
        eprintln!("burst_attention: XLA called a handler without its table of functions");
        std::process::abort();
    };
    let guarded = AssertUnwindSafe(|| {
        // SAFETY: passed on.
        let mut frame = unsafe { CallFrame::new(raw) }?;
        body(&mut frame)
    });
    match catch_unwind(guarded).unwrap_or_else(|payload| Err(Error::panic(payload))) {
        Ok(()) => ptr::null_mut(),
        Err(error) => api.error(&error),
    }
}

/// As [`guard`], for the handler of a stage after instantiate: answers XLA's query for metadata and
/// refuses calls for another stage.
///
/// # Safety
/// As [`guard`].
pub(crate) unsafe fn guard_stage(
    raw: *mut sys::XLA_FFI_CallFrame,
    stage: sys::XLA_FFI_ExecutionStage,
    body: impl FnOnce(&mut CallFrame<'_>) -> Result<()>,
) -> *mut sys::XLA_FFI_Error {
    let checked = |frame: &mut CallFrame<'_>| {
        if let Some(query) = frame.metadata_query()? {
            query.answer(0);
            return Ok(());
        }
        frame.expect_stage(stage)?;
        body(frame)
    };
    // SAFETY: passed on.
    unsafe { guard(raw, checked) }
}

/// The handler of the instantiate stage: reads the attributes, once for each call site.
///
/// # Safety
/// `raw` is a frame as XLA passes it to a handler, for the duration of this call.
pub(crate) unsafe fn instantiate(
    raw: *mut sys::XLA_FFI_CallFrame,
    pass: Pass,
) -> *mut sys::XLA_FFI_Error {
    // SAFETY: passed on.
    unsafe { instantiate_as(raw, |attributes| Ok(State::new(CallSite::decode(attributes, pass)?))) }
}

/// The same for a call that keeps what `make` makes of its attributes.
///
/// # Safety
/// As [`instantiate`].
pub(crate) unsafe fn instantiate_as<S: CallState>(
    raw: *mut sys::XLA_FFI_CallFrame,
    make: impl FnOnce(&Attributes<'_>) -> Result<S>,
) -> *mut sys::XLA_FFI_Error {
    let body = |frame: &mut CallFrame<'_>| {
        let api = frame.runtime();
        if let Some(query) = frame.metadata_query()? {
            query.answer(S::kind().number(api)?);
            return Ok(());
        }
        frame.expect_stage(sys::XLA_FFI_ExecutionStage_INSTANTIATE)?;
        check_version(api)?;
        let limit = limit::from_environment()?;
        LIMIT_IS_SET.call_once(|| HUB.set_limit(limit));
        state::set(api, frame.context(), make(&frame.attributes()?)?)
    };
    // SAFETY: passed on.
    unsafe { guard(raw, body) }
}

/// The handler of the execute stage: registers the rank and returns; the last rank starts the ring.
///
/// # Safety
/// `raw` is a frame as XLA passes it to a handler, for the duration of this call. The memory of its
/// buffers lives until the future that is returned in it is completed.
pub(crate) unsafe fn execute(raw: *mut sys::XLA_FFI_CallFrame) -> *mut sys::XLA_FFI_Error {
    let body = |frame: &mut CallFrame<'_>| {
        let api = frame.runtime();
        let state: &State = state::get(api, frame.context())?;
        let RankCall { call, place, buffers } = state.call.decode_call(frame)?;
        let Some([rank, ring]) = place else { return Ok(()) };
        let key = Key { site: state.site, run: api.run_id(frame.context())?, ring };
        let place = Place { rank, device: api.device_ordinal(frame.context())? };

        let (problem, family, travels) = (call.problem.clone(), call.family, call.travels);
        let join = || {
            let promise = api.future()?;
            frame.set_future(&promise);
            Ok(Member { buffers, completion: promise })
        };
        HUB.arrive(key, place, &call, join, move |ranks| {
            let sent = ring::run_family(&problem, family, travels, call::gather(ranks)?)?;
            count_bytes(sent);
            Ok(())
        })
    };
    // SAFETY: passed on.
    unsafe { guard_stage(raw, sys::XLA_FFI_ExecutionStage_EXECUTE, body) }
}

/// Bytes that all ranks of all rings sent since the library was loaded.
pub(crate) fn bytes_sent() -> u64 {
    BYTES_SENT.load(Ordering::Relaxed)
}

/// Changes how late ranks may be.
pub(crate) fn set_rank_timeout(limit: Duration) {
    LIMIT_IS_SET.call_once(|| ());
    HUB.set_limit(limit);
}
