//! The values of a launch's arguments.

use std::f64::consts::LOG2_E;

use super::Launch;
use super::array::{Array, Side};
use super::error::LaunchError;
use super::features::Features;
use super::job::Job;
use super::order::Order;
use super::split::Piece;
use crate::record::{Argument, Value};

impl Launch {
    /// Puts another array's address where an array is neither there nor used.
    ///
    /// The driver makes tensor maps of all views before the kernel runs, of those too that it
    /// then doesn't touch, and need not accept null.
    pub(super) fn stand_in(&mut self) {
        let given = |value: &Value| matches!(value, Value::Pointer(address) if *address != 0);
        let Some(other) = self.values.iter().copied().find(given) else { return };
        for (n, argument) in self.instance.kernel.arguments().iter().enumerate() {
            if self.values[n] == Value::Pointer(0) && !self.uses(argument) {
                self.values[n] = other;
            }
        }
    }
}

impl Job {
    fn is_given(&self, name: &str) -> bool {
        self.arrays.iter().any(|array| array.name == name && array.is_given())
    }

    /// The scale for scores in base 2.
    pub fn scale_log2(&self) -> f32 {
        (f64::from(self.softmax_scale) * LOG2_E) as f32
    }

    /// 2 · softmax_scale · log2 e / soft cap.
    fn twice_by_cap(&self) -> f32 {
        let soft_cap = self.features.soft_cap;
        if soft_cap == 0.0 { 0.0 } else { 2.0 * self.scale_log2() / soft_cap }
    }

    /// Position of a row; what was checked fits 32 bits.
    fn position(&self, first: i64, row: usize) -> Value {
        Value::I32((first + self.features.positions.stride * row as i64) as i32)
    }

    /// The value of an argument in the launch of a piece.
    pub fn value(
        &self,
        argument: &Argument,
        piece: &Piece,
        order: Order,
    ) -> Result<Value, LaunchError> {
        let rows = |side| piece.rows(side).len().max(1) as u64;
        let Features { dropout, positions, .. } = self.features;
        let integer = match argument.name {
            name if argument.kind.is_pointer() => {
                return Ok(Value::Pointer(self.address(name, piece)));
            }
            "scale_log2" => return Ok(Value::F32(self.scale_log2())),
            "scale" => return Ok(Value::F32(self.scale)),
            "softmax_scale" => return Ok(Value::F32(self.softmax_scale)),
            "cap_log2" => return Ok(Value::F32(self.features.soft_cap * LOG2_E as f32)),
            "twice_by_cap" => return Ok(Value::F32(self.twice_by_cap())),
            "threshold" => return Ok(Value::I32(dropout.map_or(0, |d| d.threshold() as i32))),
            "keep_scale" => return Ok(Value::F32(dropout.map_or(1.0, |d| 1.0 / (1.0 - d.rate)))),
            "q_position" => return Ok(self.position(positions.query, piece.queries.start)),
            "k_position" => return Ok(self.position(positions.key, piece.keys.start)),
            "position_stride" => return Ok(Value::I32(positions.stride as i32)),
            "lower" => return Ok(Value::I32(piece.lower)),
            "upper" => return Ok(Value::I32(piece.upper)),
            "batch" => piece.batch.len() as u64,
            "q_len" | "rows" => rows(Side::Queries),
            "kv_len" => rows(Side::Keys),
            "heads" => self.heads as u64,
            "kv_heads" => self.kv_heads as u64,
            "head_dim" => self.head_dim as u64,
            "value_dim" => self.value_dim as u64,
            "section" => order.section,
            "reverse" => order.reverse.into(),
            "first" => piece.first.into(),
            "last" => piece.last.into(),
            "has_dlse" => self.is_given("dlse").into(),
            "has_b" => self.is_given("b").into(),
            "has_slopes" => self.features.slopes.is_some().into(),
            "has_segments" => self.features.segments.is_some().into(),
            "has_zeros" => self.is_given("zeros").into(),
            "has_dropout" => dropout.is_some().into(),
            "has_dslopes" => self.is_given("dslopes").into(),
            stride => self.stride(stride, piece),
        };
        let too_large = |_| {
            let expected = format!("at most {}", i32::MAX);
            LaunchError::invalid(argument.name, expected, integer)
        };
        i32::try_from(integer).map(Value::I32).map_err(too_large)
    }

    pub fn address(&self, name: &str, piece: &Piece) -> u64 {
        let array = self.arrays.iter().find(|array| array.name == name);
        let at = array.map(|array| array.at(&piece.batch, piece.rows(array.side)));
        at.unwrap_or_else(|| unreachable!("{} is not described", name))
    }

    /// The stride `name`. That between entries of a single one may be any, even beyond 32 bits:
    /// the kernel gets one that fits.
    fn stride(&self, name: &str, piece: &Piece) -> u64 {
        let is_named =
            |array: &&Array| array.stride_name == name || array.head_stride_name == Some(name);
        let Some(array) = self.arrays.iter().find(is_named) else {
            unreachable!("{name} is not described")
        };
        if array.stride_name != name {
            // 0 where there are no rows, which no view may have.
            array.head_stride.max(1)
        } else if piece.batch.len() == 1 {
            array.extent(piece.rows(array.side).len()) as u64
        } else {
            array.batch_stride
        }
    }
}
