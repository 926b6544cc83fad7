//! Threads for work that may block: as many as there are jobs, and idle threads are used again.
//!
//! A walk of a rank's schedule waits for neighbours, and completing an XLA future may run the rest
//! of that device's program. A job of either kind may occupy no compute worker, and may wait for no
//! other job to end. So each job gets a thread of its own.

use std::io;
use std::mem;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

type Job = Box<dyn FnOnce() + Send>;

/// The jobs that wait for a thread. A waiting thread is `idle`, reserved, or about to take one of
/// `jobs`, and any thread may take any job.
struct Queue {
    jobs: Vec<Job>,
    /// Number of waiting threads that are neither reserved nor needed for `jobs`.
    idle: usize,
}

static QUEUE: Mutex<Queue> = Mutex::new(Queue { jobs: Vec::new(), idle: 0 });
static ARRIVED: Condvar = Condvar::new();
const KEEP_IDLE: Duration = Duration::from_secs(30);

fn lock() -> MutexGuard<'static, Queue> {
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A thread that waits for one job. Dropping the value gives the thread back.
#[derive(Debug)]
pub struct Reserved(());

/// Reserves a thread, so that a later job is sure to run.
///
/// # Errors
/// If the operating system refuses another thread.
pub fn reserve() -> io::Result<Reserved> {
    let mut queue = lock();
    if queue.idle > 0 {
        queue.idle -= 1;
        return Ok(Reserved(()));
    }
    drop(queue);
    std::thread::Builder::new().name("burst-attention".into()).spawn(serve)?;
    Ok(Reserved(()))
}

impl Reserved {
    /// Starts a job on the thread at once.
    pub fn run(self, job: impl FnOnce() + Send + 'static) {
        mem::forget(self);
        lock().jobs.push(Box::new(job));
        ARRIVED.notify_one();
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        lock().idle += 1;
    }
}

/// Runs jobs until none has come for a while and no job can need this thread.
fn serve() {
    let mut queue = lock();
    loop {
        if let Some(job) = queue.jobs.pop() {
            drop(queue);
            job();
            queue = lock();
            queue.idle += 1;
            continue;
        }
        let (guard, timeout) =
            ARRIVED.wait_timeout(queue, KEEP_IDLE).unwrap_or_else(PoisonError::into_inner);
        queue = guard;
        if timeout.timed_out() && queue.jobs.is_empty() && queue.idle > 0 {
            queue.idle -= 1;
            return;
        }
    }
}
