//! Rings on recorded devices.

use burst_attention::Result;
use burst_attention::cuda::call::Call;
use burst_attention::cuda::executor::{Executor, RankSet};
use burst_attention::cuda::nccl::{Comm, Communicator};
use burst_attention::cuda::workspace::Workspace;
use burst_attention::operands::{Arrays, Operand};
use burst_attention::problem::{Dtype, Problem};
use burst_attention_kernels::backend::{BACKENDS, Backend, Choices, Version};
use burst_attention_recorder::{Program, Recorder, images, nccl};

/// Distance between arrays, which are all smaller.
const APART: u64 = 1 << 40;

/// The recorded device of each rank.
pub struct Devices(Vec<Device>);

struct Device {
    recorder: Recorder,
    executor: Executor,
    /// The second communicator is for slow links.
    comms: [Comm; 2],
}

impl Device {
    fn communicators(&self, call: &Call) -> Result<Vec<Communicator<'static>>> {
        let world_size = call.problem.world_size;
        let count = match world_size {
            1 => 0,
            _ => 1 + usize::from(call.family.has_far_links(world_size)),
        };
        let comms = self.comms[..count].iter();
        comms.map(|comm| Communicator::new(nccl(), *comm, world_size)).collect()
    }
}

impl Devices {
    pub fn new(world_size: usize) -> Devices {
        Devices::with_backends(world_size, BACKENDS)
    }

    /// Devices that choose among `backends`.
    pub fn with_backends(world_size: usize, backends: &'static [Backend]) -> Devices {
        Devices::of((9, 0), world_size, backends)
    }

    /// Devices of a compute capability. Each recorder is also the library that they call.
    pub fn of(capability: (i32, i32), world_size: usize, backends: &'static [Backend]) -> Devices {
        let device = |rank| {
            let recorder = Recorder::new(capability);
            let executor = Executor::new(Box::new(recorder.clone()), images).with_backends(
                backends,
                ["recorder", "cudnn"].map(|name| recorder.library(name, None)).into(),
            );
            let comms = [(); 2].map(|()| recorder.add_comm(rank, world_size));
            Device { recorder, executor, comms }
        };
        Devices((0..world_size).map(device).collect())
    }

    /// The devices with a version of cuDNN.
    pub fn with_cudnn(self, version: Version) -> Devices {
        let with = |device: Device| {
            let cudnn = device.recorder.library("cudnn", Some(version));
            let executor = device.executor.with_backends(BACKENDS, vec![cudnn]);
            Device { executor, ..device }
        };
        Devices(self.0.into_iter().map(with).collect())
    }

    /// The devices without their libraries.
    pub fn without_libraries(self, backends: &'static [Backend]) -> Devices {
        let without = |device: Device| {
            let executor = device.executor.with_backends(backends, Vec::new());
            Device { executor, ..device }
        };
        Devices(self.0.into_iter().map(without).collect())
    }

    /// The recorder of a rank.
    pub fn recorder(&self, rank: usize) -> &Recorder {
        &self.0[rank].recorder
    }

    /// The choices of backends that rank 0 makes when XLA first prepares the call.
    pub fn choices(&self, call: &Call) -> Result<Choices> {
        let ranks = self.0[0].communicators(call)?;
        let (stream, ranks) = (Recorder::COMPUTE, RankSet::One(&ranks));
        self.0[0].executor.initialize(stream, call, ranks, &|_| ())
    }

    /// One rank's two stages, as XLA calls them.
    pub fn run_rank(&self, call: &Call, rank: usize) -> Result<u64> {
        let device = &self.0[rank];
        let Device { recorder, executor, .. } = device;
        let comms = device.communicators(call)?;
        let (stream, ranks) = (Recorder::COMPUTE, RankSet::One(&comms));
        executor.initialize(stream, call, ranks, &|_| ())?;
        recorder.take();
        executor.run(stream, call, ranks, &[arrays(call, 0)], workspace(call, 1), &|_| ())
    }

    /// What each rank's device is given for a call; connecting left out.
    pub fn programs(&self, call: &Call) -> Vec<Program> {
        let program = |rank| {
            self.run_rank(call, rank).unwrap_or_else(|error| panic!("rank {rank}: {error}"));
            self.program(rank)
        };
        (0..call.problem.world_size).map(program).collect()
    }

    fn program(&self, rank: usize) -> Program {
        let recorder = &self.0[rank].recorder;
        assert_eq!(recorder.violations(), [""; 0]);
        recorder.take()
    }

    /// What the first device is given for all ranks.
    pub fn virtual_program(&self, call: &Call) -> Program {
        let Device { recorder, executor, .. } = &self.0[0];
        let count = call.problem.world_size as u64;
        let all: Vec<_> = (0..count).map(|rank| arrays(call, rank)).collect();
        let (stream, ranks) = (Recorder::COMPUTE, RankSet::All);
        executor.initialize(stream, call, ranks, &|_| ()).expect("nothing refuses");
        recorder.take();
        let ran = executor.run(stream, call, ranks, &all, workspace(call, count), &|_| ());
        ran.expect("nothing refuses");
        self.program(0)
    }
}

/// Addresses of a rank's arrays.
pub fn arrays(call: &Call, rank: u64) -> Arrays<u64> {
    let count = Operand::all().count() as u64;
    let address = |operand| (count * rank + operand as u64 + 1) * APART;
    Arrays::new(call.pass, &call.problem.features, address)
}

fn workspace(call: &Call, ranks: u64) -> Workspace {
    Workspace { address: APART / 2, bytes: ranks * call.workspace_bytes() }
}

/// A problem in bfloat16 for the CUDA kernels.
pub fn in_bfloat16(problem: Problem) -> Problem {
    Problem { dtype: Dtype::Bf16, ..problem }
}
