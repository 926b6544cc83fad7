//! What to compute, and where its arrays lie.

use serde::Deserialize;

use super::features::{Features, Segments};
use super::job::Job;
use super::{Launch, LaunchError, MAX_VIEW_BYTES};
use crate::instances::{Element, Kernel, Target};

/// Where an array `[batch, rows, heads, columns]` or `[batch, rows, heads]` lies: within a batch
/// entry contiguous, from the first row that is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rows {
    /// Of the first element of the first row used; 0 is as if the array were not given.
    pub address: u64,
    /// Elements between batch entries; any number where there is one entry.
    pub batch_stride: u64,
}

/// Where float32 statistics `[batch, heads, rows]` lie: within a head contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Statistics {
    /// Of the first row used of the first head; 0 is as if the array were not given.
    pub address: u64,
    /// Elements between batch entries; any number where there is one entry. A multiple of 4, so
    /// that each entry is aligned where not all fit one launch.
    pub batch_stride: u64,
    /// Elements between heads; any number where there is one head.
    pub head_stride: u64,
}

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
    /// Columns of values and of the result, as `head_dim`.
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

/// Folds a rectangle of keys into the running softmax of its queries.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Forward {
    /// What sees what.
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
    /// State: Σ p·v, float32 as `o`. The three arrays of the state may be missing if `first` and
    /// `last` and one launch is enough.
    pub acc: Option<Rows>,
    /// State: maximum of the scaled scores, in base 2.
    pub row_max: Option<Statistics>,
    /// State: Σ p, strided as `row_max`.
    pub row_sum: Option<Statistics>,
    /// Result `[batch, q_len, heads, value_dim]`; needed if `last`.
    pub o: Option<Rows>,
    /// Log-sum-exp `[batch, q_len, heads]`, float32; needed if `last`.
    pub lse: Option<Rows>,
    /// The state starts empty and is not read.
    pub first: bool,
    /// `o` and `lse` are written, and the state is left undefined.
    pub last: bool,
}

/// Adds a rectangle's part to dk and dv.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyGrads {
    /// What sees what.
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
    /// From [`Delta`].
    pub lse_log2: Statistics,
    /// From [`Delta`], strided as `lse_log2`.
    pub delta: Statistics,
    /// Running dk, float32 as `k`. The accumulators may be missing if `first` and `last` and one
    /// launch is enough.
    pub dk_acc: Option<Rows>,
    /// Running dv, float32 as `v`.
    pub dv_acc: Option<Rows>,
    /// Running dq / `softmax_scale`, float32 as `q`, never empty: the fused kernel, which
    /// [`KeyGrads::can_fuse`] tells to exist, adds to it in any order. Without, dq is left alone.
    #[serde(default)]
    pub dq_acc: Option<Rows>,
    /// Result, as `k`; needed if `last`.
    pub dk: Option<Rows>,
    /// Result, as `v`; needed if `last`.
    pub dv: Option<Rows>,
    /// The accumulators start at 0 and are not read.
    pub first: bool,
    /// `dk` and `dv` are written, and the accumulators are left undefined.
    pub last: bool,
}

/// Adds a rectangle's part to dq.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueryGrads {
    /// What sees what.
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
    /// From [`Delta`].
    pub lse_log2: Statistics,
    /// From [`Delta`], strided as `lse_log2`.
    pub delta: Statistics,
    /// Running dq, float32 as `q`. May be missing if `first` and `last` and one launch is enough.
    pub dq_acc: Option<Rows>,
    /// Result, as `q`; needed if `last`.
    pub dq: Option<Rows>,
    /// Float32 `[batch, q_len, heads]`, to which each query's part of the gradient of its head's
    /// slope is added, ds · (key position − query position); with slopes only, and where anyone
    /// wants it.
    pub dslopes: Option<Rows>,
    /// The accumulator starts at 0 and is not read.
    pub first: bool,
    /// `dq` is written, and the accumulator is left undefined.
    pub last: bool,
}

impl Rectangle {
    /// A job of a kernel with some features.
    fn job(&self, kernel: Kernel, features: Features, ends: (bool, bool)) -> Job {
        let job = Job { features, ..Job::new(kernel, self, ends) };
        let rows = |which: fn(Segments) -> Rows| features.segments.map(which);
        job.array("q_segments", rows(|segments| segments.queries))
            .array("kv_segments", rows(|segments| segments.keys))
            .array("ranges", rows(|segments| segments.ranges))
            .array("slopes", features.slopes)
            .array("dropout", features.dropout.map(|dropout| dropout.numbers))
    }
}

impl Forward {
    fn job(&self) -> Job {
        self.rectangle
            .job(Kernel::Forward, self.features, (self.first, self.last))
            .array("q", Some(self.q))
            .array("k", Some(self.k))
            .array("v", Some(self.v))
            .array("acc", self.acc)
            .statistics("row_max", self.row_max)
            .statistics("row_sum", self.row_sum)
            .array("o", self.o)
            .array("lse", self.lse)
    }
}

impl KeyGrads {
    /// Whether an image on `target` does what these launches do and adds to dq too.
    pub fn can_fuse(rectangle: &Rectangle, features: &Features, target: Target) -> bool {
        let ends = (true, false);
        let job = Job { fused: true, ..rectangle.job(Kernel::KeyGrads, *features, ends) };
        job.instance(target).is_some()
    }

    fn job(&self) -> Job {
        let job = self.rectangle.job(Kernel::KeyGrads, self.features, (self.first, self.last));
        Job { fused: self.dq_acc.is_some(), ..job }
            .array("q", Some(self.q))
            .array("k", Some(self.k))
            .array("v", Some(self.v))
            .array("dout", Some(self.dout))
            .statistics("lse_log2", Some(self.lse_log2))
            .statistics("delta", Some(self.delta))
            .array("dk_acc", self.dk_acc)
            .array("dv_acc", self.dv_acc)
            .array("dq_acc", self.dq_acc)
            .array("dk", self.dk)
            .array("dv", self.dv)
    }
}

impl QueryGrads {
    fn job(&self) -> Job {
        self.rectangle
            .job(Kernel::QueryGrads, self.features, (self.first, self.last))
            .array("q", Some(self.q))
            .array("k", Some(self.k))
            .array("v", Some(self.v))
            .array("dout", Some(self.dout))
            .statistics("lse_log2", Some(self.lse_log2))
            .statistics("delta", Some(self.delta))
            .array("dq_acc", self.dq_acc)
            .array("dq", self.dq)
            .array("dslopes", self.dslopes)
    }
}

macro_rules! launches {
    ($($description:ident),*) => {$(
        impl $description {
            /// The launches that compute it, to be run in order on a device of `target`.
            ///
            /// # Errors
            /// [`LaunchError`], with what was expected and what came.
            pub fn launches(&self, target: Target) -> Result<Vec<Launch>, LaunchError> {
                self.launches_within(target, MAX_VIEW_BYTES)
            }

            /// As [`launches`](Self::launches), with every view below `limit` bytes too: cuts
            /// small problems as if they were large.
            ///
            /// # Errors
            /// [`LaunchError`], with what was expected and what came.
            pub fn launches_within(
                &self,
                target: Target,
                limit: u64,
            ) -> Result<Vec<Launch>, LaunchError> {
                self.job().launches(target, limit)
            }
        }
    )*};
}

pub(super) use launches;

launches!(Forward, KeyGrads, QueryGrads);
