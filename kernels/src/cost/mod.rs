//! Predicted seconds of operations: rounds of blocks on a device's multiprocessors.
//!
//! A block keeps the rows of one tile and streams tiles of the other side:
//!
//! ```text
//! block   = tile · (whole tiles + mask · masked tiles) + base + carry · (state in + state out)
//! launch  = gap + the end of the last block, where each multiprocessor that comes free takes the
//!           next block, the longest first
//! ```
//!
//! `constants.rs` has the numbers and where each comes from. What goes through rows once takes its
//! bytes over the device's memory. The costs leave out the cuts of arrays beyond
//! [`crate::launch::MAX_VIEW_BYTES`], and features: masks as data, segments, a soft cap, slopes and
//! dropout count as the plain kernels.
//!
//! On sm_90 all ten single launches of the forward pass at 128 columns lie within 3% of what an H100
//! measured, and its four rings within 2%: `tests/measured.rs` compares them with the files of
//! results. Other rows of those files are within 9%; `constants.rs` has a table.

mod blocks;
mod constants;
mod rounds;

use blocks::{Streams, blocks};
use constants::{Block, Device};

use crate::kernel::Kernel;
use crate::launch::{
    Accumulate, AddGradient, Cast, CombineSoftmax, Delta, Features, FoldResult, Forward, KeyGrads,
    QueryGrads, Rectangle, TileOperation,
};
use crate::target::Target;
use crate::tiles::width_of;
use crate::variant::Variant;

pub use constants::launch_gap;

/// Where a cost comes from, the most trustworthy first. A sum is worth as much as its worst part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// Constants that were fitted to measurements on a GPU of this architecture.
    Measured,
    /// Constants that were fitted to rates that others published.
    Published,
    /// Estimates: other columns, other kernels or another order of sums than those measured.
    Predicted,
}

impl Source {
    /// Returns the word that users read.
    pub const fn name(self) -> &'static str {
        match self {
            Source::Measured => "measured",
            Source::Published => "published",
            Source::Predicted => "predicted",
        }
    }
}

/// What an operation costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Seconds, with the gaps between launches.
    pub seconds: f64,
    /// The launches and calls, each of which has a gap of [`launch_gap`].
    pub launches: usize,
    /// Where the constants come from.
    pub source: Source,
}

impl std::ops::Add for Cost {
    type Output = Cost;

    fn add(self, other: Cost) -> Cost {
        Cost {
            seconds: self.seconds + other.seconds,
            launches: self.launches + other.launches,
            source: self.source.max(other.source),
        }
    }
}

/// Returns what an operation costs by this library's kernels on a device of `target`. `None` where
/// nothing is known: operations of linear attention and of decode, and architectures without a rate.
///
/// [`KeyGrads`] without `dq_acc` are dk and dv alone. A chooser that compares them with [`cudnn`], or
/// with the fused kernel, which give dq too, must add the cost of [`QueryGrads`]: see [`apart`].
pub fn own(operation: &TileOperation, target: Target) -> Option<Cost> {
    let device = Device::of(target)?;
    match operation {
        TileOperation::Forward(tile) => {
            let Forward { rectangle, first, last, .. } = tile;
            own_launch(Kernel::Forward, false, rectangle, (*first, *last), device)
        }
        TileOperation::KeyGrads(tile) => {
            let KeyGrads { rectangle, first, last, dq_acc, .. } = tile;
            let ends = (*first, *last);
            let cost = own_launch(Kernel::KeyGrads, dq_acc.is_some(), rectangle, ends, device)?;
            // Every tile counts as if it were the only one of its queries, as measured.
            let bytes = dq_acc.map_or(0, |_| FUSED_DQ_BYTES * query_elements(rectangle));
            Some(Cost { seconds: cost.seconds + device.seconds(bytes), ..cost })
        }
        TileOperation::QueryGrads(tile) => {
            let QueryGrads { rectangle, first, last, .. } = tile;
            own_launch(Kernel::QueryGrads, false, rectangle, (*first, *last), device)
        }
        operation => Some(device.pass(bytes_of(operation)?)),
    }
}

/// Returns what cuDNN and the kernels that sum its results cost for an operation on a device of
/// `target`. `None` where cuDNN has no such operation, or nothing is known of it: dk and dv without
/// dq, dq alone, features, columns and architectures that this library does not give to cuDNN.
///
/// A result of [`KeyGrads`] with `dq_acc` compares with the own kernels for dk and dv and for dq
/// together: see [`apart`].
pub fn cudnn(operation: &TileOperation, target: Target) -> Option<Cost> {
    let CudnnParts { call, queries, keys } = cudnn_parts(operation, target)?;
    Some([queries, keys].into_iter().flatten().fold(call, |all, sum| all + sum))
}

