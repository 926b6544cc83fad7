//! Questions about the features of a problem.

use std::ops::RangeInclusive;

use super::{Features, Operand};
use crate::error::{Error, Result};
use crate::types::invalid;

/// Soft caps that float32 can compute with: the cap and 2 · log2(e) / cap stay within its range.
pub const SOFT_CAPS: RangeInclusive<f32> = 1e-30..=1e30;

impl Features {
    /// Whether slopes or dropout count rows by their positions in the layout.
    pub fn count_positions(&self) -> bool {
        (self.slopes || self.dropout.is_some()) && !self.positions
    }

    /// Whether the positions of queries are data.
    pub fn has_query_positions(&self) -> bool {
        self.visible || self.positions
    }

    /// Checks the numbers of the features, and that a second interval has a first one.
    ///
    /// # Errors
    /// [`Error::InvalidProblem`] that names the number.
    pub fn validate(&self) -> Result<()> {
        if self.also_visible && !self.visible {
            return Err(invalid("second interval of keys", "a first one too", "none"));
        }
        if let Some(cap) = self.soft_cap.filter(|cap| !SOFT_CAPS.contains(cap)) {
            let (least, most) = (SOFT_CAPS.start(), SOFT_CAPS.end());
            let expected = format!("from {least:e} to {most:e} (0 or nothing for no cap)");
            return Err(invalid("soft cap", expected, format!("{cap:e}")));
        }
        if let Some(rate) = self.dropout.filter(|rate| !(0.0..1.0).contains(rate)) {
            return Err(invalid("dropout rate", "at least 0 and below 1", rate));
        }
        Ok(())
    }

    /// Returns the features that take the named arrays. A soft cap or a probability of dropout of 0
    /// means none.
    ///
    /// # Errors
    /// [`Error::InvalidProblem`] if the features ask for other names.
    pub fn of_operands(soft_cap: f32, dropout: f32, names: &[&str]) -> Result<Features> {
        let given = |number: f32| Some(number).filter(|number| *number != 0.0);
        let mut features = Features::default();
        (features.soft_cap, features.dropout) = (given(soft_cap), given(dropout));
        let named = Operand::of_features().filter(|operand| names.contains(&operand.name()));
        named.filter_map(|operand| operand.row().feature.as_ref()).for_each(|flag| {
            (flag.turn_on)(&mut features);
        });
        let expected: Vec<_> = Operand::of(&features).map(Operand::name).collect();
        if expected == names {
            return Ok(features);
        }
        let (expected, got) = (expected.join(", "), names.join(", "));
        let name = "operands of features";
        Err(Error::InvalidProblem {
            name,
            expected: format!("[{expected}]"),
            got: format!("[{got}]"),
        })
    }
}
