//! An unbounded set of cached threads for work that may block.
//!
//! Walking a rank's schedule waits for neighbours, and completing an XLA future may run the rest
//! of that device's program. Neither may occupy a compute worker or wait for another of its kind,
//! so each job gets a thread of its own; idle threads are used again.

use std::io;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

type Job = Box<dyn FnOnce() + Send>;

struct Queue {
    jobs: Vec<Job>,
    /// Threads that wait and are not yet promised to one of `jobs`.
    idle: usize,
}

static QUEUE: Mutex<Queue> = Mutex::new(Queue { jobs: Vec::new(), idle: 0 });
static ARRIVED: Condvar = Condvar::new();
const KEEP_IDLE: Duration = Duration::from_secs(30);

/// Runs `job` on a thread of its own, at once.
///
/// # Panics
/// If the operating system refuses another thread.
pub fn spawn(job: impl FnOnce() + Send + 'static) {
    try_spawn(job).expect("the operating system grants another thread");
}

/// Runs `job` on a thread of its own, at once.
///
/// # Errors
/// If the operating system refuses another thread; then the job is dropped.
pub fn try_spawn(job: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let mut queue = QUEUE.lock().unwrap_or_else(PoisonError::into_inner);
    if queue.idle > 0 {
        queue.idle -= 1;
        queue.jobs.push(Box::new(job));
        ARRIVED.notify_one();
        return Ok(());
    }
    drop(queue);
    let thread = std::thread::Builder::new().name("burst-attention".into());
    thread.spawn(move || {
        job();
        serve();
    })?;
    Ok(())
}

/// Waits for further jobs until none comes for a while.
fn serve() {
    let mut queue = QUEUE.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        queue.idle += 1;
        loop {
            if let Some(job) = queue.jobs.pop() {
                drop(queue);
                job();
                break;
            }
            let (guard, timeout) =
                ARRIVED.wait_timeout(queue, KEEP_IDLE).unwrap_or_else(PoisonError::into_inner);
            queue = guard;
            if timeout.timed_out() && queue.jobs.is_empty() {
                queue.idle -= 1;
                return;
            }
        }
        queue = QUEUE.lock().unwrap_or_else(PoisonError::into_inner);
    }
}
