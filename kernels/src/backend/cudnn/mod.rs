//! cuDNN as a backend: the operations that it serves, and its calls that compute them.
//!
//! cuDNN accepts more than it computes: a plan that it took may write 16 bits where float32 was
//! asked for. So this module serves a list of its own: the operations that were tested.

mod call;
mod plan;
mod scratch;

use call::CallBuilder;
use scratch::Scratch;

use super::tile::launches;
use super::{Backend, Computation, Reason, TilePass};
use crate::launch::{
    Accumulate, AddGradient, Features, FoldResult, Forward, ForwardResults, KeyGrads, LaunchError,
    Rectangle, Rows, SoftmaxState, TileOperation,
};
use crate::target::Target;

pub use plan::{Sdpa, SdpaArray, SdpaPass, WORKSPACE};

/// The name of the backend and of the library.
pub const NAME: &str = "cudnn";

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
    let arrived_lse = scratch::statistics_at(&rectangle, statistics);
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
        .statistics(SdpaArray::Delta, scratch::statistics_at(&rectangle, scratch.statistics));
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
