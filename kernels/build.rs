//! Compiles every kernel instance to a cubin and writes the table that embeds them.
//!
//! Needs no GPU and no CUDA installation: the assembler `tileiras` comes with Python wheels, whose
//! folder `CUDA_HOME` names. A cubin is kept under its bytecode's hash next to cargo's other
//! output, for all profiles, so only instances that changed are assembled again.

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
    use std::process::Command;

    use sha2::{Digest, Sha256};

    use crate::compile::{Front, STACK, bytecode};
    use crate::instances::Instance;
    use crate::parallel::on_all_cores;

    /// The assembler, and its version as part of each image's name.
    struct Assembler {
        path: PathBuf,
        version: String,
    }

    /// Compiles all instances on all cores, embeds them in `OUT_DIR/images.rs`.
    pub fn build() {
        for name in ["CUDA_HOME", "CUTILE_TILEIRAS_PATH"] {
            println!("cargo::rerun-if-env-changed={name}");
        }
        for source in ["compile.rs", "device", "instances.rs", "record"] {
            println!("cargo::rerun-if-changed=src/{source}");
        }
        let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
        let store = target_folder(&out).join("kernel-images");
        fs::create_dir_all(&store).unwrap_or_else(|error| fail(&format!("{store:?}: {error}")));
        let assembler = Assembler::find();

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
            assembler.run(instance, bytecode, &cubin);
        }
        cubin
    }

    impl Assembler {
        fn find() -> Assembler {
            let path = match (env::var_os("CUTILE_TILEIRAS_PATH"), env::var_os("CUDA_HOME")) {
                (Some(path), _) => PathBuf::from(path),
                (None, Some(home)) => Path::new(&home).join("bin/tileiras"),
                (None, None) => fail(
                    "the CUDA kernels need the assembler tileiras, and neither CUDA_HOME nor \
                     CUTILE_TILEIRAS_PATH says where it is: build with `make build`, which \
                     installs it from PyPI, or without the feature `cuda`",
                ),
            };
            match Command::new(&path).arg("--version").output() {
                Ok(output) if output.status.success() => {
                    Assembler { path, version: String::from_utf8_lossy(&output.stdout).into() }
                }
                Ok(output) => fail(&format!(
                    "{} --version failed: {}",
                    path.display(),
                    String::from_utf8_lossy(&output.stderr)
                )),
                Err(error) => fail(&format!("{}: {error}", path.display())),
            }
        }

        fn run(&self, instance: &Instance, bytecode: &[u8], cubin: &Path) {
            let input = cubin.with_extension("tilebc");
            let output = cubin.with_extension("new");
            fs::write(&input, bytecode)
                .unwrap_or_else(|error| fail(&format!("{input:?}: {error}")));
            let run = Command::new(&self.path)
                .args(["--gpu-name", instance.target.name(), "-O3"])
                .arg(&input)
                .arg("-o")
                .arg(&output)
                .output();
            match run {
                Ok(run) if run.status.success() => {
                    fs::rename(&output, cubin).expect("the image was just written");
                    let _ = fs::remove_file(&input);
                }
                // Wheels of different releases make it fail without a reason.
                Ok(run) => fail(&format!(
                    "{instance}: tileiras failed, its input is kept in {}; are all NVIDIA wheels \
                     of one release?\n{}{}",
                    input.display(),
                    String::from_utf8_lossy(&run.stdout),
                    String::from_utf8_lossy(&run.stderr)
                )),
                Err(error) => fail(&format!("{}: {error}", self.path.display())),
            }
        }
    }
}
