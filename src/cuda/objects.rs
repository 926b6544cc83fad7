//! The objects that the executor keeps for a device.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burst_attention_kernels::images::ImagesError;
use burst_attention_kernels::instances::{Instance, Target};
use burst_attention_kernels::launch::Launch;

use super::call::Call;
use super::driver::{Driver, Event, Function, Stream};
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

/// The objects of a device. [`Executor::initialize`](super::executor::Executor::initialize) creates
/// all of them.
#[derive(Debug, Default)]
pub struct Device {
    target: Option<Target>,
    /// The stream of each queue of messages.
    pub streams: BTreeMap<Queue, Stream>,
    /// The events, which commands use by their index.
    pub events: Vec<Event>,
    functions: HashMap<Instance, Function>,
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

    /// Loads a kernel from the image that `find` finds, if the device lacks it.
    ///
    /// # Errors
    /// If there is no image, or the driver refuses.
    pub fn load(
        &mut self,
        driver: &dyn Driver,
        instance: Instance,
        find: impl FnOnce(&Instance) -> std::result::Result<&'static [u8], ImagesError>,
    ) -> Result<()> {
        if self.functions.contains_key(&instance) {
            return Ok(());
        }
        let image = find(&instance).map_err(CudaError::Images)?;
        let function = driver.load(image, &instance.entry())?;
        self.functions.insert(instance, function);
        Ok(())
    }

    /// Enqueues a launch of a kernel that the device has loaded.
    ///
    /// # Errors
    /// If the kernel is not loaded, or the driver refuses.
    pub fn launch(&self, driver: &dyn Driver, stream: Stream, launch: &Launch) -> Result<()> {
        let function = self.functions.get(&launch.instance);
        let function = function.ok_or_else(|| uninitialized(launch.instance))?;
        driver.launch(stream, *function, launch)
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
