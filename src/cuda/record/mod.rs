//! The executor without a device: a driver and an NCCL that write down what they are asked for, a
//! proof that what was asked for is ordered, and a run of all ranks' programs together.
//!
//! [`Recorder`] stands for any number of devices at once. It is a [`Driver`] that refuses what the
//! real one would punish, later and elsewhere, and keeps the calls of each device in their order;
//! [`nccl`] is the table of functions for communicators made by [`Recorder::add_comm`]. Each call
//! can be made to fail. What was recorded is a [`Program`] per device:
//!
//! - [`check`] proves that nothing in it races, from the memory that each call touches and the
//!   events between streams alone.
//! - [`mutations`] are the programs with one event less: [`check`] must refuse each of them, or
//!   the event was [`unneeded`].
//! - [`simulate`] runs the programs of all ranks, streams in a random order, messages when both
//!   ends are there, and finds deadlocks. What launches, copies and messages do is up to the
//!   caller.
//!
//! [`Driver`]: super::driver::Driver

mod check;
mod driver;
mod nccl;
mod recorder;
mod simulate;
mod touch;

#[cfg(test)]
mod tests;

pub use check::{Mutation, Party, Race, check, mutations, unneeded};
pub use nccl::{group_is_open, nccl};
pub use recorder::{Allocation, Created, Recorder, image, images};
pub use simulate::{Action, Delivery, Stuck, simulate};
pub use touch::{Touch, common};

use std::fmt;

use burst_attention_kernels::launch::Launch;

use super::driver::{Copy, Event, Stream};
use super::nccl::{Comm, Group};

/// Something that was enqueued.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// Where.
    pub stream: Stream,
    /// What.
    pub what: What,
}

/// What can be enqueued.
#[derive(Debug, Clone, PartialEq)]
pub enum What {
    /// A kernel.
    Launch(Launch),
    /// A copy within the device.
    Copy(Copy),
    /// Messages that travel together.
    Exchange(Exchange),
    /// The event stands for what the stream was given before.
    Record(Event),
    /// What follows on the stream starts after what the event stands for.
    Wait(Event),
}

/// A group of messages, over the communicator that it was given to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exchange {
    /// The communicator.
    pub comm: Comm,
    /// The same number for all ranks' communicators that belong together.
    pub ring: usize,
    /// This rank.
    pub rank: usize,
    /// The messages.
    pub group: Group,
}

/// All that one device was given, in the order in which it was.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    /// XLA's stream: what comes before and after the program runs there.
    pub compute: Stream,
    /// The calls.
    pub calls: Vec<Call>,
}

impl Program {
    /// For each call the index of the call that it waits for: of a wait the latest record of its
    /// event before it, as the driver has it. Everything else waits for nothing.
    pub(super) fn awaited(&self) -> Vec<Option<usize>> {
        let mut recorded = std::collections::HashMap::new();
        let mut awaited = Vec::with_capacity(self.calls.len());
        for (index, call) in self.calls.iter().enumerate() {
            awaited.push(match &call.what {
                What::Wait(event) => recorded.get(event).copied(),
                _ => None,
            });
            if let What::Record(event) = call.what {
                recorded.insert(event, index);
            }
        }
        awaited
    }

    /// Indices of waits for an event that the program had not recorded before: to the driver they
    /// are nothing at all.
    pub fn idle_waits(&self) -> Vec<usize> {
        let awaited = self.awaited();
        let calls = self.calls.iter().enumerate();
        let idle =
            calls.filter(|(n, call)| matches!(call.what, What::Wait(_)) && awaited[*n].is_none());
        idle.map(|(n, _)| n).collect()
    }

    /// A call by its index, in words.
    pub fn describe(&self, index: usize) -> String {
        format!("call {index}, {}", self.calls[index])
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on stream {:#x}", self.what, self.stream.0)
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            What::Launch(launch) => write!(f, "{}", launch.instance.kernel.name()),
            What::Copy(copy) => {
                let (bytes, from, to) = (copy.from.bytes(), copy.from.address, copy.to.address);
                write!(f, "copy of {bytes} bytes from {from:#x} to {to:#x}")
            }
            What::Exchange(Exchange { rank, group, .. }) => {
                let peers = |messages: &[super::nccl::Message]| -> Vec<usize> {
                    messages.iter().map(|message| message.peer).collect()
                };
                let (sends, receives) = (peers(&group.sends), peers(&group.receives));
                write!(f, "exchange of rank {rank} to {sends:?} from {receives:?}")
            }
            What::Record(event) => write!(f, "record of event {:#x}", event.0),
            What::Wait(event) => write!(f, "wait for event {:#x}", event.0),
        }
    }
}

/// Lists the calls, one in a line.
impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (0..self.calls.len()).try_for_each(|index| writeln!(f, "{}", self.describe(index)))
    }
}
