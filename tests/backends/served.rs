//! cuDNN serves the tiles of some rings, and refuses those of others.

use burst_attention::cuda::call::Call;
use burst_attention::problem::{Features, Order, Pass, Problem, Travels};
use burst_attention::schedule::Family;
use burst_attention::{Layout, Window};
use burst_attention_kernels::backend::{BACKENDS, Kernels, Version, cudnn};
use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{
    Features as LaunchFeatures, ForwardResults, KeyGrads, Rectangle, TileOperation,
};
use burst_attention_recorder::{self as recorder, Operation, Program, check, replay};

use crate::common::devices::{Devices, in_bfloat16};
use crate::common::needs::families_with_inner;
use crate::common::{problem, problems, windowed};
use crate::{IS_FORWARD, IS_LIBRARY, count};

/// Returns a call whose tiles cuDNN serves.
fn of_cudnn(problem: Problem, pass: Pass, family: Family) -> Call {
    let problem = Problem { head_dim: 64, value_dim: 64, ..in_bfloat16(problem) };
    let travels = (pass == Pass::Backward).then_some(Travels::Keys);
    let (backward_order, kernels, lse_gradient) = (Order::Any, Kernels::Cudnn, false);
    Call { travels, backward_order, kernels, lse_gradient, ..Call::new(problem, family, pass) }
}

/// Checks the programs of all ranks, and returns the calls of libraries.
fn checked(capability: (i32, i32), call: &Call) -> usize {
    let world_size = call.problem.world_size;
    let programs = Devices::of(capability, world_size, BACKENDS).programs(call);
    assert_eq!(replay(&programs), Ok(()), "{call:?}");
    for program in &programs {
        check(program).unwrap_or_else(|race| panic!("{call:?}: {race}\n{program}"));
    }
    let all = Devices::of(capability, 1, BACKENDS).virtual_program(call);
    check(&all).unwrap_or_else(|race| panic!("{call:?}: {race}\n{all}"));
    programs.iter().map(|program| count(program, IS_LIBRARY)).sum()
}

#[test]
fn rings_of_cudnn_and_of_kernels_have_no_race_and_end() {
    let mut served = 0;
    for problem in problems(1..=8, &[2, 6]) {
        for pass in [Pass::Forward, Pass::Backward] {
            for family in families_with_inner(problem.world_size, 2) {
                served += checked((9, 0), &of_cudnn(problem.clone(), pass, family));
            }
        }
    }
    assert!(served > 1000, "{served}");
}

/// Alone, as after an all-to-all of heads, a rank meets all keys at once in every layout. The first
/// of causal shards in order meets no keys but its own, in every family. Chunks that `all_gather`
/// brings are tiles of their own.
#[test]
fn cudnn_writes_the_results_of_queries_that_meet_all_their_keys_at_once() {
    for layout in [Layout::Contiguous, Layout::Zigzag, Layout::Striped] {
        for window in [Window::FULL, Window::CAUSAL] {
            let alone = Problem { layout, window, ..problem(1, 8) };
            let call = of_cudnn(alone, Pass::Forward, Family::Ring);
            assert_eq!(of_rank(&call, 0), ["cudnn"], "{call:?}");
        }
    }
    let in_order = Problem { layout: Layout::Contiguous, window: Window::CAUSAL, ..problem(4, 8) };
    for family in [Family::Ring, Family::AllGather, Family::DoubleRing { inner: 2 }] {
        let call = of_cudnn(in_order.clone(), Pass::Forward, family);
        assert_eq!(of_rank(&call, 0), ["cudnn"], "{call:?}");
        let last = of_rank(&call, 3);
        assert_eq!(last.iter().filter(|name| **name == "fold_result").count(), 4, "{last:?}");
    }
}

#[test]
fn windows_of_cudnn_have_no_race_and_end() {
    let windows = [(1, 0), (4, 0), (8, 0), (3, 2)]
        .map(|(left, right)| Window { left: Some(left), right: Some(right) });
    let mut served = [0; 2];
    for problem in windowed(1..=4, &[(6, 6), (4, 6)], &windows) {
        for (served, pass) in served.iter_mut().zip([Pass::Forward, Pass::Backward]) {
            *served += checked((9, 0), &of_cudnn(problem.clone(), pass, Family::Ring));
        }
    }
    assert!(served.iter().all(|served| *served > 100), "{served:?}");
}

/// The corner of a window beside the diagonal has a multiple of four queries. Own kernels compute it
/// where these are more than its keys.
#[test]
fn cudnn_computes_the_tiles_of_a_window() {
    let own = |left| {
        let window = Window { left: Some(left), right: Some(0) };
        let call = of_cudnn(Problem { window, ..problem(4, 8) }, Pass::Forward, Family::Ring);
        let programs = Devices::new(4).programs(&call);
        programs.iter().map(|program| count(program, IS_FORWARD)).collect::<Vec<_>>()
    };
    for left in [4, 8, 16] {
        assert_eq!(own(left), [0; 4], "{left}");
    }
    assert!(own(3)[1..].iter().all(|launches| *launches > 0), "{:?}", own(3));
}

