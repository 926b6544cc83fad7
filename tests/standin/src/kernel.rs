//! Kernels: the project's own, recognised by the bytes of their images, and XLA's, as PTX text.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, LazyLock, Mutex};

use burst_attention_interpreter::execute::Kernels;
use burst_attention_interpreter::{Address, GridRun, Memory};
use burst_attention_kernels::images::{Images, targets};
use burst_attention_kernels::instances::Instance;
use burst_attention_kernels::launch::Launch;
use burst_attention_kernels::record::{Argument, Kind, Value};
use burst_attention_ptx as ptx;

use crate::call::{Outcome, take};
use crate::code;
use crate::handles::Handles;
use crate::memory::{self, By, Owner, Touch, allocate};
use crate::order::Stamp;
use crate::report::{complain, lock};
use crate::settings::settings;
use crate::stream::Stream;
use crate::watched::Watched;

/// The modules that programs loaded.
pub static MODULES: Handles<Module> = Handles::new("module");
/// The functions that programs found in modules.
pub static FUNCTIONS: Handles<Function> = Handles::new("function");

/// Operations after which a kernel of the project is taken to run for ever.
const OPERATION_LIMIT: u64 = 1 << 28;
/// The same for the instructions of a thread of XLA's kernels.
const STEP_LIMIT: u64 = 1 << 28;

/// What an image holds.
enum Code {
    /// A kernel of the project.
    Ours(Instance),
    /// Kernels of XLA, and the addresses of their variables.
    Ptx(Arc<ptx::Module>, Vec<u64>),
}

/// A loaded image.
pub struct Module {
    device: usize,
    code: Code,
    functions: Mutex<HashMap<String, usize>>,
}

/// A function of a module.
pub struct Function {
    pub name: String,
    pub module: Arc<Module>,
}

/// The project's images and their kernels.
static IMAGES: LazyLock<HashMap<Vec<u8>, Instance>> = LazyLock::new(|| {
    let Some(folder) = settings().images.as_ref() else { return HashMap::new() };
    let read = |target| Images::read(folder, target).unwrap_or_else(|error| panic!("{error}"));
    let images = targets(folder).into_iter().flat_map(|target| {
        let images = read(target);
        let bytes =
            move |instance: Instance| Some((images.get(&instance).ok()?.to_vec(), instance));
        Instance::of_target(target).filter_map(bytes).collect::<Vec<_>>()
    });
    images.collect()
});

/// Loads an image: one of the project's, or PTX text.
///
/// # Errors
/// If it is neither.
///
/// # Safety
/// The caller must pass an image as the driver takes it.
pub unsafe fn load(device: usize, image: *const c_void) -> Outcome<usize> {
    let ours = IMAGES.iter().find(|(bytes, _)| {
        // SAFETY: an image is at least as long as the shortest prefix in which it differs from
        // another one, and `memcmp` would stop there; so does this comparison of single bytes.
        bytes
            .iter()
            .enumerate()
            .all(|(at, byte)| unsafe { image.cast::<u8>().add(at).read() } == *byte)
    });
    let code = match ours {
        Some((_, instance)) => Code::Ours(*instance),
        None => {
            // SAFETY: an image that is not the project's is PTX, a C string, or a binary with a
            // zero byte, since headers of binaries have some.
            let text = unsafe { CStr::from_ptr(image.cast::<c_char>()) };
            let module = text.to_str().ok().map(ptx::Module::parse);
            match module {
                Some(Ok(module)) => {
                    let globals = globals(device, &module)?;
                    Code::Ptx(Arc::new(module), globals)
                }
                Some(Err(error)) => {
                    complain(format!("XLA's module can't be read: {error}"));
                    return Err(code::INVALID_IMAGE);
                }
                None => {
                    let start = &text.to_bytes()[..text.to_bytes().len().min(16)];
                    complain(format!("an image is neither the project's nor PTX: {start:02x?}"));
                    return Err(code::INVALID_IMAGE);
                }
            }
        }
    };
    Ok(MODULES.add(Arc::new(Module { device, code, functions: Mutex::default() })))
}

