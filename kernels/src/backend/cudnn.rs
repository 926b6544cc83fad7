//! cuDNN as a backend: the operations that it serves, and its calls that compute them.
//!
//! cuDNN accepts more than it computes: a plan that it took may write 16 bits where float32 was
//! asked for. So what it serves is a list of its own here, of what was tested.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::tile::launches;
use super::{Backend, Computation, LibraryCall, Reason, TilePass};
use crate::element::Element;
use crate::launch::{
    Accumulate, AddGradient, Features, FoldResult, Footprint, Forward, ForwardResults, KeyGrads,
    LaunchError, Rectangle, Rows, SoftmaxState, Statistics, TileOperation,
};
use crate::names::named;
use crate::target::Target;

/// The name of the backend and of the library.
pub const NAME: &str = "cudnn";
/// The number of cuDNN's own workspace among the arrays of a call.
pub const WORKSPACE: i64 = 0;
/// Bytes of workspace of any plan.
const SMALL_WORKSPACE: usize = 4096;
/// Bytes that divide the addresses of scratch memory.
const ALIGNMENT: u64 = 256;

/// The backend.
pub const BACKEND: Backend = Backend {
    name: NAME,
    serves: |operation, target| match operation {
        TileOperation::Forward(tile) => served(&tile.rectangle, &tile.features, target),
        TileOperation::KeyGrads(tile) => gradients_are_served(tile, target),
        _ => refused("it serves attention over tiles only"),
    },
    lower: |operation, target, scratch| match operation {
        TileOperation::Forward(tile) => forward(tile, target, scratch),
        TileOperation::KeyGrads(tile) => gradients(tile, target, scratch),
        _ => unreachable!("it is not served"),
    },
    scratch_bytes: |rectangle, pass| match has_columns(rectangle) {
        true => Scratch::new(rectangle, pass, 0).end,
        false => 0,
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

fn has_columns(rectangle: &Rectangle) -> bool {
    rectangle.head_dim == rectangle.value_dim && matches!(rectangle.head_dim, 64 | 128)
}

/// Says whether cuDNN computes attention over a rectangle.
fn served(rectangle: &Rectangle, features: &Features, target: Target) -> Result<(), Reason> {
    let Rectangle { q_len, kv_len, head_dim, value_dim, .. } = *rectangle;
    if !matches!(target, Target::Sm90 | Target::Sm100 | Target::Sm103) {
        return refused(format!("it is not used on {}", target.name()));
    }
    if *features != Features::default() {
        return refused("it serves no feature but a causal mask");
    }
    if !has_columns(rectangle) {
        return refused(format!("it serves 64 or 128 columns, not {head_dim} and {value_dim}"));
    }
    if q_len == 0 || kv_len == 0 {
        return refused("there is nothing to compute");
    }
    if is_causal(rectangle).is_none() {
        return refused("it serves full masks, and causal masks of rows with equal beginnings");
    }
    Ok(())
}

fn gradients_are_served(tile: &KeyGrads, target: Target) -> Result<(), Reason> {
    served(&tile.rectangle, &tile.features, target)?;
    if tile.dq_acc.is_none() {
        return refused("it computes all gradients at once and in any order");
    }
    if tile.results.is_none() {
        return refused("it needs the results of the queries, and a log-sum-exp without gradient");
    }
    Ok(())
}

/// Scratch memory: addresses of its parts.
struct Scratch {
    /// o, or the gradient of the queries.
    rows: u64,
    /// lse, or delta.
    statistics: u64,
    /// The gradients of keys and values.
    keys: [u64; 2],
    /// cuDNN's own workspace.
    workspace: Range<u64>,
    /// The end.
    end: u64,
}

impl Scratch {
    /// Lays out the memory of a pass over a rectangle from an address on.
    ///
    /// cuDNN's own workspace has room for what plans were seen to take, rounded up: 256 bytes, and
    /// in the backward pass gradients of keys and values of each query head, if heads share keys.
    fn new(rectangle: &Rectangle, pass: TilePass, address: u64) -> Scratch {
        let Rectangle { batch, q_len, kv_len, heads, kv_heads, head_dim, element, .. } = *rectangle;
        let mut end = address;
        let mut take = |bytes: usize| {
            let start = end;
            end = (start + bytes as u64).next_multiple_of(ALIGNMENT);
            start
        };
        let is_backward = pass == TilePass::Backward;
        let (bytes, row) = (element.bytes(), batch * head_dim);
        let rows = take(q_len * heads * row * if is_backward { 4 } else { bytes });
        let statistics = take(4 * batch * heads * padded(q_len));
        let of_keys = if is_backward { kv_len * row * bytes } else { 0 };
        let keys = [take(of_keys * kv_heads), take(of_keys * kv_heads)];
        let shared = if heads > kv_heads { 2 * of_keys * heads } else { 0 };
        let start = take(SMALL_WORKSPACE + shared);
        Scratch { rows, statistics, keys, workspace: start..end, end }
    }
}

/// Returns the rows of a head in an array of statistics: each head is aligned to 16 bytes.
const fn padded(rows: usize) -> usize {
    rows.next_multiple_of(4)
}

/// An array of a call: where it lies, and whether the call writes it.
struct Given {
    array: SdpaArray,
    address: u64,
    strides: [i64; 4],
    writes: bool,
}

/// Makes a call, array by array.
struct CallBuilder {
    plan: Sdpa,
    arrays: Vec<Given>,
}

impl CallBuilder {
    fn new(pass: SdpaPass, rectangle: &Rectangle, workspace: &Range<u64>) -> CallBuilder {
        let Rectangle { batch, q_len, kv_len, heads, kv_heads, head_dim, value_dim, .. } =
            *rectangle;
        let plan = Sdpa {
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
            workspace_bytes: (workspace.end - workspace.start) as i64,
            strides: BTreeMap::new(),
        };
        CallBuilder { plan, arrays: Vec::new() }
    }

    /// Adds an array `[batch, rows, heads, columns]`.
    fn rows(self, array: SdpaArray, at: Rows, writes: bool) -> CallBuilder {
        let [batch, heads, rows, columns] = self.plan.dims(array);
        let entry = rows * heads * columns;
        // One entry may have any stride.
        let entry = if batch == 1 { entry } else { at.batch_stride as i64 };
        self.array(Given {
            array,
            address: at.address,
            strides: [entry, columns, heads * columns, 1],
            writes,
        })
    }

    /// Adds an array without gaps.
    fn packed(self, array: SdpaArray, address: u64, writes: bool) -> CallBuilder {
        let [_, heads, rows, columns] = self.plan.dims(array);
        let batch_stride = (rows * heads * columns) as u64;
        self.rows(array, Rows { address, batch_stride }, writes)
    }

    /// Adds statistics `[batch, heads, rows]` that the call writes.
    fn statistics(self, array: SdpaArray, at: Statistics) -> CallBuilder {
        let strides = [at.batch_stride as i64, at.head_stride as i64, 1, 1];
        self.array(Given { array, address: at.address, strides, writes: true })
    }

    fn array(mut self, given: Given) -> CallBuilder {
        self.plan.strides.insert(given.array, given.strides);
        self.arrays.push(given);
        self
    }

    fn call(self, workspace: Range<u64>) -> Computation {
        let footprint = |given: &Given| {
            let dims = self.plan.dims(given.array).into_iter().zip(given.strides);
            let last: i64 = dims.map(|(length, stride)| (length - 1) * stride).sum();
            let bytes = if given.array.is_float32() { 4 } else { self.plan.element.bytes() as u64 };
            let bytes = given.address..given.address + (last + 1) as u64 * bytes;
            let Given { array, writes, .. } = *given;
            (array.number(), Footprint { name: array.name(), bytes, reads: !writes, writes })
        };
        let workspace =
            Footprint { name: "workspace", bytes: workspace, reads: true, writes: true };
        let arrays = self.arrays.iter().map(footprint).chain([(WORKSPACE, workspace)]).collect();
        Computation::Library(LibraryCall { library: NAME, plan: self.plan.text(), arrays })
    }
}

fn missing(name: &'static str) -> LaunchError {
    LaunchError::invalid(name, "an array", "none")
}

/// Returns what folds a rectangle of keys into the running softmax of its queries.
fn forward(tile: &Forward, target: Target, scratch: u64) -> Result<Vec<Computation>, LaunchError> {
    let Forward { rectangle, first, last, o, lse, .. } = *tile;
    let Scratch { rows, statistics, workspace, .. } =
        Scratch::new(&rectangle, TilePass::Forward, scratch);
    let call = CallBuilder::new(SdpaPass::Forward, &rectangle, &workspace)
        .rows(SdpaArray::Query, tile.q, false)
        .rows(SdpaArray::Key, tile.k, false)
        .rows(SdpaArray::Value, tile.v, false);
    if first && last {
        let (o, lse) = (o.ok_or_else(|| missing("o"))?, lse.ok_or_else(|| missing("lse"))?);
        let call = call.rows(SdpaArray::Out, o, true).rows(SdpaArray::Lse, lse, true);
        return Ok(vec![call.call(workspace)]);
    }
    let Rectangle { batch, q_len, heads, value_dim: head_dim, element, .. } = rectangle;
    let arrived_lse = statistics_at(&rectangle, statistics);
    let call = call.packed(SdpaArray::Out, rows, true).statistics(SdpaArray::Lse, arrived_lse);
    let state = tile.acc.zip(tile.row_max).zip(tile.row_sum);
    let fold = FoldResult {
        batch,
        q_len,
        heads,
        head_dim,
        element,
        home: state.map(|((acc, row_max), row_sum)| SoftmaxState { acc, row_max, row_sum }),
        arrived_o: Rows { address: rows, batch_stride: (q_len * heads * head_dim) as u64 },
        arrived_lse,
        o,
        lse,
        first,
        last,
    };
    let fold = launches(&fold.into(), target)?;
    Ok(std::iter::once(call.call(workspace)).chain(fold).collect())
}

/// Returns the place of statistics without gaps but the padding of each head.
fn statistics_at(rectangle: &Rectangle, address: u64) -> Statistics {
    let head_stride = padded(rectangle.q_len) as u64;
    Statistics { address, batch_stride: rectangle.heads as u64 * head_stride, head_stride }
}

/// Returns what adds a rectangle's part to dk, dv and dq.
fn gradients(
    tile: &KeyGrads,
    target: Target,
    scratch: u64,
) -> Result<Vec<Computation>, LaunchError> {
    let KeyGrads { rectangle, first, last, .. } = *tile;
    let (dq_acc, results) = (tile.dq_acc.ok_or_else(|| missing("dq_acc"))?, tile.results);
    let ForwardResults { o, lse } = results.ok_or_else(|| missing("results"))?;
    let scratch = Scratch::new(&rectangle, TilePass::Backward, scratch);
    let call = CallBuilder::new(SdpaPass::Backward, &rectangle, &scratch.workspace)
        .rows(SdpaArray::Query, tile.q, false)
        .rows(SdpaArray::Key, tile.k, false)
        .rows(SdpaArray::Value, tile.v, false)
        .rows(SdpaArray::Out, o, false)
        .rows(SdpaArray::Lse, lse, false)
        .rows(SdpaArray::OutGrad, tile.dout, false)
        .packed(SdpaArray::QueryGrad, scratch.rows, true)
        .statistics(SdpaArray::Delta, statistics_at(&rectangle, scratch.statistics));
    let Rectangle { batch, q_len, kv_len, heads, kv_heads, head_dim, element, .. } = rectangle;
    let sum = Accumulate {
        batch,
        rows: q_len,
        heads,
        head_dim,
        home: dq_acc,
        arrived: Rows { address: scratch.rows, batch_stride: (q_len * heads * head_dim) as u64 },
        // cuDNN's gradient has the factor on q·k, the sum has it not.
        scale: rectangle.softmax_scale.recip(),
    };
    let sum = launches(&sum.into(), target)?;
    let of_keys = [
        (SdpaArray::KeyGrad, tile.dk_acc, tile.dk, scratch.keys[0]),
        (SdpaArray::ValueGrad, tile.dv_acc, tile.dv, scratch.keys[1]),
    ];
    let (mut call, mut added) = (call, Vec::new());
    for (array, home, out, address) in of_keys {
        if let Some(out) = out.filter(|_| first && last) {
            call = call.rows(array, out, true);
            continue;
        }
        call = call.packed(array, address, true);
        let batch_stride = (kv_len * kv_heads * head_dim) as u64;
        let arrived = Rows { address, batch_stride };
        let (rows, heads) = (kv_len, kv_heads);
        let add =
            AddGradient { batch, rows, heads, head_dim, element, home, arrived, out, first, last };
        added.extend(launches(&add.into(), target)?);
    }
    Ok(std::iter::once(call.call(scratch.workspace)).chain(sum).chain(added).collect())
}
