//! Measures the host time of issuing one step of a ring, on a test double that only records.
//!
//! Prints the median time of a whole call, with its schedules already made and other addresses in
//! each call, and that time divided by the number of steps.

use std::time::Instant;

use burst_attention::cuda::call::Call;
use burst_attention::cuda::executor::{Executor, RankSet};
use burst_attention::cuda::nccl::Communicator;
use burst_attention::cuda::workspace::Workspace;
use burst_attention::operands::Arrays;
use burst_attention::schedule::Family;
use burst_attention::{Dtype, Features, Layout, Pass, Problem, Travels, Window};
use burst_attention_recorder::{Recorder, images, nccl};

const CALLS: usize = 2001;

fn call(world_size: usize, batch: usize, pass: Pass, travels: Option<Travels>) -> Call {
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

/// Returns the median time of a call in microseconds.
fn median_us(call: &Call) -> f64 {
    let world_size = call.problem.world_size;
    let recorder = Recorder::new((9, 0));
    let executor = Executor::new(Box::new(recorder.clone()), images);
    let (stream, comm) = (Recorder::COMPUTE, recorder.add_comm(0, world_size));
    let communicator = Communicator::new(nccl(), comm, world_size)
        .expect("the communicator has the size of the ring");
    let ranks = RankSet::One(std::slice::from_ref(&communicator));
    executor.initialize(stream, call, ranks, &|_| ()).expect("the recorder refuses nothing");
    let mut times: Vec<f64> = (0..CALLS as u64)
        .map(|n| {
            recorder.take();
            let bytes = call.workspace_bytes();
            let workspace = Workspace { address: (1 << 46) + 256 * n, bytes };
            let begin = Instant::now();
            let address = |operand| ((operand as u64 + 1) << 40) + 256 * n;
            let arrays = [Arrays::new(call.pass, &call.problem.features, address)];
            executor
                .initialize(stream, call, ranks, &|_| ())
                .expect("the recorder refuses nothing");
            executor
                .run(stream, call, ranks, &arrays, workspace, &|_| ())
                .expect("the recorder refuses nothing");
            begin.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[CALLS / 2]
}

fn main() {
    println!("causal zigzag, 8,192 tokens per rank, 32:8 heads, D 128, bfloat16; rank 0");
    let passes = [
        ("forward", Pass::Forward, None),
        ("backward, keys travel", Pass::Backward, Some(Travels::Keys)),
        ("backward, queries travel", Pass::Backward, Some(Travels::Queries)),
    ];
    for world_size in [2, 8, 32] {
        for (name, pass, travels) in passes {
            for batch in [1, 4] {
                let us = median_us(&call(world_size, batch, pass, travels));
                let step = us / world_size as f64;
                println!(
                    "world {world_size:2} batch {batch} {name:24} {us:7.1} us a call, \
                     {step:5.1} us a step"
                );
            }
        }
    }
}
