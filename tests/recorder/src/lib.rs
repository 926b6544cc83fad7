//! A test double of a GPU with its CUDA driver and NCCL. It records what the executor asks of them,
//! and proves that the recorded calls are ordered and that no rank waits for ever.
//!
//! A [`Recorder`] stands for one device. It keeps the calls that enqueue an operation as a
//! [`Program`], and a test can make each call fail. [`nccl()`] is the table of functions for
//! communicators made by [`Recorder::add_comm`].
//!
//! - [`check()`] proves that nothing in a program races. It looks only at the memory that each call
//!   touches and at the events between streams.
//! - [`unneeded`] returns the records and waits without which still nothing races.
//! - [`replay()`] runs the programs of all ranks together and finds deadlocks.

mod check;
mod driver;
mod nccl;
mod recorder;
mod replay;
#[cfg(test)]
mod tests;
mod touch;

pub use check::{check, unneeded};
pub use nccl::nccl;
pub use recorder::{Recorder, images};
pub use replay::replay;

use std::collections::HashMap;
use std::fmt;

use burst_attention::cuda::driver::{Copy, Event, Stream};
use burst_attention::cuda::nccl::{Comm, Group, Message};
use burst_attention_kernels::backend::LibraryCall;
use burst_attention_kernels::launch::Launch;

/// A recorded call that enqueued an operation.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// The stream of the operation.
    pub stream: Stream,
    /// The operation.
    pub operation: Operation,
}

/// An operation of a stream.
#[derive(Debug, Clone, PartialEq)]
pub enum Operation {
    /// A kernel.
    Launch(Launch),
    /// A call of a library.
    Library(LibraryCall),
    /// A copy within the device.
    Copy(Copy),
    /// Messages that travel together.
    Exchange(Exchange),
    /// Lets the event stand for all earlier operations of the stream.
    Record(Event),
    /// Lets the later operations of the stream start after the operations that the event stands
    /// for.
    Wait(Event),
}

/// A group of messages on one communicator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exchange {
    /// The communicator.
    pub comm: Comm,
    /// The number of the ring: the communicators of all its ranks have the same one.
    pub ring: usize,
    /// The rank of the communicator.
    pub rank: usize,
    /// The messages.
    pub group: Group,
}

/// The recorded calls of one device, in order.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    /// XLA's stream. The work before and after the program runs there.
    pub compute: Stream,
    /// The calls.
    pub calls: Vec<Call>,
}

impl Program {
    /// Returns, for each call, the index of the call that it waits for. A wait waits for the latest
    /// earlier record of its event, as in the driver; no other call waits.
    fn awaited(&self) -> Vec<Option<usize>> {
        let mut recorded = HashMap::new();
        let calls = self.calls.iter().enumerate();
        let awaited = calls.map(|(index, call)| match call.operation {
            Operation::Wait(event) => recorded.get(&event).copied(),
            Operation::Record(event) => {
                recorded.insert(event, index);
                None
            }
            _ => None,
        });
        awaited.collect()
    }

    /// Returns the indices of waits for an event that the program had not recorded before. The
    /// driver ignores such a wait.
    pub fn idle_waits(&self) -> Vec<usize> {
        let awaited = self.awaited();
        let is_wait = |n: &usize| matches!(self.calls[*n].operation, Operation::Wait(_));
        (0..self.calls.len()).filter(is_wait).filter(|n| awaited[*n].is_none()).collect()
    }

    /// Describes the call of an index in words.
    fn describe(&self, index: usize) -> String {
        format!("call {index}, {}", self.calls[index])
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.operation {
            Operation::Launch(launch) => write!(f, "{}", launch.instance().kernel.name())?,
            Operation::Library(call) => write!(f, "{} {}", call.library, call.plan)?,
            Operation::Copy(copy) => {
                let (bytes, from, to) = (copy.from.bytes(), copy.from.address, copy.to.address);
                write!(f, "copy of {bytes} bytes from {from:#x} to {to:#x}")?;
            }
            Operation::Exchange(Exchange { rank, group, .. }) => {
                let peers = |messages: &[Message]| -> Vec<usize> {
                    messages.iter().map(|message| message.peer).collect()
                };
                let (sends, receives) = (peers(&group.sends), peers(&group.receives));
                write!(f, "exchange of rank {rank} to {sends:?} from {receives:?}")?;
            }
            Operation::Record(event) => write!(f, "record of event {:#x}", event.0)?,
            Operation::Wait(event) => write!(f, "wait for event {:#x}", event.0)?,
        }
        write!(f, " on stream {:#x}", self.stream.0)
    }
}

/// Lists the calls, one in a line.
impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (0..self.calls.len()).try_for_each(|index| writeln!(f, "{}", self.describe(index)))
    }
}
