//! The calls of the CUDA driver that the executor makes, as a trait. The driver itself implements
//! it, and so does the test double on which tests run the executor.

use burst_attention_kernels::backend::{LibraryCall, Version};
use burst_attention_kernels::launch::Launch;

use crate::error::Result;

/// Declares handles of the driver: its pointers, as numbers.
macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub usize);
    )*};
}

handles! {
    /// A `CUstream`.
    Stream;
    /// A `CUevent`.
    Event;
    /// A `CUcontext`.
    Context;
    /// A `CUfunction`.
    Function;
    /// What a [`Library`] prepared.
    Plan;
}

/// `height` lines of `width` bytes each in device memory, `pitch` bytes apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// The address of the first byte.
    pub address: u64,
    /// The bytes of a line.
    pub width: u64,
    /// The number of lines.
    pub height: u64,
    /// The bytes from one line to the next.
    pub pitch: u64,
}

impl Block {
    /// Returns a block of one line.
    pub fn one_line(address: u64, bytes: u64) -> Block {
        Block { address, width: bytes, height: 1, pitch: bytes }
    }

    /// Returns a block of the same lines without gaps, at `address`.
    pub fn packed_at(&self, address: u64) -> Block {
        Block { address, pitch: self.width, ..*self }
    }

    /// Whether the block has no gaps.
    pub fn is_contiguous(&self) -> bool {
        self.height <= 1 || self.pitch == self.width
    }

    /// Returns the address behind the last byte.
    pub fn end(&self) -> u64 {
        self.address + self.height.saturating_sub(1) * self.pitch + self.width
    }

    /// Returns the number of bytes in the block.
    pub fn bytes(&self) -> u64 {
        self.width * self.height
    }
}

/// A copy within device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copy {
    /// The source.
    pub from: Block,
    /// The target, of the same width and height.
    pub to: Block,
}

/// A library that launches kernels of its own. Plans and calls concern the context that this thread
/// pushed last.
pub trait Library: Send + Sync {
    /// Returns the name by which a [`LibraryCall`] asks for the library.
    fn name(&self) -> &'static str;

    /// Returns the version of cuDNN, if this is cuDNN and can be used.
    fn cudnn_version(&self) -> Option<Version> {
        None
    }

    /// Prepares a plan for the context's device. It may allocate and wait. The plan stays as long
    /// as the context lives.
    ///
    /// # Errors
    /// If the library refuses.
    fn prepare(&self, plan: &str) -> Result<Plan>;

    /// Enqueues a call, whose plan is prepared.
    ///
    /// # Errors
    /// If the library refuses.
    fn enqueue(&self, stream: Stream, plan: Plan, call: &LibraryCall) -> Result<()>;
}

/// The CUDA driver. Each method is one call of the driver, or a few calls that belong together. All
/// methods but [`Driver::stream_context`] concern the context that this thread pushed last. A
/// method that takes a stream only enqueues, except [`Driver::synchronize`]. Each method fails with
/// [`CudaError::Driver`](super::error::CudaError::Driver) if the driver refuses.
pub trait Driver: Send + Sync {
    /// Returns the context of a stream.
    fn stream_context(&self, stream: Stream) -> Result<Context>;

    /// Makes a context current on this thread.
    fn push_context(&self, context: Context) -> Result<()>;

    /// Makes the previous context current again.
    fn pop_context(&self) -> Result<()>;

    /// Returns the compute capability of the context's device: major, minor.
    fn capability(&self) -> Result<(i32, i32)>;

    /// Creates a stream of the highest priority that waits for no other stream.
    fn create_stream(&self) -> Result<Stream>;

    /// Creates an event without timing.
    fn create_event(&self) -> Result<Event>;

    /// Allocates host memory that the device reaches at the same address.
    fn allocate(&self, bytes: usize) -> Result<u64>;

    /// Writes a byte.
    ///
    /// # Safety
    /// The caller must pass an address within memory that [`Driver::allocate`] returned, and
    /// guarantee that no operation uses the byte meanwhile.
    unsafe fn write(&self, address: u64, byte: u8);

    /// Reads bytes.
    ///
    /// # Safety
    /// The caller must pass a range within memory that [`Driver::allocate`] returned, and guarantee
    /// that no operation writes it meanwhile.
    unsafe fn read(&self, address: u64, bytes: usize) -> Vec<u8>;

    /// Blocks this thread until all operations are over that `stream` has so far.
    fn synchronize(&self, stream: Stream) -> Result<()>;

    /// Whether the operations are over that `event` stands for.
    fn is_over(&self, event: Event) -> Result<bool>;

    /// Whether all operations are over that `stream` has so far.
    fn is_idle(&self, stream: Stream) -> Result<bool>;

    /// Loads an image and finds the function `entry` in it. The module stays loaded as long as the
    /// context lives.
    fn load(&self, image: &[u8], entry: &str) -> Result<Function>;

    /// Enqueues a launch of `function`, which must be the function of the launch's instance.
    fn launch(&self, stream: Stream, function: Function, launch: &Launch) -> Result<()>;

    /// Enqueues a copy.
    fn copy(&self, stream: Stream, copy: &Copy) -> Result<()>;

    /// Lets the event stand for all operations that `stream` has so far.
    fn record(&self, stream: Stream, event: Event) -> Result<()>;

    /// Lets later operations of `stream` start after the operations that `event` stands for now.
    fn wait(&self, stream: Stream, event: Event) -> Result<()>;
}
