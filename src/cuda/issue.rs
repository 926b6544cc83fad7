//! Issues a command list to a device.

use super::commands::{Command, Work};
use super::driver::Stream;
use super::error::CudaError;
use super::nccl::Communicator;
use super::objects::{Device, Tell, Tools, uninitialized};
use super::region::Queue;
use super::synchronise::{Instruction, synchronised};
use crate::error::Result;

/// Commands on their way to a device.
pub(super) struct Issue<'a> {
    pub tools: &'a Tools,
    pub device: &'a Device,
    /// XLA's stream.
    pub stream: Stream,
    /// The communicators of the queues of messages.
    pub comms: &'a [Communicator<'a>],
    /// Learns of the first error at once.
    pub tell: Tell<'a>,
}

impl Issue<'_> {
    /// Issues all commands. After an error it still issues the exchanges and the events that order
    /// them, because the peers of this rank would wait for these exchanges for ever. It leaves out
    /// kernels and copies: an error means that the call has no results.
    ///
    /// # Errors
    /// The first error.
    pub fn all(&self, commands: &[Command]) -> Result<()> {
        let (instructions, events) = synchronised(commands);
        if self.device.events.len() <= events {
            return Err(uninitialized("an event"));
        }
        let (mut failed, mut step) = (None, commands.first().map(|command| command.step));
        for instruction in &instructions {
            if let Instruction::Enqueue(index) = *instruction {
                step = Some(commands[index].step);
                if failed.is_some() && !matches!(commands[index].work, Work::Exchange(_)) {
                    continue;
                }
            }
            let Err(error) = self.one(commands, instruction) else { continue };
            failed.get_or_insert_with(|| {
                let rank_of = self.comms.first().map(Communicator::rank_and_size);
                let error = CudaError::at(rank_of, step, error);
                (self.tell)(&error);
                error
            });
            if !matches!(instruction, Instruction::Enqueue(_)) {
                self.wait_for_all();
            }
        }
        let Some(error) = failed else { return Ok(()) };
        // XLA's stream must not overtake the exchanges under way. If this fails too, the device
        // is lost, and the first error says more.
        let event = self.device.events[events];
        for stream in self.device.streams.values() {
            let recorded = self.tools.driver.record(*stream, event);
            let _ = recorded.and_then(|()| self.tools.driver.wait(self.stream, event));
        }
        Err(error)
    }

    /// Waits until everything issued so far is over, where an event can't order it before the next
    /// commands. They may write memory that earlier work of XLA's stream still uses.
    fn wait_for_all(&self) {
        for stream in std::iter::once(&self.stream).chain(self.device.streams.values()) {
            // If this fails too, the device is lost, and the first error says more.
            let _ = self.tools.driver.synchronize(*stream);
        }
    }

    fn one(&self, commands: &[Command], instruction: &Instruction) -> Result<()> {
        use Instruction::{Enqueue, Record, Wait};
        let event = |index: usize| self.device.events[index];
        match *instruction {
            Record(queue, index) => self.tools.driver.record(self.stream_of(queue)?, event(index)),
            Wait(queue, index) => self.tools.driver.wait(self.stream_of(queue)?, event(index)),
            Enqueue(index) => self.enqueue(&commands[index]),
        }
    }

    fn enqueue(&self, command: &Command) -> Result<()> {
        let stream = self.stream_of(command.queue)?;
        match &command.work {
            Work::Compute(computation) => self.device.enqueue(self.tools, stream, computation),
            Work::Copy(copy) => self.tools.driver.copy(stream, copy),
            Work::Exchange(group) => {
                let index = Queue::OF_MESSAGES.iter().position(|queue| *queue == command.queue);
                let comm = index.and_then(|index| self.comms.get(index));
                let comm = comm.ok_or_else(|| uninitialized("a communicator"))?;
                // SAFETY: the messages lie in XLA's buffers of this call. XLA keeps them until its
                // stream has passed the call, and `synchronised` or `all` makes that stream wait
                // for this exchange.
                unsafe { comm.exchange(stream, Some(command.step), group) }
            }
            Work::Program | Work::Blocks(_) => Ok(()),
        }
    }

    fn stream_of(&self, queue: Queue) -> Result<Stream> {
        if queue == Queue::Compute {
            return Ok(self.stream);
        }
        let found = self.device.streams.get(&queue).copied();
        found.ok_or_else(|| uninitialized("a stream"))
    }
}