/// Allocates the variables of a module.
fn globals(device: usize, module: &ptx::Module) -> Outcome<Vec<u64>> {
    let place = |global: &ptx::Global| {
        let address = allocate(Owner::Device(device), global.bytes.max(1))?;
        let contents = global.initial.as_deref().unwrap_or_default();
        // SAFETY: the allocation has room for the variable, and nothing else uses it yet.
        unsafe {
            std::ptr::write_bytes(address as *mut u8, 0, global.bytes);
            std::ptr::copy_nonoverlapping(contents.as_ptr(), address as *mut u8, contents.len());
        }
        Ok(address)
    };
    module.globals().iter().map(place).collect()
}

impl Module {
    /// Returns the handle of a function.
    ///
    /// # Errors
    /// If there is no such function.
    pub fn function(self: &Arc<Self>, name: &str) -> Outcome<usize> {
        let is_there = match &self.code {
            Code::Ours(instance) => instance.entry() == name,
            Code::Ptx(module, _) => module.kernel(name).is_some(),
        };
        if !is_there {
            complain(format!("a module has no function {name}"));
            return Err(code::NOT_FOUND);
        }
        let mut functions = lock(&self.functions);
        let known = functions.entry(name.to_owned()).or_insert_with(|| {
            FUNCTIONS.add(Arc::new(Function { name: name.to_owned(), module: self.clone() }))
        });
        Ok(*known)
    }

    /// Returns the address and the bytes of a variable.
    ///
    /// # Errors
    /// If there is no such variable.
    pub fn global(&self, name: &str) -> Outcome<(u64, usize)> {
        let Code::Ptx(module, addresses) = &self.code else { return Err(code::NOT_FOUND) };
        let mut globals = module.globals().iter().zip(addresses);
        let found = globals.find(|(global, _)| global.name == name);
        found.map(|(global, address)| (*address, global.bytes)).ok_or(code::NOT_FOUND)
    }
}

/// Numbers of blocks, of threads, and bytes of shared memory.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
}

impl Function {
    /// Returns the words for a launch that faults and complaints know: the image's name or the
    /// function's.
    pub fn describe(&self) -> String {
        match &self.module.code {
            Code::Ours(instance) => instance.to_string(),
            Code::Ptx(..) => self.name.clone(),
        }
    }

    /// Reads the arguments of a launch, so that the launch can be repeated later.
    ///
    /// # Errors
    /// If they are not those of the kernel.
    ///
    /// # Safety
    /// The caller must pass the arguments as the driver takes them.
    pub unsafe fn bind(
        self: &Arc<Self>,
        shape: Shape,
        parameters: *mut *mut c_void,
    ) -> Outcome<Bound> {
        // SAFETY: the caller passes an address for each parameter of the kernel.
        let place = |at: usize| unsafe { parameters.add(at).read() };
        let work = match &self.module.code {
            Code::Ours(instance) => {
                let arguments = instance.kernel.arguments().iter().enumerate();
                // SAFETY: the caller passes the address of each parameter.
                let value = |(at, argument)| unsafe { value(argument, place(at)) };
                let values = arguments.map(value).collect::<Outcome<_>>()?;
                let launch = Launch::of_image(*instance, shape.grid, values);
                let is_single = (shape.block, shape.shared) == (launch.block, launch.shared_bytes);
                let checked = launch.check().map_err(|error| error.to_string());
                let single = is_single.then_some(()).ok_or_else(|| format!("{shape:?}"));
                if let Err(error) = checked.and(single) {
                    complain(format!("{}: {error}", self.describe()));
                    return Err(code::INVALID_VALUE);
                }
                Work::Ours(launch)
            }
            Code::Ptx(module, _) => {
                let kernel = module.kernel(&self.name).ok_or(code::NOT_FOUND)?;
                let bytes = |(at, parameter): (usize, &ptx::Parameter)| {
                    let mut bytes = vec![0; parameter.bytes];
                    // SAFETY: the caller passes the address of each parameter, which has the bytes
                    // that the kernel declares.
                    unsafe {
                        std::ptr::copy_nonoverlapping(
                            place(at).cast::<u8>(),
                            bytes.as_mut_ptr(),
                            bytes.len(),
                        );
                    }
                    bytes
                };
                Work::Ptx(kernel.parameters().iter().enumerate().map(bytes).collect())
            }
        };
        Ok(Bound { function: self.clone(), shape, work: Arc::new(work) })
    }
}

