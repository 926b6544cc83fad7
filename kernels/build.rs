//! Compiles every kernel instance to a cubin and writes the table that embeds them.
//!
//! Needs no GPU and no CUDA installation: the assembler `tileiras` comes with Python wheels, whose
//! folder `CUDA_HOME` names. A cubin is kept under its bytecode's hash next to cargo's other
//! output, for all profiles, so only instances that changed are assembled again.

#[cfg(feature = "cuda")]
#[path = "src/assembler.rs"]
mod assembler;
#[cfg(feature = "cuda")]
#[path = "src/compile.rs"]
mod compile;
#[cfg(feature = "cuda")]
#[path = "src/device/mod.rs"]
mod device;
#[cfg(feature = "cuda")]
#[allow(dead_code)]
#[path = "src/instances.rs"]
mod instances;
#[cfg(feature = "cuda")]
#[path = "src/parallel.rs"]
mod parallel;
#[cfg(feature = "cuda")]
#[allow(dead_code)]
#[path = "src/record/mod.rs"]
mod record;

/// The compiler of the kernels copies and drops syntax trees more than it does anything else.
#[cfg(feature = "cuda")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    #[cfg(feature = "cuda")]
    images::build();
    println!("cargo::rerun-if-changed=build.rs");
}

#[cfg(feature = "cuda")]
mod images {
    use std::env;
    use std::fmt::Write as _;
    use std::fs;
    use std::path::{Path, PathBuf};

    use sha2::{Digest, Sha256};

    use crate::assembler::Assembler;
    use crate::compile::{Front, STACK, bytecode};
    use crate::instances::Instance;
    use crate::parallel::on_all_cores;

    /// Compiles all instances on all cores, embeds them in `OUT_DIR/images.rs`.
    pub fn build() {
        let setting = |name| {
            println!("cargo::rerun-if-env-changed={name}");
            env::var_os(name)
        };
        let assembler = Assembler::find(setting("CUTILE_TILEIRAS_PATH"), setting("CUDA_HOME"))
            .unwrap_or_else(|error| fail(&error));
        for source in ["assembler.rs", "compile.rs", "device", "instances.rs", "record"] {
            println!("cargo::rerun-if-changed=src/{source}");
        }
        let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
        let store = target_folder(&out).join("kernel-images");
        fs::create_dir_all(&store).unwrap_or_else(|error| fail(&format!("{store:?}: {error}")));

        let (instances, front): (Vec<Instance>, _) = (Instance::all().collect(), Front::default());
        let images = on_all_cores(&instances, STACK, |instance| {
            let module = front.compile(instance).unwrap_or_else(|error| fail(&error));
            let bytecode = bytecode(&module).unwrap_or_else(|error| fail(&error));
            image(instance, &bytecode, &assembler, &store)
        });
        let mut table = String::from("&[\n");
        for (instance, image) in instances.iter().zip(images) {
            let Instance { kernel, element, width, target } = instance;
            let _ = writeln!(
                table,
                "    Image {{ instance: Instance {{ kernel: Kernel::{kernel:?}, element: \
                 Element::{element:?}, width: {width}, target: Target::{target:?} }}, \
                 cubin: include_bytes!({image:?}) }},",
            );
        }
        table.push_str("]\n");
        fs::write(out.join("images.rs"), table).expect("OUT_DIR is writable");
    }

    /// Ends the build with a message for the user, without a backtrace of this script.
    fn fail(message: &str) -> ! {
        for line in message.lines() {
            println!("cargo::error={line}");
        }
        std::process::exit(1)
    }

    /// Cargo's folder for all output: the one that it marks as a cache.
    fn target_folder(out: &Path) -> &Path {
        out.ancestors().find(|folder| folder.join("CACHEDIR.TAG").exists()).unwrap_or(out)
    }

    /// The cubin of an instance, assembled unless it is there.
    fn image(instance: &Instance, bytecode: &[u8], assembler: &Assembler, store: &Path) -> PathBuf {
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
            made.unwrap_or_else(|error| fail(&format!("{instance}: {error}")));
        }
        cubin
    }
}
