//! Issues rings to devices.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burst_attention_kernels::images::ImagesError;
use burst_attention_kernels::instances::{Instance, Target};

use super::driver::{Context, Driver, Event, Function, Stream};
use super::nccl::{Comm, Communicator, Group, Message};
use super::rank::Arrays;
use super::ring::{Call, Given, Tape};
use super::tape::{Command, Op, Queue, Work, synchronised};
use crate::error::{Error, Result};

/// Finds the image of an instance.
pub type FindImage = fn(&Instance) -> std::result::Result<&'static [u8], ImagesError>;

/// Calls that a device is known to be ready for; a training step makes a handful.
const KEPT: usize = 256;
/// Memory for the first messages to each peer.
const SCRATCH: usize = 1 << 16;

/// The executor: a driver and the devices seen so far.
pub struct Executor {
    pub(super) driver: Box<dyn Driver>,
    image: FindImage,
    devices: Mutex<HashMap<Context, Arc<Mutex<Device>>>>,
}

/// Which ranks' operations a device is given.
#[derive(Debug, Clone, Copy)]
pub enum Share<'a> {
    /// One rank's, which exchanges messages over communicators, one for each of
    /// [`Queue::OF_MESSAGES`] that the call has: none for a ring of one, a second one for
    /// [`Family::has_far_links`](crate::schedule::Family::has_far_links).
    Rank(&'a [Communicator<'a>]),
    /// Those of all ranks.
    All,
}

impl<'a> Share<'a> {
    fn comms(self) -> &'a [Communicator<'a>] {
        match self {
            Share::Rank(comms) => comms,
            Share::All => &[],
        }
    }
}

/// Direction of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Way {
    To,
    From,
}

