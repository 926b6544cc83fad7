//! The engine over real transports: the same numbers however chunks travel, and the right ones.

mod common;

use std::sync::Arc;

use burst_attention::engine::walk;
use burst_attention::host::isa::Isa;
use burst_attention::host::kernel::{BackwardBuffers, ForwardBuffers, HostKernel};
use burst_attention::host::ring::{Executor, RingBuffers, run};
use burst_attention::host::transport::{HostTransport, Mailboxes};
use burst_attention::problem::{Dtype, Pass, Problem, Travels};
use burst_attention::schedule::{Schedule, Step, ring, total_bytes};
use burst_attention::transport::Transport;
use burst_attention::{Error, Layout};
use common::adversary::{Adversary, Network};
use common::data::{Shard, relative_error};
use common::{problem, problems, reference};

const SIDES: [Travels; 2] = [Travels::Keys, Travels::Queries];

fn forward_buffers(shard: &Shard) -> ForwardBuffers {
    let Shard { q, k, v, o, lse, .. } = shard;
    ForwardBuffers { q: q.view(), k: k.view(), v: v.view(), o: o.view(), lse: lse.view() }
}

fn backward_buffers(shard: &Shard) -> BackwardBuffers {
    let Shard { q, k, v, dout, dlse, o, lse, dq, dk, dv } = shard;
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
    }
}

/// Walks all ranks' schedules, each on its own thread, and returns the bytes sent.
fn walk_all<T: Transport<burst_attention::host::buffer::HostBuffer> + Send>(
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
fn run_both(problem: &Problem, travels: Travels, shards: &[Shard]) -> [u64; 2] {
    let forward = RingBuffers::Forward(shards.iter().map(forward_buffers).collect());
    let backward = RingBuffers::Backward(shards.iter().map(backward_buffers).collect());
    [forward, backward].map(|buffers| run(problem, Some(travels), buffers).expect("the ring runs"))
}

fn assert_right(problem: &Problem, shards: &[Shard], what: &str) {
    let truth = reference::dense(problem, shards);
    for (output, want) in truth.iter().enumerate() {
        let name = shards[0].outputs()[output].0;
        let got: Vec<f64> =
            shards.iter().flat_map(|shard| shard.outputs()[output].1.values()).collect();
        let bound = if output < 2 { 1e-6 } else { 1.5e-6 };
        let error = relative_error(&got, &want.concat());
        assert!(error <= bound, "{what}: {name} is off by {error:.2e}: {problem:?}");
    }
}

fn assert_same_bits(a: &[Shard], b: &[Shard], what: &str) {
    for (rank, (a, b)) in a.iter().zip(b).enumerate() {
        for ((name, a), (_, b)) in a.outputs().into_iter().zip(b.outputs()) {
            assert!(a.bits() == b.bits(), "{what}: {name} of rank {rank} differs");
        }
    }
}

#[test]
fn every_layout_and_side_agrees_with_the_dense_reference() {
    for problem in problems([1, 2, 3, 5, 8], &[1, 2, 7, 18]) {
        for travels in SIDES {
            let shards = Shard::random(&problem, 1);
            run_both(&problem, travels, &shards);
            assert_right(&problem, &shards, &format!("{travels:?} travel"));
        }
    }
}

#[test]
fn a_hostile_network_changes_no_bit() {
    let executor = Executor::new(Isa::best(), 2);
    for (seed, problem) in problems([1, 2, 3, 5, 8], &[1, 2, 7, 18]).into_iter().enumerate() {
        for travels in SIDES {
            let kind = Shard::random(&problem, 2);
            let mut sent = run_both(&problem, travels, &kind).into_iter();
            let hostile = Shard::random(&problem, 2);
            for pass in [Pass::Forward, Pass::Backward] {
                let schedules = ring(&problem, pass, travels);
                let network = Arc::new(Network::default());
                let transport = |rank| Adversary::new(rank, network.clone(), seed as u64);
                let bytes = walk_all((&problem, &schedules), &executor, &hostile, transport);
                assert_eq!(bytes.ok(), sent.next(), "{pass:?} {travels:?} {problem:?}");
            }
            assert_same_bits(&kind, &hostile, &format!("{travels:?} {problem:?}"));
        }
    }
}

#[test]
fn bytes_are_counted_where_they_are_sent() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for layout in Layout::ALL {
            for travels in SIDES {
                let problem = Problem { dtype, layout, ..problem(4, 6) };
                let counted = run_both(&problem, travels, &Shard::random(&problem, 3));
                let formula = [Pass::Forward, Pass::Backward]
                    .map(|pass| total_bytes(&problem, &ring(&problem, pass, travels)));
                assert_eq!(counted, formula, "{dtype} {layout} {travels:?}");
            }
        }
    }
}

#[test]
fn twenty_runs_give_the_same_bits() {
    for travels in SIDES {
        let problem = Problem { layout: Layout::Zigzag, ..problem(8, 18) };
        let first = Shard::random(&problem, 4);
        run_both(&problem, travels, &first);
        for _ in 1..20 {
            let again = Shard::random(&problem, 4);
            run_both(&problem, travels, &again);
            assert_same_bits(&first, &again, "repeated");
        }
    }
}

