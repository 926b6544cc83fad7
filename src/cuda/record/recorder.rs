//! What a recorder knows, and what tests ask of it.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use burst_attention_kernels::images::ImagesError;
use burst_attention_kernels::instances::Instance;

use super::{Call, Program, What, nccl};
use crate::cuda::driver::{Context, Event, Function, Stream};
use crate::cuda::nccl::Comm;

/// Stands for several devices, their driver and their NCCL. Clones are the same recorder.
#[derive(Debug, Clone, Default)]
pub struct Recorder(pub(super) Arc<Shared>);

/// Memory that a device was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocation {
    /// The device, by its compute stream.
    pub device: Stream,
    /// The first byte.
    pub address: u64,
    /// How many.
    pub bytes: usize,
}

/// What was made so far; nothing of it is ever given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Created {
    /// Streams, not counting the devices' own.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// Pieces of memory.
    pub allocations: usize,
    /// Images that were loaded.
    pub modules: usize,
}

/// The bytes that a recorder takes for an image of `instance`.
pub fn image(instance: &Instance) -> Vec<u8> {
    instance.to_string().into_bytes()
}

/// The same for all instances, as an executor looks for images.
///
/// # Errors
/// None: it has them all.
pub fn images(instance: &Instance) -> Result<&'static [u8], ImagesError> {
    static IMAGES: LazyLock<HashMap<Instance, Vec<u8>>> =
        LazyLock::new(|| Instance::all().map(|instance| (instance, image(&instance))).collect());
    Ok(&IMAGES[instance])
}

/// Behind all clones of a recorder.
#[derive(Debug, Default)]
pub(super) struct Shared {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub devices: Vec<Device>,
    pub contexts: HashMap<Context, usize>,
    pub streams: HashMap<Stream, usize>,
    pub events: HashMap<Event, usize>,
    pub functions: HashMap<Function, (usize, Instance)>,
    pub allocations: Vec<Allocation>,
    /// The contexts that each thread has pushed.
    pub pushed: HashMap<ThreadId, Vec<Context>>,
    pub created: Created,
    /// Members of each ring: its size and the ranks that there are.
    rings: Vec<(usize, Vec<usize>)>,
    pub comms: HashMap<Comm, Member>,
    /// Every call that can fail, and which of them does.
    calls: Vec<&'static str>,
    failing: Option<usize>,
    violations: Vec<String>,
}

#[derive(Debug)]
pub(super) struct Device {
    pub context: Context,
    pub compute: Stream,
    pub capability: (i32, i32),
    pub calls: Vec<Call>,
}

/// A rank's communicator.
#[derive(Debug)]
pub(super) struct Member {
    pub device: usize,
    pub ring: usize,
    pub rank: usize,
    pub size: usize,
    pub async_error: c_int,
    /// How often it says that it is in progress after a group, and what it says then.
    pub settling: (usize, c_int),
    /// A group that is in progress: what it will enqueue, and how often it will still say so.
    pub pending: Option<(Call, usize)>,
}

impl Shared {
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        nccl::forget(self.state().comms.keys());
    }
}

/// A number that no handle of this process has had, so that state which is kept by handles never
/// meets that of another recorder.
pub(super) fn handle() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0x10_0000);
    NEXT.fetch_add(0x10, Ordering::Relaxed)
}

impl State {
    /// Counts a call; must it fail?
    pub fn fails(&mut self, name: &'static str) -> bool {
        self.calls.push(name);
        self.failing == Some(self.calls.len() - 1)
    }

    pub fn violate(&mut self, name: &'static str, reason: &str) {
        self.violations.push(format!("{name}: {reason}"));
    }

    pub fn enqueue(&mut self, device: usize, stream: Stream, what: What) {
        self.devices[device].calls.push(Call { stream, what });
    }

    /// The context that is current on this thread.
    pub fn current(&self) -> Option<Context> {
        self.pushed.get(&std::thread::current().id())?.last().copied()
    }

    fn find(&self, device: Stream) -> usize {
        let found = self.devices.iter().position(|found| found.compute == device);
        found.unwrap_or_else(|| panic!("no device has the compute stream {:#x}", device.0))
    }

    /// The first ring of `size` ranks that still lacks `rank`.
    fn join(&mut self, rank: usize, size: usize) -> usize {
        let open =
            self.rings.iter().position(|(all, ranks)| *all == size && !ranks.contains(&rank));
        let ring = open.unwrap_or_else(|| {
            self.rings.push((size, vec![]));
            self.rings.len() - 1
        });
        self.rings[ring].1.push(rank);
        ring
    }
}

