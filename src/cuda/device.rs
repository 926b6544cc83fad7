//! Issues rings to devices.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burst_attention_kernels::images::ImagesError;
use burst_attention_kernels::instances::{Instance, Target};
use burst_attention_kernels::launch::Launch;

use super::call::Call;
use super::commands::{CommandList, Work};
use super::driver::{Context, Driver, Event, Function, Stream};
use super::error::{CudaError, caught};
use super::issue::Issue;
use super::lower::{all_ranks, one_rank};
use super::nccl::{Comm, Communicator};
use super::region::Queue;
use super::synchronise::synchronised;
use super::workspace::Workspace;
use crate::error::{Error, Result};
use crate::operands::Arrays;

/// A function that finds the image of an instance.
pub type FindImage = fn(&Instance) -> std::result::Result<&'static [u8], ImagesError>;

/// A function that learns of an error of this device at once, before a handler returns it: the
/// handler may first wait for peers.
pub type Tell<'a> = &'a dyn Fn(&Error);

/// The number of calls that a device remembers to be ready for, for each ring. A training step makes
/// a handful.
const READY_CALLS: usize = 256;

/// The executor: a driver and the devices seen so far.
pub struct Executor {
    pub(super) driver: Box<dyn Driver>,
    image: FindImage,
    devices: Mutex<HashMap<Context, Arc<Mutex<Device>>>>,
}

/// The ranks whose commands a device is given.
#[derive(Debug, Clone, Copy)]
pub enum RankSet<'a> {
    /// One rank, which exchanges messages over communicators. A ring of one rank has none. Other
    /// rings have one, and rings with
    /// [`Family::has_far_links`](crate::schedule::Family::has_far_links) have a second one for
    /// these links.
    One(&'a [Communicator<'a>]),
    /// All ranks.
    All,
}

impl<'a> RankSet<'a> {
    fn comms(self) -> &'a [Communicator<'a>] {
        match self {
            RankSet::One(comms) => comms,
            RankSet::All => &[],
        }
    }

    fn handles(self) -> Vec<Comm> {
        self.comms().iter().map(|comm| comm.comm).collect()
    }
}

/// The objects that the executor keeps for a device. [`Executor::initialize`] creates all of them.
#[derive(Debug, Default)]
pub(super) struct Device {
    target: Option<Target>,
    /// The stream of each queue of messages.
    pub streams: BTreeMap<Queue, Stream>,
    pub events: Vec<Event>,
    functions: HashMap<Instance, Function>,
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
    fn is_ready(&self, call: &Call, ranks: RankSet<'_>) -> bool {
        self.ready.get(&ranks.handles()).is_some_and(|calls| calls.contains(call))
    }

    /// Enqueues a launch of a kernel that the device has loaded.
    pub fn launch(&self, driver: &dyn Driver, stream: Stream, launch: &Launch) -> Result<()> {
        let function = self.functions.get(&launch.instance);
        let function = function.ok_or_else(|| uninitialized(launch.instance))?;
        driver.launch(stream, *function, launch)
    }
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").field("devices", &lock(&self.devices).len()).finish()
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic leaves no half-made object: the objects that were made stay, and the next call makes
    // the missing ones.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Executor {
    /// Returns an executor without devices.
    pub fn new(driver: Box<dyn Driver>, image: FindImage) -> Executor {
        Executor { driver, image, devices: Mutex::default() }
    }

