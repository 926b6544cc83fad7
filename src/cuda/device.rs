//! Issues rings to devices.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burst_attention_kernels::images::ImagesError;
use burst_attention_kernels::instances::{Instance, Target};
use burst_attention_kernels::launch::Launch;

use super::call::Call;
use super::commands::{Command, CommandList, Work};
use super::driver::{Context, Driver, Event, Function, Stream};
use super::error::CudaError;
use super::lower::{all_ranks, one_rank};
use super::nccl::{Comm, Communicator, Group, Message};
use super::region::Queue;
use super::synchronise::{Instruction, synchronised};
use super::workspace::Workspace;
use crate::error::{Error, Result};
use crate::operands::Arrays;

/// A function that finds the image of an instance.
pub type FindImage = fn(&Instance) -> std::result::Result<&'static [u8], ImagesError>;

/// The number of calls that a device remembers to be ready for. A training step makes a handful.
const READY_CALLS: usize = 256;
/// Bytes of the memory for the first messages to each peer.
const SCRATCH: usize = 1 << 16;

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
}

/// The objects that the executor keeps for a device. [`Executor::initialize`] creates all of them.
#[derive(Debug)]
pub(super) struct Device {
    pub target: Target,
    /// The stream of each queue of messages.
    streams: BTreeMap<Queue, Stream>,
    events: Vec<Event>,
    functions: HashMap<Instance, Function>,
    scratch: Option<u64>,
    /// The peers to which each communicator has a connection.
    sent_to: HashSet<(Comm, usize)>,
    /// The peers from which each communicator has a connection.
    received_from: HashSet<(Comm, usize)>,
    /// The calls, with their communicators, for which nothing is missing.
    ready: Vec<(Call, Vec<Comm>)>,
}

impl Device {
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
    /// which allocates memory and waits for the peer's host.
    ///
    /// # Errors
    /// If there are no kernels for the device, or the driver or NCCL refuse.
    pub fn initialize(&self, stream: Stream, call: &Call, ranks: RankSet<'_>) -> Result<()> {
        self.within(stream, |context| {
            let device = self.device(context)?;
            let mut device = lock(&device);
            let comms = ranks.comms();
            let known = (call.clone(), comms.iter().map(|comm| comm.comm).collect());
            if device.ready.contains(&known) {
                return Ok(());
            }
            let list = rehearse(call, device.target, ranks)?;
            self.complete(&mut device, &list)?;
            for (queue, comm) in Queue::OF_MESSAGES.into_iter().zip(comms) {
                self.connect(&mut device, queue, comm, &list)?;
            }
            device.ready.truncate(READY_CALLS - 1);
            device.ready.insert(0, known);
            Ok(())
        })
    }

