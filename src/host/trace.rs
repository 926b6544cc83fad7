//! Names every step of every ring for a profiler: a timeline in the Chrome trace format, which
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
static RECORDING: Mutex<Option<Recording>> = Mutex::new(None);

struct Recording {
    file: File,
    events: String,
}

/// Opens the file and records the steps of all rings from now on.
///
/// # Errors
/// If the file can't be opened for writing.
pub fn start(path: &Path) -> io::Result<()> {
    LazyLock::force(&ORIGIN);
    let recording = Recording { file: File::create(path)?, events: String::new() };
    *RECORDING.lock().unwrap_or_else(PoisonError::into_inner) = Some(recording);
    ACTIVE.store(true, Ordering::Release);
    Ok(())
}

/// Stops recording and writes the file; does nothing if nothing is recorded.
///
/// # Errors
/// If the file cannot be written.
pub fn stop() -> io::Result<()> {
    ACTIVE.store(false, Ordering::Release);
    let recording = RECORDING.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(Recording { mut file, events }) = recording else { return Ok(()) };
    let text = format!("{{\"traceEvents\":[{}]}}\n", events.trim_end_matches(",\n"));
    file.write_all(text.as_bytes())
}

/// A number for the next ring, so that rings in flight together stay apart on the timeline.
pub(super) fn next_ring() -> u64 {
    RINGS.fetch_add(1, Ordering::Relaxed)
}

/// The step that one rank is in.
#[derive(Debug)]
pub(super) struct Span {
    ring: u64,
    rank: usize,
    current: Option<(String, Instant)>,
}

impl Span {
    pub(super) fn new(ring: u64, rank: usize) -> Span {
        Span { ring, rank, current: None }
    }

    /// Ends the current step and begins the next.
    pub(super) fn step(&mut self, name: std::fmt::Arguments<'_>) {
        self.end();
        if ACTIVE.load(Ordering::Acquire) {
            self.current = Some((name.to_string(), Instant::now()));
        }
    }

    /// Ends the current step.
    pub(super) fn end(&mut self) {
        let Some((name, begin)) = self.current.take() else { return };
        let (start, length) = (begin.duration_since(*ORIGIN), begin.elapsed());
        let mut recording = RECORDING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(recording) = recording.as_mut() {
            let (start, length) = (start.as_secs_f64() * 1e6, length.as_secs_f64() * 1e6);
            let written = writeln!(
                recording.events,
                "{{\"name\":\"{name}\",\"cat\":\"burst_attention\",\"ph\":\"X\",\"pid\":{},\
                 \"tid\":{},\"ts\":{start:.3},\"dur\":{length:.3}}},",
                self.ring, self.rank
            );
            debug_assert!(written.is_ok(), "writing to a string cannot fail");
        }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        self.end();
    }
}
