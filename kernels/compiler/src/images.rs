//! Compiles all images of some targets and writes them to the files that the library loads.
//!
//! This needs neither a GPU nor a CUDA installation: the assembler comes with Python wheels. A
//! cubin is kept under its bytecode's hash, so a later build assembles only instances that changed.

use std::fs;
use std::path::{Path, PathBuf};

use burst_attention_kernels::host::Host;
use burst_attention_kernels::images;
use burst_attention_kernels::instances::{Instance, Target};

use crate::assembler::Assembler;
use crate::compile::{Front, STACK, bytecode};
use crate::cubin::Cubin;
use crate::hash::short_hash;
use crate::parallel::on_all_cores;

/// Writes the files of `targets`, with images for GPUs of `host`, into `folder`; `store` keeps
/// cubins between builds.
///
/// # Errors
/// The report of the compiler, the assembler or the file system, or that the assembler made code
/// for another host.
pub fn build(
    assembler: &Assembler,
    host: Host,
    targets: &[Target],
    folder: &Path,
    store: &Path,
) -> Result<(), String> {
    let all: Vec<Instance> = targets.iter().copied().flat_map(Instance::of_target).collect();
    let mut made = of_instances(assembler, host, &all, store)?;
    fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    for &target in targets {
        let count = Instance::of_target(target).count();
        let of_target: Vec<_> = made.drain(..count).collect();
        images::write(folder, target, host, &of_target)
            .map_err(|error| format!("{}: {error}", images::file(folder, target).display()))?;
    }
    Ok(())
}

/// Returns the images of `instances`, in their order; `store` keeps cubins between calls.
///
/// # Errors
/// The errors of [`build`].
pub fn of_instances(
    assembler: &Assembler,
    host: Host,
    instances: &[Instance],
    store: &Path,
) -> Result<Vec<(Instance, Vec<u8>)>, String> {
    fs::create_dir_all(store).map_err(|error| format!("{}: {error}", store.display()))?;
    let front = Front::default();
    let made = on_all_cores(instances, STACK, |instance| {
        let bytecode = bytecode(&front.compile(instance)?)?;
        let cubin = cubin(instance, host, &bytecode, assembler, store)?;
        let bytes = fs::read(&cubin).map_err(|error| format!("{}: {error}", cubin.display()))?;
        check_host(&bytes, host).map_err(|error| format!("{}: {error}", cubin.display()))?;
        Ok((*instance, bytes))
    });
    made.into_iter().collect()
}

/// Refuses an image with code for another host, because the driver could not launch it.
fn check_host(image: &[u8], host: Host) -> Result<(), String> {
    match Cubin::parse(image).map_err(|error| error.to_string())?.kernel.host {
        Some(came) if came != host => Err(format!(
            "expected the assembler to make code for a host of {}, but it is for {}",
            host.name(),
            came.name()
        )),
        _ => Ok(()),
    }
}

/// Returns the file with an instance's cubin, which this assembles if the file is missing.
fn cubin(
    instance: &Instance,
    host: Host,
    bytecode: &[u8],
    assembler: &Assembler,
    store: &Path,
) -> Result<PathBuf, String> {
    let (target, host_name) = (instance.target.name(), host.name());
    let parts = [assembler.version.as_bytes(), target.as_bytes(), host_name.as_bytes(), bytecode];
    let hash = short_hash(&parts);
    let cubin = store.join(format!("{instance}-{hash}.cubin"));
    if !cubin.exists() {
        let made = assembler.assemble(instance.target.name(), host, bytecode, &cubin);
        made.map_err(|error| format!("{instance}: {error}"))?;
    }
    Ok(cubin)
}