    /// Creates the objects that the device of XLA's `stream` needs to run `call`: streams for
    /// messages, kernels, events, connections to peers. The call is fast if nothing is missing.
    ///
    /// Connections are made here because NCCL makes a connection at the first message to a peer,
    /// which allocates memory and waits for the peer's host. A rank that lacks an object contacts
    /// its peers all the same, and tells them so. Otherwise they would wait for it for ever.
    ///
    /// # Errors
    /// If there are no kernels for the device, the driver or NCCL refuse, or another rank of the
    /// ring is not ready.
    pub fn initialize(
        &self,
        stream: Stream,
        call: &Call,
        ranks: RankSet<'_>,
        tell: Tell<'_>,
    ) -> Result<()> {
        self.within(stream, |context| {
            let device = self.device(context);
            let mut device = lock(&device);
            if device.is_ready(call, ranks) {
                return Ok(());
            }
            let comms = ranks.comms();
            let placed = |error| CudaError::at(comms.first(), None, error);
            let list = caught(|| self.complete(&mut device, call, ranks));
            let list = list.map_err(placed).inspect_err(tell);
            let agree = |comm| self.agree(&mut device, stream, comm, list.is_ok());
            let agreed = comms.first().map_or(Ok(()), agree);
            let list = list?;
            agreed.map_err(placed)?;
            for (queue, comm) in Queue::OF_MESSAGES.into_iter().zip(comms) {
                self.connect(&mut device, queue, comm, &list)?;
            }
            let calls = device.ready.entry(ranks.handles()).or_default();
            calls.truncate(READY_CALLS - 1);
            calls.insert(0, call.clone());
            Ok(())
        })
    }

    /// Whether the ranks of the ring have agreed that all of them are ready for `call`. If this rank
    /// met an error afterwards, its peers still run the call.
    pub fn is_ready(&self, stream: Stream, call: &Call, ranks: RankSet<'_>) -> bool {
        let is_ready = |context| Ok(lock(&self.device(context)).is_ready(call, ranks));
        self.within(stream, is_ready).unwrap_or(false)
    }

    /// Issues the commands of one rank, or of all ranks if `arrays` are those of all ranks. Returns
    /// the bytes that they send, and does not wait for the commands. After an error, the exchanges
    /// are still issued, so no peer waits for them for ever. XLA's stream goes on only after the
    /// issued commands, since it may use their memory for something else then.
    ///
    /// # Errors
    /// As [`Executor::initialize`], or if the device was not initialized for the call.
    pub fn run(
        &self,
        stream: Stream,
        call: &Call,
        ranks: RankSet<'_>,
        arrays: &[Arrays<u64>],
        workspace: Workspace,
        tell: Tell<'_>,
    ) -> Result<u64> {
        self.within(stream, |context| {
            let device = self.device(context);
            // The lock is held for the whole call, since all ranks must issue exchanges in one
            // order.
            let mut device = lock(&device);
            let target = self.target(&mut device)?;
            let list = lower(call, target, ranks, arrays, workspace)?;
            let (driver, device, comms) = (&*self.driver, &*device, ranks.comms());
            Issue { driver, device, stream, comms, tell }.all(&list.commands)?;
            Ok(list.bytes_sent)
        })
    }

