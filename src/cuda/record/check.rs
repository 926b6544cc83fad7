//! Proves that nothing in a program races, whatever streams do at the same time.
//!
//! Each call gets a clock: for each stream, how many of its calls are over before this one starts.
//! A stream's own calls are; a wait adds what was over when its event was recorded. Two calls are
//! ordered if the clock of one counts the other; two that touch the same bytes, one of them
//! writing, must be.

use std::ops::Range;

use super::touch::{Touch, common};
use super::{Program, What};
use crate::cuda::driver::{Block, Stream};

/// Two parties touch the same bytes, one of them writes, and nothing says which is first.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{first} and {second}: both touch bytes {:#x}..{:#x}, and {missing}", bytes.start, bytes.end)]
pub struct Race {
    /// The one that was enqueued first.
    pub first: Party,
    /// The other; the same as the first where a call is at odds with itself.
    pub second: Party,
    /// Bytes that both touch.
    pub bytes: Range<u64>,
    /// What would make them safe.
    pub missing: String,
}

/// One side of a race.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Party {
    /// What XLA enqueued before the program: it may still write anything.
    Before,
    /// What XLA enqueues after the program: it may write anything.
    After,
    /// A call of the program.
    Call {
        /// Its index.
        index: usize,
        /// The call and what it does with the bytes, in words.
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

/// Checks the program of one device: every two calls that touch the same bytes, one of them
/// writing, are ordered; before everything on the compute stream stands one that writes all
/// memory, and after everything on it another one.
///
/// # Errors
/// The first [`Race`].
pub fn check(program: &Program) -> Result<(), Race> {
    let touches = touches(program);
    ordered(program, &touches.iter().map(Vec::as_slice).collect::<Vec<_>>())
}

/// What the program before, each call and the program after touch.
fn touches(program: &Program) -> Vec<Vec<Touch>> {
    Order::of(program).items.iter().map(|item| item.touches(program)).collect()
}

fn ordered(program: &Program, touches: &[&[Touch]]) -> Result<(), Race> {
    let order = Order::of(program);
    for second in 0..order.items.len() {
        at_odds(program, &order.items[second], touches[second])?;
        for first in (0..second).filter(|&first| !order.is_before(first, second)) {
            if let Some((one, other, bytes)) = conflict(touches[first], touches[second]) {
                return Err(Race {
                    first: order.items[first].party(program, one),
                    second: order.items[second].party(program, other),
                    bytes,
                    missing: order.missing(first, second),
                });
            }
        }
    }
    Ok(())
}

/// The records and waits without which nothing would race either.
pub fn unneeded(program: &Program) -> Vec<Mutation> {
    let touches = touches(program);
    let without = |index: usize| {
        let mut rest: Vec<&[Touch]> = touches.iter().map(Vec::as_slice).collect();
        // In front of the calls stands the program before.
        rest.remove(index + 1);
        rest
    };
    let mutations = mutations(program).into_iter();
    mutations.filter(|one| ordered(&one.program, &without(one.index)).is_ok()).collect()
}

/// A program without one of its records or waits.
#[derive(Debug, Clone, PartialEq)]
pub struct Mutation {
    /// What is left.
    pub program: Program,
    /// Index of what was removed.
    pub index: usize,
    /// What was removed, in words.
    pub removed: String,
}

/// All programs with one record or one wait less.
pub fn mutations(program: &Program) -> Vec<Mutation> {
    let calls = program.calls.iter().enumerate();
    let events = calls.filter(|(_, call)| matches!(call.what, What::Record(_) | What::Wait(_)));
    let without = |(index, _)| {
        let mut shorter = program.clone();
        shorter.calls.remove(index);
        Mutation { program: shorter, index, removed: program.describe(index) }
    };
    events.map(without).collect()
}

/// A call, or one of the two programs around.
struct Item {
    /// Nothing for the programs around.
    call: Option<usize>,
    /// Its stream, as an index.
    stream: usize,
    /// How many of each stream's items are over before it; of its own, it counts too.
    clock: Vec<usize>,
}

impl Item {
    fn touches(&self, program: &Program) -> Vec<Touch> {
        let everything = || {
            let block = Block::run(0, u64::MAX);
            vec![Touch { name: "all memory".into(), block, writes: true }]
        };
        self.call.map_or_else(everything, |call| program.calls[call].what.touches())
    }

    fn party(&self, program: &Program, touch: &Touch) -> Party {
        match self.call {
            Some(index) => {
                let verb = if touch.writes { "writes" } else { "reads" };
                let what = format!("{} ({verb} {})", program.describe(index), touch.name);
                Party::Call { index, what }
            }
            // The one before is the first of its stream.
            None if self.clock[self.stream] == 1 => Party::Before,
            None => Party::After,
        }
    }
}

/// What is over before what.
struct Order {
    streams: Vec<Stream>,
    items: Vec<Item>,
}

impl Order {
    fn of(program: &Program) -> Order {
        let mut streams = vec![program.compute];
        for call in &program.calls {
            if !streams.contains(&call.stream) {
                streams.push(call.stream);
            }
        }
        let mut now = vec![vec![0; streams.len()]; streams.len()];
        let (mut items, awaited) = (Vec::new(), program.awaited());
        let mut add = |call: Option<usize>, stream: usize| {
            // Item 0 is the program before, so that call n is item n + 1.
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
        Order { streams, items }
    }

    /// Of two items, of which `first` was enqueued before `second`.
    fn is_before(&self, first: usize, second: usize) -> bool {
        let Item { stream, clock, .. } = &self.items[first];
        clock[*stream] <= self.items[second].clock[*stream]
    }

    /// What the second must wait for, and how far it has waited.
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

/// The first bytes that both touch and one of them writes.
fn conflict<'a>(
    first: &'a [Touch],
    second: &'a [Touch],
) -> Option<(&'a Touch, &'a Touch, Range<u64>)> {
    let pairs = first.iter().flat_map(|one| second.iter().map(move |other| (one, other)));
    pairs
        .filter(|(one, other)| one.writes || other.writes)
        .find_map(|(one, other)| common(&one.block, &other.block).map(|bytes| (one, other, bytes)))
}

/// What one call writes it must touch in no other way: its parts have no order.
fn at_odds(program: &Program, item: &Item, touches: &[Touch]) -> Result<(), Race> {
    for (n, one) in touches.iter().enumerate() {
        if let Some((one, other, bytes)) = conflict(std::slice::from_ref(one), &touches[n + 1..]) {
            let [first, second] = [one, other].map(|touch| item.party(program, touch));
            let missing = "one call does both, in no order: the arrays must lie apart".into();
            return Err(Race { first, second, bytes, missing });
        }
    }
    Ok(())
}
