//! Handlers of rings on GPUs, for XLA's stages of a call.
//!
//! Prepare asks XLA for communicators of the ring's devices. Initialize creates the objects that a
//! device needs once. Execute enqueues the rank's part of the ring and returns. A virtual ring runs
//! all ranks on one device, for tests and benchmarks.

mod call;
mod collectives;
mod decode;
mod delta;
mod explain;
mod linear;
mod told;
mod turn;
mod watch;

use burst_attention::Pass;
use burst_attention::cuda::call::Call;
use burst_attention::cuda::driver::{Driver, Stream};
use burst_attention::cuda::executor::{Executor, FindImage, RankSet};
use burst_attention::cuda::libcuda::LibCuda;
use burst_attention::cuda::nccl::{Communicator, Nccl};
use std::collections::HashMap;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::error::{Error, Result};
use crate::frame::CallFrame;
use crate::state::{self, CallState, Kind};
use crate::{handler, images, sys};
use call::{CudaSite, Ranks};
use collectives::Collectives;
use explain::explain;
use told::Told;
use turn::Turn;
use watch::Watch;

pub use decode::run_decode;
pub use linear::{LinearKind, run_linear};
pub use told::Write;

/// The driver and NCCL that the handlers use.
pub struct Platform {
    executor: Executor,
    nccl: fn() -> burst_attention::Result<&'static Nccl>,
    /// Takes the lines about errors.
    write: Box<Write>,
    /// The watch over rings. Test doubles of the driver have none.
    watch: Option<Watch>,
}

/// The platform of this machine, once a handler has used it.
static OF_THIS_MACHINE: OnceLock<burst_attention::Result<Platform>> = OnceLock::new();

impl Platform {
    /// Returns a platform of any driver and NCCL, which hands lines about errors to `write`.
    pub fn new(
        driver: Box<dyn Driver>,
        image: FindImage,
        nccl: fn() -> burst_attention::Result<&'static Nccl>,
        write: Box<Write>,
    ) -> Platform {
        Platform { executor: Executor::new(driver, image), nccl, write, watch: None }
    }

    /// Returns the platform of this machine.
    ///
    /// # Errors
    /// If the machine has no driver.
    pub fn of_this_machine() -> Result<&'static Platform> {
        let platform = OF_THIS_MACHINE.get_or_init(|| {
            let (driver, write) = (Box::new(LibCuda::find()?), Box::new(told::to_stderr));
            let platform = Platform::new(driver, images::find, Nccl::load, write);
            Ok(Platform { watch: Some(Watch::default()), ..platform })
        });
        platform.as_ref().map_err(|error| Error::Core(error.clone()))
    }
}

/// Stops the watch over this machine's GPUs.
pub fn stop_watch() {
    if let Some(Ok(Platform { watch: Some(watch), .. })) = OF_THIS_MACHINE.get() {
        watch.stop();
    }
}

/// The devices of a call's ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spread {
    /// Each rank has its own device, and the ranks exchange messages.
    Devices,
    /// All ranks share one device.
    Virtual,
}

/// The state that a custom call of a compiled program keeps.
#[derive(Debug)]
struct SiteState {
    site: CudaSite,
    /// The errors of the initialize stage, each with the stream of its device, until the next run.
    failed: Mutex<HashMap<Stream, Error>>,
}

impl CallState for SiteState {
    fn kind() -> &'static Kind {
        static KIND: Kind = Kind::of::<SiteState>("CudaState");
        &KIND
    }
}

/// A stage of a handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Before a run. The handler asks for communicators.
    Prepare,
    /// Before a run. The communicators exist.
    Initialize,
    /// During a run. The operands exist.
    Execute,
}

impl Stage {
    fn number(self) -> sys::XLA_FFI_ExecutionStage {
        match self {
            Stage::Prepare => sys::XLA_FFI_ExecutionStage_PREPARE,
            Stage::Initialize => sys::XLA_FFI_ExecutionStage_INITIALIZE,
            Stage::Execute => sys::XLA_FFI_ExecutionStage_EXECUTE,
        }
    }
}

/// Handles the instantiate stage: reads the attributes, once for each call site.
///
/// # Safety
/// The caller must pass a frame as XLA passes it to a handler, valid for the duration of this call.
pub unsafe fn instantiate(
    raw: *mut sys::XLA_FFI_CallFrame,
    pass: Pass,
    spread: Spread,
) -> *mut sys::XLA_FFI_Error {
    // SAFETY: the caller guarantees what `instantiate_as` demands of the frame.
    unsafe {
        handler::instantiate_as(raw, |attributes| {
            let site = CudaSite::decode(attributes, pass, spread)?;
            Ok(SiteState { site, failed: Mutex::default() })
        })
    }
}

