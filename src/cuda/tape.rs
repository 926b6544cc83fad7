//! What a ring enqueues, before anything is enqueued.
//!
//! The engine walks the schedule onto a tape: operations in order, each on one of three queues, with
//! the regions it reads and writes. [`synchronised`] adds the events that this order needs and no
//! others. So whatever is wrong with a description shows before the first operation is issued, and
//! no neighbour waits for a rank that stopped half way.

use std::collections::HashMap;

use burst_attention_kernels::launch::Launch;

use super::driver::Copy;
use super::memory::Region;
use super::nccl::Group;
use super::transport::Pieces;
use crate::schedule::{self, Due};

/// Where an operation runs. What is on one queue runs in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Queue {
    /// XLA's stream: kernels.
    Compute,
    /// A stream of our own: what travels from one step to the next.
    Exchange,
    /// Another one: what may take several steps, over the slow links of a double ring.
    Far,
}

impl Queue {
    /// All of them; a queue's number is its place here.
    pub const ALL: [Queue; 3] = [Queue::Compute, Queue::Exchange, Queue::Far];
    /// Those of messages, each with a communicator of its own.
    pub const OF_MESSAGES: [Queue; 2] = [Queue::Exchange, Queue::Far];

    /// Where an exchange runs that starts at `step`.
    pub fn of(exchange: &schedule::Exchange, step: usize) -> Queue {
        let is_next = exchange.due.reached_by(Due::Fold(step + 1));
        if is_next { Queue::Exchange } else { Queue::Far }
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
    read: Positions,
    written: Positions,
}

/// A position in each queue.
type Positions = [usize; Queue::ALL.len()];

/// One queue waits for a position of another before an operation.
#[derive(Debug, Clone, Copy)]
struct Sync {
    before: usize,
    after: usize,
}

/// Commands for all operations, with an event recorded and waited for wherever an operation needs
/// what another queue has not been waited for yet; and how many events that takes.
///
/// An operation needs the last one of each other queue that wrote what it uses, and if it writes,
/// also the last that read it. The event is recorded right behind that operation, not later. What a
/// queue has waited for, it is waited for with it.
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
    let mut program = Positions::default();
    // For each queue: how far all of them are known to be; and the operations it was given, each
    // with what was known then.
    let mut known = [Positions::default(); Queue::ALL.len()];
    let mut given: [Vec<(usize, Positions)>; Queue::ALL.len()] = Default::default();
    let mut syncs = Vec::new();
    for (index, op) in ops.iter().enumerate() {
        let own = op.queue as usize;
        let mut needed = program;
        if op.work == Work::Program {
            needed = given.each_ref().map(Vec::len);
        }
        for used in &op.uses {
            let last = regions.get(&(used.rank, used.region)).copied().unwrap_or_default();
            advance(&mut needed, &last.written);
            if used.writes {
                advance(&mut needed, &last.read);
            }
        }
        let at = |queue: usize, position: usize| given[queue][position - 1];
        let others = (0..needed.len()).filter(|queue| *queue != own);
        let missing: Vec<usize> =
            others.filter(|queue| needed[*queue] > known[own][*queue]).collect();
        for &queue in &missing {
            // Another that is waited for too may have waited for it.
            let mut rest = missing.iter().filter(|other| **other != queue);
            if rest.any(|other| at(*other, needed[*other]).1[queue] >= needed[queue]) {
                continue;
            }
            let (after, then) = at(queue, needed[queue]);
            syncs.push(Sync { before: index, after });
            advance(&mut known[own], &then);
        }
        let position = given[own].len() + 1;
        known[own][own] = position;
        given[own].push((index, known[own]));
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

/// As far as either.
fn advance(positions: &mut Positions, others: &Positions) {
    positions.iter_mut().zip(others).for_each(|(one, other)| *one = *other.max(one));
}

#[cfg(test)]
mod tests {
    use super::super::recording::{reads, writes};
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
            op(Exchange, Region::Staging(Exchange), true),
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
    fn who_waits_for_a_queue_need_not_wait_for_what_that_one_has_waited_for() {
        use Command::{Enqueue, Record, Wait};
        use Queue::{Compute, Exchange, Far};
        let home = Region::Home(Payload::Keys);
        let both = |queue| {
            let uses = [SLOT, home].map(|region| Use { rank: 0, region, writes: false });
            Op { uses: uses.into(), ..op(queue, SLOT, false) }
        };
        let after_it = Op { uses: vec![reads(SLOT), writes(home)], ..op(Far, SLOT, false) };
        let (commands, _) = synchronised(&[op(Exchange, SLOT, true), after_it, both(Compute)]);
        let expected = [
            Enqueue(0),
            Record(Exchange, 0),
            Wait(Far, 0),
            Enqueue(1),
            Record(Far, 0),
            Wait(Compute, 0),
            Enqueue(2),
        ];
        assert_eq!(commands, expected);
        // Here both have to be waited for.
        let (commands, events) =
            synchronised(&[op(Exchange, SLOT, true), op(Far, home, true), both(Compute)]);
        let waits = commands.iter().filter(|command| matches!(command, Wait(Compute, _)));
        assert_eq!((waits.count(), events), (2, 2));
    }

    #[test]
    fn two_that_only_read_do_not_wait_for_each_other() {
        let home = Region::Home(Payload::Keys);
        let ops = [op(Queue::Compute, home, false), op(Queue::Exchange, home, false)];
        let (commands, _) = synchronised(&ops);
        assert_eq!(commands, [Command::Enqueue(0), Command::Enqueue(1)]);
    }
}
