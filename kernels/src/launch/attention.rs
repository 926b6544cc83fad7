//! The passes of softmax attention: what to compute, and where its arrays lie.

use serde::Deserialize;

use super::job::Job;
use super::lower::launches;
use super::rectangle::Rectangle;
use crate::backend::Reason;
use crate::features::Features;
use crate::kernel::Kernel;
use crate::place::{Rows, Statistics};
use crate::record::Operand;
use crate::target::Target;

/// Folds a rectangle of keys into the running softmax of its queries.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Forward {
    /// The rows on both sides, and the pairs that see each other.
    pub rectangle: Rectangle,
    /// The features of the pass.
    #[serde(default)]
    pub features: Features,
    /// Queries.
    pub q: Rows,
    /// Keys.
    pub k: Rows,
    /// Values.
    pub v: Rows,
    /// State: Σ p·v, float32, shaped like `o`. The three arrays of the state may be missing if one
    /// launch is both first and last.
    pub acc: Option<Rows>,
    /// State: maximum of the scaled scores, in base 2.
    pub row_max: Option<Statistics>,
    /// State: Σ p, with the strides of `row_max`.
    pub row_sum: Option<Statistics>,
    /// Result `[batch, q_len, heads, value_dim]`; needed if `last`.
    pub o: Option<Rows>,
    /// Log-sum-exp `[batch, q_len, heads]`, float32; needed if `last`.
    pub lse: Option<Rows>,
    /// Whether the state starts empty; otherwise the launches read it.
    pub first: bool,
    /// Whether the launches write `o` and `lse` and leave the state undefined.
    pub last: bool,
}

/// Adds a rectangle's part to dk and dv.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyGrads {
    /// The rows on both sides, and the pairs that see each other.
    pub rectangle: Rectangle,
    /// The features of the pass.
    #[serde(default)]
    pub features: Features,
    /// Queries.
    pub q: Rows,
    /// Keys.
    pub k: Rows,
    /// Values.
    pub v: Rows,
    /// Gradient of the result.
    pub dout: Rows,
    /// Result of [`Delta`](super::Delta).
    pub lse_log2: Statistics,
    /// Result of [`Delta`](super::Delta), with the strides of `lse_log2`.
    pub delta: Statistics,
    /// Running dk, float32, shaped like `k`. The accumulators may be missing if one launch is both
    /// first and last.
    pub dk_acc: Option<Rows>,
    /// Running dv, float32, shaped like `v`.
    pub dv_acc: Option<Rows>,
    /// Running dq / `softmax_scale`, float32, shaped like `q`, already holding a sum or zeros. If
    /// it is given, dq is added to it too: by a fused kernel in any order, where
    /// [`KeyGrads::can_fuse`] says that there is one. Otherwise the launches leave dq alone.
    #[serde(default)]
    pub dq_acc: Option<Rows>,
    /// Whether additions to `dq_acc` must have the same order in every run.
    #[serde(default)]
    pub fixed_order: bool,
    /// The results of the forward pass, if delta follows from them alone. This library's kernels
    /// read `delta` and `lse_log2` instead.
    #[serde(default)]
    pub results: Option<ForwardResults>,
    /// Result, shaped like `k`; needed if `last`.
    pub dk: Option<Rows>,
    /// Result, shaped like `v`; needed if `last`.
    pub dv: Option<Rows>,
    /// Whether the accumulators start at 0; otherwise the launches read them.
    pub first: bool,
    /// Whether the launches write `dk` and `dv` and leave the accumulators undefined.
    pub last: bool,
}

/// Results of the forward pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForwardResults {
    /// Result, in the type of the activations.
    pub o: Rows,
    /// Log-sum-exp, natural, float32.
    pub lse: Rows,
}

/// Adds a rectangle's part to dq.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueryGrads {
    /// The rows on both sides, and the pairs that see each other.
    pub rectangle: Rectangle,
    /// The features of the pass.
    #[serde(default)]
    pub features: Features,
    /// Queries.
    pub q: Rows,
    /// Keys.
    pub k: Rows,
    /// Values.
    pub v: Rows,
    /// Gradient of the result.
    pub dout: Rows,
    /// Result of [`Delta`](super::Delta).
    pub lse_log2: Statistics,
    /// Result of [`Delta`](super::Delta), with the strides of `lse_log2`.
    pub delta: Statistics,
    /// Running dq, float32, shaped like `q`. It may be missing if one launch is both first and
    /// last.
    pub dq_acc: Option<Rows>,
    /// Result, shaped like `q`; needed if `last`.
    pub dq: Option<Rows>,
    /// Float32 `[batch, q_len, heads]`, only with slopes. The launches add to it each query's part
    /// of the gradient of its head's slope, Σ ds · (key position − query position).
    pub dslopes: Option<Rows>,
    /// Whether the accumulator starts at 0; otherwise the launches read it.
    pub first: bool,
    /// Whether the launches write `dq` and leave the accumulator undefined.
    pub last: bool,
}

