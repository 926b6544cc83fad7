//! The rectangle of queries × keys that a launch works on.

use serde::Deserialize;

use crate::element::Element;
use crate::record::Size;

/// A rectangle of queries × keys, and which of its pairs see each other.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rectangle {
    /// Batch entries; with 0 there are no launches.
    pub batch: usize,
    /// Query rows.
    pub q_len: usize,
    /// Key rows.
    pub kv_len: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads, a divisor of `heads`.
    pub kv_heads: usize,
    /// Columns of queries and keys, a multiple of 8 up to 256.
    pub head_dim: usize,
    /// Columns of values and of the result, a multiple of 8 up to 256.
    pub value_dim: usize,
    /// Type of the activations.
    pub element: Element,
    /// Query row i sees key row j when `lower ≤ j − i ≤ upper`; `i64::MIN` for no limit.
    pub lower: i64,
    /// See `lower`; `i64::MAX` for no limit.
    pub upper: i64,
    /// Factor on q·k, positive.
    pub softmax_scale: f32,
}

/// One side of a rectangle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// One row per query.
    Queries,
    /// One row per key.
    Keys,
}

impl Side {
    /// Returns the opposite side.
    pub fn other(self) -> Side {
        match self {
            Side::Queries => Side::Keys,
            Side::Keys => Side::Queries,
        }
    }

    /// Returns the size that counts its rows.
    pub fn size(self) -> Size {
        match self {
            Side::Queries => Size::QLen,
            Side::Keys => Size::KvLen,
        }
    }
}
