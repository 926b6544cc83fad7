//! Runs launches of `burst_attention_kernels` like the CUDA driver: their kernels read and write a
//! simulated memory.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use burst_attention_compiler::compile::{Front, STACK};
use burst_attention_kernels::instances::Instance;
use burst_attention_kernels::launch::Launch;
use burst_attention_kernels::record::Value;
use cutile_ir::Module;

use super::error::Error;
use super::launch::{Argument, GridRun};
use super::memory::{Address, Memory};

/// The reason why a launch did not run, or failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ExecuteError {
    /// The compiler refused the kernel.
    #[error("{instance} does not compile: {reason}")]
    Compile {
        /// The kernel.
        instance: Instance,
        /// The compiler's report.
        reason: String,
    },
    /// The interpreter refused the launch, or an operation of it failed.
    #[error("{instance}: {error}")]
    Run {
        /// The kernel.
        instance: Instance,
        /// The reason of the failure.
        error: Error,
    },
}

type Compiled = Arc<OnceLock<Result<Arc<Module>, String>>>;

/// All kernels. Each is compiled once, when it is first needed.
#[derive(Debug, Default)]
pub struct Kernels {
    front: Front,
    compiled: Mutex<HashMap<Instance, Compiled>>,
}

impl Kernels {
    /// Returns kernels whose Tile IR a folder keeps for later runs.
    pub fn keeping_in(folder: PathBuf) -> Self {
        Self { front: Front::keeping_in(folder), compiled: Mutex::default() }
    }

    /// Returns the Tile IR of an instance. The compiler runs on a thread of its own, with the stack
    /// that it needs.
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
    /// [`ExecuteError`]; stores before an error stay.
    pub fn run(
        &self,
        launch: &Launch,
        grid_run: &GridRun,
        memory: &mut Memory,
    ) -> Result<(), ExecuteError> {
        run_module(&*self.module(&launch.instance())?, launch, grid_run, memory)
    }
}

/// Runs a launch with another module instead of its instance's module.
///
/// # Errors
/// [`ExecuteError::Run`]; stores before an error stay.
pub fn run_module(
    module: &Module,
    launch: &Launch,
    grid_run: &GridRun,
    memory: &mut Memory,
) -> Result<(), ExecuteError> {
    let Launch { grid, ref values, .. } = *launch;
    let instance = launch.instance();
    let arguments: Vec<_> = values.iter().copied().map(argument).collect();
    let outcome = grid_run.run(module, &instance.entry(), grid, &arguments, memory);
    outcome.map_err(|error| ExecuteError::Run { instance, error })
}

fn argument(value: Value) -> Argument {
    match value {
        Value::Pointer(address) => Argument::Pointer(Address(address)),
        Value::I32(integer) => Argument::I32(integer),
        Value::F32(number) => Argument::F32(number),
    }
}
