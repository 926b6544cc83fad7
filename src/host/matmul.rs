//! The matrix product that all attention products are made of.

use std::ops::Range;

use super::simd::{Simd, Task};

/// What a product does to the values in its destination.
#[derive(Clone, Copy)]
pub(super) enum Write {
    /// `c = a·b`
    Set,
    /// `c = c + a·b`
    Add,
    /// `c = c·factor[row] + a·b`
    Rescale(*const f32),
    /// `c = from·factor + a·b`, with `from` laid out as c; it may be c itself.
    Onto(*const f32, f32),
}

/// Which part of the depth of a product each row needs.
#[derive(Clone)]
pub(super) enum Depth<'a> {
    /// All rows the same.
    All(Range<usize>),
    /// Row `i` needs `range(i)`, whose start and end never fall as i grows. Outside it `a` may
    /// hold zeros or, with `exact`, whatever: then no row goes beyond its own range, so that
    /// 0 · NaN from a right side that is not finite can't reach it.
    Rows {
        /// The part of a row; not a type of its own, or there were a function for each caller.
        range: &'a dyn Fn(usize) -> Range<usize>,
        /// No row may go beyond its own part.
        exact: bool,
    },
}

/// Rows × depth times depth × (vectors of columns), by pointers and strides in elements.
#[derive(Clone)]
pub(super) struct Product<'a> {
    /// Left side: element (row, kk) at `a + row·a_row + kk·a_depth`.
    pub a: *const f32,
    pub a_row: usize,
    pub a_depth: usize,
    /// Right side: vector n of row kk at `b + kk·b_depth + n·LANES`.
    pub b: *const f32,
    pub b_depth: usize,
    /// Destination: vector n of a row at `c + row·c_row + n·LANES`.
    pub c: *mut f32,
    pub c_row: usize,
    pub rows: Range<usize>,
    pub vectors: usize,
    pub depth: Depth<'a>,
    pub write: Write,
}

impl Product<'_> {
    /// Computes the product, in a function of its own.
    ///
    /// # Safety
    /// All elements that the fields describe are readable, those of `c` writable, by this thread
    /// alone, and `c` overlaps neither side.
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
                // SAFETY: `compute` is the only caller, and its caller vouches for the memory.
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
    /// # Safety
    /// As [`Product::compute`].
    #[inline(always)]
    unsafe fn row_tile<S: Simd, const N: usize>(&self, simd: S, rows: Range<usize>, column: usize) {
        if N > S::TILE_VECTORS {
            return;
        }
        // SAFETY: the caller vouches for the memory.
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

    /// The register tile: `M` rows × `N` vectors.
    ///
    /// # Safety
    /// As [`Product::compute`].
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
        // SAFETY: the caller vouches for the memory.
        unsafe {
            let mut a = self.a.add(rows.start * self.a_row + depth.start * self.a_depth);
            let mut b = self.b.add(depth.start * self.b_depth + skip);
            for _ in depth {
                let mut right = [simd.zero(); N];
                for (n, right) in right.iter_mut().enumerate() {
                    *right = simd.load(b.add(n * S::LANES));
                }
                for (m, sums) in sums.iter_mut().enumerate() {
                    let left = simd.splat(*a.add(m * self.a_row));
                    for (sum, right) in sums.iter_mut().zip(right) {
                        *sum = simd.mul_add(left, right, *sum);
                    }
                }
                a = a.wrapping_add(self.a_depth);
                b = b.wrapping_add(self.b_depth);
            }
            // Two loops without a choice inside: with one, sums leave their registers.
            let first = rows.start * self.c_row + skip;
            let one = 1.0;
            let (old, factors, step) = match &self.write {
                Write::Set => {
                    for (m, sums) in sums.iter().enumerate() {
                        let c = self.c.add(first + m * self.c_row);
                        for (n, sum) in sums.iter().enumerate() {
                            simd.store(c.add(n * S::LANES), *sum);
                        }
                    }
                    return;
                }
                Write::Add => (self.c.cast_const(), &raw const one, 0),
                Write::Rescale(factors) => (self.c.cast_const(), factors.add(rows.start), 1),
                Write::Onto(from, factor) => (*from, &raw const *factor, 0),
            };
            for (m, sums) in sums.iter().enumerate() {
                let row = first + m * self.c_row;
                let factor = simd.splat(*factors.add(m * step));
                for (n, sum) in sums.iter().enumerate() {
                    let at = row + n * S::LANES;
                    simd.store(self.c.add(at), simd.mul_add(simd.load(old.add(at)), factor, *sum));
                }
            }
        }
    }
}

/// Cuts `0..len` into the fewest parts of at most `most`, as equal as can be.
#[inline(always)]
pub(super) fn even_parts(len: usize, most: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let parts = len.div_ceil(most);
    (0..parts).map(move |i| i * len / parts..(i + 1) * len / parts)
}