/// Devices and communicators. All panics are about handles that are not this recorder's.
impl Recorder {
    /// Without devices.
    pub fn new() -> Recorder {
        Recorder::default()
    }

    /// A device of compute capability 9.0, with a stream as XLA's.
    pub fn add_device(&self) -> Stream {
        self.add_device_of((9, 0))
    }

    /// A device of some compute capability.
    pub fn add_device_of(&self, capability: (i32, i32)) -> Stream {
        let mut state = self.0.state();
        let (context, compute, number) = (Context(handle()), Stream(handle()), state.devices.len());
        state.contexts.insert(context, number);
        state.streams.insert(compute, number);
        state.devices.push(Device { context, compute, capability, calls: vec![] });
        compute
    }

    /// A communicator of `rank` on a device. It belongs to the same ring as the others of this
    /// size, until a rank comes for the second time: that begins another ring.
    ///
    /// # Panics
    /// Where no device has that stream.
    pub fn add_comm(&self, rank: usize, size: usize, device: Stream) -> Comm {
        let (mut state, comm) = (self.0.state(), Comm(handle()));
        let (device, ring) = (state.find(device), state.join(rank, size));
        let (async_error, settling, pending) = (0, (0, 0), None);
        let member = Member { device, ring, rank, size, async_error, settling, pending };
        state.comms.insert(comm, member);
        nccl::remember(comm, &self.0);
        comm
    }

    /// What `ncclCommGetAsyncError` finds from now on: a code of NCCL, 0 for none.
    ///
    /// # Panics
    /// Where there is no such communicator.
    pub fn set_async_error(&self, comm: Comm, code: c_int) {
        self.with(comm, |member| member.async_error = code);
    }

    /// Makes a communicator one that does not block: after each group `ncclCommGetAsyncError`
    /// finds it in progress `times` times, then `outcome`. Only with the outcome 0 is the group
    /// enqueued, at that time and not before.
    ///
    /// # Panics
    /// Where there is no such communicator.
    pub fn set_in_progress(&self, comm: Comm, times: usize, outcome: c_int) {
        self.with(comm, |member| member.settling = (times, outcome));
    }

    fn with(&self, comm: Comm, change: impl FnOnce(&mut Member)) {
        let mut state = self.0.state();
        let member = state.comms.get_mut(&comm);
        change(member.unwrap_or_else(|| panic!("no communicator {:#x}", comm.0)));
    }

    /// Makes one call fail, of those of the driver and of NCCL counted together: that which comes
    /// after `n` others from now on. It does nothing then, save that a failing
    /// `cuCtxPopCurrent` pops, as the driver does when it reports what failed earlier.
    pub fn fail_at(&self, n: usize) {
        let mut state = self.0.state();
        state.failing = Some(state.calls.len() + n);
    }

    /// The calls that were made so far, by the driver's and NCCL's names.
    pub fn calls(&self) -> Vec<&'static str> {
        self.0.state().calls.clone()
    }

    /// Every misuse so far, also where whoever called did not look at the error; and groups that
    /// are still in progress because nobody asked whether they are.
    pub fn violations(&self) -> Vec<String> {
        let state = self.0.state();
        let waiting = state.comms.values().filter_map(|member| member.pending.as_ref());
        let waiting = waiting.map(|(call, _)| format!("ncclGroupEnd: {call} is still in progress"));
        state.violations.iter().cloned().chain(waiting).collect()
    }

    /// Contexts that any thread has pushed and not popped.
    pub fn pushed(&self) -> usize {
        self.0.state().pushed.values().map(Vec::len).sum()
    }

    /// What was made so far.
    pub fn created(&self) -> Created {
        self.0.state().created
    }

    /// The memory that devices were asked for.
    pub fn allocations(&self) -> Vec<Allocation> {
        self.0.state().allocations.clone()
    }

    /// The programs of all devices, in the order in which they were added.
    pub fn programs(&self) -> Vec<Program> {
        let state = self.0.state();
        let program =
            |device: &Device| Program { compute: device.compute, calls: device.calls.clone() };
        state.devices.iter().map(program).collect()
    }

    /// The programs of all devices, which begin anew.
    pub fn take(&self) -> Vec<Program> {
        let mut state = self.0.state();
        let program = |device: &mut Device| Program {
            compute: device.compute,
            calls: std::mem::take(&mut device.calls),
        };
        state.devices.iter_mut().map(program).collect()
    }
}
