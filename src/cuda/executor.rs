//! The executor: issues rings, and launches that need no ring, to devices.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use burst_attention_kernels::backend::{
    BACKENDS, Backend, Backends, Choices, Computation, Kernels,
};
use burst_attention_kernels::instances::Target;
use burst_attention_kernels::launch::TileOperation;

use super::call::Call;
use super::commands::{CommandList, Work};
use super::connect::{agree, connect, scratch};
use super::cudnn::Cudnn;
use super::driver::{Context, Driver, Event, Library, Stream};
use super::error::{CudaError, caught};
use super::issue::Issue;
use super::lower::{all_ranks, one_rank};
use super::nccl::{Comm, Communicator};
use super::objects::{Device, Tools, lock};
pub use super::objects::{FindImage, Tell};
use super::region::Queue;
use super::synchronise::synchronised;
use super::workspace::Workspace;
use crate::error::Result;
use crate::operands::Arrays;

/// The executor: its tools and the devices seen so far.
pub struct Executor {
    tools: Tools,
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

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").field("devices", &lock(&self.devices).len()).finish()
    }
}

impl Executor {
    /// Returns an executor without devices, which chooses among [`BACKENDS`].
    pub fn new(driver: Box<dyn Driver>, image: FindImage) -> Executor {
        let tools = Tools {
            driver,
            image,
            backends: BACKENDS,
            libraries: vec![Box::new(Cudnn::default())],
        };
        Executor { tools, devices: Mutex::default() }
    }

    /// Returns an executor that chooses among `backends`, which make calls of `libraries`.
    pub fn with_backends(
        self,
        backends: &'static [Backend],
        libraries: Vec<Box<dyn Library>>,
    ) -> Executor {
        Executor { tools: Tools { backends, libraries, ..self.tools }, ..self }
    }

