//! A validated attention problem: what one ring computes, without any data.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::mask::Window;
use crate::schedule::Payload;

/// Largest head dimension that a kernel accepts.
pub const MAX_HEAD_DIM: usize = 256;

/// Most ranks of a ring: the schedules of all ranks grow with the square of their number.
pub const MAX_RANKS: usize = 4096;

/// Rows of a shard are fewer than this. Pairs of them then fit 64 bits.
pub const MAX_ROWS: usize = 1 << 31;

/// Most bytes, as float32, of the shards of all ranks together. Sums of what all ranks send or compute
/// then fit 64 bits.
pub const MAX_BYTES: u64 = 1 << 48;

/// Soft caps that float32 computes with: neither the cap nor 2 · log2(e) / cap leaves its range.
pub const SOFT_CAPS: RangeInclusive<f32> = 1e-30..=1e30;

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

impl FromStr for Dtype {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let all = [Dtype::F32, Dtype::Bf16, Dtype::F16];
        let found = all.into_iter().find(|dtype| dtype.to_string() == name);
        found.ok_or_else(|| invalid("dtype", "float32, bfloat16 or float16", name))
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

/// The order in which kernels on GPUs add to a gradient in the backward pass. CPU devices always
/// compute in one order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Order {
    /// One order: every run gives the same bits.
    Fixed,
    /// Any order: runs may differ in the last bits.
    Any,
}

impl FromStr for Order {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "fixed" => Ok(Order::Fixed),
            "any" => Ok(Order::Any),
            other => Err(invalid("backward_order", "fixed or any", other)),
        }
    }
}

/// What goes into scores and weights beside q·k, its scale and the positions.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Features {
    /// Scores become `cap · tanh(score / cap)` before anything is added or masked.
    pub soft_cap: Option<f32>,
    /// Every query and key has a segment, int32; they see each other where these are equal and not
    /// negative.
    pub segments: bool,
    /// Every query head has a slope, float32; `slope · (key position − query position)` is added to
    /// its scores.
    pub slopes: bool,
    /// Weights are dropped with this probability, and the others divided by what is left of 1.
    pub dropout: Option<f32>,
}

impl Features {
    /// None of them.
    pub const NONE: Features =
        Features { soft_cap: None, segments: false, slopes: false, dropout: None };

    fn validate(&self) -> Result<()> {
        if let Some(cap) = self.soft_cap.filter(|cap| !SOFT_CAPS.contains(cap)) {
            let (least, most) = (SOFT_CAPS.start(), SOFT_CAPS.end());
            let expected = format!("from {least:e} to {most:e} (0 or nothing for no cap)");
            return Err(invalid("soft cap", expected, format!("{cap:e}")));
        }
        if let Some(rate) = self.dropout.filter(|rate| !(0.0..1.0).contains(rate)) {
            return Err(invalid("dropout rate", "at least 0 and below 1", rate));
        }
        Ok(())
    }
}

/// One attention problem over a ring: every rank holds `q_len` queries and `kv_len` keys of every
/// batch entry and head. Both sequences are laid out alike, each from position 0.
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
    /// Length of a value or output vector.
    pub value_dim: usize,
    /// Element type of q, k, v, o and their gradients.
    pub dtype: Dtype,
    /// Which global positions see each other.
    pub window: Window,
    /// Factor on q·k.
    pub softmax_scale: f32,
    /// What else goes into scores and weights.
    pub features: Features,
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

    /// Checks that no product of the sizes leaves its type.
    fn validate_bytes(&self) -> Result<()> {
        let Problem { batch, q_len, kv_len, heads, kv_heads, head_dim, value_dim, .. } = *self;
        // A length or a batch of 0 hides no other size.
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

    /// Bytes that one row (one token of every batch entry and head) of `payload` occupies when it
    /// travels: with b bytes per element, Hkv·(D + Dv)·b for keys, Hkv·(D + Dv)·4 for their
    /// gradients; Hq·D·b for queries forward and Hq·((D + Dv)·b + 8) backward (q, dout, lse, delta);
    /// Hq·D·4 for dq and Hq·(Dv + 2)·4 for a running softmax state. Segments add 4 to queries and
    /// keys.
    pub fn row_bytes(&self, payload: Payload, pass: Pass) -> usize {
        let (element, dim) = (self.dtype.bytes(), self.head_dim);
        let both = dim + self.value_dim;
        let per_head = match (payload, pass) {
            (Payload::Keys, _) => both * element,
            (Payload::KeyGrads, _) => both * 4,
            (Payload::Queries, Pass::Forward) => dim * element,
            (Payload::Queries, Pass::Backward) => both * element + 8,
            (Payload::QueryGrads, _) => dim * 4,
            (Payload::Partial, _) => (self.value_dim + 2) * 4,
        };
        let heads = match payload {
            Payload::Keys | Payload::KeyGrads => self.kv_heads,
            _ => self.heads,
        };
        let segment = if self.features.segments && !payload.is_accumulator() { 4 } else { 0 };
        self.batch * (heads * per_head + segment)
    }

    /// Query heads per key/value head.
    pub fn group_size(&self) -> usize {
        self.heads / self.kv_heads
    }
}