#[test]
fn widths_of_cudnn_have_no_race_and_end() {
    for (head_dim, value_dim, passes) in [(256, 256, 2), (192, 128, 2)] {
        for pass in [Pass::Forward, Pass::Backward].into_iter().take(passes) {
            for layout in [Layout::Contiguous, Layout::Zigzag] {
                let call = of_cudnn(Problem { layout, ..problem(3, 8) }, pass, Family::Ring);
                let problem = Problem { head_dim, value_dim, ..call.problem };
                let served = checked((9, 0), &Call { problem, ..call });
                assert!(served >= 6, "{head_dim} {pass:?} {layout:?}: {served}");
            }
        }
    }
}

/// Blackwell's dq has 16 bits, Hopper's float32.
#[test]
fn sums_of_cudnn_in_a_fixed_order_have_no_race_and_end() {
    for (layout, family) in
        [(Layout::Zigzag, Family::Ring), (Layout::Contiguous, Family::AllGather)]
    {
        let call = of_cudnn(Problem { layout, ..problem(4, 8) }, Pass::Backward, family);
        let call = Call { backward_order: Order::Fixed, ..call };
        for (head_dim, value_dim) in [(64, 64), (128, 128), (192, 128), (256, 256)] {
            let problem = Problem { head_dim, value_dim, ..call.problem.clone() };
            let call = Call { problem, ..call.clone() };
            for (capability, sum) in [((9, 0), "accumulate"), ((10, 0), "add_gradient")] {
                assert!(checked(capability, &call) >= 4, "{call:?}");
                for program in Devices::of(capability, 4, BACKENDS).programs(&call) {
                    let names = names(&program);
                    let sums = names.windows(2).filter(|pair| pair[0] == "cudnn");
                    let sums: Vec<_> = sums.map(|pair| pair[1]).collect();
                    assert!(sums.iter().all(|name| *name == sum), "{names:?}");
                }
            }
        }
    }
}

/// The newest version counts where none is known, as without a GPU.
#[test]
fn own_kernels_compute_what_an_older_cudnn_lacks() {
    let call = of_cudnn(problem(2, 8), Pass::Backward, Family::Ring);
    let fixed = Call { backward_order: Order::Fixed, ..call.clone() };
    let wide = Problem { head_dim: 256, value_dim: 256, ..call.problem.clone() };
    let wide = Call { problem: wide, ..fixed.clone() };
    let any = Version::OLDEST;
    for (capability, call, oldest) in [
        ((9, 0), &call, any),
        ((9, 0), &fixed, Version::FIXED_ON_HOPPER),
        ((10, 0), &fixed, any),
        ((10, 0), &wide, Version::FIXED_256),
    ] {
        let devices = |version| Devices::of(capability, 2, BACKENDS).with_cudnn(version);
        let calls = |version| -> usize {
            let programs = devices(version).programs(call);
            programs.iter().map(|program| count(program, IS_LIBRARY)).sum()
        };
        assert_eq!(calls(oldest), checked(capability, call), "{oldest} on {capability:?}");
        assert!(calls(oldest) >= 2, "{oldest} on {capability:?}");
        if oldest > any {
            let older = Version(oldest.0 - 1);
            assert_eq!(calls(older), 0, "{older} on {capability:?}");
        }
    }
    let older = Devices::new(2).with_cudnn(Version(92_499));
    let choices = older.choices(&fixed).expect("kernels serve").to_string();
    let expected = "(cudnn: it computes all gradients at once; it needs version 9.25.0 or newer for \
                    this, got 9.24.99)";
    assert!(choices.contains(expected), "{choices}");
}

/// Returns the names of what a rank computes.
fn of_rank(call: &Call, rank: usize) -> Vec<&'static str> {
    names(&Devices::new(call.problem.world_size).programs(call).swap_remove(rank))
}

/// Returns the names of what a program computes.
fn names(program: &Program) -> Vec<&'static str> {
    let name = |call: &recorder::Call| match &call.operation {
        Operation::Library(_) => Some("cudnn"),
        Operation::Launch(launch) => Some(launch.instance().kernel.name()),
        _ => None,
    };
    program.calls.iter().filter_map(name).collect()
}

#[test]
fn parts_of_a_ring_are_folded_and_whole_results_are_not() {
    let of_ring = |world_size, pass| {
        let problem = Problem { layout: Layout::Contiguous, ..problem(world_size, 8) };
        of_rank(&of_cudnn(Problem { window: Window::FULL, ..problem }, pass, Family::Ring), 0)
    };
    assert_eq!(of_ring(1, Pass::Forward), ["cudnn"]);
    assert_eq!(of_ring(2, Pass::Forward), ["cudnn", "fold_result", "cudnn", "fold_result"]);
    let one = ["delta", "pack_lse", "cudnn", "accumulate", "add_gradient", "add_gradient", "cast"];
    assert_eq!(of_ring(1, Pass::Backward), one, "heads share keys");
    let two = of_ring(2, Pass::Backward);
    assert_eq!(two.iter().filter(|name| **name == "cudnn").count(), 2, "{two:?}");
    assert_eq!(two.iter().filter(|name| **name == "add_gradient").count(), 4, "{two:?}");
}

