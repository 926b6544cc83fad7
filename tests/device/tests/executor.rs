//! Tests of the executor from its arguments to results in memory: the devices of all ranks get both
//! passes, and a world carries out their programs in random orders.

use burst_attention::cuda::call::Call;
use burst_attention::cuda::device::{Executor, RankSet};
use burst_attention::cuda::driver::Stream;
use burst_attention::cuda::nccl::{Comm, Communicator};
use burst_attention::cuda::workspace::Workspace;
use burst_attention::schedule::Family;
use burst_attention::{Dtype, Features, Layout, Order, Pass, Problem, Travels, Window};
use burst_attention_device_tests::{Ring, Shard, World};
use burst_attention_recorder::{Program, Recorder, check, images, nccl};

const WINDOW: Window = Window { left: Some(6), right: Some(1) };

const PROBLEM: Problem = Problem {
    batch: 2,
    q_len: 12,
    kv_len: 12,
    heads: 2,
    kv_heads: 1,
    head_dim: 16,
    value_dim: 16,
    dtype: Dtype::Bf16,
    window: Window::CAUSAL,
    softmax_scale: 0.25,
    features: Features::NONE,
    layout: Layout::Contiguous,
    world_size: 4,
};

/// The devices of a ring, with their memory.
struct Setup<'a> {
    ring: &'a Ring,
    family: Family,
    shards: Vec<Shard>,
    world: World,
    recorder: Recorder,
    executor: Executor,
    devices: Vec<Stream>,
    comms: Vec<[Comm; 2]>,
}

