//! Attention problems: everything that one ring computes, without the data.

use serde::Deserialize;

use crate::error::Result;
use crate::layout::Layout;
use crate::mask::Window;
use crate::operands::{DeviceKind, Dim, Operand};
pub use crate::operands::{Features, SOFT_CAPS};
use crate::types::invalid;
pub use crate::types::{Dtype, Order, Pass, Travels};

/// The largest head dimension that a kernel accepts.
pub const MAX_HEAD_DIM: usize = 256;

/// Most ranks of a ring. The schedules of all ranks grow with the square of the number of ranks.
pub const MAX_RANKS: usize = 4096;

/// Exclusive limit of a shard's rows, with which the number of pairs of rows fits 64 bits.
pub const MAX_ROWS: usize = 1 << 31;

/// Most bytes, as float32, of the shards of all ranks together. With this limit, sums of the bytes
/// that all ranks send and of the work that they do fit 64 bits.
pub const MAX_BYTES: u64 = 1 << 48;

/// One attention problem over a ring. Every rank holds `q_len` queries and `kv_len` keys of every
/// batch entry and head. Both sequences begin at position 0 and have the same layout.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Problem {
    /// Batch entries, of all leading dimensions together.
    pub batch: usize,
    /// Queries per rank.
    pub q_len: usize,
    /// Keys per rank.
    pub kv_len: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; query head `h` uses key/value head `h / group_size`.
    pub kv_heads: usize,
    /// Length of a query or key vector.
    pub head_dim: usize,
    /// Length of a value or output vector.
    pub value_dim: usize,
    /// Element type of q, k, v, o and their gradients.
    pub dtype: Dtype,
    /// The pairs of global positions that see each other.
    #[serde(default)]
    pub window: Window,
    /// Factor on q·k.
    pub softmax_scale: f32,
    /// The features of scores and weights.
    #[serde(default)]
    pub features: Features,
    /// The global positions that a rank holds.
    pub layout: Layout,
    /// Ranks in the ring.
    pub world_size: usize,
}

impl Problem {
    /// Checks every field. All other code relies on this check.
    ///
    /// # Errors
    /// [`InvalidProblem`](crate::Error::InvalidProblem) names the field, its allowed values and the
    /// value that came.
    pub fn validate(&self) -> Result<()> {
        if self.world_size == 0 {
            return Err(invalid("world_size", "at least 1", 0));
        }
        if self.world_size > MAX_RANKS {
            let expected =
                format!("at most {MAX_RANKS} (further devices can share the batch or the heads)");
            return Err(invalid("world_size", expected, self.world_size));
        }
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            let expected = format!("a multiple of key/value heads ({})", self.kv_heads);
            return Err(invalid("query heads", expected, self.heads));
        }
        for (name, dim) in [("head_dim", self.head_dim), ("head_dim of value", self.value_dim)] {
            if dim == 0 || !dim.is_multiple_of(8) || dim > MAX_HEAD_DIM {
                let expected = format!("a multiple of 8 from 8 to {MAX_HEAD_DIM}");
                return Err(invalid(name, expected, dim));
            }
        }
        for (name, len) in [("queries per rank", self.q_len), ("keys per rank", self.kv_len)] {
            if self.layout == Layout::Zigzag && !len.is_multiple_of(2) {
                let expected = "even in the zigzag layout (a shard is two equal chunks)";
                return Err(invalid(name, expected, len));
            }
            if len >= MAX_ROWS {
                let expected = format!("below {MAX_ROWS} (take more ranks)");
                return Err(invalid(name, expected, len));
            }
        }
        if !self.softmax_scale.is_finite() {
            return Err(invalid("scale", "finite", self.softmax_scale));
        }
        self.validate_bytes()?;
        self.features.validate()
    }

    /// Checks that products of the sizes fit their types.
    fn validate_bytes(&self) -> Result<()> {
        let Problem { batch, q_len, kv_len, heads, kv_heads, head_dim, value_dim, .. } = *self;
        // A size of 0 counts as 1, so that it hides no other size.
        let product = |sizes: [usize; 4]| {
            sizes.iter().map(|size| *size.max(&1) as u128).try_fold(1, u128::checked_mul)
        };
        let dims = 4 * (head_dim + value_dim);
        let sides = [(q_len, heads), (kv_len, kv_heads)];
        let bytes = sides.map(|(len, heads)| {
            product([batch, len, heads, dims])?.checked_mul(self.world_size as u128)
        });
        match bytes.into_iter().find(|bytes| bytes.is_none_or(|b| b > u128::from(MAX_BYTES))) {
            None => Ok(()),
            Some(bytes) => {
                let expected = format!(
                    "at most {MAX_BYTES} for all ranks (smaller batch, length, heads or head_dim)"
                );
                let got = bytes.map_or("2^128 or more".into(), |bytes| bytes.to_string());
                Err(invalid("bytes of the shards as float32", expected, got))
            }
        }
    }

    /// Returns a length of an operand.
    pub fn length(&self, dim: Dim) -> usize {
        match dim {
            Dim::QLen => self.q_len,
            Dim::KvLen => self.kv_len,
            Dim::Heads => self.heads,
            Dim::KvHeads => self.kv_heads,
            Dim::HeadDim => self.head_dim,
            Dim::ValueDim => self.value_dim,
            Dim::Number(number) => number,
        }
    }

    /// Returns the elements of a row of an operand, and the bytes of an element.
    pub fn row(&self, operand: Operand, kind: DeviceKind) -> (usize, usize) {
        let width = operand.dims(kind)[1..].iter().map(|dim| self.length(*dim)).product();
        (width, operand.element(kind).bytes(self.dtype))
    }

    /// Returns the number of query heads per key/value head.
    pub fn group_size(&self) -> usize {
        self.heads / self.kv_heads
    }
}
