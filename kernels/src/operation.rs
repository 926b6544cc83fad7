//! The operations: what a device computes at once, whatever code computes it.

use serde::Deserialize;

use crate::error::LaunchError;
use crate::launch::{
    Accumulate, Cast, CombineSoftmax, Decode, Delta, Forward, KeyGrads, Launch, LinearAttend,
    LinearState, QueryGrads,
};
use crate::target::Target;

/// Declares the operations. Each is a description, which has `launches`.
macro_rules! operations {
    ($($(#[$doc:meta])* $operation:ident = $name:literal),* $(,)?) => {
        /// One operation with its memory.
        #[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
        #[serde(rename_all = "snake_case")]
        #[expect(clippy::large_enum_variant, reason = "it lives on the stack of one function")]
        pub enum TileOperation {
            $($(#[$doc])* $operation($operation)),*
        }

        impl TileOperation {
            /// Returns the name of the computation.
            pub const fn name(&self) -> &'static str {
                match self {
                    $(TileOperation::$operation(_) => $name),*
                }
            }

            /// Returns the launches of this library's kernels that compute it, to be run in order
            /// on a device of `target`.
            ///
            /// # Errors
            /// [`LaunchError`], with the expected value and the value that came.
            pub fn launches(&self, target: Target) -> Result<Vec<Launch>, LaunchError> {
                match self {
                    $(TileOperation::$operation(operation) => operation.launches(target)),*
                }
            }
        }

        $(impl From<$operation> for TileOperation {
            fn from(operation: $operation) -> TileOperation {
                TileOperation::$operation(operation)
            }
        })*
    };
}

operations! {
    /// Softmax attention, forward.
    Forward = "forward",
    /// The gradients of keys and values, and of queries where a kernel is fused.
    KeyGrads = "key_grads",
    /// The gradient of queries.
    QueryGrads = "query_grads",
    /// What the backward pass needs of each row.
    Delta = "delta",
    /// Results of float32 sums.
    Cast = "cast",
    /// A sum of two float32 arrays.
    Accumulate = "accumulate",
    /// One softmax state of two.
    CombineSoftmax = "combine_softmax",
    /// The states of linear attention.
    LinearState = "linear_state",
    /// The outputs of linear attention.
    LinearAttend = "linear_attend",
    /// Attention of few queries over pages of keys.
    Decode = "decode",
}
