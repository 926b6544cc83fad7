//! Runs launches as the CUDA driver would: from a launch of `burst_attention_kernels` and memory
//! to what its kernel stores there.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use burst_attention_compiler::compile::{Front, STACK};
use burst_attention_kernels::instances::Instance;
use burst_attention_kernels::launch::Launch;
use burst_attention_kernels::record::Value;
use cutile_ir::Module;

use super::error::Error;
use super::launch::{Argument, Launch as Way};
use super::memory::{Address, Memory};

/// A launch that did not run, or failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ExecuteError {
    /// The compiler refused the kernel.
    #[error("{instance} does not compile: {reason}")]
    Compile {
        /// The kernel.
        instance: Instance,
        /// What the compiler reports.
        reason: String,
    },
    /// The interpreter refused the launch, or an operation of it failed.
    #[error("{instance}: {error}")]
    Run {
        /// The kernel.
        instance: Instance,
        /// What went wrong.
        error: Error,
    },
}

type Compiled = Arc<OnceLock<Result<Arc<Module>, String>>>;

/// All kernels, each compiled when it is first needed, and once.
#[derive(Debug, Default)]
pub struct Kernels {
    front: Front,
    compiled: Mutex<HashMap<Instance, Compiled>>,
}

impl Kernels {
    /// The Tile IR of an instance, from whichever thread: the compiler gets one of its own, with
    /// the stack that it needs.
    ///
    /// # Errors
    /// [`ExecuteError::Compile`].
    pub fn module(&self, instance: &Instance) -> Result<Arc<Module>, ExecuteError> {
        let compiled = {
            let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
            compiled.entry(*instance).or_default().clone()
        };
        let module = compiled.get_or_init(|| self.compile(instance).map(Arc::new)).clone();
        module.map_err(|reason| ExecuteError::Compile { instance: *instance, reason })
    }

    fn compile(&self, instance: &Instance) -> Result<Module, String> {
        std::thread::scope(|scope| {
            let compile = || self.front.compile(instance);
            let thread = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, compile);
            let thread = thread.map_err(|error| format!("no thread for it: {error}"))?;
            thread.join().unwrap_or_else(|_| Err("the compiler panicked".into()))
        })
    }

    /// Runs a launch.
    ///
    /// # Errors
    /// [`ExecuteError`]; what was stored before an error stays.
    pub fn run(&self, launch: &Launch, way: &Way, memory: &mut Memory) -> Result<(), ExecuteError> {
        run_module(&*self.module(&launch.instance)?, launch, way, memory)
    }
}

/// Runs a launch with another module in place of its instance's own.
///
/// # Errors
/// [`ExecuteError::Run`]; what was stored before an error stays.
pub fn run_module(
    module: &Module,
    launch: &Launch,
    way: &Way,
    memory: &mut Memory,
) -> Result<(), ExecuteError> {
    let Launch { instance, grid, ref values } = *launch;
    let arguments: Vec<_> = values.iter().copied().map(argument).collect();
    let outcome = way.run(module, &instance.entry(), grid, &arguments, memory);
    outcome.map_err(|error| ExecuteError::Run { instance, error })
}

fn argument(value: Value) -> Argument {
    match value {
        Value::Pointer(address) => Argument::Pointer(Address(address)),
        Value::I32(integer) => Argument::I32(integer),
        Value::F32(number) => Argument::F32(number),
    }
}
