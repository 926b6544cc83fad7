//! Rings on GPUs: what happens when XLA compiles a call, prepares a run and enqueues it.
//!
//! Prepare asks XLA for communicators of the ring's devices, initialize makes what a device needs
//! once, execute enqueues the rank's part of the ring and returns. A virtual ring runs all ranks'
//! parts on one device, for tests and benchmarks.

mod call;
mod collectives;
mod linear;
mod workspace;

use burst_attention::Pass;
use burst_attention::cuda::device::{Executor, FindImage, Share};
use burst_attention::cuda::driver::{Driver, Stream};
use burst_attention::cuda::libcuda::LibCuda;
use burst_attention::cuda::nccl::{Communicator, Nccl};
use std::sync::LazyLock;

use crate::error::{Error, Result};
use crate::frame::CallFrame;
use crate::state::{self, CallState, Kind};
use crate::{handler, images, sys};
use call::{CudaSite, Ranks};
use collectives::Collectives;

pub use linear::{LinearKind, run_linear};
pub use workspace::workspace;

/// What the handlers run on: a driver and NCCL.
#[derive(Debug)]
pub struct Platform {
    executor: Executor,
    nccl: fn() -> burst_attention::Result<&'static Nccl>,
}

impl Platform {
    /// Of any driver and NCCL.
    pub fn new(
        driver: Box<dyn Driver>,
        image: FindImage,
        nccl: fn() -> burst_attention::Result<&'static Nccl>,
    ) -> Platform {
        Platform { executor: Executor::new(driver, image), nccl }
    }

    /// This machine's.
    ///
    /// # Errors
    /// If it has no driver.
    pub fn of_this_machine() -> Result<&'static Platform> {
        static PLATFORM: LazyLock<burst_attention::Result<Platform>> = LazyLock::new(|| {
            Ok(Platform::new(Box::new(LibCuda::find()?), images::find, Nccl::load))
        });
        PLATFORM.as_ref().map_err(|error| Error::Core(error.clone()))
    }
}

/// Where the ranks of a call are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spread {
    /// One on each device, which exchange messages.
    Devices,
    /// All on one device.
    Virtual,
}

/// What a custom call of a compiled program keeps.
#[derive(Debug)]
struct State(CudaSite);

impl CallState for State {
    fn kind() -> &'static Kind {
        static KIND: Kind = Kind::of::<State>("CudaState");
        &KIND
    }
}

/// A stage of a handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// A device is about to run a program: it asks for communicators.
    Prepare,
    /// The communicators are there.
    Initialize,
    /// The operands are there.
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

/// The handler of the instantiate stage: reads the attributes, once for each call site.
///
/// # Safety
/// `raw` is a frame as XLA passes it to a handler, for the duration of this call.
pub unsafe fn instantiate(
    raw: *mut sys::XLA_FFI_CallFrame,
    pass: Pass,
    spread: Spread,
) -> *mut sys::XLA_FFI_Error {
    let body = |frame: &mut CallFrame<'_>| {
        let api = frame.runtime();
        if let Some(query) = frame.metadata_query()? {
            query.answer(State::kind().number(api)?);
            return Ok(());
        }
        frame.expect_stage(sys::XLA_FFI_ExecutionStage_INSTANTIATE)?;
        handler::check_version(api)?;
        let site = CudaSite::decode(&frame.attributes()?, pass, spread)?;
        state::set(api, frame.context(), State(site))
    };
    // SAFETY: passed on.
    unsafe { handler::guard(raw, body) }
}

/// The handler of a later stage, on `platform`.
///
/// # Safety
/// `raw` is a frame as XLA passes it to a handler, for the duration of this call; the memory of its
/// buffers is the device's of the call's stream and is not reused before that stream has passed
/// this call.
pub unsafe fn run(
    raw: *mut sys::XLA_FFI_CallFrame,
    stage: Stage,
    platform: impl FnOnce() -> Result<&'static Platform>,
) -> *mut sys::XLA_FFI_Error {
    let body = |frame: &mut CallFrame<'_>| {
        let State(site) = state::get(frame.runtime(), frame.context())?;
        match stage {
            Stage::Prepare => prepare(frame, site),
            Stage::Initialize => initialize(frame, site, platform()?),
            Stage::Execute => execute(frame, site, platform()?),
        }
    };
    // SAFETY: passed on.
    unsafe { handler::guard_stage(raw, stage.number(), body) }
}

fn prepare(frame: &CallFrame<'_>, site: &CudaSite) -> Result<()> {
    if site.is_alone() {
        return Ok(());
    }
    let collectives = Collectives::of(frame, site)?;
    let request = |id| collectives.request(frame.runtime(), site, id);
    site.communication_ids().try_for_each(request)
}

fn initialize(frame: &CallFrame<'_>, site: &CudaSite, platform: &Platform) -> Result<()> {
    let call = site.call(frame)?;
    if call.problem.batch == 0 || call.problem.q_len == 0 {
        return Ok(());
    }
    let stream = Stream(frame.runtime().stream(frame.context())?);
    with_share(frame, site, platform, |share| {
        platform.executor.initialize(stream, &call, share).map_err(|error| site.failed(error))
    })
}

fn execute(frame: &CallFrame<'_>, site: &CudaSite, platform: &Platform) -> Result<()> {
    let Ranks { call, arrays, given } = site.ranks(frame)?;
    if call.problem.batch == 0 || call.problem.q_len == 0 {
        return Ok(());
    }
    let stream = Stream(frame.runtime().stream(frame.context())?);
    with_share(frame, site, platform, |share| {
        let sent = platform.executor.run(stream, &call, share, &arrays, given);
        handler::count_bytes(sent.map_err(|error| site.failed(error))?);
        Ok(())
    })
}

/// Which ranks' part this device runs, and with which communicators.
fn with_share(
    frame: &CallFrame<'_>,
    site: &CudaSite,
    platform: &Platform,
    body: impl FnOnce(Share<'_>) -> Result<()>,
) -> Result<()> {
    if site.spread == Spread::Virtual {
        return body(Share::All);
    }
    if site.is_alone() {
        return body(Share::Rank(&[]));
    }
    let collectives = Collectives::of(frame, site)?;
    let nccl = (platform.nccl)().map_err(|error| site.failed(error))?;
    let communicator = |id| {
        let comm = collectives.get(frame.runtime(), site, id)?;
        Communicator::new(nccl, comm, site.world_size()).map_err(|error| site.failed(error))
    };
    let communicators = site.communication_ids().map(communicator).collect::<Result<Vec<_>>>()?;
    body(Share::Rank(&communicators))
}
