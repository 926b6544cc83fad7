//! The state of a recorder, and the questions that tests ask of it.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CString, c_int};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use burst_attention::cuda::driver::{Function, Plan, Stream};
use burst_attention::cuda::nccl::Comm;
use burst_attention_kernels::images::ImagesError;
use burst_attention_kernels::instances::Instance;

use super::nccl::{Member, OpenGroup};
use super::{Call, Program, nccl};

/// A test double of one device, its driver and its NCCL. Clones are the same recorder.
#[derive(Debug, Clone)]
pub struct Recorder(pub(super) Arc<Mutex<State>>);

#[derive(Debug, Default)]
pub(super) struct State {
    pub capability: (i32, i32),
    pub functions: HashMap<Function, Instance>,
    pub plans: HashMap<Plan, String>,
    /// The number of objects that the driver made. Their handles are multiples of it.
    pub made: usize,
    /// The number of contexts that were pushed and not popped.
    pub pushed: usize,
    /// The bytes that the host wrote, each with its address.
    pub written: Vec<(u64, u8)>,
    /// The bytes that the host reads next.
    pub answer: Option<Vec<u8>>,
    pub comms: BTreeMap<Comm, Member>,
    pub group: Option<OpenGroup>,
    /// The reason for the last error of NCCL.
    pub reason: CString,
    pub program: Vec<Call>,
    /// The names of all calls so far. The call at index `failing` fails, and each call of the name
    /// `refusing`.
    calls: Vec<&'static str>,
    failing: Option<usize>,
    refusing: Option<&'static str>,
    violations: Vec<String>,
}

static IMAGES: LazyLock<HashMap<Instance, Vec<u8>>> = LazyLock::new(|| {
    Instance::all().map(|instance| (instance, instance.to_string().into_bytes())).collect()
});

/// Returns the image of any instance, in the form in which an executor looks for images.
///
/// # Errors
/// Never: there is an image of every instance.
pub fn images(instance: &Instance) -> Result<&'static [u8], ImagesError> {
    Ok(&IMAGES[instance])
}

/// Returns the instance of an image.
pub(super) fn instance_of(image: &[u8]) -> Option<Instance> {
    static INSTANCES: LazyLock<HashMap<&[u8], Instance>> =
        LazyLock::new(|| IMAGES.iter().map(|(instance, image)| (&image[..], *instance)).collect());
    INSTANCES.get(image).copied()
}

impl State {
    /// Counts a call. Returns whether the call must fail.
    pub fn fails(&mut self, name: &'static str) -> bool {
        self.calls.push(name);
        self.failing == Some(self.calls.len() - 1) || self.refusing == Some(name)
    }

    /// Notes a misuse.
    pub fn violate(&mut self, name: &'static str, reason: &str) {
        self.violations.push(format!("{name}: {reason}"));
    }

    /// Returns the handle of a new object.
    pub fn handle(&mut self) -> usize {
        self.made += 1;
        self.made << 20
    }
}

impl Recorder {
    /// XLA's stream of the device.
    pub const COMPUTE: Stream = Stream(1);

    /// Returns a device of a compute capability.
    pub fn new(capability: (i32, i32)) -> Recorder {
        Recorder(Arc::new(Mutex::new(State { capability, ..State::default() })))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a communicator of `rank`. The n-th communicators of all ranks are a ring.
    pub fn add_comm(&self, rank: usize, size: usize) -> Comm {
        let comm = nccl::register(self);
        let mut state = self.state();
        let ring = state.comms.len();
        state.comms.insert(comm, Member::new(ring, rank, size));
        comm
    }

    /// Sets the code that `ncclCommGetAsyncError` reports from now on; 0 stands for no error.
    pub fn set_async_error(&self, comm: Comm, code: c_int) {
        self.state().member(comm).async_error = code;
    }

    /// Makes a communicator non-blocking: after each group, `ncclCommGetAsyncError` reports
    /// progress `times` times.
    pub fn set_in_progress(&self, comm: Comm, times: usize) {
        self.state().member(comm).times = times;
    }

    /// Makes one call fail: the call after the next `n` calls of the driver and NCCL. A failing
    /// call does nothing. Only a failing `cuCtxPopCurrent` still pops, as the driver does when it
    /// reports an earlier failure.
    pub fn fail_at(&self, n: usize) {
        let mut state = self.state();
        state.failing = Some(state.calls.len() + n);
    }

    /// Makes each call of a name fail from now on, or none.
    pub fn refuse(&self, name: Option<&'static str>) {
        self.state().refusing = name;
    }

    /// Sets the bytes that the host reads next from memory that the driver allocated. Without this
    /// the host reads ones.
    pub fn answer(&self, bytes: Vec<u8>) {
        self.state().answer = Some(bytes);
    }

    /// Returns the bytes that the host wrote to memory that the driver allocated, each with its
    /// address.
    pub fn written(&self) -> Vec<(u64, u8)> {
        self.state().written.clone()
    }

    /// Returns the names of all calls of the driver and NCCL so far.
    pub fn calls(&self) -> Vec<&'static str> {
        self.state().calls.clone()
    }

    /// Returns every misuse so far, even if the caller ignored the error.
    pub fn violations(&self) -> Vec<String> {
        self.state().violations.clone()
    }

    /// Returns what calls left behind: the number of contexts that are still current, and whether
    /// a group is still open.
    pub fn left_open(&self) -> (usize, bool) {
        let state = self.state();
        (state.pushed, state.group.is_some())
    }

    /// Returns how many streams, events, allocations and functions were made so far. Nothing is
    /// ever released.
    pub fn made(&self) -> usize {
        self.state().made
    }

    /// Returns the program and starts a new one.
    pub fn take(&self) -> Program {
        Program { compute: Self::COMPUTE, calls: std::mem::take(&mut self.state().program) }
    }
}
