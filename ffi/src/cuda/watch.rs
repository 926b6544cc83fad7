//! The watch over rings of several GPUs. XLA does not say at once that a device was lost, and never
//! ends ranks that wait for a rank that failed. The watch is a thread that does both.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use burst_attention::cuda::driver::{Event, Stream};
use burst_attention::cuda::executor::Executor;

use super::Platform;
use super::told::Write;
use crate::handler::rank_timeout;

/// The time between two looks at the devices.
const PERIOD: Duration = Duration::from_millis(250);
/// The time that the end of the process waits for a look that is under way.
const LAST_LOOK: Duration = Duration::from_secs(1);

/// The calls of this process's devices, and the runs in which one of them failed.
#[derive(Debug, Default)]
pub struct Watch {
    watched: Mutex<Watched>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Watched {
    /// The newest call of each device, by XLA's stream.
    calls: HashMap<Stream, Call>,
    /// For each run with a failure, the time and the device of the first failure.
    failures: HashMap<i64, (Instant, DeviceName)>,
    /// Whether the thread runs.
    is_running: bool,
    is_stopped: bool,
}

/// The newest call of a device.
#[derive(Debug, Clone)]
struct Call {
    /// XLA's number of the program's run.
    run: i64,
    name: DeviceName,
    /// Whether the host is within a handler.
    is_entered: bool,
    /// An event at the end of the work that the last handler issued.
    end: Option<Event>,
    /// The number of handlers that have issued work, and of those whose work is over.
    issued: u64,
    over: u64,
    /// Since when the device has been seen busy, in a run with a failure.
    busy_since: Option<Instant>,
}

/// The name of a device in messages: its number and its ring.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceName {
    /// The number of the device.
    pub device: Option<i32>,
    /// The mesh axis of a ring of several devices.
    pub axis: Option<String>,
}

/// The state of a device that the watch has seen.
struct Seen {
    /// The number of handlers whose work is over.
    over: u64,
    is_idle: bool,
    /// The error of a device that was lost.
    lost: Option<burst_attention::Error>,
}

/// A handler's call under the watch. It ends when this value is dropped.
#[derive(Debug)]
pub struct WatchedCall {
    watch: &'static Watch,
    executor: &'static Executor,
    stream: Stream,
    run: i64,
}

impl DeviceName {
    fn device(&self) -> String {
        self.device.map_or("a device".into(), |device| format!("device {device}"))
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.device())?;
        self.axis.as_ref().map_or(Ok(()), |axis| write!(f, ": ring over mesh axis {axis:?}"))
    }
}

impl WatchedCall {
    /// Begins the watch over a handler's call of a rank.
    pub fn new(
        watch: &'static Watch,
        platform: &'static Platform,
        stream: Stream,
        run: i64,
        name: DeviceName,
    ) -> WatchedCall {
        let Platform { executor, write, .. } = platform;
        let mut watched = watch.lock();
        let before = watched.calls.remove(&stream);
        let (end, issued, over) =
            before.map_or((None, 0, 0), |call| (call.end, call.issued, call.over));
        let call = Call { run, name, is_entered: true, end, issued, over, busy_since: None };
        watched.calls.insert(stream, call);
        // If the system refuses the thread, a later call tries again.
        if !watched.is_running && !watched.is_stopped {
            let builder = thread::Builder::new().name("burst_attention watch".into());
            watched.is_running = builder.spawn(|| watch.run(executor, &**write)).is_ok();
        }
        WatchedCall { watch, executor, stream, run }
    }

    /// Says that this rank failed, so that other ranks may wait for it.
    pub fn failed(&self) {
        let mut watched = self.watch.lock();
        let Some(name) = watched.calls.get(&self.stream).map(|call| call.name.clone()) else {
            return;
        };
        watched.failures.entry(self.run).or_insert((Instant::now(), name));
        self.watch.changed.notify_all();
    }

    /// Marks the end of the work that this call has issued.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn issued(&self) -> burst_attention::Result<()> {
        let end = self.watch.lock().calls.get(&self.stream).and_then(|call| call.end);
        let end = self.executor.mark(self.stream, end)?;
        if let Some(call) = self.watch.lock().calls.get_mut(&self.stream) {
            // The thread looks at this device already if it knows of work under way.
            if call.over == call.issued {
                self.watch.changed.notify_all();
            }
            call.end = Some(end);
            call.issued += 1;
        }
        Ok(())
    }
}

