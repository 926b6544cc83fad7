//! The error type of the core.

use std::any::Any;
use std::sync::Arc;

/// An error of the core. Its message says what was expected and which value came.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A shape, a type or a number of the problem is out of range.
    #[error("{name} must be {expected}, got {got}")]
    InvalidProblem {
        /// The argument, in the words of the public interface.
        name: &'static str,
        /// The values that are accepted.
        expected: String,
        /// The value that came.
        got: String,
    },
    /// A rank stopped before the ring was complete, so its neighbours can't go on.
    #[error("rank {rank} of {world_size} lost its neighbour rank {peer}: {reason}")]
    RingBroken {
        /// The rank that noticed.
        rank: usize,
        /// The rank it waited for.
        peer: usize,
        /// The length of the ring.
        world_size: usize,
        /// The reason, as far as it is known.
        reason: String,
    },
    /// A schedule contradicts the buffers of its rank.
    #[error("schedule of rank {rank}, step {step}: {what}")]
    BrokenSchedule {
        /// The rank of the schedule.
        rank: usize,
        /// The step of the contradiction.
        step: usize,
        /// The contradiction.
        what: String,
    },
    /// The operating system refuses a thread.
    #[error(
        "no thread for {purpose}: {reason}; end other programs, or raise the limit on threads \
         (ulimit -u, or the pids limit of the container)"
    )]
    NoThread {
        /// The purpose of the thread.
        purpose: String,
        /// The reason that the system gives.
        reason: String,
    },
    /// An executor can't compute the problem.
    #[error("{what} is not supported on {executor}: {instead}")]
    Unsupported {
        /// The part of the problem that it can't compute.
        what: String,
        /// The executor.
        executor: &'static str,
        /// What to do instead.
        instead: String,
    },
    /// A device, or a library that drives it, refused. The executor's own error says what.
    #[error("{0}")]
    Device(DeviceError),
}

/// An executor's own error. The core knows its message, and the executor its type.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub struct DeviceError(pub Arc<dyn std::error::Error + Send + Sync>);

/// Errors with the same message are equal.
impl PartialEq for DeviceError {
    fn eq(&self, other: &DeviceError) -> bool {
        self.to_string() == other.to_string()
    }
}

/// Returns the message of a panic, from the payload that [`std::panic::catch_unwind`] caught.
pub fn panic_text(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_string());
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "no message".into())
}

/// The result of a function that can fail with the core's [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;
