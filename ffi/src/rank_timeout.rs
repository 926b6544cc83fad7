//! The rank timeout: how late the ranks of a ring may be.

use std::ops::RangeInclusive;
use std::time::Duration;

use burst_attention::environment;

use crate::error::Result;

/// The environment variable that sets the rank timeout, in seconds.
const VARIABLE: &str = "BURST_ATTENTION_RANK_TIMEOUT_S";

/// The rank timeout without the variable. It ends well before XLA's own collectives give up and end
/// the process.
pub const DEFAULT: Duration = Duration::from_secs(20);

/// The seconds that the variable may hold: from a millisecond to eleven days.
const SECONDS: RangeInclusive<f64> = 1e-3..=1e6;

/// Returns the rank timeout that the environment sets, or the default.
///
/// # Errors
/// If the variable holds neither a number of seconds within the bounds nor infinity.
pub fn from_environment() -> Result<Duration> {
    let (least, most) = (SECONDS.start(), SECONDS.end());
    let expected = || format!("seconds from {least} to {most}, or inf to wait for ever");
    Ok(environment::read(VARIABLE, expected, parse)?.unwrap_or(DEFAULT))
}

fn parse(text: &str) -> Option<Duration> {
    let seconds: f64 = text.parse().ok()?;
    (SECONDS.contains(&seconds) || seconds == f64::INFINITY).then(|| from_seconds(seconds))
}

/// Returns `seconds` as a rank timeout. Infinity means for ever, and a number that is not positive
/// means the default.
pub fn from_seconds(seconds: f64) -> Duration {
    let positive = seconds > 0.0;
    if positive { Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX) } else { DEFAULT }
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

    #[test]
    fn the_variable_takes_seconds_within_bounds_or_infinity() {
        assert_eq!(parse("0.5"), Some(Duration::from_millis(500)));
        assert_eq!(parse("1e6"), Some(Duration::from_secs(1_000_000)));
        assert_eq!(parse("inf"), Some(Duration::MAX));
        for text in ["abc", "0", "-1", "-inf", "nan", "1e-4", "1e20", "20 s"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
