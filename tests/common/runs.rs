//! Runs of all ranks on the host, and checks of their results.

use burst_attention::engine::walk;
use burst_attention::host::kernel::HostKernel;
use burst_attention::host::ring::{Executor, run};
use burst_attention::problem::{Pass, Problem, Travels};
use burst_attention::schedule::{Family, Schedule};
use burst_attention::transport::Transport;

use super::data::{Shard, relative_error};
use super::reference;

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
            let arrays = shard.views(schedule.pass);
            let mut kernel = HostKernel::new(device, problem, schedule, arrays, 0);
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

/// Runs both passes on a single ring through the executor's own function. Returns the bytes sent in
/// each.
pub fn run_both(problem: &Problem, travels: Travels, shards: &[Shard]) -> [u64; 2] {
    run_family_both((problem, Family::Ring, travels), shards)
}

/// Runs both passes with the schedules of a family. Returns the bytes sent in each.
pub fn run_family_both(
    (problem, family, travels): (&Problem, Family, Travels),
    shards: &[Shard],
) -> [u64; 2] {
    [Pass::Forward, Pass::Backward].map(|pass| {
        let arrays = shards.iter().map(|shard| shard.views(pass)).collect();
        run(problem, family, Some(travels), arrays).expect("the ring runs")
    })
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
