//! Features of a pass, with their arrays and numbers.

use serde::Deserialize;

use super::description::Rows;
use crate::features::FeatureSet;

/// The features of a pass. Its launches take the image that has them and the fewest others.
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Features {
    /// Rows see those of their own segment only.
    pub segments: Option<Segments>,
    /// Scores become `cap · tanh(score / cap)`, with a cap from 0.001 to 1000; 0 leaves them.
    pub soft_cap: f32,
    /// ALiBi: slope of each query head, float32 `[batch, heads]`. slope · (position of the key −
    /// position of the query) is added to scaled scores, after the soft cap.
    pub slopes: Option<Rows>,
    /// Dropout of weights.
    pub dropout: Option<Dropout>,
    /// Where the rows are in the sequence; counts with slopes and dropout only.
    pub positions: Positions,
}

/// The segments of a rectangle's rows.
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Segments {
    /// Segment of each query row, `[batch, q_len]` int32: rows see keys of their own segment only,
    /// and a negative one sees nothing.
    pub queries: Rows,
    /// Segment of each key row, `[batch, kv_len]` int32.
    pub keys: Rows,
    /// Room for what the launches find out about the resident rows, int32
    /// `[batch, ⌈rows / 64⌉, 4]`. Undefined before and after.
    pub ranges: Rows,
}

impl Features {
    /// The set that an image must have.
    pub(super) fn set(&self) -> FeatureSet {
        FeatureSet::SEGMENTS
            .when(self.segments.is_some())
            .and(FeatureSet::SOFT_CAP.when(self.soft_cap != 0.0))
            .and(FeatureSet::SLOPES.when(self.slopes.is_some()))
            .and(FeatureSet::DROPOUT.when(self.dropout.is_some()))
    }
}

/// Drops weights after the softmax, and divides what is left by 1 − `rate`. Whether a weight stays
/// depends on `numbers`, its head and the positions of its query and key alone.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dropout {
    /// Of each batch entry the two words of a random key, the index of the entry, and that of the
    /// first query head, uint32 `[batch, 4]`.
    pub numbers: Rows,
    /// Probability of a weight to be dropped, at least 0 and below 1.
    pub rate: f32,
}

/// Query row i has position `query` + `stride` · i, key row j `key` + `stride` · j. All are below
/// 2^31 and not negative.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Positions {
    /// Of the first query.
    pub query: i64,
    /// Of the first key.
    pub key: i64,
    /// From one row to the next.
    pub stride: i64,
}

impl Dropout {
    /// 2³² times the rate, to the nearest: a weight stays where its 32 random bits are not below.
    pub(super) fn threshold(&self) -> u32 {
        (f64::from(self.rate) * 4_294_967_296.0).round() as u32
    }
}
