//! The order in which many threads compute the cells of squares.

use std::sync::atomic::{AtomicU8, Ordering};

use rayon::Scope;

/// A cell of one of several squares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CellPlace {
    pub square: usize,
    pub column: usize,
    pub row: usize,
    /// (row − column) mod side: the number of cells of its column that come before it, and of its
    /// row.
    pub wave: usize,
}

/// Calls `work` in parallel for every cell of `squares` squares of `side` × `side`. In each column
/// and in each row, one cell is computed at a time, wave after wave. A cell starts once the cell
/// before it in its column and the cell before it in its row are done.
pub(super) fn each_cell(squares: usize, side: usize, work: impl Fn(CellPlace) + Sync) {
    let done_before = (0..squares * side * side).map(|_| AtomicU8::new(0)).collect::<Vec<_>>();
    let cells = Cells { side, done_before, work };
    rayon::scope(|scope| {
        for square in 0..squares {
            for column in 0..side {
                cells.spawn(scope, CellPlace { square, column, row: column, wave: 0 });
            }
        }
    });
}

/// The cells that are being computed.
struct Cells<F> {
    side: usize,
    /// For each cell, the number of cells right before it that are done: 0, 1 or 2.
    done_before: Vec<AtomicU8>,
    work: F,
}

impl<F: Fn(CellPlace) + Sync> Cells<F> {
    /// Starts a cell. Once it is done, it starts the cells after it that wait for no other cell.
    fn spawn<'scope>(&'scope self, scope: &Scope<'scope>, at: CellPlace) {
        scope.spawn(move |scope| {
            (self.work)(at);
            let CellPlace { square, column, row, wave } = at;
            if wave + 1 == self.side {
                return;
            }
            let next = wave + 1;
            let next_row = CellPlace { row: (row + 1) % self.side, wave: next, ..at };
            let next_column =
                CellPlace { column: (column + self.side - 1) % self.side, wave: next, ..at };
            for after in [next_row, next_column] {
                let index = (square * self.side + after.column) * self.side + after.row;
                // The second cell to finish has to see all that the first has written.
                if self.done_before[index].fetch_add(1, Ordering::AcqRel) == 1 {
                    self.spawn(scope, after);
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn columns_and_rows_see_their_cells_in_the_order_of_waves() {
        for side in [1, 2, 3, 5] {
            let seen = Mutex::new(Vec::new());
            each_cell(2, side, |at| seen.lock().unwrap().push(at));
            let seen = seen.into_inner().unwrap();
            assert_eq!(seen.len(), 2 * side * side);
            for line in 0..2 * side {
                let waves = |of: fn(&CellPlace) -> usize| {
                    let of_line = |at: &&CellPlace| at.square * side + of(at) == line;
                    seen.iter().filter(of_line).map(|at| at.wave).collect::<Vec<_>>()
                };
                let ascending: Vec<_> = (0..side).collect();
                assert_eq!(waves(|at| at.column), ascending, "column {line} of {side}");
                assert_eq!(waves(|at| at.row), ascending, "row {line} of {side}");
            }
            assert!(seen.iter().all(|at| (at.column + at.wave) % side == at.row));
        }
    }
}
