//! The gradient of the slopes.

use std::ptr;

use super::BackwardTile;

/// The sums of every cell for the gradient of the slopes, so that they are added in a fixed order.
pub(super) struct SlopeSums {
    /// One for each cell of each query head of each batch entry; empty without slopes.
    sums: Vec<f64>,
    per_cell: usize,
}

impl SlopeSums {
    pub fn new(tile: &BackwardTile<'_>, cells: usize) -> SlopeSums {
        let per_cell = tile.q.batch * tile.q.heads;
        let wanted = if tile.extras.dslopes.is_some() { per_cell * cells * cells } else { 0 };
        SlopeSums { sums: vec![0.0; wanted], per_cell }
    }

    /// The sums as tasks write them. No task may write after the next use of `self`.
    pub fn shared(&mut self) -> Shared {
        let first = if self.sums.is_empty() { ptr::null_mut() } else { self.sums.as_mut_ptr() };
        Shared { first, per_cell: self.per_cell }
    }

    /// Adds all cells to the array.
    pub fn add(&self, tile: &BackwardTile<'_>) {
        let Some(dslopes) = tile.extras.dslopes else { return };
        for index in 0..self.per_cell {
            let sum: f64 = self.sums.iter().skip(index).step_by(self.per_cell).sum();
            let at = dslopes.row(index / tile.q.heads, 0, index % tile.q.heads).cast::<f32>();
            // SAFETY: the tile's gradients are the caller's to write.
            unsafe { *at += sum as f32 }
        }
    }
}

/// Memory of which each task uses its own part.
#[derive(Clone, Copy)]
pub(super) struct Shared {
    first: *mut f64,
    per_cell: usize,
}

// SAFETY: cells write the sums of their own heads, each cell and head once.
unsafe impl Send for Shared {}
// SAFETY: as for `Send`.
unsafe impl Sync for Shared {}

impl Shared {
    /// The sums of one cell; null without slopes.
    pub fn of_cell(&self, cell: usize) -> *mut f64 {
        if self.first.is_null() {
            return self.first;
        }
        self.first.wrapping_add(cell * self.per_cell)
    }
}
