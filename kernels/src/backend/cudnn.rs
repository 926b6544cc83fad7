//! cuDNN as a backend: the operations that it serves, and its calls that compute them.
//!
//! cuDNN accepts more than it computes: a plan that it took may write 16 bits where float32 was
//! asked for. So what it serves is a list of its own here, of what was tested.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Backend, Computation, LibraryCall, Reason};
use crate::element::Element;
use crate::launch::{Features, Footprint, Forward, LaunchError, Rectangle, Rows, TileOperation};
use crate::names::named;
use crate::target::Target;

/// The name of the backend and of the library.
pub const NAME: &str = "cudnn";

/// The backend.
pub const BACKEND: Backend = Backend {
    name: NAME,
    serves: |operation, target| match operation {
        TileOperation::Forward(tile) => forward_is_served(tile, target),
        _ => refused("only attention's forward pass is served"),
    },
    lower: |operation, _| match operation {
        TileOperation::Forward(tile) => Ok(vec![Computation::Library(forward(tile)?)]),
        _ => unreachable!("it is not served"),
    },
};

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
        /// Gradient of the queries, float32. cuDNN clears it first.
        QueryGrad = "query_grad",
        /// Gradient of the keys.
        KeyGrad = "key_grad",
        /// Gradient of the values.
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

    /// Whether the elements are float32.
    pub const fn is_float32(self) -> bool {
        matches!(self, SdpaArray::Lse | SdpaArray::QueryGrad | SdpaArray::Delta)
    }
}

/// What a plan computes: softmax attention of some queries and some keys.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sdpa {
    /// The pass.
    pub pass: SdpaPass,
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
    /// Whether query row i sees key rows 0 to i only; otherwise it sees all.
    pub is_causal: bool,
    /// Factor on q·k.
    pub softmax_scale: f32,
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
            Key | Value | KeyGrad | ValueGrad => (self.kv_heads, self.kv_len),
            _ => (self.heads, self.q_len),
        };
        let columns = match array {
            Query | Key | QueryGrad | KeyGrad => self.head_dim,
            Value | Out | OutGrad | ValueGrad => self.value_dim,
            Lse | Delta => 1,
        };
        [self.batch, heads, rows, columns]
    }

    /// Returns the text of the plan.
    fn text(&self) -> String {
        serde_json::to_string(self).expect("numbers and names have a text")
    }
}

fn refused(reason: impl Into<std::borrow::Cow<'static, str>>) -> Result<(), Reason> {
    Err(Reason(reason.into()))
}

/// Says whether cuDNN computes the mask of a rectangle, and whether it is causal.
fn is_causal(rectangle: &Rectangle) -> Option<bool> {
    let Rectangle { q_len, kv_len, lower, upper, .. } = *rectangle;
    let sees_all_before = lower <= -(q_len as i64 - 1);
    match upper {
        _ if !sees_all_before => None,
        0 => Some(true),
        upper => (upper >= kv_len as i64 - 1).then_some(false),
    }
}

fn forward_is_served(tile: &Forward, target: Target) -> Result<(), Reason> {
    let Rectangle { q_len, kv_len, head_dim, value_dim, .. } = tile.rectangle;
    if !matches!(target, Target::Sm90 | Target::Sm100 | Target::Sm103) {
        return refused(format!("it is not used on {}", target.name()));
    }
    if tile.features != Features::default() {
        return refused("features other than a causal mask are not served");
    }
    if head_dim != value_dim || !matches!(head_dim, 64 | 128) {
        let columns = format!("{head_dim} and {value_dim}");
        return refused(format!("it serves 64 or 128 columns, not {columns}"));
    }
    if q_len == 0 || kv_len == 0 {
        return refused("there is nothing to compute");
    }
    if is_causal(&tile.rectangle).is_none() {
        return refused("it serves full masks and the causal mask of equal beginnings");
    }
    if !(tile.first && tile.last) {
        return refused("its results are not sums of parts");
    }
    Ok(())
}

/// Returns the call that computes o and lse of all keys.
fn forward(tile: &Forward) -> Result<LibraryCall, LaunchError> {
    let missing = |name| LaunchError::invalid(name, "an array", "none");
    let (o, lse) = (tile.o.ok_or_else(|| missing("o"))?, tile.lse.ok_or_else(|| missing("lse"))?);
    let arrays = [
        (SdpaArray::Query, tile.q, false),
        (SdpaArray::Key, tile.k, false),
        (SdpaArray::Value, tile.v, false),
        (SdpaArray::Out, o, true),
        (SdpaArray::Lse, lse, true),
    ];
    Ok(call(SdpaPass::Forward, &tile.rectangle, &arrays))
}

/// Returns a call with its arrays and whether it writes them.
fn call(pass: SdpaPass, rectangle: &Rectangle, arrays: &[(SdpaArray, Rows, bool)]) -> LibraryCall {
    let Rectangle { batch, q_len, kv_len, heads, kv_heads, head_dim, value_dim, .. } = *rectangle;
    let mut plan = Sdpa {
        pass,
        element: rectangle.element,
        batch: batch as i64,
        q_len: q_len as i64,
        kv_len: kv_len as i64,
        heads: heads as i64,
        kv_heads: kv_heads as i64,
        head_dim: head_dim as i64,
        value_dim: value_dim as i64,
        is_causal: is_causal(rectangle).unwrap_or_default(),
        softmax_scale: rectangle.softmax_scale,
        strides: BTreeMap::new(),
    };
    let mut touched = Vec::new();
    for &(array, Rows { address, batch_stride }, writes) in arrays {
        let [batch, heads, rows, columns] = plan.dims(array);
        // One entry may have any stride.
        let entry = if batch == 1 { rows * heads * columns } else { batch_stride as i64 };
        plan.strides.insert(array, [entry, columns, heads * columns, 1]);
        let elements = (batch - 1) * entry + rows * heads * columns;
        let bytes = if array.is_float32() { 4 } else { rectangle.element.bytes() as u64 };
        let bytes = address..address + elements as u64 * bytes;
        touched.push((
            array.number(),
            Footprint { name: array.name(), bytes, reads: !writes, writes },
        ));
    }
    LibraryCall { library: NAME, plan: plan.text(), arrays: touched }
}