#[test]
fn the_error_does_not_grow_with_the_ring() {
    // Group size 1 and enough keys that accumulation matters; the same global problem.
    let error = |world_size: usize| {
        let base = problem(world_size, 512 / world_size);
        let problem = Problem { heads: 2, kv_heads: 2, batch: 1, ..base };
        let errors = (0..4).map(|seed| {
            let shards = Shard::random(&problem, seed);
            run_both(&problem, Travels::Keys, &shards);
            let truth = reference::dense(&problem, &shards);
            let gradients = (2..5).map(|output| {
                let got: Vec<f64> =
                    shards.iter().flat_map(|shard| shard.outputs()[output].1.values()).collect();
                relative_error(&got, &truth[output].concat())
            });
            gradients.sum::<f64>()
        });
        errors.sum::<f64>()
    };
    let (alone, ring) = (error(1), error(8));
    assert!(ring <= 1.1 * alone, "world 8: {ring:.2e}, world 1: {alone:.2e}");
}

type Spoiler = fn(&mut Vec<Schedule>);

/// A spoiled set of schedules either stops with an error or gives a wrong result; it may not pass.
#[test]
fn spoiled_schedules_do_not_give_right_results() {
    let spoilers: [(&str, Spoiler); 3] = [
        ("tile dropped", |schedules| schedules[1].steps[1].tiles.clear()),
        ("mask shifted", |schedules| {
            let tile = &mut schedules[2].steps[0].tiles[0];
            tile.band.upper -= 1;
        }),
        ("source swapped", |schedules| {
            let (a, b) = (schedules[1].steps[1].tiles.clone(), schedules[2].steps[1].tiles.clone());
            if a == b {
                schedules[1].steps[1].tiles[0].keys.rows.end -= 1;
            } else {
                schedules[1].steps[1].tiles[0].keys.rows.start += 1;
            }
        }),
    ];
    let executor = Executor::new(Isa::best(), 2);
    let problem = Problem { layout: Layout::Striped, ..problem(4, 6) };
    for (name, spoil) in spoilers {
        let shards = Shard::random(&problem, 5);
        run_both(&problem, Travels::Keys, &shards);
        let mut schedules = ring(&problem, Pass::Backward, Travels::Keys);
        spoil(&mut schedules);
        let mailboxes = Arc::new(Mailboxes::default());
        let transport = |rank| HostTransport::new(rank, 4, mailboxes.clone());
        let ran = walk_all((&problem, &schedules), &executor, &shards, transport);
        let truth = reference::dense(&problem, &shards);
        let wrong = (2..5).any(|output| {
            let got: Vec<f64> =
                shards.iter().flat_map(|shard| shard.outputs()[output].1.values()).collect();
            // NaN compares false, and so counts as wrong.
            let fine = relative_error(&got, &truth[output].concat()) <= 1.5e-6;
            !fine
        });
        assert!(ran.is_err() || wrong, "{name} went unnoticed");
    }
}

#[test]
fn a_swapped_peer_is_noticed() {
    let executor = Executor::new(Isa::best(), 2);
    let problem = Problem { layout: Layout::Zigzag, ..problem(3, 4) };
    let mut schedules = ring(&problem, Pass::Forward, Travels::Keys);
    let swap = |step: &mut Step| {
        step.exchanges.iter_mut().flat_map(|e| &mut e.sends).for_each(|send| send.peer = 2);
    };
    schedules[1].steps.iter_mut().for_each(swap);
    let shards = Shard::random(&problem, 6);
    let mailboxes = Arc::new(Mailboxes::default());
    // A rank that waits in vain is released by the ring's end, as the executor's watchdog does.
    let watchdog = mailboxes.clone();
    let (ended, end) = std::sync::mpsc::channel::<()>();
    let guard = std::thread::spawn(move || {
        if end.recv_timeout(std::time::Duration::from_millis(500)).is_err() {
            watchdog.break_ring(0, "nobody came".into());
        }
    });
    let transport = |rank| HostTransport::new(rank, 3, mailboxes.clone());
    let ran = walk_all((&problem, &schedules), &executor, &shards, transport);
    // The ring may be over already; then nobody listens any more.
    let _ = ended.send(());
    guard.join().expect("no panic");
    let truth = reference::dense(&problem, &shards);
    let got: Vec<f64> = shards.iter().flat_map(|shard| shard.o.values()).collect();
    let right = relative_error(&got, &truth[0].concat()) <= 1e-6;
    assert!(ran.is_err() || !right);
}

#[test]
fn a_buffer_of_the_wrong_shape_is_refused() {
    let problem = problem(2, 4);
    let shards = Shard::random(&Problem { head_dim: 24, ..problem.clone() }, 7);
    let buffers = RingBuffers::Forward(shards.iter().map(forward_buffers).collect());
    let error = run(&problem, None, buffers).expect_err("head_dim 24 is not 16");
    assert_eq!(error.to_string(), "q must be [2, 4, 4, 16], got [2, 4, 4, 24]");
    assert!(matches!(error, Error::InvalidProblem { name: "q", .. }));
}
