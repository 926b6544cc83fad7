//! The state of a recorder, and the questions that tests ask of it.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use burst_attention::cuda::driver::{Context, Event, Function, Stream};
use burst_attention::cuda::nccl::Comm;
use burst_attention_kernels::images::ImagesError;
use burst_attention_kernels::instances::Instance;

use super::{Call, Operation, Program, nccl};

/// A test double of several devices, their driver and their NCCL. Clones are the same recorder.
#[derive(Debug, Clone, Default)]
pub struct Recorder(pub(super) Arc<Shared>);

/// Host memory that the driver allocated for a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocation {
    /// The compute stream of the device.
    pub device: Stream,
    /// The address of the first byte.
    pub address: u64,
    /// The number of bytes.
    pub bytes: usize,
}

/// Counts of the objects that were created. Nothing is ever released.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Created {
    /// Streams, without the compute streams of the devices.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// Allocations.
    pub allocations: usize,
    /// Loaded images.
    pub modules: usize,
}

/// Returns the bytes that a recorder accepts as the image of `instance`.
pub fn image(instance: &Instance) -> Vec<u8> {
    instance.to_string().into_bytes()
}

/// Returns the image of any instance, in the form in which an executor looks for images.
///
/// # Errors
/// Never: there is an image of every instance.
pub fn images(instance: &Instance) -> Result<&'static [u8], ImagesError> {
    static IMAGES: LazyLock<HashMap<Instance, Vec<u8>>> =
        LazyLock::new(|| Instance::all().map(|instance| (instance, image(&instance))).collect());
    Ok(&IMAGES[instance])
}

/// The state that all clones of a recorder share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    state: Mutex<RecorderState>,
}

#[derive(Debug, Default)]
pub(super) struct RecorderState {
    pub devices: Vec<Device>,
    pub contexts: HashMap<Context, usize>,
    pub streams: HashMap<Stream, usize>,
    pub events: HashMap<Event, usize>,
    pub functions: HashMap<Function, (usize, Instance)>,
    pub allocations: Vec<Allocation>,
    /// The bytes that the host wrote, each with its address.
    pub written: Vec<(u64, u8)>,
    /// The bytes that the host reads next.
    pub answer: Option<Vec<u8>>,
    /// The contexts that each thread has pushed.
    pub pushed: HashMap<ThreadId, Vec<Context>>,
    pub created: Created,
    /// The size of each ring, and its ranks that have a communicator.
    rings: Vec<(usize, Vec<usize>)>,
    pub comms: HashMap<Comm, Member>,
    /// The names of all calls so far. The call at index `failing` fails, and each call of the name
    /// `refusing`.
    calls: Vec<&'static str>,
    failing: Option<usize>,
    refusing: Option<&'static str>,
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
    /// After a group: how often the communicator reports that it is in progress, and the code that
    /// it reports next.
    pub settling: (usize, c_int),
    /// A group in progress: its call, and how often the communicator still reports the progress.
    pub pending: Option<(Call, usize)>,
}

impl Shared {
    pub fn state(&self) -> MutexGuard<'_, RecorderState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        nccl::forget(self.state().comms.keys());
    }
}

/// Returns a number that no handle of this process has had. So a handle never finds the state of
/// another recorder.
pub(super) fn handle() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0x10_0000);
    NEXT.fetch_add(0x10, Ordering::Relaxed)
}

impl RecorderState {
    /// Counts a call. Returns whether the call must fail.
    pub fn fails(&mut self, name: &'static str) -> bool {
        self.calls.push(name);
        self.failing == Some(self.calls.len() - 1) || self.refusing == Some(name)
    }

    pub fn violate(&mut self, name: &'static str, reason: &str) {
        self.violations.push(format!("{name}: {reason}"));
    }

    pub fn enqueue(&mut self, device: usize, stream: Stream, operation: Operation) {
        self.devices[device].calls.push(Call { stream, operation });
    }

    /// Returns the context that is current on this thread.
    pub fn current(&self) -> Option<Context> {
        self.pushed.get(&std::thread::current().id())?.last().copied()
    }

    fn find(&self, device: Stream) -> usize {
        let found = self.devices.iter().position(|found| found.compute == device);
        found.unwrap_or_else(|| panic!("no device has the compute stream {:#x}", device.0))
    }

    /// Adds `rank` to the first ring of `size` ranks that lacks it, and returns the ring.
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

/// Devices and communicators. The methods panic on handles of another recorder.
impl Recorder {
    /// Returns a recorder without devices.
    pub fn new() -> Recorder {
        Recorder::default()
    }

    /// Adds a device of compute capability 9.0 and returns its compute stream, which stands for
    /// XLA's.
    pub fn add_device(&self) -> Stream {
        self.add_device_of((9, 0))
    }