/// The parts of a cost of cuDNN.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CudnnParts {
    /// The call of cuDNN, which needs no sums.
    pub call: Cost,
    /// Adding its o or dq to sums, unless cuDNN itself writes the result.
    pub queries: Option<Cost>,
    /// Adding its dk and dv to sums.
    pub keys: Option<Cost>,
}

/// Returns the parts of [`cudnn`].
pub fn cudnn_parts(operation: &TileOperation, target: Target) -> Option<CudnnParts> {
    let device = Device::of(target)?;
    match operation {
        TileOperation::Forward(tile) if tile.features == Features::default() => {
            let (block, streams, source) = device.cudnn_forward(&tile.rectangle)?;
            let call = device.launch(&tile.rectangle, &block, streams, source);
            let is_whole = tile.first && tile.last;
            let queries = (!is_whole).then(|| device.pass(folded(tile)));
            Some(CudnnParts { call, queries, keys: None })
        }
        TileOperation::KeyGrads(tile) if tile.features == Features::default() => {
            tile.dq_acc?;
            let (block, streams, source) =
                device.cudnn_backward(&tile.rectangle, tile.fixed_order)?;
            let call = device.launch(&tile.rectangle, &block, streams, source);
            // cuDNN's own passes over rows: delta, and dq cleared and converted.
            let elements = query_elements(&tile.rectangle);
            let seconds = call.seconds + device.seconds(CUDNN_DQ_BYTES * elements);
            // In a fixed order cuDNN writes dq in 16 bits.
            let queries = device.pass(elements * if tile.fixed_order { 10 } else { 12 });
            let keys = added_keys(tile).map(|bytes| device.pass(bytes)).reduce(|a, b| a + b);
            Some(CudnnParts { call: Cost { seconds, ..call }, queries: Some(queries), keys })
        }
        _ => None,
    }
}

/// Returns what the own kernels for dk and dv and for dq cost together, where `tile` asks for all
/// gradients at once. `ends` says whether this rectangle is the first and the last of its queries:
/// only then dq neither comes in nor goes out as a sum.
pub fn apart(tile: &KeyGrads, ends: (bool, bool), target: Target) -> Option<Cost> {
    let device = Device::of(target)?;
    let KeyGrads { rectangle, first, last, .. } = tile;
    let keys = own_launch(Kernel::KeyGrads, false, rectangle, (*first, *last), device)?;
    Some(keys + own_launch(Kernel::QueryGrads, false, rectangle, ends, device)?)
}

/// Returns the seconds that a device's memory takes for a number of bytes, without the gap of a
/// launch. `None` where nothing is known of the device.
pub fn memory_seconds(bytes: usize, target: Target) -> Option<f64> {
    Device::of(target).map(|device| device.seconds(bytes))
}

/// Bytes for each element of dq with which a call clears the sums of the fused kernel and converts
/// them. The kernel of dq alone does that in its blocks.
const FUSED_DQ_BYTES: usize = 10;

/// Bytes for each element of dq that cuDNN itself reads and writes besides its products, an
/// estimate.
const CUDNN_DQ_BYTES: usize = 14;

/// Returns the cost of a launch of an attention kernel.
fn own_launch(
    kernel: Kernel,
    fused: bool,
    rectangle: &Rectangle,
    (first, last): (bool, bool),
    device: Device,
) -> Option<Cost> {
    let Rectangle { head_dim, value_dim, .. } = *rectangle;
    let width = width_of(head_dim.max(value_dim))?;
    let (block, source) = device.own(kernel, fused, width)?;
    // An image computes the columns of its tile, however many of them the arrays have.
    let is_whole = [head_dim, value_dim] == [width as usize; 2];
    let source = if is_whole { source } else { source.max(Source::Predicted) };
    let variant = Variant { fused, ..Variant::PLAIN };
    let tile = (kernel.spec().tile)(variant, device.target, width);
    let streams = Streams::of(kernel, tile);
    let carried = usize::from(!first) + usize::from(!last);
    let base = block.base + device.carry(kernel, tile, width) * carried as f64;
    let is_equal = rectangle.heads == rectangle.kv_heads;
    let tile = block.tile * if is_equal { block.ungrouped } else { 1.0 };
    Some(device.launch(rectangle, &Block { base, tile, ..block }, streams, source))
}

