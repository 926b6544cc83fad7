//! The matrix product that all products of attention are made of.

use std::ops::Range;

use super::scratch::Scratch;
use super::simd::{Simd, Task};

/// Rows of floats in scratch memory.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub at: *mut f32,
    /// Floats from one row to the next.
    pub row: usize,
}

impl Matrix {
    /// Takes scratch for a number of rows of a number of floats.
    pub fn take(scratch: &mut Scratch, (rows, row): (usize, usize)) -> Matrix {
        Matrix { at: scratch.take(rows * row), row }
    }

    /// Returns the matrix from a row on.
    pub fn skip(self, rows: usize) -> Matrix {
        Matrix { at: self.at.wrapping_add(rows * self.row), ..self }
    }

    /// Fills rows with zeros.
    ///
    /// # Safety
    /// The caller guarantees that the matrix has these rows and is this thread's.
    #[inline(always)]
    pub unsafe fn clear(self, rows: usize) {
        // SAFETY: the caller guarantees the rows.
        unsafe { self.at.write_bytes(0, rows * self.row) }
    }

    /// Returns the matrix from a column on, with rows as far apart.
    pub fn skip_columns(self, columns: usize) -> Matrix {
        Matrix { at: self.at.wrapping_add(columns), ..self }
    }

    /// Returns the matrix as the left side of a product.
    pub fn left(self) -> Left {
        Left { at: self.at, row_stride: self.row, depth_stride: 1 }
    }

    /// Returns the transposed matrix as the left side of a product.
    pub fn transposed(self) -> Left {
        Left { at: self.at, row_stride: 1, depth_stride: self.row }
    }
}

/// The left side of a product, with element (i, k) at `at + i·row_stride + k·depth_stride`.
#[derive(Clone, Copy)]
pub(super) struct Left {
    at: *const f32,
    row_stride: usize,
    depth_stride: usize,
}

/// How a product changes the values in its destination.
#[derive(Clone, Copy)]
pub(super) enum Write {
    /// `c = a·b`
    Set,
    /// `c = c + a·b`
    Add,
    /// `c = c·factor[row] + a·b`
    Rescale(*const f32),
    /// `c = from·factor[row] + a·b`. `from` is laid out as c, and may be c itself.
    Onto(*const f32, *const f32),
}

/// The part of the depth that each row of a product needs.
#[derive(Clone)]
pub(super) enum Depth<'a> {
    /// All rows need the same part.
    All(Range<usize>),
    /// Row `i` needs `range(i)`, whose start and end never fall as i grows. Outside of that range
    /// row i of `a` holds zeros, or anything if `exact`. With `exact` no row goes beyond its own
    /// range, so a right side that is not finite cannot reach the row as 0 · NaN.
    Rows {
        /// The part of a row. A generic type would compile the product once for each caller.
        range: &'a dyn Fn(usize) -> Range<usize>,
        /// Whether no row may go beyond its own part.
        exact: bool,
    },
}

/// A product c = a·b of rows × depth and depth × columns.
#[derive(Clone)]
pub(super) struct Product<'a> {
    pub a: Left,
    pub b: Matrix,
    pub c: Matrix,
    /// Rows of a and c.
    pub rows: Range<usize>,
    /// Columns of b and c, in vectors.
    pub vectors: usize,
    pub depth: Depth<'a>,
    pub write: Write,
}

impl Product<'_> {
    /// Computes the product, in a function of its own.
    ///
    /// # Safety
    /// The caller guarantees that all elements that the fields describe are readable, that the
    /// elements of `c` are this thread's, and that `c` overlaps neither side.
    #[inline(always)]
    pub unsafe fn compute<S: Simd>(self, simd: S) {
        simd.vectorize(self);
    }
}

impl Task for Product<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for columns in even_parts(self.vectors, S::TILE_VECTORS) {
            let tile_rows = match self.depth {
                Depth::Rows { exact: true, .. } => 1,
                _ => S::TILE_ROWS,
            };
            for part in even_parts(self.rows.len(), tile_rows) {
                let rows = self.rows.start + part.start..self.rows.start + part.end;
                // SAFETY: `compute` is the only caller, and its caller guarantees the memory of all
                // three matrices.
                unsafe {
                    match columns.len() {
                        1 => self.row_tile::<S, 1>(simd, rows, columns.start),
                        2 => self.row_tile::<S, 2>(simd, rows, columns.start),
                        3 => self.row_tile::<S, 3>(simd, rows, columns.start),
                        _ => self.row_tile::<S, 4>(simd, rows, columns.start),
                    }
                }
            }
        }
    }
}

