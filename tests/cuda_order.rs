//! The order of what the CUDA executor enqueues, proven without a device.

mod common;

use burst_attention::cuda::record::{self, Program, check, simulate, unneeded};
use burst_attention::cuda::ring::Call;
use burst_attention::problem::{Pass, Problem, Travels};
use burst_attention::schedule::{kept, total_bytes};
use common::devices::{Devices, in_bfloat16};
use common::problems;

const WAYS: [(Pass, Option<Travels>); 3] = [
    (Pass::Forward, None),
    (Pass::Backward, Some(Travels::Keys)),
    (Pass::Backward, Some(Travels::Queries)),
];

/// Every layout and mask, aligned and not, in both passes and both ways round.
fn calls(worlds: impl IntoIterator<Item = usize>, tokens: &[usize]) -> Vec<Call> {
    let problems = problems(worlds, tokens).into_iter().map(in_bfloat16);
    let call = |problem: Problem| {
        WAYS.map(|(pass, travels)| Call { problem: problem.clone(), pass, travels })
    };
    problems.flat_map(call).collect()
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
        assert_eq!(unneeded(&program), [], "{call:?}\n{program}");
    }
}

#[test]
fn bytes_sent_equal_the_formula() {
    for call in calls(1..=16, &[2, 6]) {
        let schedules = kept(&call.problem, call.pass, call.travels);
        let devices = Devices::new(call.problem.world_size);
        let sent = (0..call.problem.world_size).map(|rank| devices.run_rank(&call, rank));
        let sent: u64 = sent.sum::<Result<u64, _>>().expect("nothing refuses");
        assert_eq!(sent, total_bytes(&call.problem, &schedules), "{call:?}");
    }
}
