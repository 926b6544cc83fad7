//! The errors of the CUDA executor.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use burst_attention_kernels::images::ImagesError;
use burst_attention_kernels::launch::LaunchError;

use crate::error::{DeviceError, Error, Result, panic_text};

/// An error of a GPU or of a library that drives it. The core carries it as [`Error::Device`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// No kernel can be launched for the operands.
    #[error("{0}")]
    Launch(LaunchError),
    /// The image of a kernel is missing.
    #[error("{0}")]
    Images(ImagesError),
    /// A library is missing or lacks a function.
    #[error("{library} can't be used: {reason}; {remedy}")]
    Library {
        /// The name of the library.
        library: &'static str,
        /// The reason.
        reason: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The CUDA driver refused a call, or NCCL refused to say which rank this is.
    #[error("{call} failed: {reason}")]
    Driver {
        /// The function.
        call: &'static str,
        /// The purpose of the call, and the message of the library.
        reason: String,
    },
    /// NCCL refused a call or found its communicator broken.
    #[error("rank {rank} of {world_size}{}: {call} failed: {reason}", place(*step, *peer))]
    Network {
        /// The function of NCCL.
        call: &'static str,
        /// The rank that noticed the error.
        rank: usize,
        /// The length of the ring.
        world_size: usize,
        /// The step of the ring within a pass.
        step: Option<usize>,
        /// The rank at the other end.
        peer: Option<usize>,
        /// NCCL's message.
        reason: String,
    },
    /// A rank could not prepare for a call or issue a command.
    #[error("rank {rank} of {world_size}{}: {error}", place(*step, None))]
    Rank {
        /// The rank.
        rank: usize,
        /// The length of the ring.
        world_size: usize,
        /// The step of the ring within a pass.
        step: Option<usize>,
        /// The error.
        error: Error,
    },
    /// Other ranks could not prepare for a call.
    #[error(
        "rank {rank} of {world_size} is ready, but ranks {others:?} are not; each of them has \
         written its own error to stderr: correct that error and run the program again"
    )]
    NotReady {
        /// The rank that found this out.
        rank: usize,
        /// The length of the ring.
        world_size: usize,
        /// The ranks that are not ready.
        others: Vec<usize>,
    },
    /// The executor panicked.
    #[error("burst_attention panicked: {0}; please report this as a bug")]
    Panic(String),
    /// The memory that the caller gives to a ring is too small.
    #[error("{name} must have at least {expected} bytes, got {got}")]
    Workspace {
        /// The name of the memory.
        name: &'static str,
        /// The bytes that the ring needs.
        expected: u64,
        /// The bytes of the memory.
        got: u64,
    },
}

/// Describes a place in a ring.
fn place(step: Option<usize>, peer: Option<usize>) -> String {
    let step = step.map_or(String::new(), |step| format!(", step {step}"));
    peer.map_or(step.clone(), |peer| format!("{step}, peer rank {peer}"))
}

impl CudaError {
    /// Adds a rank and a step to an error of a device that names no rank. `rank_of` is the rank and
    /// the length of its ring, or `None` for a device without peers.
    pub(super) fn at(rank_of: Option<(usize, usize)>, step: Option<usize>, error: Error) -> Error {
        use CudaError::{Network, NotReady, Rank};
        match (rank_of, CudaError::of(&error)) {
            (_, None | Some(Network { .. } | NotReady { .. } | Rank { .. })) | (None, _) => error,
            (Some((rank, world_size)), _) => Rank { rank, world_size, step, error }.into(),
        }
    }

    /// Returns the CUDA executor's error within an error of the core.
    pub fn of(error: &Error) -> Option<&CudaError> {
        let Error::Device(DeviceError(error)) = error else { return None };
        error.downcast_ref()
    }
}

/// Calls `body`, and turns a panic into an error.
///
/// # Errors
/// The error of `body`, or [`CudaError::Panic`].
pub fn caught<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    let outcome = catch_unwind(AssertUnwindSafe(body));
    outcome.unwrap_or_else(|payload| Err(CudaError::Panic(panic_text(&*payload)).into()))
}

impl From<CudaError> for Error {
    fn from(error: CudaError) -> Error {
        Error::Device(DeviceError(Arc::new(error)))
    }
}
