//! The recorder as a CUDA driver.

use burst_attention::Result;
use burst_attention::cuda::driver::{
    Context, Copy, Driver, Event, Function, Library, Plan, Stream,
};
use burst_attention::cuda::error::CudaError;
use burst_attention_kernels::backend::{LibraryCall, Version};
use burst_attention_kernels::launch::Launch;

use super::recorder::{State, instance_of};
use super::{Call, Operation, Recorder, nccl};

impl Recorder {
    /// Counts a call and makes it, unless the call must fail. A reason that `act` returns is a
    /// misuse.
    fn call<T>(
        &self,
        name: &'static str,
        act: impl FnOnce(&mut State) -> std::result::Result<T, String>,
    ) -> Result<T> {
        nccl::called(self);
        let mut state = self.state();
        let outcome = match state.fails(name) {
            true => Err(nccl::FAILURE.to_owned()),
            false => act(&mut state).inspect_err(|reason| state.violate(name, reason)),
        };
        outcome.map_err(|reason| CudaError::Driver { call: name, reason }.into())
    }

    fn make(&self, name: &'static str) -> Result<usize> {
        self.call(name, |state| Ok(state.handle()))
    }

    fn add(&self, name: &'static str, stream: Stream, operation: Operation) -> Result<()> {
        self.call(name, |state| {
            state.program.push(Call { stream, operation });
            Ok(())
        })
    }
}

impl Driver for Recorder {
    fn stream_context(&self, _: Stream) -> Result<Context> {
        self.call("cuStreamGetCtx", |_| Ok(Context(1)))
    }

    fn push_context(&self, _: Context) -> Result<()> {
        self.call("cuCtxPushCurrent_v2", |state| {
            state.pushed += 1;
            Ok(())
        })
    }

    fn pop_context(&self) -> Result<()> {
        self.state().pushed -= 1;
        self.call("cuCtxPopCurrent_v2", |_| Ok(()))
    }

    fn capability(&self) -> Result<(i32, i32)> {
        self.call("cuDeviceGetAttribute", |state| Ok(state.capability))
    }

    fn create_stream(&self) -> Result<Stream> {
        self.make("cuStreamCreateWithPriority").map(Stream)
    }

    fn create_event(&self) -> Result<Event> {
        self.make("cuEventCreate").map(Event)
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        assert!(bytes <= 1 << 20, "allocations must lie apart");
        Ok(self.make("cuMemHostAlloc")? as u64)
    }

    unsafe fn write(&self, address: u64, byte: u8) {
        self.state().written.push((address, byte));
    }

    unsafe fn read(&self, _: u64, bytes: usize) -> Vec<u8> {
        self.state().answer.take().unwrap_or_else(|| vec![1; bytes])
    }

    fn synchronize(&self, _: Stream) -> Result<()> {
        self.call("cuStreamSynchronize", |_| Ok(()))
    }

    fn is_over(&self, _: Event) -> Result<bool> {
        // A recorder carries nothing out, so nothing is under way.
        Ok(true)
    }

    fn is_idle(&self, _: Stream) -> Result<bool> {
        Ok(true)
    }

    fn load(&self, image: &[u8], entry: &str) -> Result<Function> {
        self.call("cuModuleLoadData", |state| {
            let instance = instance_of(image).filter(|instance| instance.entry() == entry);
            let instance =
                instance.ok_or_else(|| format!("the image of {entry} is another one"))?;
            let function = Function(state.handle());
            state.functions.insert(function, instance);
            Ok(function)
        })
    }

    fn launch(&self, stream: Stream, function: Function, launch: &Launch) -> Result<()> {
        self.call("cuLaunchKernel", |state| {
            let instance = launch.instance();
            if state.functions.get(&function) != Some(&instance) {
                return Err(format!("{function:?} is not the function of {instance}"));
            }
            launch.check().map_err(|error| format!("{instance}: {error}"))?;
            state.program.push(Call { stream, operation: Operation::Launch(launch.clone()) });
            Ok(())
        })
    }

    fn copy(&self, stream: Stream, copy: &Copy) -> Result<()> {
        let shapes = [copy.from, copy.to].map(|block| (block.width, block.height));
        assert_eq!(shapes[0], shapes[1], "both blocks of a copy have one shape");
        self.add("cuMemcpy2DAsync_v2", stream, Operation::Copy(*copy))
    }

    fn record(&self, stream: Stream, event: Event) -> Result<()> {
        self.add("cuEventRecord", stream, Operation::Record(event))
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        self.add("cuStreamWaitEvent", stream, Operation::Wait(event))
    }
}

/// The recorder as a library of any name, perhaps a version of cuDNN. It prepares any plan.
struct RecordedLibrary {
    recorder: Recorder,
    name: &'static str,
    version: Option<Version>,
}

impl Recorder {
    /// Returns the recorder as a library, perhaps as a version of cuDNN.
    pub fn library(&self, name: &'static str, version: Option<Version>) -> Box<dyn Library> {
        Box::new(RecordedLibrary { recorder: self.clone(), name, version })
    }
}

impl Library for RecordedLibrary {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cudnn_version(&self) -> Option<Version> {
        self.version
    }

    fn prepare(&self, plan: &str) -> Result<Plan> {
        self.recorder.call("prepare", |state| {
            let handle = Plan(state.handle());
            state.plans.insert(handle, plan.to_owned());
            Ok(handle)
        })
    }

    fn enqueue(&self, stream: Stream, plan: Plan, call: &LibraryCall) -> Result<()> {
        self.recorder.call("enqueue", |state| {
            if state.plans.get(&plan) != Some(&call.plan) {
                return Err(format!("{plan:?} is not {}", call.plan));
            }
            state.program.push(Call { stream, operation: Operation::Library(call.clone()) });
            Ok(())
        })
    }
}
