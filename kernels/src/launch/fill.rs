//! The values of a launch's arguments.

use super::array;
use super::cut::Cut;
use super::job::Job;
use super::order::BlockOrder;
use super::rectangle::Side;
use crate::error::LaunchError;
use crate::record::{Argument, Meaning, Size, Value};
use crate::scores::ScoreNumbers;

impl Job {
    /// Returns the numbers of the scores.
    pub fn scores(&self) -> ScoreNumbers {
        let softmax_scale = self.rectangle.softmax_scale;
        ScoreNumbers { softmax_scale, soft_cap: self.features.soft_cap }
    }

    /// Returns the value of an argument in the launch of a cut.
    pub fn value(
        &self,
        argument: &'static Argument,
        cut: &Cut,
        order: BlockOrder,
    ) -> Result<Value, LaunchError> {
        let meaning = argument.meaning;
        let starts = (cut.queries.start, cut.keys.start);
        let of_features = || self.features.value(meaning, starts);
        let value = self.scores().value(meaning).or_else(of_features);
        if let Some(value) = value.or_else(|| self.packed_value(meaning, cut)) {
            return Ok(value);
        }
        let rows = |array: &array::Array| cut.rows(array.side).clone();
        if let Some(count) = array::value(&self.arrays, meaning, &cut.batch, rows) {
            return argument.value(count);
        }
        Ok(match meaning {
            Meaning::Scale => Value::F32(self.scale),
            Meaning::Lower => Value::I32(cut.lower),
            Meaning::Upper => Value::I32(cut.upper),
            Meaning::KeysStay => Value::I32(self.keys_stay.into()),
            Meaning::Reverse => Value::I32(order.reverse.into()),
            Meaning::First => Value::I32(cut.first.into()),
            Meaning::Last => Value::I32(cut.last.into()),
            Meaning::Section => return argument.value(order.section),
            Meaning::Size(size) => {
                let size = match size {
                    Size::Batch => cut.batch.len(),
                    // No view may have 0 rows.
                    Size::QLen => cut.rows(Side::Queries).len().max(1),
                    Size::KvLen => cut.rows(Side::Keys).len().max(1),
                    size => self.size(size),
                };
                return argument.value(size as u64);
            }
            other => unreachable!("{} has no {other:?}", self.kernel.name()),
        })
    }
}

impl Argument {
    /// Returns a number that fits the argument: an address or a 32-bit integer.
    pub(super) fn value(&self, number: u64) -> Result<Value, LaunchError> {
        if self.kind.is_pointer() {
            return Ok(Value::Pointer(number));
        }
        let too_large =
            |_| LaunchError::invalid(self.name, format!("at most {}", i32::MAX), number);
        i32::try_from(number).map(Value::I32).map_err(too_large)
    }
}
