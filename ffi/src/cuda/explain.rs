//! The choice of backends, for a user who asks.

use std::collections::HashSet;
use std::sync::{LazyLock, Mutex, PoisonError};

use burst_attention_kernels::backend::Choices;

use super::told::Write;

/// The variable that asks which backend computes each operation.
const VARIABLE: &str = "BURST_ATTENTION_EXPLAIN";

/// Writes which backends compute the operations of a call and why others refused. Writes each line
/// once in a process, and nothing unless the user asks.
pub fn explain(write: &Write, call: &str, choices: &Choices) {
    static IS_ASKED: LazyLock<bool> =
        LazyLock::new(|| std::env::var(VARIABLE).is_ok_and(|value| !matches!(&*value, "" | "0")));
    static WRITTEN: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);
    if choices.is_empty() || !*IS_ASKED {
        return;
    }
    let line = format!("{call}: {choices}");
    let mut written = WRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
    if written.insert(line.clone()) {
        write(&line);
    }
}
