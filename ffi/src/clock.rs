//! A clock that stands still while the library computes.

use std::time::{Duration, Instant};

/// A clock that measures the time in which the library computes nothing. A rank may be late
/// because other work keeps the cores busy, so only idle time counts against the rank timeout.
#[derive(Debug)]
pub struct IdleClock {
    idle: Duration,
    idle_since: Instant,
    computing: usize,
}

impl IdleClock {
    /// Returns a clock that shows zero at `now`, with nothing computing.
    pub fn new(now: Instant) -> IdleClock {
        IdleClock { idle: Duration::ZERO, idle_since: now, computing: 0 }
    }

    /// Returns the time that the clock shows at `now`.
    pub fn read(&self, now: Instant) -> Duration {
        if self.stands() {
            self.idle
        } else {
            self.idle + now.saturating_duration_since(self.idle_since)
        }
    }

    /// Whether anything computes.
    pub fn stands(&self) -> bool {
        self.computing > 0
    }

    /// Notes that a ring or a recurrence begins to compute.
    pub fn stop(&mut self, now: Instant) {
        self.idle = self.read(now);
        self.computing += 1;
    }

    /// Notes that a ring or a recurrence ends.
    ///
    /// # Panics
    /// If nothing computes.
    pub fn resume(&mut self, now: Instant) {
        self.computing = self.computing.checked_sub(1).expect("something computes");
        self.idle_since = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_only_while_no_ring_computes() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut clock = IdleClock::new(start);
        assert_eq!(clock.read(at(2)), Duration::from_secs(2));
        clock.stop(at(3));
        clock.stop(at(5));
        assert_eq!(clock.read(at(6)), Duration::from_secs(3));
        clock.resume(at(7));
        assert!(clock.stands());
        assert_eq!(clock.read(at(8)), Duration::from_secs(3));
        clock.resume(at(10));
        assert!(!clock.stands());
        assert_eq!(clock.read(at(14)), Duration::from_secs(7));
    }
}
