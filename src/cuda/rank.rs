//! One rank's memory: XLA's arrays and the workspace.

use std::ops::Range;

use burst_attention_kernels::launch::Rows;

use super::buffer::{Array, Buffer};
use super::region::Region;
use super::workspace::{WorkspaceLayout, statistics};
use crate::operands::{Arrays, DeviceKind, Operand, Side};
use crate::problem::{Pass, Problem};
use crate::schedule::{Payload, Place};

/// The memory of one rank.
#[derive(Debug, Clone, Copy)]
pub struct RankMemory<'a> {
    /// The problem.
    pub problem: &'a Problem,
    /// The addresses of inputs and outputs in XLA's layout: row-major, without gaps.
    pub arrays: Arrays<u64>,
    /// The address of the workspace.
    pub base: u64,
    /// The parts of the workspace.
    pub workspace: &'a WorkspaceLayout,
}

impl RankMemory<'_> {
    /// Returns the number of heads of a payload and of the rank's own rows of it.
    pub fn heads_and_rows(&self, payload: Payload) -> (usize, usize) {
        let Problem { q_len, kv_len, heads, kv_heads, .. } = *self.problem;
        match payload {
            Payload::Keys | Payload::KeyGrads => (kv_heads, kv_len),
            Payload::Queries | Payload::Partial | Payload::QueryGrads => (heads, q_len),
        }
    }

    /// Returns the buffer of the rank's own rows of a payload. An accumulator has no arrays if each
    /// tile computes its rows completely, so that no state has to be kept.
    pub fn home(&self, payload: Payload) -> Buffer {
        match payload {
            Payload::Queries => self.queries(),
            Payload::Keys => self.keys(),
            _ => {
                let rows = 0..self.heads_and_rows(payload).1;
                let state = self.in_workspace(payload, Place::Home, rows);
                state.unwrap_or_else(|| self.of(payload, vec![]))
            }
        }
    }

    /// Returns the buffer for `rows` in a slot, or `None` if the workspace has no such slot.
    pub fn slot(&self, payload: Payload, slot: usize, rows: &Range<usize>) -> Option<Buffer> {
        self.in_workspace(payload, Place::Slot(slot), rows.clone())
    }

    fn in_workspace(&self, payload: Payload, place: Place, rows: Range<usize>) -> Option<Buffer> {
        let address = self.workspace.at(Region::of(payload, place), self.base)?;
        let pass = self.arrays.pass;
        Some(Buffer::at(self.problem, (payload, place), pass, rows, address).0)
    }

    /// Returns the address of the memory for masks; 0 if the workspace has none.
    pub fn masks(&self) -> u64 {
        self.workspace.at(Region::Masks, self.base).unwrap_or(0)
    }

    /// Returns the memory in which a launch keeps the segment ranges of `rows` resident rows.
    pub fn segment_ranges(&self, rows: usize) -> Rows {
        Rows { address: self.masks(), batch_stride: 4 * rows.div_ceil(64) as u64 }
    }

    /// Returns the buffer of an operand: the rank's own rows.
    pub fn operand(&self, operand: Operand) -> Buffer {
        let payload =
            if operand.side() == Some(Side::Keys) { Payload::Keys } else { Payload::Queries };
        self.of(payload, vec![self.array(operand)])
    }

    fn of(&self, payload: Payload, arrays: Vec<Array>) -> Buffer {
        Buffer::of(self.problem, payload, 0..self.heads_and_rows(payload).1, arrays)
    }

    fn array(&self, operand: Operand) -> Array {
        let (width, element) = self.problem.row(operand, DeviceKind::Cuda);
        Array::Rows { address: self.arrays[operand], width, element }
    }

    /// Returns the arrays of features that travel with the rows of a side.
    fn travelling(&self, side: Side) -> impl Iterator<Item = Array> {
        let operands = Operand::travelling(&self.problem.features, side);
        operands.map(|operand| self.array(operand))
    }

    fn queries(&self) -> Buffer {
        let mut arrays = vec![self.array(Operand::Query)];
        if self.arrays.pass == Pass::Backward {
            let at = self.workspace.at(Region::Home(Payload::Queries), self.base).unwrap_or(0);
            arrays.push(self.array(Operand::OutGrad));
            arrays.extend(statistics(self.problem, 0..self.problem.q_len, at).0);
        }
        arrays.extend(self.travelling(Side::Queries));
        self.of(Payload::Queries, arrays)
    }

    fn keys(&self) -> Buffer {
        let arrays = [self.array(Operand::Key), self.array(Operand::Value)];
        self.of(Payload::Keys, arrays.into_iter().chain(self.travelling(Side::Keys)).collect())
    }
}
