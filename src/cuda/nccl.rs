//! The functions of NCCL that the executor calls, from the `libnccl.so.2` that XLA has loaded.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use crate::error::{Error, Result};

use super::driver::Stream;

const LIBRARY: &str = "libnccl.so.2";
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
/// `ncclInt8`: what travels is bytes.
const BYTES: c_int = 0;

/// A communicator, an `ncclComm_t`. It belongs to XLA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Comm(pub usize);

/// Declares the table of functions, each under its name in NCCL.
macro_rules! functions {
    ($($field:ident $symbol:literal ($($argument:ty),*) -> $result:ty;)*) => {
        /// NCCL's functions. A table, so that tests can put their own in its place.
        #[derive(Debug, Clone, Copy)]
        pub struct Nccl {
            $(#[doc = $symbol] pub $field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Nccl {
            fn find(library: &libloading::os::unix::Library) -> std::result::Result<Nccl, libloading::Error> {
                Ok(Nccl {
                    // SAFETY: the types are those of nccl.h, unchanged since NCCL 2.7; result
                    // codes and data types are C integers there.
                    $($field: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }?,)*
                })
            }
        }
    };
}

functions! {
    version "ncclGetVersion" (*mut c_int) -> c_int;
    error_string "ncclGetErrorString" (c_int) -> *const c_char;
    last_error "ncclGetLastError" (*mut c_void) -> *const c_char;
    count "ncclCommCount" (*mut c_void, *mut c_int) -> c_int;
    rank "ncclCommUserRank" (*mut c_void, *mut c_int) -> c_int;
    async_error "ncclCommGetAsyncError" (*mut c_void, *mut c_int) -> c_int;
    group_start "ncclGroupStart" () -> c_int;
    group_end "ncclGroupEnd" () -> c_int;
    send "ncclSend" (*const c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
    receive "ncclRecv" (*mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
}

/// A run of bytes that goes to, or comes from, another rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// Where it lies on this rank.
    pub address: u64,
    /// Its length.
    pub bytes: u64,
    /// The rank at the other end.
    pub peer: usize,
}

/// Messages that travel together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Group {
    /// Out.
    pub sends: Vec<Message>,
    /// In.
    pub receives: Vec<Message>,
}

/// A communicator with what it says about itself.
#[derive(Debug, Clone, Copy)]
pub struct Communicator<'a> {
    nccl: &'a Nccl,
    /// XLA's handle.
    pub comm: Comm,
    /// This process's rank in it.
    pub rank: usize,
    /// Its ranks.
    pub size: usize,
}

/// Where a call stands, for its error.
#[derive(Debug, Clone, Copy, Default)]
struct Place {
    step: Option<usize>,
    peer: Option<usize>,
}

