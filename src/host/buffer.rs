//! What travels between ranks of the host executor: views of a payload's arrays.

use std::ops::Range;

use super::array::HostArray;
use crate::problem::Problem;
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
        let Problem { heads, kv_heads, head_dim, value_dim, .. } = *problem;
        let shapes = match payload {
            Payload::Queries | Payload::Keys => unreachable!("inputs are not accumulated"),
            Payload::Partial => vec![(heads, value_dim), (heads, 1), (heads, 1)],
            Payload::QueryGrads => vec![(heads, head_dim)],
            Payload::KeyGrads => vec![(kv_heads, head_dim), (kv_heads, value_dim)],
        };
        let array = |(heads, dim)| HostArray::accumulator(problem.batch, rows.clone(), heads, dim);
        HostBuffer { arrays: shapes.into_iter().map(array).collect() }
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
