//! What travels between ranks of the host executor: views of a payload's arrays.

use std::ops::Range;

use std::ptr::NonNull;

use super::array::HostArray;
use crate::problem::{Dtype, Pass, Problem};
use crate::schedule::Payload;

/// The arrays of one payload, all with the same rows.
///
/// | payload | arrays |
/// |---|---|
/// | queries, forward | q, segments if there are |
/// | queries, backward | q, dout, lse, delta, segments if there are |
/// | keys | k, v, segments if there are |
/// | partial | acc, m, l |
/// | query gradients | dq |
/// | key gradients | dk, dv |
#[derive(Debug, Clone)]
pub struct HostBuffer {
    /// In the order of the table; empty if the payload needs no memory.
    pub arrays: Vec<HostArray>,
}

impl HostBuffer {
    /// New memory for an accumulator.
    pub fn accumulator(problem: &Problem, payload: Payload, rows: Range<usize>) -> HostBuffer {
        assert!(payload.is_accumulator(), "inputs are not accumulated");
        // What an accumulator consists of is the same in both passes.
        let items = items(problem, payload, Pass::Backward).into_iter();
        let array = |Item { heads, dim, .. }| {
            HostArray::accumulator(problem.batch, rows.clone(), heads, dim)
        };
        HostBuffer { arrays: items.map(array).collect() }
    }

    /// The same memory, restricted to `rows`.
    pub fn slice(&self, rows: &Range<usize>) -> HostBuffer {
        HostBuffer { arrays: self.arrays.iter().map(|array| array.slice(rows.clone())).collect() }
    }

    /// Bytes of data in `rows`.
    pub fn bytes(&self, rows: &Range<usize>) -> usize {
        self.arrays.iter().map(|array| array.bytes(rows)).sum()
    }

    /// A copy of `rows` in memory of its own, as a network would deliver it.
    pub fn copy(&self, rows: &Range<usize>) -> HostBuffer {
        HostBuffer { arrays: self.arrays.iter().map(|array| array.copy(rows.clone())).collect() }
    }
}

/// One array of a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Item {
    /// Length of the head axis.
    pub heads: usize,
    /// Length of the last axis.
    pub dim: usize,
    /// Element type.
    pub dtype: Dtype,
    /// Is it stored `[heads, rows, dim]`, so that a head's rows are adjacent, not
    /// `[rows, heads, dim]`?
    pub by_head: bool,
}

impl Item {
    /// Bytes of so many rows of one batch entry.
    pub fn bytes(&self, rows: usize) -> usize {
        rows * self.heads * self.dim * self.dtype.bytes()
    }

    /// The array at `first`, without gaps within a batch entry; the entries are `stride` bytes
    /// apart.
    pub fn view(
        &self,
        first: NonNull<u8>,
        (batch, rows): (usize, Range<usize>),
        stride: usize,
    ) -> HostArray {
        let Item { heads, dim, dtype, by_head } = *self;
        let (row_stride, head_stride) =
            if by_head { (dim, rows.len() * dim) } else { (heads * dim, dim) };
        HostArray {
            ptr: first,
            dtype,
            batch,
            rows,
            heads,
            dim,
            batch_stride: stride / dtype.bytes(),
            row_stride,
            head_stride,
            storage: None,
        }
    }
}

/// The arrays of a payload, in the order of the table of [`HostBuffer`].
pub fn items(problem: &Problem, payload: Payload, pass: Pass) -> Vec<Item> {
    let Problem { heads, kv_heads, head_dim, value_dim, dtype, .. } = *problem;
    let input = |heads, dim| Item { heads, dim, dtype, by_head: false };
    let per_row = |heads| Item { heads, dim: 1, dtype: Dtype::F32, by_head: false };
    let sums = |heads, dim| Item { heads, dim, dtype: Dtype::F32, by_head: true };
    let mut items = match (payload, pass) {
        (Payload::Queries, Pass::Forward) => vec![input(heads, head_dim)],
        (Payload::Queries, Pass::Backward) => {
            vec![input(heads, head_dim), input(heads, value_dim), per_row(heads), per_row(heads)]
        }
        (Payload::Keys, _) => vec![input(kv_heads, head_dim), input(kv_heads, value_dim)],
        (Payload::Partial, _) => vec![sums(heads, value_dim), sums(heads, 1), sums(heads, 1)],
        (Payload::QueryGrads, _) => vec![sums(heads, head_dim)],
        (Payload::KeyGrads, _) => vec![sums(kv_heads, head_dim), sums(kv_heads, value_dim)],
    };
    if problem.features.segments && !payload.is_accumulator() {
        items.push(per_row(1));
    }
    items
}

impl HostArray {
    /// A row-major copy of `rows` in memory of its own.
    fn copy(&self, rows: Range<usize>) -> HostArray {
        let bytes = self.dtype.bytes();
        let len = self.batch * rows.len() * self.heads * self.dim;
        let target = HostArray {
            dtype: self.dtype,
            dim: self.dim,
            batch_stride: rows.len() * self.heads * self.dim,
            row_stride: self.heads * self.dim,
            head_stride: self.dim,
            ..HostArray::accumulator(1, 0..(len * bytes).div_ceil(4), 1, 1)
        };
        let target =
            HostArray { batch: self.batch, rows: rows.clone(), heads: self.heads, ..target };
        for (batch, row, head) in self.indices(&rows) {
            // SAFETY: both rows lie inside their views and hold `dim` elements; the target is new.
            unsafe {
                let source = self.row(batch, row, head);
                source.copy_to_nonoverlapping(target.row(batch, row, head), self.dim * bytes);
            }
        }
        target
    }

    /// Overwrites all elements with NaN, so that use after release shows.
    pub fn poison(&self) {
        for (batch, row, head) in self.indices(&self.rows) {
            let row = self.row(batch, row, head);
            for byte in 0..self.dim * self.dtype.bytes() {
                // All bits set is NaN in every element type.
                // SAFETY: the row lies inside the view and holds `dim` elements.
                unsafe { row.add(byte).write(0xff) }
            }
        }
    }

    /// Overwrites all elements with zeros.
    pub fn clear(&self) {
        for (batch, row, head) in self.indices(&self.rows) {
            // SAFETY: the row lies inside the view and holds `dim` elements.
            unsafe {
                self.row(batch, row, head).write_bytes(0, self.dim * self.dtype.bytes());
            }
        }
    }

    fn indices(&self, rows: &Range<usize>) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
        let (rows, heads) = (rows.clone(), self.heads);
        (0..self.batch).flat_map(move |batch| {
            rows.clone().flat_map(move |row| (0..heads).map(move |head| (batch, row, head)))
        })
    }
}
