//! What a ring enqueues, before anything is enqueued.
//!
//! The engine walks the schedule onto a tape: operations in order, each on one of two queues, with
//! the regions it reads and writes. [`synchronised`] adds the events that this order needs and no
//! others. So whatever is wrong with a description shows before the first operation is issued, and
//! no neighbour waits for a rank that stopped half way.

use std::collections::HashMap;

use burst_attention_kernels::launch::Launch;

use super::driver::Copy;
use super::memory::Region;
use super::nccl::Group;
use super::transport::Pieces;

/// Where an operation runs. What is on one queue runs in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Queue {
    /// XLA's stream: kernels.
    Compute,
    /// Our own: what travels.
    Exchange,
}

impl Queue {
    fn other(self) -> Queue {
        match self {
            Queue::Compute => Queue::Exchange,
            Queue::Exchange => Queue::Compute,
        }
    }
}

/// What an operation does.
#[derive(Debug, Clone, PartialEq)]
pub enum Work {
    /// A kernel.
    Launch(Launch),
    /// A copy within the device.
    Copy(Copy),
    /// Memory that is to be exchanged with other ranks; it becomes messages or copies.
    Pieces(Pieces),
    /// Messages to and from other ranks.
    Exchange(Group),
    /// Nothing; stands for the program before or after, which may use all memory.
    Program,
}

/// A use of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Use {
    /// Whose; always 0 but in a virtual ring.
    pub rank: usize,
    /// What.
    pub region: Region,
    /// Is it written, not only read?
    pub writes: bool,
}

/// An operation.
#[derive(Debug, Clone, PartialEq)]
pub struct Op {
    /// Where it runs.
    pub queue: Queue,
    /// The step of the ring it belongs to.
    pub step: usize,
    /// What it does.
    pub work: Work,
    /// What it uses; [`Work::Program`] uses everything.
    pub uses: Vec<Use>,
}

/// A command for the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Enqueue the operation of this index.
    Enqueue(usize),
    /// Let an event stand for what the queue has been given so far.
    Record(Queue, usize),
    /// Let the queue go on after what the event stands for.
    Wait(Queue, usize),
}

/// Last uses of a region, as positions in each queue counted from 1; 0 for none.
#[derive(Debug, Clone, Copy, Default)]
struct Last {
    read: [usize; 2],
    written: [usize; 2],
}

/// One queue waits for a position of the other before an operation.
#[derive(Debug, Clone, Copy)]
struct Sync {
    before: usize,
    after: usize,
}

/// Commands for all operations, with an event recorded and waited for wherever an operation needs
/// what the other queue has not been waited for yet; and how many events that takes.
///
/// An operation needs the last one of the other queue that wrote what it uses, and if it writes,
/// also the last that read it. The event is recorded right behind that operation, not later.
pub fn synchronised(ops: &[Op]) -> (Vec<Command>, usize) {
    let syncs = syncs(ops);
    let mut records: HashMap<usize, Vec<usize>> = HashMap::new();
    for (index, sync) in syncs.iter().enumerate() {
        records.entry(sync.after).or_default().push(index);
    }
    let (mut commands, mut events) = (Vec::new(), Events::default());
    let mut held: HashMap<usize, usize> = HashMap::new();
    let mut waits = syncs.iter().enumerate().peekable();
    for (index, op) in ops.iter().enumerate() {
        while let Some((number, _)) = waits.next_if(|(_, sync)| sync.before == index) {
            let event = held.remove(&number).expect("an event is recorded before it is awaited");
            commands.push(Command::Wait(op.queue, event));
            events.free.push(event);
        }
        if op.work != Work::Program {
            commands.push(Command::Enqueue(index));
        }
        for number in records.remove(&index).into_iter().flatten() {
            let event = events.take();
            held.insert(number, event);
            commands.push(Command::Record(op.queue, event));
        }
    }
    (commands, events.count)
}

/// Events that can be used again once they were waited for.
#[derive(Debug, Default)]
struct Events {
    free: Vec<usize>,
    count: usize,
}

impl Events {
    fn take(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            self.count += 1;
            self.count - 1
        })
    }
}

fn syncs(ops: &[Op]) -> Vec<Sync> {
    let mut regions: HashMap<(usize, Region), Last> = HashMap::new();
    // The last operation that used everything, for regions that nobody named yet.
    let mut program = [0; 2];
    // For each queue: how far the other one is known to be; and the operations it was given.
    let mut known = [0; 2];
    let mut given: [Vec<usize>; 2] = [vec![], vec![]];
    let mut syncs = Vec::new();
    for (index, op) in ops.iter().enumerate() {
        let (own, other) = (op.queue as usize, op.queue.other() as usize);
        let mut needed = program[other];
        if op.work == Work::Program {
            needed = given[other].len();
        }
        for used in &op.uses {
            let last = regions.get(&(used.rank, used.region)).copied().unwrap_or_default();
            needed = needed.max(last.written[other]);
            if used.writes {
                needed = needed.max(last.read[other]);
            }
        }
        if needed > known[own] {
            syncs.push(Sync { before: index, after: given[other][needed - 1] });
            known[own] = needed;
        }
        given[own].push(index);
        let position = given[own].len();
        if op.work == Work::Program {
            program[own] = position;
        }
        for used in &op.uses {
            let last = regions.entry((used.rank, used.region)).or_default();
            if used.writes { last.written[own] = position } else { last.read[own] = position }
        }
    }
    syncs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Payload;

    const SLOT: Region = Region::Slot(Payload::Keys, 0);

    fn op(queue: Queue, region: Region, writes: bool) -> Op {
        let uses = vec![Use { rank: 0, region, writes }];
        Op { queue, step: 0, work: Work::Exchange(Group::default()), uses }
    }

    fn program() -> Op {
        Op { queue: Queue::Compute, step: 0, work: Work::Program, uses: vec![] }
    }

    #[test]
    fn one_queue_needs_no_event() {
        let ops = [program(), op(Queue::Compute, SLOT, true), op(Queue::Compute, SLOT, false)];
        let (commands, events) = synchronised(&ops);
        assert_eq!(commands, [Command::Enqueue(1), Command::Enqueue(2)]);
        assert_eq!(events, 0);
    }

    #[test]
    fn what_arrives_is_awaited_by_its_first_reader_and_by_the_next_writer() {
        use Command::{Enqueue, Record, Wait};
        use Queue::{Compute, Exchange};
        let ops = [
            program(),
            op(Exchange, SLOT, true),
            op(Exchange, Region::Staging, true),
            op(Compute, SLOT, false),
            op(Compute, SLOT, false),
            op(Exchange, SLOT, true),
            program(),
        ];
        let (commands, events) = synchronised(&ops);
        let expected = [
            Record(Compute, 0),
            Wait(Exchange, 0),
            Enqueue(1),
            Record(Exchange, 0),
            Enqueue(2),
            Wait(Compute, 0),
            Enqueue(3),
            Enqueue(4),
            Record(Compute, 0),
            Wait(Exchange, 0),
            Enqueue(5),
            Record(Exchange, 0),
            Wait(Compute, 0),
        ];
        assert_eq!(commands, expected);
        assert_eq!(events, 1);
    }

    #[test]
    fn two_that_only_read_do_not_wait_for_each_other() {
        let home = Region::Home(Payload::Keys);
        let ops = [op(Queue::Compute, home, false), op(Queue::Exchange, home, false)];
        let (commands, _) = synchronised(&ops);
        assert_eq!(commands, [Command::Enqueue(0), Command::Enqueue(1)]);
    }
}
