//! A validated attention problem: what one ring computes, without any data.

use std::fmt;

use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::schedule::Payload;

/// Largest head dimension that a kernel accepts.
pub const MAX_HEAD_DIM: usize = 256;

/// Element type of the activations. Accumulation is float32 for all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// bfloat16: the upper half of a binary32.
    Bf16,
    /// IEEE binary16.
    F16,
}

impl Dtype {
    /// Bytes per element.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::F32 => "float32",
            Dtype::Bf16 => "bfloat16",
            Dtype::F16 => "float16",
        })
    }
}

/// Which of the two passes a schedule or an executor serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Computes `o` and `lse`.
    Forward,
    /// Computes `dq`, `dk` and `dv` from the final `o` and `lse`.
    Backward,
}

/// Which side of the attention travels round the ring; the other side stays at home.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Travels {
    /// Keys and values travel, in the backward pass with their gradients behind them.
    Keys,
    /// Queries travel; in the backward pass with `dout`, `lse`, `delta`, and `dq` behind them.
    Queries,
}

/// One attention problem over a ring: every rank holds `q_len` queries and `kv_len` keys of every
/// batch entry and head.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    /// Batch entries (leading dimensions folded together).
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
    /// Element type of q, k, v, o and their gradients.
    pub dtype: Dtype,
    /// Query at global position p sees keys at global positions ≤ p only.
    pub causal: bool,
    /// Factor on q·k.
    pub softmax_scale: f32,
    /// Which global positions a rank holds.
    pub layout: Layout,
    /// Ranks in the ring.
    pub world_size: usize,
}

fn invalid(name: &'static str, expected: impl Into<String>, got: impl fmt::Display) -> Error {
    Error::InvalidProblem { name, expected: expected.into(), got: got.to_string() }
}

impl Problem {
    /// Checks every field; all other code relies on it.
    ///
    /// # Errors
    /// [`Error::InvalidProblem`] that names the field, what it must be and what it was.
    pub fn validate(&self) -> Result<()> {
        if self.world_size == 0 {
            return Err(invalid("world_size", "at least 1", 0));
        }
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            let expected = format!("a multiple of key/value heads ({})", self.kv_heads);
            return Err(invalid("query heads", expected, self.heads));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(8) || self.head_dim > MAX_HEAD_DIM {
            let expected = format!("a multiple of 8 from 8 to {MAX_HEAD_DIM}");
            return Err(invalid("head_dim", expected, self.head_dim));
        }
        if self.q_len != self.kv_len {
            let expected = format!("equal to the query length per rank ({})", self.q_len);
            return Err(invalid("key length per rank", expected, self.kv_len));
        }
        if self.layout == Layout::Zigzag && !self.q_len.is_multiple_of(2) {
            let expected = "even in the zigzag layout (a shard is two equal chunks)";
            return Err(invalid("tokens per rank", expected, self.q_len));
        }
        if !self.softmax_scale.is_finite() {
            return Err(invalid("scale", "finite", self.softmax_scale));
        }
        Ok(())
    }

    /// Bytes that one row (one token of every batch entry and head) of `payload` occupies when it
    /// travels: with b bytes per element, Hkv·2·D·b for keys, Hkv·2·D·4 for their gradients; Hq·D·b
    /// for queries forward and Hq·(2·D·b + 8) backward (q, dout, lse, delta); Hq·D·4 for dq and
    /// Hq·(D + 2)·4 for a running softmax state.
    pub fn row_bytes(&self, payload: Payload, pass: Pass) -> usize {
        let (element, dim) = (self.dtype.bytes(), self.head_dim);
        let per_head = match (payload, pass) {
            (Payload::Keys, _) => 2 * dim * element,
            (Payload::KeyGrads, _) => 2 * dim * 4,
            (Payload::Queries, Pass::Forward) => dim * element,
            (Payload::Queries, Pass::Backward) => 2 * dim * element + 8,
            (Payload::QueryGrads, _) => dim * 4,
            (Payload::Partial, _) => (dim + 2) * 4,
        };
        let heads = match payload {
            Payload::Keys | Payload::KeyGrads => self.kv_heads,
            _ => self.heads,
        };
        self.batch * heads * per_head
    }

    /// Query heads per key/value head.
    pub fn group_size(&self) -> usize {
        self.heads / self.kv_heads
    }
}
