//! `kernel-images FOLDER STORE [--host HOST] [TARGET…]` compiles the CUDA kernels for the targets,
//! or for all targets. The GPUs' hosts are like this host, or as HOST says.
//!
//! It writes one file for each target into FOLDER and keeps cubins in STORE.

use std::env;
use std::path::PathBuf;
use std::process::ExitCode;

use burst_attention_compiler::assembler::Assembler;
use burst_attention_compiler::images;
use burst_attention_kernels::host::Host;
use burst_attention_kernels::instances::Target;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let mut arguments = env::args().skip(1).peekable();
    let (Some(folder), Some(store)) = (arguments.next(), arguments.next()) else {
        return Err("expected: kernel-images FOLDER STORE [--host HOST] [TARGET…]".into());
    };
    let host = match arguments.next_if(|argument| argument == "--host") {
        Some(_) => Host::of_name(&arguments.next().unwrap_or_default())?,
        None => Host::of_name(env::consts::ARCH)?,
    };
    let named = arguments.map(|name| Target::of_name(&name)).collect::<Result<Vec<_>, _>>()?;
    let targets = if named.is_empty() { Target::ALL.to_vec() } else { named };
    let assembler = Assembler::find(env::var_os("CUTILE_TILEIRAS_PATH"), env::var_os("CUDA_HOME"))?;
    images::build(&assembler, host, &targets, &PathBuf::from(folder), &PathBuf::from(store))
}
