//! Proves that nothing in a program races, however its streams overlap.
//!
//! Each call gets a clock: for each stream, the number of its calls that are over before this call
//! starts. The earlier calls of its own stream are over. A wait also adds the clock of the record
//! that it waits for. Two calls are ordered if the clock of one counts the other. Two calls that
//! touch the same bytes, one of them writing, must be ordered.

use std::ops::Range;

use burst_attention::cuda::driver::{Block, Event};

use super::touch::{Touch, common};
use super::{Operation, Program};

/// Checks that the program of one device orders every two calls that touch the same bytes, one of
/// them writing. The work before and the work after the program run on the compute stream and count
/// as writing all memory.
///
/// # Errors
/// The first race, in words.
pub fn check(program: &Program) -> Result<(), String> {
    let mut conflicts = Conflicts::of(program);
    let Some((first, second)) = race(program, &mut conflicts) else { return Ok(()) };
    let (one, other, bytes) = conflicts.find(first, second).expect("they conflict");
    let party = |item: usize, touch: &Touch| match item.checked_sub(1) {
        None => "the program before this one".into(),
        Some(call) if call == program.calls.len() => "the program after this one".into(),
        Some(call) => {
            let verb = if touch.writes { "writes" } else { "reads" };
            format!("{} ({verb} {})", program.describe(call), touch.name)
        }
    };
    let (first, second) = (party(first, one), party(second, other));
    Err(format!("{first} and {second}: nothing orders them, and both touch bytes {bytes:#x?}"))
}

/// Returns the records and waits without which still nothing races, in words.
pub fn unneeded(program: &Program) -> Vec<String> {
    let (mut conflicts, mut other) = (Conflicts::of(program), program.clone());
    let mut is_unneeded = |index: &usize| {
        // A wait for an event that was never recorded does nothing.
        let nothing = Operation::Wait(Event(0));
        let event = std::mem::replace(&mut other.calls[*index].operation, nothing);
        let is_unneeded = race(&other, &mut conflicts).is_none();
        other.calls[*index].operation = event;
        is_unneeded
    };
    let calls = program.calls.iter().enumerate();
    let events = calls
        .filter(|(_, call)| matches!(call.operation, Operation::Record(_) | Operation::Wait(_)));
    let indices = events.map(|(index, _)| index).filter(|index| is_unneeded(index));
    indices.map(|index| program.describe(index)).collect()
}

/// Returns the first two items of a program that conflict and have no order. Both are the same where
/// parts of one call conflict.
fn race(program: &Program, conflicts: &mut Conflicts) -> Option<(usize, usize)> {
    let items = items(program);
    let pairs = (0..items.len()).flat_map(|second| (0..=second).map(move |first| (first, second)));
    let mut unordered =
        pairs.filter(|&(first, second)| first == second || !items[first].is_before(&items[second]));
    unordered.find(|&(first, second)| conflicts.has(first, second))
}

/// Which items of a program conflict: they touch the same bytes, and one of them writes.
struct Conflicts {
    /// The memory that each item touches.
    touches: Vec<Vec<Touch>>,
    /// The answers so far.
    known: Vec<Option<bool>>,
}

impl Conflicts {
    fn of(program: &Program) -> Conflicts {
        let everything = || {
            let block = Block::one_line(0, u64::MAX);
            vec![Touch { name: "all memory".into(), block, writes: true }]
        };
        let calls = program.calls.iter().map(|call| call.operation.touches());
        let touches: Vec<_> =
            [everything()].into_iter().chain(calls).chain([everything()]).collect();
        let known = vec![None; touches.len().pow(2)];
        Conflicts { touches, known }
    }

    fn has(&mut self, first: usize, second: usize) -> bool {
        let pair = first * self.touches.len() + second;
        let found = self.known[pair].unwrap_or_else(|| self.find(first, second).is_some());
        self.known[pair] = Some(found);
        found
    }

    /// Returns the first conflict of two items, or of the parts of one item.
    fn find(&self, first: usize, second: usize) -> Option<(&Touch, &Touch, Range<u64>)> {
        let [one, other] = [first, second].map(|item| self.touches[item].iter().enumerate());
        let pairs = one.flat_map(|one| other.clone().map(move |other| (one, other)));
        pairs
            .filter(|((n, one), (m, other))| {
                (first != second || n < m) && (one.writes || other.writes)
            })
            .find_map(|((_, one), (_, other))| {
                common(&one.block, &other.block).map(|bytes| (one, other, bytes))
            })
    }
}

/// A call, or the work before or after the program.
struct Item {
    /// The index of its stream.
    stream: usize,
    /// For each stream the number of items that are over before this item starts. The count of its
    /// own stream includes the item.
    clock: Vec<usize>,
}

impl Item {
    /// Whether this item is over before `second` starts; this one was enqueued first.
    fn is_before(&self, second: &Item) -> bool {
        self.clock[self.stream] <= second.clock[self.stream]
    }
}

/// Returns the work before the program, its calls, and the work after it.
fn items(program: &Program) -> Vec<Item> {
    let mut streams = vec![program.compute];
    for call in &program.calls {
        if !streams.contains(&call.stream) {
            streams.push(call.stream);
        }
    }
    let mut now = vec![vec![0; streams.len()]; streams.len()];
    let mut items: Vec<Item> = vec![];
    let mut add = |stream: usize, awaited: Option<usize>| {
        // Item 0 is the work before the program, so call n is item n + 1.
        if let Some(record) = awaited {
            let clocks = now[stream].iter_mut().zip(&items[record + 1].clock);
            clocks.for_each(|(own, known)| *own = *known.max(own));
        }
        now[stream][stream] += 1;
        items.push(Item { stream, clock: now[stream].clone() });
    };
    add(0, None);
    for (call, awaited) in program.calls.iter().zip(program.awaited()) {
        let stream = streams.iter().position(|stream| *stream == call.stream);
        add(stream.expect("all streams were gathered"), awaited);
    }
    add(0, None);
    items
}
