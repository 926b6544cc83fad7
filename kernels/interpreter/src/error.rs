//! What can go wrong in a simulated launch.

use super::memory::Address;

/// A launch that could not start, or an operation that failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// The module has no such entry.
    #[error("no entry '{entry}', the module has {known:?}")]
    NoEntry {
        /// The entry asked for.
        entry: String,
        /// The entries there are.
        known: Vec<String>,
    },
    /// A number of arguments other than the entry's.
    #[error("'{entry}' takes {expected} arguments, got {got}")]
    ArgumentCount {
        /// The entry.
        entry: String,
        /// How many it declares.
        expected: usize,
        /// How many came.
        got: usize,
    },
    /// An argument of another type than the entry's.
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
    /// A grid with an empty axis, or a block outside of it.
    #[error("grid {grid:?} has no block {block:?}")]
    Grid {
        /// The grid of the launch.
        grid: [u32; 3],
        /// The block asked for.
        block: [u32; 3],
    },
    /// An operation failed.
    #[error("{kernel}, block {block:?}, {op} ({location}): {fault}")]
    Operation {
        /// The entry that ran.
        kernel: String,
        /// The block that ran.
        block: [u32; 3],
        /// The operation's name, as in Tile IR's text.
        op: &'static str,
        /// Its line in the kernel's source, where known.
        location: String,
        /// What went wrong.
        fault: Box<Fault>,
    },
}

impl Error {
    /// What went wrong in the operation that failed, if one did.
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            Self::Operation { fault, .. } => Some(fault),
            _ => None,
        }
    }
}

/// Why an operation failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Fault {
    /// The interpreter has no meaning for this operation, type or attribute.
    #[error("not supported: {0}")]
    Unsupported(String),
    /// The operation contradicts the definition of Tile IR.
    #[error("malformed: {0}")]
    Malformed(String),
    /// Bytes outside of every allocation, or across the end of one.
    #[error("{access} of {bytes} bytes at {address}: {nearest}")]
    OutOfBounds {
        /// `load` or `store`.
        access: &'static str,
        /// First byte.
        address: Address,
        /// How many.
        bytes: usize,
        /// The allocation that is next to it.
        nearest: String,
    },
    /// A load of bytes that nobody wrote.
    #[error("load of bytes never written at {address}: {nearest}")]
    Uninitialised {
        /// The first such byte.
        address: Address,
        /// The allocation it lies in.
        nearest: String,
    },
    /// One block adds to an element that another block of the launch loads or stores.
    #[error(
        "{access} at {address} ({nearest}): another block of the launch {other} it, and nothing \
         orders the two"
    )]
    Conflict {
        /// What the block does that failed: `load`, `store` or `addition`.
        access: &'static str,
        /// What the other block does: `loads or stores`, or `adds to`.
        other: &'static str,
        /// The first such byte.
        address: Address,
        /// The allocation it lies in.
        nearest: String,
    },
    /// `assume`, `inbounds` or an overflow flag promised something that does not hold.
    #[error("promise broken: {0}")]
    Promise(String),
    /// An `assert` of the kernel.
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