/// What is kept of a device. All of it is made by [`Executor::initialize`].
#[derive(Debug)]
pub(super) struct Device {
    pub target: Target,
    /// For what travels, of each queue.
    exchanges: BTreeMap<Queue, Stream>,
    events: Vec<Event>,
    pub functions: HashMap<Instance, Function>,
    scratch: Option<u64>,
    /// Peers that a connection was made to, or from.
    met: HashSet<(Comm, usize, Way)>,
    /// Calls that need nothing more: pass, shapes, communicators.
    ready: Vec<(Call, Vec<Comm>)>,
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").field("devices", &lock(&self.devices).len()).finish()
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is left half done in there: what was made is kept, what was not is made again.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Executor {
    /// With no devices yet.
    pub fn new(driver: Box<dyn Driver>, image: FindImage) -> Executor {
        Executor { driver, image, devices: Mutex::default() }
    }

    /// Makes what the device of XLA's `stream` needs to run `call`: streams for what travels, the
    /// kernels, events, connections to peers. Fast where nothing is missing.
    ///
    /// Connections are made here because NCCL makes them when a peer is first written to, which
    /// allocates memory and waits for the peer's host.
    ///
    /// # Errors
    /// If the device is of no kind that there are kernels for, or the driver or NCCL refuse.
    pub fn initialize(&self, stream: Stream, call: &Call, share: Share<'_>) -> Result<()> {
        self.within(stream, |context| {
            let device = self.device(context)?;
            let mut device = lock(&device);
            let comms = share.comms();
            let known = (call.clone(), comms.iter().map(|comm| comm.comm).collect());
            if device.ready.contains(&known) {
                return Ok(());
            }
            let tape = rehearsal(call, device.target, share)?;
            self.complete(&mut device, &tape)?;
            for (queue, comm) in Queue::OF_MESSAGES.into_iter().zip(comms) {
                self.connect(&mut device, queue, comm, &tape)?;
            }
            device.ready.truncate(KEPT - 1);
            device.ready.insert(0, known);
            Ok(())
        })
    }

    /// Issues one rank's operations, or all ranks' if `arrays` are those of all, and returns the
    /// bytes that they send. Nothing is awaited. Whatever happens, XLA's stream goes on only after
    /// what was issued: it may use the memory for something else then.
    ///
    /// # Errors
    /// As [`Executor::initialize`], or if that was not called before.
    pub fn run(
        &self,
        stream: Stream,
        call: &Call,
        share: Share<'_>,
        arrays: &[Arrays],
        given: Given,
    ) -> Result<u64> {
        self.within(stream, |context| {
            let device = self.device(context)?;
            // One call at a time: the order of exchanges must be the same on all ranks.
            let device = lock(&device);
            let tape = tape(call, device.target, share, arrays, given)?;
            let comms = share.comms();
            Issue { driver: &*self.driver, device: &device, stream, comms }.all(&tape.ops)?;
            Ok(tape.bytes_sent)
        })
    }

    /// With the context of the stream current.
    pub(super) fn within<T>(
        &self,
        stream: Stream,
        body: impl FnOnce(Context) -> Result<T>,
    ) -> Result<T> {
        let context = self.driver.stream_context(stream)?;
        self.driver.push_context(context)?;
        // XLA's thread gets its own context back whatever happens.
        let outcome = catch_unwind(AssertUnwindSafe(|| body(context)));
        let popped = self.driver.pop_context();
        let outcome = outcome.unwrap_or_else(|panic| resume_unwind(panic));
        outcome.and_then(|done| popped.map(|()| done))
    }

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
            exchanges: BTreeMap::new(),
            events: vec![],
            functions: HashMap::new(),
            scratch: None,
            met: HashSet::new(),
            ready: vec![],
        }));
        devices.insert(context, device.clone());
        Ok(device)
    }

    /// Makes what the operations need and the device lacks. What was made before an error stays.
    fn complete(&self, device: &mut Device, tape: &Tape) -> Result<()> {
        for queue in Queue::OF_MESSAGES {
            let is_used = queue == Queue::Exchange || tape.ops.iter().any(|op| op.queue == queue);
            if is_used && !device.exchanges.contains_key(&queue) {
                device.exchanges.insert(queue, self.driver.create_stream()?);
            }
        }
        // One more: for the way out after an error.
        let (_, events) = synchronised(&tape.ops);
        while device.events.len() < events + 1 {
            device.events.push(self.driver.create_event()?);
        }
        for op in &tape.ops {
            let Work::Launch(launch) = &op.work else { continue };
            self.load(device, launch.instance)?;
        }
        Ok(())
    }

    /// Loads a kernel, unless the device has it.
    pub(super) fn load(&self, device: &mut Device, instance: Instance) -> Result<()> {
        if device.functions.contains_key(&instance) {
            return Ok(());
        }
        let image = (self.image)(&instance)?;
        let function = self.driver.load(image, &instance.entry())?;
        device.functions.insert(instance, function);
        Ok(())
    }

    /// Sends a byte to every peer that a queue's operations send to, and takes one from those that
    /// they take from.
    fn connect(
        &self,
        device: &mut Device,
        queue: Queue,
        comm: &Communicator<'_>,
        tape: &Tape,
    ) -> Result<()> {
        let (mut to, mut from) = (BTreeSet::new(), BTreeSet::new());
        for op in tape.ops.iter().filter(|op| op.queue == queue) {
            if let Work::Exchange(group) = &op.work {
                to.extend(group.sends.iter().map(|message| message.peer));
                from.extend(group.receives.iter().map(|message| message.peer));
            }
        }
        // Each direction by itself: only so do both of its ends agree on whether it is new.
        to.retain(|&peer| !device.met.contains(&(comm.comm, peer, Way::To)));
        from.retain(|&peer| !device.met.contains(&(comm.comm, peer, Way::From)));
        if to.is_empty() && from.is_empty() {
            return Ok(());
        }
        if device.scratch.is_none() {
            device.scratch = Some(self.driver.allocate(SCRATCH)?);
        }
        let (Some(scratch), Some(&stream)) = (device.scratch, device.exchanges.get(&queue)) else {
            unreachable!("both were just made")
        };
        // Each queue has its own part, half of it for what is sent.
        let part = SCRATCH as u64 / Queue::ALL.len() as u64;
        let (scratch, half) = (scratch + queue as u64 * part, part / 2);
        let message = |base: u64, peer: usize| Message {
            address: scratch + base + peer as u64 % half,
            bytes: 1,
            peer,
        };
        let group = Group {
            sends: to.iter().map(|&peer| message(0, peer)).collect(),
            receives: from.iter().map(|&peer| message(half, peer)).collect(),
        };
        // SAFETY: the scratch memory is the device's, is never freed, and holds both halves.
        unsafe { comm.exchange(stream, None, &group) }?;
        device.met.extend(to.into_iter().map(|peer| (comm.comm, peer, Way::To)));
        device.met.extend(from.into_iter().map(|peer| (comm.comm, peer, Way::From)));
        Ok(())
    }
}

