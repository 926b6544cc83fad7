//! Writes stand-ins for the images of a target: files that name the kernels instead of holding their
//! machine code. The stand-in device knows them, and they take no compiler.
//!
//!     standin-images FOLDER TARGET

use std::path::Path;
use std::process::ExitCode;

use burst_attention_kernels::host::Host;
use burst_attention_kernels::images::write;
use burst_attention_kernels::instances::{Instance, Target};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, target] = arguments.as_slice() else {
        eprintln!("expected: standin-images FOLDER TARGET");
        return ExitCode::FAILURE;
    };
    let written = Target::of_name(target).and_then(|target| {
        let image =
            |instance: Instance| (instance, format!("stand-in for {instance}\0").into_bytes());
        let images: Vec<_> = Instance::of_target(target).map(image).collect();
        let host = Host::of_name(std::env::consts::ARCH)?;
        write(Path::new(folder), target, host, &images).map_err(|error| error.to_string())
    });
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
