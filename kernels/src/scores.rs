//! The numbers of scores, with which all kernels that compute scores are launched.

use std::f64::consts::LOG2_E;

use crate::error::LaunchError;
use crate::record::{Meaning, Value};

/// The scale and the soft cap of scores.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScoreNumbers {
    /// Factor on q·k, positive.
    pub softmax_scale: f32,
    /// Soft cap of the scaled scores; 0 for none.
    pub soft_cap: f32,
}

impl ScoreNumbers {
    /// Checks that the kernels can compute with the numbers. They compute tanh to 1e-7: with a
    /// larger cap this error would exceed a rounding.
    pub fn check(self) -> Result<(), LaunchError> {
        let ScoreNumbers { softmax_scale: scale, soft_cap: cap } = self;
        if !(scale > 0.0 && self.scale_log2().is_finite()) {
            let expected = "positive and finite (for a negative scale negate the queries and dq, \
                            for 0 set them to 0)";
            return Err(LaunchError::invalid("softmax_scale", expected, scale));
        }
        if cap == 0.0 || (1e-3..=1e3).contains(&cap) {
            return Ok(());
        }
        let expected = "0 for none, or from 0.001 to 1000 (leave out a larger one)";
        Err(LaunchError::invalid("soft_cap", expected, cap))
    }

    /// Returns the value of an argument that these numbers decide; `None` for any other argument.
    pub fn value(self, meaning: Meaning) -> Option<Value> {
        Some(Value::F32(match meaning {
            Meaning::SoftmaxScale => self.softmax_scale,
            Meaning::ScaleLog2 => self.scale_log2(),
            Meaning::CapLog2 => self.soft_cap * LOG2_E as f32,
            Meaning::TwiceByCap if self.soft_cap == 0.0 => 0.0,
            Meaning::TwiceByCap => 2.0 * self.scale_log2() / self.soft_cap,
            _ => return None,
        }))
    }

    /// Returns the scale for scores in base 2.
    fn scale_log2(self) -> f32 {
        (f64::from(self.softmax_scale) * LOG2_E) as f32
    }
}
