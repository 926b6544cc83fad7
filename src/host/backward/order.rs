//! In which order the cells of a square are computed by many threads.

use std::sync::atomic::{AtomicU8, Ordering};

use rayon::Scope;

/// A cell of one of several squares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Position {
    pub square: usize,
    pub column: usize,
    pub row: usize,
    /// (row − column) mod side: how many cells of its column, and of its row, come before it.
    pub wave: usize,
}

/// Calls `work` for every cell of `squares` squares of `side` × `side`, in parallel, but in each
/// column and in each row for one cell at a time, wave after wave. A cell starts as soon as the
/// two before it are done.
pub(super) fn each_cell(squares: usize, side: usize, work: impl Fn(Position) + Sync) {
    let arrivals = (0..squares * side * side).map(|_| AtomicU8::new(0)).collect::<Vec<_>>();
    let walk = Walk { side, arrivals, work };
    rayon::scope(|scope| {
        for square in 0..squares {
            for column in 0..side {
                walk.spawn(scope, Position { square, column, row: column, wave: 0 });
            }
        }
    });
}

struct Walk<F> {
    side: usize,
    /// Per cell, how many of the two before it are done.
    arrivals: Vec<AtomicU8>,
    work: F,
}

impl<F: Fn(Position) + Sync> Walk<F> {
    fn spawn<'scope>(&'scope self, scope: &Scope<'scope>, at: Position) {
        scope.spawn(move |scope| {
            (self.work)(at);
            let Position { square, column, row, wave } = at;
            if wave + 1 == self.side {
                return;
            }
            let next = wave + 1;
            let below = Position { row: (row + 1) % self.side, wave: next, ..at };
            let beside =
                Position { column: (column + self.side - 1) % self.side, wave: next, ..at };
            for after in [below, beside] {
                let index = (square * self.side + after.column) * self.side + after.row;
                // The second to arrive has to see all that the first has written.
                if self.arrivals[index].fetch_add(1, Ordering::AcqRel) == 1 {
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
                let waves = |of: fn(&Position) -> usize| {
                    let of_line = |at: &&Position| at.square * side + of(at) == line;
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
