//! The functions of NCCL that the executor calls, in the `libnccl.so.2` that XLA has loaded.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use super::driver::Stream;
use super::error::CudaError;
use super::shared_library::{functions, open};
use crate::error::{Error, Result};

const LIBRARY: &str = "libnccl.so.2";
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
/// `ncclInt8`: messages are bytes.
const BYTES: c_int = 0;

/// A communicator of XLA, an `ncclComm_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Comm(pub usize);

functions! {
    /// A table of NCCL's functions. Tests put their own functions in it.
    Nccl:
    version "ncclGetVersion" (*mut c_int) -> c_int;
    error_string "ncclGetErrorString" (c_int) -> *const c_char;
    last_error "ncclGetLastError" (*mut c_void) -> *const c_char;
    count "ncclCommCount" (*mut c_void, *mut c_int) -> c_int;
    rank "ncclCommUserRank" (*mut c_void, *mut c_int) -> c_int;
    async_error "ncclCommGetAsyncError" (*mut c_void, *mut c_int) -> c_int;
    group_start "ncclGroupStart" () -> c_int;
    group_end "ncclGroupEnd" () -> c_int;
    send "ncclSend" (*mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
    receive "ncclRecv" (*mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
}

/// Consecutive bytes that a rank sends to or receives from a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// The address on this rank.
    pub address: u64,
    /// The number of bytes.
    pub bytes: u64,
    /// The rank at the other end.
    pub peer: usize,
}

/// Messages that make progress together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Group {
    /// The messages that the rank sends.
    pub sends: Vec<Message>,
    /// The messages that the rank receives.
    pub receives: Vec<Message>,
}

/// A communicator with its rank and size.
#[derive(Debug, Clone, Copy)]
pub struct Communicator<'a> {
    nccl: &'a Nccl,
    /// The handle of XLA.
    pub comm: Comm,
    /// The rank of this process in the communicator.
    pub rank: usize,
    /// The number of ranks of the communicator.
    pub size: usize,
}

impl Nccl {
    /// Returns the functions of the library that XLA has loaded, or else of the one that the loader
    /// finds.
    ///
    /// # Errors
    /// [`CudaError::Library`] if there is no such library, or it lacks a function.
    pub fn load() -> Result<&'static Nccl> {
        static NCCL: OnceLock<Nccl> = OnceLock::new();
        // Only success is kept, since XLA may load the library later.
        if let Some(found) = NCCL.get() {
            return Ok(found);
        }
        let unusable = |error: libloading::Error| CudaError::Library {
            library: LIBRARY,
            reason: error.to_string(),
            remedy: "it comes with jax[cuda13], as the package nvidia-nccl-cu13",
        };
        // SAFETY: NCCL guarantees that its initialisers and finalisers may run on any thread.
        let library = unsafe { open(LIBRARY) }.map_err(unusable)?;
        // SAFETY: `functions!` declares each function with its type in nccl.h, which has been the
        // same since NCCL 2.7. Result codes and data types are C integers there, and `const` does
        // not change how a pointer is passed.
        let found = unsafe { Nccl::find(&library) }.map_err(unusable)?;
        // The functions stay valid because the library is never closed.
        std::mem::forget(library);
        Ok(NCCL.get_or_init(|| found))
    }

    /// Returns the version, such as 2.30.7.
    pub fn version(&self) -> Option<String> {
        let mut number = 0;
        // SAFETY: `ncclGetVersion` writes one integer, and `number` is one.
        let code = unsafe { (self.version)(&raw mut number) };
        let text = || format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100);
        (code == SUCCESS).then(text)
    }

    fn explain(&self, comm: Comm, code: c_int) -> String {
        // SAFETY: NCCL accepts any code and any communicator that it made, and returns null or C
        // strings that stay valid until the thread calls it again.
        let texts = unsafe {
            [(self.error_string)(code), (self.last_error)(comm.0 as *mut c_void)].map(|text| {
                (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
            })
        };
        let mut texts = texts.into_iter().flatten().filter(|text| !text.is_empty());
        let first = texts.next().unwrap_or_else(|| "no reason given".into());
        texts.fold(format!("{first} (code {code})"), |all, more| format!("{all}: {more}"))
    }
}

/// Removes the rank from an error, where it is not known yet.
fn without_rank(error: Error) -> Error {
    match CudaError::of(&error) {
        Some(CudaError::Network { call, reason, .. }) => {
            CudaError::Driver { call, reason: reason.clone() }.into()
        }
        _ => error,
    }
}

