//! What happens when.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Things to come, taken out in the order of their time; of equal times, as they were put in.
pub(super) struct Clock<T> {
    now: f64,
    count: u64,
    coming: BinaryHeap<Reverse<Moment<T>>>,
}

struct Moment<T> {
    time: f64,
    number: u64,
    what: T,
}

impl<T> Clock<T> {
    pub fn new() -> Clock<T> {
        Clock { now: 0.0, count: 0, coming: BinaryHeap::new() }
    }

    /// Seconds from the start.
    pub fn now(&self) -> f64 {
        self.now
    }

    /// `what` happens at `time`.
    pub fn at(&mut self, time: f64, what: T) {
        self.count += 1;
        self.coming.push(Reverse(Moment { time, number: self.count, what }));
    }

    /// What happens next without time passing.
    pub fn next_now(&mut self) -> Option<T> {
        let due = self.coming.peek().is_some_and(|Reverse(next)| next.time <= self.now);
        due.then(|| self.coming.pop().map(|Reverse(next)| next.what)).flatten()
    }

    /// Lets time pass until something happens; false if nothing ever does.
    pub fn pass(&mut self) -> bool {
        let next = self.coming.peek().map(|Reverse(next)| next.time);
        self.now = next.unwrap_or(self.now);
        next.is_some()
    }
}

impl<T> Ord for Moment<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.time.total_cmp(&other.time).then(self.number.cmp(&other.number))
    }
}

impl<T> PartialOrd for Moment<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> PartialEq for Moment<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl<T> Eq for Moment<T> {}
