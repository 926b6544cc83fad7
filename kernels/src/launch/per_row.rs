//! What is computed once per row, and where its arrays lie.

use serde::Deserialize;

use super::description::{Rectangle, Rows, Statistics, launches};
use super::job::Job;
use super::{Launch, LaunchError, MAX_VIEW_BYTES};
use crate::instances::{Element, Kernel, Target};

/// delta = rowsum(dout ∘ o) − dlse, and lse in base 2, for the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Delta {
    /// Batch entries.
    pub batch: usize,
    /// Rows.
    pub q_len: usize,
    /// Query heads.
    pub heads: usize,
    /// Columns, a multiple of 8 up to 256.
    pub head_dim: usize,
    /// Type of the activations.
    pub element: Element,
    /// Result of the forward pass.
    pub o: Rows,
    /// Its gradient, strided as `o`.
    pub dout: Rows,
    /// Log-sum-exp `[batch, q_len, heads]`, float32.
    pub lse: Rows,
    /// Its gradient, strided as `lse`, if it has one.
    pub dlse: Option<Rows>,
    /// Result.
    pub lse_log2: Statistics,
    /// Result, strided as `lse_log2`.
    pub delta: Statistics,
    /// Float32 `[batch, q_len, heads, head_dim]` to be set to 0, if there is any.
    #[serde(default)]
    pub zeros: Option<Rows>,
}

/// out = scale · (a + b), or of a alone, cast from float32 to the type of the activations.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Finish {
    /// Batch entries.
    pub batch: usize,
    /// Rows.
    pub rows: usize,
    /// Heads.
    pub heads: usize,
    /// Columns, a multiple of 8 up to 256.
    pub head_dim: usize,
    /// Type of the result.
    pub element: Element,
    /// An accumulator, float32.
    pub a: Rows,
    /// Another, if there is one.
    pub b: Option<Rows>,
    /// Result.
    pub out: Rows,
    /// Factor.
    #[serde(default = "one")]
    pub scale: f32,
}

fn one() -> f32 {
    1.0
}

/// home += arrived, of float32 accumulators.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Merge {
    /// Batch entries.
    pub batch: usize,
    /// Rows.
    pub rows: usize,
    /// Heads.
    pub heads: usize,
    /// Columns, a multiple of 8 up to 256.
    pub head_dim: usize,
    /// Read, and written over.
    pub home: Rows,
    /// Added; no part of it may be of `home`.
    pub arrived: Rows,
}

/// Adds a running softmax state to another of the same rows.
///
/// ```text
/// m = max(m₁, m₂);  l = l₁·2^(m₁−m) + l₂·2^(m₂−m);  acc likewise
/// if last: o = acc / l;  lse = ln 2 · (m + log2 l);  where l is 0, o = 0 and lse = −∞
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Join {
    /// Batch entries.
    pub batch: usize,
    /// Rows.
    pub q_len: usize,
    /// Heads.
    pub heads: usize,
    /// Columns of values, a multiple of 8 up to 256.
    pub head_dim: usize,
    /// Type of the result.
    pub element: Element,
    /// The state that stayed.
    pub home: State,
    /// The one that came; no part of it may be of `home`.
    pub came: State,
    /// Result `[batch, q_len, heads, head_dim]`; needed if `last`.
    pub o: Option<Rows>,
    /// Log-sum-exp `[batch, q_len, heads]`, float32; needed if `last`.
    pub lse: Option<Rows>,
    /// `o` and `lse` are written; else `home` becomes the state of both.
    pub last: bool,
}

/// A running softmax state, as [`Forward`] leaves it.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Σ p·v, float32.
    pub acc: Rows,
    /// Maximum of the scaled scores, in base 2.
    pub row_max: Statistics,
    /// Σ p, strided as `row_max`.
    pub row_sum: Statistics,
}

impl Delta {
    fn job(&self) -> Job {
        let Delta { batch, q_len, heads, head_dim, element, .. } = *self;
        per_row(Kernel::Delta, (batch, q_len, heads, head_dim), element)
            .array("o", Some(self.o))
            .array("dout", Some(self.dout))
            .array("lse", Some(self.lse))
            .array("dlse", self.dlse)
            .statistics("lse_log2", Some(self.lse_log2))
            .statistics("delta", Some(self.delta))
            .array("zeros", self.zeros)
    }
}

impl Finish {
    fn job(&self) -> Job {
        let Finish { batch, rows, heads, head_dim, element, .. } = *self;
        let rows = per_row(Kernel::Finish, (batch, rows, heads, head_dim), element);
        Job { scale: self.scale, ..rows }
            .array("a", Some(self.a))
            .array("b", self.b)
            .array("out", Some(self.out))
    }
}

impl Merge {
    fn job(&self) -> Job {
        let Merge { batch, rows, heads, head_dim, .. } = *self;
        per_row(Kernel::Merge, (batch, rows, heads, head_dim), Kernel::Merge.elements()[0])
            .array("home", Some(self.home))
            .array("arrived", Some(self.arrived))
    }
}

impl Join {
    fn job(&self) -> Job {
        let Join { batch, q_len, heads, head_dim, element, home, came, last, .. } = *self;
        let rows = per_row(Kernel::Join, (batch, q_len, heads, head_dim), element);
        Job { last, ..rows }
            .array("acc", Some(home.acc))
            .statistics("row_max", Some(home.row_max))
            .statistics("row_sum", Some(home.row_sum))
            .array("came_acc", Some(came.acc))
            .statistics("came_max", Some(came.row_max))
            .statistics("came_sum", Some(came.row_sum))
            .array("o", self.o)
            .array("lse", self.lse)
    }
}

/// A job over rows alone: queries that see no keys.
pub(super) fn per_row(
    kernel: Kernel,
    (batch, q_len, heads, head_dim): (usize, usize, usize, usize),
    element: Element,
) -> Job {
    let (lower, upper) = (i64::MIN, i64::MAX);
    let (kv_len, kv_heads, value_dim, softmax_scale) = (0, heads, head_dim, 1.0);
    let rectangle = Rectangle {
        batch,
        q_len,
        kv_len,
        heads,
        kv_heads,
        head_dim,
        value_dim,
        element,
        lower,
        upper,
        softmax_scale,
    };
    Job::new(kernel, &rectangle, (true, true))
}

launches!(Delta, Finish, Merge, Join);
