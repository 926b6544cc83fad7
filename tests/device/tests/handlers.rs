//! Tests from XLA's handlers to kernels and messages: all ranks of a ring in one process compute
//! attention, and each failure on the way becomes an XLA error.

mod calls;

use burst_attention::cuda::call::Call;
use burst_attention::schedule::Family;
use burst_attention::{Dtype, Features, Layout, Order, Pass, Problem, Travels, Window};
use burst_attention_device_tests::{Ring, Shard, World};
use burst_attention_ffi::cuda::Stage;
use burst_attention_ffi::sys;
use burst_attention_test_frames::FakeAttribute;
use calls::{
    COMMUNICATION_ID, Handlers, RankCall, STAGES, backward, call, double, forward, problem, rank,
};

/// Runs one pass of all ranks through the handlers and carries out their programs.
fn pass(handlers: &Handlers, call: &Call, world: &mut World, shards: &[Shard], seed: u64) {
    let place = |rank: usize, world: &mut World| {
        let bytes = call.workspace_bytes().max(1);
        let workspace = world.allocate(rank, "workspace", bytes).0;
        handlers.rank(call, rank, shards[rank].arrays(call.pass, &call.problem.features), workspace)
    };
    let ranks: Vec<RankCall> =
        (0..call.problem.world_size).map(|rank| place(rank, world)).collect();
    ranks.iter().for_each(|rank| assert_eq!(rank.instantiate(call.pass), Ok(())));
    for stage in STAGES {
        for rank in &ranks {
            assert_eq!(rank.stage(handlers.platform, stage), Ok(()), "{stage:?} of {call:?}");
        }
        world.adopt(&handlers.recorder);
        let programs = handlers.recorder.take();
        world.carry_out(&programs, seed).unwrap_or_else(|stuck| panic!("{call:?}: {stuck}"));
    }
}

/// Runs the forward pass, then the backward pass from its results, and checks both.
fn both_passes(problem: &Problem, travels: Travels, seed: u64) {
    both_passes_of(Family::Ring, problem, travels, seed);
}

fn both_passes_of(family: Family, problem: &Problem, travels: Travels, seed: u64) {
    let ring = Ring::new(problem.clone(), seed);
    let handlers = Handlers::new(problem.world_size);
    let mut world = World::new();
    let shards = ring.place(&mut world, |rank| rank);
    let call = |pass, travels| call(problem.clone(), family, pass, travels);
    let case = || format!("{family}, {travels:?} travel, seed {seed}, {problem:?}");
    pass(&handlers, &call(Pass::Forward, None), &mut world, &shards, seed);
    ring.check_forward(&world, &shards).unwrap_or_else(|what| panic!("{}: {what}", case()));
    pass(&handlers, &call(Pass::Backward, Some(travels)), &mut world, &shards, seed);
    ring.check_backward(&world, &shards).unwrap_or_else(|what| panic!("{}: {what}", case()));
    assert_eq!(handlers.recorder.violations(), [""; 0], "{}", case());
}

#[test]
fn rings_of_1_2_and_4_compute_attention_in_every_layout_and_direction() {
    for world_size in [1, 2, 4] {
        for layout in Layout::ALL {
            for (seed, travels) in [(1, Travels::Keys), (2, Travels::Queries)] {
                both_passes(&problem(world_size, layout), travels, seed);
            }
        }
    }
}

#[test]
#[ignore = "takes long: make test-full"]
fn full_masks_float16_and_unaligned_halves_compute_attention() {
    for travels in [Travels::Keys, Travels::Queries] {
        let full = Problem { window: Window::FULL, ..problem(4, Layout::Zigzag) };
        both_passes(&full, travels, 3);
        let odd =
            Problem { q_len: 10, kv_len: 10, dtype: Dtype::F16, ..problem(2, Layout::Zigzag) };
        both_passes(&odd, travels, 4);
    }
}

