//! One rank's tiles: their parts, and the launches of a part on the command list.

use std::ops::Range;

use burst_attention_kernels::backend::{Backends, Computation, TilePass};
use burst_attention_kernels::instances::Element;
use burst_attention_kernels::launch::{
    self, Dropout, EvenPositions, Rectangle, Rows, Segments, TileOperation, Visible,
};

use super::buffer::{Buffer, cut_by_layout, sections};
use super::call::Call;
use super::commands::{CommandListBuilder, Work};
use super::error::CudaError;
use super::final_writes::FinalWrites;
use super::gradients::GradientOperations;
use super::rank::RankMemory;
use super::region::{Queue, Region, Use, reads, writes};
use crate::error::{Error, Result};
use crate::mask::Band;
use crate::operands::Operand;
use crate::problem::{Dtype, Features, Pass, Problem};
use crate::schedule::{Payload, Schedule, Tile};

/// Appends the launches of one rank to a command list.
#[derive(Debug)]
pub struct CommandKernel<'a> {
    pub(super) schedule: &'a Schedule,
    pub(super) backends: Backends,
    pub(super) element: Element,
    pub(super) memory: RankMemory<'a>,
    pub(super) final_writes: &'a FinalWrites,
    pub(super) list: &'a CommandListBuilder,
    /// The tiles of this step that each of the two halves of a backward tile has reached.
    pub(super) turns: [usize; 2],
    /// The operations that compute gradients.
    pub(super) operations: GradientOperations,
    /// Whether lse has a gradient.
    pub(super) lse_gradient: bool,
}

/// A part of a tile that takes launches of its own.
pub(super) struct Part {
    pub queries: Range<usize>,
    pub keys: Range<usize>,
    pub rectangle: Rectangle,
    pub features: launch::Features,
    pub q: Rows,
    pub k: Rows,
    pub v: Rows,
    /// Whether the part starts the state of its resident rows.
    pub first: bool,
    /// Whether the part ends the state of its resident rows.
    pub last: bool,
}

/// Returns the CUDA kernels' name of a type.
///
/// # Errors
/// [`Error::Unsupported`] for float32.
pub(super) fn element_of(dtype: Dtype) -> Result<Element> {
    match dtype {
        Dtype::Bf16 => Ok(Element::Bf16),
        Dtype::F16 => Ok(Element::F16),
        Dtype::F32 => Err(Error::Unsupported {
            what: "float32".into(),
            executor: "CUDA",
            instead: "cast query, key and value to bfloat16 or float16 (sums are float32 all the \
                      same), or compute on CPU devices"
                .into(),
        }),
    }
}

/// Returns the features of a problem's tiles, without addresses: a question to a backend.
pub(super) fn features_of(problem: &Problem) -> launch::Features {
    let Features { segments, soft_cap, slopes, dropout, .. } = problem.features;
    launch::Features {
        segments: segments.then(Segments::default),
        soft_cap: soft_cap.unwrap_or(0.0),
        slopes: slopes.then(Rows::default),
        dropout: dropout.map(|rate| Dropout { numbers: Rows::default(), rate }),
        positions: EvenPositions::default(),
        visible: problem.features.has_query_positions().then(Visible::default),
    }
}

/// Whether kernels count places. They count within one strided range of the layout.
fn counts_places(problem: &Problem) -> bool {
    problem.features.count_positions()
}

/// Returns the parts of a tile's queries that take launches of their own. The statistics of a part
/// lie in one array, and where positions count, its positions are evenly spaced.
pub(super) fn query_parts(problem: &Problem, queries: &Range<usize>) -> Vec<Range<usize>> {
    if queries.is_empty() {
        // A tile without queries only defines the state of its keys.
        vec![queries.clone()]
    } else if counts_places(problem) {
        cut_by_layout(problem, problem.q_len, queries)
    } else {
        sections(problem, queries)
    }
}

/// Returns the parts of a tile's keys that take launches of their own.
pub(super) fn key_parts(problem: &Problem, keys: &Range<usize>) -> Vec<Range<usize>> {
    if keys.is_empty() || !counts_places(problem) {
        return vec![keys.clone()];
    }
    cut_by_layout(problem, problem.kv_len, keys)
}

