//! Where the arrays of a payload lie in a device's memory.
//!
//! | payload | arrays |
//! |---|---|
//! | queries, forward | q, segments if there are |
//! | queries, backward | q, dout, the statistics lse in base 2 and delta, segments if there are |
//! | keys | k, v, segments if there are |
//! | partial | acc, and the statistics m and l |
//! | query gradients | dq |
//! | key gradients | dk, dv |
//!
//! Rows are `[batch, rows, heads, head_dim]`, segments int32 `[batch, rows]`, statistics float32 `[batch, heads, rows]`; both hold
//! exactly the rows of their buffer, without gaps.

use std::ops::Range;

use burst_attention_kernels::launch::{Rows, Statistics};

use super::driver::Block;
use super::tape::Queue;
use crate::problem::{Pass, Problem};
use crate::schedule::{Payload, QUERY_GRAIN};

/// Kernels want a row of statistics to start at a multiple of 16 bytes, and schedules cut queries
/// accordingly.
const ALIGNED_ROWS: usize = QUERY_GRAIN;
/// Arrays start at multiples of this.
pub const ALIGNMENT: u64 = 256;

/// A part of one rank's memory, as far as the order of operations is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Region {
    /// The rank's own rows of a payload: inputs, outputs, accumulators.
    Home(Payload),
    /// A buffer for what travels.
    Slot(Payload, usize),
    /// Where what a queue sends is put together.
    Staging(Queue),
    /// Where a launch finds out which rows the segments of others let them see.
    SegmentRanges,
}

/// One array of a buffer.
#[derive(Debug, Clone, PartialEq)]
pub enum Array {
    /// `[batch, rows, heads, head_dim]`, or `[batch, rows]`.
    Rows {
        /// Of the first element.
        address: u64,
        /// Elements of a row: heads · head_dim, or 1.
        width: usize,
        /// Bytes of an element.
        element: usize,
    },
    /// Float32 `[batch, heads, rows]` for each run of rows.
    Statistics {
        /// Runs of rows, in order.
        runs: Vec<Run>,
        /// Heads.
        heads: usize,
    },
}

/// Statistics of a run of rows, `[batch, heads, rows]`, rows padded to a multiple of four.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    rows: Range<usize>,
    address: u64,
}

/// The memory behind a payload.
#[derive(Debug, Clone, PartialEq)]
pub struct Buffer {
    /// For the order of operations.
    pub region: Region,
    /// Whose array it is, in the order of the table above.
    pub arrays: Vec<Array>,
    /// Rows of the owner that it holds.
    pub rows: Range<usize>,
    batch: usize,
}

/// What an array of a payload is.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Rows { width: usize, element: usize },
    Statistics,
}

fn kinds(problem: &Problem, payload: Payload, pass: Pass) -> Vec<Kind> {
    let Problem { heads, kv_heads, head_dim, value_dim, .. } = *problem;
    let input = |width| Kind::Rows { width, element: problem.dtype.bytes() };
    let sums = |width| Kind::Rows { width, element: 4 };
    let (q, o) = (heads * head_dim, heads * value_dim);
    let (k, v) = (kv_heads * head_dim, kv_heads * value_dim);
    let mut kinds = match (payload, pass) {
        (Payload::Queries, Pass::Forward) => vec![input(q)],
        (Payload::Queries, Pass::Backward) => {
            vec![input(q), input(o), Kind::Statistics, Kind::Statistics]
        }
        (Payload::Keys, _) => vec![input(k), input(v)],
        (Payload::Partial, _) => vec![sums(o), Kind::Statistics, Kind::Statistics],
        (Payload::QueryGrads, _) => vec![sums(q)],
        (Payload::KeyGrads, _) => vec![sums(k), sums(v)],
    };
    if problem.features.segments && !payload.is_accumulator() {
        kinds.push(Kind::Rows { width: 1, element: 4 });
    }
    kinds
}

/// Runs of query rows whose statistics can be one array: where a piece of the layout starts at a
/// row that kernels can't start at, each piece is an array of its own.
pub fn runs(problem: &Problem, rows: &Range<usize>) -> Vec<Range<usize>> {
    let all = problem.layout.pieces(0, problem.world_size, problem.q_len);
    if all.iter().all(|piece| piece.rows.start.is_multiple_of(ALIGNED_ROWS)) {
        return vec![rows.clone()];
    }
    pieces(problem, problem.q_len, rows)
}

/// `rows` cut where a piece of the layout ends, of a shard of `len` rows.
pub fn pieces(problem: &Problem, len: usize, rows: &Range<usize>) -> Vec<Range<usize>> {
    let cut = |piece: Range<usize>| piece.start.max(rows.start)..piece.end.min(rows.end);
    let all = problem.layout.pieces(0, problem.world_size, len);
    all.into_iter().map(|piece| cut(piece.rows)).filter(|run| !run.is_empty()).collect()
}

fn padded(rows: usize) -> usize {
    rows.next_multiple_of(ALIGNED_ROWS)
}

