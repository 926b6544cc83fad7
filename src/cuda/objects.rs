//! The objects that the executor keeps for a device.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burst_attention_kernels::backend::{Backend, Computation, LibraryCall};
use burst_attention_kernels::images::ImagesError;
use burst_attention_kernels::instances::{Instance, Target};
use burst_attention_kernels::launch::{Code, Launch};

use super::call::Call;
use super::driver::{Driver, Event, Function, Library, Plan, Stream};
use super::error::CudaError;
use super::nccl::Comm;
use super::region::Queue;
use crate::error::{Error, Result};

/// A function that is called at once when this device fails. The handler returns the error later,
/// because it may first wait for peers.
pub type Tell<'a> = &'a dyn Fn(&Error);

/// The number of calls that a device remembers to be ready for, for each ring. A training step makes
/// a handful.
const READY_CALLS: usize = 256;

/// A function that finds the image of an instance.
pub type FindImage = fn(&Instance) -> std::result::Result<&'static [u8], ImagesError>;

/// What an executor computes with.
pub struct Tools {
    pub driver: Box<dyn Driver>,
    pub image: FindImage,
    pub backends: &'static [Backend],
    /// The libraries whose calls the backends make.
    pub libraries: Vec<Box<dyn Library>>,
}

impl Tools {
    /// Returns the library of a call.
    fn library(&self, call: &LibraryCall) -> Result<&dyn Library> {
        let found = self.libraries.iter().find(|library| library.name() == call.library);
        found.map(|library| &**library).ok_or_else(|| uninitialized(call.library))
    }
}

/// The objects of a device. [`Executor::initialize`](super::executor::Executor::initialize) creates
/// all of them.
#[derive(Debug, Default)]
pub struct Device {
    target: Option<Target>,
    /// The stream of each queue of messages.
    pub streams: BTreeMap<Queue, Stream>,
    /// The events, which commands use by their index.
    pub events: Vec<Event>,
    functions: HashMap<Code, Function>,
    /// The plans of libraries, each by the name of its library and its own words.
    plans: HashMap<&'static str, HashMap<String, Plan>>,
    /// The address of the memory for contact with peers.
    pub scratch: Option<u64>,
    /// The peers to which each communicator has a connection.
    pub sent_to: HashSet<(Comm, usize)>,
    /// The peers from which each communicator has a connection.
    pub received_from: HashSet<(Comm, usize)>,
    /// The calls for which nothing is missing, for each set of communicators. All ranks of a ring
    /// make the same calls in the same order, so these lists are the same on all of them.
    ready: HashMap<Vec<Comm>, Vec<Call>>,
}

impl Device {
    /// Whether nothing is missing for `call` over these communicators.
    pub fn is_ready(&self, call: &Call, comms: &[Comm]) -> bool {
        self.ready.get(comms).is_some_and(|calls| calls.contains(call))
    }

    /// Remembers that nothing is missing for `call` over these communicators.
    pub fn set_ready(&mut self, call: &Call, comms: Vec<Comm>) {
        let calls = self.ready.entry(comms).or_default();
        calls.truncate(READY_CALLS - 1);
        calls.insert(0, call.clone());
    }

    /// Returns the target of the kernels for the device.
    ///
    /// # Errors
    /// If there are no kernels for the device, or the driver refuses.
    pub fn target(&mut self, driver: &dyn Driver) -> Result<Target> {
        if let Some(target) = self.target {
            return Ok(target);
        }
        let (major, minor) = driver.capability()?;
        let target = Target::of_capability(major, minor).ok_or_else(|| Error::Unsupported {
            what: format!("a GPU of compute capability {major}.{minor}"),
            executor: "CUDA",
            instead: "there are kernels for 8.0 to 8.9 (A100), 9.0 (H100, H200), 10.0 (B200), \
                      10.3 (B300) and 12.0 (RTX Blackwell)"
                .into(),
        })?;
        Ok(*self.target.insert(target))
    }

    /// Loads the kernel of a launch or prepares the plan of a library, if the device lacks it.
    ///
    /// # Errors
    /// If there is no image or no library, or it refuses.
    pub fn prepare(&mut self, tools: &Tools, computation: &Computation) -> Result<()> {
        match computation {
            Computation::Launch(Launch { code, .. }) => self.load(tools, *code),
            Computation::Library(call) => {
                let plans = self.plans.entry(call.library).or_default();
                if !plans.contains_key(&call.plan) {
                    plans.insert(call.plan.clone(), tools.library(call)?.prepare(&call.plan)?);
                }
                Ok(())
            }
        }
    }

    /// Loads a kernel, if the device lacks it.
    ///
    /// # Errors
    /// If there is no image, or the driver refuses.
    fn load(&mut self, tools: &Tools, code: Code) -> Result<()> {
        if self.functions.contains_key(&code) {
            return Ok(());
        }
        let Code::Tile(instance) = code;
        let image = (tools.image)(&instance).map_err(CudaError::Images)?;
        let function = tools.driver.load(image, &code.entry())?;
        self.functions.insert(code, function);
        Ok(())
    }

    /// Enqueues a computation that the device is prepared for.
    ///
    /// # Errors
    /// If the device is not prepared, or the driver or the library refuses.
    pub fn enqueue(&self, tools: &Tools, stream: Stream, computation: &Computation) -> Result<()> {
        match computation {
            Computation::Launch(launch) => {
                let function = self.functions.get(&launch.code);
                let function = function.ok_or_else(|| uninitialized(launch.code))?;
                tools.driver.launch(stream, *function, launch)
            }
            Computation::Library(call) => {
                let plans = self.plans.get(call.library);
                let plan = plans.and_then(|plans| plans.get(&call.plan));
                let plan = plan.ok_or_else(|| uninitialized(&call.plan))?;
                tools.library(call)?.enqueue(stream, *plan, call)
            }
        }
    }
}

/// Locks the objects behind `mutex`.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic leaves no half-made object: the objects that were made stay, and the next call makes
    // the missing ones.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the error of an execution that lacks an object.
pub fn uninitialized(what: impl fmt::Display) -> Error {
    let (library, remedy) = ("XLA", "please report it as a bug");
    let reason = format!("it runs a call that was not initialised: {what} is missing");
    CudaError::Library { library, reason, remedy }.into()
}
