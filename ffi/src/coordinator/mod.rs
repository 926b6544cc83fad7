//! Threads around the rendezvous: they start rings, watch for missing ranks and tell every rank the
//! outcome.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use burst_attention::host::threads::Reserved;

use crate::clock::IdleClock;
use crate::error::{Error, Result};
use crate::rendezvous::{Call, Failure, Key, Outcome, RankDevice, Rendezvous};

/// The end of a rank's call. Completing the call may run the rest of the device's program.
pub trait Completion: Send + 'static {
    /// Completes the call with its outcome. The coordinator calls it on a thread that does nothing
    /// else and holds no lock.
    fn complete(self, outcome: std::result::Result<(), &Error>);
}

/// A rank's part in a ring.
#[derive(Debug)]
pub struct Member<B, C> {
    /// The rank's memory.
    pub buffers: B,
    /// The end of the rank's call.
    pub completion: C,
}

/// A member and the thread that will complete its call.
#[derive(Debug)]
struct Arrival<B, C> {
    member: Member<B, C>,
    thread: Reserved,
}

/// The coordinator of all rings of a process. No method blocks its caller.
#[derive(Debug)]
pub struct Coordinator<B, C> {
    shared: Mutex<Shared<B, C>>,
    changed: Condvar,
    reserve: fn() -> io::Result<Reserved>,
}

#[derive(Debug)]
struct Shared<B, C> {
    rendezvous: Rendezvous<Arrival<B, C>>,
    clock: IdleClock,
    rank_timeout: Duration,
    /// Whether a thread watches for missing ranks.
    watched: bool,
    /// Whether the watching thread waits for the clock to go on.
    stalled: bool,
}