fn tape(
    call: &Call,
    target: Target,
    share: Share<'_>,
    arrays: &[Arrays],
    given: Given,
) -> Result<Tape> {
    match share {
        Share::All => call.virtual_tape(target, arrays, given),
        Share::Rank(comms) => {
            call.tape(comms.first().map_or(0, |comm| comm.rank), target, arrays[0], given)
        }
    }
}

/// The operations over memory that is not there, to see what they need.
fn rehearsal(call: &Call, target: Target, share: Share<'_>) -> Result<Tape> {
    const ARRAY: u64 = 1 << 48;
    let at = |n: u64| (n + 1) * ARRAY;
    let arrays = Arrays::new(call.pass, at);
    let (ranks, given) = match share {
        Share::Rank(_) => (1, call.workspace_bytes()),
        Share::All => {
            let ranks = call.problem.world_size;
            (ranks, call.workspace_bytes() * ranks as u64)
        }
    };
    let given = Given { workspace: at(10), bytes: given };
    tape(call, target, share, &vec![arrays; ranks], given)
}

/// Operations on their way to a device.
struct Issue<'a> {
    driver: &'a dyn Driver,
    device: &'a Device,
    stream: Stream,
    comms: &'a [Communicator<'a>],
}

impl Issue<'_> {
    fn all(&self, ops: &[Op]) -> Result<()> {
        let (commands, events) = synchronised(ops);
        if self.device.events.len() <= events {
            return Err(uninitialized("an event"));
        }
        let issued = commands.iter().try_for_each(|command| self.one(ops, command));
        if issued.is_err() {
            // XLA's stream must not pass what is under way on ours. If that fails too, the device
            // is lost, and the first error says more.
            let event = self.device.events[events];
            for stream in self.device.exchanges.values() {
                let marked = self.driver.record(*stream, event);
                let _ = marked.and_then(|()| self.driver.wait(self.stream, event));
            }
        }
        issued
    }

    fn one(&self, ops: &[Op], command: &Command) -> Result<()> {
        let event = |index: usize| self.device.events[index];
        match *command {
            Command::Record(queue, index) => self.driver.record(self.queue(queue)?, event(index)),
            Command::Wait(queue, index) => self.driver.wait(self.queue(queue)?, event(index)),
            Command::Enqueue(index) => self.op(&ops[index]),
        }
    }

    fn op(&self, op: &Op) -> Result<()> {
        let stream = self.queue(op.queue)?;
        match &op.work {
            Work::Launch(launch) => {
                let function = self.device.functions.get(&launch.instance);
                let function = function.ok_or_else(|| uninitialized(launch.instance))?;
                self.driver.launch(stream, *function, launch)
            }
            Work::Copy(copy) => self.driver.copy(stream, copy),
            Work::Exchange(group) => {
                let place = Queue::OF_MESSAGES.iter().position(|queue| *queue == op.queue);
                let comm = place.and_then(|place| self.comms.get(place));
                let comm = comm.ok_or_else(|| uninitialized("a communicator"))?;
                // SAFETY: the messages lie in XLA's buffers, which stay until its stream has passed
                // this call, and it waits for ours.
                unsafe { comm.exchange(stream, Some(op.step), group) }
            }
            Work::Program | Work::Pieces(_) => Ok(()),
        }
    }

    fn queue(&self, queue: Queue) -> Result<Stream> {
        match queue {
            Queue::Compute => Ok(self.stream),
            _ => {
                let found = self.device.exchanges.get(&queue).copied();
                found.ok_or_else(|| uninitialized("a stream"))
            }
        }
    }
}

pub(super) fn uninitialized(what: impl std::fmt::Display) -> Error {
    let (library, remedy) = ("XLA", "please report it as a bug");
    let reason = format!("it runs a call that was not initialised: {what} is missing");
    Error::Library { library, reason, remedy }
}
