//! A chunk of consecutive tokens of one head: its decays, and the products it is made of.

use std::ops::Range;

use super::super::array::HostArray;
use super::super::matmul::{Depth, Product, SameDepth, Write};
use super::super::pack::Rows;
use super::super::simd::Simd;

/// Tokens of a chunk, a multiple of all vectors' lanes. Inside a chunk work grows with its square,
/// per chunk there is that of the state.
pub(super) const CHUNK: usize = 64;

/// What a chunk's log decays say. With b_t the sum of those since the chunk began, or since the last
/// reset in it, token a gets from token b of its run the part 2^(b_a − b_b): a difference, whose
/// terms are kept as two floats each, so that strong decays leave digits.
pub(super) struct Decays {
    /// Tokens.
    pub count: usize,
    high: [f32; CHUNK],
    low: [f32; CHUNK],
    /// Where the run of each token begins: at the last reset, or with the chunk.
    pub run: [usize; CHUNK],
    /// What is left at each token of the state before the chunk; 0 behind a reset.
    pub from_start: [f32; CHUNK],
    /// What is left of each token in the state after the chunk; 0 before a reset.
    pub to_end: [f32; CHUNK],
}

impl Decays {
    /// Of `rows` of one head; a log decay of −∞ is a reset before its token.
    ///
    /// # Safety
    /// The rows may be read.
    pub unsafe fn read(
        array: &HostArray,
        batch: usize,
        head: usize,
        rows: &Range<usize>,
    ) -> Decays {
        let zeros = [0.0; CHUNK];
        let mut decays = Decays {
            count: rows.len(),
            high: zeros,
            low: zeros,
            run: [0; CHUNK],
            from_start: zeros,
            to_end: zeros,
        };
        let (mut sums, mut sum, mut run) = ([0.0f64; CHUNK], 0.0f64, None);
        for (i, row) in rows.clone().enumerate() {
            // SAFETY: the caller vouches for the row.
            let log = unsafe { *array.row(batch, row, head).cast::<f32>() };
            if log == f32::NEG_INFINITY {
                (sum, run) = (0.0, Some(i));
            } else {
                sum += f64::from(log) * std::f64::consts::LOG2_E;
            }
            sums[i] = sum;
            decays.high[i] = sum as f32;
            decays.low[i] = (sum - f64::from(sum as f32)) as f32;
            decays.run[i] = run.unwrap_or(0);
            decays.from_start[i] = if run.is_none() { (sum as f32).exp2() } else { 0.0 };
        }
        let last = run.unwrap_or(0)..rows.len();
        for (to_end, at) in decays.to_end[last.clone()].iter_mut().zip(&sums[last]) {
            *to_end = ((sum - at) as f32).exp2();
        }
        decays
    }

    /// What is left of the state before the chunk in that after it.
    pub fn carry(&self) -> f32 {
        self.from_start[self.count - 1]
    }

    /// Multiplies products of tokens with tokens by what is left between them, 0 for later ones.
    ///
    /// # Safety
    /// Each holds `count` rows of [`CHUNK`] floats.
    #[inline(always)]
    pub unsafe fn weigh<S: Simd, const N: usize>(&self, simd: S, products: [*mut f32; N]) {
        for row in 0..self.count {
            let (high, low) = (simd.splat(self.high[row]), simd.splat(self.low[row]));
            for column in (0..self.count).step_by(S::LANES) {
                let (start, end) = (self.run[row].saturating_sub(column), row + 1);
                // SAFETY: the arrays have CHUNK floats, and so has each row.
                unsafe {
                    let high = simd.sub(high, simd.load(self.high.as_ptr().add(column)));
                    let low = simd.sub(low, simd.load(self.low.as_ptr().add(column)));
                    let left = simd.exp2(simd.add(high, low));
                    for product in products {
                        let at = product.add(row * CHUNK + column);
                        let x = simd.mul(simd.load(at), left);
                        let end = end.saturating_sub(column).min(S::LANES);
                        let start = start.min(S::LANES);
                        simd.store(at, simd.inside(start, end, x, simd.zero()));
                    }
                }
            }
        }
    }
}

