//! The recorder as a CUDA driver.

use burst_attention::Result;
use burst_attention::cuda::driver::{Block, Context, Copy, Driver, Event, Function, Stream};
use burst_attention::cuda::error::CudaError;
use burst_attention_kernels::instances::{Instance, Target};
use burst_attention_kernels::launch::Launch;

use super::recorder::{Allocation, RecorderState, handle};
use super::{Operation, Recorder, common, nccl};

/// The most blocks along the second and third axis of a grid.
const MOST_BLOCKS: u32 = 65_535;
/// The largest distance between lines of a copy.
const MOST_PITCH: u64 = i32::MAX as u64;
/// Allocations start at multiples of this.
const ALIGNMENT: usize = 256;

/// The result of a driver call, or the reason why the driver would refuse it.
type Outcome<T> = std::result::Result<T, String>;

impl Recorder {
    fn call<T>(
        &self,
        name: &'static str,
        act: impl FnOnce(&mut RecorderState) -> Outcome<T>,
    ) -> Result<T> {
        nccl::called(&self.0);
        let mut state = self.0.state();
        if state.fails(name) {
            return Err(
                CudaError::Driver { call: name, reason: "it was made to fail".into() }.into()
            );
        }
        act(&mut state).map_err(|reason| {
            state.violate(name, &reason);
            CudaError::Driver { call: name, reason }.into()
        })
    }
}

impl RecorderState {
    /// Returns the device whose context is current.
    fn device(&self) -> Outcome<usize> {
        let none = "no context is current on this thread: push one first";
        self.current().map(|context| self.contexts[&context]).ok_or_else(|| none.into())
    }

    /// Whether an allocation holds all these bytes.
    fn is_allocated(&self, address: u64, bytes: usize) -> bool {
        self.allocations.iter().any(|made| {
            let end = made.address + made.bytes as u64;
            made.address <= address && address + bytes as u64 <= end
        })
    }

    /// Returns the current device if it owns the stream.
    fn on(&self, stream: Stream) -> Outcome<usize> {
        let device = self.device()?;
        owned("stream", stream.0, self.streams.get(&stream), device)?;
        Ok(device)
    }
}

/// Checks that a device made the handle.
fn owned(what: &str, handle: usize, owner: Option<&usize>, device: usize) -> Outcome<()> {
    match owner {
        Some(owner) if *owner == device => Ok(()),
        Some(owner) => Err(format!(
            "{what} {handle:#x} belongs to device {owner}, but the context of device {device} is \
             current"
        )),
        None => Err(format!("{handle:#x} is no {what}")),
    }
}

fn loaded(image: &[u8], entry: &str, capability: (i32, i32)) -> Outcome<Instance> {
    let found = Instance::all().find(|instance| super::image(instance) == image);
    let instance = found.ok_or_else(|| {
        let text = String::from_utf8_lossy(&image[..image.len().min(40)]);
        format!("an image must be what recorder::image makes of an instance, got {text:?}")
    })?;
    let (major, minor) = capability;
    if Target::of_capability(major, minor) != Some(instance.target) {
        return Err(format!("{instance} does not run on a device of {major}.{minor}"));
    }
    if entry != instance.entry() {
        let expected = instance.entry();
        return Err(format!("the function of {instance} is {expected}, got {entry}"));
    }
    Ok(instance)
}

fn check_launch(launch: &Launch) -> Outcome<()> {
    launch.check().map_err(|error| format!("{}: {error}", launch.instance))?;
    let [x, y, z] = launch.grid;
    let fits =
        x > 0 && x <= i32::MAX as u32 && [y, z].iter().all(|n| (1..=MOST_BLOCKS).contains(n));
    if fits { Ok(()) } else { Err(format!("{} has the grid {:?}", launch.instance, launch.grid)) }
}

fn check_copy(copy: &Copy) -> Outcome<()> {
    let Copy { from, to } = copy;
    if (from.width, from.height) != (to.width, to.height) {
        return Err(format!("both blocks must be of one shape, got {from:?} and {to:?}"));
    }
    for block in [from, to] {
        check_block(block)?;
    }
    match common(from, to) {
        None => Ok(()),
        Some(both) => Err(format!("{both:#x?} is copied to itself by {copy:?}")),
    }
}

fn check_block(block: &Block) -> Outcome<()> {
    if block.address == 0 {
        return Err("a block must be at an address, got null".into());
    }
    if block.bytes() == 0 {
        return Err(format!("a block must have bytes, got {block:?}"));
    }
    if !block.is_run() && !(block.width..=MOST_PITCH).contains(&block.pitch) {
        let expected = format!("between its width and {MOST_PITCH}");
        return Err(format!("the pitch of a block must lie {expected}, got {block:?}"));
    }
    Ok(())
}

