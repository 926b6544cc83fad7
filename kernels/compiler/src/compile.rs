//! From a kernel's source and launch record to Tile IR.
//!
//! Targets that share a tile shape have the same IR, except for the name of the target in the
//! compiler's hints. So [`Front`] runs the compiler once for them and renames the target.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use burst_attention_kernels::instances::{Instance, TileShape};
use burst_attention_kernels::kernel::{Kernel, KernelSpec};
use cutile_compiler::compile_api::{CompileArtifacts, KernelCompiler};
use cutile_compiler::cuda_tile_runtime_utils::serialize_tile_ir_bytecode;
use cutile_compiler::hints::{CompileOptions, DebugInfoLevel};
use cutile_compiler::specialization::DivHint;
use cutile_ir::Module;
use cutile_ir::bytecode::Opcode;
use cutile_ir::ir::{Attribute, BlockId, OpId, ValueProducer};

use crate::device::source;
use crate::hash::short_hash;
use crate::tile_ir;

/// Bytes of stack that the compiler's front end needs, because it recurses deeply.
pub const STACK: usize = 256 << 20;

/// The kernel, generics, warps and blocks that determine the IR, up to the target's name.
type Key = (Kernel, Vec<String>, i32, i32);

/// The compiler's front end, with the modules that it has compiled so far.
#[derive(Debug, Default)]
pub struct Front {
    done: Mutex<HashMap<Key, Module>>,
    folder: Option<PathBuf>,
}

impl Front {
    /// Returns a front end that keeps modules in a folder, where later runs find them. The compiler
    /// takes seconds for a kernel, and to read a kept module takes milliseconds.
    pub fn keeping_in(folder: PathBuf) -> Self {
        Self { folder: Some(folder), ..Self::default() }
    }

    /// Returns the Tile IR of an instance. Needs [`STACK`] bytes of stack.
    ///
    /// # Errors
    /// The compiler's report.
    pub fn compile(&self, instance: &Instance) -> Result<Module, String> {
        let TileShape { warps, blocks, .. } = instance.tile();
        let key = (instance.kernel, instance.generics(), warps, blocks);
        let found = self.done.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        let mut module = match found {
            Some(module) => module,
            None => self.kept(instance, &key)?,
        };
        for function in module.functions.clone() {
            retarget(&mut module, function, instance.target.name());
        }
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        done.entry(key).or_insert_with(|| module.clone());
        Ok(module)
    }

    /// Returns the module that an earlier run kept, or compiles it and keeps it.
    fn kept(&self, instance: &Instance, key: &Key) -> Result<Module, String> {
        let Some(folder) = &self.folder else { return compile(instance) };
        // The compiler crate's own sources are in the hash as well.
        let all = format!("{} {key:?} {:?}", env!("KERNELS_HASH"), scalar_hints(instance));
        let name = format!("{}-{}", instance.kernel.spec().name, short_hash(&[all.as_bytes()]));
        let path = folder.join(name);
        if let Some(module) = fs::read(&path).ok().and_then(|bytes| tile_ir::read(&bytes)) {
            return Ok(module);
        }
        let module = compile(instance)?;
        keep(&module, &path);
        Ok(module)
    }
}

/// Writes a module to a file. If that fails, a later run compiles again.
fn keep(module: &Module, path: &Path) {
    let Some(bytes) = tile_ir::write(module) else { return };
    let part = path.with_extension(format!("{}", std::process::id()));
    let folder = path.parent().map_or(Ok(()), fs::create_dir_all);
    let _ = folder.and_then(|()| fs::write(&part, bytes)).and_then(|()| fs::rename(&part, path));
}

/// Returns Tile IR in the form that the assembler reads. The version of the bytecode follows from
/// the assembler's version.
///
/// # Errors
/// The compiler's report.
pub fn bytecode(module: &Module) -> Result<Vec<u8>, String> {
    let bytes = serialize_tile_ir_bytecode(module).map_err(|error| format!("{error:?}"))?;
    Ok(bytes.0)
}

fn compile(instance: &Instance) -> Result<Module, String> {
    let KernelSpec { name, module, .. } = *instance.kernel.spec();
    let options = CompileOptions::new()
        .debug_info(DebugInfoLevel::None)
        .opt_level(3)
        .num_worker_warps_per_cta(instance.tile().warps)
        .occupancy(instance.tile().blocks);
    KernelCompiler::new(source(module), module, name)
        .target(instance.target.name())
        .generics(instance.generics())
        .scalar_hints(&scalar_hints(instance))
        .options(options)
        .compile()
        .map(CompileArtifacts::into_module)
        .map(without_unused_constants)
        .map_err(|error| format!("{instance}: {error:?}"))
}

/// Drops constants that nothing uses. Wherever the compiler inlines a function, it makes a constant
/// of each generic and of each named constant in sight.
fn without_unused_constants(mut module: Module) -> Module {
    let (mut blocks, mut used) = (vec![], HashSet::new());
    module.functions.iter().for_each(|&id| gather(&module, id, &mut blocks, &mut used));
    for id in blocks {
        let mut operations = std::mem::take(&mut module.block_mut(id).ops);
        operations.retain(|id| module.op(*id).opcode != Opcode::Constant || used.contains(id));
        module.block_mut(id).ops = operations;
    }
    module
}

/// Adds the blocks inside an operation, and the operations whose results it or they use.
fn gather(module: &Module, id: OpId, blocks: &mut Vec<BlockId>, used: &mut HashSet<OpId>) {
    for &operand in &module.op(id).operands {
        if let ValueProducer::OpResult { op, .. } = module.value_data(operand).producer {
            used.insert(op);
        }
    }
    for block in module.op(id).regions.iter().flat_map(|&region| &module.region(region).blocks) {
        blocks.push(*block);
        module.block(*block).ops.iter().for_each(|&inner| gather(module, inner, blocks, used));
    }
}

fn scalar_hints(instance: &Instance) -> Vec<(&'static str, DivHint)> {
    let divided = instance.kernel.arguments().iter().filter(|argument| argument.divisor > 1);
    divided
        .map(|argument| (argument.name, DivHint { divisor: argument.divisor, max: 16 }))
        .collect()
}

/// Makes the hints of an operation, and of the operations inside it, hints for `target`.
fn retarget(module: &mut Module, operation: OpId, target: &str) {
    let operation = module.op_mut(operation);
    for (_, attribute) in &mut operation.attributes {
        if let Attribute::OptimizationHints(hints) = attribute {
            for (name, _) in &mut hints.entries {
                target.clone_into(name);
            }
        }
    }
    for region in operation.regions.clone() {
        for block in module.region(region).blocks.clone() {
            for operation in module.block(block).ops.clone() {
                retarget(module, operation, target);
            }
        }
    }
}
