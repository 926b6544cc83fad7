//! Runs all ranks of a ring in one process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};

use rayon::ThreadPool;

use super::array::HostArray;
use super::checks;
use super::isa::Isa;
use super::kernel::HostKernel;
use super::transport::{HostTransport, Mailboxes};
use super::{threads, trace};
use crate::engine::walk;
use crate::environment;
use crate::error::{Error, Result};
use crate::operands::Arrays;
use crate::problem::{Problem, Travels};
use crate::schedule::{self, Family, Schedule};
use crate::transport::Transport;

/// The environment variable that sets the number of compute workers.
const THREADS_VARIABLE: &str = "BURST_ATTENTION_THREADS";

/// The largest number of compute workers that the variable may ask for.
const MAX_THREADS: usize = 1024;

/// The compute workers that all rings of the process share.
#[derive(Debug)]
pub struct Executor {
    /// The instruction set of the kernels.
    pub isa: Isa,
    /// The workers.
    pub pool: ThreadPool,
}

impl Executor {
    /// Starts `threads` workers.
    ///
    /// # Errors
    /// [`Error::NoThread`] if the operating system refuses a thread.
    pub fn new(isa: Isa, threads: usize) -> Result<Executor> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|index| format!("burst-attention-compute-{index}"))
            .build()
            .map_err(|refused| Error::NoThread {
                purpose: format!("each of {threads} compute workers ({THREADS_VARIABLE})"),
                reason: refused.to_string(),
            })?;
        Ok(Executor { isa, pool })
    }

    /// Returns the executor of XLA's calls. It has the fastest instruction set of this CPU and a
    /// worker for each core, unless `BURST_ATTENTION_ISA` and `BURST_ATTENTION_THREADS` say
    /// otherwise.
    ///
    /// # Errors
    /// If one of the two variables is invalid, or if the operating system refuses a thread. The
    /// next call tries again.
    pub fn global() -> Result<&'static Executor> {
        static GLOBAL: OnceLock<Executor> = OnceLock::new();
        static STARTING: Mutex<()> = Mutex::new(());
        let _only_one_starts = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(executor) = GLOBAL.get() {
            return Ok(executor);
        }
        let executor = Executor::new(Isa::detect()?, workers()?)?;
        Ok(GLOBAL.get_or_init(|| executor))
    }
}

/// Returns the number of compute workers that the environment asks for, or else the number of
/// cores.
fn workers() -> Result<usize> {
    let expected = || format!("a whole number from 1 to {MAX_THREADS}");
    let parse = |text: &str| text.parse().ok().filter(|count| (1..=MAX_THREADS).contains(count));
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    Ok(environment::read(THREADS_VARIABLE, expected, parse)?.unwrap_or_else(cores))
}

/// Runs one pass of `problem` over the arrays of each rank, and returns the bytes that all ranks
/// sent. `travels` is the side that travels; `None` takes the side that costs fewer bytes. The
/// function blocks until every rank has finished, so it belongs on a thread of [`threads`].
///
/// # Errors
/// If the problem is invalid, the family or an array does not fit it, or a rank failed.
pub fn run(
    problem: &Problem,
    family: Family,
    travels: Option<Travels>,
    ranks: Vec<Arrays<HostArray>>,
) -> Result<u64> {
    problem.validate()?;
    check_ranks(problem, &ranks)?;
    let schedules = schedule::cached(problem, family, ranks[0].pass, travels)?;
    let mailboxes = Arc::new(Mailboxes::default());
    let ring = trace::next_ring();
    run_jobs(ranks, &mailboxes, |rank, arrays| {
        let (problem, mailboxes) = (problem.clone(), mailboxes.clone());
        let job = Job { problem, schedules: schedules.clone(), rank, mailboxes, ring };
        move || job.run(arrays)
    })
}

/// The work of one rank's thread.
struct Job {
    problem: Problem,
    schedules: Arc<Vec<Schedule>>,
    rank: usize,
    mailboxes: Arc<Mailboxes>,
    /// Number of the ring on the timeline.
    ring: u64,
}

impl Job {
    /// Walks this rank's schedule. An error or a panic also stops the ranks that wait for this
    /// rank.
    fn run(&self, arrays: Arrays<HostArray>) -> Result<u64> {
        self.guarded(|| {
            let Executor { isa, pool } = Executor::global()?;
            let (schedule, world_size) = (&self.schedules[self.rank], self.problem.world_size);
            let mut transport = HostTransport::new(self.rank, world_size, self.mailboxes.clone());
            let device = (*isa, pool);
            let mut kernel = HostKernel::new(device, &self.problem, schedule, arrays, self.ring);
            walk(schedule, &mut kernel, &mut transport)?;
            Ok(transport.bytes_sent())
        })
    }

