//! The order of operations, by vector clocks over streams, and a check of it.
//!
//! An operation is before another one if a stream, events, or a host that saw it end say so. Two
//! operations of which neither is before the other, and of which one writes bytes that the other
//! touches, are a race, whether or not they overlapped in time.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use crate::report::lock;

/// For each stream, the number of its last operation that is before something.
#[derive(Debug, Clone, Default)]
pub struct Clock(BTreeMap<u32, u64>);

impl Clock {
    /// Adds what another clock knows.
    pub fn join(&mut self, other: &Clock) {
        for (&stream, &number) in &other.0 {
            let known = self.0.entry(stream).or_default();
            *known = number.max(*known);
        }
    }

    /// Adds the operations of a stream up to `number`.
    pub fn advance(&mut self, stream: u32, number: u64) {
        let known = self.0.entry(stream).or_default();
        *known = number.max(*known);
    }

    fn knows(&self, stream: u32, number: u64) -> bool {
        self.0.get(&stream).is_some_and(|known| *known >= number)
    }
}

/// An operation's place in the order.
#[derive(Debug, Clone)]
pub struct Stamp {
    pub stream: u32,
    pub number: u64,
    /// What is before the operation.
    pub before: Arc<Clock>,
}

impl Stamp {
    fn is_before(&self, other: &Stamp) -> bool {
        (self.stream, self.number) == (other.stream, other.number)
            || other.before.knows(self.stream, self.number)
    }
}

/// What every host thread may rely on: operations whose end some host thread saw.
static SEEN: Mutex<Clock> = Mutex::new(Clock(BTreeMap::new()));

/// Notes that a host thread saw the operation of this stamp end, and all before it.
pub fn see(stamp: &Stamp) {
    let mut seen = lock(&SEEN);
    seen.join(&stamp.before);
    seen.advance(stamp.stream, stamp.number);
}

/// Adds to a clock what host threads have seen.
pub fn join_seen(clock: &mut Clock) {
    clock.join(&lock(&SEEN));
}

/// An operation's access to a run of bytes.
#[derive(Debug, Clone)]
pub struct Access {
    pub bytes: Range<u64>,
    pub writes: bool,
    pub stamp: Stamp,
    pub what: Arc<str>,
}

/// The accesses to one allocation that a later access can race with.
#[derive(Debug, Default)]
pub struct History(Vec<Access>);

impl History {
    /// Adds an access. Returns the accesses that it races with.
    pub fn add(&mut self, new: Access) -> Vec<Access> {
        let meets =
            |old: &Access| old.bytes.start < new.bytes.end && new.bytes.start < old.bytes.end;
        let races = |old: &&Access| {
            (old.writes || new.writes)
                && meets(old)
                && !old.stamp.is_before(&new.stamp)
                && !new.stamp.is_before(&old.stamp)
        };
        let found: Vec<Access> = self.0.iter().filter(races).cloned().collect();
        // What races with an access that is gone races with the new one, too.
        self.0.retain(|old| {
            let is_within = new.bytes.start <= old.bytes.start && old.bytes.end <= new.bytes.end;
            !(is_within && (new.writes || !old.writes) && old.stamp.is_before(&new.stamp))
        });
        self.0.push(new);
        found
    }
}