/// Returns a job of a kernel with the arrays of its features and its inputs q, k and v.
fn job(
    kernel: Kernel,
    rectangle: Rectangle,
    features: Features,
    ends: (bool, bool),
    [q, k, v]: [Rows; 3],
) -> Job {
    let job = Job { features, ..Job::new(kernel, rectangle, ends) };
    let job = features.arrays().into_iter().fold(job, |job, (array, at)| job.array(array, at));
    job.array(Operand::Q, Some(q)).array(Operand::K, Some(k)).array(Operand::V, Some(v))
}

impl Forward {
    /// Returns the operation that computes all of a rectangle, without memory: a question to a
    /// backend or to a cost.
    pub fn unplaced(rectangle: Rectangle, features: Features) -> Forward {
        Forward {
            rectangle,
            features,
            q: Rows::default(),
            k: Rows::default(),
            v: Rows::default(),
            acc: None,
            row_max: None,
            row_sum: None,
            o: None,
            lse: None,
            first: true,
            last: true,
        }
    }

    fn job(&self) -> Job {
        let Forward { rectangle, features, q, k, v, first, last, .. } = *self;
        job(Kernel::Forward, rectangle, features, (first, last), [q, k, v])
            .array(Operand::Acc, self.acc)
            .statistics(Operand::RowMax, self.row_max)
            .statistics(Operand::RowSum, self.row_sum)
            .array(Operand::O, self.o)
            .array(Operand::Lse, self.lse)
    }
}

impl KeyGrads {
    /// Returns the operation that adds to dq too, without memory: a question to a backend. Other
    /// values than the defaults of `fixed_order` and `results` may change the answer.
    pub fn fused(rectangle: Rectangle, features: Features) -> KeyGrads {
        KeyGrads {
            rectangle,
            features,
            q: Rows::default(),
            k: Rows::default(),
            v: Rows::default(),
            dout: Rows::default(),
            lse_log2: Statistics::default(),
            delta: Statistics::default(),
            dk_acc: None,
            dv_acc: None,
            dq_acc: Some(Rows::default()),
            fixed_order: false,
            results: None,
            dk: None,
            dv: None,
            first: true,
            last: false,
        }
    }

    /// Says whether a fused image on `target` computes dk and dv and adds to dq too.
    ///
    /// # Errors
    /// The reason why there is none.
    pub fn can_fuse(&self, target: Target) -> Result<(), Reason> {
        let job = Job::new(Kernel::KeyGrads, self.rectangle, (true, false));
        let job = Job { features: self.features, fused: true, ..job };
        let found = job.instance(target).map(drop);
        found.ok_or(Reason("no fused kernel computes these features and widths here".into()))
    }

    fn job(&self) -> Job {
        let KeyGrads { rectangle, features, q, k, v, first, last, .. } = *self;
        let job = job(Kernel::KeyGrads, rectangle, features, (first, last), [q, k, v]);
        Job { fused: self.dq_acc.is_some(), ..job }
            .array(Operand::Dout, Some(self.dout))
            .statistics(Operand::LseLog2, Some(self.lse_log2))
            .statistics(Operand::Delta, Some(self.delta))
            .array(Operand::DkAcc, self.dk_acc)
            .array(Operand::DvAcc, self.dv_acc)
            .array(Operand::DqAcc, self.dq_acc)
            .array(Operand::Dk, self.dk)
            .array(Operand::Dv, self.dv)
    }
}

impl QueryGrads {
    fn job(&self) -> Job {
        let QueryGrads { rectangle, features, q, k, v, first, last, .. } = *self;
        job(Kernel::QueryGrads, rectangle, features, (first, last), [q, k, v])
            .array(Operand::Dout, Some(self.dout))
            .statistics(Operand::LseLog2, Some(self.lse_log2))
            .statistics(Operand::Delta, Some(self.delta))
            .array(Operand::DqAcc, self.dq_acc)
            .array(Operand::Dq, self.dq)
            .array(Operand::Dslopes, self.dslopes)
    }
}

launches!(Forward, KeyGrads, QueryGrads);
