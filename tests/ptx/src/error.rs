//! Errors of reading and of running PTX.

/// PTX that could not be read, or a launch that failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// The text has a part that the interpreter has no meaning for.
    #[error("line {line}, '{text}': {reason}")]
    Parse {
        /// The line of the PTX text, from 1.
        line: u32,
        /// The statement.
        text: String,
        /// What was not understood.
        reason: String,
    },
    /// A launch does not fit its kernel or module.
    #[error("{kernel}: {reason}")]
    Launch {
        /// The kernel.
        kernel: String,
        /// What does not fit.
        reason: String,
    },
    /// An instruction failed.
    #[error("{kernel}, line {line}, '{instruction}', block {block:?}, thread {thread:?}: {fault}")]
    Run {
        /// The kernel.
        kernel: String,
        /// The line of the PTX text, from 1.
        line: u32,
        /// The instruction's text.
        instruction: String,
        /// The block that ran.
        block: [u32; 3],
        /// The thread that failed.
        thread: [u32; 3],
        /// The reason of the failure.
        fault: Box<Fault>,
    },
}

impl Error {
    /// Returns why an instruction failed, if this is the error of an instruction.
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            Self::Run { fault, .. } => Some(fault),
            _ => None,
        }
    }
}

/// The reason why an instruction failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Fault {
    /// The thread never wrote some bits of the register that the instruction reads.
    #[error("reads register {0}, of which the thread never wrote all bits")]
    Unwritten(String),
    /// PTX leaves the result open for these operands.
    #[error("has no defined result for the operands {0:x?}")]
    Undefined(Vec<u64>),
    /// The address is not a multiple of the access's size.
    #[error("{bytes} bytes at {address:#x}, which is not a multiple of {bytes}")]
    Misaligned {
        /// The address.
        address: u64,
        /// The size of the access.
        bytes: usize,
    },
    /// The access is outside of shared, local or parameter memory.
    #[error("{bytes} bytes at {address:#x} of {space} memory, which has {size} bytes")]
    OutOfBounds {
        /// The kind of memory.
        space: &'static str,
        /// The address within it.
        address: u64,
        /// The size of the access.
        bytes: usize,
        /// The size of the memory.
        size: usize,
    },
    /// The kind of memory does not take the access.
    #[error("{0}")]
    Space(String),
    /// The caller's memory refused the access.
    #[error("{bytes} bytes at {address:#x}: {reason}")]
    Memory {
        /// The address.
        address: u64,
        /// The size of the access.
        bytes: usize,
        /// The reason that the caller's memory gave.
        reason: String,
    },
    /// The thread waits for threads that never arrive.
    #[error("waits for ever: {0}")]
    Deadlock(String),
    /// The kernel executed `trap`.
    #[error("the kernel trapped")]
    Trap,
    /// The launch executed more instructions than it may: a loop that may not end.
    #[error("more than {0} instructions in one launch")]
    Limit(u64),
}

pub(crate) type Outcome<T> = Result<T, Fault>;