#[test]
#[ignore = "takes long: make test-full"]
fn windows_and_all_features_compute_attention() {
    let features =
        Features { segments: true, slopes: true, soft_cap: Some(2.0), dropout: Some(0.3) };
    for (layout, travels) in
        Layout::ALL.into_iter().zip([Travels::Queries, Travels::Keys].iter().cycle())
    {
        let window = Window { left: Some(9), right: Some(2) };
        let problem = Problem { features, window, value_dim: 24, ..problem(2, layout) };
        both_passes(&problem, *travels, 6);
    }
}

#[test]
fn the_other_schedules_compute_attention() {
    let double = Family::DoubleRing { inner: 2 };
    for (family, layout) in [
        (double, Layout::Zigzag),
        (Family::Balanced, Layout::Contiguous),
        (Family::AllGather, Layout::Striped),
    ] {
        for (seed, travels) in [(7, Travels::Keys), (8, Travels::Queries)] {
            both_passes_of(family, &problem(4, layout), travels, seed);
        }
    }
}

#[test]
fn the_communicator_has_a_number_of_the_library() {
    let (handlers, call) = (Handlers::new(2), forward(2));
    let rank = rank(&handlers, &call, 0);
    assert_eq!(rank.all(handlers.platform, Pass::Forward), Ok(()));
    let gpu = rank.runtime.context.gpu.as_deref().expect("it has one");
    assert_eq!(gpu.requests(), [(vec![vec![0, 1], vec![2, 3]], COMMUNICATION_ID)]);

    let call = double(Pass::Forward, None);
    let both = Handlers::new(call.problem.world_size);
    let rank = self::rank(&both, &call, 0);
    assert_eq!(rank.all(both.platform, Pass::Forward), Ok(()));
    let gpu = rank.runtime.context.gpu.as_deref().expect("it has one");
    let numbers: Vec<_> = gpu.requests().into_iter().map(|(_, number)| number).collect();
    assert_eq!(
        numbers,
        [COMMUNICATION_ID, COMMUNICATION_ID + 1],
        "slow links have their own communicator"
    );

    let (alone, call) = (Handlers::new(1), forward(1));
    let rank = self::rank(&alone, &call, 0);
    assert_eq!(rank.all(alone.platform, Pass::Forward), Ok(()));
    let gpu = rank.runtime.context.gpu.as_deref().expect("it has one");
    assert!(gpu.requests().is_empty(), "a ring of one needs no communicator");
}

#[test]
fn a_missing_part_of_the_runtime_is_named() {
    let (handlers, call) = (Handlers::new(2), forward(2));
    let refused = |change: &dyn Fn(&mut RankCall), stage: Stage, parts: &[&str]| {
        let mut rank = rank(&handlers, &call, 0);
        change(&mut rank);
        assert_eq!(rank.instantiate(Pass::Forward), Ok(()));
        if stage != Stage::Prepare {
            assert_eq!(rank.stage(handlers.platform, Stage::Prepare), Ok(()));
        }
        let (_, message) = rank.stage(handlers.platform, stage).expect_err("refused");
        parts.iter().for_each(|part| assert!(message.contains(part), "{part} in {message}"));
    };
    let no_extension = |rank: &mut RankCall| {
        *rank.runtime.context.gpu.as_mut().expect("it has one").extension() = None;
    };
    let needed = ["context", "no Collectives extension", "jaxlib and jax-cuda13-plugin 0.11.2"];
    refused(&no_extension, Stage::Prepare, &needed);
    let newer = |rank: &mut RankCall| {
        let extension = rank.runtime.context.gpu.as_mut().expect("it has one").extension();
        extension.as_mut().expect("it has one").extension_base.id.major_version = 1;
    };
    refused(&newer, Stage::Prepare, &["major version 1", "expected 0"]);
    let old = |rank: &mut RankCall| {
        rank.runtime.table.XLA_FFI_InvokeContext_FindExtension = None;
    };
    refused(&old, Stage::Prepare, &["XLA_FFI_InvokeContext_FindExtension", "0.11.2"]);
    let float32 = |rank: &mut RankCall| {
        let buffers = rank.args.iter_mut().chain(&mut rank.rets[..2]);
        buffers.for_each(|buffer| buffer.dtype = sys::XLA_FFI_DataType_F32);
    };
    let words = ["float32 is not supported on CUDA", "bfloat16 or float16"];
    refused(&float32, Stage::Initialize, &words);
    let small = |rank: &mut RankCall| rank.rets[2].dims[0] -= 1;
    refused(&small, Stage::Execute, &["workspace must have at least"]);
}

