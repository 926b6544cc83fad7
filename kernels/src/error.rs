//! Errors of descriptions.

use std::fmt;

use crate::backend::Choice;
use crate::record::Value;

/// The reason why a description has no launches. Messages carry the expected value, the value that
/// came, and the remedy.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A size or a number is out of range.
    #[error("{name} must be {expected}, got {got}")]
    Invalid {
        /// The argument or field.
        name: &'static str,
        /// The values that are accepted.
        expected: String,
        /// The value that came.
        got: String,
    },
    /// No backend computes an operation.
    #[error("no backend computes an operation: {0}")]
    Unserved(Choice),
    /// An array that a launch uses is missing.
    #[error("{name} of {kernel} must be the address of an array, got null: {why}")]
    Null {
        /// The argument.
        name: &'static str,
        /// The kernel.
        kernel: &'static str,
        /// The reason why the launch needs the array.
        why: String,
    },
    /// An address or an integer is not a multiple of the divisor that the compiler relied on.
    #[error(
        "{name} must be a multiple of {divisor}{unit}, got {value}: align the array and its \
         strides (a batch entry or some rows of a large array may be launched on their own)"
    )]
    Misaligned {
        /// The argument.
        name: &'static str,
        /// The divisor.
        divisor: i32,
        /// The unit of the divisor.
        unit: &'static str,
        /// The value that came.
        value: Value,
    },
    /// Not even one batch entry and one tile of rows fit the memory that a kernel can address.
    #[error(
        "{name} must span less than {limit} bytes over the heads of {rows} rows of one batch \
         entry, got {bytes}: use fewer heads at once, or a smaller head stride"
    )]
    TooLarge {
        /// The array.
        name: &'static str,
        /// Rows of the smallest launch.
        rows: usize,
        /// Bytes from the array's first to its last element.
        bytes: u128,
        /// The limit that the bytes must stay below.
        limit: u64,
    },
}

impl LaunchError {
    pub(crate) fn invalid(
        name: &'static str,
        expected: impl Into<String>,
        got: impl fmt::Display,
    ) -> Self {
        Self::Invalid { name, expected: expected.into(), got: got.to_string() }
    }
}