/// A matrix in scratch: element (i, j) at `at + i·row + j·column`.
#[derive(Clone, Copy)]
pub(super) struct Left {
    pub at: *const f32,
    pub row: usize,
    pub column: usize,
}

impl Left {
    /// Rows of `width` floats.
    pub fn rows(at: *const f32, width: usize) -> Left {
        Left { at, row: width, column: 1 }
    }

    /// The same memory, transposed.
    pub fn transposed(at: *const f32, width: usize) -> Left {
        Left { at, row: 1, column: width }
    }
}

/// c = a b for `rows` of c, over `depth`; b has rows of `width` floats, c of `c_row`, and so many
/// columns as `columns`, a multiple of the lanes.
///
/// # Safety
/// All of it is scratch of this thread, and c overlaps neither side.
#[inline(always)]
pub(super) unsafe fn product<S: Simd>(
    simd: S,
    a: Left,
    (b, width): (*const f32, usize),
    (c, c_row): (*mut f32, usize),
    (rows, columns): (Range<usize>, usize),
    depth: Range<usize>,
    write: Write,
) {
    let depth: Depth<SameDepth> = Depth::All(depth);
    let Left { at: a, row: a_row, column: a_depth } = a;
    let vectors = columns / S::LANES;
    let product =
        Product { a, a_row, a_depth, b, b_depth: width, c, c_row, rows, vectors, depth, write };
    // SAFETY: passed on.
    unsafe { product.compute(simd) }
}

/// The same where each row needs its own part of the depth, with zeros in `a` outside of it.
///
/// # Safety
/// As [`product`].
#[inline(always)]
pub(super) unsafe fn triangle<S: Simd>(
    simd: S,
    a: Left,
    (b, width): (*const f32, usize),
    (c, c_row): (*mut f32, usize),
    (rows, columns): (usize, usize),
    range: impl Fn(usize) -> Range<usize>,
    factor: *const f32,
) {
    // SAFETY: the caller vouches for the memory of the right side.
    let exact = !unsafe { super::super::pack::all_finite(simd, b, rows * width) };
    let Left { at: a, row: a_row, column: a_depth } = a;
    let product = Product {
        a,
        a_row,
        a_depth,
        b,
        b_depth: width,
        c,
        c_row,
        rows: 0..rows,
        vectors: columns / S::LANES,
        depth: Depth::Rows { range, exact },
        write: Write::Rescale(factor),
    };
    // SAFETY: passed on.
    unsafe { product.compute(simd) }
}

/// Multiplies each row of `width` floats by its factor.
///
/// # Safety
/// `rows` holds a row for each factor.
#[inline(always)]
pub(super) unsafe fn scale_rows<S: Simd>(simd: S, rows: *mut f32, width: usize, factors: &[f32]) {
    for (row, factor) in factors.iter().enumerate() {
        let factor = simd.splat(*factor);
        for d in (0..width).step_by(S::LANES) {
            // SAFETY: the caller vouches for the memory; widths are multiples of the lanes.
            unsafe {
                let at = rows.add(row * width + d);
                simd.store(at, simd.mul(simd.load(at), factor));
            }
        }
    }
}

/// Rows of an array that belong to one head.
pub(super) fn rows_of<'a>(
    array: &'a HostArray,
    batch: usize,
    head: usize,
    rows: &Range<usize>,
) -> Rows<'a> {
    Rows { array, batch, head, rows: rows.clone() }
}

/// Writes rows of `width` floats to an array of any element type.
///
/// # Safety
/// This thread alone may write the rows; `source` holds all of them.
#[inline(always)]
pub(super) unsafe fn store<S: Simd>(simd: S, to: &Rows<'_>, source: *const f32, width: usize) {
    for (i, row) in to.rows.clone().enumerate() {
        let target = to.array.row(to.batch, row, to.head);
        let (dtype, dim) = (to.array.dtype, to.array.dim);
        // SAFETY: the caller vouches for both sides.
        unsafe {
            super::super::pack::store_row(simd, source.add(i * width), 1.0, target, dtype, dim);
        }
    }
}

/// The chunks of so many tokens.
pub(super) fn chunks(
    len: usize,
) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator {
    (0..len.div_ceil(CHUNK)).map(move |chunk| chunk * CHUNK..len.min((chunk + 1) * CHUNK))
}
