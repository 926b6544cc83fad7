//! Proofs, without a device, of the order of the CUDA executor's commands.

mod common;

use std::collections::BTreeSet;

use burst_attention::Window;
use burst_attention::cuda::call::Call;
use burst_attention::cuda::driver::{Event, Stream};
use burst_attention::problem::{Dtype, Features, Order, Pass, Problem, Travels};
use burst_attention::schedule::{Family, cached, total_bytes};
use burst_attention_recorder::{self as recorder, Operation, Program, check, replay, unneeded};
use common::devices::{Devices, in_bfloat16};
use common::{problem, problems, windowed};

const PASSES: [(Pass, Option<Travels>, Order); 4] = [
    (Pass::Forward, None, Order::Fixed),
    (Pass::Backward, Some(Travels::Keys), Order::Fixed),
    (Pass::Backward, Some(Travels::Keys), Order::Any),
    (Pass::Backward, Some(Travels::Queries), Order::Any),
];

fn call_of(problem: Problem, family: Family, pass: Pass, travels: Option<Travels>) -> Call {
    Call { travels, ..Call::new(problem, family, pass) }
}

/// Returns calls of all layouts and masks, aligned and unaligned, with windows and features, in
/// both passes and both directions.
fn calls(worlds: impl IntoIterator<Item = usize>, tokens: &[usize]) -> Vec<Call> {
    let worlds: Vec<usize> = worlds.into_iter().collect();
    let alike: Vec<_> = tokens.iter().map(|n| (*n, *n)).chain([(6, 10)]).collect();
    let windows = [(Some(3), Some(0)), (Some(2), Some(2)), (Some(7), Some(1))];
    let windows = windows.map(|(left, right)| Window { left, right });
    let few = worlds.iter().copied().filter(|world_size| [1, 2, 3, 5, 8].contains(world_size));
    let windowed = windowed(few, &alike, &windows);
    let segments =
        Features { segments: true, slopes: true, dropout: Some(0.1), ..Features::default() };
    let visible = Features { visible: true, also_visible: true, positions: true, ..segments };
    let with = |features| move |problem| Problem { features, value_dim: 24, ..problem };
    let featured = problems([1, 2, 3], tokens).into_iter().map(with(segments));
    let featured = featured.chain(problems([2], &tokens[..1]).into_iter().map(with(visible)));
    let plain = problems(worlds.clone(), tokens).into_iter().chain(windowed);
    let featured = featured.filter(|problem| worlds.contains(&problem.world_size));
    let rings = plain.chain(featured).map(|problem| (problem, Family::Ring));
    let some = worlds.iter().copied().filter(|world_size| [2, 4, 6, 8].contains(world_size));
    let others = problems(some, &tokens[..1]).into_iter().flat_map(|problem| {
        let double = |inner| Family::DoubleRing { inner };
        let halves = double(problem.world_size / 2);
        [halves, double(2), Family::AllGather, Family::Balanced]
            .map(|family| (problem.clone(), family))
    });
    let call = |(problem, family): (Problem, Family)| {
        let problem = in_bfloat16(problem);
        PASSES.map(|(pass, travels, backward_order)| {
            let problem = problem.clone();
            Call { travels, backward_order, ..Call::new(problem, family, pass) }
        })
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
fn nothing_races_and_nothing_waits_for_ever() {
    for call in calls(1..=16, &[2, 6]) {
        let devices = Devices::new(call.problem.world_size);
        let programs = devices.programs(&call);
        programs.iter().for_each(|program| assert_ordered(&call, program));
        assert_eq!(replay(&programs), Ok(()), "{call:?}");
        // With CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share one hardware queue.
        let in_one_queue = |program: Program| {
            let calls = program.calls.into_iter();
            let calls =
                calls.map(|call| recorder::Call { stream: program.compute, ..call }).collect();
            Program { calls, ..program }
        };
        let queues: Vec<_> = programs.into_iter().map(in_one_queue).collect();
        assert_eq!(replay(&queues), Ok(()), "{call:?}, in one queue");
    }
}

#[test]
fn every_event_is_needed() {
    for call in calls(1..=16, &[6]) {
        for program in Devices::new(call.problem.world_size).programs(&call) {
            assert_eq!(unneeded(&program), [""; 0], "{call:?}\n{program}");
        }
    }
}

#[test]
#[ignore = "takes long: make test-full"]
fn a_virtual_ring_is_ordered_as_tightly() {
    for call in calls(1..=8, &[6]) {
        let program = Devices::new(call.problem.world_size).virtual_program(&call);
        assert_ordered(&call, &program);
        // A window on both sides has two ring directions. Then a wait may remain that a later wait
        // makes unneeded, which costs time only in tests.
        if call.problem.window.left.is_none() {
            assert_eq!(unneeded(&program), [""; 0], "{call:?}\n{program}");
        }
    }
}

/// Returns the streams of messages that a program uses.
fn links(program: &Program) -> BTreeSet<Stream> {
    let exchanges =
        program.calls.iter().filter(|call| matches!(call.operation, Operation::Exchange(_)));
    exchanges.map(|call| call.stream).collect()
}

#[test]
fn only_double_rings_have_a_second_stream_for_messages() {
    for call in calls(1..=8, &[6]) {
        let Call { problem, family, .. } = &call;
        let most = 1 + usize::from(family.has_far_links(problem.world_size));
        let found: Vec<_> = Devices::new(problem.world_size)
            .programs(&call)
            .iter()
            .map(|p| links(p).len())
            .collect();
        assert!(found.iter().all(|count| *count <= most), "{call:?}: {found:?}");
        let everything = problem.window == Window::FULL && most == 2;
        assert!(!everything || found.iter().all(|count| *count == 2), "{call:?}: {found:?}");
    }
}

/// A message over a slow link is held back. All steps before its first use still run, with the
/// messages of the inner rings.
#[test]
fn inner_rings_go_on_while_a_slow_link_is_busy() {
    for (inner, travels) in [(4, Travels::Keys), (4, Travels::Queries), (3, Travels::Keys)] {
        let problem = Problem { window: Window::FULL, ..problem(2 * inner, 8) };
        let family = Family::DoubleRing { inner };
        let problem = in_bfloat16(problem);
        for (pass, travels) in [(Pass::Forward, None), (Pass::Backward, Some(travels))] {
            let call = call_of(problem.clone(), family, pass, travels);
            let programs = Devices::new(2 * inner).programs(&call);
            let delayed: Vec<_> = programs.iter().map(delayed).collect();
            assert_eq!(replay(&delayed), Ok(()), "{call:?}");
        }
    }
}

/// Returns the program with its first far exchange delayed: the exchange starts only after
/// everything that was enqueued before the first wait for it, which includes inner exchanges.
fn delayed(program: &Program) -> Program {
    let calls = &program.calls;
    let far = *links(program).last().expect("streams of messages");
    let is_exchange = |call: &recorder::Call| matches!(call.operation, Operation::Exchange(_));
    let first = calls.iter().position(|call| call.stream == far && is_exchange(call));
    let first = first.expect("a far exchange");
    let records = |(index, call): (usize, &recorder::Call)| match call.operation {
        Operation::Record(event) if call.stream == far && index > first => Some((event, index)),
        _ => None,
    };
    let (event, recorded) = calls.iter().enumerate().find_map(records).expect("it is awaited");
    let awaited = |call: &recorder::Call| call.operation == Operation::Wait(event);
    let deadline = recorded + calls[recorded..].iter().position(awaited).expect("its wait");
    let (late, between): (Vec<_>, Vec<_>) =
        calls[first..deadline].iter().cloned().partition(|call| call.stream == far);
    let of_inner = between.iter().filter(|call| is_exchange(call)).count();
    assert!(of_inner > 0, "no inner exchange while the far one is under way");
    let streams = [program.compute, *links(program).first().expect("streams of messages")];
    let mut slow = calls[..first].to_vec();
    slow.extend(between);
    for (number, stream) in streams.into_iter().enumerate() {
        let over = Event(number + 1);
        slow.push(recorder::Call { stream, operation: Operation::Record(over) });
        slow.push(recorder::Call { stream: far, operation: Operation::Wait(over) });
    }
    slow.extend(late);
    slow.extend_from_slice(&calls[deadline..]);
    Program { calls: slow, ..program.clone() }
}

#[test]
fn bytes_sent_equal_the_formula() {
    for call in calls(1..=16, &[2, 6]) {
        let schedules =
            cached(&call.problem, call.family, call.pass, call.travels).expect("a ring");
        let devices = Devices::new(call.problem.world_size);
        let sent = (0..call.problem.world_size).map(|rank| devices.run_rank(&call, rank));
        let sent: u64 = sent.sum::<Result<u64, _>>().expect("nothing refuses");
        assert_eq!(sent, total_bytes(&call.problem, &schedules), "{call:?}");
    }
}

#[test]
fn a_type_without_kernels_is_refused() {
    let call = call_of(problem(1, 8), Family::Ring, Pass::Forward, None);
    assert_eq!(call.problem.dtype, Dtype::F32);
    let error = Devices::new(1).run_rank(&call, 0).expect_err("refused").to_string();
    assert!(error.contains("cast query, key and value to bfloat16"), "{error}");
}

/// Returns the names of the images that a call launches.
fn kernels(call: &Call) -> Vec<String> {
    let programs = Devices::new(call.problem.world_size).programs(call);
    let calls = programs.into_iter().flat_map(|program| program.calls);
    let names = calls.filter_map(|call| match call.operation {
        Operation::Launch(launch) => Some(launch.instance().to_string()),
        _ => None,
    });
    names.collect()
}

#[test]
fn sums_in_any_order_use_the_fused_kernel_where_it_exists() {
    let call = |change: fn(&mut Call)| {
        let mut call = call_of(in_bfloat16(problem(2, 8)), Family::Ring, Pass::Backward, None);
        call.travels = Some(Travels::Keys);
        call.backward_order = Order::Any;
        change(&mut call);
        kernels(&call)
    };
    let has = |kernels: &[String], name| kernels.iter().any(|found| found.starts_with(name));
    let fused = call(|_| ());
    assert!(has(&fused, "attention_bwd_dkdv_fused_bf16_d64"), "{fused:?}");
    assert!(!has(&fused, "attention_bwd_dq"), "{fused:?}");
    let others: [fn(&mut Call); 4] = [
        |call| call.backward_order = Order::Fixed,
        |call| {
            call.travels = Some(Travels::Queries);
            call.problem.window = Window::FULL;
        },
        |call| call.problem.features.soft_cap = Some(3.0),
        |call| call.problem.head_dim = 256,
    ];
    for change in others {
        let split = call(change);
        let fused = has(&split, "attention_bwd_dkdv_fused");
        assert!(has(&split, "attention_bwd_dq") && !fused, "{split:?}");
    }
}