/// Gradients of keys arrive in the last two steps of four, while cuDNN computes the next part. Only
/// the kernel that adds it waits.
#[test]
fn cudnn_computes_while_sums_arrive() {
    let problem = Problem { window: Window::FULL, ..problem(4, 8) };
    let call = of_cudnn(problem, Pass::Backward, Family::Ring);
    for program in Devices::new(4).programs(&call) {
        let is_library = |call: &&recorder::Call| IS_LIBRARY(&call.operation);
        let compute = program.calls.iter().find(is_library).expect("cuDNN computes").stream;
        let of_compute = program.calls.iter().filter(|call| call.stream == compute);
        let names = of_compute.filter_map(|call| match &call.operation {
            Operation::Library(_) => Some("cudnn"),
            Operation::Launch(launch) => Some(launch.instance().kernel.name()),
            Operation::Wait(_) => Some("wait"),
            _ => None,
        });
        let names = names.collect::<Vec<_>>();
        let hidden = ["cudnn", "accumulate", "wait", "add_gradient"];
        let steps = names.windows(hidden.len()).filter(|names| *names == hidden).count();
        assert_eq!(steps, 2, "{names:?}");
    }
}

#[test]
fn without_leave_cudnn_computes_nothing() {
    for pass in [Pass::Forward, Pass::Backward] {
        let call = of_cudnn(problem(4, 6), pass, Family::Ring);
        let own = Call { kernels: Kernels::Tile, ..call };
        for program in Devices::new(4).programs(&own) {
            assert_eq!(count(&program, IS_LIBRARY), 0);
        }
    }
}

#[test]
fn what_cudnn_refuses_says_why() {
    let refusals = |call: &Call| Devices::new(2).choices(call).expect("kernels serve").to_string();
    let call = |pass| of_cudnn(problem(2, 6), pass, Family::Ring);
    let segments = Features { segments: true, ..Features::default() };
    let featured = Call {
        problem: Problem { features: segments, ..call(Pass::Forward).problem },
        ..call(Pass::Forward)
    };
    let expected = "(cudnn: it serves no feature but a causal mask and a window)";
    assert!(refusals(&featured).contains(expected), "{}", refusals(&featured));
    let with_gradient = Call { lse_gradient: true, ..call(Pass::Backward) };
    let expected = "cudnn: it needs the results of the queries, and a log-sum-exp without gradient";
    assert!(refusals(&with_gradient).contains(expected), "{}", refusals(&with_gradient));
    let travelling = Call { travels: Some(Travels::Queries), ..call(Pass::Backward) };
    let expected = "cudnn: it computes all gradients at once";
    assert!(refusals(&travelling).contains(expected), "{}", refusals(&travelling));
}

const SQUARE: Rectangle = Rectangle {
    batch: 1,
    q_len: 8,
    kv_len: 8,
    heads: 2,
    kv_heads: 1,
    head_dim: 128,
    value_dim: 128,
    element: Element::Bf16,
    lower: i64::MIN,
    upper: 0,
    softmax_scale: 0.1,
};

/// The reason why cuDNN refuses an operation on a target.
fn reason(target: Target, operation: impl Into<TileOperation>) -> String {
    let answer = (cudnn::BACKEND.serves)(&operation.into(), target);
    answer.expect_err("it is refused").to_string()
}

#[test]
fn what_cudnn_has_no_plan_for_is_refused_with_a_reason() {
    let square = SQUARE;
    let gradients = |rectangle| KeyGrads {
        results: Some(ForwardResults::default()),
        ..KeyGrads::fused(rectangle, LaunchFeatures::default())
    };
    let expected = "it serves full masks and bands that hold the diagonal; with a lower limit no \
                    more queries than keys";
    for (lower, upper, q_len) in [(1, i64::MAX, 8), (i64::MIN, -1, 8), (-3, 0, 9)] {
        let beside = Rectangle { lower, upper, q_len, ..square };
        assert_eq!(reason(Target::Sm90, gradients(beside)), expected, "{beside:?}");
    }
    let wide = Rectangle { head_dim: 256, value_dim: 256, ..square };
    let expected = "it adds 256 columns on sm_100 in a fixed order alone";
    assert_eq!(reason(Target::Sm100, gradients(wide)), expected);
    let odd = Rectangle { head_dim: 96, value_dim: 96, ..square };
    let expected = "it has no plan for 96 and 96 columns";
    assert_eq!(reason(Target::Sm90, gradients(odd)), expected);
    let fixed = KeyGrads { fixed_order: true, ..gradients(wide) };
    assert_eq!((cudnn::BACKEND.serves)(&fixed.into(), Target::Sm100), Ok(()));
    assert_eq!(reason(Target::Sm120, gradients(square)), "it is not used on sm_120");
    let pair = Rectangle { q_len: 1, kv_len: 1, ..square };
    assert_eq!(reason(Target::Sm90, gradients(pair)), "there is too little to compute");
}
