//! `kernel-quality FOLDER [--write]`: prints what the compiler made of every kernel, from the files
//! of images in FOLDER; `--write` makes it the baseline.

use std::path::Path;
use std::process::ExitCode;
use std::{env, fs};

use burst_attention_compiler::quality::{BASELINE, faults, parse, qualities, table};
use burst_attention_kernels::cubin::changes;
use burst_attention_kernels::instances::Target;

fn main() -> ExitCode {
    let mut arguments = env::args().skip(1);
    let Some(folder) = arguments.next() else {
        eprintln!("error: expected: kernel-quality FOLDER [--write]");
        return ExitCode::FAILURE;
    };
    let qualities = match qualities(Path::new(&folder), &Target::ALL) {
        Ok(qualities) => qualities,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    let table = table(&qualities);
    print!("{table}");
    let faults: Vec<String> = qualities.iter().flat_map(|(i, q)| faults(i, q)).collect();
    for fault in &faults {
        eprintln!("fault: {fault}");
    }
    if let (Ok(before), Ok(now)) = (parse(BASELINE), parse(&table)) {
        for change in changes(&before, &now) {
            eprintln!("change: {change}");
        }
    }
    if arguments.any(|argument| argument == "--write") {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../quality.tsv");
        if let Err(error) = fs::write(file, table) {
            eprintln!("error: {file}: {error}");
            return ExitCode::FAILURE;
        }
    }
    if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