impl Product<'_> {
    /// Computes a register tile of a number of rows that is known at run time.
    ///
    /// # Safety
    /// The caller guarantees what [`Product::compute`] asks for.
    #[inline(always)]
    unsafe fn row_tile<S: Simd, const N: usize>(&self, simd: S, rows: Range<usize>, column: usize) {
        if N > S::TILE_VECTORS {
            return;
        }
        // SAFETY: the caller guarantees the memory of all three matrices.
        unsafe {
            match rows.len() {
                1 => self.tile::<S, 1, N>(simd, rows, column),
                2 => self.tile::<S, 2, N>(simd, rows, column),
                3 => self.tile::<S, 3, N>(simd, rows, column),
                4 => self.tile::<S, 4, N>(simd, rows, column),
                5 => self.tile::<S, 5, N>(simd, rows, column),
                _ => self.tile::<S, 6, N>(simd, rows, column),
            }
        }
    }

    /// Computes a register tile of `M` rows × `N` vectors.
    ///
    /// # Safety
    /// The caller guarantees what [`Product::compute`] asks for.
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize, const N: usize>(
        &self,
        simd: S,
        rows: Range<usize>,
        column: usize,
    ) {
        if M > S::TILE_ROWS {
            return;
        }
        let depth = match &self.depth {
            Depth::All(all) => all.clone(),
            Depth::Rows { range, .. } => range(rows.start).start..range(rows.end - 1).end,
        };
        let skip = column * S::LANES;
        let mut sums = [[simd.zero(); N]; M];
        // SAFETY: the caller guarantees the memory of all three matrices.
        unsafe {
            let Left { at, row_stride, depth_stride } = self.a;
            let mut a = at.add(rows.start * row_stride + depth.start * depth_stride);
            let mut b = self.b.at.add(depth.start * self.b.row + skip);
            for _ in depth {
                let mut right = [simd.zero(); N];
                for (n, right) in right.iter_mut().enumerate() {
                    *right = simd.load(b.add(n * S::LANES));
                }
                for (m, sums) in sums.iter_mut().enumerate() {
                    let left = simd.splat(*a.add(m * row_stride));
                    for (sum, right) in sums.iter_mut().zip(right) {
                        *sum = simd.mul_add(left, right, *sum);
                    }
                }
                a = a.wrapping_add(depth_stride);
                b = b.wrapping_add(self.b.row);
            }
            // Neither of the two loops has a branch inside, since a branch would force the sums out
            // of their registers.
            let first = rows.start * self.c.row + skip;
            let one = 1.0;
            let (old, factors, step) = match &self.write {
                Write::Set => {
                    for (m, sums) in sums.iter().enumerate() {
                        let c = self.c.at.add(first + m * self.c.row);
                        for (n, sum) in sums.iter().enumerate() {
                            simd.store(c.add(n * S::LANES), *sum);
                        }
                    }
                    return;
                }
                Write::Add => (self.c.at.cast_const(), &raw const one, 0),
                Write::Rescale(factors) => (self.c.at.cast_const(), factors.add(rows.start), 1),
                Write::Onto(from, factors) => (*from, factors.add(rows.start), 1),
            };
            for (m, sums) in sums.iter().enumerate() {
                let row = first + m * self.c.row;
                let factor = simd.splat(*factors.add(m * step));
                for (n, sum) in sums.iter().enumerate() {
                    let at = row + n * S::LANES;
                    simd.store(
                        self.c.at.add(at),
                        simd.mul_add(simd.load(old.add(at)), factor, *sum),
                    );
                }
            }
        }
    }
}

/// Cuts `0..len` into the fewest parts of at most `most`, as equal as possible.
#[inline(always)]
pub(super) fn even_parts(len: usize, most: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let parts = len.div_ceil(most);
    (0..parts).map(move |i| i * len / parts..(i + 1) * len / parts)
}
