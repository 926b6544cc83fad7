//! The order of what the CUDA executor enqueues, proven without a device.

mod common;

use burst_attention::Window;
use burst_attention::cuda::record::{self, Program, check, simulate, unneeded};
use burst_attention::cuda::ring::Call;
use burst_attention::problem::{Features, Pass, Problem, Travels};
use burst_attention::schedule::{Family, kept, total_bytes};
use common::devices::{Devices, in_bfloat16};
use common::{problem, problems, windowed};

const WAYS: [(Pass, Option<Travels>); 3] = [
    (Pass::Forward, None),
    (Pass::Backward, Some(Travels::Keys)),
    (Pass::Backward, Some(Travels::Queries)),
];

/// Every layout and mask, aligned and not, windows and features too, in both passes and both ways
/// round.
fn calls(worlds: impl IntoIterator<Item = usize>, tokens: &[usize]) -> Vec<Call> {
    let worlds: Vec<usize> = worlds.into_iter().collect();
    let alike: Vec<_> = tokens.iter().map(|n| (*n, *n)).chain([(6, 10)]).collect();
    let windows = [(Some(3), Some(0)), (Some(2), Some(2)), (Some(7), Some(1))];
    let windows = windows.map(|(left, right)| Window { left, right });
    let few = worlds.iter().copied().filter(|world_size| [1, 2, 3, 5, 8].contains(world_size));
    let windowed = windowed(few, &alike, &windows);
    let segments =
        Features { segments: true, slopes: true, dropout: Some(0.1), ..Features::default() };
    let featured = problems([1, 2, 3], tokens).into_iter().map(|problem| Problem {
        features: segments,
        value_dim: 24,
        ..problem
    });
    let plain = problems(worlds.clone(), tokens).into_iter().chain(windowed);
    let featured = featured.filter(|problem| worlds.contains(&problem.world_size));
    let rings = plain.chain(featured).map(|problem| (problem, Family::Ring));
    let some = worlds.iter().copied().filter(|world_size| [2, 4, 6, 8].contains(world_size));
    let others = problems(some, &tokens[..1]).into_iter().flat_map(|problem| {
        let double = Family::DoubleRing { inner: problem.world_size / 2 };
        [double, Family::AllGather, Family::Balanced].map(|family| (problem.clone(), family))
    });
    let call = |(problem, family): (Problem, Family)| {
        let problem = in_bfloat16(problem);
        WAYS.map(|(pass, travels)| Call { problem: problem.clone(), family, pass, travels })
    };
    rings.chain(others).flat_map(call).collect()
}

fn assert_ordered(call: &Call, program: &Program) {
    if let Err(race) = check(program) {
        panic!("{call:?}: {race}\n{program}");
    }
    assert!(program.idle_waits().is_empty(), "{call:?}: a wait for nothing\n{program}");
}

#[test]
fn nothing_races_and_nobody_waits_for_ever() {
    for call in calls(1..=16, &[2, 6]) {
        let devices = Devices::new(call.problem.world_size);
        let programs = devices.programs(&call);
        programs.iter().for_each(|program| assert_ordered(&call, program));
        for seed in 0..3 {
            if let Err(stuck) = simulate(&programs, seed, |_| Ok(())) {
                panic!("{call:?}: {stuck}");
            }
        }
        // As with CUDA_DEVICE_MAX_CONNECTIONS=1, where all streams share one hardware queue.
        let in_one_queue = |program: Program| {
            let calls = program.calls.into_iter();
            let calls =
                calls.map(|call| record::Call { stream: program.compute, ..call }).collect();
            Program { calls, ..program }
        };
        let queues: Vec<_> = programs.into_iter().map(in_one_queue).collect();
        if let Err(stuck) = simulate(&queues, 0, |_| Ok(())) {
            panic!("{call:?}, in one queue: {stuck}");
        }
        assert_eq!(devices.recorder.violations(), [""; 0], "{call:?}");
    }
}

#[test]
fn every_event_is_needed() {
    for call in calls(1..=16, &[6]) {
        for program in Devices::new(call.problem.world_size).programs(&call) {
            assert_eq!(unneeded(&program), [], "{call:?}\n{program}");
        }
    }
}

#[test]
fn a_virtual_ring_is_ordered_as_tightly() {
    for call in calls(1..=8, &[6]) {
        let program = Devices::new(call.problem.world_size).virtual_program(&call);
        assert_ordered(&call, &program);
        // With two legs, a wait that a later one makes needless may be left; that costs only tests.
        if call.problem.window.left.is_none() {
            assert_eq!(unneeded(&program), [], "{call:?}\n{program}");
        }
    }
}

#[test]
fn bytes_sent_equal_the_formula() {
    for call in calls(1..=16, &[2, 6]) {
        let schedules = kept(&call.problem, call.family, call.pass, call.travels).expect("a ring");
        let devices = Devices::new(call.problem.world_size);
        let sent = (0..call.problem.world_size).map(|rank| devices.run_rank(&call, rank));
        let sent: u64 = sent.sum::<Result<u64, _>>().expect("nothing refuses");
        assert_eq!(sent, total_bytes(&call.problem, &schedules), "{call:?}");
    }
}

#[test]
fn what_no_kernel_computes_is_refused() {
    let refused = |features, value_dim| {
        let problem = in_bfloat16(Problem { features, value_dim, ..problem(1, 8) });
        let call = Call { problem, family: Family::Ring, pass: Pass::Forward, travels: None };
        Devices::new(1).run_rank(&call, 0).expect_err("refused").to_string()
    };
    let (none, dim) = (Features::NONE, problem(1, 8).head_dim);
    for (features, value_dim) in [
        (Features { soft_cap: Some(3.0), ..none }, dim),
        (Features { slopes: true, ..none }, dim),
        (Features { dropout: Some(0.1), ..none }, dim),
        (none, dim + 8),
    ] {
        let bare = refused(features, value_dim);
        assert!(bare.contains("without segments"), "{bare}");
    }
}
