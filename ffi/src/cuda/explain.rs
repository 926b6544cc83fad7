//! The choice of backends, for a user who asks.

use std::collections::HashSet;
use std::sync::{LazyLock, Mutex, PoisonError};

use burst_attention::cuda::commands::Choices;

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
    let line = line(call, choices);
    let mut written = WRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
    if written.insert(line.clone()) {
        write(&line);
    }
}

/// Returns the choices in words, without their numbers, which differ from rank to rank.
fn line(call: &str, choices: &Choices) -> String {
    let all: Vec<_> = choices.iter().map(|(choice, _)| choice.to_string()).collect();
    format!("{call}: {}", all.join(", "))
}

#[cfg(test)]
mod tests {
    use burst_attention_kernels::backend::{Choice, Reason};

    use super::*;

    #[test]
    fn a_line_names_backends_and_the_reasons_of_others() {
        let refusals = vec![("other", Reason("segments are not served".into()))];
        let first = Choice { operation: "forward", backend: Some("other"), refusals: vec![] };
        let second = Choice { operation: "forward", backend: Some("tile"), refusals };
        let expected = "forward over 2 ranks: forward by other, forward by tile (other: \
                        segments are not served)";
        assert_eq!(line("forward over 2 ranks", &vec![(first, 3), (second, 1)]), expected);
    }
}
