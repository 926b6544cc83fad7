//! Errors between XLA and the core, and the XLA error code of each.

use std::any::Any;
use std::time::Duration;

use burst_attention::cuda::error::CudaError;
use burst_attention::error::panic_text;

use crate::sys;

/// An error between XLA and the core. Messages say what was expected and what came.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A structure that the runtime passed contradicts the header.
    #[error("XLA passed a malformed {what}: expected {expected}, got {got}")]
    Malformed {
        /// The structure or field.
        what: String,
        /// What the header promises.
        expected: String,
        /// What came.
        got: String,
    },
    /// The target does not take an operand, result or attribute of the custom call.
    #[error("{name} must be {expected}, got {got}")]
    Mismatch {
        /// The operand, result or attribute.
        name: String,
        /// What the target expects.
        expected: String,
        /// What came.
        got: String,
    },
    /// The runtime lacks a function that the library needs.
    #[error(
        "this runtime has XLA FFI {major}.{minor} without {missing}; burst_attention needs 0.4 or \
         newer: install jaxlib 0.11.2 or newer"
    )]
    OldRuntime {
        /// Major version of the runtime's interface.
        major: i32,
        /// Minor version of the runtime's interface.
        minor: i32,
        /// The missing function.
        missing: &'static str,
    },
    /// A function of the runtime failed.
    #[error("{call} failed: {message}")]
    Runtime {
        /// The function.
        call: &'static str,
        /// The runtime's message.
        message: String,
    },
    /// Ranks of one ring came with different calls or with impossible places.
    #[error("the ranks of ring {ring} over {axis} disagree: {what}")]
    Disagreement {
        /// Name of the mesh axis, as the user wrote it.
        axis: String,
        /// The number of the ring.
        ring: i32,
        /// The contradiction.
        what: String,
    },
    /// Some ranks of a ring never came.
    #[error(
        "attention over {axis}, ring {ring}: {missing} of {world_size} did not reach the call \
         within {timeout:?} of the first; {arrived} did. Likely causes: the call stands under \
         lax.cond or lax.switch and only some devices take that branch (compute it on every \
         device and select the result instead), or a device failed before it. If devices are \
         merely slow, raise BURST_ATTENTION_RANK_TIMEOUT_S"
    )]
    MissingRanks {
        /// Name of the mesh axis, as the user wrote it.
        axis: String,
        /// The number of the ring.
        ring: i32,
        /// Length of the ring.
        world_size: usize,
        /// Ranks that did not come, in words.
        missing: String,
        /// Ranks that came, in words.
        arrived: String,
        /// How long the first rank waited, without the time in which rings computed.
        timeout: Duration,
    },
    /// The call was dropped before its ring ended. This is a bug of the library.
    #[error("the call was given up before its ring was through")]
    Abandoned,
    /// The core refused or failed.
    #[error(transparent)]
    Core(#[from] burst_attention::Error),
    /// The core failed in a ring on GPUs.
    #[error("ring over mesh axis {axis:?}: {error}")]
    Ring {
        /// Name of the mesh axis, as the user wrote it.
        axis: String,
        /// The core's error.
        error: Box<burst_attention::Error>,
    },
    /// XLA has no communicator for the ring.
    #[error(
        "XLA lends no communicator for the ring over mesh axis {axis:?}: {reason}; rings on GPUs \
         need jaxlib and jax-cuda13-plugin 0.11.2 or newer"
    )]
    NoCommunicator {
        /// Name of the mesh axis.
        axis: String,
        /// Why XLA has none.
        reason: String,
    },
    /// The library panicked. This is a bug of the library.
    #[error("burst_attention panicked: {0}; please report this as a bug")]
    Panic(String),
}

/// A result with this crate's [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Returns the error of a target that expects another operand, result or attribute.
    pub fn mismatch(
        name: impl Into<String>,
        expected: impl Into<String>,
        got: impl ToString,
    ) -> Error {
        Error::Mismatch { name: name.into(), expected: expected.into(), got: got.to_string() }
    }

    /// Returns the error of a structure that contradicts the header.
    pub fn malformed(
        what: impl Into<String>,
        expected: impl Into<String>,
        got: impl ToString,
    ) -> Error {
        Error::Malformed { what: what.into(), expected: expected.into(), got: got.to_string() }
    }

    /// Checks that a structure has at least the header's size.
    pub(crate) fn check_size(what: &str, size: usize, least: u32) -> Result<()> {
        if size < least as usize {
            return Err(Error::malformed(what, format!("at least {least} bytes"), size));
        }
        Ok(())
    }

    /// Returns the error of a panic, from the payload that [`std::panic::catch_unwind`] caught.
    pub fn panic(payload: Box<dyn Any + Send>) -> Error {
        Error::Panic(panic_text(&*payload))
    }

    /// Whether the cause is the program, which is the same on all devices.
    pub fn is_of_program(&self) -> bool {
        use sys::{XLA_FFI_Error_Code_INVALID_ARGUMENT, XLA_FFI_Error_Code_UNIMPLEMENTED};
        [XLA_FFI_Error_Code_INVALID_ARGUMENT, XLA_FFI_Error_Code_UNIMPLEMENTED]
            .contains(&self.code())
    }

    /// Whether the error may concern one device alone: its cause is neither the program nor another
    /// device, which has its own error.
    pub fn is_of_one_device(&self) -> bool {
        let is_of_others = |error: &burst_attention::Error| {
            matches!(CudaError::of(error), Some(CudaError::NotReady { .. }))
        };
        let is_of_others = matches!(self, Error::Ring { error, .. } if is_of_others(error));
        !is_of_others && !self.is_of_program()
    }

    /// Returns the code under which XLA reports the error.
    pub fn code(&self) -> sys::XLA_FFI_Error_Code {
        match self {
            Error::Malformed { .. } | Error::Mismatch { .. } | Error::Disagreement { .. } => {
                sys::XLA_FFI_Error_Code_INVALID_ARGUMENT
            }
            Error::Ring { error, .. }
                if matches!(**error, burst_attention::Error::Unsupported { .. }) =>
            {
                sys::XLA_FFI_Error_Code_UNIMPLEMENTED
            }
            Error::NoCommunicator { .. }
            | Error::OldRuntime { .. }
            | Error::Core(burst_attention::Error::Unsupported { .. }) => {
                sys::XLA_FFI_Error_Code_UNIMPLEMENTED
            }
            Error::MissingRanks { .. } => sys::XLA_FFI_Error_Code_DEADLINE_EXCEEDED,
            Error::Abandoned => sys::XLA_FFI_Error_Code_ABORTED,
            Error::Core(burst_attention::Error::NoThread { .. }) => {
                sys::XLA_FFI_Error_Code_RESOURCE_EXHAUSTED
            }
            Error::Core(burst_attention::Error::InvalidProblem { .. }) => {
                sys::XLA_FFI_Error_Code_INVALID_ARGUMENT
            }
            Error::Runtime { .. } | Error::Core(_) | Error::Ring { .. } | Error::Panic(_) => {
                sys::XLA_FFI_Error_Code_INTERNAL
            }
        }
    }
}