    /// Creates the objects that the device of XLA's `stream` needs to run `call`: streams for
    /// messages, kernels, events, connections to peers. The call is fast if nothing is missing.
    ///
    /// Connections are made here because NCCL makes a connection at the first message to a peer,
    /// which allocates memory and waits for the peer's host. A rank that lacks an object contacts
    /// its peers all the same, and tells them so. Otherwise they would wait for it for ever.
    ///
    /// Returns the choices of backends for a call that was not ready before.
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
    ) -> Result<Choices> {
        self.within(stream, |context| {
            let device = self.device(context);
            let mut device = lock(&device);
            if device.is_ready(call, &ranks.handles()) {
                return Ok(Choices::default());
            }
            let (driver, comms) = (&*self.tools.driver, ranks.comms());
            let rank_of = comms.first().map(Communicator::rank_and_size);
            let placed = |error| CudaError::at(rank_of, None, error);
            let list = caught(|| self.complete(&mut device, call, ranks));
            let list = list.map_err(placed).inspect_err(tell);
            let agree = |comm| agree(driver, &mut device, stream, comm, list.is_ok());
            let agreed = comms.first().map_or(Ok(()), agree);
            let list = list?;
            agreed.map_err(placed)?;
            for (queue, comm) in Queue::OF_MESSAGES.into_iter().zip(comms) {
                connect(driver, &mut device, queue, comm, &list)?;
            }
            device.set_ready(call, ranks.handles());
            Ok(list.choices)
        })
    }

    /// Whether the ranks of the ring have agreed that all of them are ready for `call`. If this rank
    /// met an error afterwards, its peers still run the call.
    pub fn is_ready(&self, stream: Stream, call: &Call, ranks: RankSet<'_>) -> bool {
        let is_ready = |context| Ok(lock(&self.device(context)).is_ready(call, &ranks.handles()));
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
            let target = device.target(&*self.tools.driver)?;
            let list = lower(call, self.backends(target, call.kernels), ranks, arrays, workspace)?;
            let (tools, device, comms) = (&self.tools, &*device, ranks.comms());
            Issue { tools, device, stream, comms, tell }.all(&list.commands)?;
            Ok(list.bytes_sent)
        })
    }

    /// Creates the objects that the device of XLA's `stream` needs to compute an operation, whose
    /// memory need not exist. The call is fast if nothing is missing. Returns the choice of the
    /// backend.
    ///
    /// # Errors
    /// If there are no kernels for the device, the operation can't be described, or the driver
    /// refuses.
    pub fn prepare(
        &self,
        stream: Stream,
        operation: impl FnOnce(Target) -> TileOperation,
    ) -> Result<Choices> {
        self.computed(stream, operation, |device, one| device.prepare(&self.tools, one))
    }

    /// Enqueues a prepared operation, and does not wait for it. Linear attention and decoding take
    /// this way: XLA does their exchange.
    ///
    /// # Errors
    /// If the operation can't be described, it was not prepared, or the driver refuses.
    pub fn launch(
        &self,
        stream: Stream,
        operation: impl FnOnce(Target) -> TileOperation,
    ) -> Result<()> {
        let enqueue = |device: &mut Device, one: &_| device.enqueue(&self.tools, stream, one);
        self.computed(stream, operation, enqueue).map(drop)
    }

    /// Calls `each` for all that computes an operation, in order.
    fn computed(
        &self,
        stream: Stream,
        operation: impl FnOnce(Target) -> TileOperation,
        each: impl Fn(&mut Device, &Computation) -> Result<()>,
    ) -> Result<Choices> {
        self.within(stream, |context| {
            let device = self.device(context);
            let mut device = lock(&device);
            let target = device.target(&*self.tools.driver)?;
            let lowered = self.backends(target, Kernels::Tile).lower(&operation(target));
            let (computations, choice) = lowered.map_err(CudaError::Launch)?;
            computations.iter().try_for_each(|one| each(&mut device, one))?;
            Ok(Choices::from(choice))
        })
    }

    /// Lets an event stand for all operations that XLA's stream has so far. Makes the event if there
    /// is none.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn mark(&self, stream: Stream, event: Option<Event>) -> Result<Event> {
        self.within(stream, |_| {
            let event = event.map_or_else(|| self.tools.driver.create_event(), Ok)?;
            self.tools.driver.record(stream, event).map(|()| event)
        })
    }

    /// Whether the operations are over that an event of the stream's device stands for.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn is_over(&self, stream: Stream, event: Event) -> Result<bool> {
        self.within(stream, |_| self.tools.driver.is_over(event))
    }

    /// Whether all operations are over that XLA's stream has so far.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn is_idle(&self, stream: Stream) -> Result<bool> {
        self.within(stream, |_| self.tools.driver.is_idle(stream))
    }

    /// Returns the backends of a device that may compute.
    fn backends(&self, target: Target, kernels: Kernels) -> Backends {
        let Tools { backends: all, libraries, .. } = &self.tools;
        // A call of own kernels alone must not load a library.
        let mut asked = libraries.iter().filter(|_| kernels != Kernels::Tile);
        let cudnn = asked.find_map(|library| library.cudnn_version());
        Backends { all, target, kernels, cudnn, scratch: 0 }
    }

    /// Runs `body` with the context of the stream current.
    fn within<T>(&self, stream: Stream, body: impl FnOnce(Context) -> Result<T>) -> Result<T> {
        let context = self.tools.driver.stream_context(stream)?;
        self.tools.driver.push_context(context)?;
        // XLA's thread gets its own context back even after a panic.
        let outcome = caught(|| body(context));
        let popped = self.tools.driver.pop_context();
        outcome.and_then(|done| popped.map(|()| done))
    }

    /// Returns the device of a context that is current.
    fn device(&self, context: Context) -> Arc<Mutex<Device>> {
        lock(&self.devices).entry(context).or_default().clone()
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
            scratch(&*self.tools.driver, device)?;
        }
        let target = device.target(&*self.tools.driver)?;
        let list = rehearse(call, self.backends(target, call.kernels), ranks)?;
        for queue in Queue::OF_MESSAGES {
            let mut commands = list.commands.iter();
            let is_used = queue == Queue::Exchange || commands.any(|one| one.queue == queue);
            if is_used && !device.streams.contains_key(&queue) {
                device.streams.insert(queue, self.tools.driver.create_stream()?);
            }
        }
        // One more event serves the way out after an error.
        let (_, events) = synchronised(&list.commands);
        while device.events.len() < events + 1 {
            device.events.push(self.tools.driver.create_event()?);
        }
        for command in &list.commands {
            let Work::Compute(computation) = &command.work else { continue };
            device.prepare(&self.tools, computation)?;
        }
        Ok(list)
    }
}

fn lower(
    call: &Call,
    backends: Backends,
    ranks: RankSet<'_>,
    arrays: &[Arrays<u64>],
    workspace: Workspace,
) -> Result<CommandList> {
    match ranks {
        RankSet::All => all_ranks(call, backends, arrays, workspace),
        RankSet::One(comms) => {
            let rank = comms.first().map_or(0, |comm| comm.rank);
            one_rank(call, rank, backends, arrays[0], workspace)
        }
    }
}

/// Returns the backends that compute the operations of all ranks on GPUs of a kind, which need not
/// be present.
///
/// # Errors
/// If CUDA can't compute the problem.
pub fn choices(call: &Call, target: Target) -> Result<Choices> {
    let backends =
        Backends { all: BACKENDS, target, kernels: call.kernels, cudnn: None, scratch: 0 };
    Ok(rehearse(call, backends, RankSet::All)?.choices)
}

/// Returns the commands over memory that does not exist, which shows the objects that they need.
fn rehearse(call: &Call, backends: Backends, ranks: RankSet<'_>) -> Result<CommandList> {
    const ARRAY: u64 = 1 << 48;
    let at = |n: u64| (n + 1) * ARRAY;
    let count = match ranks {
        RankSet::One(_) => 1,
        RankSet::All => call.problem.world_size,
    };
    let workspace = Workspace { address: at(0), bytes: call.workspace_bytes() * count as u64 };
    let arrays = Arrays::new(call.pass, &call.problem.features, |operand| at(operand as u64 + 1));
    lower(call, backends, ranks, &vec![arrays; count], workspace)
}
