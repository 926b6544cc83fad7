//! Proves that nothing in a program races, however its streams overlap.
//!
//! Each call gets a clock: for each stream, the number of its calls that are over before this call
//! starts. The earlier calls of its own stream are over. A wait also adds the clock of the record
//! that it waits for. Two calls are ordered if the clock of one counts the other. Two calls that
//! touch the same bytes, one of them writing, must be ordered.

use std::ops::Range;

use burst_attention::cuda::driver::{Block, Stream};

use super::touch::{Touch, common};
use super::{Operation, Program};

/// A race: two parties touch the same bytes, one of them writes, and nothing orders them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{first} and {second}: both touch bytes {:#x}..{:#x}, and {missing}",
    bytes.start,
    bytes.end
)]
pub struct Race {
    /// The party that was enqueued first.
    pub first: Party,
    /// The other party. It is the same call as the first where one call conflicts with itself.
    pub second: Party,
    /// Bytes that both parties touch.
    pub bytes: Range<u64>,
    /// What must be added to order the parties.
    pub missing: String,
}

/// One side of a race.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Party {
    /// The work that XLA enqueued before the program. It may write any memory.
    Before,
    /// The work that XLA enqueues after the program. It may write any memory.
    After,
    /// A call of the program.
    Call {
        /// Its index.
        index: usize,
        /// The call and its use of the bytes, in words.
        what: String,
    },
}

impl std::fmt::Display for Party {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Party::Before => write!(f, "the program before this one"),
            Party::After => write!(f, "the program after this one"),
            Party::Call { what, .. } => write!(f, "{what}"),
        }
    }
}

/// Checks that the program of one device orders every two calls that touch the same bytes, one of
/// them writing. The work before and the work after the program run on the compute stream and count
/// as writing all memory.
///
/// # Errors
/// The first [`Race`].
pub fn check(program: &Program) -> Result<(), Race> {
    let touches = touches(program);
    ordered(program, &touches.iter().map(Vec::as_slice).collect::<Vec<_>>())
}

/// Returns the memory that the work before, each call and the work after touch.
fn touches(program: &Program) -> Vec<Vec<Touch>> {
    Clocks::of(program).items.iter().map(|item| item.touches(program)).collect()
}

fn ordered(program: &Program, touches: &[&[Touch]]) -> Result<(), Race> {
    let clocks = Clocks::of(program);
    for second in 0..clocks.items.len() {
        check_alone(program, &clocks.items[second], touches[second])?;
        for first in (0..second).filter(|&first| !clocks.is_before(first, second)) {
            if let Some((one, other, bytes)) = conflict(touches[first], touches[second]) {
                return Err(Race {
                    first: clocks.items[first].party(program, one),
                    second: clocks.items[second].party(program, other),
                    bytes,
                    missing: clocks.missing(first, second),
                });
            }
        }
    }
    Ok(())
}

/// Returns the records and waits without which still nothing races.
pub fn unneeded(program: &Program) -> Vec<Mutation> {
    let touches = touches(program);
    let without = |index: usize| {
        let mut rest: Vec<&[Touch]> = touches.iter().map(Vec::as_slice).collect();
        // Index 0 holds the memory of the work before the program.
        rest.remove(index + 1);
        rest
    };
    let mutations = mutations(program).into_iter();
    mutations.filter(|one| ordered(&one.program, &without(one.index)).is_ok()).collect()
}

/// A program with one record or wait removed.
#[derive(Debug, Clone, PartialEq)]
pub struct Mutation {
    /// The remaining program.
    pub program: Program,
    /// The index of the removed call.
    pub index: usize,
    /// The removed call, in words.
    pub removed: String,
}

/// Returns all programs with one record or one wait less.
pub fn mutations(program: &Program) -> Vec<Mutation> {
    let calls = program.calls.iter().enumerate();
    let events = calls
        .filter(|(_, call)| matches!(call.operation, Operation::Record(_) | Operation::Wait(_)));
    let without = |(index, _)| {
        let mut shorter = program.clone();
        shorter.calls.remove(index);
        Mutation { program: shorter, index, removed: program.describe(index) }
    };
    events.map(without).collect()
}

/// A call, or the work before or after the program.
struct Item {
    /// The index of the call; `None` for the work before and after.
    call: Option<usize>,
    /// The index of its stream.
    stream: usize,
    /// For each stream the number of items that are over before this item starts. The count of its
    /// own stream includes the item.
    clock: Vec<usize>,
}

