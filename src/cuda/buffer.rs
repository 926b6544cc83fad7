//! Buffers: where the arrays of a payload lie in a device's memory.
//!
//! | payload | arrays |
//! |---|---|
//! | queries, forward | q, [travelling](Operand::travelling) arrays of features |
//! | queries, backward | q, dout, the statistics lse in base 2 and delta, arrays of features |
//! | keys | k, v, arrays of features |
//! | partial | acc, and the statistics m and l |
//! | query gradients | dq |
//! | key gradients | dk, dv |
//!
//! Rows are `[batch, rows, heads, head_dim]`, or `[batch, rows]` for features. Statistics are float32
//! `[batch, heads, rows]`. Each array holds exactly the rows of its buffer, without gaps.

use std::ops::Range;

use burst_attention_kernels::backend::Computation;
use burst_attention_kernels::launch::{Rows, Statistics};

use super::driver::Block;
use super::region::Region;
use crate::operands::{DeviceKind, Operand};
use crate::problem::{Features, Pass, Problem};
use crate::schedule::{Payload, Place, QUERY_GRAIN};

/// Kernels need a row of statistics to start at a multiple of 16 bytes, and schedules cut queries
/// accordingly.
const ALIGNED_ROWS: usize = QUERY_GRAIN;
/// Arrays start at multiples of this number of bytes.
pub const ALIGNMENT: u64 = 256;

/// An array of a buffer.
#[derive(Debug, Clone, PartialEq)]
pub enum Array {
    /// `[batch, rows, heads, head_dim]`, or `[batch, rows]`.
    Rows {
        /// The address of the first element.
        address: u64,
        /// The elements of a row: heads · head_dim, or 1.
        width: usize,
        /// The bytes of an element.
        element: usize,
    },
    /// Float32 `[batch, heads, rows]` for each section.
    Statistics {
        /// The sections, in order.
        sections: Vec<Section>,
        /// The number of heads.
        heads: usize,
    },
}

/// The statistics `[batch, heads, rows]` of consecutive rows, padded to a multiple of four rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Section {
    rows: Range<usize>,
    address: u64,
}

/// The memory of a payload.
#[derive(Debug, Clone, PartialEq)]
pub struct Buffer {
    /// The region, which orders the commands that use the buffer.
    pub region: Region,
    /// The arrays, in the order of the table above.
    pub arrays: Vec<Array>,
    /// The rows of the owner that the buffer holds.
    pub rows: Range<usize>,
    batch: usize,
}

/// The kind of an array, without its address.
#[derive(Debug, Clone, Copy)]
enum ArrayKind {
    Rows { width: usize, element: usize },
    Statistics,
}

fn kinds(problem: &Problem, payload: Payload, pass: Pass) -> Vec<ArrayKind> {
    let Problem { heads, kv_heads, head_dim, value_dim, .. } = *problem;
    let input = |width| ArrayKind::Rows { width, element: problem.dtype.bytes() };
    let sums = |width| ArrayKind::Rows { width, element: 4 };
    let (q, o) = (heads * head_dim, heads * value_dim);
    let (k, v) = (kv_heads * head_dim, kv_heads * value_dim);
    let mut kinds = match (payload, pass) {
        (Payload::Queries, Pass::Forward) => vec![input(q)],
        (Payload::Queries, Pass::Backward) => {
            vec![input(q), input(o), ArrayKind::Statistics, ArrayKind::Statistics]
        }
        (Payload::Keys, _) => vec![input(k), input(v)],
        (Payload::Partial, _) => vec![sums(o), ArrayKind::Statistics, ArrayKind::Statistics],
        (Payload::QueryGrads | Payload::KeyGrads, _) => {
            let gradients = payload.gradients(&problem.features);
            gradients.map(|operand| sums(problem.row(operand, DeviceKind::Cuda).0)).collect()
        }
    };
    let travelling = |side| Operand::travelling(&problem.features, side);
    kinds.extend(payload.input_side().into_iter().flat_map(travelling).map(|operand| {
        let (width, element) = problem.row(operand, DeviceKind::Cuda);
        ArrayKind::Rows { width, element }
    }));
    kinds
}

/// Returns the sections of query rows, each with its own array of statistics. Where a strided range
/// of the layout starts at a row at which kernels can't start, each strided range is a section.
pub fn sections(problem: &Problem, rows: &Range<usize>) -> Vec<Range<usize>> {
    let all = problem.layout.strided_ranges(0, problem.world_size, problem.q_len);
    if all.iter().all(|range| range.rows.start.is_multiple_of(ALIGNED_ROWS)) {
        return vec![rows.clone()];
    }
    cut_by_layout(problem, problem.q_len, rows)
}

/// Cuts `rows` of a shard of `len` rows where a strided range of the layout ends.
pub fn cut_by_layout(problem: &Problem, len: usize, rows: &Range<usize>) -> Vec<Range<usize>> {
    let all = problem.layout.strided_ranges(0, problem.world_size, len);
    let parts = all.into_iter().map(|range| common(&range.rows, rows));
    parts.filter(|part| !part.is_empty()).collect()
}

fn common(one: &Range<usize>, other: &Range<usize>) -> Range<usize> {
    one.start.max(other.start)..one.end.min(other.end)
}

fn padded(rows: usize) -> usize {
    rows.next_multiple_of(ALIGNED_ROWS)
}

