//! Checks of a description as a whole; [`Launch::check`] checks single values.
//!
//! [`Launch::check`]: super::Launch::check

use super::array::Array;
use super::job::Job;
use crate::error::LaunchError;
use crate::record::{Argument, Meaning, Size};
use crate::tiles::{LATENT_VALUES, LATENT_WIDTH};

/// The kernels count to the end of a tile, and no tile has more rows.
const LONGEST_TILE: usize = 128;

/// Checks that kernels exist for these numbers of columns.
pub(super) fn check_columns(head_dim: usize, value_dim: usize) -> Result<(), LaunchError> {
    for (name, dim) in [("head_dim", head_dim), ("value_dim", value_dim)] {
        if !dim.is_multiple_of(8) || !(8..=256).contains(&dim) {
            let expected = "a multiple of 8 from 8 to 256 (pad the columns with zeros)";
            return Err(LaunchError::invalid(name, expected, dim));
        }
    }
    Ok(())
}

/// Checks that a kernel exists for keys of `head_dim` columns whose first `value_dim` are the values.
pub(super) fn check_latents(head_dim: usize, value_dim: usize) -> Result<(), LaunchError> {
    let widest = LATENT_WIDTH as usize;
    let of_values = head_dim.min(LATENT_VALUES as usize);
    for (name, dim, most) in [("head_dim", head_dim, widest), ("value_dim", value_dim, of_values)] {
        if !dim.is_multiple_of(8) || !(8..=most).contains(&dim) {
            let expected = format!("a multiple of 8 from 8 to {most}");
            return Err(LaunchError::invalid(name, expected, dim));
        }
    }
    Ok(())
}

/// Checks that `count` heads of another array divide the heads evenly.
pub(super) fn check_sharing(
    name: &'static str,
    count: usize,
    heads: usize,
) -> Result<(), LaunchError> {
    if count == 0 || !heads.is_multiple_of(count) {
        let expected = format!("a divisor of heads ({heads})");
        return Err(LaunchError::invalid(name, expected, count));
    }
    Ok(())
}

impl Job {
    /// Checks that a kernel exists for the sizes and that counts are 32-bit.
    pub fn check_sizes(&self) -> Result<(), LaunchError> {
        let rectangle = &self.rectangle;
        for size in [Size::Batch, Size::QLen, Size::KvLen, Size::Heads] {
            let count = self.size(size);
            if i32::try_from(count).is_err() {
                let argument = self.kernel.find(Meaning::Size(size));
                let name = argument.map_or("size", |(_, argument)| argument.name);
                return Err(LaunchError::invalid(name, format!("at most {}", i32::MAX), count));
            }
        }
        if rectangle.heads == 0 {
            return Err(LaunchError::invalid("heads", "at least 1", 0));
        }
        check_sharing("kv_heads", rectangle.kv_heads, rectangle.heads)?;
        check_columns(rectangle.head_dim, rectangle.value_dim)?;
        self.scores().check()?;
        let rows = rectangle.q_len.max(rectangle.kv_len).next_multiple_of(LONGEST_TILE);
        self.features.check(rows)
    }

    /// Checks that the record's divisors divide strides, that arrays which share a stride argument
    /// have equal strides, and that no array ends beyond the address space.
    pub fn check_arrays(&self) -> Result<(), LaunchError> {
        for (n, array) in self.arrays.iter().enumerate().filter(|(_, array)| array.is_given()) {
            let span = array.span(self.rectangle.batch, self.rows(array.side));
            if u128::from(array.address) + span > u128::from(u64::MAX) {
                let expected = "below 2^64 to its end (check its strides)";
                let got = format!("{:#x} + {span} bytes", array.address);
                return Err(LaunchError::invalid(array.name, expected, got));
            }
            if self.rectangle.batch > 1 {
                self.check_stride(array)?;
            }
            let twin = self.arrays[..n].iter().find(|twin| twin.is_twin_of(array));
            twin.map_or(Ok(()), |twin| self.check_twins(array, twin))?;
        }
        Ok(())
    }

    fn check_stride(&self, array: &Array) -> Result<(), LaunchError> {
        match self.kernel.find(Meaning::BatchStride(array.view.batch_stride)) {
            Some((_, &Argument { name, divisor, .. }))
                if !array.batch_stride.is_multiple_of(divisor as u64) =>
            {
                let expected = format!("a multiple of {divisor} elements");
                Err(LaunchError::invalid(name, expected, array.batch_stride))
            }
            _ => Ok(()),
        }
    }

    fn check_twins(&self, array: &Array, twin: &Array) -> Result<(), LaunchError> {
        let (batch, heads) = (self.rectangle.batch, self.rectangle.heads);
        let strides = [
            (batch > 1, "batch stride", array.batch_stride, twin.batch_stride),
            (heads > 1, "head stride", array.head_stride, twin.head_stride),
        ];
        for (matters, what, stride, of_twin) in strides {
            if matters && stride != of_twin {
                let expected = format!("laid out as {} (stride {of_twin})", twin.name);
                return Err(LaunchError::invalid(array.name, expected, format!("{what} {stride}")));
            }
        }
        Ok(())
    }
}