impl<'a> Setup<'a> {
    /// Returns a setup with a device for each rank, or one device for all ranks.
    fn new(ring: &'a Ring, family: Family, one_device: bool) -> Setup<'a> {
        let (recorder, mut world) = (Recorder::new(), World::new());
        let ranks = ring.problem.world_size;
        let shards = ring.place(&mut world, |rank| if one_device { 0 } else { rank });
        let executor = Executor::new(Box::new(recorder.clone()), images);
        let devices: Vec<_> =
            (0..if one_device { 1 } else { ranks }).map(|_| recorder.add_device()).collect();
        let comm = |(rank, device): (usize, &Stream)| {
            [(); 2].map(|()| recorder.add_comm(rank, ranks, *device))
        };
        let comms = devices.iter().enumerate().map(comm).collect();
        Setup { ring, family, shards, world, recorder, executor, devices, comms }
    }

    /// Runs both stages of a call on every device, as XLA calls them. Returns the programs of each
    /// stage.
    fn enqueue(&mut self, call: &Call) -> [Vec<Program>; 2] {
        for rank in 0..self.devices.len() {
            self.on(rank, call, |setup, ranks, device| {
                let prepared = setup.executor.initialize(device, call, ranks, &|_| ());
                prepared.expect("nothing refuses");
            });
        }
        let connecting = self.recorder.take();
        self.world.adopt(&self.recorder);
        let bytes = call.workspace_bytes() * (self.shards.len() / self.devices.len()) as u64;
        for rank in 0..self.devices.len() {
            let address = self.world.allocate(rank, "workspace", bytes).0;
            self.on(rank, call, |setup, ranks, device| {
                let arrays: Vec<_> = setup
                    .shards
                    .iter()
                    .map(|shard| shard.arrays(call.pass, &call.problem.features))
                    .collect();
                let arrays =
                    if matches!(ranks, RankSet::All) { &arrays[..] } else { &arrays[rank..=rank] };
                let workspace = Workspace { address, bytes };
                let ran = setup.executor.run(device, call, ranks, arrays, workspace, &|_| ());
                ran.expect("nothing refuses");
            });
        }
        assert_eq!(self.recorder.violations(), [""; 0]);
        [connecting, self.recorder.take()]
    }

    /// Calls `act` with the device of a rank and the ranks that this device runs.
    fn on(&self, rank: usize, call: &Call, act: impl Fn(&Setup<'_>, RankSet<'_>, Stream)) {
        let (ranks, device) = (call.problem.world_size, self.devices[rank]);
        if self.devices.len() < ranks {
            return act(self, RankSet::All, device);
        }
        let count = if ranks == 1 { 0 } else { 1 + usize::from(call.family.has_far_links(ranks)) };
        let comm = |comm: &Comm| {
            Communicator::new(nccl(), *comm, ranks).expect("a communicator of the ring")
        };
        let comms: Vec<_> = self.comms[rank][..count].iter().map(comm).collect();
        act(self, RankSet::One(&comms), device);
    }

    /// Runs one pass. Returns the largest ratio of an error to the error of plain float32.
    fn pass(
        &mut self,
        pass: Pass,
        travels: Option<Travels>,
        backward_order: Order,
        seed: u64,
    ) -> Result<f64, String> {
        let problem = self.ring.problem.clone();
        let family = self.family;
        let call = Call { problem, family, pass, travels, backward_order };
        let stages = self.enqueue(&call);
        for program in &stages[1] {
            check(program).map_err(|race| race.to_string())?;
        }
        for programs in stages {
            self.world.carry_out(&programs, seed).map_err(|stuck| stuck.to_string())?;
        }
        match pass {
            Pass::Forward => self.ring.check_forward(&self.world, &self.shards),
            Pass::Backward => self.ring.check_backward(&self.world, &self.shards),
        }
    }
}

/// Asserts that both passes are right, the backward pass from the results of the forward pass.
/// Random seeds change the order of streams, and both orders of sums are tested.
fn assert_right(problem: &Problem, travels: Option<Travels>, one_device: bool) {
    assert_family_right(Family::Ring, problem, travels, one_device);
}

fn assert_family_right(
    family: Family,
    problem: &Problem,
    travels: Option<Travels>,
    one_device: bool,
) {
    let ring = Ring::new(problem.clone(), 5);
    for (seed, order) in [Order::Fixed, Order::Any, Order::Any].into_iter().enumerate() {
        let seed = seed as u64;
        let mut setup = Setup::new(&ring, family, one_device);
        for pass in [Pass::Forward, Pass::Backward] {
            let ratio = setup.pass(pass, travels, order, seed);
            let ratio = ratio.unwrap_or_else(|error| {
                panic!("{family}, {problem:?}, {pass:?}, {travels:?}, seed {seed}: {error}")
            });
            println!("{ratio:.2} {pass:?} {travels:?} {problem:?}");
        }
    }
}

#[test]
fn rings_compute_attention() {
    for layout in Layout::ALL {
        for window in [Window::CAUSAL, Window::FULL] {
            let of = |world_size| Problem { layout, window, world_size, ..PROBLEM };
            assert_right(&of(1), None, false);
            assert_right(&of(2), Some(Travels::Queries), false);
            assert_right(&of(3), None, false);
            assert_right(&of(4), Some(Travels::Keys), false);
        }
    }
}

#[test]
fn shapes_and_types() {
    let odd = Problem { q_len: 6, kv_len: 6, batch: 3, world_size: 3, ..PROBLEM };
    let wide = Problem {
        heads: 4,
        kv_heads: 4,
        head_dim: 72,
        value_dim: 72,
        batch: 1,
        world_size: 2,
        ..PROBLEM
    };
    for layout in Layout::ALL {
        for travels in [Travels::Keys, Travels::Queries] {
            assert_right(&Problem { layout, ..odd.clone() }, Some(travels), false);
        }
        assert_right(&Problem { layout, dtype: Dtype::F16, ..wide.clone() }, None, false);
    }
    assert_right(&Problem { q_len: 5, kv_len: 5, ..odd }, None, false);
}

#[test]
#[ignore = "takes long: make test-full"]
fn windows_look_both_ways_and_sums_that_come_home_twice_are_added() {
    let windows = [(Some(2), Some(0)), (Some(5), Some(4)), (Some(20), Some(3))];
    for (layout, (left, right)) in Layout::ALL.into_iter().flat_map(|l| windows.map(|w| (l, w))) {
        let window = Window { left, right };
        for travels in [Travels::Keys, Travels::Queries] {
            assert_right(&Problem { layout, window, ..PROBLEM }, Some(travels), false);
        }
    }
    let cross = Problem { window: Window::FULL, kv_len: 2 * PROBLEM.kv_len, ..PROBLEM };
    assert_right(&cross, None, false);
    // Here queries and their sums would be fewer bytes to send.
    let long = Problem { window: Window::FULL, q_len: 4, kv_len: 48, ..PROBLEM };
    assert_right(&long, None, false);
}

#[test]
#[ignore = "takes long: make test-full"]
fn features() {
    let segments = Features { segments: true, ..Features::default() };
    let all = [
        segments,
        Features { soft_cap: Some(0.7), ..Features::default() },
        Features { slopes: true, ..segments },
        Features { soft_cap: Some(5.0), slopes: true, ..segments },
    ];
    for (index, features) in all.into_iter().enumerate() {
        for (n, layout) in Layout::ALL.into_iter().enumerate() {
            let value_dim = if n == index % 3 { 24 } else { 16 };
            let travels = [Travels::Keys, Travels::Queries][(index + n) % 2];
            let window = [Window::CAUSAL, Window::FULL, WINDOW][(index + n) % 3];
            let problem = Problem { layout, features, value_dim, window, ..PROBLEM };
            assert_right(&problem, Some(travels), false);
        }
    }
}

/// Tests the other families in both directions, over several devices and on one.
#[test]
#[ignore = "takes long: make test-full"]
fn other_schedules_compute_attention() {
    let double = Family::DoubleRing { inner: 2 };
    const SIX: Problem = Problem { world_size: 6, q_len: 4, kv_len: 4, ..PROBLEM };
    let full = Window::FULL;
    let features =
        Features { segments: true, slopes: true, soft_cap: Some(2.0), dropout: Some(0.3) };
    let featured = Problem { features, value_dim: 24, ..PROBLEM };
    for (family, problem, travels, one_device) in [
        (double, Problem { layout: Layout::Zigzag, ..PROBLEM }, Travels::Keys, false),
        (double, Problem { window: full, ..SIX }, Travels::Queries, false),
        (
            double,
            Problem { layout: Layout::Striped, window: WINDOW, ..PROBLEM },
            Travels::Queries,
            true,
        ),
        (Family::AllGather, PROBLEM, Travels::Queries, false),
        (Family::AllGather, Problem { layout: Layout::Zigzag, ..SIX }, Travels::Keys, false),
        (Family::AllGather, Problem { window: full, ..PROBLEM }, Travels::Keys, true),
        (Family::Balanced, PROBLEM, Travels::Keys, false),
        (Family::Balanced, SIX, Travels::Queries, false),
        (
            Family::Balanced,
            Problem { world_size: 5, q_len: 6, kv_len: 6, ..SIX },
            Travels::Keys,
            false,
        ),
        (Family::Balanced, featured, Travels::Keys, false),
        (Family::Balanced, Problem { dtype: Dtype::F16, ..PROBLEM }, Travels::Queries, true),
    ] {
        assert_family_right(family, &problem, Some(travels), one_device);
    }
}

#[test]
#[ignore = "takes long: make test-full"]
fn weights_are_dropped_by_their_positions() {
    let dropped = Features { segments: true, dropout: Some(0.4), ..Features::default() };
    let both = Features { slopes: true, ..dropped };
    for (layout, travels, features) in
        [(Layout::Zigzag, Travels::Keys, both), (Layout::Striped, Travels::Queries, dropped)]
    {
        assert_right(&Problem { layout, features, ..PROBLEM }, Some(travels), false);
    }
}

#[test]
fn one_device_runs_all_ranks() {
    for layout in Layout::ALL {
        for travels in [Travels::Keys, Travels::Queries] {
            let problem = Problem { layout, world_size: 3, ..PROBLEM };
            assert_right(&problem, Some(travels), true);
        }
    }
}
