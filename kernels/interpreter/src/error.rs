//! Errors of a simulated launch.

use super::memory::Address;

/// A launch that could not start, or an operation that failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// The module has no such entry.
    #[error("no entry '{entry}', the module has {known:?}")]
    NoEntry {
        /// The requested entry.
        entry: String,
        /// The entries of the module.
        known: Vec<String>,
    },
    /// The number of arguments is not the entry's.
    #[error("'{entry}' takes {expected} arguments, got {got}")]
    ArgumentCount {
        /// The entry.
        entry: String,
        /// The number of arguments that it declares.
        expected: usize,
        /// The number of arguments that came.
        got: usize,
    },
    /// An argument has another type than the entry declares.
    #[error("argument {index} of '{entry}' is a {expected}, got {got}")]
    ArgumentType {
        /// The entry.
        entry: String,
        /// Position from 0.
        index: usize,
        /// The declared type.
        expected: String,
        /// The type that came.
        got: String,
    },
    /// A grid has an empty axis, or a block is outside of the grid.
    #[error("grid {grid:?} has no block {block:?}")]
    Grid {
        /// The grid of the launch.
        grid: [u32; 3],
        /// The requested block.
        block: [u32; 3],
    },
    /// An operation failed.
    #[error("{kernel}, block {block:?}, {op} ({location}): {fault}")]
    Operation {
        /// The entry that ran.
        kernel: String,
        /// The block that ran.
        block: [u32; 3],
        /// The operation's name in Tile IR's text.
        op: &'static str,
        /// Its line in the kernel's source, where known.
        location: String,
        /// The reason of the failure.
        fault: Box<Fault>,
    },
}

impl Error {
    /// Returns why an operation failed, if this is the error of an operation.
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            Self::Operation { fault, .. } => Some(fault),
            _ => None,
        }
    }
}

/// The reason why an operation failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Fault {
    /// The interpreter has no meaning for this operation, type or attribute.
    #[error("not supported: {0}")]
    Unsupported(String),
    /// The operation contradicts the definition of Tile IR.
    #[error("malformed: {0}")]
    Malformed(String),
    /// An access outside of every allocation, or across the end of an allocation.
    #[error("{access} of {bytes} bytes at {address}: {nearest}")]
    OutOfBounds {
        /// `load` or `store`.
        access: &'static str,
        /// First byte.
        address: Address,
        /// Number of bytes.
        bytes: usize,
        /// The nearest allocation.
        nearest: String,
    },
    /// A load of bytes that were never written.
    #[error("load of bytes never written at {address}: {nearest}")]
    Uninitialised {
        /// The first such byte.
        address: Address,
        /// The allocation that it lies in.
        nearest: String,
    },
    /// One block adds to an element that another block of the launch loads or stores.
    #[error(
        "{access} at {address} ({nearest}): another block of the launch {other} it, and nothing \
         orders the two"
    )]
    Conflict {
        /// The access that failed: `load`, `store` or `addition`.
        access: &'static str,
        /// The other block's access: `loads or stores`, or `adds to`.
        other: &'static str,
        /// The first such byte.
        address: Address,
        /// The allocation that it lies in.
        nearest: String,
    },
    /// A promise of `assume`, `inbounds` or an overflow flag does not hold.
    #[error("promise broken: {0}")]
    Promise(String),
    /// An `assert` of the kernel fails.
    #[error("assertion failed at element {element}: {message}")]
    Assertion {
        /// First false element, row-major.
        element: usize,
        /// The kernel's message.
        message: String,
    },
    /// Tile IR leaves the outcome open.
    #[error("undefined: {0}")]
    Undefined(String),
    /// More operations than the launch allows: a loop that may not end.
    #[error("more than {0} operations in one launch")]
    Limit(u64),
}

pub(super) type Outcome<T> = Result<T, Fault>;

pub(super) fn unsupported<T>(what: impl Into<String>) -> Outcome<T> {
    Err(Fault::Unsupported(what.into()))
}

pub(super) fn malformed<T>(what: impl Into<String>) -> Outcome<T> {
    Err(Fault::Malformed(what.into()))
}

pub(super) fn undefined<T>(what: impl Into<String>) -> Outcome<T> {
    Err(Fault::Undefined(what.into()))
}