    /// Issues the commands of one rank, or of all ranks if `arrays` are those of all ranks. Returns
    /// the bytes that they send, and does not wait for the commands. Even after an error, XLA's
    /// stream goes on only after the issued commands, since it may use their memory for something
    /// else then.
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
    ) -> Result<u64> {
        self.within(stream, |context| {
            let device = self.device(context)?;
            // The lock is held for the whole call, since all ranks must issue exchanges in one
            // order.
            let device = lock(&device);
            let list = lower(call, device.target, ranks, arrays, workspace)?;
            let comms = ranks.comms();
            Issue { driver: &*self.driver, device: &device, stream, comms }.all(&list.commands)?;
            Ok(list.bytes_sent)
        })
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
        let outcome = catch_unwind(AssertUnwindSafe(|| body(context)));
        let popped = self.driver.pop_context();
        let outcome = outcome.unwrap_or_else(|panic| resume_unwind(panic));
        outcome.and_then(|done| popped.map(|()| done))
    }

    /// Returns the device of a context that is current.
    pub(super) fn device(&self, context: Context) -> Result<Arc<Mutex<Device>>> {
        let mut devices = lock(&self.devices);
        if let Some(device) = devices.get(&context) {
            return Ok(device.clone());
        }
        let (major, minor) = self.driver.capability()?;
        let target = Target::of_capability(major, minor).ok_or_else(|| Error::Unsupported {
            what: format!("a GPU of compute capability {major}.{minor}"),
            executor: "CUDA",
            instead: "there are kernels for 8.0 to 8.9 (A100), 9.0 (H100, H200), 10.0 (B200), \
                      10.3 (B300) and 12.0 (RTX Blackwell)"
                .into(),
        })?;
        let device = Arc::new(Mutex::new(Device {
            target,
            streams: BTreeMap::new(),
            events: vec![],
            functions: HashMap::new(),
            scratch: None,
            sent_to: HashSet::new(),
            received_from: HashSet::new(),
            ready: vec![],
        }));
        devices.insert(context, device.clone());
        Ok(device)
    }

    /// Creates the objects that the commands need and the device lacks. Objects that were created
    /// before an error stay.
    fn complete(&self, device: &mut Device, list: &CommandList) -> Result<()> {
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
        Ok(())
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

    /// Sends a byte to each new peer to which the commands of a queue send, and receives a byte
    /// from each new peer from which they receive.
    fn connect(
        &self,
        device: &mut Device,
        queue: Queue,
        comm: &Communicator<'_>,
        list: &CommandList,
    ) -> Result<()> {
        let (mut to, mut from) = (BTreeSet::new(), BTreeSet::new());
        for command in list.commands.iter().filter(|command| command.queue == queue) {
            if let Work::Exchange(group) = &command.work {
                to.extend(group.sends.iter().map(|message| (comm.comm, message.peer)));
                from.extend(group.receives.iter().map(|message| (comm.comm, message.peer)));
            }
        }
        // The two directions are kept apart, so that both ends of each agree on whether it is new.
        to.retain(|connection| !device.sent_to.contains(connection));
        from.retain(|connection| !device.received_from.contains(connection));
        if to.is_empty() && from.is_empty() {
            return Ok(());
        }
        let scratch = match device.scratch {
            Some(scratch) => scratch,
            None => *device.scratch.insert(self.driver.allocate(SCRATCH)?),
        };
        // Each queue has its own part of the scratch memory, and sends from half of it.
        let part = SCRATCH as u64 / Queue::ALL.len() as u64;
        let (scratch, half) = (scratch + queue as u64 * part, part / 2);
        let message = |base: u64, &(_, peer): &(Comm, usize)| Message {
            address: scratch + base + peer as u64 % half,
            bytes: 1,
            peer,
        };
        let group = Group {
            sends: to.iter().map(|connection| message(0, connection)).collect(),
            receives: from.iter().map(|connection| message(half, connection)).collect(),
        };
        let stream = device.streams[&queue];
        // SAFETY: `allocate` returned memory of the device that holds both halves, and the executor
        // never frees it.
        unsafe { comm.exchange(stream, None, &group) }?;
        device.sent_to.extend(to);
        device.received_from.extend(from);
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

/// Commands on their way to a device.
struct Issue<'a> {
    driver: &'a dyn Driver,
    device: &'a Device,
    stream: Stream,
    comms: &'a [Communicator<'a>],
}

impl Issue<'_> {
    fn all(&self, commands: &[Command]) -> Result<()> {
        let (instructions, events) = synchronised(commands);
        if self.device.events.len() <= events {
            return Err(uninitialized("an event"));
        }
        let issued = instructions.iter().try_for_each(|one| self.one(commands, one));
        if issued.is_err() {
            // XLA's stream must not overtake the exchanges under way. If this fails too, the device
            // is lost, and the first error says more.
            let event = self.device.events[events];
            for stream in self.device.streams.values() {
                let recorded = self.driver.record(*stream, event);
                let _ = recorded.and_then(|()| self.driver.wait(self.stream, event));
            }
        }
        issued
    }

    fn one(&self, commands: &[Command], instruction: &Instruction) -> Result<()> {
        use Instruction::{Enqueue, Record, Wait};
        let event = |index: usize| self.device.events[index];
        match *instruction {
            Record(queue, index) => self.driver.record(self.stream_of(queue)?, event(index)),
            Wait(queue, index) => self.driver.wait(self.stream_of(queue)?, event(index)),
            Enqueue(index) => self.enqueue(&commands[index]),
        }
    }

    fn enqueue(&self, command: &Command) -> Result<()> {
        let stream = self.stream_of(command.queue)?;
        match &command.work {
            Work::Launch(launch) => self.device.launch(self.driver, stream, launch),
            Work::Copy(copy) => self.driver.copy(stream, copy),
            Work::Exchange(group) => {
                let index = Queue::OF_MESSAGES.iter().position(|queue| *queue == command.queue);
                let comm = index.and_then(|index| self.comms.get(index));
                let comm = comm.ok_or_else(|| uninitialized("a communicator"))?;
                // SAFETY: the messages lie in XLA's buffers of this call. XLA keeps them until its
                // stream has passed the call, and `synchronised` or `all` makes that stream wait
                // for this exchange.
                unsafe { comm.exchange(stream, Some(command.step), group) }
            }
            Work::Program | Work::Blocks(_) => Ok(()),
        }
    }

    fn stream_of(&self, queue: Queue) -> Result<Stream> {
        if queue == Queue::Compute {
            return Ok(self.stream);
        }
        let found = self.device.streams.get(&queue).copied();
        found.ok_or_else(|| uninitialized("a stream"))
    }
}

fn uninitialized(what: impl std::fmt::Display) -> Error {
    let (library, remedy) = ("XLA", "please report it as a bug");
    let reason = format!("it runs a call that was not initialised: {what} is missing");
    CudaError::Library { library, reason, remedy }.into()
}