/// # Safety
/// The caller must pass the address of a value as the argument's kind has it.
unsafe fn value(argument: &Argument, place: *mut c_void) -> Outcome<Value> {
    Ok(match argument.kind {
        Kind::I32 => Value::I32(take(place.cast())?),
        Kind::F32 => Value::F32(take(place.cast())?),
        _ => Value::Pointer(take(place.cast())?),
    })
}

enum Work {
    Ours(Launch),
    /// The bytes of each parameter.
    Ptx(Vec<Vec<u8>>),
}

/// A launch with its arguments.
#[derive(Clone)]
pub struct Bound {
    function: Arc<Function>,
    shape: Shape,
    work: Arc<Work>,
}

impl Bound {
    /// Enqueues the launch.
    pub fn launch(&self, stream: &Arc<Stream>) {
        let module = &self.function.module;
        let name = self.function.describe();
        if module.device != stream.device {
            complain(format!("{name}, loaded for device {}, runs on {stream:?}", module.device));
        }
        let (bound, device) = (self.clone(), stream.device);
        match &*self.work {
            Work::Ours(launch) => {
                let part = |part: burst_attention_kernels::launch::Footprint| Touch {
                    bytes: part.bytes,
                    writes: part.writes,
                    by: By::Kernel(device),
                };
                let touches: Vec<Touch> = launch.footprint().into_iter().map(part).collect();
                let kept = touches.clone();
                stream.touch(&name, touches, move |_| bound.run_ours(&kept));
            }
            Work::Ptx(_) => stream.touch(&name, vec![], move |stamp| bound.run_ptx(stamp, device)),
        }
    }

    fn run_ours(&self, touches: &[Touch]) {
        static KERNELS: LazyLock<Kernels> = LazyLock::new(|| {
            settings().tile_ir.clone().map_or_else(Kernels::default, Kernels::keeping_in)
        });
        let Work::Ours(launch) = &*self.work else { return };
        let mut runs: Vec<_> = touches.iter().map(|touch| touch.bytes.clone()).collect();
        runs.sort_by_key(|run| run.start);
        runs.dedup_by(|next, last| {
            let joins = next.start <= last.end;
            if joins {
                last.end = last.end.max(next.end);
            }
            joins
        });
        let mut memory = Memory::new();
        for run in runs.into_iter().filter(|run| !run.is_empty()) {
            let bytes = run.end - run.start;
            memory.allocate_at("device memory", Address(run.start), bytes);
            // SAFETY: `memory::enter` has found each touched byte in an allocation that lives.
            let contents =
                unsafe { std::slice::from_raw_parts(run.start as *const u8, bytes as usize) };
            memory.write(Address(run.start), contents);
        }
        let run = GridRun { operation_limit: OPERATION_LIMIT, ..GridRun::default() };
        if let Err(error) = KERNELS.run(launch, &run, &mut memory) {
            complain(format!("{error}"));
            self.lose();
        }
        for touch in touches.iter().filter(|touch| touch.writes && !touch.bytes.is_empty()) {
            let (start, end) = (touch.bytes.start, touch.bytes.end);
            let bytes = memory.read(Address(start), (end - start) as usize);
            // SAFETY: as above, and no other operation touches what this one writes, or it is told.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), start as *mut u8, bytes.len());
            }
        }
    }

    fn run_ptx(&self, stamp: &Stamp, device: usize) {
        let (Work::Ptx(parameters), Code::Ptx(module, globals)) =
            (&*self.work, &self.function.module.code)
        else {
            return;
        };
        let Some(kernel) = module.kernel(&self.function.name) else { return };
        let Shape { grid, block, shared } = self.shape;
        let launch = ptx::Launch {
            grid,
            block,
            dynamic_shared: shared,
            parameters,
            globals,
            step_limit: STEP_LIMIT,
        };
        let mut memory = Watched::new(device);
        if let Err(error) = module.run(kernel, &launch, &mut memory) {
            complain(format!("{error}"));
            self.lose();
        }
        memory::enter(&self.function.name.as_str().into(), stamp, &memory.touches());
    }

    fn lose(&self) {
        if let Ok(device) = crate::device::device(self.function.module.device as c_int) {
            device.lose(code::ILLEGAL_ADDRESS);
        }
    }
}
