//! The events that a command list needs.

use std::collections::HashMap;

use super::commands::{Command, Work};
use super::region::{Queue, Region};

/// An instruction to the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Instruction {
    /// Enqueue the command of this index.
    Enqueue(usize),
    /// Record the event of this number on the queue.
    Record(Queue, usize),
    /// Let the queue wait for the event of this number.
    Wait(Queue, usize),
}

/// For each queue, how many of its commands are over.
type Clock = [usize; Queue::ALL.len()];

/// The last uses of a region, as positions in each queue counted from 1; 0 stands for no use.
#[derive(Debug, Clone, Copy, Default)]
struct LastUse {
    read: Clock,
    written: Clock,
}

/// A wait of one queue for a command of another queue, both as indices of commands.
#[derive(Debug, Clone, Copy)]
struct Sync {
    before: usize,
    after: usize,
}

/// Returns the instructions for all commands, and the number of events that they use.
///
/// A command must wait for the last command of each other queue that wrote a region it uses. A
/// command that writes a region must also wait for the last command that read it. The event is
/// recorded directly behind the command that is waited for. Waiting is transitive: waiting for a
/// queue also waits for everything that queue had waited for, so no second event is added for that.
pub fn synchronised(commands: &[Command]) -> (Vec<Instruction>, usize) {
    let syncs = syncs(commands);
    let mut records: HashMap<usize, Vec<usize>> = HashMap::new();
    for (number, sync) in syncs.iter().enumerate() {
        records.entry(sync.after).or_default().push(number);
    }
    let (mut instructions, mut free, mut events) = (Vec::new(), Vec::new(), 0);
    let mut recorded: HashMap<usize, usize> = HashMap::new();
    let mut waits = syncs.iter().enumerate().peekable();
    for (index, command) in commands.iter().enumerate() {
        while let Some((number, _)) = waits.next_if(|(_, sync)| sync.before == index) {
            let event = recorded.remove(&number).expect("an event is recorded before its wait");
            instructions.push(Instruction::Wait(command.queue, event));
            // After its wait, an event can be recorded again.
            free.push(event);
        }
        if command.work != Work::Program {
            instructions.push(Instruction::Enqueue(index));
        }
        for number in records.remove(&index).into_iter().flatten() {
            let event = free.pop().unwrap_or_else(|| {
                events += 1;
                events - 1
            });
            recorded.insert(number, event);
            instructions.push(Instruction::Record(command.queue, event));
        }
    }
    (instructions, events)
}

fn syncs(commands: &[Command]) -> Vec<Sync> {
    let mut regions: HashMap<(usize, Region), LastUse> = HashMap::new();
    // The last `Work::Program`, which used the regions that no command has used yet.
    let mut program = Clock::default();
    // For each queue, its clock so far, and its commands, each with the clock at its start.
    let mut clocks = [Clock::default(); Queue::ALL.len()];
    let mut queued: [Vec<(usize, Clock)>; Queue::ALL.len()] = Default::default();
    let mut syncs = Vec::new();
    for (index, command) in commands.iter().enumerate() {
        let own = command.queue as usize;
        let mut needed = program;
        if command.work == Work::Program {
            needed = queued.each_ref().map(Vec::len);
        }
        for used in &command.uses {
            let last = regions.get(&(used.rank, used.region)).copied().unwrap_or_default();
            advance(&mut needed, &last.written);
            if used.writes {
                advance(&mut needed, &last.read);
            }
        }
        let at = |queue: usize| queued[queue][needed[queue] - 1];
        let missing = |queue: &usize| *queue != own && needed[*queue] > clocks[own][*queue];
        let missing: Vec<usize> = (0..needed.len()).filter(missing).collect();
        for &queue in &missing {
            // Another queue that this command waits for may already have waited for it.
            let mut rest = missing.iter().filter(|other| **other != queue);
            if rest.any(|other| at(*other).1[queue] >= needed[queue]) {
                continue;
            }
            let (after, clock) = at(queue);
            syncs.push(Sync { before: index, after });
            advance(&mut clocks[own], &clock);
        }
        let position = queued[own].len() + 1;
        clocks[own][own] = position;
        queued[own].push((index, clocks[own]));
        if command.work == Work::Program {
            program[own] = position;
        }
        for used in &command.uses {
            let last = regions.entry((used.rank, used.region)).or_default();
            if used.writes { last.written[own] = position } else { last.read[own] = position }
        }
    }
    syncs
}

