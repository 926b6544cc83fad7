//! Makes functions for all names of the CUDA driver, CUDA runtime and NCCL that this library lacks.
//! Each returns an error, and complains with its name.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// The functions of NCCL that XLA knows.
const NCCL: &str = "ncclBcast ncclCommInitAll ncclCommShrink ncclCommWindowDeregister \
    ncclCommWindowRegister ncclDevCommCreate ncclDevCommDestroy ncclGetLsaDevicePointer \
    ncclGetLsaMultimemDevicePointer ncclGetPeerDevicePointer ncclPutSignal \
    ncclRedOpCreatePreMulSum ncclRedOpDestroy ncclReduce ncclResetDebugInit ncclSignal \
    ncclWaitSignal";

fn main() {
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    println!("cargo::rerun-if-changed=src");
    let include = PathBuf::from(env::var("CUDA_HOME").expect("CUDA_HOME")).join("include");
    let read = |name: &str| {
        let path = include.join(name);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let (driver, runtime) = (read("cuda.h"), read("cuda_runtime_api.h"));
    let mut names: BTreeSet<String> = NCCL.split_whitespace().map(str::to_owned).collect();
    names.extend(declared(&driver, "CUresult CUDAAPI ").map(|name| newest(&driver, name)));
    names.extend(declared(&runtime, "cudaError_t CUDARTAPI ").map(str::to_owned));
    for name in defined(Path::new("src")) {
        names.remove(&name);
    }
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let out = PathBuf::from(env::var("OUT_DIR").expect("OUT_DIR")).join("unknown.rs");
    fs::write(out, format!("unknown! {{ {} }}\n", names.join(" ")))
        .expect("OUT_DIR can be written");
}

/// Returns the names of functions that a header declares after `before`.
fn declared<'a>(header: &'a str, before: &'a str) -> impl Iterator<Item = &'a str> {
    header.lines().filter_map(move |line| {
        let (_, rest) = line.split_once(before)?;
        let (name, _) = rest.split_once('(')?;
        name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_').then_some(name)
    })
}

/// Returns the name under which the driver exports the newest version of a function, which its
/// header says in a macro.
fn newest(header: &str, name: &str) -> String {
    let versions = (2..=4).rev().map(|version| format!("{name}_v{version}"));
    let is_macro = |versioned: &String| {
        header.lines().any(|line| line.starts_with("#define") && line.ends_with(versioned.as_str()))
    };
    let found = versions.into_iter().find(is_macro);
    found.unwrap_or_else(|| name.to_owned())
}

/// Returns the names of the functions that the sources define.
fn defined(folder: &Path) -> Vec<String> {
    let mut names = vec![];
    for entry in fs::read_dir(folder).expect("the sources") {
        let path = entry.expect("a source").path();
        if path.is_dir() {
            names.extend(defined(&path));
            continue;
        }
        let text = fs::read_to_string(&path).expect("a source");
        let name = |part: &str| {
            let end = part.find('(').filter(|_| !part.contains(char::is_whitespace));
            end.or_else(|| part.find('(')).map(|end| part[..end].to_owned())
        };
        names.extend(text.split("fn ").skip(1).filter_map(name));
    }
    names
}
