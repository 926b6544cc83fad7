//! The meeting of the ranks of a ring: pure bookkeeping, without threads, clocks or XLA.
//!
//! A call site may run often, in many launches and on many rings, and devices may arrive in any
//! order. A *session* is one meeting of one ring. The sessions of a (call site, launch, ring) form
//! a queue, and a rank joins the first session that it has not yet been in. Each device runs its
//! program in order, so all ranks of a ring join the same session. A session that fails stays
//! behind as a tombstone, so that late ranks get its error at once.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use burst_attention::schedule::Family;
use burst_attention::{Pass, Problem, Travels};

use crate::error::{Error, Result};

/// Most tombstones that are kept. A rank that comes after its tombstone is gone waits like the
/// first rank of a session.
const TOMBSTONES: usize = 1024;

/// The key of a queue of sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    /// The call site: one for each custom call of a compiled program.
    pub site: u64,
    /// The launch of the program.
    pub run: i64,
    /// The ring: the number of the group of devices, of all groups that the mesh has along the
    /// ring's axis.
    pub ring: i32,
}

/// The part of a call that all ranks of a ring must agree on.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// What the ring computes; `None` where its ranks do nothing but wait for each other.
    pub work: Option<Work>,
    /// The length of the ring.
    pub world_size: usize,
    /// Name of the mesh axis, as the user wrote it.
    pub axis: Arc<str>,
}

/// The computation of a ring.
#[derive(Debug, Clone, PartialEq)]
pub struct Work {
    /// The problem.
    pub problem: Problem,
    /// Forward or backward.
    pub pass: Pass,
    /// The side that travels; `None` leaves the choice to the core.
    pub travels: Option<Travels>,
    /// The family of schedules.
    pub family: Family,
}

/// A rank that arrives, and its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankDevice {
    /// Index in the ring, as the program says.
    pub rank: i32,
    /// The runtime's number of the device.
    pub device: i32,
}

/// The outcome of an arrival. `M` is a rank's part in the ring.
#[derive(Debug, PartialEq)]
pub enum Outcome<M> {
    /// Other ranks of the session are missing.
    Waiting,
    /// All ranks have come: the members in the order of the ranks.
    Complete(Vec<M>),
    /// The session failed, and the calls of its members must end.
    Failed(Failure<M>),
}

/// A session that failed, and its members.
#[derive(Debug, PartialEq)]
pub struct Failure<M> {
    /// The reason.
    pub error: Arc<Error>,
    /// The members, in no particular order.
    pub members: Vec<M>,
}

#[derive(Debug)]
enum Seat<M> {
    Empty,
    Taken {
        device: i32,
        member: M,
    },
    /// The rank came, and has got the error of the session.
    Left,
}

#[derive(Debug)]
struct Session<M> {
    call: Call,
    since: Duration,
    seats: Vec<Seat<M>>,
    failed: Option<Arc<Error>>,
}

/// All sessions of a process.
#[derive(Debug)]
pub struct Rendezvous<M> {
    queues: HashMap<Key, VecDeque<Session<M>>>,
    /// Queues with failed sessions, the oldest failure first.
    tombstones: VecDeque<Key>,
}

impl<M> Default for Rendezvous<M> {
    fn default() -> Self {
        Rendezvous { queues: HashMap::new(), tombstones: VecDeque::new() }
    }
}