    /// Does the work. If it fails or panics, the ranks that wait for this rank fail too.
    fn guarded(&self, work: impl FnOnce() -> Result<u64>) -> Result<u64> {
        let result = catch_unwind(AssertUnwindSafe(work))
            .unwrap_or_else(|panic| Err(self.panicked(panic.as_ref())));
        if let Err(error) = &result {
            self.mailboxes.break_ring(self.rank, error.to_string());
        }
        result
    }

    fn panicked(&self, panic: &(dyn std::any::Any + Send)) -> Error {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        let reason = format!("internal error: {}", text.unwrap_or("a panic without a message"));
        let (rank, world_size) = (self.rank, self.problem.world_size);
        Error::RingBroken { rank, peer: rank, world_size, reason }
    }
}

/// Runs a job for each rank, the last job on this thread, and returns the sum of their results. If
/// ranks fail, the function returns the first error that is not merely the echo of another rank's
/// error. Jobs use the caller's memory, so the function never returns before all jobs have ended.
fn run_jobs<B, J>(ranks: Vec<B>, mailboxes: &Mailboxes, job: impl Fn(usize, B) -> J) -> Result<u64>
where
    J: FnOnce() -> Result<u64> + Send + 'static,
{
    let world_size = ranks.len();
    let (sender, results) = mpsc::channel();
    for (rank, io) in ranks.into_iter().enumerate() {
        let (job, results) = (job(rank, io), sender.clone());
        let run = move || {
            // The receiver lives until every sender is gone, so this send cannot fail.
            let _ = results.send(job());
        };
        if rank + 1 == world_size {
            run();
            break;
        }
        match threads::reserve() {
            Ok(thread) => thread.run(run),
            Err(refused) => {
                let purpose = format!("rank {rank} of {world_size}");
                let error = Error::NoThread { purpose, reason: refused.to_string() };
                mailboxes.break_ring(rank, error.to_string());
                let _ = sender.send(Err(error));
            }
        }
    }
    drop(sender);
    let results: Vec<Result<u64>> = results.iter().collect();
    let own =
        |error: &&Error| !matches!(error, Error::RingBroken { rank, peer, .. } if rank != peer);
    match results.iter().filter_map(|result| result.as_ref().err()).find(own) {
        Some(error) => Err(error.clone()),
        None => results.into_iter().sum(),
    }
}

/// Checks that every rank has its arrays, and that all arrays belong to the same pass.
fn check_ranks(problem: &Problem, ranks: &[Arrays<HostArray>]) -> Result<()> {
    if ranks.len() != problem.world_size {
        let (expected, got) = (problem.world_size.to_string(), ranks.len().to_string());
        return Err(Error::InvalidProblem { name: "arrays of ranks", expected, got });
    }
    if ranks.iter().any(|arrays| arrays.pass != ranks[0].pass) {
        let (expected, got) = ("the same on all ranks".to_owned(), "both passes".to_owned());
        return Err(Error::InvalidProblem { name: "pass", expected, got });
    }
    ranks.iter().try_for_each(|arrays| checks::arrays(problem, arrays))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use crate::mask::Window;
    use crate::problem::{Dtype, Features, Pass};

    #[test]
    fn a_rank_that_panics_before_its_first_step_releases_those_that_wait_for_it() {
        let problem = Problem {
            batch: 1,
            q_len: 2,
            kv_len: 2,
            heads: 1,
            kv_heads: 1,
            head_dim: 8,
            value_dim: 8,
            dtype: Dtype::F32,
            window: Window::FULL,
            softmax_scale: 1.0,
            features: Features::default(),
            layout: Layout::Contiguous,
            world_size: 2,
        };
        let schedules =
            schedule::cached(&problem, Family::Ring, Pass::Forward, None).expect("a ring");
        let mailboxes = Arc::new(Mailboxes::default());
        let job = Job { problem, schedules, rank: 0, mailboxes: mailboxes.clone(), ring: 0 };
        let failed = job.guarded(|| panic!("on purpose")).expect_err("the kernel panicked");
        assert!(failed.to_string().contains("internal error: on purpose"), "{failed}");
        let waiting = HostTransport::new(1, 2, mailboxes).finish(vec![(0, 1, 0)]);
        let Err(Error::RingBroken { rank: 1, peer: 0, .. }) = waiting else {
            panic!("rank 1 must learn that rank 0 is gone, got {waiting:?}");
        };
    }
}