    /// Adds a device of a compute capability and returns its compute stream.
    pub fn add_device_of(&self, capability: (i32, i32)) -> Stream {
        let mut state = self.0.state();
        let (context, compute, number) = (Context(handle()), Stream(handle()), state.devices.len());
        state.contexts.insert(context, number);
        state.streams.insert(compute, number);
        state.devices.push(Device { context, compute, capability, calls: vec![] });
        compute
    }

    /// Adds a communicator of `rank` on a device. Communicators of one size belong to one ring,
    /// until a rank is added for the second time: it begins another ring.
    ///
    /// # Panics
    /// If no device has that stream.
    pub fn add_comm(&self, rank: usize, size: usize, device: Stream) -> Comm {
        let (mut state, comm) = (self.0.state(), Comm(handle()));
        let (device, ring) = (state.find(device), state.join(rank, size));
        let (async_error, settling, pending) = (0, (0, 0), None);
        let member = Member { device, ring, rank, size, async_error, settling, pending };
        state.comms.insert(comm, member);
        nccl::remember(comm, &self.0);
        comm
    }

    /// Sets the code that `ncclCommGetAsyncError` reports from now on; 0 stands for no error.
    ///
    /// # Panics
    /// If there is no such communicator.
    pub fn set_async_error(&self, comm: Comm, code: c_int) {
        self.with(comm, |member| member.async_error = code);
    }

    /// Makes a communicator non-blocking: after each group, `ncclCommGetAsyncError` reports
    /// progress `times` times, then `outcome`. The group is enqueued at that time, and only if
    /// `outcome` is 0.
    ///
    /// # Panics
    /// If there is no such communicator.
    pub fn set_in_progress(&self, comm: Comm, times: usize, outcome: c_int) {
        self.with(comm, |member| member.settling = (times, outcome));
    }

    fn with(&self, comm: Comm, change: impl FnOnce(&mut Member)) {
        let mut state = self.0.state();
        let member = state.comms.get_mut(&comm);
        change(member.unwrap_or_else(|| panic!("no communicator {:#x}", comm.0)));
    }

    /// Makes one call fail: the call after the next `n` calls of the driver and NCCL. A failing
    /// call does nothing. Only a failing `cuCtxPopCurrent` still pops, as the driver does when it
    /// reports an earlier failure.
    pub fn fail_at(&self, n: usize) {
        let mut state = self.0.state();
        state.failing = Some(state.calls.len() + n);
    }

    /// Makes each call of a name fail from now on, or none.
    pub fn refuse(&self, name: Option<&'static str>) {
        self.0.state().refusing = name;
    }

    /// Sets the bytes that the host reads next from memory that the driver allocated. Without this
    /// the host reads ones.
    pub fn answer(&self, bytes: Vec<u8>) {
        self.0.state().answer = Some(bytes);
    }

    /// Returns the bytes that the host wrote to memory that the driver allocated, each with its
    /// address.
    pub fn written(&self) -> Vec<(u64, u8)> {
        self.0.state().written.clone()
    }

    /// Returns the names of all calls of the driver and NCCL so far.
    pub fn calls(&self) -> Vec<&'static str> {
        self.0.state().calls.clone()
    }

    /// Returns every misuse so far, even if the caller ignored the error. A group that is still in
    /// progress because its caller stopped asking is a misuse too.
    pub fn violations(&self) -> Vec<String> {
        let state = self.0.state();
        let waiting = state.comms.values().filter_map(|member| member.pending.as_ref());
        let waiting = waiting.map(|(call, _)| format!("ncclGroupEnd: {call} is still in progress"));
        state.violations.iter().cloned().chain(waiting).collect()
    }

    /// Returns the number of contexts that threads have pushed and not popped.
    pub fn pushed(&self) -> usize {
        self.0.state().pushed.values().map(Vec::len).sum()
    }

    /// Returns how many objects were created so far.
    pub fn created(&self) -> Created {
        self.0.state().created
    }

    /// Returns the memory that the devices allocated.
    pub fn allocations(&self) -> Vec<Allocation> {
        self.0.state().allocations.clone()
    }

    /// Returns the programs of all devices, in the order in which the devices were added.
    pub fn programs(&self) -> Vec<Program> {
        let state = self.0.state();
        let program =
            |device: &Device| Program { compute: device.compute, calls: device.calls.clone() };
        state.devices.iter().map(program).collect()
    }

    /// Returns the programs of all devices and starts new ones.
    pub fn take(&self) -> Vec<Program> {
        let mut state = self.0.state();
        let program = |device: &mut Device| Program {
            compute: device.compute,
            calls: std::mem::take(&mut device.calls),
        };
        state.devices.iter_mut().map(program).collect()
    }
}
