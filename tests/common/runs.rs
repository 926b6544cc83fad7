//! Runs of all ranks on the host, and what they must agree with.

use burst_attention::engine::walk;
use burst_attention::host::kernel::{BackwardBuffers, ForwardBuffers, HostKernel};
use burst_attention::host::ring::{Executor, RingBuffers, run_family};
use burst_attention::problem::{Pass, Problem, Travels};
use burst_attention::schedule::{Family, Schedule};
use burst_attention::transport::Transport;

use super::data::{Shard, relative_error};
use super::reference;

pub fn forward_buffers(shard: &Shard) -> ForwardBuffers {
    let Shard { q, k, v, o, lse, extras, .. } = shard;
    ForwardBuffers {
        q: q.view(),
        k: k.view(),
        v: v.view(),
        o: o.view(),
        lse: lse.view(),
        extras: extras.views(Pass::Forward),
    }
}

pub fn backward_buffers(shard: &Shard) -> BackwardBuffers {
    let Shard { q, k, v, dout, dlse, o, lse, dq, dk, dv, extras } = shard;
    BackwardBuffers {
        q: q.view(),
        k: k.view(),
        v: v.view(),
        o: o.view(),
        lse: lse.view(),
        dout: dout.view(),
        dlse: dlse.view(),
        dq: dq.view(),
        dk: dk.view(),
        dv: dv.view(),
        extras: extras.views(Pass::Backward),
    }
}

/// Walks all ranks' schedules, each on its own thread, and returns the bytes sent.
pub fn walk_all<T: Transport<burst_attention::host::buffer::HostBuffer> + Send>(
    (problem, schedules): (&Problem, &[Schedule]),
    executor: &Executor,
    shards: &[Shard],
    transport: impl Fn(usize) -> T + Sync,
) -> burst_attention::Result<u64> {
    std::thread::scope(|scope| {
        let rank = |schedule: &Schedule, shard: &Shard| {
            let device = (executor.isa, &executor.pool);
            let mut kernel = match schedule.pass {
                Pass::Forward => {
                    HostKernel::forward(device, problem, schedule, forward_buffers(shard), 0)
                }
                Pass::Backward => {
                    HostKernel::backward(device, problem, schedule, backward_buffers(shard), 0)
                }
            };
            let mut transport = transport(schedule.rank);
            walk(schedule, &mut kernel, &mut transport)?;
            Ok(transport.bytes_sent())
        };
        let threads: Vec<_> = schedules
            .iter()
            .zip(shards)
            .map(|(schedule, shard)| scope.spawn(move || rank(schedule, shard)))
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
    })
}

/// Forward and backward over the executor's own entry; returns bytes sent in both passes.
pub fn run_both(problem: &Problem, travels: Travels, shards: &[Shard]) -> [u64; 2] {
    run_family_both((problem, Family::Ring, travels), shards)
}

/// Likewise with the schedules of a family.
pub fn run_family_both(
    (problem, family, travels): (&Problem, Family, Travels),
    shards: &[Shard],
) -> [u64; 2] {
    let forward = RingBuffers::Forward(shards.iter().map(forward_buffers).collect());
    let backward = RingBuffers::Backward(shards.iter().map(backward_buffers).collect());
    [forward, backward]
        .map(|buffers| run_family(problem, family, Some(travels), buffers).expect("the ring runs"))
}

pub fn assert_right(problem: &Problem, shards: &[Shard], what: &str) {
    let truth = reference::dense(problem, shards);
    for (output, want) in truth.iter().enumerate() {
        let name = shards[0].outputs()[output].0;
        let ranks = shards.iter().map(|shard| shard.outputs()[output].1.values());
        // The gradient of a slope is one small difference of many large terms.
        let bound = match name {
            "o" | "lse" => 1e-6,
            "dslopes" => 4e-6,
            _ => 1.5e-6,
        };
        let error = if name == "dslopes" {
            let sum = |a: Vec<f64>, b: Vec<f64>| a.iter().zip(b).map(|(a, b)| a + b).collect();
            relative_error(&ranks.reduce(sum).expect("a rank"), &want[0])
        } else {
            relative_error(&ranks.flatten().collect::<Vec<_>>(), &want.concat())
        };
        assert!(error <= bound, "{what}: {name} is off by {error:.2e}: {problem:?}");
    }
}

pub fn assert_same_bits(a: &[Shard], b: &[Shard], what: &str) {
    for (rank, (a, b)) in a.iter().zip(b).enumerate() {
        for ((name, a), (_, b)) in a.outputs().into_iter().zip(b.outputs()) {
            assert!(a.bits() == b.bits(), "{what}: {name} of rank {rank} differs");
        }
    }
}
