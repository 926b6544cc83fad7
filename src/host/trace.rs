//! A timeline of the steps of every ring, for profilers. It has the Chrome trace format, which
//! Perfetto and the JAX profiler's viewers open.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Instant;

static ACTIVE: AtomicBool = AtomicBool::new(false);
static RINGS: AtomicU64 = AtomicU64::new(0);
static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
static TIMELINE: Mutex<Option<Timeline>> = Mutex::new(None);

/// The timeline that is being recorded.
struct Timeline {
    file: File,
    events: String,
}

/// Creates the file and begins to record the steps of all rings.
///
/// # Errors
/// If the file cannot be opened for writing.
pub fn start(path: &Path) -> io::Result<()> {
    LazyLock::force(&ORIGIN);
    let timeline = Timeline { file: File::create(path)?, events: String::new() };
    *TIMELINE.lock().unwrap_or_else(PoisonError::into_inner) = Some(timeline);
    ACTIVE.store(true, Ordering::Release);
    Ok(())
}

/// Ends the recording and writes the file. Does nothing if no recording has begun.
///
/// # Errors
/// If the file cannot be written.
pub fn stop() -> io::Result<()> {
    ACTIVE.store(false, Ordering::Release);
    let timeline = TIMELINE.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(Timeline { mut file, events }) = timeline else { return Ok(()) };
    let text = format!("{{\"traceEvents\":[{}]}}\n", events.trim_end_matches(",\n"));
    file.write_all(text.as_bytes())
}

/// Returns a number for the next ring, which keeps concurrent rings apart on the timeline.
pub(super) fn next_ring() -> u64 {
    RINGS.fetch_add(1, Ordering::Relaxed)
}

/// Records how long the steps of one rank take.
#[derive(Debug)]
pub(super) struct StepTimer {
    ring: u64,
    rank: usize,
    current: Option<(String, Instant)>,
    pairs: AtomicU64,
}

impl StepTimer {
    pub(super) fn new(ring: u64, rank: usize) -> StepTimer {
        StepTimer { ring, rank, current: None, pairs: AtomicU64::new(0) }
    }

    /// Returns the counter of the pairs of query and key that the current step computes, if the
    /// step is recorded.
    pub(super) fn pairs(&self) -> Option<&AtomicU64> {
        self.current.is_some().then_some(&self.pairs)
    }

    /// Ends the current step and begins another.
    pub(super) fn step(&mut self, name: std::fmt::Arguments<'_>) {
        self.end();
        if ACTIVE.load(Ordering::Acquire) {
            self.current = Some((name.to_string(), Instant::now()));
        }
    }

    /// Ends the current step.
    pub(super) fn end(&mut self) {
        let Some((name, begin)) = self.current.take() else { return };
        let pairs = self.pairs.swap(0, Ordering::Relaxed);
        let (start, length) = (begin.duration_since(*ORIGIN), begin.elapsed());
        let mut timeline = TIMELINE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(timeline) = timeline.as_mut() {
            let (start, length) = (start.as_secs_f64() * 1e6, length.as_secs_f64() * 1e6);
            let written = writeln!(
                timeline.events,
                "{{\"name\":\"{name}\",\"cat\":\"burst_attention\",\"ph\":\"X\",\"pid\":{},\
                 \"tid\":{},\"ts\":{start:.3},\"dur\":{length:.3},\
                 \"args\":{{\"pairs\":{pairs}}}}},",
                self.ring, self.rank
            );
            debug_assert!(written.is_ok(), "writing to a string cannot fail");
        }
    }
}

impl Drop for StepTimer {
    fn drop(&mut self) {
        self.end();
    }
}
