//! The arrays of a payload, as ranks on CPU devices hold and exchange them.

use std::ops::Range;

use super::array::HostArray;
use crate::operands::{DeviceKind, Operand};
use crate::problem::{Features, Problem};
use crate::schedule::Payload;

/// The arrays of one payload, all with the same rows.
///
/// | payload | arrays |
/// |---|---|
/// | queries, forward | q, then [`Operand::travelling`] |
/// | queries, backward | q, dout, lse, delta, then [`Operand::travelling`] |
/// | keys | k, v, then [`Operand::travelling`] |
/// | softmax state | acc, m, l |
/// | query gradients | dq |
/// | key gradients | dk, dv |
#[derive(Debug, Clone)]
pub struct HostBuffer {
    /// Arrays in the order of the table; empty if the payload needs no memory.
    pub arrays: Vec<HostArray>,
}

impl HostBuffer {
    /// Allocates an accumulator.
    pub fn accumulator(problem: &Problem, payload: Payload, rows: Range<usize>) -> HostBuffer {
        let Problem { heads, kv_heads, value_dim, .. } = *problem;
        let sums = |heads| {
            let widths = payload.gradients(&problem.features);
            let columns = |operand| problem.row(operand, DeviceKind::Host).0 / heads;
            widths.map(|operand| (heads, columns(operand))).collect()
        };
        let shapes: Vec<_> = match payload {
            Payload::Queries | Payload::Keys => unreachable!("inputs are no accumulators"),
            Payload::Partial => vec![(heads, value_dim), (heads, 1), (heads, 1)],
            Payload::QueryGrads => sums(heads),
            Payload::KeyGrads => sums(kv_heads),
        };
        let array = |(heads, dim)| HostArray::accumulator(problem.batch, rows.clone(), heads, dim);
        HostBuffer { arrays: shapes.into_iter().map(array).collect() }
    }

    /// Returns the array of a feature that travels with these rows, if the problem has the feature.
    pub(super) fn of_feature(&self, features: &Features, operand: Operand) -> Option<&HostArray> {
        Some(&self.arrays[operand.place_among(self.arrays.len(), features)?])
    }

    /// Returns views of `rows` alone.
    pub fn slice(&self, rows: &Range<usize>) -> HostBuffer {
        HostBuffer { arrays: self.arrays.iter().map(|array| array.slice(rows.clone())).collect() }
    }

    /// Returns the bytes of data in `rows`.
    pub fn bytes(&self, rows: &Range<usize>) -> usize {
        self.arrays.iter().map(|array| array.bytes(rows)).sum()
    }
}
