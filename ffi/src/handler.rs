//! The handlers for CPU devices: of the instantiate stage, when XLA compiles a call, and of the
//! execute stage, when a device runs it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Once};
use std::time::Duration;

use burst_attention::Pass;
use burst_attention::host::array::HostArray;
use burst_attention::host::ring;
use burst_attention::host::threads;
use burst_attention::operands::Arrays;

use crate::api::{Api, Promise};
use crate::attributes::Attributes;
use crate::call::{CallSite, RankCall};
use crate::coordinator::{Completion, Coordinator, Member};
use crate::error::{Error, Result};
use crate::frame::CallFrame;
use crate::rendezvous::{Key, RankDevice, Work};
use crate::state::{self, CallState, Kind};
use crate::{rank_timeout, sys};

/// The coordinator of all rings of this process.
pub(crate) static COORDINATOR: LazyLock<Coordinator<Arrays<HostArray>, Promise>> =
    LazyLock::new(|| Coordinator::new(rank_timeout::DEFAULT, threads::reserve));

/// Is completed once the environment or the program has set the rank timeout.
static TIMEOUT_IS_SET: Once = Once::new();

/// The bytes that all ranks of all rings have sent.
static BYTES_SENT: AtomicU64 = AtomicU64::new(0);

/// Counts bytes that a rank or a ring has sent.
pub(crate) fn count_bytes(sent: u64) {
    BYTES_SENT.fetch_add(sent, Ordering::Relaxed);
}

/// The oldest interface with all functions that the handlers use: the interface of jaxlib 0.11.2.
const OLDEST_RUNTIME: (i32, i32) = (0, 4);

/// The state of a custom call of a compiled program. All local devices share it.
#[derive(Debug)]
struct State {
    site: u64,
    call: CallSite,
}

impl State {
    fn new(call: CallSite) -> State {
        State { site: new_site(), call }
    }
}

/// Returns the number of another call site.
pub(crate) fn new_site() -> u64 {
    static SITES: AtomicU64 = AtomicU64::new(0);
    SITES.fetch_add(1, Ordering::Relaxed)
}

impl Drop for State {
    fn drop(&mut self) {
        COORDINATOR.forget(self.site);
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

/// Refuses runtimes that lack functions that all handlers use.
fn check_version(api: Api) -> Result<()> {
    let (major, minor) = api.version();
    if (major, minor) < OLDEST_RUNTIME {
        let missing = "XLA_FFI_Error_GetDetails";
        return Err(Error::OldRuntime { major, minor, missing });
    }
    Ok(())
}

/// Runs the body of a handler, and turns its error or its panic into XLA's kind of error.
///
/// # Safety
/// `raw` is a frame as XLA passes it to a handler, for the duration of this call.
pub(crate) unsafe fn guard(
    raw: *mut sys::XLA_FFI_CallFrame,
    body: impl FnOnce(&mut CallFrame<'_>) -> Result<()>,
) -> *mut sys::XLA_FFI_Error {
    // SAFETY: the caller guarantees a frame that is valid during this call.
    let Some(api) = (unsafe { CallFrame::api(raw) }) else {
        // Without the table no error can be reported, and success would be wrong.
        eprintln!("burst_attention: XLA called a handler without its table of functions");
        std::process::abort();
    };
    let guarded = AssertUnwindSafe(|| {
        // SAFETY: the caller guarantees a frame that is valid during this call.
        let mut frame = unsafe { CallFrame::new(raw) }?;
        body(&mut frame)
    });
    match catch_unwind(guarded).unwrap_or_else(|payload| Err(Error::panic(payload))) {
        Ok(()) => ptr::null_mut(),
        Err(error) => api.error(&error),
    }
}

/// Runs the body of a handler of a stage after instantiate, as [`guard`] does. Answers XLA's query
/// for metadata, and refuses calls for another stage.
///
/// # Safety
/// `raw` is a frame as XLA passes it to a handler, for the duration of this call.
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
    // SAFETY: the caller guarantees what `guard` demands of the frame.
    unsafe { guard(raw, checked) }
}

/// Handles the instantiate stage: reads the attributes, once for each call site.
///
/// # Safety
/// `raw` is a frame as XLA passes it to a handler, for the duration of this call.
pub(crate) unsafe fn instantiate(
    raw: *mut sys::XLA_FFI_CallFrame,
    pass: Pass,
) -> *mut sys::XLA_FFI_Error {
    // SAFETY: the caller guarantees what `instantiate_as` demands of the frame.
    unsafe { instantiate_as(raw, |attributes| Ok(State::new(CallSite::decode(attributes, pass)?))) }
}

/// Handles the instantiate stage of a call whose state `make` makes of its attributes.
///
/// # Safety
/// `raw` is a frame as XLA passes it to a handler, for the duration of this call.
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
        let timeout = rank_timeout::from_environment()?;
        TIMEOUT_IS_SET.call_once(|| COORDINATOR.set_rank_timeout(timeout));
        state::set(api, frame.context(), make(&frame.attributes()?)?)
    };
    // SAFETY: the caller guarantees what `guard` demands of the frame.
    unsafe { guard(raw, body) }
}

/// Handles the execute stage: registers the rank and returns. The last rank starts the ring.
///
/// # Safety
/// `raw` is a frame as XLA passes it to a handler, for the duration of this call. The memory of its
/// buffers lives until the future that the frame returns is completed.
pub(crate) unsafe fn execute(raw: *mut sys::XLA_FFI_CallFrame) -> *mut sys::XLA_FFI_Error {
    let body = |frame: &mut CallFrame<'_>| {
        let api = frame.runtime();
        let state: &State = state::get(api, frame.context())?;
        let RankCall { call, rank_and_ring, arrays } = state.call.decode_call(frame)?;
        let Some([rank, ring]) = rank_and_ring else { return Ok(()) };
        let key = Key { site: state.site, run: api.run_id(frame.context())?, ring };
        let arriving = RankDevice { rank, device: api.device_ordinal(frame.context())? };

        let work = call.work.clone();
        let join = || {
            let promise = api.future()?;
            frame.set_future(&promise);
            Ok(Member { buffers: arrays, completion: promise })
        };
        COORDINATOR.arrive(key, arriving, &call, join, move |ranks| {
            if let Some(Work { problem, family, travels, .. }) = work {
                count_bytes(ring::run(&problem, family, travels, ranks)?);
            }
            Ok(())
        })
    };
    // SAFETY: the caller guarantees what `guard_stage` demands of the frame.
    unsafe { guard_stage(raw, sys::XLA_FFI_ExecutionStage_EXECUTE, body) }
}

/// Returns the bytes that all ranks of all rings have sent since the library was loaded.
pub(crate) fn bytes_sent() -> u64 {
    BYTES_SENT.load(Ordering::Relaxed)
}

/// Returns the rank timeout.
pub(crate) fn rank_timeout() -> Duration {
    COORDINATOR.rank_timeout()
}

/// Changes the rank timeout.
pub(crate) fn set_rank_timeout(timeout: Duration) {
    TIMEOUT_IS_SET.call_once(|| ());
    COORDINATOR.set_rank_timeout(timeout);
}
