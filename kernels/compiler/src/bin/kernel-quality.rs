//! `kernel-quality FOLDER [--write]` prints what the compiler made of every kernel, from the files
//! of images in FOLDER, and the rates that the model predicts. `--write` accepts the printed
//! tables.

use std::path::Path;
use std::process::ExitCode;
use std::{env, fs};

use burst_attention_compiler::model::predict::{packed, predictions, rates};
use burst_attention_compiler::quality::{Tables, faults, qualities};
use burst_attention_kernels::instances::{Instance, Target};

fn main() -> ExitCode {
    match run() {
        Ok(faults) if faults.is_empty() => ExitCode::SUCCESS,
        Ok(faults) => {
            faults.iter().for_each(|fault| eprintln!("fault: {fault}"));
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Prints the tables, writes them if asked to, and returns the rules that the images break.
fn run() -> Result<Vec<String>, String> {
    let mut arguments = env::args().skip(1);
    let folder = arguments.next().ok_or("expected: kernel-quality FOLDER [--write]")?;
    let reports = qualities(Path::new(&folder), &Target::ALL)?;
    let tables = Tables::new(&reports);
    tables.texts().iter().for_each(|(_, text)| print!("{text}"));
    let predicted = predictions(&reports);
    predicted.iter().for_each(|prediction| println!("{prediction}"));
    packed(&reports).iter().for_each(|prediction| println!("{prediction}"));
    if let Ok(before) = Tables::accepted(Instance::all()) {
        before.changes(&tables).iter().for_each(|change| eprintln!("change: {change}"));
    }
    if arguments.any(|argument| argument == "--write") {
        for (name, text) in tables.texts().into_iter().chain([("rates.tsv", rates(&predicted))]) {
            let file = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name(name);
            fs::write(&file, text).map_err(|error| format!("{}: {error}", file.display()))?;
        }
    }
    Ok(reports.iter().flat_map(faults).collect())
}