/// Returns bytes of scratch memory that are enough for any tile of a rank.
pub(super) fn scratch_bytes(call: &Call, schedule: &Schedule) -> u64 {
    let Ok(element) = element_of(call.problem.dtype) else { return 0 };
    let pass = match call.pass {
        Pass::Forward => TilePass::Forward,
        Pass::Backward => TilePass::Backward,
    };
    let bytes = |tile: &Tile| {
        let (queries, keys) = (&tile.queries.rows, &tile.keys.rows);
        let whole = rectangle(&call.problem, element, queries, keys, tile.band);
        call.kernels.scratch_bytes(&whole, pass)
    };
    schedule.steps.iter().flat_map(|step| &step.tiles).map(bytes).max().unwrap_or_default()
}

/// Returns the rectangle of some queries and some keys.
pub(super) fn rectangle(
    problem: &Problem,
    element: Element,
    queries: &Range<usize>,
    keys: &Range<usize>,
    band: Band,
) -> Rectangle {
    let Problem { batch, heads, kv_heads, head_dim, value_dim, softmax_scale, .. } = *problem;
    // The band counts from the owners' first rows; a rectangle counts from its own first rows.
    let shift = queries.start as i64 - keys.start as i64;
    let shifted = |limit: i64| match limit {
        i64::MIN | i64::MAX => limit,
        limit => limit + shift,
    };
    Rectangle {
        batch,
        q_len: queries.len(),
        kv_len: keys.len(),
        heads,
        kv_heads,
        head_dim,
        value_dim,
        element,
        lower: shifted(band.lower),
        upper: shifted(band.upper),
        softmax_scale,
    }
}

