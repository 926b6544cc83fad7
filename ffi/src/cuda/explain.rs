//! The choice of backends, for a user who asks.

use std::sync::{Mutex, PoisonError};

use burst_attention::environment;
use burst_attention_kernels::backend::Choices;

use super::told::Write;
use crate::error::Result;

/// The variable that asks which backend computes each operation.
const VARIABLE: &str = "BURST_ATTENTION_EXPLAIN";

/// Writes which backends compute the operations of a call and why others refused. Writes each line
/// once in a process, whatever the ranks' costs, and nothing unless the user asks.
///
/// # Errors
/// If the variable holds anything but 0 or 1.
pub fn explain(write: &Write, call: &str, choices: &Choices) -> Result<()> {
    static WRITTEN: Mutex<Vec<(String, Choices)>> = Mutex::new(Vec::new());
    let parse = |text: &str| ["0", "1"].iter().position(|value| *value == text);
    let is_asked = environment::read(VARIABLE, || "0 or 1".into(), parse)? == Some(1);
    if choices.is_empty() || !is_asked {
        return Ok(());
    }
    let mut written = WRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
    if !written.iter().any(|(of, known)| of == call && known.is_like(choices)) {
        write(&format!("{call}: {choices}"));
        written.push((call.to_owned(), choices.clone()));
    }
    Ok(())
}
