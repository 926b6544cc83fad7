//! The one error type of the core.

use burst_attention_kernels::images::ImagesError;
use burst_attention_kernels::launch::LaunchError;

use crate::problem::Dtype;

/// Everything that can go wrong in the core. Messages carry the values that were found and say
/// what was expected.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A shape or a number of the problem is out of range.
    #[error("{name} must be {expected}, got {got}")]
    InvalidProblem {
        /// The argument, in the words of the public interface.
        name: &'static str,
        /// What would have been accepted.
        expected: String,
        /// What came.
        got: String,
    },
    /// An array does not have the type the problem announced.
    #[error("{name} must be {expected}, got {got}")]
    WrongDtype {
        /// The array.
        name: &'static str,
        /// The type the problem announced.
        expected: Dtype,
        /// The type of the array.
        got: Dtype,
    },
    /// A rank stopped before the ring was through, so its neighbours can't go on.
    #[error("rank {rank} of {world_size} lost its neighbour rank {peer}: {reason}")]
    RingBroken {
        /// The rank that noticed.
        rank: usize,
        /// The rank it waited for.
        peer: usize,
        /// The length of the ring.
        world_size: usize,
        /// Why, as far as it is known.
        reason: String,
    },
    /// A schedule and the buffers it is walked over contradict each other.
    #[error("schedule of rank {rank}, step {step}: {what}")]
    BrokenSchedule {
        /// Whose schedule.
        rank: usize,
        /// The step at which the contradiction showed.
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
        /// What needs it.
        purpose: String,
        /// What the system says.
        reason: String,
    },
    /// A kernel can't be launched for what it is to compute.
    #[error("{0}")]
    Launch(#[from] LaunchError),
    /// The image of a kernel is missing.
    #[error("{0}")]
    Images(#[from] ImagesError),
    /// This executor has no way to compute it.
    #[error("{what} is not supported on {executor}: {instead}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// Where.
        executor: &'static str,
        /// What works.
        instead: String,
    },
    /// A library is not there, or lacks something.
    #[error("{library} can't be used: {reason}; {remedy}")]
    Library {
        /// Its name.
        library: &'static str,
        /// What is wrong.
        reason: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The CUDA driver refused a call.
    #[error("{call} failed: {reason}")]
    Driver {
        /// The function of the driver.
        call: &'static str,
        /// What it was for, and what the driver says.
        reason: String,
    },
    /// NCCL refused a call, or found its communicator broken.
    #[error("rank {rank} of {world_size}{}: {call} failed: {reason}", place(*step, *peer))]
    Network {
        /// The function of NCCL.
        call: &'static str,
        /// The rank that noticed.
        rank: usize,
        /// Length of the ring.
        world_size: usize,
        /// The step of the ring, within a pass.
        step: Option<usize>,
        /// The rank at the other end.
        peer: Option<usize>,
        /// What NCCL says.
        reason: String,
    },
    /// Memory that the caller gives for a ring does not fit it.
    #[error("{name} must have at least {expected} bytes, got {got}")]
    Workspace {
        /// The memory.
        name: &'static str,
        /// What the ring needs.
        expected: u64,
        /// What came.
        got: u64,
    },
}

/// Where in a ring something happened.
fn place(step: Option<usize>, peer: Option<usize>) -> String {
    let step = step.map_or(String::new(), |step| format!(", step {step}"));
    peer.map_or(step.clone(), |peer| format!("{step}, peer rank {peer}"))
}

/// Result with the core's [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;
