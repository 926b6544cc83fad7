//! The numbers that the host gives with each call.

use burst_attention_kernels::backend::cudnn::{Sdpa, SdpaPass};
use cudarc::cudnn::sys::cudnnDataType_t::{self as DataType, *};

/// What takes the place of hidden scores.
const HIDDEN: f32 = -1e30;

/// A number that the host gives with each call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostNumber {
    /// The factor on q·k.
    Scale,
    /// What takes the place of hidden scores.
    Hidden,
    /// How many columns a row sees up to its own.
    Left,
    /// How many columns a row sees after its own, an integer.
    Right,
    /// 1.
    One,
}

impl HostNumber {
    /// Returns its number in a graph.
    pub const fn number(self) -> i64 {
        self as i64 + 50
    }

    /// Returns its type.
    pub fn data_type(self) -> DataType {
        if self == HostNumber::Right { CUDNN_DATA_INT32 } else { CUDNN_DATA_FLOAT }
    }

    /// Returns the numbers of a plan's graph, as bits.
    pub fn of(plan: &Sdpa) -> Vec<(HostNumber, u32)> {
        // All that fit a tile's rows are exact in float32.
        let left = plan.lower.map(|lower| (1 - lower) as f32);
        let right = plan.upper.filter(|upper| *upper != 0);
        let numbers = [
            (HostNumber::Scale, Some(plan.softmax_scale.to_bits())),
            (HostNumber::Hidden, plan.has_mask().then(|| HIDDEN.to_bits())),
            (HostNumber::Left, left.map(f32::to_bits)),
            (HostNumber::Right, right.map(|right| right as u32)),
            (HostNumber::One, (plan.pass == SdpaPass::Backward).then(|| 1.0_f32.to_bits())),
        ];
        numbers.into_iter().filter_map(|(number, bits)| Some((number, bits?))).collect()
    }
}