impl Drop for WatchedCall {
    fn drop(&mut self) {
        if let Some(call) = self.watch.lock().calls.get_mut(&self.stream) {
            call.is_entered = false;
        }
    }
}

impl Watch {
    fn lock(&self) -> MutexGuard<'_, Watched> {
        // Every change of these values is complete when the lock is released.
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stops the watch, because the devices are about to go.
    pub fn stop(&self) {
        let mut watched = self.lock();
        watched.is_stopped = true;
        self.changed.notify_all();
        // The thread may be in a call of the driver, which the driver may hold up.
        let runs = |watched: &mut Watched| watched.is_running;
        drop(self.changed.wait_timeout_while(watched, LAST_LOOK, runs));
    }

    fn run(&self, executor: &Executor, write: &Write) {
        let is_quiet = |watched: &mut Watched| {
            let is_busy = watched.calls.values().any(|call| call.over < call.issued);
            !watched.is_stopped && !is_busy && watched.failures.is_empty()
        };
        loop {
            let watched = self.changed.wait_while(self.lock(), is_quiet);
            let mut watched = watched.unwrap_or_else(PoisonError::into_inner);
            if watched.is_stopped {
                watched.is_running = false;
                self.changed.notify_all();
                return;
            }
            let calls = watched.calls.clone();
            let failed: Vec<i64> = watched.failures.keys().copied().collect();
            // The driver may make this thread wait, and handlers must not wait for this thread.
            drop(watched);
            let look = |(stream, call): (&Stream, &Call)| {
                (*stream, call.run, look(executor, *stream, call, &failed))
            };
            let seen: Vec<_> = calls.iter().map(look).collect();
            if let Some(line) = self.lock().update(seen, Instant::now(), rank_timeout(), write) {
                write(&line);
                std::process::abort();
            }
            let is_on = |watched: &mut Watched| !watched.is_stopped;
            drop(self.changed.wait_timeout_while(self.lock(), PERIOD, is_on));
        }
    }
}

fn look(executor: &Executor, stream: Stream, call: &Call, failed: &[i64]) -> Seen {
    let mut seen = Seen { over: call.issued, is_idle: true, lost: None };
    if let Some(end) = call.end.filter(|_| call.over < call.issued) {
        match executor.is_over(stream, end) {
            Ok(true) => (),
            Ok(false) => (seen.over, seen.is_idle) = (call.over, false),
            Err(error) => seen.lost = Some(error),
        }
    }
    // XLA's own exchanges follow the call's work. The stream exists as long as the run goes on.
    if failed.contains(&call.run) && !call.is_entered && seen.is_idle && seen.lost.is_none() {
        seen.is_idle = executor.is_idle(stream).unwrap_or(true);
    }
    seen
}