impl<B: Send + 'static, C: Completion> Coordinator<B, C> {
    /// Returns a coordinator without rings, whose ranks may be `rank_timeout` late. Threads come
    /// from `reserve`, such as [`burst_attention::host::threads::reserve`].
    pub fn new(rank_timeout: Duration, reserve: fn() -> io::Result<Reserved>) -> Coordinator<B, C> {
        let shared = Shared {
            rendezvous: Rendezvous::default(),
            clock: IdleClock::new(Instant::now()),
            rank_timeout,
            watched: false,
            stalled: false,
        };
        Coordinator { shared: Mutex::new(shared), changed: Condvar::new(), reserve }
    }

    fn lock(&self) -> MutexGuard<'_, Shared<B, C>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the rank timeout.
    pub fn rank_timeout(&self) -> Duration {
        self.lock().rank_timeout
    }

    /// Changes the rank timeout, also for rings that already wait.
    pub fn set_rank_timeout(&self, rank_timeout: Duration) {
        self.lock().rank_timeout = rank_timeout;
        self.changed.notify_all();
    }

    /// Notes that work outside of rings computes, as long as the value lives. Other ranks may be
    /// late meanwhile.
    pub fn computing(&'static self) -> impl Drop {
        self.lock().clock.stop(Instant::now());
        Computing(self)
    }

    /// Forgets a call site that is gone.
    pub fn forget(&self, site: u64) {
        self.lock().rendezvous.forget(site);
    }

    /// Lets a rank arrive with the member that `join` returns. The last rank of a ring starts `run`
    /// on a thread of its own, with the buffers of all ranks in the order of the ranks. After
    /// `run`, the coordinator completes each rank's call on a thread of its own.
    ///
    /// All threads that this needs are reserved before the rank joins. So every call can be
    /// completed, whatever happens later.
    ///
    /// # Errors
    /// If the operating system refuses a thread, or if `join` fails. Then the rank takes no part,
    /// and the calls of the other ranks of its ring end with the same error.
    pub fn arrive(
        &'static self,
        key: Key,
        arriving: RankDevice,
        call: &Call,
        join: impl FnOnce() -> Result<Member<B, C>>,
        run: impl FnOnce(Vec<B>) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let mut shared = self.lock();
        let now = shared.clock.read(Instant::now());
        // A thread watches as long as a session is open.
        let watches = !shared.watched && call.world_size > 1;
        let joined = self.prepare(arriving, call, watches).and_then(|(thread, watcher)| {
            let member = join()?;
            Ok((Arrival { member, thread }, watcher))
        });
        let (arrival, watcher) = match joined {
            Ok((arrival, watcher)) => (Ok(arrival), watcher),
            Err(error) => (Err(error), None),
        };
        let answer = arrival.as_ref().map(|_| ()).map_err(Clone::clone);
        match shared.rendezvous.arrive(key, arriving, call, arrival, now) {
            Outcome::Waiting => {
                if let Some(watcher) = watcher {
                    shared.watched = true;
                    watcher.run(|| self.watch());
                }
            }
            Outcome::Complete(arrivals) => {
                shared.clock.stop(Instant::now());
                drop(shared);
                self.start(arrivals, run);
            }
            Outcome::Failed(failure) => {
                drop(shared);
                fail(failure);
            }
        }
        answer
    }

    /// Reserves the thread of a rank and, if the rank `watches`, the thread that watches.
    fn prepare(
        &self,
        arriving: RankDevice,
        call: &Call,
        watches: bool,
    ) -> Result<(Reserved, Option<Reserved>)> {
        let reserve = || {
            (self.reserve)().map_err(|refused| burst_attention::Error::NoThread {
                purpose: format!(
                    "rank {} of {} over mesh axis {:?}",
                    arriving.rank, call.world_size, call.axis
                ),
                reason: refused.to_string(),
            })
        };
        Ok((reserve()?, if watches { Some(reserve()?) } else { None }))
    }

    /// Runs a ring on the thread of its last rank, and then completes the calls of all ranks.
    fn start(
        &'static self,
        arrivals: Vec<Arrival<B, C>>,
        run: impl FnOnce(Vec<B>) -> Result<()> + Send + 'static,
    ) {
        let computing = Computing(self);
        let mut buffers = Vec::new();
        let mut others = Vec::new();
        for Arrival { member, thread } in arrivals {
            buffers.push(member.buffers);
            others.push((thread, member.completion));
        }
        let (thread, own) = others.pop().expect("a ring has a rank");
        thread.run(move || {
            let outcome = catch_unwind(AssertUnwindSafe(|| run(buffers)))
                .unwrap_or_else(|payload| Err(Error::panic(payload)))
                .map_err(Arc::new);
            drop(computing);
            complete(others, &outcome);
            own.complete(outcome.as_ref().copied().map_err(|error| &**error));
        });
    }

    /// Fails sessions whose ranks stay missing, until no session is open.
    fn watch(&self) {
        let mut shared = self.lock();
        loop {
            let (now, timeout) = (shared.clock.read(Instant::now()), shared.rank_timeout);
            let failures = shared.rendezvous.expire(now, timeout);
            if !failures.is_empty() {
                drop(shared);
                failures.into_iter().for_each(fail);
                shared = self.lock();
                continue;
            }
            let Some(due) = shared.rendezvous.next_due(timeout) else {
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

/// Completes the calls of the members of a session that failed.
fn fail<B, C: Completion>(failure: Failure<Arrival<B, C>>) {
    let calls =
        failure.members.into_iter().map(|Arrival { member, thread }| (thread, member.completion));
    complete(calls, &Err(failure.error));
}

/// Completes each call on a thread of its own, because the program that goes on there may wait for
/// other ranks.
fn complete<C: Completion>(
    calls: impl IntoIterator<Item = (Reserved, C)>,
    outcome: &std::result::Result<(), Arc<Error>>,
) {
    for (thread, completion) in calls {
        let outcome = outcome.clone();
        thread.run(move || {
            completion.complete(outcome.as_ref().copied().map_err(|error| &**error));
        });
    }
}

/// Work that computes. The clock goes on when this is dropped, even after a panic.
struct Computing<B: Send + 'static, C: Completion>(&'static Coordinator<B, C>);

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
mod tests;
