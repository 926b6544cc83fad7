//! What happens when XLA compiles a call and when a device runs it.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

use burst_attention::Pass;
use burst_attention::host::ring;

use crate::api::{Api, Promise};
use crate::call::{self, CallSite, RankBuffers, RankCall};
use crate::error::{Error, Result};
use crate::frame::CallFrame;
use crate::hub::{Completion, Hub, Member};
use crate::rendezvous::{Key, Place};
use crate::{limit, sys};

/// Where all ranks of this process meet.
static HUB: LazyLock<Hub<RankBuffers, Promise>> = LazyLock::new(|| Hub::new(limit::initial()));

/// Bytes that all ranks of all rings sent.
static BYTES_SENT: AtomicU64 = AtomicU64::new(0);

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

impl Completion for Promise {
    fn complete(self, outcome: std::result::Result<(), &Error>) {
        Promise::complete(self, outcome);
    }
}

/// Runs the body of a handler and turns what it returns, or its panic, into XLA's kind of error.
///
/// # Safety
/// `raw` is a frame as XLA passes it to a handler, for the duration of this call.
unsafe fn guard(
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

/// The handler of the instantiate stage: reads the attributes, once for each call site.
///
/// # Safety
/// `raw` is a frame as XLA passes it to a handler, for the duration of this call.
pub(crate) unsafe fn instantiate(
    raw: *mut sys::XLA_FFI_CallFrame,
    pass: Pass,
) -> *mut sys::XLA_FFI_Error {
    let body = |frame: &mut CallFrame<'_>| {
        let api = frame.runtime();
        if let Some(query) = frame.metadata_query()? {
            query.answer(state_type(api)?);
            return Ok(());
        }
        frame.expect_stage(sys::XLA_FFI_ExecutionStage_INSTANTIATE)?;
        let (major, minor) = api.version();
        if (major, minor) < OLDEST_RUNTIME {
            let missing = "XLA_FFI_Error_GetDetails";
            return Err(Error::OldRuntime { major, minor, missing });
        }
        limit::from_environment()?;
        let state = State::new(CallSite::decode(&frame.attributes()?, pass)?);
        let state = NonNull::from(Box::leak(Box::new(state)));
        api.set_state(frame.context(), state_type(api)?, state.cast()).inspect_err(|_| {
            // SAFETY: the runtime did not take it.
            drop(unsafe { Box::from_raw(state.as_ptr()) });
        })
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
        if let Some(query) = frame.metadata_query()? {
            query.answer(0);
            return Ok(());
        }
        frame.expect_stage(sys::XLA_FFI_ExecutionStage_EXECUTE)?;
        let state = api.state(frame.context(), state_type(api)?)?.cast::<State>();
        // SAFETY: the runtime checked the type, and keeps the state while the program runs.
        let state = unsafe { state.as_ref() };
        let RankCall { call, place, buffers } = state.call.decode_call(frame)?;
        let Some([rank, ring]) = place else { return Ok(()) };
        let key = Key { site: state.site, run: api.run_id(frame.context())?, ring };
        let place = Place { rank, device: api.device_ordinal(frame.context())? };

        let promise = api.future()?;
        frame.set_future(&promise);
        let (problem, travels) = (call.problem.clone(), call.travels);
        let member = Member { buffers, completion: promise };
        HUB.arrive(key, place, &call, member, move |ranks| {
            let sent = ring::run(&problem, travels, call::gather(ranks)?)?;
            BYTES_SENT.fetch_add(sent, Ordering::Relaxed);
            Ok(())
        });
        Ok(())
    };
    // SAFETY: passed on.
    unsafe { guard(raw, body) }
}

/// Bytes that all ranks of all rings sent since the library was loaded.
pub(crate) fn bytes_sent() -> u64 {
    BYTES_SENT.load(Ordering::Relaxed)
}

/// Changes how late ranks may be.
pub(crate) fn set_rank_timeout(limit: Duration) {
    HUB.set_limit(limit);
}

/// The runtime's number for [`State`]. Each runtime of a process has its own registry.
fn state_type(api: Api) -> Result<i64> {
    static TYPES: Mutex<Vec<(usize, i64)>> = Mutex::new(Vec::new());
    static INFO: TypeInfo = TypeInfo(sys::XLA_FFI_TypeInfo {
        struct_size: sys::XLA_FFI_TypeInfo_STRUCT_SIZE as usize,
        extension_start: ptr::null_mut(),
        deleter: Some(delete_state),
    });
    let mut types = TYPES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, id)) = types.iter().find(|(address, _)| *address == api.address()) {
        return Ok(*id);
    }
    // The address tells copies of this library apart.
    let name = format!("burst_attention.State@{:p}", &raw const INFO);
    let id = api.register_type(&name, &INFO.0)?;
    types.push((api.address(), id));
    Ok(id)
}

struct TypeInfo(sys::XLA_FFI_TypeInfo);

// SAFETY: it is constant, and its one pointer is null.
unsafe impl Sync for TypeInfo {}

unsafe extern "C" fn delete_state(state: *mut c_void) {
    // SAFETY: the runtime gives back what `instantiate` handed over, once.
    let delete = || drop(unsafe { Box::from_raw(state.cast::<State>()) });
    if let Err(payload) = catch_unwind(delete) {
        eprintln!("{}", Error::panic(payload));
    }
}
