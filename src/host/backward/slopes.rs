//! Sums for the gradient of the slopes.

use std::sync::atomic::{AtomicU64, Ordering};

use super::BackwardTile;
use crate::operands::Operand;

/// A sum for each cell and head. [`SlopeSums::add_to`] adds the sums of all cells in a fixed order.
pub(super) struct SlopeSums {
    /// The bits of a float64 for each cell, batch entry and query head; empty without slopes.
    sums: Vec<AtomicU64>,
    /// Number of sums of a cell.
    per_cell: usize,
}

impl SlopeSums {
    /// Returns sums of zero for the cells of a tile.
    pub fn new(tile: &BackwardTile<'_>, cells: usize) -> SlopeSums {
        let per_cell = tile.inputs.q.batch * tile.inputs.q.heads;
        let is_wanted = tile.inputs.features.array(Operand::SlopeGrad).is_some();
        let count = if is_wanted { per_cell * cells * cells } else { 0 };
        SlopeSums { sums: (0..count).map(|_| AtomicU64::new(0)).collect(), per_cell }
    }

    /// Returns the sums of one cell; none without slopes.
    pub fn of_cell(&self, cell: usize) -> &[AtomicU64] {
        self.sums.get(cell * self.per_cell..(cell + 1) * self.per_cell).unwrap_or_default()
    }

    /// Adds the sums of all cells to the gradient.
    pub fn add_to(&self, tile: &BackwardTile<'_>) {
        let Some(dslopes) = tile.inputs.features.array(Operand::SlopeGrad) else { return };
        let heads = tile.inputs.q.heads;
        for index in 0..self.per_cell {
            let of_cells = self.sums.iter().skip(index).step_by(self.per_cell);
            let sum: f64 = of_cells.map(|sum| f64::from_bits(sum.load(Ordering::Relaxed))).sum();
            let at = dslopes.row(index / heads, 0, index % heads).cast::<f32>();
            // SAFETY: the caller of `backward` guarantees that this call alone uses the gradients.
            unsafe { *at += sum as f32 }
        }
    }
}

/// Subtracts from a sum that no other thread uses at the time.
pub(super) fn subtract(sum: &AtomicU64, term: f64) {
    let difference = f64::from_bits(sum.load(Ordering::Relaxed)) - term;
    sum.store(difference.to_bits(), Ordering::Relaxed);
}
