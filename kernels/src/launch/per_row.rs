//! Computations that go through rows once: what to compute, and where its arrays lie.

use serde::Deserialize;

use super::job::Job;
use super::lower::launches;
use crate::element::Element;
use crate::kernel::Kernel;
use crate::place::{Rows, Statistics};
use crate::record::Operand;

/// Computes delta = rowsum(dout ∘ o) − dlse, and lse in base 2, for the backward pass.
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
    /// Gradient of `o`, with the strides of `o`.
    pub dout: Rows,
    /// Log-sum-exp `[batch, q_len, heads]`, float32.
    pub lse: Rows,
    /// Gradient of `lse`, with the strides of `lse`, if there is one.
    pub dlse: Option<Rows>,
    /// Result: log-sum-exp in base 2.
    pub lse_log2: Statistics,
    /// Result, with the strides of `lse_log2`.
    pub delta: Statistics,
    /// Float32 `[batch, q_len, heads, head_dim]` that the launch sets to 0, if it is given.
    #[serde(default)]
    pub zeros: Option<Rows>,
}

/// Computes out = scale · (a + b), or scale · a, cast from float32 to the type of the activations.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cast {
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
    /// A second accumulator, if there is one.
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

fn ungrouped() -> usize {
    1
}

/// Computes home += scale · arrived, of float32 accumulators.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Accumulate {
    /// Batch entries.
    pub batch: usize,
    /// Rows.
    pub rows: usize,
    /// Heads.
    pub heads: usize,
    /// Columns, a multiple of 8 up to 256.
    pub head_dim: usize,
    /// An accumulator; the sum replaces it.
    pub home: Rows,
    /// A second accumulator, which does not overlap `home`.
    pub arrived: Rows,
    /// Factor.
    #[serde(default = "one")]
    pub scale: f32,
}

/// Adds rounded gradients to an accumulator: home += scale · (sum of arrived over a group of heads).
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddGradient {
    /// Batch entries.
    pub batch: usize,
    /// Rows.
    pub rows: usize,
    /// Heads of the accumulator and of the result.
    pub heads: usize,
    /// Consecutive heads of the gradient that one head of the accumulator adds.
    #[serde(default = "ungrouped")]
    pub group: usize,
    /// Columns, a multiple of 8 up to 256.
    pub head_dim: usize,
    /// Type of the activations.
    pub element: Element,
    /// The accumulator, float32; missing if the launch is both first and last.
    pub home: Option<Rows>,
    /// The gradient of `heads · group` heads, in the type of the activations.
    pub arrived: Rows,
    /// Factor on the gradient.
    #[serde(default = "one")]
    pub scale: f32,
    /// Result; needed if `last`.
    pub out: Option<Rows>,
    /// Whether the accumulator starts at 0; otherwise the launch reads it.
    pub first: bool,
    /// Whether the launch writes `out` and leaves the accumulator undefined.
    pub last: bool,
}

/// Writes log-sum-exp head by head. The rows of a head may begin at any element.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackLse {
    /// Batch entries.
    pub batch: usize,
    /// Rows.
    pub q_len: usize,
    /// Heads.
    pub heads: usize,
    /// Log-sum-exp `[batch, q_len, heads]`, float32.
    pub lse: Rows,
    /// Result: the same numbers.
    pub packed: Statistics,
}

/// Adds a running softmax state to another state of the same rows.
///
/// ```text
/// m = max(m₁, m₂);  l = l₁·2^(m₁−m) + l₂·2^(m₂−m);  acc = acc₁·2^(m₁−m) + acc₂·2^(m₂−m)
/// if last: o = acc / l;  lse = ln 2 · (m + log2 l);  where l is 0, o = 0 and lse = −∞
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CombineSoftmax {
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
    pub home: SoftmaxState,
    /// The state that arrived, which does not overlap `home`.
    pub arrived: SoftmaxState,
    /// Result `[batch, q_len, heads, head_dim]`; needed if `last`.
    pub o: Option<Rows>,
    /// Log-sum-exp `[batch, q_len, heads]`, float32; needed if `last`.
    pub lse: Option<Rows>,
    /// Whether the launch writes `o` and `lse`; otherwise `home` becomes the sum of both states.
    pub last: bool,
}

/// Adds a result of attention over other keys to a running softmax state of the same rows: its
/// maximum is lse in base 2, its sum is 1, and its acc is o.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FoldResult {
    /// Batch entries.
    pub batch: usize,
    /// Rows.
    pub q_len: usize,
    /// Heads.
    pub heads: usize,
    /// Columns of values, a multiple of 8 up to 256.
    pub head_dim: usize,
    /// Type of the activations.
    pub element: Element,
    /// The state; missing if the launch is both first and last.
    pub home: Option<SoftmaxState>,
    /// The result `[batch, q_len, heads, head_dim]`, in the type of the activations.
    pub arrived_o: Rows,
    /// Its log-sum-exp, natural.
    pub arrived_lse: Statistics,
    /// Result `[batch, q_len, heads, head_dim]`; needed if `last`.
    pub o: Option<Rows>,
    /// Log-sum-exp `[batch, q_len, heads]`, float32; needed if `last`.
    pub lse: Option<Rows>,
    /// Whether the state starts empty; otherwise the launch reads it.
    pub first: bool,
    /// Whether the launch writes `o` and `lse` and leaves the state undefined.
    pub last: bool,
}

