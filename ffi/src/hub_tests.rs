use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::ThreadId;

use burst_attention::host::threads;
use burst_attention::schedule::Family;
use burst_attention::{Dtype, Features, Layout, Pass, Problem, Window};

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);
const KEY: Key = Key { site: 0, run: 0, ring: 0 };

/// Who was told what, and on which thread.
struct Told {
    rank: i32,
    outcome: std::result::Result<(), String>,
    thread: ThreadId,
}

/// Reports that it was told, and then stays on its thread until everybody was, as a device does
/// whose program goes on with a collective.
struct Listener {
    rank: i32,
    told: Sender<Told>,
    everybody: Arc<std::sync::Barrier>,
}

impl Completion for Listener {
    fn complete(self, outcome: std::result::Result<(), &Error>) {
        let outcome = outcome.map_err(ToString::to_string);
        let told = Told { rank: self.rank, outcome, thread: std::thread::current().id() };
        self.told.send(told).expect("the test listens");
        self.everybody.wait();
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
    let family = Family::Ring;
    Call { problem, family, pass: Pass::Forward, travels: None, axis: "context".into() }
}

/// A hub with `ranks` of a ring of `world_size` in it; what `run` gets is the rank numbers.
fn meet(
    limit: Duration,
    world_size: usize,
    ranks: &[i32],
    run: impl FnOnce(Vec<i32>) -> Result<()> + Clone + Send + 'static,
) -> (&'static Hub<i32, Listener>, Receiver<Told>) {
    let hub = Box::leak(Box::new(Hub::new(limit, threads::reserve)));
    let (told, heard) = channel();
    let everybody = Arc::new(std::sync::Barrier::new(ranks.len()));
    for &rank in ranks {
        let (told, everybody) = (told.clone(), everybody.clone());
        let member = Member { buffers: rank, completion: Listener { rank, told, everybody } };
        let place = Place { rank, device: rank };
        hub.arrive(KEY, place, &call(world_size), || Ok(member), run.clone()).expect("it joins");
    }
    (hub, heard)
}

/// Waits for `count` ranks to be told; each must be on a thread of its own.
fn hear(heard: &Receiver<Told>, count: usize) -> Vec<std::result::Result<(), String>> {
    let mut told: Vec<Told> =
        (0..count).map(|_| heard.recv_timeout(PATIENCE).expect("everybody is told")).collect();
    let threads: std::collections::HashSet<_> = told.iter().map(|told| told.thread).collect();
    assert_eq!(threads.len(), count, "threads are shared");
    told.sort_by_key(|told| told.rank);
    told.into_iter().map(|told| told.outcome).collect()
}

#[test]
fn the_last_rank_starts_the_ring_and_each_is_told_on_its_own_thread() {
    let run = |ranks: Vec<i32>| {
        assert_eq!(ranks, [0, 1, 2, 3]);
        Ok(())
    };
    let (hub, heard) = meet(PATIENCE, 4, &[2, 0, 3, 1], run);
    assert_eq!(hear(&heard, 4), vec![Ok(()); 4]);
    assert!(!hub.lock().clock.stands());
}

#[test]
fn an_error_of_the_ring_reaches_every_rank() {
    let (_, heard) = meet(PATIENCE, 2, &[0, 1], |_| Err(Error::Abandoned));
    assert_eq!(hear(&heard, 2), vec![Err(Error::Abandoned.to_string()); 2]);
}

#[test]
fn a_panic_in_the_ring_becomes_an_error_on_every_rank() {
    let (hub, heard) = meet(PATIENCE, 2, &[0, 1], |_| panic!("wrong turn"));
    for outcome in hear(&heard, 2) {
        assert!(outcome.expect_err("it failed").contains("wrong turn"));
    }
    assert!(!hub.lock().clock.stands());
}

#[test]
fn the_watchdog_fails_a_ring_whose_ranks_stay_away_and_then_rests() {
    let limit = Duration::from_millis(50);
    let (hub, heard) = meet(limit, 3, &[2, 0], |_| unreachable!("rank 1 is missing"));
    for outcome in hear(&heard, 2) {
        let message = outcome.expect_err("it failed");
        assert!(message.contains("rank 1 of 3 did not reach the call within 50ms"), "{message}");
    }
    let start = Instant::now();
    while hub.lock().watched {
        assert!(start.elapsed() < PATIENCE, "the watchdog is idle");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_shorter_limit_holds_for_ranks_that_already_wait() {
    let (hub, heard) = meet(Duration::MAX, 2, &[0], |_| unreachable!("rank 1 is missing"));
    assert!(heard.recv_timeout(Duration::from_millis(100)).is_err(), "nobody is told yet");
    hub.set_limit(Duration::from_millis(10));
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
    let (hub, heard) = meet(Duration::from_millis(50), 1, &[0], run);

    let (told, late) = channel();
    let everybody = Arc::new(std::sync::Barrier::new(1));
    let completion = Listener { rank: 0, told, everybody };
    let key = Key { ring: 1, ..KEY };
    let member = Member { buffers: 0, completion };
    let place = Place { rank: 0, device: 0 };
    hub.arrive(key, place, &call(2), || Ok(member), |_| Ok(())).expect("it joins");
    let waited = late.recv_timeout(Duration::from_millis(300));
    assert!(waited.is_err(), "the clock stands while the first ring computes");

    finish.send(()).expect("the ring waits");
    assert_eq!(hear(&heard, 1), [Ok(())]);
    assert!(hear(&late, 1)[0].as_ref().is_err_and(|message| message.contains("rank 1 of 2")));
}

#[test]
fn a_misfit_tells_those_who_wait() {
    let (_, heard) = meet(PATIENCE, 2, &[0, 7], |_| unreachable!("rank 7 is none"));
    for outcome in hear(&heard, 2) {
        assert!(outcome.expect_err("it failed").contains("rank 7 of 2"));
    }
}

thread_local! {
    /// How many threads the system will grant to this test.
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
    let hub: &'static Hub<i32, Listener> = Box::leak(Box::new(Hub::new(PATIENCE, scarce)));
    let (told, heard) = channel();
    let arrive = |run: i64, rank: i32, together: &Arc<std::sync::Barrier>| {
        let completion = Listener { rank, told: told.clone(), everybody: together.clone() };
        let join = || Ok(Member { buffers: rank, completion });
        hub.arrive(Key { run, ..KEY }, Place { rank, device: rank }, &call(2), join, |_| Ok(()))
    };
    // The first rank needs a thread, and one that watches for the second; the second needs one.
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
