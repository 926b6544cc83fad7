//! A timeline of the steps of every ring and of the calls of decode, for profilers. It has the Chrome
//! trace format, which Perfetto and the JAX profiler's viewers open.

use std::fmt::{self, Write as _};
use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Instant;

/// The number of the process that all calls of decode form on the timeline. Rings have the numbers
/// behind it.
pub(super) const DECODE: u64 = 1;

/// The number of the error that a timeline is being recorded: EALREADY, which opening no file gives.
pub const RECORDING: i32 = 114;

static ACTIVE: AtomicBool = AtomicBool::new(false);
static RINGS: AtomicU64 = AtomicU64::new(DECODE + 1);
static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
static TIMELINE: Mutex<Option<Timeline>> = Mutex::new(None);

/// The timeline that is being recorded.
struct Timeline {
    file: File,
    events: String,
    /// Whether an event belongs to [`DECODE`].
    decodes: bool,
}

/// Creates the file and begins to record the steps of all rings and the calls of decode.
///
/// # Errors
/// [`RECORDING`] if a timeline is being recorded, or if the file cannot be opened for writing.
pub fn start(path: &Path) -> io::Result<()> {
    LazyLock::force(&ORIGIN);
    let mut timeline = TIMELINE.lock().unwrap_or_else(PoisonError::into_inner);
    if timeline.is_some() {
        return Err(io::Error::from_raw_os_error(RECORDING));
    }
    let file = File::create(path)?;
    *timeline = Some(Timeline { file, events: String::new(), decodes: false });
    ACTIVE.store(true, Ordering::Relaxed);
    Ok(())
}

/// Ends the recording and writes the file. Does nothing if no recording has begun.
///
/// # Errors
/// If the file cannot be written.
pub fn stop() -> io::Result<()> {
    ACTIVE.store(false, Ordering::Relaxed);
    let timeline = TIMELINE.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(Timeline { mut file, mut events, decodes }) = timeline else { return Ok(()) };
    if decodes {
        events += &format!(
            "{{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":{DECODE},\
             \"args\":{{\"name\":\"Decode\"}}}}"
        );
    }
    let text = format!("{{\"traceEvents\":[{}]}}\n", events.trim_end_matches(",\n"));
    file.write_all(text.as_bytes())
}

/// Whether a timeline is being recorded. The lock of the timeline orders what is written to it.
#[must_use]
pub fn is_active() -> bool {
    ACTIVE.load(Ordering::Relaxed)
}

/// Returns a number for the next ring, which keeps concurrent rings apart on the timeline.
pub(super) fn next_ring() -> u64 {
    RINGS.fetch_add(1, Ordering::Relaxed)
}

/// An event on the timeline. It ends when it is dropped.
#[derive(Debug)]
pub struct Event {
    process: u64,
    thread: i64,
    name: String,
    /// The members of a JSON object.
    args: String,
    begin: Instant,
}

impl Event {
    /// Begins an event on a thread of a process.
    pub(super) fn begin((process, thread): (u64, i64), name: String, args: String) -> Event {
        Event { process, thread, name, args, begin: Instant::now() }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let Event { process, thread, name, args, begin } = self;
        let (start, length) = (begin.duration_since(*ORIGIN), begin.elapsed());
        let (start, length) = (start.as_secs_f64() * 1e6, length.as_secs_f64() * 1e6);
        let mut timeline = TIMELINE.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(timeline) = timeline.as_mut() else { return };
        timeline.decodes |= *process == DECODE;
        let written = writeln!(
            timeline.events,
            "{{\"name\":\"{name}\",\"cat\":\"burst_attention\",\"ph\":\"X\",\"pid\":{process},\
             \"tid\":{thread},\"ts\":{start:.3},\"dur\":{length:.3},\"args\":{{{args}}}}},"
        );
        debug_assert!(written.is_ok(), "writing to a string cannot fail");
    }
}

/// Records how long the steps of one rank take.
#[derive(Debug)]
pub(super) struct StepTimer {
    ring: u64,
    rank: usize,
    current: Option<Event>,
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
    pub(super) fn step(&mut self, name: fmt::Arguments<'_>) {
        self.end();
        if is_active() {
            let place = (self.ring, self.rank as i64);
            self.current = Some(Event::begin(place, name.to_string(), String::new()));
        }
    }

    /// Ends the current step.
    pub(super) fn end(&mut self) {
        let Some(mut event) = self.current.take() else { return };
        event.args = format!("\"pairs\":{}", self.pairs.swap(0, Ordering::Relaxed));
    }
}

impl Drop for StepTimer {
    fn drop(&mut self) {
        self.end();
    }
}
