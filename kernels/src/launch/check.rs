//! Checks of a description as a whole; those of single values are [`Launch::check`]'s.
//!
//! [`Launch::check`]: super::Launch::check

use super::array::Array;
use super::description::Alibi;
use super::error::LaunchError;
use super::job::Job;
use crate::instances::Kernel;

/// A tile has no more rows, and the kernels count to its end.
const LONGEST_TILE: usize = 128;

impl Job {
    /// Sizes are such that a kernel exists and counts are 32-bit.
    pub fn check_sizes(&self) -> Result<(), LaunchError> {
        let is_sum = matches!(self.kernel, Kernel::Finish | Kernel::Merge);
        let rows = if is_sum { "rows" } else { "q_len" };
        let sizes = [
            ("batch", self.batch),
            (rows, self.q_len),
            ("kv_len", self.kv_len),
            ("heads", self.heads),
        ];
        for (name, size) in sizes {
            if i32::try_from(size).is_err() {
                return Err(LaunchError::invalid(name, format!("at most {}", i32::MAX), size));
            }
        }
        if self.heads == 0 {
            return Err(LaunchError::invalid("heads", "at least 1", 0));
        }
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            let expected = format!("a divisor of heads ({})", self.heads);
            return Err(LaunchError::invalid("kv_heads", expected, self.kv_heads));
        }
        for (name, dim) in [("head_dim", self.head_dim), ("value_dim", self.value_dim)] {
            if !dim.is_multiple_of(8) || !(8..=256).contains(&dim) {
                let expected = "a multiple of 8 from 8 to 256 (pad the columns with zeros)";
                return Err(LaunchError::invalid(name, expected, dim));
            }
        }
        if self.value_dim != self.head_dim && self.kernel == self.kernel.plain() {
            let expected = format!("head_dim ({}) where `general` is not given", self.head_dim);
            return Err(LaunchError::invalid("value_dim", expected, self.value_dim));
        }
        let scale = self.softmax_scale;
        if !(scale > 0.0 && scale.is_finite() && self.scale_log2().is_finite()) {
            let expected = "positive and finite (for a negative scale negate the queries and dq, \
                            for 0 set them to 0)";
            return Err(LaunchError::invalid("softmax_scale", expected, scale));
        }
        // The kernels compute tanh to 1e-7: of a larger cap that would be more than a rounding.
        if self.soft_cap != 0.0 && !(1e-3..=1e3).contains(&self.soft_cap) {
            let expected = "0 for none, or from 0.001 to 1000 (leave out a larger one)";
            return Err(LaunchError::invalid("soft_cap", expected, self.soft_cap));
        }
        self.check_positions()
    }

    /// Positions are 32-bit whatever piece they are counted in.
    fn check_positions(&self) -> Result<(), LaunchError> {
        let Some(Alibi { distance, stride, .. }) = self.alibi else { return Ok(()) };
        let rows = self.q_len.max(self.kv_len).next_multiple_of(LONGEST_TILE) as u128;
        let furthest = rows * u128::from(stride.unsigned_abs());
        let Some(most) = (i32::MAX as u128).checked_sub(furthest) else {
            let expected = format!("below 2^31 over {rows} rows");
            return Err(LaunchError::invalid("stride of alibi", expected, stride));
        };
        if u128::from(distance.unsigned_abs()) > most {
            let expected = format!("from -{most} to {most} with {rows} rows {stride} apart");
            return Err(LaunchError::invalid("distance of alibi", expected, distance));
        }
        Ok(())
    }

    /// Strides are divided as the record says, equal where arrays share an argument, and no array
    /// ends beyond the address space.
    pub fn check_arrays(&self) -> Result<(), LaunchError> {
        for (n, array) in self.arrays.iter().enumerate().filter(|(_, array)| array.is_given()) {
            let span = array.span(self.batch, self.rows(array.side));
            if u128::from(array.address) + span > u128::from(u64::MAX) {
                let expected = "below 2^64 to its end (check its strides)";
                let got = format!("{:#x} + {span} bytes", array.address);
                return Err(LaunchError::invalid(array.name, expected, got));
            }
            if self.batch > 1 {
                self.check_stride(array)?;
            }
            let twin = self.arrays[..n].iter().find(|twin| twin.is_twin_of(array));
            twin.map_or(Ok(()), |twin| self.check_twins(array, twin))?;
        }
        Ok(())
    }

    fn check_stride(&self, array: &Array) -> Result<(), LaunchError> {
        let divisor = self.argument(array.stride_name).divisor;
        if !array.batch_stride.is_multiple_of(divisor as u64) {
            let expected = format!("a multiple of {divisor} elements");
            return Err(LaunchError::invalid(array.stride_name, expected, array.batch_stride));
        }
        Ok(())
    }

    fn check_twins(&self, array: &Array, twin: &Array) -> Result<(), LaunchError> {
        let expected = |stride: u64| format!("laid out as {} (stride {stride})", twin.name);
        let strides = [
            (self.batch > 1, "batch stride", array.batch_stride, twin.batch_stride),
            (self.heads > 1, "head stride", array.head_stride, twin.head_stride),
        ];
        for (matters, what, stride, of_twin) in strides {
            if matters && stride != of_twin {
                let got = format!("{what} {stride}");
                return Err(LaunchError::invalid(array.name, expected(of_twin), got));
            }
        }
        Ok(())
    }
}
