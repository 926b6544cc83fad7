//! NVIDIA's assembler `tileiras`, which makes cubins of Tile IR bytecode.

use std::ffi::OsString;
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use burst_attention_kernels::host::Host;

/// Runs of the assembler on one input before its crashes become an error. Version 13.5.37 can read
/// past the end of an array, and the bytes there decide whether it crashes. The worst known input
/// crashed 3 of 10 runs, and the other 7 runs gave the same image.
const RUNS: u32 = 8;

/// The assembler. Its version is part of the name of each kept image.
#[derive(Debug)]
pub struct Assembler {
    path: PathBuf,
    /// The text that it prints about its version.
    pub version: String,
}

impl Assembler {
    /// Returns the assembler at `tileiras` if that path is given, otherwise the assembler of the
    /// CUDA installation in `home`.
    ///
    /// # Errors
    /// If neither path is given, or the program there does not tell its version.
    pub fn find(tileiras: Option<OsString>, home: Option<OsString>) -> Result<Assembler, String> {
        let path = match (tileiras, home) {
            (Some(path), _) => PathBuf::from(path),
            (None, Some(home)) => Path::new(&home).join("bin/tileiras"),
            (None, None) => {
                return Err("the CUDA kernels need the assembler tileiras, and neither CUDA_HOME \
                            nor CUTILE_TILEIRAS_PATH says where it is: build with `make images`, \
                            which installs it from PyPI"
                    .into());
            }
        };
        let output = Command::new(&path).arg("--version").output();
        let output = output.map_err(|error| format!("{}: {error}", path.display()))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(format!("{} --version failed: {said}", path.display()));
        }
        let version = String::from_utf8_lossy(&output.stdout).into();
        Ok(Assembler { path, version })
    }

    /// Assembles `bytecode` for the GPU `target` of a host into the file `cubin`. A failure leaves
    /// no part of the file. After a crash of the assembler this runs it again.
    ///
    /// # Errors
    /// If a file cannot be written, or the assembler refuses its input or crashes each time. Then
    /// the input is kept.
    pub fn assemble(
        &self,
        target: &str,
        host: Host,
        bytecode: &[u8],
        cubin: &Path,
    ) -> Result<(), String> {
        let (input, output) = (cubin.with_extension("tilebc"), cubin.with_extension("new"));
        fs::write(&input, bytecode).map_err(|error| format!("{}: {error}", input.display()))?;
        let mut command = Command::new(&self.path);
        command.args(["--gpu-name", target, "-O3"]).arg(&input).arg("-o").arg(&output);
        command.args(["--host-arch", host.name()]);
        let mut runs = 1;
        let run = loop {
            let run = command.output();
            let run = run.map_err(|error| format!("{}: {error}", self.path.display()))?;
            if run.status.signal().is_none() || runs == RUNS {
                break run;
            }
            runs += 1;
        };
        if !run.status.success() {
            return Err(format!(
                // With wheels of several releases it fails without a reason.
                "tileiras failed ({}), its input is kept in {}; are all NVIDIA wheels of one \
                 release?\n{}{}",
                ending(run.status, runs),
                input.display(),
                String::from_utf8_lossy(&run.stdout),
                String::from_utf8_lossy(&run.stderr)
            ));
        }
        fs::rename(&output, cubin).map_err(|error| format!("{}: {error}", output.display()))?;
        let _ = fs::remove_file(&input);
        Ok(())
    }
}

/// Returns a text that says how the last of `runs` runs ended.
fn ending(status: ExitStatus, runs: u32) -> String {
    if status.signal().is_some() { format!("{status}, {runs} times") } else { status.to_string() }
}