/// Advances each count of `clock` to that of `other`, if that is larger.
fn advance(clock: &mut Clock, other: &Clock) {
    clock.iter_mut().zip(other).for_each(|(one, other)| *one = *other.max(one));
}

#[cfg(test)]
mod tests {
    use super::super::nccl::Group;
    use super::super::region::{Use, reads, writes};
    use super::*;
    use crate::schedule::Payload;

    const SLOT: Region = Region::Slot(Payload::Keys, 0);

    fn command(queue: Queue, region: Region, writes: bool) -> Command {
        let uses = vec![Use { rank: 0, region, writes }];
        Command { queue, step: 0, work: Work::Exchange(Group::default()), uses }
    }

    fn program() -> Command {
        Command { queue: Queue::Compute, step: 0, work: Work::Program, uses: vec![] }
    }

    #[test]
    fn one_queue_needs_no_event() {
        let commands =
            [program(), command(Queue::Compute, SLOT, true), command(Queue::Compute, SLOT, false)];
        let (instructions, events) = synchronised(&commands);
        assert_eq!(instructions, [Instruction::Enqueue(1), Instruction::Enqueue(2)]);
        assert_eq!(events, 0);
    }

    #[test]
    fn a_received_chunk_is_awaited_by_its_first_reader_and_by_the_next_writer() {
        use Instruction::{Enqueue, Record, Wait};
        use Queue::{Compute, Exchange};
        let commands = [
            program(),
            command(Exchange, SLOT, true),
            command(Exchange, Region::Staging(Exchange), true),
            command(Compute, SLOT, false),
            command(Compute, SLOT, false),
            command(Exchange, SLOT, true),
            program(),
        ];
        let (instructions, events) = synchronised(&commands);
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
        assert_eq!(instructions, expected);
        assert_eq!(events, 1);
    }

    #[test]
    fn waiting_is_transitive() {
        use Instruction::{Enqueue, Record, Wait};
        use Queue::{Compute, Exchange, Far};
        let home = Region::Home(Payload::Keys);
        let both = |queue| {
            let uses = [SLOT, home].map(|region| Use { rank: 0, region, writes: false });
            Command { uses: uses.into(), ..command(queue, SLOT, false) }
        };
        let after_it =
            Command { uses: vec![reads(SLOT), writes(home)], ..command(Far, SLOT, false) };
        let (instructions, _) =
            synchronised(&[command(Exchange, SLOT, true), after_it, both(Compute)]);
        let expected = [
            Enqueue(0),
            Record(Exchange, 0),
            Wait(Far, 0),
            Enqueue(1),
            Record(Far, 0),
            Wait(Compute, 0),
            Enqueue(2),
        ];
        assert_eq!(instructions, expected);
        // Without that wait of the far queue, the last command waits for both queues.
        let (instructions, events) =
            synchronised(&[command(Exchange, SLOT, true), command(Far, home, true), both(Compute)]);
        let waits = instructions.iter().filter(|one| matches!(one, Wait(Compute, _)));
        assert_eq!((waits.count(), events), (2, 2));
    }

    #[test]
    fn two_reads_do_not_wait_for_each_other() {
        let home = Region::Home(Payload::Keys);
        let commands =
            [command(Queue::Compute, home, false), command(Queue::Exchange, home, false)];
        let (instructions, _) = synchronised(&commands);
        assert_eq!(instructions, [Instruction::Enqueue(0), Instruction::Enqueue(1)]);
    }
}
