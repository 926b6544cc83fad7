use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::ThreadId;

use burst_attention::host::threads;
use burst_attention::schedule::Family;
use burst_attention::{Dtype, Features, Layout, Pass, Problem, Window};

use super::*;
use crate::rendezvous::Work;

const PATIENCE: Duration = Duration::from_secs(20);
const KEY: Key = Key { site: 0, run: 0, ring: 0 };

/// A rank's completed call and the thread that completed it.
struct Completed {
    rank: i32,
    outcome: std::result::Result<(), String>,
    thread: ThreadId,
}

/// A call that reports its completion. Then it stays on its thread until the calls of all ranks are
/// completed, like a device whose program goes on with a collective.
struct Listener {
    rank: i32,
    completed: Sender<Completed>,
    all_ranks: Arc<std::sync::Barrier>,
}

impl Completion for Listener {
    fn complete(self, outcome: std::result::Result<(), &Error>) {
        let outcome = outcome.map_err(ToString::to_string);
        let thread = std::thread::current().id();
        let completed = Completed { rank: self.rank, outcome, thread };
        self.completed.send(completed).expect("the test listens");
        self.all_ranks.wait();
    }
}

fn call(world_size: usize) -> Call {
    let problem = Problem {
        batch: 1,
        q_len: 4,
        kv_len: 4,
        heads: 1,
        kv_heads: 1,
        head_dim: 8,
        value_dim: 8,
        dtype: Dtype::F32,
        window: Window::FULL,
        softmax_scale: 1.0,
        features: Features::default(),
        layout: Layout::Contiguous,
        world_size,
    };
    let work = Work { problem, family: Family::Ring, pass: Pass::Forward, travels: None };
    Call { work: Some(work), world_size, axis: "context".into() }
}

/// Returns a coordinator at which `ranks` of a ring of `world_size` have arrived. The buffers that
/// `run` gets are the numbers of the ranks.
fn meet(
    rank_timeout: Duration,
    world_size: usize,
    ranks: &[i32],
    run: impl FnOnce(Vec<i32>) -> Result<()> + Clone + Send + 'static,
) -> (&'static Coordinator<i32, Listener>, Receiver<Completed>) {
    let coordinator = Box::leak(Box::new(Coordinator::new(rank_timeout, threads::reserve)));
    let (completed, heard) = channel();
    let all_ranks = Arc::new(std::sync::Barrier::new(ranks.len()));
    for &rank in ranks {
        let (completed, all_ranks) = (completed.clone(), all_ranks.clone());
        let completion = Listener { rank, completed, all_ranks };
        let member = Member { buffers: rank, completion };
        let arriving = RankDevice { rank, device: rank };
        let arrived =
            coordinator.arrive(KEY, arriving, &call(world_size), || Ok(member), run.clone());
        arrived.expect("it joins");
    }
    (coordinator, heard)
}

/// Waits until `count` calls are completed, each on a thread of its own, and returns their
/// outcomes.
fn hear(heard: &Receiver<Completed>, count: usize) -> Vec<std::result::Result<(), String>> {
    let mut completed: Vec<Completed> =
        (0..count).map(|_| heard.recv_timeout(PATIENCE).expect("a completed call")).collect();
    let threads: std::collections::HashSet<_> = completed.iter().map(|call| call.thread).collect();
    assert_eq!(threads.len(), count, "threads are shared");
    completed.sort_by_key(|call| call.rank);
    completed.into_iter().map(|call| call.outcome).collect()
}

#[test]
fn the_last_rank_starts_the_ring_and_each_call_is_completed_on_its_own_thread() {
    let run = |ranks: Vec<i32>| {
        assert_eq!(ranks, [0, 1, 2, 3]);
        Ok(())
    };
    let (coordinator, heard) = meet(PATIENCE, 4, &[2, 0, 3, 1], run);
    assert_eq!(hear(&heard, 4), vec![Ok(()); 4]);
    assert!(!coordinator.lock().clock.stands());
}

#[test]
fn an_error_of_the_ring_reaches_every_rank() {
    let (_, heard) = meet(PATIENCE, 2, &[0, 1], |_| Err(Error::Abandoned));
    assert_eq!(hear(&heard, 2), vec![Err(Error::Abandoned.to_string()); 2]);
}

#[test]
fn a_panic_in_the_ring_becomes_an_error_on_every_rank() {
    let (coordinator, heard) = meet(PATIENCE, 2, &[0, 1], |_| panic!("wrong turn"));
    for outcome in hear(&heard, 2) {
        assert!(outcome.expect_err("it failed").contains("wrong turn"));
    }
    assert!(!coordinator.lock().clock.stands());
}

