use std::fmt;

use crate::record::Value;

/// Why a description has no launches. Messages carry what was expected, what came, and what to do.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A size or a number is out of range.
    #[error("{name} must be {expected}, got {got}")]
    Invalid {
        /// The argument or field.
        name: &'static str,
        /// What would have been accepted.
        expected: String,
        /// What came.
        got: String,
    },
    /// An array that a launch uses is missing.
    #[error("{name} of {kernel} must be the address of an array, got null: {why}")]
    Null {
        /// The argument.
        name: &'static str,
        /// The kernel.
        kernel: &'static str,
        /// What the launch needs it for.
        why: String,
    },
    /// An address or an integer is not divided by what the compiler was told.
    #[error(
        "{name} must be a multiple of {divisor}{unit}, got {value}: align the array and its \
         strides (a batch entry or some rows of a large array may be launched on their own)"
    )]
    Misaligned {
        /// The argument.
        name: &'static str,
        /// What must divide it.
        divisor: i32,
        /// What the divisor counts.
        unit: &'static str,
        /// What came.
        value: Value,
    },
    /// Not even one batch entry and one tile of rows fit what a kernel can address.
    #[error(
        "{name} must span less than {limit} bytes over the heads of {rows} rows of one batch \
         entry, got {bytes}: use fewer heads at once, or a smaller head stride"
    )]
    TooLarge {
        /// The array.
        name: &'static str,
        /// Rows of the smallest piece.
        rows: usize,
        /// Bytes from its first to its last element.
        bytes: u128,
        /// What it must stay below.
        limit: u64,
    },
}

impl LaunchError {
    pub(super) fn invalid(
        name: &'static str,
        expected: impl Into<String>,
        got: impl fmt::Display,
    ) -> Self {
        Self::Invalid { name, expected: expected.into(), got: got.to_string() }
    }
}