/// A running softmax state, as [`Forward`](super::Forward) leaves it.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SoftmaxState {
    /// Σ p·v, float32.
    pub acc: Rows,
    /// Maximum of the scaled scores, in base 2.
    pub row_max: Statistics,
    /// Σ p, with the strides of `row_max`.
    pub row_sum: Statistics,
}

impl Delta {
    fn job(&self) -> Job {
        let Delta { batch, q_len, heads, head_dim, element, .. } = *self;
        Job::per_row(Kernel::Delta, (batch, q_len, heads, head_dim), element)
            .array(Operand::O, Some(self.o))
            .array(Operand::Dout, Some(self.dout))
            .array(Operand::Lse, Some(self.lse))
            .array(Operand::Dlse, self.dlse)
            .statistics(Operand::LseLog2, Some(self.lse_log2))
            .statistics(Operand::Delta, Some(self.delta))
            .array(Operand::Zeros, self.zeros)
    }
}

impl Cast {
    fn job(&self) -> Job {
        let Cast { batch, rows, heads, head_dim, element, .. } = *self;
        let rows = Job::per_row(Kernel::Cast, (batch, rows, heads, head_dim), element);
        Job { scale: self.scale, ..rows }
            .array(Operand::A, Some(self.a))
            .array(Operand::B, self.b)
            .array(Operand::Out, Some(self.out))
    }
}

impl Accumulate {
    fn job(&self) -> Job {
        let Accumulate { batch, rows, heads, head_dim, scale, .. } = *self;
        let kernel = Kernel::Accumulate;
        let rows = Job::per_row(kernel, (batch, rows, heads, head_dim), kernel.elements()[0]);
        Job { scale, ..rows }
            .array(Operand::Home, Some(self.home))
            .array(Operand::Arrived, Some(self.arrived))
    }
}

impl AddGradient {
    fn job(&self) -> Job {
        let AddGradient { batch, rows, heads, group, head_dim, element, .. } = *self;
        let mut job = Job::per_row(Kernel::AddGradient, (batch, rows, heads, head_dim), element);
        job.rectangle.heads = heads * group;
        let AddGradient { scale, first, last, .. } = *self;
        Job { scale, first, last, ..job }
            .array(Operand::Home, self.home)
            .array(Operand::Arrived, Some(self.arrived))
            .array(Operand::Out, self.out)
    }
}

impl PackLse {
    fn job(&self) -> Job {
        let PackLse { batch, q_len, heads, .. } = *self;
        // The rows have no columns; the kernel's only image counts as that of the fewest.
        let (kernel, head_dim) = (Kernel::PackLse, 8);
        Job::per_row(kernel, (batch, q_len, heads, head_dim), kernel.elements()[0])
            .array(Operand::Lse, Some(self.lse))
            .statistics(Operand::PackedLse, Some(self.packed))
    }
}

impl FoldResult {
    fn job(&self) -> Job {
        let FoldResult { batch, q_len, heads, head_dim, element, first, last, home, .. } = *self;
        let rows = Job::per_row(Kernel::FoldResult, (batch, q_len, heads, head_dim), element);
        Job { first, last, ..rows }
            .array(Operand::Acc, home.map(|state| state.acc))
            .statistics(Operand::RowMax, home.map(|state| state.row_max))
            .statistics(Operand::RowSum, home.map(|state| state.row_sum))
            .array(Operand::ArrivedAcc, Some(self.arrived_o))
            .statistics(Operand::ArrivedMax, Some(self.arrived_lse))
            .array(Operand::O, self.o)
            .array(Operand::Lse, self.lse)
    }
}

impl CombineSoftmax {
    fn job(&self) -> Job {
        let CombineSoftmax { batch, q_len, heads, head_dim, element, home, arrived, .. } = *self;
        let rows = Job::per_row(Kernel::CombineSoftmax, (batch, q_len, heads, head_dim), element);
        Job { last: self.last, ..rows }
            .array(Operand::Acc, Some(home.acc))
            .statistics(Operand::RowMax, Some(home.row_max))
            .statistics(Operand::RowSum, Some(home.row_sum))
            .array(Operand::ArrivedAcc, Some(arrived.acc))
            .statistics(Operand::ArrivedMax, Some(arrived.row_max))
            .statistics(Operand::ArrivedSum, Some(arrived.row_sum))
            .array(Operand::O, self.o)
            .array(Operand::Lse, self.lse)
    }
}

launches!(Delta, Cast, Accumulate, AddGradient, PackLse, CombineSoftmax, FoldResult);