impl<M> Rendezvous<M> {
    /// Lets a rank arrive at time `now`, with its member or the reason why it can't take part. Such
    /// a reason fails the session.
    pub fn arrive(
        &mut self,
        key: Key,
        arriving: RankDevice,
        call: &Call,
        member: Result<M>,
        now: Duration,
    ) -> Outcome<M> {
        let queue = self.queues.entry(key).or_default();
        let Some(rank) = arriving.index(call) else {
            let what = format!(
                "device {} says it is rank {} of {}",
                arriving.device, arriving.rank, call.world_size
            );
            return Outcome::Failed(self.misfit(key, call, &what, member, now));
        };
        if let Some(other) = queue.iter().find_map(|session| session.rival(rank, arriving.device)) {
            let what =
                format!("devices {other} and {} both say they are rank {rank}", arriving.device);
            return Outcome::Failed(self.misfit(key, call, &what, member, now));
        }
        let lacks_rank =
            |session: &Session<M>| matches!(session.seats.get(rank), Some(Seat::Empty));
        let index = queue.iter().position(lacks_rank).unwrap_or_else(|| {
            queue.push_back(Session::new(call, now));
            queue.len() - 1
        });
        let session = &mut queue[index];
        if let Some(error) = session.failed.clone() {
            session.seats[rank] = Seat::Left;
            self.sweep(key);
            return Outcome::Failed(Failure { error, members: member.into_iter().collect() });
        }
        if session.call != *call {
            let what = format!("rank {rank} calls with {call}, others with {}", session.call);
            return Outcome::Failed(self.misfit(key, call, &what, member, now));
        }
        let member = match member {
            Ok(member) => member,
            Err(error) => {
                let failure = session.fail(error);
                session.seats[rank] = Seat::Left;
                self.entomb(key);
                return Outcome::Failed(failure);
            }
        };
        session.seats[rank] = Seat::Taken { device: arriving.device, member };
        if session.arrived().count() < session.seats.len() {
            return Outcome::Waiting;
        }
        let session = queue.remove(index).expect("the session was just found");
        self.sweep(key);
        Outcome::Complete(session.seats.into_iter().filter_map(Seat::member).collect())
    }

    /// Fails every session whose first rank came at least `timeout` before `now`.
    pub fn expire(&mut self, now: Duration, timeout: Duration) -> Vec<Failure<M>> {
        let late = |session: &Session<M>| session.failed.is_none() && session.due(timeout) <= now;
        let keys: Vec<Key> = self
            .queues
            .iter()
            .filter_map(|(key, queue)| queue.iter().any(late).then_some(*key))
            .collect();
        let mut failures = Vec::new();
        for key in keys {
            let Some(queue) = self.queues.get_mut(&key) else { continue };
            for session in queue.iter_mut().filter(|session| late(session)) {
                let error = session.missing(key.ring, timeout);
                failures.push(session.fail(error));
                self.tombstones.push_back(key);
            }
        }
        self.bury();
        failures
    }

    /// Returns when the next session fails if no rank comes.
    pub fn next_due(&self, timeout: Duration) -> Option<Duration> {
        let sessions = self.queues.values().flatten().filter(|session| session.failed.is_none());
        sessions.map(|session| session.due(timeout)).min()
    }

    /// Drops the tombstones of a call site that is gone.
    pub fn forget(&mut self, site: u64) {
        self.queues.retain(|key, queue| {
            queue.retain(|session| key.site != site || session.failed.is_none());
            !queue.is_empty()
        });
        self.tombstones.retain(|key| key.site != site);
    }

    /// Fails the waiting session, or else a new one, because a rank does not fit.
    fn misfit(
        &mut self,
        key: Key,
        call: &Call,
        what: &str,
        member: Result<M>,
        now: Duration,
    ) -> Failure<M> {
        let error = Error::Disagreement {
            axis: call.axis.to_string(),
            ring: key.ring,
            what: what.to_string(),
        };
        let queue = self.queues.entry(key).or_default();
        let waiting = queue.iter().position(|session| session.failed.is_none());
        let index = waiting.unwrap_or_else(|| {
            queue.push_back(Session::new(call, now));
            queue.len() - 1
        });
        let mut failure = queue[index].fail(error);
        failure.members.extend(member);
        self.entomb(key);
        failure
    }

    /// Notes that a session of this queue has failed and stays for late ranks.
    fn entomb(&mut self, key: Key) {
        self.tombstones.push_back(key);
        self.sweep(key);
        self.bury();
    }