impl Driver for Recorder {
    fn stream_context(&self, stream: Stream) -> Result<Context> {
        self.call("cuStreamGetCtx", |state| match state.streams.get(&stream) {
            Some(&device) => Ok(state.devices[device].context),
            None => Err(format!("{:#x} is no stream", stream.0)),
        })
    }

    fn push_context(&self, context: Context) -> Result<()> {
        self.call("cuCtxPushCurrent_v2", |state| {
            if !state.contexts.contains_key(&context) {
                return Err(format!("{:#x} is no context", context.0));
            }
            state.pushed.entry(std::thread::current().id()).or_default().push(context);
            Ok(())
        })
    }

    fn pop_context(&self) -> Result<()> {
        let pop = |state: &mut RecorderState| {
            state.pushed.get_mut(&std::thread::current().id()).and_then(Vec::pop)
        };
        let mut popped = None;
        let outcome = self.call("cuCtxPopCurrent_v2", |state| {
            popped = pop(state);
            popped.map(drop).ok_or_else(|| "this thread has pushed no context".into())
        });
        if outcome.is_err() && popped.is_none() {
            pop(&mut self.0.state());
        }
        outcome
    }

    fn capability(&self) -> Result<(i32, i32)> {
        self.call("cuDeviceGetAttribute", |state| Ok(state.devices[state.device()?].capability))
    }

    fn create_stream(&self) -> Result<Stream> {
        self.call("cuStreamCreateWithPriority", |state| {
            let (device, stream) = (state.device()?, Stream(handle()));
            state.streams.insert(stream, device);
            state.created.streams += 1;
            Ok(stream)
        })
    }

    fn create_event(&self) -> Result<Event> {
        self.call("cuEventCreate", |state| {
            let (device, event) = (state.device()?, Event(handle()));
            state.events.insert(event, device);
            state.created.events += 1;
            Ok(event)
        })
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.call("cuMemHostAlloc", |state| {
            let device = state.devices[state.device()?].compute;
            if bytes == 0 {
                return Err("an allocation must have bytes, got 0".into());
            }
            // Allocations ascend and leave a gap, so no access past an end hits another one.
            let end = |made: &Allocation| made.address as usize + made.bytes;
            let last = state.allocations.last().map_or(1 << 40, end);
            let address = ((last + ALIGNMENT).next_multiple_of(ALIGNMENT)) as u64;
            state.allocations.push(Allocation { device, address, bytes });
            state.created.allocations += 1;
            Ok(address)
        })
    }

    unsafe fn write(&self, address: u64, byte: u8) {
        let mut state = self.0.state();
        if !state.is_allocated(address, 1) {
            state.violate("write", &format!("{address:#x} lies in no allocation"));
        }
        state.written.push((address, byte));
    }

    unsafe fn read(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut state = self.0.state();
        if !state.is_allocated(address, bytes) {
            state.violate("read", &format!("{address:#x} lies in no allocation"));
        }
        state.answer.take().unwrap_or_else(|| vec![1; bytes])
    }

    fn synchronize(&self, stream: Stream) -> Result<()> {
        self.call("cuStreamSynchronize", |state| state.on(stream).map(|_| ()))
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
            let device = state.device()?;
            let instance = loaded(image, entry, state.devices[device].capability)?;
            let function = Function(handle());
            state.functions.insert(function, (device, instance));
            state.created.modules += 1;
            Ok(function)
        })
    }

    fn launch(&self, stream: Stream, function: Function, launch: &Launch) -> Result<()> {
        self.call("cuLaunchKernel", |state| {
            let device = state.on(stream)?;
            let found = state.functions.get(&function);
            owned("function", function.0, found.map(|(owner, _)| owner), device)?;
            if let Some((_, instance)) = found.filter(|(_, found)| *found != launch.instance) {
                return Err(format!("a launch of {} got {instance}", launch.instance));
            }
            check_launch(launch)?;
            state.enqueue(device, stream, Operation::Launch(launch.clone()));
            Ok(())
        })
    }

    fn copy(&self, stream: Stream, copy: &Copy) -> Result<()> {
        self.call("cuMemcpy2DAsync_v2", |state| {
            let device = state.on(stream)?;
            check_copy(copy)?;
            state.enqueue(device, stream, Operation::Copy(*copy));
            Ok(())
        })
    }

    fn record(&self, stream: Stream, event: Event) -> Result<()> {
        self.event("cuEventRecord", stream, event, Operation::Record(event))
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        self.event("cuStreamWaitEvent", stream, event, Operation::Wait(event))
    }
}

impl Recorder {
    fn event(
        &self,
        name: &'static str,
        stream: Stream,
        event: Event,
        operation: Operation,
    ) -> Result<()> {
        self.call(name, |state| {
            let device = state.on(stream)?;
            owned("event", event.0, state.events.get(&event), device)?;
            state.enqueue(device, stream, operation);
            Ok(())
        })
    }
}