/// Returns the elements of dq.
const fn query_elements(rectangle: &Rectangle) -> usize {
    rectangle.batch * rectangle.q_len * rectangle.heads * rectangle.head_dim
}

/// Returns the bytes that the fold of cuDNN's result moves.
fn folded(tile: &Forward) -> usize {
    let Forward { rectangle, first, last, .. } = tile;
    let Rectangle { batch, q_len, heads, value_dim, .. } = *rectangle;
    batch * q_len * heads * value_dim * fold_bytes(*first, *last)
}

/// Returns the bytes that each sum of cuDNN's gradients of keys moves: dk and dv.
fn added_keys(tile: &KeyGrads) -> impl Iterator<Item = usize> {
    let KeyGrads { rectangle, first, last, .. } = tile;
    let Rectangle { batch, kv_len, heads, kv_heads, head_dim, value_dim, .. } = *rectangle;
    // Without groups and without other rectangles cuDNN writes dk and dv itself.
    let is_written = *first && *last && heads == kv_heads;
    let column = batch * kv_len * (2 * heads + kv_heads * sum_bytes(*first, *last));
    [head_dim, value_dim].into_iter().filter(move |_| !is_written).map(move |dim| dim * column)
}

/// Returns the bytes for each element of a float32 sum that a launch reads, unless it is the first,
/// and writes, or of the 16-bit result that the last launch writes.
const fn sum_bytes(first: bool, last: bool) -> usize {
    (if first { 0 } else { 4 }) + (if last { 2 } else { 4 })
}

/// Returns the bytes for each element that a fold of a 16-bit result moves.
const fn fold_bytes(first: bool, last: bool) -> usize {
    2 + sum_bytes(first, last)
}

/// Returns the bytes that an operation which goes through rows once reads and writes.
fn bytes_of(operation: &TileOperation) -> Option<usize> {
    Some(match *operation {
        TileOperation::Delta(Delta { batch, q_len, heads, head_dim, zeros, .. }) => {
            batch * q_len * heads * head_dim * if zeros.is_some() { 8 } else { 4 }
        }
        TileOperation::Cast(Cast { batch, rows, heads, head_dim, b, .. }) => {
            batch * rows * heads * head_dim * if b.is_some() { 10 } else { 6 }
        }
        TileOperation::Accumulate(Accumulate { batch, rows, heads, head_dim, .. }) => {
            batch * rows * heads * head_dim * 12
        }
        TileOperation::AddGradient(AddGradient {
            batch,
            rows,
            heads,
            group,
            head_dim,
            first,
            last,
            ..
        }) => batch * rows * heads * head_dim * (2 * group + sum_bytes(first, last)),
        TileOperation::CombineSoftmax(CombineSoftmax {
            batch,
            q_len,
            heads,
            head_dim,
            last,
            ..
        }) => batch * q_len * heads * head_dim * (4 + sum_bytes(false, last)),
        TileOperation::FoldResult(FoldResult {
            batch,
            q_len,
            heads,
            head_dim,
            first,
            last,
            ..
        }) => batch * q_len * heads * head_dim * fold_bytes(first, last),
        _ => return None,
    })
}

impl Device {
    /// Returns the cost of a launch whose blocks take so long.
    fn launch(
        self,
        rectangle: &Rectangle,
        block: &Block,
        streams: Streams,
        source: Source,
    ) -> Cost {
        let micros = |tiles: blocks::Tiles| {
            block.tile * (tiles.whole + block.mask * tiles.masked) + block.base
        };
        let groups = blocks(rectangle, streams).map(|(tiles, count)| (micros(tiles), count));
        let last = rounds::end(groups, self.target.multiprocessors());
        Cost { seconds: (last + self.gap) * 1e-6, launches: 1, source }
    }

    /// Returns the seconds that the device's memory takes for a number of bytes.
    fn seconds(self, bytes: usize) -> f64 {
        bytes as f64 / self.memory
    }

    /// Returns the cost of a launch that reads and writes a number of bytes.
    fn pass(self, bytes: usize) -> Cost {
        let seconds = self.seconds(bytes) + self.gap * 1e-6;
        Cost { seconds, launches: 1, source: self.memory_source }
    }
}

#[cfg(test)]
mod tests;
