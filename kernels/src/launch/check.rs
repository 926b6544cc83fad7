//! Checks of a description as a whole; those of single values are [`Launch::check`]'s.
//!
//! [`Launch::check`]: super::Launch::check

use super::array::Array;
use super::error::LaunchError;
use super::features::{Features, Positions};
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
        let scale = self.softmax_scale;
        if !(scale > 0.0 && scale.is_finite() && self.scale_log2().is_finite()) {
            let expected = "positive and finite (for a negative scale negate the queries and dq, \
                            for 0 set them to 0)";
            return Err(LaunchError::invalid("softmax_scale", expected, scale));
        }
        self.check_features()
    }

    /// Features are such that the kernels compute them.
    fn check_features(&self) -> Result<(), LaunchError> {
        let Features { soft_cap, slopes, dropout, .. } = self.features;
        // The kernels compute tanh to 1e-7: of a larger cap that would be more than a rounding.
        if soft_cap != 0.0 && !(1e-3..=1e3).contains(&soft_cap) {
            let expected = "0 for none, or from 0.001 to 1000 (leave out a larger one)";
            return Err(LaunchError::invalid("soft_cap", expected, soft_cap));
        }
        if let Some(rate) = dropout.map(|dropout| dropout.rate)
            && !(0.0..1.0).contains(&rate)
        {
            return Err(LaunchError::invalid("rate of dropout", "at least 0 and below 1", rate));
        }
        if slopes.is_none() && dropout.is_none() { Ok(()) } else { self.check_positions() }
    }

    /// Positions are 32-bit whatever piece they are counted in.
    fn check_positions(&self) -> Result<(), LaunchError> {
        let Positions { query, key, stride } = self.features.positions;
        let rows = self.q_len.max(self.kv_len).next_multiple_of(LONGEST_TILE) as i128;
        let furthest = rows * i128::from(stride);
        for (name, first) in
            [("position of the first query", query), ("that of the first key", key)]
        {
            let most = i128::from(i32::MAX);
            let (begin, end) = (i128::from(first), i128::from(first) + furthest);
            if !(0..=most).contains(&begin) || !(0..=most).contains(&end) {
                let expected = format!("such that it and {rows} rows on are from 0 to {most}");
                return Err(LaunchError::invalid(
                    name,
                    expected,
                    format!("{first}, {stride} apart"),
                ));
            }
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
