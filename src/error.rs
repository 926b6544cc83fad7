//! The one error type of the core.

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
    /// The instruction set was asked for but this machine lacks it.
    #[error("this CPU lacks {isa}; available: {available}")]
    MissingIsa {
        /// What was asked for.
        isa: &'static str,
        /// What there is.
        available: String,
    },
}

/// Result with the core's [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;
