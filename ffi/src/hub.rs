//! Threads around the rendezvous: starts rings, wakes up for missing ranks, tells everybody.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use burst_attention::host::threads::Reserved;

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

/// A member and the thread on which it will be told.
#[derive(Debug)]
struct Guest<B, C> {
    member: Member<B, C>,
    thread: Reserved,
}

/// Meeting point of all ranks of a process. Nothing here blocks the caller.
#[derive(Debug)]
pub struct Hub<B, C> {
    shared: Mutex<Shared<B, C>>,
    changed: Condvar,
    reserve: fn() -> io::Result<Reserved>,
}

#[derive(Debug)]
struct Shared<B, C> {
    rendezvous: Rendezvous<Guest<B, C>>,
    clock: IdleClock,
    limit: Duration,
    /// A thread watches for missing ranks.
    watched: bool,
    /// That thread waits for the clock to go on.
    stalled: bool,
}

impl<B: Send + 'static, C: Completion> Hub<B, C> {
    /// An empty one; ranks may be `limit` late. Threads come from `reserve`, such as
    /// [`burst_attention::host::threads::reserve`].
    pub fn new(limit: Duration, reserve: fn() -> io::Result<Reserved>) -> Hub<B, C> {
        let shared = Shared {
            rendezvous: Rendezvous::default(),
            clock: IdleClock::new(Instant::now()),
            limit,
            watched: false,
            stalled: false,
        };
        Hub { shared: Mutex::new(shared), changed: Condvar::new(), reserve }
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

    /// A rank arrives, with what `join` returns. If it is the last one, `run` gets the buffers of
    /// all, by rank, on a thread of its own. When `run` is through, every rank is told, each on a
    /// thread of its own.
    ///
    /// The threads that watch, run and tell are reserved before the rank joins. So whatever happens
    /// later, every rank can be told.
    ///
    /// # Errors
    /// If the operating system refuses a thread, or `join` fails. Then the rank takes no part, and
    /// the other ranks of its ring are told why.
    pub fn arrive(
        &'static self,
        key: Key,
        place: Place,
        call: &Call,
        join: impl FnOnce() -> Result<Member<B, C>>,
        run: impl FnOnce(Vec<B>) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let mut shared = self.lock();
        let now = shared.clock.read(Instant::now());
        // Where a session is open, somebody watches.
        let watches = !shared.watched && call.problem.world_size > 1;
        let joined = self.prepare(place, call, watches).and_then(|(thread, watcher)| {
            let member = join()?;
            Ok((Guest { member, thread }, watcher))
        });
        let (guest, watcher) =
            joined.map_or_else(|error| (Err(error), None), |(guest, watcher)| (Ok(guest), watcher));
        let answer = guest.as_ref().map(|_| ()).map_err(Clone::clone);
        match shared.rendezvous.arrive(key, place, call, guest, now) {
            Outcome::Waiting => {
                if let Some(watcher) = watcher {
                    shared.watched = true;
                    watcher.run(|| self.watch());
                }
            }
            Outcome::Complete(guests) => {
                shared.clock.stop(Instant::now());
                drop(shared);
                self.start(guests, run);
            }
            Outcome::Failed(failure) => {
                drop(shared);
                tell(failure.members.into_iter().map(told), &Err(failure.error));
            }
        }
        answer
    }

    /// Reserves the thread of a rank and, where one `watches`, the thread that does.
    fn prepare(
        &self,
        place: Place,
        call: &Call,
        watches: bool,
    ) -> Result<(Reserved, Option<Reserved>)> {
        let reserve = || {
            (self.reserve)().map_err(|refused| burst_attention::Error::NoThread {
                purpose: format!(
                    "rank {} of {} over mesh axis {:?}",
                    place.rank, call.problem.world_size, call.axis
                ),
                reason: refused.to_string(),
            })
        };
        Ok((reserve()?, if watches { Some(reserve()?) } else { None }))
    }

    /// Runs a ring on the thread of its last rank, and then tells all.
    fn start(
        &'static self,
        guests: Vec<Guest<B, C>>,
        run: impl FnOnce(Vec<B>) -> Result<()> + Send + 'static,
    ) {
        let computing = Computing(self);
        let mut buffers = Vec::new();
        let mut others = Vec::new();
        for Guest { member, thread } in guests {
            buffers.push(member.buffers);
            others.push((thread, member.completion));
        }
        let (thread, own) = others.pop().expect("a ring has a rank");
        thread.run(move || {
            let outcome = catch_unwind(AssertUnwindSafe(|| run(buffers)))
                .unwrap_or_else(|payload| Err(Error::panic(payload)))
                .map_err(Arc::new);
            drop(computing);
            tell(others, &outcome);
            own.complete(outcome.as_ref().copied().map_err(|error| &**error));
        });
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
                    tell(failure.members.into_iter().map(told), &Err(failure.error));
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

/// Whom to tell, and where.
fn told<B, C>(guest: Guest<B, C>) -> (Reserved, C) {
    (guest.thread, guest.member.completion)
}

/// Tells each rank on a thread of its own, because what runs there may wait for other ranks.
fn tell<C: Completion>(
    all: impl IntoIterator<Item = (Reserved, C)>,
    outcome: &std::result::Result<(), Arc<Error>>,
) {
    for (thread, completion) in all {
        let outcome = outcome.clone();
        thread.run(move || {
            completion.complete(outcome.as_ref().copied().map_err(|error| &**error));
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