#[test]
fn the_watchdog_fails_a_ring_whose_ranks_stay_away_and_then_rests() {
    let timeout = Duration::from_millis(50);
    let (coordinator, heard) = meet(timeout, 3, &[2, 0], |_| unreachable!("rank 1 is missing"));
    for outcome in hear(&heard, 2) {
        let message = outcome.expect_err("it failed");
        assert!(message.contains("rank 1 of 3 did not reach the call within 50ms"), "{message}");
    }
    let start = Instant::now();
    while coordinator.lock().watched {
        assert!(start.elapsed() < PATIENCE, "the watchdog is idle");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_shorter_timeout_holds_for_ranks_that_already_wait() {
    let (coordinator, heard) = meet(Duration::MAX, 2, &[0], |_| unreachable!("rank 1 is missing"));
    assert!(heard.recv_timeout(Duration::from_millis(100)).is_err(), "no call is completed yet");
    coordinator.set_rank_timeout(Duration::from_millis(10));
    assert!(hear(&heard, 1)[0].is_err());
}

#[test]
fn time_in_which_a_ring_computes_does_not_count() {
    let (finish, finished) = channel::<()>();
    let finished = Arc::new(Mutex::new(finished));
    let run = move |_| {
        finished.lock().expect("no poison").recv().expect("the test finishes the ring");
        Ok(())
    };
    let (coordinator, heard) = meet(Duration::from_millis(50), 1, &[0], run);

    let (completed, late) = channel();
    let all_ranks = Arc::new(std::sync::Barrier::new(1));
    let completion = Listener { rank: 0, completed, all_ranks };
    let key = Key { ring: 1, ..KEY };
    let member = Member { buffers: 0, completion };
    let arriving = RankDevice { rank: 0, device: 0 };
    coordinator.arrive(key, arriving, &call(2), || Ok(member), |_| Ok(())).expect("it joins");
    let waited = late.recv_timeout(Duration::from_millis(300));
    assert!(waited.is_err(), "the clock stands while the first ring computes");

    finish.send(()).expect("the ring waits");
    assert_eq!(hear(&heard, 1), [Ok(())]);
    assert!(hear(&late, 1)[0].as_ref().is_err_and(|message| message.contains("rank 1 of 2")));
}

#[test]
fn time_in_which_other_work_computes_does_not_count() {
    let (coordinator, heard) = meet(Duration::MAX, 2, &[0], |_| unreachable!("rank 1 is missing"));
    let computing = coordinator.computing();
    coordinator.set_rank_timeout(Duration::from_millis(10));
    assert!(heard.recv_timeout(Duration::from_millis(200)).is_err(), "the clock stands");
    drop(computing);
    assert!(hear(&heard, 1)[0].as_ref().is_err_and(|message| message.contains("rank 1 of 2")));
}

#[test]
fn a_misfit_fails_the_ranks_that_wait() {
    let (_, heard) = meet(PATIENCE, 2, &[0, 7], |_| unreachable!("rank 7 is none"));
    for outcome in hear(&heard, 2) {
        assert!(outcome.expect_err("it failed").contains("rank 7 of 2"));
    }
}

thread_local! {
    /// How many more threads the system grants to this test.
    static GRANTED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

fn scarce() -> io::Result<Reserved> {
    let left = GRANTED.get().checked_sub(1).ok_or_else(|| io::Error::other("too many threads"))?;
    GRANTED.set(left);
    threads::reserve()
}

#[test]
fn a_refused_thread_fails_the_ring_with_the_reason_and_the_next_ring_runs() {
    let reason = |rank| format!("no thread for rank {rank} of 2 over mesh axis \"context\"");
    let coordinator: &'static Coordinator<i32, Listener> =
        Box::leak(Box::new(Coordinator::new(PATIENCE, scarce)));
    let (completed, heard) = channel();
    let arrive = |run: i64, rank: i32, together: &Arc<std::sync::Barrier>| {
        let (completed, all_ranks) = (completed.clone(), together.clone());
        let join =
            || Ok(Member { buffers: rank, completion: Listener { rank, completed, all_ranks } });
        let arriving = RankDevice { rank, device: rank };
        coordinator.arrive(Key { run, ..KEY }, arriving, &call(2), join, |_| Ok(()))
    };
    // The first rank needs one thread for itself and one that watches for the second rank. The
    // second rank needs one thread.
    for granted in 0..3 {
        GRANTED.set(granted);
        let alone = Arc::new(std::sync::Barrier::new(1));
        let run = granted as i64;
        let answers = [0, 1].map(|rank| arrive(run, rank, &alone).map_err(|e| e.to_string()));
        let refused = if granted < 2 { 0 } else { 1 };
        let message = answers[refused].as_ref().expect_err("it is refused");
        assert!(message.contains(&reason(refused)), "{message}");
        assert!(message.contains("too many threads"), "{message}");
        GRANTED.set(usize::MAX);
        if answers[1 - refused].is_ok() {
            let heard = hear(&heard, 1);
            assert!(heard[0].as_ref().is_err_and(|other| other == message), "{heard:?}");
        }
    }
    let both = Arc::new(std::sync::Barrier::new(2));
    for rank in 0..2 {
        assert_eq!(arrive(3, rank, &both), Ok(()));
    }
    assert_eq!(hear(&heard, 2), vec![Ok(()); 2]);
}
