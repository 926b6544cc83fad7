//! What happens when.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Events to come, which the clock returns in the order of their time. Events of the same time come
/// in the order in which they were added.
pub(super) struct Clock<T> {
    now: f64,
    count: u64,
    /// Time, number and event. The bits of a positive time sort as the time does.
    coming: BinaryHeap<Reverse<(u64, u64, T)>>,
}

impl<T: Ord> Clock<T> {
    pub fn new() -> Clock<T> {
        Clock { now: 0.0, count: 0, coming: BinaryHeap::new() }
    }

    /// Seconds from the start.
    pub fn now(&self) -> f64 {
        self.now
    }

    /// Adds an event at `time`.
    pub fn at(&mut self, time: f64, event: T) {
        self.count += 1;
        self.coming.push(Reverse((time.to_bits(), self.count, event)));
    }

    /// Returns the next event that happens without time passing.
    pub fn next_now(&mut self) -> Option<T> {
        let Reverse((time, ..)) = self.coming.peek()?;
        let is_due = f64::from_bits(*time) <= self.now;
        is_due.then(|| self.coming.pop().map(|Reverse((.., event))| event)).flatten()
    }

    /// Lets time pass until the next event. Returns whether there is one.
    pub fn pass(&mut self) -> bool {
        let next = self.coming.peek().map(|Reverse((time, ..))| f64::from_bits(*time));
        self.now = next.unwrap_or(self.now);
        next.is_some()
    }
}