/// Bytes that a buffer for `rows` of a payload takes.
pub fn bytes(problem: &Problem, payload: Payload, pass: Pass, rows: &Range<usize>) -> u64 {
    let buffer = Buffer::at(problem, Region::Home(payload), pass, rows.clone(), 0);
    buffer.map_or(0, |(_, end)| end)
}

impl Buffer {
    /// A buffer whose arrays lie one after the other from `address` on, and where they end; none
    /// for a region that holds no payload.
    pub fn at(
        problem: &Problem,
        region: Region,
        pass: Pass,
        rows: Range<usize>,
        address: u64,
    ) -> Option<(Buffer, u64)> {
        let (Region::Home(payload) | Region::Slot(payload, _)) = region else { return None };
        let mut next = address;
        let mut place = |bytes: usize| {
            let start = next;
            next = (start + bytes as u64).next_multiple_of(ALIGNMENT);
            start
        };
        let batch = problem.batch;
        let array = |kind| match kind {
            Kind::Rows { width, element } => {
                let address = place(batch * rows.len() * width * element);
                Array::Rows { address, width, element }
            }
            Kind::Statistics => {
                let heads = problem.heads;
                let run = |rows: Range<usize>| {
                    let address = place(batch * heads * padded(rows.len()) * 4);
                    Run { rows, address }
                };
                let runs = runs(problem, &rows).into_iter().map(run).collect();
                Array::Statistics { runs, heads }
            }
        };
        let arrays = kinds(problem, payload, pass).into_iter().map(array).collect();
        Some((Buffer { region, arrays, rows, batch }, next))
    }

    /// A buffer of given arrays.
    pub fn of(problem: &Problem, payload: Payload, rows: Range<usize>, arrays: Vec<Array>) -> Self {
        Buffer { region: Region::Home(payload), arrays, rows, batch: problem.batch }
    }

    /// Array `index` from row `rows.start` on, as launches take it.
    pub fn rows_at(&self, index: usize, rows: &Range<usize>) -> Rows {
        let Array::Rows { address, width, element } = self.arrays[index] else {
            unreachable!("array {index} of {:?} has rows", self.region)
        };
        let offset = (rows.start.max(self.rows.start) - self.rows.start) * width * element;
        let batch_stride = (self.rows.len() * width) as u64;
        Rows { address: address + offset as u64, batch_stride }
    }

    /// As [`Buffer::rows_at`], if the buffer has any arrays.
    pub fn given_rows_at(&self, index: usize, rows: &Range<usize>) -> Option<Rows> {
        (!self.arrays.is_empty()).then(|| self.rows_at(index, rows))
    }

    /// As [`Buffer::statistics_at`], if the buffer has any arrays.
    pub fn given_statistics_at(&self, index: usize, rows: &Range<usize>) -> Option<Statistics> {
        (!self.arrays.is_empty()).then(|| self.statistics_at(index, rows))
    }

    /// Statistics `index` from row `rows.start` on, which with all of `rows` lies in one run.
    pub fn statistics_at(&self, index: usize, rows: &Range<usize>) -> Statistics {
        let Array::Statistics { runs, heads } = &self.arrays[index] else {
            unreachable!("array {index} of {:?} has statistics", self.region)
        };
        let run = runs.iter().find(|run| run.rows.start <= rows.start && rows.end <= run.rows.end);
        let run = run.unwrap_or_else(|| {
            unreachable!("{rows:?} of {:?} lie in one run of rows", self.region)
        });
        let head_stride = padded(run.rows.len()) as u64;
        Statistics {
            address: run.address + 4 * (rows.start - run.rows.start) as u64,
            batch_stride: *heads as u64 * head_stride,
            head_stride,
        }
    }

    /// The memory of `rows` in pieces that travel as one message each. How many there are depends
    /// on the rows and the owner's shard alone (`whole` if it is all of it), so that both ends of
    /// a message agree: rows of the batch entries one by one unless they are the whole shard,
    /// statistics run by run with their padding.
    pub fn blocks(&self, rows: &Range<usize>, whole: bool) -> Vec<Block> {
        let blocks = |index: usize| match &self.arrays[index] {
            Array::Rows { width, element, .. } => {
                let Rows { address, batch_stride } = self.rows_at(index, rows);
                let (row, stride) = ((width * element) as u64, batch_stride * *element as u64);
                let bytes = rows.len() as u64 * row;
                if whole {
                    return vec![Block::run(address, bytes * self.batch as u64)];
                }
                (0..self.batch as u64).map(|b| Block::run(address + b * stride, bytes)).collect()
            }
            Array::Statistics { runs, heads } => {
                let cut = |run: &Run| run.rows.start.max(rows.start)..run.rows.end.min(rows.end);
                let parts = runs.iter().map(cut).filter(|part| !part.is_empty());
                let block = |part: Range<usize>| {
                    let Statistics { address, head_stride, .. } = self.statistics_at(index, &part);
                    let height = (self.batch * heads) as u64;
                    let width = 4 * padded(part.len()) as u64;
                    Block { address, width, height, pitch: 4 * head_stride }
                };
                parts.map(block).collect()
            }
        };
        (0..self.arrays.len()).flat_map(blocks).collect()
    }
}
