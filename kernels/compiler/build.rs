//! Tells the crate the hash of all that Tile IR depends on here: the kernels, and how they compile.

use std::fs;
use std::path::Path;

use sha2::{Digest, Sha256};

fn main() {
    let mut hash = Sha256::new();
    for path in ["Cargo.toml", "src/compile.rs", "src/tile_ir.rs", "src/device"] {
        println!("cargo:rerun-if-changed={path}");
        add(&mut hash, Path::new(path));
    }
    let text: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    println!("cargo:rustc-env=KERNELS_HASH={text}");
}

/// Adds a file, or all files of a folder in the order of their names.
fn add(hash: &mut Sha256, path: &Path) {
    if path.is_dir() {
        let entries = fs::read_dir(path).expect("the folder is readable");
        let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
        paths.sort();
        paths.iter().for_each(|path| add(hash, path));
    } else {
        hash.update(fs::read(path).expect("the file is readable"));
    }
}