impl Nccl {
    /// The library that XLA has loaded, or else the one that the loader finds.
    ///
    /// # Errors
    /// [`Error::Library`] if there is none, or it lacks a function.
    pub fn load() -> Result<&'static Nccl> {
        use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
        /// The library if the process has it already.
        const RTLD_NOLOAD: c_int = 4;
        static NCCL: OnceLock<Nccl> = OnceLock::new();
        // Only success is kept: XLA may load the library later.
        if let Some(found) = NCCL.get() {
            return Ok(found);
        }
        let unusable = |error: libloading::Error| Error::Library {
            library: LIBRARY,
            reason: error.to_string(),
            remedy: "it comes with jax[cuda13], as the package nvidia-nccl-cu13",
        };
        let flags = RTLD_LAZY | RTLD_LOCAL;
        // SAFETY: initialisers of NCCL may run on any thread.
        let loaded = unsafe { Library::open(Some(LIBRARY), flags | RTLD_NOLOAD) };
        // SAFETY: as above.
        let library = loaded.or_else(|_| unsafe { Library::open(Some(LIBRARY), flags) });
        let library = library.map_err(unusable)?;
        let found = Nccl::find(&library).map_err(unusable)?;
        // It stays for as long as the process.
        std::mem::forget(library);
        Ok(NCCL.get_or_init(|| found))
    }

    /// Its version, such as 2.30.7.
    pub fn version(&self) -> Option<String> {
        let mut number = 0;
        // SAFETY: the function writes one integer.
        let code = unsafe { (self.version)(&raw mut number) };
        let text = || format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100);
        (code == SUCCESS).then(text)
    }

    fn explain(&self, comm: Comm, code: c_int) -> String {
        // SAFETY: both return C strings that stay, or null.
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

impl<'a> Communicator<'a> {
    /// Asks the communicator for its rank, and checks that it is as large as the ring and well.
    ///
    /// # Errors
    /// [`Error::Network`].
    pub fn new(nccl: &'a Nccl, comm: Comm, world_size: usize) -> Result<Communicator<'a>> {
        let mut communicator = Communicator { nccl, comm, rank: 0, size: world_size };
        let (rank, count) = (
            communicator.ask("ncclCommUserRank", nccl.rank)?,
            communicator.ask("ncclCommCount", nccl.count)?,
        );
        communicator.rank = rank as usize;
        if count as usize != world_size || communicator.rank >= world_size {
            let reason = format!(
                "expected a communicator of {world_size} ranks, as the mesh axis has, got rank \
                 {rank} of {count}"
            );
            return Err(communicator.error("ncclCommCount", Place::default(), reason));
        }
        let state = communicator.ask("ncclCommGetAsyncError", nccl.async_error)?;
        if state != SUCCESS && state != IN_PROGRESS {
            return Err(communicator.failed("ncclCommGetAsyncError", Place::default(), state));
        }
        Ok(communicator)
    }

    /// Calls a function that answers with one integer.
    fn ask(
        &self,
        call: &'static str,
        function: unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int,
    ) -> Result<c_int> {
        let mut answer = 0;
        // SAFETY: the communicator is XLA's, which keeps it while a handler runs.
        let code = unsafe { function(self.comm.0 as *mut c_void, &raw mut answer) };
        self.check(call, Place::default(), code)?;
        Ok(answer)
    }

    /// Enqueues the messages of a group on `stream`: they make progress together. The step goes into
    /// errors.
    ///
    /// # Errors
    /// [`Error::Network`], with the peer where it is known.
    ///
    /// # Safety
    /// The memory of the messages is the device's and stays until the stream has passed this.
    pub unsafe fn exchange(
        &self,
        stream: Stream,
        step: Option<usize>,
        group: &Group,
    ) -> Result<()> {
        let place = |peer| Place { step, peer };
        // SAFETY: no arguments.
        self.check("ncclGroupStart", place(None), unsafe { (self.nccl.group_start)() })?;
        // SAFETY: passed on.
        let messages = unsafe { self.messages(stream, step, group) };
        // Whatever happened, the thread's group must end: NCCL drops it if a call in it failed.
        // SAFETY: no arguments.
        let ended = unsafe { (self.nccl.group_end)() };
        messages?;
        match ended {
            IN_PROGRESS => self.settle(step),
            code => self.check("ncclGroupEnd", place(None), code),
        }
    }

    /// # Safety
    /// As [`Communicator::exchange`].
    unsafe fn messages(&self, stream: Stream, step: Option<usize>, group: &Group) -> Result<()> {
        let (comm, stream) = (self.comm.0 as *mut c_void, stream.0 as *mut c_void);
        for message in &group.sends {
            let (from, count) = (message.address as *const c_void, message.bytes as usize);
            let peer = message.peer as c_int;
            // SAFETY: passed on.
            let code = unsafe { (self.nccl.send)(from, count, BYTES, peer, comm, stream) };
            let place = Place { step, peer: Some(message.peer) };
            self.check("ncclSend", place, code)?;
        }
        for message in &group.receives {
            let (to, count) = (message.address as *mut c_void, message.bytes as usize);
            let peer = message.peer as c_int;
            // SAFETY: passed on.
            let code = unsafe { (self.nccl.receive)(to, count, BYTES, peer, comm, stream) };
            let place = Place { step, peer: Some(message.peer) };
            self.check("ncclRecv", place, code)?;
        }
        Ok(())
    }

    /// A communicator that does not block has to be asked until its group is enqueued.
    fn settle(&self, step: Option<usize>) -> Result<()> {
        loop {
            match self.ask("ncclCommGetAsyncError", self.nccl.async_error)? {
                IN_PROGRESS => std::thread::yield_now(),
                code => {
                    let place = Place { step, peer: None };
                    return self.check("ncclGroupEnd", place, code);
                }
            }
        }
    }

    fn check(&self, call: &'static str, place: Place, code: c_int) -> Result<()> {
        // In progress: enqueued, by a communicator that does not block.
        if code == SUCCESS || code == IN_PROGRESS {
            return Ok(());
        }
        Err(self.failed(call, place, code))
    }

    fn failed(&self, call: &'static str, place: Place, code: c_int) -> Error {
        self.error(call, place, self.nccl.explain(self.comm, code))
    }

    fn error(&self, call: &'static str, place: Place, reason: String) -> Error {
        let Place { step, peer } = place;
        Error::Network { call, rank: self.rank, world_size: self.size, step, peer, reason }
    }
}
