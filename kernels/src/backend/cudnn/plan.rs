//! What plans compute, in words that `src/cuda/cudnn` reads.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::element::Element;
use crate::names::named;

/// The number of cuDNN's own workspace among the arrays of a call.
pub const WORKSPACE: i64 = 0;

named! {
    /// A pass of attention.
    SdpaPass, "a pass" {
        /// o and lse.
        Forward = "forward",
        /// The gradients.
        Backward = "backward",
    }
}

named! {
    /// An order of the sums of gradients.
    SdpaOrder, "an order" {
        /// Any order.
        Any = "any",
        /// The same order in every run, as Hopper has it.
        Fixed = "fixed",
        /// The same order in every run, as Blackwell has it: cuDNN rounds the gradient of queries.
        FixedRounded = "fixed_rounded",
    }
}

named! {
    /// An array of a plan.
    SdpaArray, "an array" {
        /// Queries.
        Query = "query",
        /// Keys.
        Key = "key",
        /// Values.
        Value = "value",
        /// The result.
        Out = "out",
        /// Log-sum-exp, natural logarithm, float32.
        Lse = "lse",
        /// Gradient of the result.
        OutGrad = "out_grad",
        /// Gradient of the queries, float32 unless the order rounds it. cuDNN clears it first.
        QueryGrad = "query_grad",
        /// Gradient of the keys, of each query head.
        KeyGrad = "key_grad",
        /// Gradient of the values, of each query head.
        ValueGrad = "value_grad",
        /// rowsum(dout ∘ o), float32, which cuDNN computes.
        Delta = "delta",
    }
}

impl SdpaArray {
    /// Returns the number of the array in a plan.
    pub const fn number(self) -> i64 {
        self as i64 + 1
    }
}

/// What a plan computes: softmax attention of some queries and some keys.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sdpa {
    /// The pass.
    pub pass: SdpaPass,
    /// The order of the sums of gradients.
    pub order: SdpaOrder,
    /// Type of the activations.
    pub element: Element,
    /// Batch entries.
    pub batch: i64,
    /// Query rows.
    pub q_len: i64,
    /// Key rows.
    pub kv_len: i64,
    /// Query heads.
    pub heads: i64,
    /// Key/value heads.
    pub kv_heads: i64,
    /// Columns of queries and keys.
    pub head_dim: i64,
    /// Columns of values and of the result.
    pub value_dim: i64,
    /// Query row i sees key row j only if `lower ≤ j − i`; `None` for no limit.
    pub lower: Option<i64>,
    /// Query row i sees key row j only if `j − i ≤ upper`; `None` for no limit.
    pub upper: Option<i64>,
    /// Factor on q·k.
    pub softmax_scale: f32,
    /// Bytes of workspace that a call has.
    pub workspace_bytes: i64,
    /// Elements between batch entries, heads, rows and columns of each array.
    pub strides: BTreeMap<SdpaArray, [i64; 4]>,
}

impl Sdpa {
    /// Returns the length of an array along batch entries, heads, rows and columns.
    pub fn dims(&self, array: SdpaArray) -> [i64; 4] {
        use SdpaArray::{
            Delta, Key, KeyGrad, Lse, Out, OutGrad, Query, QueryGrad, Value, ValueGrad,
        };
        let (heads, rows) = match array {
            Key | Value => (self.kv_heads, self.kv_len),
            KeyGrad | ValueGrad => (self.heads, self.kv_len),
            _ => (self.heads, self.q_len),
        };
        let columns = match array {
            Query | Key | QueryGrad | KeyGrad => self.head_dim,
            Value | Out | OutGrad | ValueGrad => self.value_dim,
            Lse | Delta => 1,
        };
        [self.batch, heads, rows, columns]
    }

    /// Whether the elements of an array are float32. Others have the type of the activations.
    pub fn is_float32(&self, array: SdpaArray) -> bool {
        match array {
            SdpaArray::Lse | SdpaArray::Delta => true,
            SdpaArray::QueryGrad => self.order != SdpaOrder::FixedRounded,
            _ => false,
        }
    }

    /// Whether the plan hides pairs.
    pub const fn has_mask(&self) -> bool {
        self.lower.is_some() || self.upper.is_some()
    }

    /// Returns the text of the plan.
    pub(super) fn text(&self) -> String {
        serde_json::to_string(self).expect("numbers and names have a text")
    }
}
