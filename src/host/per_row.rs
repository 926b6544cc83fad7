//! Passes over rows of whole arrays: delta, sums of accumulators, and the cast to the output type.

use std::ops::Range;

use rayon::ThreadPool;
use rayon::prelude::*;

use super::array::HostArray;
use super::forward::{Outputs, SoftmaxState};
use super::isa::Isa;
use super::matmul::Matrix;
use super::pack;
use super::scratch::{InScratch, Scratch, ScratchTask};
use super::simd::{Simd, Task};

/// Rows of a task: enough work to be worth a task.
const BLOCK_ROWS: usize = 64;

/// Calls `work` with each batch entry and each block of its rows, in parallel.
fn each_block(
    pool: &ThreadPool,
    batch: usize,
    rows: &Range<usize>,
    work: impl Fn(usize, Range<usize>) + Sync,
) {
    let blocks = rows.len().div_ceil(BLOCK_ROWS);
    pool.install(|| {
        (0..batch * blocks).into_par_iter().for_each(|task| {
            let start = rows.start + task % blocks * BLOCK_ROWS;
            work(task / blocks, start..rows.end.min(start + BLOCK_ROWS));
        });
    });
}

/// Calls `work` with each batch entry, row and head, in parallel.
fn each_row(
    pool: &ThreadPool,
    array: &HostArray,
    rows: &Range<usize>,
    work: impl Fn(usize, usize, usize) + Sync,
) {
    each_block(pool, array.batch, rows, |batch, rows| {
        for row in rows {
            (0..array.heads).for_each(|head| work(batch, row, head));
        }
    });
}

/// Computes delta = rowsum(dout ∘ o) − dlse for all rows of `delta`.
///
/// The function adds up products in the order in which the backward tile computes dout vᵀ. So if
/// one key takes all of a row's weight, and o is its value, dout vᵀ − delta is exactly 0.
pub fn delta(
    isa: Isa,
    pool: &ThreadPool,
    o: &HostArray,
    dout: &HostArray,
    dlse: &HostArray,
    delta: &HostArray,
) {
    each_block(pool, o.batch, &delta.rows, |batch, rows| {
        isa.run(InScratch(Delta { o, dout, dlse, delta, batch, rows }));
    });
}

/// Delta of a block of rows.
struct Delta<'a> {
    o: &'a HostArray,
    dout: &'a HostArray,
    dlse: &'a HostArray,
    delta: &'a HostArray,
    batch: usize,
    rows: Range<usize>,
}

impl ScratchTask for Delta<'_> {
    /// Rows, then the columns of o, the columns of dout and the sums.
    type Parts = (Matrix, [*mut f32; 3]);

    fn lay_out<S: Simd>(&self, scratch: &mut Scratch) -> Self::Parts {
        let (dim, lanes) = (self.o.dim, self.rows.len().next_multiple_of(S::LANES));
        let packed = Matrix::take(scratch, (lanes, dim.next_multiple_of(S::LANES)));
        (packed, [dim * lanes, dim * lanes, lanes].map(|len| scratch.take(len)))
    }

    #[inline(always)]
    unsafe fn work<S: Simd>(
        &self,
        simd: S,
        (packed, [o_columns, dout_columns, sums]): Self::Parts,
    ) {
        let Delta { o, dout, dlse, delta, batch, ref rows } = *self;
        let (dim, len) = (o.dim, rows.len());
        for head in 0..o.heads {
            // SAFETY: the caller of `delta` guarantees that the arrays have these rows, and that
            // this call alone uses the rows of delta. This task alone writes its block. The
            // parts have room for its rows in lanes.
            unsafe {
                for (array, columns) in [(o, o_columns), (dout, dout_columns)] {
                    array.head_rows((batch, head), rows).pack(simd, packed);
                    pack::transpose(simd, packed, (len, dim), 1.0, columns);
                }
                for lanes in pack::panels::<S>(len) {
                    let across = lanes.len();
                    for first in (0..across).step_by(S::LANES) {
                        let mut sum = simd.zero();
                        for d in 0..dim {
                            let at = lanes.start * dim + d * across + first;
                            let (x, y) =
                                (simd.load(dout_columns.add(at)), simd.load(o_columns.add(at)));
                            sum = simd.mul_add(x, y, sum);
                        }
                        simd.store(sums.add(lanes.start + first), sum);
                    }
                }
                for (i, row) in rows.clone().enumerate() {
                    let dlse = *dlse.row(batch, row, head).cast::<f32>();
                    *delta.row(batch, row, head).cast::<f32>() = *sums.add(i) - dlse;
                }
            }
        }
    }
}

