//! Runs scalar PTX on the CPU: an interpreter for the kernels that XLA's GPU compiler emits.
//!
//! Tests use it where there is no GPU, so it is strict. [`Module::parse`] names the first
//! instruction, type, modifier or directive that the interpreter has no meaning for. While a kernel
//! runs, each of these is an error that names the instruction, its line, the block and the thread:
//! a use of bits of a register that the thread never wrote, an access that is misaligned or outside of
//! shared, local or parameter memory, an operation whose result PTX leaves open (such as a division
//! by zero), a barrier that not all threads reach, and too many instructions. Errors of accesses to
//! global memory come from the caller's [`Memory`].
//!
//! It differs from hardware in these ways:
//! - Blocks run one after the other, and threads in ascending order, each until it needs others. So
//!   memory ordering and scopes hold trivially, and races do not show.
//! - Shared and local memory start as bytes 0xff, which are NaNs.
//! - Approximate functions (`ex2.approx`, `sin.approx`, `div.full` …) are computed in float64 and
//!   rounded once, so they are more exact than hardware. `rcp.approx.ftz.f64` and
//!   `rsqrt.approx.ftz.f64` keep 20 bits of the fraction, as on hardware.
//! - Arithmetic on NaNs gives the one NaN of each format that GPUs give, and the payload is lost.
//! - Integer division of the least number by −1 wraps.
//! - LLVM leaves registers unwritten whose value does not matter. So `mov`, `prmt`, `selp`, shifts
//!   and conversions of integers move unwritten bits, and the result of other arithmetic on them
//!   counts as never written. To store them, or to branch or address by them, is an error.
//! - A called function becomes part of its caller. Its parameters are `param::func` memory.
//! - A lane that `shfl.sync` reads from must take part. Otherwise the result counts as never
//!   written.
//! - It lacks tensor cores, asynchronous copies, clusters, textures, indirect calls and branches,
//!   recursion, 8-bit floats, 128-bit types, comparisons of pairs, directed rounding of float64
//!   `fma`, `div` and `sqrt`, and operations on bits that XLA's compiler does not emit.

mod block;
mod body;
mod collective;
mod compare;
mod compute;
mod convert;
mod cursor;
mod decode;
mod error;
mod float;
mod integer;
mod matrix;
mod memory;
mod module;
mod number;
mod operands;
mod program;
mod text;
mod thread;
mod types;

pub use error::{Error, Fault};

/// The device memory that a kernel sees. An error's text says what is wrong with an access.
pub trait Memory {
    /// Reads bytes at an address that is a multiple of their number.
    ///
    /// # Errors
    /// The reason why these bytes can't be read.
    fn load(&mut self, address: u64, bytes: &mut [u8]) -> Result<(), String>;

    /// Writes bytes at an address that is a multiple of their number.
    ///
    /// # Errors
    /// The reason why these bytes can't be written.
    fn store(&mut self, address: u64, bytes: &[u8]) -> Result<(), String>;
}

/// A variable of a module in global or constant memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Global {
    /// The name.
    pub name: String,
    /// The size.
    pub bytes: usize,
    /// The number that the address is a multiple of.
    pub alignment: usize,
    /// The initial contents. A variable without them starts as zeros.
    pub initial: Option<Vec<u8>>,
}

/// A parameter of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameter {
    /// The size.
    pub bytes: usize,
    /// The number that [`Self::offset`] is a multiple of.
    pub alignment: usize,
    /// The position in the kernel's parameter memory.
    pub offset: usize,
}

/// A decoded module.
pub struct Module {
    kernels: Vec<Kernel>,
    globals: Vec<Global>,
}

/// A decoded kernel.
pub struct Kernel {
    name: String,
    parameters: Vec<Parameter>,
    limits: module::Limits,
    body: program::Body,
}

/// A launch of a kernel.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// The numbers of blocks.
    pub grid: [u32; 3],
    /// The numbers of threads of a block.
    pub block: [u32; 3],
    /// The bytes of shared memory besides the kernel's own.
    pub dynamic_shared: u32,
    /// The bytes of each parameter.
    pub parameters: &'a [Vec<u8>],
    /// The address of each of [`Module::globals`].
    pub globals: &'a [u64],
    /// The largest number of instructions of all threads together.
    pub step_limit: u64,
}

impl Module {
    /// Decodes PTX text.
    ///
    /// # Errors
    /// [`Error::Parse`] names the first line that the interpreter has no meaning for.
    pub fn parse(text: &str) -> Result<Self, Error> {
        module::parse(text)
    }

    /// Returns the kernel of a name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|kernel| kernel.name == name)
    }

    /// Returns all kernels.
    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    /// Returns the variables in global and constant memory.
    pub fn globals(&self) -> &[Global] {
        &self.globals
    }

    /// Runs a launch of one of the module's kernels.
    ///
    /// # Errors
    /// [`Error::Launch`] if the launch does not fit the kernel, or [`Error::Run`]. Stores before an
    /// error stay.
    pub fn run(
        &self,
        kernel: &Kernel,
        launch: &Launch<'_>,
        memory: &mut dyn Memory,
    ) -> Result<(), Error> {
        let parameters = self.check(kernel, launch).map_err(|reason| {
            let kernel = kernel.name.clone();
            Error::Launch { kernel, reason }
        })?;
        block::run(kernel, launch, parameters, memory)
    }

    /// Returns the kernel's parameter memory, if the launch fits.
    fn check(&self, kernel: &Kernel, launch: &Launch<'_>) -> Result<Vec<u8>, String> {
        let Launch { grid, block, globals, .. } = *launch;
        let threads = block.iter().try_fold(1u32, |all, &size| all.checked_mul(size));
        if grid.contains(&0) || !threads.is_some_and(|threads| (1..=1024).contains(&threads)) {
            return Err(format!("no launch has a grid of {grid:?} blocks of {block:?} threads"));
        }
        if let Some(shape) = kernel.limits.shape.filter(|shape| *shape != block) {
            return Err(format!("a block has {shape:?} threads, got {block:?}"));
        }
        if let Some(most) = kernel.limits.threads.filter(|most| threads > Some(*most)) {
            return Err(format!("a block has at most {most} threads, got {block:?}"));
        }
        if globals.len() != self.globals.len() {
            let (expected, got) = (self.globals.len(), globals.len());
            return Err(format!("the module has {expected} global variables, got {got}"));
        }
        if launch.parameters.len() != kernel.parameters.len() {
            let (expected, got) = (kernel.parameters.len(), launch.parameters.len());
            return Err(format!("the kernel has {expected} parameters, got {got}"));
        }
        let mut memory = vec![];
        for (index, (parameter, bytes)) in
            kernel.parameters.iter().zip(launch.parameters).enumerate()
        {
            if bytes.len() != parameter.bytes {
                let (expected, got) = (parameter.bytes, bytes.len());
                return Err(format!("parameter {index} has {expected} bytes, got {got}"));
            }
            memory.resize(parameter.offset, 0);
            memory.extend(bytes);
        }
        Ok(memory)
    }
}

impl Kernel {
    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the parameters.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }
}