#[test]
fn the_backward_pass_needs_one_of_two_orders_and_the_forward_pass_none() {
    let handlers = Handlers::new(2);
    let call = Call { backward_order: Order::Any, ..backward(Travels::Keys) };
    let mut rank = self::rank(&handlers, &call, 0);
    assert_eq!(rank.all(handlers.platform, Pass::Backward), Ok(()));
    let order = |(name, _): &(String, _)| name == "backward_order";
    let index = rank.attributes.iter().position(order).expect("the attribute is there");
    rank.attributes[index].1 = FakeAttribute::Text("some".into());
    let refused = |rank: &RankCall, parts: [&str; 3]| {
        let (code, message) = rank.instantiate(Pass::Backward).expect_err("refused");
        assert_eq!(code, sys::XLA_FFI_Error_Code_INVALID_ARGUMENT, "{message}");
        parts.iter().for_each(|part| assert!(message.contains(part), "{part} in {message}"));
    };
    refused(&rank, ["backward_order", "fixed or any", "some"]);
    rank.attributes.remove(index);
    refused(&rank, ["attribute backward_order", "given", "only ["]);

    let rank = self::rank(&handlers, &forward(2), 0);
    assert!(!rank.attributes.iter().any(order));
    assert_eq!(rank.instantiate(Pass::Forward), Ok(()));
}

#[test]
fn a_communicator_that_is_not_the_rings_or_is_broken_is_refused() {
    let (handlers, call) = (Handlers::new(2), forward(2));
    let rank = rank(&handlers, &call, 0);
    assert_eq!(rank.all(handlers.platform, Pass::Forward), Ok(()));
    handlers.recorder.set_async_error(handlers.devices[0].1[0], 6);
    let (_, message) = rank.stage(handlers.platform, Stage::Execute).expect_err("refused");
    for part in ["ncclCommGetAsyncError", "rank 0 of 2", "code 6"] {
        assert!(message.contains(part), "{part} in {message}");
    }
    let (other, call) = (Handlers::new(3), forward(2));
    let rank = self::rank(&other, &call, 0);
    let (_, message) = rank.all(other.platform, Pass::Forward).expect_err("refused");
    assert!(message.contains("expected a communicator of 2 ranks"), "{message}");
}

#[test]
fn a_communicator_that_does_not_block_is_asked_until_it_is_done() {
    let (handlers, call) = (Handlers::new(2), forward(2));
    handlers.recorder.set_in_progress(handlers.devices[0].1[0], 3, 0);
    let rank = rank(&handlers, &call, 0);
    assert_eq!(rank.all(handlers.platform, Pass::Forward), Ok(()));
    assert_eq!(handlers.recorder.violations(), [""; 0]);
}

#[test]
fn unknown_gpus_are_refused() {
    let handlers = Handlers::new(1);
    let turing = handlers.recorder.add_device_of((7, 5));
    let unknown = Handlers { devices: vec![(turing, handlers.devices[0].1)], ..handlers };
    let call = forward(1);
    let rank = rank(&unknown, &call, 0);
    let (code, message) = rank.all(unknown.platform, Pass::Forward).expect_err("refused");
    assert_eq!(code, sys::XLA_FFI_Error_Code_UNIMPLEMENTED);
    for part in ["compute capability 7.5", "9.0 (H100, H200)"] {
        assert!(message.contains(part), "{part} in {message}");
    }
}
