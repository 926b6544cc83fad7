//! Threads around the rendezvous: starts rings, wakes up for missing ranks, tells everybody.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use burst_attention::host::threads;

use crate::clock::IdleClock;
use crate::error::{Error, Result};
use crate::rendezvous::{Call, Key, Outcome, Place, Rendezvous};

/// Whom to tell that a rank's call is through. Telling may run the rest of a device's program.
pub trait Completion: Send + 'static {
    /// Tells, once. It is called on a thread that does nothing else, without any lock.
    fn complete(self, outcome: std::result::Result<(), &Error>);
}

/// What a rank brings along.
#[derive(Debug)]
pub struct Member<B, C> {
    /// Its memory.
    pub buffers: B,
    /// Whom to tell.
    pub completion: C,
}

/// Meeting point of all ranks of a process. Nothing here blocks the caller.
#[derive(Debug)]
pub struct Hub<B, C> {
    shared: Mutex<Shared<B, C>>,
    changed: Condvar,
}

#[derive(Debug)]
struct Shared<B, C> {
    rendezvous: Rendezvous<Member<B, C>>,
    clock: IdleClock,
    limit: Duration,
    /// A thread watches for missing ranks.
    watched: bool,
    /// That thread waits for the clock to go on.
    stalled: bool,
}

impl<B: Send + 'static, C: Completion> Hub<B, C> {
    /// An empty one; ranks may be `limit` late.
    pub fn new(limit: Duration) -> Hub<B, C> {
        let shared = Shared {
            rendezvous: Rendezvous::default(),
            clock: IdleClock::new(Instant::now()),
            limit,
            watched: false,
            stalled: false,
        };
        Hub { shared: Mutex::new(shared), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Shared<B, C>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes how late ranks may be, also for those that are awaited now.
    pub fn set_limit(&self, limit: Duration) {
        self.lock().limit = limit;
        self.changed.notify_all();
    }

    /// A call site is gone.
    pub fn forget(&self, site: u64) {
        self.lock().rendezvous.forget(site);
    }

    /// A rank arrives. If it is the last one, `run` gets the buffers of all, by rank, on a thread
    /// of its own; when it is through, every rank is told, each on a thread of its own.
    pub fn arrive(
        &'static self,
        key: Key,
        place: Place,
        call: &Call,
        member: Member<B, C>,
        run: impl FnOnce(Vec<B>) -> Result<()> + Send + 'static,
    ) {
        let mut shared = self.lock();
        let now = shared.clock.read(Instant::now());
        match shared.rendezvous.arrive(key, place, call, member, now) {
            Outcome::Waiting => {
                let watch = !std::mem::replace(&mut shared.watched, true);
                drop(shared);
                if watch {
                    threads::spawn(move || self.watch());
                }
            }
            Outcome::Complete(members) => {
                shared.clock.stop(Instant::now());
                drop(shared);
                let computing = Computing(self);
                threads::spawn(move || {
                    let (buffers, completions): (Vec<_>, Vec<_>) =
                        members.into_iter().map(|m| (m.buffers, m.completion)).unzip();
                    let outcome = catch_unwind(AssertUnwindSafe(|| run(buffers)))
                        .unwrap_or_else(|payload| Err(Error::panic(payload)));
                    drop(computing);
                    tell(completions, &outcome.map_err(Arc::new));
                });
            }
            Outcome::Failed(failure) => {
                drop(shared);
                tell(failure.members.into_iter().map(|m| m.completion), &Err(failure.error));
            }
        }
    }

    /// Fails sessions whose ranks stay missing, until none is open.
    fn watch(&self) {
        let mut shared = self.lock();
        loop {
            let (now, limit) = (shared.clock.read(Instant::now()), shared.limit);
            let failures = shared.rendezvous.expire(now, limit);
            if !failures.is_empty() {
                drop(shared);
                for failure in failures {
                    tell(failure.members.into_iter().map(|m| m.completion), &Err(failure.error));
                }
                shared = self.lock();
                continue;
            }
            let Some(due) = shared.rendezvous.next_due(limit) else {
                shared.watched = false;
                return;
            };
            shared.stalled = shared.clock.stands();
            shared = if shared.stalled {
                self.changed.wait(shared).unwrap_or_else(PoisonError::into_inner)
            } else {
                let waited = self.changed.wait_timeout(shared, due - now);
                waited.unwrap_or_else(PoisonError::into_inner).0
            };
            shared.stalled = false;
        }
    }
}

/// Tells everybody, each on a thread of its own: what runs there may wait for the others.
fn tell<C: Completion>(
    completions: impl IntoIterator<Item = C>,
    outcome: &std::result::Result<(), Arc<Error>>,
) {
    for completion in completions {
        let outcome = outcome.clone();
        threads::spawn(move || {
            completion.complete(outcome.as_ref().copied().map_err(|error| &**error))
        });
    }
}

/// Lets the clock go on when a ring is through, whichever way.
struct Computing<B: Send + 'static, C: Completion>(&'static Hub<B, C>);

impl<B: Send + 'static, C: Completion> Drop for Computing<B, C> {
    fn drop(&mut self) {
        let mut shared = self.0.lock();
        shared.clock.resume(Instant::now());
        if shared.stalled && !shared.clock.stands() {
            self.0.changed.notify_all();
        }
    }
}

#[cfg(test)]
#[path = "hub_tests.rs"]
mod tests;
