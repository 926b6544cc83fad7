//! Prints what the compiler made of every kernel; `--write` makes it the baseline.

use std::process::ExitCode;
use std::{env, fs};

use burst_attention_kernels::cubin::changes;
use burst_attention_kernels::quality::{BASELINE, faults, parse, qualities, table};

fn main() -> ExitCode {
    let qualities = match qualities() {
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
    if env::args().any(|argument| argument == "--write") {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/quality.tsv");
        if let Err(error) = fs::write(file, table) {
            eprintln!("error: {file}: {error}");
            return ExitCode::FAILURE;
        }
    }
    if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