impl<'a> Communicator<'a> {
    /// Asks a communicator for its rank. Checks that it has the size of the ring and no error.
    ///
    /// # Errors
    /// [`CudaError::Network`].
    pub fn new(nccl: &'a Nccl, comm: Comm, world_size: usize) -> Result<Communicator<'a>> {
        let mut communicator = Communicator { nccl, comm, rank: 0, size: world_size };
        let rank = communicator.ask("ncclCommUserRank", nccl.rank).map_err(without_rank)?;
        communicator.rank = rank as usize;
        let count = communicator.ask("ncclCommCount", nccl.count)?;
        if count as usize != world_size || communicator.rank >= world_size {
            let reason = format!(
                "expected a communicator of {world_size} ranks, as the mesh axis has, got rank \
                 {rank} of {count}"
            );
            return Err(communicator.error("ncclCommCount", (None, None), reason));
        }
        let state = communicator.ask("ncclCommGetAsyncError", nccl.async_error)?;
        communicator.check("ncclCommGetAsyncError", (None, None), state)?;
        Ok(communicator)
    }

    /// Returns the rank of this process and the number of ranks.
    pub(super) fn rank_and_size(&self) -> (usize, usize) {
        (self.rank, self.size)
    }

    /// Calls a function that asks the communicator for one integer.
    fn ask(
        &self,
        call: &'static str,
        function: unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int,
    ) -> Result<c_int> {
        let mut answer = 0;
        // SAFETY: XLA made the communicator and keeps it while a handler runs. The function writes
        // one integer, and `answer` is one.
        let code = unsafe { function(self.comm.0 as *mut c_void, &raw mut answer) };
        self.check(call, (None, None), code)?;
        Ok(answer)
    }

    /// Enqueues the messages of a group on `stream`. Errors name the step. NCCL drops a group if it
    /// refuses a message of it. The peers would wait for that group for ever, so it is issued once
    /// more.
    ///
    /// # Errors
    /// [`CudaError::Network`], with the peer where it is known.
    ///
    /// # Safety
    /// The caller must guarantee that the memory of the messages belongs to the stream's device and
    /// stays valid until the stream has passed the group.
    pub unsafe fn exchange(
        &self,
        stream: Stream,
        step: Option<usize>,
        group: &Group,
    ) -> Result<()> {
        // SAFETY: the caller of `exchange` guarantees the memory of the messages.
        let group = || unsafe { self.group(stream, step, group) };
        let ended = group().or_else(|_| group())?;
        // A communicator that does not block has to be asked until its group is enqueued.
        let mut code = ended;
        while code == IN_PROGRESS {
            code = self.ask("ncclCommGetAsyncError", self.nccl.async_error)?;
            if code == IN_PROGRESS {
                std::thread::yield_now();
            }
        }
        self.check("ncclGroupEnd", (step, None), code)
    }

    /// Issues a group and returns the code of its end. Fails if NCCL has dropped the group.
    ///
    /// # Safety
    /// The caller must guarantee the same as the caller of [`Communicator::exchange`].
    unsafe fn group(&self, stream: Stream, step: Option<usize>, group: &Group) -> Result<c_int> {
        // SAFETY: the function takes no arguments.
        self.check("ncclGroupStart", (step, None), unsafe { (self.nccl.group_start)() })?;
        // SAFETY: the caller of `group` guarantees the memory of the messages.
        let messages = unsafe { self.messages(stream, step, group) };
        // The thread's group must end even after an error: NCCL drops the group if a call in it
        // failed. SAFETY: the function takes no arguments.
        let ended = unsafe { (self.nccl.group_end)() };
        messages.map(|()| ended)
    }

    /// # Safety
    /// The caller must guarantee the same as the caller of [`Communicator::exchange`].
    unsafe fn messages(&self, stream: Stream, step: Option<usize>, group: &Group) -> Result<()> {
        let (comm, stream) = (self.comm.0 as *mut c_void, stream.0 as *mut c_void);
        let Nccl { send, receive, .. } = *self.nccl;
        for (call, function, messages) in
            [("ncclSend", send, &group.sends), ("ncclRecv", receive, &group.receives)]
        {
            for &Message { address, bytes, peer } in messages {
                let (at, count) = (address as *mut c_void, bytes as usize);
                // SAFETY: the caller guarantees the memory of the messages. XLA made the
                // communicator and the stream, and keeps both while a handler runs.
                let code = unsafe { function(at, count, BYTES, peer as c_int, comm, stream) };
                self.check(call, (step, Some(peer)), code)?;
            }
        }
        Ok(())
    }

    /// Turns a code into an error. [`IN_PROGRESS`] is no error: a communicator that does not block
    /// has taken the call.
    fn check(
        &self,
        call: &'static str,
        place: (Option<usize>, Option<usize>),
        code: c_int,
    ) -> Result<()> {
        if code == SUCCESS || code == IN_PROGRESS {
            return Ok(());
        }
        Err(self.error(call, place, self.nccl.explain(self.comm, code)))
    }

    /// Returns the error of a call at a place, which is a step and a peer.
    fn error(
        &self,
        call: &'static str,
        (step, peer): (Option<usize>, Option<usize>),
        reason: String,
    ) -> Error {
        let Communicator { rank, size: world_size, .. } = *self;
        CudaError::Network { call, rank, world_size, step, peer, reason }.into()
    }
}