/// Handles a later stage on `platform`.
///
/// # Safety
/// The caller must pass a frame as XLA passes it to a handler, valid for the duration of this call.
/// Its buffers must belong to the device of the call's stream, and must not be reused before that
/// stream has passed this call.
pub unsafe fn run(
    raw: *mut sys::XLA_FFI_CallFrame,
    stage: Stage,
    platform: impl FnOnce() -> Result<&'static Platform>,
) -> *mut sys::XLA_FFI_Error {
    let body = |frame: &mut CallFrame<'_>, platform: &'static Platform, told: &Told<'_>| {
        let state: &SiteState = state::get(frame.runtime(), frame.context())?;
        let site = &state.site;
        if stage == Stage::Prepare {
            return prepare(frame, site);
        }
        let axis = (!site.is_alone()).then(|| site.axis());
        Turn::run(frame, platform, told, axis, |turn| match stage {
            Stage::Initialize => initialize(frame, state, platform, turn),
            _ => execute(frame, state, platform, turn),
        })
    };
    // SAFETY: the caller of `run` guarantees the frame.
    unsafe { handler::guard_stage(raw, stage.number(), |frame| Told::run(frame, platform(), body)) }
}

fn prepare(frame: &CallFrame<'_>, site: &CudaSite) -> Result<()> {
    if site.is_alone() {
        return Ok(());
    }
    let collectives = Collectives::of(frame, site)?;
    let request = |id| collectives.request(frame.runtime(), site, id);
    site.communication_ids().try_for_each(request)
}

/// Prepares the device for the call. A ring keeps its error for the execute stage. If one device
/// alone raised it here, XLA would not call the execute stage there, and peers would wait for it.
fn initialize(
    frame: &CallFrame<'_>,
    SiteState { site, failed }: &SiteState,
    platform: &Platform,
    turn: &Turn<'_>,
) -> Result<()> {
    let call = site.call(frame)?;
    if is_empty(&call) {
        return Ok(());
    }
    let tell = |error: &_| turn.tell(&site.failed(error));
    let outcome = with_ranks(frame, site, platform, |ranks| {
        let prepared = platform.executor.initialize(turn.stream, &call, ranks, &tell);
        let choices = prepared.map_err(|error| site.failed(&error))?;
        let pass = if call.pass == Pass::Forward { "forward" } else { "backward" };
        let name = format!("{pass} pass over {} ranks", call.problem.world_size);
        explain(&platform.write, &name, &choices)
    });
    let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
    failed.remove(&turn.stream);
    let Err(error) = outcome else { return Ok(()) };
    if site.is_alone() || error.is_of_program() {
        return Err(error);
    }
    turn.tell(&error);
    failed.insert(turn.stream, error);
    Ok(())
}

fn execute(
    frame: &CallFrame<'_>,
    SiteState { site, failed }: &SiteState,
    platform: &Platform,
    turn: &Turn<'_>,
) -> Result<()> {
    let Ranks { call, arrays, workspace } = site.ranks(frame)?;
    if is_empty(&call) {
        return Ok(());
    }
    let (stream, executor) = (turn.stream, &platform.executor);
    let failed = failed.lock().unwrap_or_else(PoisonError::into_inner).get(&stream).cloned();
    if failed.is_some() {
        turn.told_before();
    }
    let tell = |error: &_| turn.tell(&site.failed(error));
    let outcome = with_ranks(frame, site, platform, |ranks| {
        // After an error of the initialize stage, this rank runs the call only if its peers do.
        if let Some(error) = &failed
            && !executor.is_ready(stream, &call, ranks)
        {
            return Err(error.clone());
        }
        let sent = executor.run(stream, &call, ranks, &arrays, workspace, &tell);
        handler::count_bytes(sent.map_err(|error| site.failed(&error))?);
        turn.issued()
    });
    failed.map_or(outcome, Err)
}

/// Whether a call has no query.
fn is_empty(call: &Call) -> bool {
    call.problem.batch == 0 || call.problem.q_len == 0
}

/// Calls `body` with the ranks that this device runs, and their communicators.
fn with_ranks(
    frame: &CallFrame<'_>,
    site: &CudaSite,
    platform: &Platform,
    body: impl FnOnce(RankSet<'_>) -> Result<()>,
) -> Result<()> {
    if site.spread == Spread::Virtual {
        return body(RankSet::All);
    }
    if site.is_alone() {
        return body(RankSet::One(&[]));
    }
    let collectives = Collectives::of(frame, site)?;
    let nccl = (platform.nccl)().map_err(|error| site.failed(&error))?;
    let communicator = |id| {
        let comm = collectives.get(frame.runtime(), site, id)?;
        Communicator::new(nccl, comm, site.world_size()).map_err(|error| site.failed(&error))
    };
    let communicators = site.communication_ids().map(communicator).collect::<Result<Vec<_>>>()?;
    body(RankSet::One(&communicators))
}
