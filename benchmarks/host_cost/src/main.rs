//! Measures the host time of issuing one step of a ring, on a test double that only records.
//!
//! Prints the median time of a whole call, with its schedules already made and other addresses in
//! each call, and that time divided by the number of steps. Where cuDNN may compute, it also prints
//! the median time in which a call is prepared whose plans the device has already.

use std::time::{Duration, Instant};

use burst_attention::cuda::call::Call;
use burst_attention::cuda::executor::{Executor, RankSet};
use burst_attention::cuda::nccl::Communicator;
use burst_attention::cuda::workspace::Workspace;
use burst_attention::operands::Arrays;
use burst_attention::schedule::Family;
use burst_attention::{Dtype, Features, Layout, Order, Pass, Problem, Travels, Window};
use burst_attention_kernels::backend::{BACKENDS, Kernels, cudnn};
use burst_attention_recorder::{Recorder, images, nccl};

const CALLS: usize = 2001;

fn call(world_size: usize, batch: usize, (pass, travels): (Pass, Option<Travels>)) -> Call {
    let problem = Problem {
        batch,
        q_len: 8192,
        kv_len: 8192,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        value_dim: 128,
        dtype: Dtype::Bf16,
        window: Window::CAUSAL,
        softmax_scale: 0.088,
        features: Features::default(),
        layout: Layout::Zigzag,
        world_size,
    };
    Call { travels, ..Call::new(problem, Family::Ring, pass) }
}

/// An executor over a test double, which calls no library, and a communicator of rank 0.
struct Rank {
    recorder: Recorder,
    executor: Executor,
    world_size: usize,
}

impl Rank {
    fn new(world_size: usize) -> Rank {
        let recorder = Recorder::new((9, 0));
        let executor = Executor::new(Box::new(recorder.clone()), images);
        let executor = executor.with_backends(BACKENDS, vec![recorder.library(cudnn::NAME, None)]);
        Rank { recorder, executor, world_size }
    }

    fn communicator(&self) -> Communicator<'_> {
        let comm = self.recorder.add_comm(0, self.world_size);
        Communicator::new(nccl(), comm, self.world_size)
            .expect("the communicator has the size of the ring")
    }

    fn prepare(&self, call: &Call, communicator: &Communicator<'_>) {
        let ranks = RankSet::One(std::slice::from_ref(communicator));
        let prepared = self.executor.initialize(Recorder::COMPUTE, call, ranks, &|_| ());
        prepared.expect("the recorder refuses nothing");
    }
}

/// Returns the median time of a call in microseconds.
fn median_us(call: &Call) -> f64 {
    let rank = Rank::new(call.problem.world_size);
    let communicator = rank.communicator();
    rank.prepare(call, &communicator);
    median(|n| {
        rank.recorder.take();
        let bytes = call.workspace_bytes();
        let workspace = Workspace { address: (1 << 46) + 256 * n, bytes };
        let begin = Instant::now();
        let address = |operand| ((operand as u64 + 1) << 40) + 256 * n;
        let arrays = [Arrays::new(call.pass, &call.problem.features, address)];
        rank.prepare(call, &communicator);
        let ranks = RankSet::One(std::slice::from_ref(&communicator));
        let run = rank.executor.run(Recorder::COMPUTE, call, ranks, &arrays, workspace, &|_| ());
        run.expect("the recorder refuses nothing");
        begin.elapsed()
    })
}

/// Returns the median time in microseconds in which a call is prepared whose plans and kernels the
/// device has: each time over another communicator, so that the call is not ready.
fn median_prepare_us(call: &Call) -> f64 {
    let rank = Rank::new(call.problem.world_size);
    rank.prepare(call, &rank.communicator());
    median(|_| {
        rank.recorder.take();
        let communicator = rank.communicator();
        let begin = Instant::now();
        rank.prepare(call, &communicator);
        begin.elapsed()
    })
}

fn median(mut once: impl FnMut(u64) -> Duration) -> f64 {
    let mut times: Vec<f64> = (0..CALLS as u64).map(|n| once(n).as_secs_f64() * 1e6).collect();
    times.sort_by(f64::total_cmp);
    times[CALLS / 2]
}

fn main() {
    println!("causal zigzag, 8,192 tokens per rank, 32:8 heads, D 128, bfloat16; rank 0");
    let passes = [
        ("forward", (Pass::Forward, None)),
        ("backward, keys travel", (Pass::Backward, Some(Travels::Keys))),
        ("backward, queries travel", (Pass::Backward, Some(Travels::Queries))),
    ];
    for world_size in [2, 8, 32] {
        for (name, pass) in passes {
            for batch in [1, 4] {
                let us = median_us(&call(world_size, batch, pass));
                let step = us / world_size as f64;
                println!(
                    "world {world_size:2} batch {batch} {name:24} {us:7.1} us a call, \
                     {step:5.1} us a step"
                );
            }
        }
    }
    println!("the same in any order, by kernels of one launch, and by cuDNN; batch 1");
    for world_size in [2, 8, 32] {
        for (name, pass) in &passes[..2] {
            for kernels in [Kernels::Tile, Kernels::Cudnn] {
                let call = call(world_size, 1, *pass);
                let backward_order = Order::Any;
                let call = Call { kernels, backward_order, lse_gradient: false, ..call };
                let (us, prepare) = (median_us(&call), median_prepare_us(&call));
                println!(
                    "world {world_size:2} {kernels:?} {name:24} {us:7.1} us a call, \
                     {prepare:7.1} us prepared again"
                );
            }
        }
    }
}
