//! cuDNN as a backend: the operations that it serves, and its calls that compute them.
//!
//! cuDNN accepts more than it computes: a plan that it took may write 16 bits where float32 was
//! asked for. So this module serves a list of its own: the operations that were tested.

mod call;
mod plan;
mod scratch;
mod version;

use call::CallBuilder;
use scratch::Scratch;

use super::tile::launches;
use super::{Backend, Computation, Reason, TilePass};
use crate::cost;
use crate::launch::{
    Accumulate, AddGradient, Features, FoldResult, Forward, ForwardResults, KeyGrads, LaunchError,
    PackLse, Rectangle, Rows, SoftmaxState, TileOperation,
};
use crate::target::Target;

pub use plan::{Sdpa, SdpaArray, SdpaOrder, SdpaPass, WORKSPACE};
pub use version::Version;

/// The name of the backend and of the library.
pub const NAME: &str = "cudnn";

/// The targets that plans were tested for.
const TARGETS: [Target; 3] = [Target::Sm90, Target::Sm100, Target::Sm103];

/// The backend.
pub const BACKEND: Backend = Backend {
    name: NAME,
    serves: |operation, target| match operation {
        TileOperation::Forward(tile) => {
            served(&tile.rectangle, &tile.features, TilePass::Forward, target)
        }
        TileOperation::KeyGrads(tile) => gradients_are_served(tile, target),
        _ => refused("it serves attention over tiles only"),
    },
    needs: |operation, target| match operation {
        TileOperation::KeyGrads(tile) => Some(oldest(tile, target)),
        _ => Some(Version::OLDEST),
    },
    cost: cost::cudnn,
    lower: |operation, target, scratch| match operation {
        TileOperation::Forward(tile) => forward(tile, target, scratch),
        TileOperation::KeyGrads(tile) => gradients(tile, target, scratch),
        _ => unreachable!("it is not served"),
    },
    scratch_bytes: |rectangle, pass| {
        if has_columns(rectangle) { Scratch::new(rectangle, pass, 0).end } else { 0 }
    },
};

fn refused(reason: impl Into<std::borrow::Cow<'static, str>>) -> Result<(), Reason> {
    Err(Reason(reason.into()))
}

/// Returns the lower and the upper limit of a rectangle's band, those that hide no pair left out.
fn limits(rectangle: &Rectangle) -> (Option<i64>, Option<i64>) {
    let Rectangle { q_len, kv_len, lower, upper, .. } = *rectangle;
    let lower = Some(lower).filter(|&lower| lower > -(q_len as i64 - 1));
    let upper = Some(upper).filter(|&upper| upper < kv_len as i64 - 1);
    (lower, upper)
}

/// Says whether cuDNN computes the mask of a rectangle: a band that has the diagonal in it, and
/// with a lower limit no query after the last key.
fn mask_is_served(rectangle: &Rectangle) -> bool {
    let Rectangle { q_len, kv_len, .. } = *rectangle;
    let (lower, upper) = limits(rectangle);
    upper.is_none_or(|upper| upper >= 0) && lower.is_none_or(|lower| lower <= 0 && q_len <= kv_len)
}

/// Whether there are plans for a rectangle's columns.
const fn has_columns(rectangle: &Rectangle) -> bool {
    matches!(
        (rectangle.head_dim, rectangle.value_dim),
        (64, 64) | (128, 128) | (192, 128) | (256, 256)
    )
}

/// Returns the order of sums of a tile's plan.
fn order(tile: &KeyGrads, target: Target) -> SdpaOrder {
    match (tile.fixed_order, target) {
        (false, _) => SdpaOrder::Any,
        (true, Target::Sm90) => SdpaOrder::Fixed,
        (true, _) => SdpaOrder::FixedRounded,
    }
}

/// Returns the oldest version that computes the gradients of a tile which is served.
fn oldest(tile: &KeyGrads, target: Target) -> Version {
    match order(tile, target) {
        SdpaOrder::Fixed => Version::FIXED_ON_HOPPER,
        SdpaOrder::FixedRounded if tile.rectangle.head_dim == 256 => Version::FIXED_256,
        _ => Version::OLDEST,
    }
}

/// Says whether cuDNN computes attention over a rectangle.
fn served(
    rectangle: &Rectangle,
    features: &Features,
    pass: TilePass,
    target: Target,
) -> Result<(), Reason> {
    let Rectangle { q_len, kv_len, head_dim, value_dim, .. } = *rectangle;
    if !TARGETS.contains(&target) {
        return refused(format!("it is not used on {}", target.name()));
    }
    if *features != Features::default() {
        return refused("it serves no feature but a causal mask and a window");
    }
    if !has_columns(rectangle) {
        return refused(format!("it has no plan for {head_dim} and {value_dim} columns"));
    }
    let is_one_pair = q_len == 1 && kv_len == 1 && pass == TilePass::Backward;
    if q_len == 0 || kv_len == 0 || is_one_pair {
        return refused("there is too little to compute");
    }
    if !mask_is_served(rectangle) {
        return refused(
            "it serves full masks and bands that hold the diagonal; with a lower limit no more \
             queries than keys",
        );
    }
    Ok(())
}