/// Fills `rows` of a float32 array with zeros.
pub fn clear(pool: &ThreadPool, array: &HostArray, rows: &Range<usize>) {
    each_row(pool, array, rows, |batch, row, head| {
        // SAFETY: the caller guarantees that the array has the row and that this call alone uses
        // it. This task alone writes it.
        unsafe { array.row(batch, row, head).cast::<f32>().write_bytes(0, array.dim) }
    });
}

/// Adds an accumulator that arrived to the one at home: home += arrived for `rows` of float32
/// arrays.
pub fn accumulate(pool: &ThreadPool, home: &HostArray, arrived: &HostArray, rows: &Range<usize>) {
    each_row(pool, home, rows, |batch, row, head| {
        let sum = home.row(batch, row, head).cast::<f32>();
        let term = arrived.row(batch, row, head).cast::<f32>();
        for d in 0..home.dim {
            // SAFETY: the caller guarantees that both arrays have the row and that this call alone
            // uses them. This task alone writes the row.
            unsafe { *sum.add(d) += *term.add(d) }
        }
    });
}

/// Adds a softmax state that arrived to the one at home:
///
/// ```text
/// m = max(m₁, m₂);  l = l₁·e^(m₁−m) + l₂·e^(m₂−m);  acc = acc₁·e^(m₁−m) + acc₂·e^(m₂−m)
/// with outputs: o = acc / l;  lse = m + ln l;  without any key o = 0 and lse = −∞
/// ```
pub fn combine_softmax(
    (isa, pool): (Isa, &ThreadPool),
    home: SoftmaxState<'_>,
    arrived: SoftmaxState<'_>,
    rows: &Range<usize>,
    out: Option<Outputs<'_>>,
) {
    each_row(pool, home.m, rows, |batch, row, head| {
        isa.run(CombineRow { home, arrived, out, at: (batch, row, head) });
    });
}

/// The softmax state of one query row of one head.
struct CombineRow<'a> {
    home: SoftmaxState<'a>,
    arrived: SoftmaxState<'a>,
    out: Option<Outputs<'a>>,
    at: (usize, usize, usize),
}

impl Task for CombineRow<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let CombineRow { home, arrived, out, at } = self;
        let row = |array: &HostArray| array.row(at.0, at.1, at.2).cast::<f32>();
        // SAFETY: the caller of `combine_softmax` guarantees that both states and the outputs have
        // the row, and that this call alone uses them. This task alone touches the row.
        unsafe {
            let (m1, m2) = (*row(home.m), *row(arrived.m));
            // This choice keeps a NaN of either side.
            let m = if m1.is_nan() || m1 > m2 { m1 } else { m2 };
            let weight = |m1: f32| if m1 == f32::NEG_INFINITY { 0.0 } else { (m1 - m).exp() };
            let (w1, w2) = (weight(m1), weight(m2));
            let l = *row(home.l) * w1 + *row(arrived.l) * w2;
            let (sum, term) = (row(home.acc), row(arrived.acc));
            for d in 0..home.acc.dim {
                *sum.add(d) = *sum.add(d) * w1 + *term.add(d) * w2;
            }
            *row(home.m) = m;
            *row(home.l) = l;
            if let Some(out) = out {
                out.write(simd, at, sum, (m, l));
            }
        }
    }
}

/// Rounds all rows of a float32 array to the type of `target`, ties to even.
pub fn cast(isa: Isa, pool: &ThreadPool, source: &HostArray, target: &HostArray) {
    each_block(pool, source.batch, &source.rows, |batch, rows| {
        isa.run(Cast { source, target, batch, rows });
    });
}

/// The cast of a block of rows.
struct Cast<'a> {
    source: &'a HostArray,
    target: &'a HostArray,
    batch: usize,
    rows: Range<usize>,
}

impl Task for Cast<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Cast { source, target, batch, rows } = self;
        for row in rows {
            for head in 0..source.heads {
                let from = source.row(batch, row, head).cast::<f32>();
                let to = target.row(batch, row, head);
                // SAFETY: the caller of `cast` guarantees that both arrays have the row, and that
                // this call alone uses the target. This task alone writes the row.
                unsafe { pack::store_row(simd, from, 1.0, to, target.dtype, source.dim) }
            }
        }
    }
}
