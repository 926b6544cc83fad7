//! How late the ranks of a ring may be.

use std::time::Duration;

use crate::error::{Error, Result};

/// Environment variable that sets it, in seconds.
const VARIABLE: &str = "BURST_ATTENTION_RANK_TIMEOUT_S";

/// Without the variable: well before XLA's own collectives give up and end the process.
const DEFAULT: Duration = Duration::from_secs(20);

/// What holds when the first call is compiled.
pub fn initial() -> Duration {
    from_environment().unwrap_or(DEFAULT)
}

/// The limit that the environment sets, or the default one.
///
/// # Errors
/// If the variable holds anything but a positive number.
pub fn from_environment() -> Result<Duration> {
    let Some(value) = std::env::var_os(VARIABLE) else { return Ok(DEFAULT) };
    let seconds = value.to_str().and_then(|text| text.trim().parse::<f64>().ok());
    seconds.and_then(positive).ok_or_else(|| {
        Error::mismatch(VARIABLE, "a positive number of seconds", format!("{value:?}"))
    })
}

/// A number of seconds, infinity being for ever; anything that is not positive means the default.
pub fn from_seconds(seconds: f64) -> Duration {
    positive(seconds).unwrap_or(DEFAULT)
}

fn positive(seconds: f64) -> Option<Duration> {
    (seconds > 0.0).then(|| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_positive_numbers_only() {
        assert_eq!(from_seconds(1.5), Duration::from_millis(1500));
        assert_eq!(from_seconds(f64::INFINITY), Duration::MAX);
        for seconds in [0.0, -1.0, f64::NAN] {
            assert_eq!(from_seconds(seconds), DEFAULT);
        }
    }
}