fn gradients_are_served(tile: &KeyGrads, target: Target) -> Result<(), Reason> {
    served(&tile.rectangle, &tile.features, TilePass::Backward, target)?;
    if tile.dq_acc.is_none() {
        return refused("it computes all gradients at once");
    }
    let is_wide = tile.rectangle.head_dim == 256;
    if is_wide && target != Target::Sm90 && !tile.fixed_order {
        let target = target.name();
        return refused(format!("it adds 256 columns on {target} in a fixed order alone"));
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
    let Scratch { rows, lse: scratch_lse, workspace, .. } =
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
    let arrived_lse = scratch::padded_at(&rectangle, scratch_lse);
    let call =
        call.packed(SdpaArray::Out, rows, true).statistics(SdpaArray::Lse, arrived_lse, true);
    let state = tile.acc.zip(tile.row_max).zip(tile.row_sum);
    let fold = FoldResult {
        batch,
        q_len,
        heads,
        head_dim,
        element,
        home: state.map(|((acc, row_max), row_sum)| SoftmaxState { acc, row_max, row_sum }),
        arrived_o: packed([q_len, heads, head_dim], rows),
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
    let Rectangle { batch, q_len, kv_len, heads, kv_heads, head_dim, value_dim, element, .. } =
        rectangle;
    let scratch = Scratch::new(&rectangle, TilePass::Backward, scratch);
    let [packed_lse, delta] =
        [scratch.lse, scratch.delta].map(|address| scratch::packed_at(&rectangle, address));
    let pack = PackLse { batch, q_len, heads, lse, packed: packed_lse };
    let call = CallBuilder::new(SdpaPass::Backward, &rectangle, &scratch.workspace)
        .in_order(order(tile, target))
        .rows(SdpaArray::Query, tile.q, false)
        .rows(SdpaArray::Key, tile.k, false)
        .rows(SdpaArray::Value, tile.v, false)
        .rows(SdpaArray::Out, o, false)
        .statistics(SdpaArray::Lse, packed_lse, false)
        .rows(SdpaArray::OutGrad, tile.dout, false)
        .packed(SdpaArray::QueryGrad, scratch.rows, true)
        .statistics(SdpaArray::Delta, delta, true);
    let group = heads / kv_heads;
    let of_keys = [
        (SdpaArray::KeyGrad, head_dim, tile.dk_acc, tile.dk, scratch.keys[0]),
        (SdpaArray::ValueGrad, value_dim, tile.dv_acc, tile.dv, scratch.keys[1]),
    ];
    let (mut call, mut added) = (call, Vec::new());
    for (array, head_dim, home, out, address) in of_keys {
        if let Some(out) = out.filter(|_| first && last && group == 1) {
            call = call.rows(array, out, true);
            continue;
        }
        call = call.packed(array, address, true);
        let add = AddGradient {
            batch,
            rows: kv_len,
            heads: kv_heads,
            group,
            head_dim,
            element,
            home,
            arrived: packed([kv_len, heads, head_dim], address),
            scale: 1.0,
            out,
            first,
            last,
        };
        added.extend(launches(&add.into(), target)?);
    }
    let pack = launches(&pack.into(), target)?;
    let is_rounded = order(tile, target) == SdpaOrder::FixedRounded;
    let sum = launches(&query_sum(tile, dq_acc, scratch.rows, is_rounded), target)?;
    Ok(pack.chain([call.call(scratch.workspace)]).chain(sum).chain(added).collect())
}

/// Returns what adds cuDNN's gradient of queries, which lies at an address, perhaps rounded, to the
/// sum. The gradient has the factor on q·k, the sum has it not.
fn query_sum(tile: &KeyGrads, home: Rows, address: u64, is_rounded: bool) -> TileOperation {
    let Rectangle { batch, q_len: rows, heads, head_dim, element, .. } = tile.rectangle;
    let (arrived, scale) =
        (packed([rows, heads, head_dim], address), tile.rectangle.softmax_scale.recip());
    if !is_rounded {
        return Accumulate { batch, rows, heads, head_dim, home, arrived, scale }.into();
    }
    let (group, home, out, first, last) = (1, Some(home), None, false, false);
    AddGradient {
        batch,
        rows,
        heads,
        group,
        head_dim,
        element,
        home,
        arrived,
        scale,
        out,
        first,
        last,
    }
    .into()
}

/// Returns rows without gaps, of so many rows, heads and columns.
fn packed(sizes: [usize; 3], address: u64) -> Rows {
    Rows { address, batch_stride: sizes.iter().product::<usize>() as u64 }
}