impl CommandKernel<'_> {
    pub(super) fn broken<R>(&self, what: impl Into<String>) -> Result<R> {
        let (rank, step) = (self.schedule.rank, self.list.step());
        Err(Error::BrokenSchedule { rank, step, what: what.into() })
    }

    /// Appends what computes an operation, all of which uses the same regions.
    pub(super) fn push(
        &self,
        operation: impl Into<TileOperation>,
        uses: impl IntoIterator<Item = Use>,
    ) -> Result<()> {
        let uses = Vec::from_iter(uses);
        for computation in self.lowered(operation)? {
            self.list.push(Queue::Compute, Work::Compute(computation), uses.clone());
        }
        Ok(())
    }

    /// Appends what computes an operation of a tile, which adds to `sums` and perhaps to `others`.
    ///
    /// A library computes while sums arrive. Only the kernels that add its results wait for them.
    pub(super) fn push_tile(
        &self,
        operation: impl Into<TileOperation>,
        [queries, keys, sums]: [&Buffer; 3],
        others: Option<&Buffer>,
    ) -> Result<()> {
        let computations = self.lowered(operation)?;
        let features = self.memory.problem.features;
        let has_masks = features.segments || features.has_query_positions();
        let travels = computations.len() > 1 && matches!(sums.region, Region::Slot(..));
        for computation in computations {
            let needs_sums = !travels || sums.is_touched_by(&computation);
            let mut uses = vec![reads(queries.region), reads(keys.region)];
            uses.extend(needs_sums.then_some(writes(sums.region)));
            uses.extend(has_masks.then_some(writes(Region::Masks)));
            uses.extend(others.map(|sums| writes(sums.region)));
            self.list.push(Queue::Compute, Work::Compute(computation), uses);
        }
        Ok(())
    }

    fn lowered(&self, operation: impl Into<TileOperation>) -> Result<Vec<Computation>> {
        let lowered = self.backends.lower(&operation.into());
        let (computations, choice) = lowered.map_err(CudaError::Launch)?;
        self.list.note(choice);
        Ok(computations)
    }

    /// Returns the parts of a tile. The `resident` rows have a state. Each range of them pairs with
    /// each range of the other rows, and the pairs of a resident range hand on its state: the first
    /// pair starts it if `first`, and the last pair ends it if `last`.
    pub(super) fn parts(
        &self,
        tile: &Tile,
        (queries, keys): (&Buffer, &Buffer),
        resident: Payload,
        (first, last): (bool, bool),
    ) -> Vec<Part> {
        let (q_rows, k_rows) = (&tile.queries.rows, &tile.keys.rows);
        let problem = self.memory.problem;
        let (q_parts, k_parts) = (query_parts(problem, q_rows), key_parts(problem, k_rows));
        let by_keys = resident == Payload::Keys;
        let (outer, inner) = if by_keys { (k_parts, q_parts) } else { (q_parts, k_parts) };
        let part = |own: &Range<usize>, n: usize, other: &Range<usize>| {
            let (q_rows, k_rows) = if by_keys { (other, own) } else { (own, other) };
            Part {
                rectangle: rectangle(problem, self.element, q_rows, k_rows, tile.band),
                features: self.features(tile, (queries, q_rows), (keys, k_rows), own.len()),
                q: queries.rows_at(0, q_rows),
                k: keys.rows_at(0, k_rows),
                v: keys.rows_at(1, k_rows),
                first: first && n == 0,
                last: last && n + 1 == inner.len(),
                queries: q_rows.clone(),
                keys: k_rows.clone(),
            }
        };
        let of_own = |own| inner.iter().enumerate().map(move |(n, other)| part(own, n, other));
        outer.iter().flat_map(of_own).collect()
    }

    /// Returns the features of a launch over some rows of both sides whose blocks hold `resident`
    /// rows.
    fn features(
        &self,
        tile: &Tile,
        (queries, q_rows): (&Buffer, &Range<usize>),
        (keys, k_rows): (&Buffer, &Range<usize>),
        resident: usize,
    ) -> launch::Features {
        let Problem { ref features, heads, .. } = *self.memory.problem;
        let query_segments = queries.of_feature(features, Operand::QuerySegments, q_rows);
        let key_segments = keys.of_feature(features, Operand::KeySegments, k_rows);
        let ranges = self.memory.segment_ranges(resident);
        let segments = query_segments.zip(key_segments);
        let per_entry = |operand, width| {
            let address = self.memory.arrays.get(operand).copied()?;
            Some(Rows { address, batch_stride: width as u64 })
        };
        let numbers = per_entry(Operand::Dropout, 4);
        launch::Features {
            segments: segments.map(|(queries, keys)| Segments { queries, keys, ranges }),
            soft_cap: features.soft_cap.unwrap_or(0.0),
            slopes: per_entry(Operand::Slopes, heads),
            dropout: numbers.zip(features.dropout).map(|(numbers, rate)| Dropout { numbers, rate }),
            positions: match counts_places(self.memory.problem) {
                true => self.positions(tile, q_rows.start, k_rows.start),
                false => EvenPositions::default(),
            },
            visible: self.visible((queries, q_rows), (keys, k_rows)),
        }
    }

    /// Returns the masks as data of a launch over some rows of both sides.
    fn visible(
        &self,
        (queries, q_rows): (&Buffer, &Range<usize>),
        (keys, k_rows): (&Buffer, &Range<usize>),
    ) -> Option<Visible> {
        let features = &self.memory.problem.features;
        let of_keys = |operand| keys.of_feature(features, operand, k_rows);
        let positions = queries.of_feature(features, Operand::QueryPositions, q_rows)?;
        Some(Visible {
            intervals: of_keys(Operand::Visible),
            also: of_keys(Operand::AlsoVisible),
            positions: features.visible.then_some(positions),
            counted_positions: of_keys(Operand::KeyPositions).map(|keys| [positions, keys]),
            workspace: self.memory.masks(),
        })
    }

    /// Returns the positions of the rows from a query and a key on. The rows of each side lie in
    /// one strided range of the layout.
    fn positions(&self, tile: &Tile, query: usize, key: usize) -> EvenPositions {
        let Problem { layout, world_size, q_len, kv_len, .. } = *self.memory.problem;
        let position = |owner, row, len| {
            let ranges = layout.strided_ranges(owner, world_size, len);
            let range = ranges.iter().find(|range| range.rows.contains(&row));
            range.map_or((0, 1), |range| (range.position(row) as i64, range.stride as i64))
        };
        let (query, stride) = position(tile.queries.owner, query, q_len);
        let (key, _) = position(tile.keys.owner, key, kv_len);
        EvenPositions { query, key, stride }
    }
}
