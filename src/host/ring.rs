//! Runs all ranks of a ring in one process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};

use rayon::ThreadPool;

use super::checks;
use super::isa::Isa;
use super::kernel::HostKernel;
pub use super::kernel::{BackwardBuffers, ForwardBuffers, RankBuffers, RingBuffers};
use super::transport::{HostTransport, Mailboxes};
use super::{threads, trace};
use crate::engine::walk;
use crate::environment;
use crate::error::{Error, Result};
use crate::problem::{Problem, Travels};
use crate::schedule::{self, Family, Schedule};
use crate::transport::Transport;

/// Environment variable that sets the number of compute workers.
const THREADS_VARIABLE: &str = "BURST_ATTENTION_THREADS";

/// The largest number of compute workers that the variable may ask for.
const MAX_THREADS: usize = 1024;

/// The compute workers that all rings of the process share, and what they compute with.
#[derive(Debug)]
pub struct Executor {
    /// Instruction set of the kernels.
    pub isa: Isa,
    /// One worker for each core.
    pub pool: ThreadPool,
}

impl Executor {
    /// With `threads` workers.
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

    /// The one that XLA's calls use: the best instruction set of this CPU, a worker for each core.
    /// `BURST_ATTENTION_THREADS` sets another number of workers.
    ///
    /// # Errors
    /// If one of the variables `BURST_ATTENTION_ISA` and `BURST_ATTENTION_THREADS` is invalid, or
    /// if the operating system refuses a thread. The next call tries again.
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

/// The number of compute workers that the environment asks for, else that of the cores.
fn workers() -> Result<usize> {
    let expected = || format!("a whole number from 1 to {MAX_THREADS}");
    let parse = |text: &str| text.parse().ok().filter(|count| (1..=MAX_THREADS).contains(count));
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    Ok(environment::read(THREADS_VARIABLE, expected, parse)?.unwrap_or_else(cores))
}

/// Runs one pass of `problem` on a single ring; see [`run_family`].
///
/// # Errors
/// If the problem is invalid, a buffer does not fit it, or a rank failed.
pub fn run(problem: &Problem, travels: Option<Travels>, buffers: RingBuffers) -> Result<u64> {
    run_family(problem, Family::Ring, travels, buffers)
}

/// Runs one pass of `problem` over `buffers`, one entry for each rank, and returns the bytes that
/// all ranks sent. `travels` is the side that goes round; `None` takes the one that costs fewer
/// bytes. Blocks until every rank is through, so it belongs on a thread of [`threads`].
///
/// # Errors
/// If the problem is invalid, the family or a buffer does not fit it, or a rank failed.
pub fn run_family(
    problem: &Problem,
    family: Family,
    travels: Option<Travels>,
    buffers: RingBuffers,
) -> Result<u64> {
    problem.validate()?;
    check_buffers(problem, &buffers)?;
    let pass = buffers.pass();
    let schedules = schedule::kept(problem, family, pass, travels)?;
    let mailboxes = Arc::new(Mailboxes::default());
    let number = trace::next_ring();
    let job = |rank: usize| Job {
        problem: problem.clone(),
        schedules: schedules.clone(),
        rank,
        mailboxes: mailboxes.clone(),
        number,
    };
    match buffers {
        RingBuffers::Forward(ranks) => gather(ranks, &mailboxes, |rank, io| {
            let job = job(rank);
            move || job.forward(io)
        }),
        RingBuffers::Backward(ranks) => gather(ranks, &mailboxes, |rank, io| {
            let job = job(rank);
            move || job.backward(io)
        }),
    }
}

/// What one rank's thread needs to know.
struct Job {
    problem: Problem,
    schedules: Arc<Vec<Schedule>>,
    rank: usize,
    mailboxes: Arc<Mailboxes>,
    number: u64,
}

impl Job {
    fn forward(&self, io: ForwardBuffers) -> Result<u64> {
        self.walk(|device, schedule| {
            HostKernel::forward(device, &self.problem, schedule, io, self.number)
        })
    }

    fn backward(&self, io: BackwardBuffers) -> Result<u64> {
        self.walk(|device, schedule| {
            HostKernel::backward(device, &self.problem, schedule, io, self.number)
        })
    }

    /// Walks this rank's schedule; whatever goes wrong also stops the ranks that wait for it.
    fn walk<'a>(
        &'a self,
        kernel: impl FnOnce((Isa, &'a ThreadPool), &'a Schedule) -> HostKernel<'a>,
    ) -> Result<u64> {
        self.guarded(|| {
            let Executor { isa, pool } = Executor::global()?;
            let schedule = &self.schedules[self.rank];
            let mut transport =
                HostTransport::new(self.rank, self.problem.world_size, self.mailboxes.clone());
            walk(schedule, &mut kernel((*isa, pool), schedule), &mut transport)?;
            Ok(transport.bytes_sent())
        })
    }

    /// A rank that fails, or panics, releases those that wait for it.
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

/// Runs a job for each rank, the last one here, and adds up what they return. The first error that
/// is not merely the echo of another rank's is the one reported. Whatever happens, no job runs any
/// more when this returns, for they use the caller's memory.
fn gather<B, J>(ranks: Vec<B>, mailboxes: &Mailboxes, job: impl Fn(usize, B) -> J) -> Result<u64>
where
    J: FnOnce() -> Result<u64> + Send + 'static,
{
    let world_size = ranks.len();
    let (sender, results) = mpsc::channel();
    for (rank, io) in ranks.into_iter().enumerate() {
        let (job, results) = (job(rank, io), sender.clone());
        let run = move || {
            // The receiver waits below until every sender is gone.
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

/// Every rank must have its arrays, each with the shape and type that the problem gives it.
fn check_buffers(problem: &Problem, buffers: &RingBuffers) -> Result<()> {
    let count = match buffers {
        RingBuffers::Forward(ranks) => ranks.len(),
        RingBuffers::Backward(ranks) => ranks.len(),
    };
    if count != problem.world_size {
        let (expected, got) = (problem.world_size.to_string(), count.to_string());
        return Err(Error::InvalidProblem { name: "buffers for ranks", expected, got });
    }
    match buffers {
        RingBuffers::Forward(ranks) => ranks.iter().try_for_each(|io| checks::forward(problem, io)),
        RingBuffers::Backward(ranks) => {
            ranks.iter().try_for_each(|io| checks::backward(problem, io))
        }
    }
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
            schedule::kept(&problem, Family::Ring, Pass::Forward, None).expect("a ring");
        let mailboxes = Arc::new(Mailboxes::default());
        let job = Job { problem, schedules, rank: 0, mailboxes: mailboxes.clone(), number: 0 };
        let failed = job.guarded(|| panic!("on purpose")).expect_err("the kernel panicked");
        assert!(failed.to_string().contains("internal error: on purpose"), "{failed}");
        let waiting = HostTransport::new(1, 2, mailboxes).finish(vec![(0, 1, 0)]);
        let Err(Error::RingBroken { rank: 1, peer: 0, .. }) = waiting else {
            panic!("rank 1 must learn that rank 0 is gone, got {waiting:?}");
        };
    }
}