impl Item {
    fn touches(&self, program: &Program) -> Vec<Touch> {
        let everything = || {
            let block = Block::run(0, u64::MAX);
            vec![Touch { name: "all memory".into(), block, writes: true }]
        };
        self.call.map_or_else(everything, |call| program.calls[call].operation.touches())
    }

    fn party(&self, program: &Program, touch: &Touch) -> Party {
        match self.call {
            Some(index) => {
                let verb = if touch.writes { "writes" } else { "reads" };
                let what = format!("{} ({verb} {})", program.describe(index), touch.name);
                Party::Call { index, what }
            }
            // The work before the program is the first item of its stream.
            None if self.clock[self.stream] == 1 => Party::Before,
            None => Party::After,
        }
    }
}

/// The clocks of all items.
struct Clocks {
    streams: Vec<Stream>,
    items: Vec<Item>,
}

impl Clocks {
    fn of(program: &Program) -> Clocks {
        let mut streams = vec![program.compute];
        for call in &program.calls {
            if !streams.contains(&call.stream) {
                streams.push(call.stream);
            }
        }
        let mut now = vec![vec![0; streams.len()]; streams.len()];
        let (mut items, awaited) = (Vec::new(), program.awaited());
        let mut add = |call: Option<usize>, stream: usize| {
            // Item 0 is the work before the program, so call n is item n + 1.
            let awaited = call.and_then(|call| awaited[call]).map(|record| record + 1);
            if let Some(record) = awaited {
                let known: &Item = &items[record];
                let clocks = now[stream].iter_mut().zip(&known.clock);
                clocks.for_each(|(own, known)| *own = *known.max(own));
            }
            now[stream][stream] += 1;
            items.push(Item { call, stream, clock: now[stream].clone() });
        };
        add(None, 0);
        for (index, call) in program.calls.iter().enumerate() {
            let stream = streams.iter().position(|stream| *stream == call.stream);
            add(Some(index), stream.expect("all streams were gathered"));
        }
        add(None, 0);
        Clocks { streams, items }
    }

    /// Whether `first` is over before `second` starts; `first` was enqueued first.
    fn is_before(&self, first: usize, second: usize) -> bool {
        let Item { stream, clock, .. } = &self.items[first];
        clock[*stream] <= self.items[second].clock[*stream]
    }

    /// Describes the event that the second item must wait for, and how far its stream has waited.
    fn missing(&self, first: usize, second: usize) -> String {
        let [one, other] = [first, second].map(|item| &self.items[item]);
        let [from, to] = [one, other].map(|item| format!("{:#x}", self.streams[item.stream].0));
        let known = other.clock[one.stream];
        let on_stream = |item: &&Item| item.stream == one.stream;
        let last = self.items.iter().filter(on_stream).take(known).last();
        let until = match last.map(|item| item.call) {
            None => "has waited for nothing of it".to_owned(),
            Some(None) => "has waited only for the program before this one".to_owned(),
            Some(Some(call)) => format!("has waited only for what ends with call {call}"),
        };
        format!(
            "stream {to} must wait, before the second, for an event that stream {from} records \
             after the first: so far it {until}"
        )
    }
}

/// Returns the first bytes that both items touch and one of them writes.
fn conflict<'a>(
    first: &'a [Touch],
    second: &'a [Touch],
) -> Option<(&'a Touch, &'a Touch, Range<u64>)> {
    let pairs = first.iter().flat_map(|one| second.iter().map(move |other| (one, other)));
    pairs
        .filter(|(one, other)| one.writes || other.writes)
        .find_map(|(one, other)| common(&one.block, &other.block).map(|bytes| (one, other, bytes)))
}

/// Checks that a call touches the bytes that it writes in no other way, since its parts have no
/// order.
fn check_alone(program: &Program, item: &Item, touches: &[Touch]) -> Result<(), Race> {
    for (n, one) in touches.iter().enumerate() {
        if let Some((one, other, bytes)) = conflict(std::slice::from_ref(one), &touches[n + 1..]) {
            let [first, second] = [one, other].map(|touch| item.party(program, touch));
            let missing = "one call does both, in no order: the arrays must lie apart".into();
            return Err(Race { first, second, bytes, missing });
        }
    }
    Ok(())
}