impl Buffer {
    /// Returns a buffer whose arrays lie one after the other from `address` on, and its end.
    pub fn at(
        problem: &Problem,
        (payload, place): (Payload, Place),
        pass: Pass,
        rows: Range<usize>,
        address: u64,
    ) -> (Buffer, u64) {
        let mut next = address;
        let mut allocate = |bytes: usize| {
            let start = next;
            next = (start + bytes as u64).next_multiple_of(ALIGNMENT);
            start
        };
        let Problem { batch, heads, .. } = *problem;
        let array = |kind| match kind {
            ArrayKind::Rows { width, element } => {
                let address = allocate(batch * rows.len() * width * element);
                Array::Rows { address, width, element }
            }
            ArrayKind::Statistics => {
                let section = |rows: Range<usize>| {
                    let address = allocate(batch * heads * padded(rows.len()) * 4);
                    Section { rows, address }
                };
                let sections = sections(problem, &rows).into_iter().map(section).collect();
                Array::Statistics { sections, heads }
            }
        };
        let arrays = kinds(problem, payload, pass).into_iter().map(array).collect();
        (Buffer { region: Region::of(payload, place), arrays, rows, batch }, next)
    }

    /// Returns a feature's array from row `rows.start` on, or `None` if the problem lacks it.
    pub fn of_feature(
        &self,
        features: &Features,
        operand: Operand,
        rows: &Range<usize>,
    ) -> Option<Rows> {
        Some(self.rows_at(operand.place_among(self.arrays.len(), features)?, rows))
    }

    /// Returns a buffer of the given arrays.
    pub fn of(problem: &Problem, payload: Payload, rows: Range<usize>, arrays: Vec<Array>) -> Self {
        Buffer { region: Region::Home(payload), arrays, rows, batch: problem.batch }
    }

    /// Returns array `index` from row `rows.start` on, as launches take it.
    pub fn rows_at(&self, index: usize, rows: &Range<usize>) -> Rows {
        let Array::Rows { address, width, element } = self.arrays[index] else {
            unreachable!("array {index} of {:?} has rows", self.region)
        };
        let offset = (rows.start.max(self.rows.start) - self.rows.start) * width * element;
        let batch_stride = (self.rows.len() * width) as u64;
        Rows { address: address + offset as u64, batch_stride }
    }

    /// Returns [`Buffer::rows_at`], or `None` if the buffer has no arrays.
    pub fn optional_rows_at(&self, index: usize, rows: &Range<usize>) -> Option<Rows> {
        (!self.arrays.is_empty()).then(|| self.rows_at(index, rows))
    }

    /// Returns [`Buffer::statistics_at`], or `None` if the buffer has no arrays.
    pub fn optional_statistics_at(&self, index: usize, rows: &Range<usize>) -> Option<Statistics> {
        (!self.arrays.is_empty()).then(|| self.statistics_at(index, rows))
    }

    /// Returns statistics `index` from row `rows.start` on. All of `rows` must lie in one section.
    pub fn statistics_at(&self, index: usize, rows: &Range<usize>) -> Statistics {
        let Array::Statistics { sections, heads } = &self.arrays[index] else {
            unreachable!("array {index} of {:?} has statistics", self.region)
        };
        let holds = |own: &Range<usize>| own.start <= rows.start && rows.end <= own.end;
        let section = sections.iter().find(|section| holds(&section.rows));
        let section = section
            .unwrap_or_else(|| unreachable!("{rows:?} of {:?} lie in one section", self.region));
        let head_stride = padded(section.rows.len()) as u64;
        Statistics {
            address: section.address + 4 * (rows.start - section.rows.start) as u64,
            batch_stride: *heads as u64 * head_stride,
            head_stride,
        }
    }

    /// Whether a computation may touch the buffer.
    pub fn is_touched_by(&self, computation: &Computation) -> bool {
        let blocks = self.blocks(&self.rows, true);
        let overlaps = |bytes: &Range<u64>| {
            blocks.iter().any(|block| bytes.start < block.end() && block.address < bytes.end)
        };
        computation.footprint().iter().any(|array| overlaps(&array.bytes))
    }

    /// Returns the memory of `rows` as blocks that travel as one message each. Both ends of a
    /// message agree on the number of blocks, since it depends only on the rows and on `whole`,
    /// whether they are the owner's whole shard. A whole shard is one block for each array; other
    /// rows are one block for each batch entry. Statistics are one block for each section, with its
    /// padding.
    pub fn blocks(&self, rows: &Range<usize>, whole: bool) -> Vec<Block> {
        let blocks = |index: usize| match &self.arrays[index] {
            Array::Rows { width, element, .. } => {
                let Rows { address, batch_stride } = self.rows_at(index, rows);
                let (row, stride) = ((width * element) as u64, batch_stride * *element as u64);
                let bytes = rows.len() as u64 * row;
                if whole {
                    return vec![Block::one_line(address, bytes * self.batch as u64)];
                }
                (0..self.batch as u64)
                    .map(|b| Block::one_line(address + b * stride, bytes))
                    .collect()
            }
            Array::Statistics { sections, heads } => {
                let parts = sections.iter().map(|section| common(&section.rows, rows));
                let block = |part: Range<usize>| {
                    let Statistics { address, head_stride, .. } = self.statistics_at(index, &part);
                    let height = (self.batch * heads) as u64;
                    let width = 4 * padded(part.len()) as u64;
                    Block { address, width, height, pitch: 4 * head_stride }
                };
                parts.filter(|part| !part.is_empty()).map(block).collect()
            }
        };
        (0..self.arrays.len()).flat_map(blocks).collect()
    }
}
