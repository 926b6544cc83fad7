//! The calls of the CUDA driver that the executor makes, as a trait: the driver itself implements
//! it, and so does the recorder that tests run the executor on.

use burst_attention_kernels::launch::Launch;

use crate::error::Result;

/// Names things of the driver: its pointers, as numbers.
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
}

/// `height` pieces of `width` bytes each in device memory, `pitch` bytes apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Of the first byte.
    pub address: u64,
    /// Bytes of a piece.
    pub width: u64,
    /// Number of pieces.
    pub height: u64,
    /// Bytes from one piece to the next.
    pub pitch: u64,
}

impl Block {
    /// One piece.
    pub fn run(address: u64, bytes: u64) -> Block {
        Block { address, width: bytes, height: 1, pitch: bytes }
    }

    /// As wide and as high, without gaps.
    pub fn packed_at(&self, address: u64) -> Block {
        Block { address, pitch: self.width, ..*self }
    }

    /// Does it have no gaps?
    pub fn is_run(&self) -> bool {
        self.height <= 1 || self.pitch == self.width
    }

    /// Bytes in it.
    pub fn bytes(&self) -> u64 {
        self.width * self.height
    }

    /// Bytes from its first to its last.
    pub fn span(&self) -> u64 {
        self.pitch * self.height.saturating_sub(1) + self.width
    }
}

/// A copy within device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copy {
    /// What is copied.
    pub from: Block,
    /// Where to; as wide and as high.
    pub to: Block,
}

/// The driver. Each method is one call, or the few that belong together; all of them but
/// [`Driver::stream_context`] go to the context that was pushed last on this thread. What takes a
/// stream only enqueues.
pub trait Driver: Send + Sync {
    /// The context that a stream belongs to.
    ///
    /// # Errors
    /// [`crate::Error::Driver`], as all methods.
    fn stream_context(&self, stream: Stream) -> Result<Context>;

    /// Makes a context current on this thread.
    ///
    /// # Errors
    /// As above.
    fn push_context(&self, context: Context) -> Result<()>;

    /// Makes the one before it current again.
    ///
    /// # Errors
    /// As above.
    fn pop_context(&self) -> Result<()>;

    /// Compute capability of the context's device: major, minor.
    ///
    /// # Errors
    /// As above.
    fn capability(&self) -> Result<(i32, i32)>;

    /// A stream of the highest priority that waits for no other.
    ///
    /// # Errors
    /// As above.
    fn create_stream(&self) -> Result<Stream>;

    /// An event without timing.
    ///
    /// # Errors
    /// As above.
    fn create_event(&self) -> Result<Event>;

    /// Memory of the device.
    ///
    /// # Errors
    /// As above.
    fn allocate(&self, bytes: usize) -> Result<u64>;

    /// Loads an image and finds the function `entry` in it. The module stays for as long as the
    /// context.
    ///
    /// # Errors
    /// As above.
    fn load(&self, image: &[u8], entry: &str) -> Result<Function>;

    /// Enqueues a launch of `function`, the one of the launch's instance.
    ///
    /// # Errors
    /// As above.
    fn launch(&self, stream: Stream, function: Function, launch: &Launch) -> Result<()>;

    /// Enqueues a copy.
    ///
    /// # Errors
    /// As above.
    fn copy(&self, stream: Stream, copy: &Copy) -> Result<()>;

    /// The event stands for all that was enqueued on `stream` so far.
    ///
    /// # Errors
    /// As above.
    fn record(&self, stream: Stream, event: Event) -> Result<()>;

    /// What is enqueued on `stream` from now on starts after what `event` stands for now.
    ///
    /// # Errors
    /// As above.
    fn wait(&self, stream: Stream, event: Event) -> Result<()>;
}