    /// Lets an event stand for all operations that XLA's stream has so far. Makes the event if there
    /// is none.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn mark(&self, stream: Stream, event: Option<Event>) -> Result<Event> {
        self.within(stream, |_| {
            let event = event.map_or_else(|| self.driver.create_event(), Ok)?;
            self.driver.record(stream, event).map(|()| event)
        })
    }

    /// Whether the operations are over that an event of the stream's device stands for.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn is_over(&self, stream: Stream, event: Event) -> Result<bool> {
        self.within(stream, |_| self.driver.is_over(event))
    }

    /// Whether all operations are over that XLA's stream has so far.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn is_idle(&self, stream: Stream) -> Result<bool> {
        self.within(stream, |_| self.driver.is_idle(stream))
    }

    /// Runs `body` with the context of the stream current.
    pub(super) fn within<T>(
        &self,
        stream: Stream,
        body: impl FnOnce(Context) -> Result<T>,
    ) -> Result<T> {
        let context = self.driver.stream_context(stream)?;
        self.driver.push_context(context)?;
        // XLA's thread gets its own context back even after a panic.
        let outcome = caught(|| body(context));
        let popped = self.driver.pop_context();
        outcome.and_then(|done| popped.map(|()| done))
    }

    /// Returns the device of a context that is current.
    pub(super) fn device(&self, context: Context) -> Arc<Mutex<Device>> {
        lock(&self.devices).entry(context).or_default().clone()
    }

    /// Returns the target of the kernels for a device.
    pub(super) fn target(&self, device: &mut Device) -> Result<Target> {
        if let Some(target) = device.target {
            return Ok(target);
        }
        let (major, minor) = self.driver.capability()?;
        let target = Target::of_capability(major, minor).ok_or_else(|| Error::Unsupported {
            what: format!("a GPU of compute capability {major}.{minor}"),
            executor: "CUDA",
            instead: "there are kernels for 8.0 to 8.9 (A100), 9.0 (H100, H200), 10.0 (B200), \
                      10.3 (B300) and 12.0 (RTX Blackwell)"
                .into(),
        })?;
        Ok(*device.target.insert(target))
    }

    /// Creates the objects that the commands of a call need and the device lacks. Returns these
    /// commands, over memory that does not exist. Objects that were created before an error stay.
    fn complete(
        &self,
        device: &mut Device,
        call: &Call,
        ranks: RankSet<'_>,
    ) -> Result<CommandList> {
        if !ranks.comms().is_empty() {
            self.scratch(device)?;
        }
        let target = self.target(device)?;
        let list = rehearse(call, target, ranks)?;
        for queue in Queue::OF_MESSAGES {
            let mut commands = list.commands.iter();
            let is_used = queue == Queue::Exchange || commands.any(|one| one.queue == queue);
            if is_used && !device.streams.contains_key(&queue) {
                device.streams.insert(queue, self.driver.create_stream()?);
            }
        }
        // One more event serves the way out after an error.
        let (_, events) = synchronised(&list.commands);
        while device.events.len() < events + 1 {
            device.events.push(self.driver.create_event()?);
        }
        for command in &list.commands {
            let Work::Launch(launch) = &command.work else { continue };
            self.load(device, launch.instance)?;
        }
        Ok(list)
    }

    /// Loads a kernel if the device lacks it.
    pub(super) fn load(&self, device: &mut Device, instance: Instance) -> Result<()> {
        if device.functions.contains_key(&instance) {
            return Ok(());
        }
        let image = (self.image)(&instance).map_err(CudaError::Images)?;
        let function = self.driver.load(image, &instance.entry())?;
        device.functions.insert(instance, function);
        Ok(())
    }
}

fn lower(
    call: &Call,
    target: Target,
    ranks: RankSet<'_>,
    arrays: &[Arrays<u64>],
    workspace: Workspace,
) -> Result<CommandList> {
    match ranks {
        RankSet::All => all_ranks(call, target, arrays, workspace),
        RankSet::One(comms) => {
            let rank = comms.first().map_or(0, |comm| comm.rank);
            one_rank(call, rank, target, arrays[0], workspace)
        }
    }
}

/// Returns the commands over memory that does not exist, which shows the objects that they need.
fn rehearse(call: &Call, target: Target, ranks: RankSet<'_>) -> Result<CommandList> {
    const ARRAY: u64 = 1 << 48;
    let at = |n: u64| (n + 1) * ARRAY;
    let count = match ranks {
        RankSet::One(_) => 1,
        RankSet::All => call.problem.world_size,
    };
    let workspace = Workspace { address: at(0), bytes: call.workspace_bytes() * count as u64 };
    let arrays = Arrays::new(call.pass, &call.problem.features, |operand| at(operand as u64 + 1));
    lower(call, target, ranks, &vec![arrays; count], workspace)
}

/// Returns the error of an execution that lacks an object.
pub(super) fn uninitialized(what: impl std::fmt::Display) -> Error {
    let (library, remedy) = ("XLA", "please report it as a bug");
    let reason = format!("it runs a call that was not initialised: {what} is missing");
    CudaError::Library { library, reason, remedy }.into()
}
