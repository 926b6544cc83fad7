//! One rule for reading all environment variables of the library.

use std::ffi::OsStr;

use crate::error::Result;
use crate::types::invalid;

/// Returns the value of `variable`, or `None` where it is unset or empty.
///
/// `parse` gets the value without surrounding spaces. It returns `None` for a value that `expected`
/// does not describe.
///
/// # Errors
/// [`crate::Error::InvalidProblem`], which names the variable, if `parse` returns `None`.
pub fn read<T>(
    variable: &'static str,
    expected: impl FnOnce() -> String,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>> {
    parsed(variable, std::env::var_os(variable).as_deref(), expected, parse)
}

fn parsed<T>(
    variable: &'static str,
    value: Option<&OsStr>,
    expected: impl FnOnce() -> String,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>> {
    let Some(value) = value else { return Ok(None) };
    let text = value.to_str().map(str::trim);
    if text == Some("") {
        return Ok(None);
    }
    let expected = || format!("{}, or unset for the default", expected());
    let parsed = text.and_then(parse).map(Some);
    parsed.ok_or_else(|| invalid(variable, expected(), format!("{value:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(value: Option<&OsStr>) -> Result<Option<u8>> {
        parsed("NUMBER", value, || "from 0 to 255".into(), |text| text.parse().ok())
    }

    #[test]
    fn a_value_is_the_default_a_valid_one_or_an_error() {
        assert_eq!(number(None), Ok(None));
        for (value, expected) in [("", None), (" ", None), ("7", Some(7)), (" 255\n", Some(255))] {
            assert_eq!(number(Some(value.as_ref())), Ok(expected), "{value:?}");
        }
        for value in ["abc", "-1", "1.5", "256", "1e20", "7 8"] {
            let message = number(Some(value.as_ref())).expect_err(value).to_string();
            let words = "NUMBER must be from 0 to 255, or unset for the default";
            assert_eq!(message, format!("{words}, got {value:?}"));
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_value_that_is_not_text_is_an_error() {
        let value = std::os::unix::ffi::OsStrExt::from_bytes(b"7\xff");
        assert!(number(Some(value)).is_err());
    }
}