impl Watched {
    /// Takes over what the watch has seen. Tells of lost devices, and returns the last words of this
    /// process if a rank has waited longer than the timeout for a rank that failed.
    fn update(
        &mut self,
        seen: Vec<(Stream, i64, Seen)>,
        now: Instant,
        timeout: Duration,
        write: &Write,
    ) -> Option<String> {
        let Watched { calls, failures, .. } = self;
        for (stream, run, seen) in seen {
            // A newer call of the stream has not been seen yet.
            let Some(call) = calls.get_mut(&stream).filter(|call| call.run == run) else {
                continue;
            };
            call.over = seen.over;
            let is_told = failures.get(&run).is_some_and(|(_, name)| *name == call.name);
            if let Some(error) = seen.lost.filter(|_| !is_told) {
                write(&format!(
                    "{}: this device failed after it was given the call: {error}; restart the \
                     process",
                    call.name
                ));
                failures.entry(run).or_insert((now, call.name.clone()));
            }
            let waits = failures.contains_key(&run) && (call.is_entered || !seen.is_idle);
            call.busy_since = call.busy_since.filter(|_| waits).or(waits.then_some(now));
        }
        let waited = |since: Instant| now.duration_since(since) >= timeout;
        failures.retain(|run, (since, _)| {
            let is_busy = |call: &Call| call.run == *run && call.busy_since.is_some();
            !waited(*since) || calls.values().any(is_busy)
        });
        let is_late = |call: &&Call| call.busy_since.is_some_and(waited);
        let late = calls.values().find(is_late)?;
        let (_, failed) = failures.get(&late.run)?;
        Some(format!(
            "{} has waited {} s for {}, which failed: its error stands above; nothing else ends \
             this wait, so the process ends now (BURST_ATTENTION_RANK_TIMEOUT_S sets the seconds)",
            late.name.device(),
            timeout.as_secs_f64(),
            failed.device(),
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);
    const RUN: i64 = 7;

    /// Returns calls of devices 0 and 1, the second of which failed in their run.
    fn after_a_failure(start: Instant) -> Watched {
        let name = |device| DeviceName { device: Some(device), axis: Some("context".into()) };
        let call = |device| Call {
            run: RUN,
            name: name(device),
            is_entered: false,
            end: Some(Event(1)),
            issued: 1,
            over: 0,
            busy_since: None,
        };
        Watched {
            calls: [0, 1].map(|device| (Stream(device as usize), call(device))).into(),
            failures: [(RUN, (start, name(1)))].into(),
            ..Watched::default()
        }
    }

    fn busy() -> Seen {
        Seen { over: 0, is_idle: false, lost: None }
    }

    fn idle() -> Seen {
        Seen { over: 1, is_idle: true, lost: None }
    }

    fn unheard(line: &str) {
        panic!("no device was lost: {line}");
    }

    /// Looks at device 0 after each of these seconds.
    fn looks(watched: &mut Watched, start: Instant, run: i64, seen: &[(u64, Seen)]) -> Vec<bool> {
        let look = |(seconds, seen): &(u64, Seen)| {
            let seen = Seen { lost: None, ..*seen };
            let now = start + Duration::from_secs(*seconds);
            watched.update(vec![(Stream(0), run, seen)], now, TIMEOUT, &unheard).is_some()
        };
        seen.iter().map(look).collect()
    }

    #[test]
    fn a_rank_that_waits_as_long_as_the_timeout_ends_the_process() {
        let start = Instant::now();
        let mut watched = after_a_failure(start);
        let seen = [(1, busy()), (20, busy()), (21, busy())];
        assert_eq!(looks(&mut watched, start, RUN, &seen), [false, false, true]);
        let line =
            watched.update(vec![], start + 2 * TIMEOUT, TIMEOUT, &unheard).expect("it still waits");
        let expected = "device 0 has waited 20 s for device 1, which failed";
        assert!(line.starts_with(expected), "{line}");
    }

    #[test]
    fn a_rank_within_a_handler_waits_too() {
        let start = Instant::now();
        let mut watched = after_a_failure(start);
        watched.calls.get_mut(&Stream(0)).expect("device 0").is_entered = true;
        let seen = [(1, idle()), (21, idle())];
        assert_eq!(looks(&mut watched, start, RUN, &seen), [false, true]);
    }

    #[test]
    fn a_rank_that_ends_or_goes_on_does_not_wait() {
        let start = Instant::now();
        let mut watched = after_a_failure(start);
        let seen = [(1, busy()), (15, idle()), (18, busy()), (37, busy()), (38, idle())];
        assert_eq!(looks(&mut watched, start, RUN, &seen), [false; 5]);
        assert!(watched.failures.is_empty(), "nobody waits for the rank that failed");

        let mut watched = after_a_failure(start);
        watched.calls.get_mut(&Stream(0)).expect("device 0").run = RUN + 1;
        let seen = [(1, busy()), (30, busy())];
        assert_eq!(looks(&mut watched, start, RUN + 1, &seen), [false; 2], "another run");
    }

    #[test]
    fn a_lost_device_is_a_failure_of_its_run() {
        let start = Instant::now();
        let mut watched = after_a_failure(start);
        watched.failures.clear();
        let error = burst_attention::cuda::error::CudaError::Panic("lost".into()).into();
        let lost = Seen { lost: Some(error), ..idle() };
        let lines = Arc::<Mutex<Vec<String>>>::default();
        let written = lines.clone();
        let write = move |line: &str| written.lock().expect("no poison").push(line.to_owned());
        assert!(watched.update(vec![(Stream(1), RUN, lost)], start, TIMEOUT, &write).is_none());
        let [line] = &lines.lock().expect("no poison")[..] else { panic!("one line is written") };
        let expected = "device 1: ring over mesh axis \"context\": this device failed";
        assert!(line.starts_with(expected), "{line}");
        let failed = watched.failures.get(&RUN).map(|(_, name)| name.device);
        assert_eq!(failed, Some(Some(1)));
        assert!(watched.calls.values().all(|call| call.busy_since.is_none()));
    }
}