    /// Removes the sessions that all ranks have left.
    fn sweep(&mut self, key: Key) {
        if let Some(queue) = self.queues.get_mut(&key) {
            queue.retain(|session| !session.seats.iter().all(|seat| matches!(seat, Seat::Left)));
            if queue.is_empty() {
                self.queues.remove(&key);
            }
        }
    }

    /// Drops the oldest tombstones beyond [`TOMBSTONES`].
    fn bury(&mut self) {
        while self.tombstones.len() > TOMBSTONES {
            let Some(key) = self.tombstones.pop_front() else { return };
            let Some(queue) = self.queues.get_mut(&key) else { continue };
            if let Some(index) = queue.iter().position(|session| session.failed.is_some()) {
                queue.remove(index);
            }
            self.sweep(key);
        }
    }
}

impl RankDevice {
    /// Returns the rank, if the ring has it.
    fn index(self, call: &Call) -> Option<usize> {
        usize::try_from(self.rank).ok().filter(|&rank| rank < call.world_size)
    }
}

impl<M> Session<M> {
    fn new(call: &Call, now: Duration) -> Session<M> {
        let seats = (0..call.world_size).map(|_| Seat::Empty).collect();
        Session { call: call.clone(), since: now, seats, failed: None }
    }

    fn due(&self, timeout: Duration) -> Duration {
        self.since.saturating_add(timeout)
    }

    fn arrived(&self) -> impl Iterator<Item = usize> {
        let taken = |(rank, seat)| matches!(seat, &Seat::Taken { .. }).then_some(rank);
        self.seats.iter().enumerate().filter_map(taken)
    }

    /// Returns the device, other than `device`, that has come as `rank`.
    fn rival(&self, rank: usize, device: i32) -> Option<i32> {
        match self.seats.get(rank) {
            Some(Seat::Taken { device: other, .. }) if *other != device => Some(*other),
            _ => None,
        }
    }

    fn fail(&mut self, error: Error) -> Failure<M> {
        let error = Arc::new(error);
        self.failed = Some(error.clone());
        let leave = |seat: &mut Seat<M>| match seat {
            Seat::Taken { .. } => std::mem::replace(seat, Seat::Left).member(),
            Seat::Empty | Seat::Left => None,
        };
        Failure { error, members: self.seats.iter_mut().filter_map(leave).collect() }
    }

    fn missing(&self, ring: i32, timeout: Duration) -> Error {
        let arrived: Vec<usize> = self.arrived().collect();
        let missing: Vec<usize> =
            (0..self.seats.len()).filter(|rank| !arrived.contains(rank)).collect();
        Error::MissingRanks {
            axis: self.call.axis.to_string(),
            ring,
            world_size: self.seats.len(),
            missing: in_words(&missing),
            arrived: in_words(&arrived),
            timeout,
        }
    }
}

impl<M> Seat<M> {
    fn member(self) -> Option<M> {
        match self {
            Seat::Taken { member, .. } => Some(member),
            Seat::Empty | Seat::Left => None,
        }
    }
}

/// Returns `rank 3` or `ranks 0-3, 5` for ascending `ranks`.
fn in_words(ranks: &[usize]) -> String {
    let runs = ranks.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [only] => only.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => unreachable!("runs are not empty"),
    });
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", runs.collect::<Vec<_>>().join(", "))
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.work {
            Some(work) => write!(f, "{work}, world_size {}", self.world_size),
            None => write!(f, "no work, world_size {}", self.world_size),
        }
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Problem { batch, q_len, kv_len, heads, kv_heads, head_dim, dtype, .. } = &self.problem;
        write!(
            f,
            "{:?} q [{batch}, {q_len}, {heads}, {head_dim}], k and v [{batch}, {kv_len}, \
             {kv_heads}, {head_dim}], {dtype}, layout {}, {:?}, scale {}, {:?}",
            self.pass,
            self.problem.layout,
            self.problem.window,
            self.problem.softmax_scale,
            self.problem.features,
        )
    }
}

#[cfg(test)]
mod tests;
