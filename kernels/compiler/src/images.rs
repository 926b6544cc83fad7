//! Compiles all images of some targets and writes the files that the library loads.
//!
//! Needs no GPU and no CUDA installation: the assembler comes with Python wheels. A cubin is kept
//! under its bytecode's hash, so only instances that changed are assembled again.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use burst_attention_kernels::images;
use burst_attention_kernels::instances::{Instance, Target};
use sha2::{Digest, Sha256};

use crate::assembler::Assembler;
use crate::compile::{Front, STACK, bytecode};
use crate::parallel::on_all_cores;

/// Writes the files of `targets` into `folder`; `store` keeps cubins between builds.
///
/// # Errors
/// What the compiler, the assembler or the file system report.
pub fn build(
    assembler: &Assembler,
    targets: &[Target],
    folder: &Path,
    store: &Path,
) -> Result<(), String> {
    for folder in [folder, store] {
        fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    let front = Front::default();
    let all: Vec<Instance> = targets.iter().copied().flat_map(Instance::of_target).collect();
    let made = on_all_cores(&all, STACK, |instance| {
        let bytecode = bytecode(&front.compile(instance)?)?;
        let cubin = cubin(instance, &bytecode, assembler, store)?;
        let bytes = fs::read(&cubin).map_err(|error| format!("{}: {error}", cubin.display()))?;
        Ok((*instance, bytes))
    });
    let mut made = made.into_iter().collect::<Result<Vec<_>, String>>()?;
    for &target in targets {
        let count = Instance::of_target(target).count();
        let of_target: Vec<_> = made.drain(..count).collect();
        images::write(folder, target, &of_target)
            .map_err(|error| format!("{}: {error}", images::file(folder, target).display()))?;
    }
    Ok(())
}

/// The file with an instance's cubin, assembled unless it is there.
fn cubin(
    instance: &Instance,
    bytecode: &[u8],
    assembler: &Assembler,
    store: &Path,
) -> Result<PathBuf, String> {
    let mut hash = Sha256::new();
    hash.update(&assembler.version);
    hash.update(instance.target.name());
    hash.update(bytecode);
    let hash = hash.finalize().iter().take(12).fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    });
    let cubin = store.join(format!("{instance}-{hash}.cubin"));
    if !cubin.exists() {
        let made = assembler.assemble(instance.target.name(), bytecode, &cubin);
        made.map_err(|error| format!("{instance}: {error}"))?;
    }
    Ok(cubin)
}
