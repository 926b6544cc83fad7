//! Passes over whole arrays: delta, sums of accumulators, and the cast to the output type.

use std::ops::Range;

use rayon::prelude::*;

use super::array::HostArray;
use super::isa::Isa;
use super::pack::{self, Rows, Scratch};
use super::simd::{Simd, Task};

/// Rows per task: enough to be worth one.
const BLOCK_ROWS: usize = 64;

/// Calls `work` with each batch entry and with blocks of its rows, in parallel.
fn each_block(
    pool: &rayon::ThreadPool,
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

/// delta = rowsum(dout ∘ o) − dlse for all rows of `delta`.
///
/// The products are added up in the order in which the backward tile adds up those of dout vᵀ. So
/// where one key takes all of a row's weight, and o is its value, dout vᵀ − delta is exactly 0.
pub fn delta(
    isa: Isa,
    pool: &rayon::ThreadPool,
    o: &HostArray,
    dout: &HostArray,
    dlse: &HostArray,
    delta: &HostArray,
) {
    each_block(pool, o.batch, &delta.rows, |batch, rows| {
        isa.run(Delta { o, dout, dlse, delta, batch, rows });
    });
}

struct Delta<'a> {
    o: &'a HostArray,
    dout: &'a HostArray,
    dlse: &'a HostArray,
    delta: &'a HostArray,
    batch: usize,
    rows: Range<usize>,
}

impl Task for Delta<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (dim, lanes) = (self.o.dim, self.rows.len().next_multiple_of(S::LANES));
        let sizes = [dim.next_multiple_of(S::LANES) * lanes, dim * lanes, dim * lanes, lanes];
        let total = sizes.iter().map(|len| Scratch::footprint(*len)).sum();
        Scratch::with(total, |mut scratch| {
            let scratch = sizes.map(|len| scratch.take(len));
            for head in 0..self.o.heads {
                simd.vectorize(DeltaOfHead { all: &self, head, scratch });
            }
        });
    }
}

/// Delta of the rows of one head, with the rows in lanes.
struct DeltaOfHead<'a> {
    all: &'a Delta<'a>,
    head: usize,
    /// Room for rows, for the columns of o and of dout, and for the sums.
    scratch: [*mut f32; 4],
}

impl Task for DeltaOfHead<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let DeltaOfHead { all, head, scratch: [packed, o_columns, dout_columns, sums] } = self;
        let Delta { o, dout, dlse, delta, batch, ref rows } = *all;
        let (dim, len) = (o.dim, rows.len());
        let width = dim.next_multiple_of(S::LANES);
        // SAFETY: the arrays have these rows, this task alone writes those of delta, and `Delta`
        // took the scratch from this thread's.
        unsafe {
            for (array, columns) in [(o, o_columns), (dout, dout_columns)] {
                Rows { array, batch, head, rows: rows.clone() }.pack(simd, packed, width);
                pack::transpose(simd, packed, width, len, dim, 1.0, columns);
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

/// target += arrived for `rows` of float32 arrays.
pub fn merge(
    pool: &rayon::ThreadPool,
    target: &HostArray,
    arrived: &HostArray,
    rows: &Range<usize>,
) {
    each_block(pool, target.batch, rows, |batch, rows| {
        for row in rows {
            for head in 0..target.heads {
                let sum = target.row(batch, row, head).cast::<f32>();
                let term = arrived.row(batch, row, head).cast::<f32>();
                for d in 0..target.dim {
                    // SAFETY: both arrays have this row, and this task alone writes it.
                    unsafe { *sum.add(d) += *term.add(d) }
                }
            }
        }
    });
}

/// Copies all rows to an array with the same rows and element type.
pub fn copy(pool: &rayon::ThreadPool, source: &HostArray, target: &HostArray) {
    let adjacent = |array: &HostArray| array.head_stride == array.dim;
    let (heads, run) = if adjacent(source) && adjacent(target) {
        (1, source.heads * source.dim)
    } else {
        (source.heads, source.dim)
    };
    let bytes = run * source.dtype.bytes();
    each_block(pool, source.batch, &source.rows, |batch, rows| {
        for row in rows {
            for head in 0..heads {
                let from = source.row(batch, row, head);
                // SAFETY: both arrays have this row, in memory of their own, and this task alone
                // writes it.
                unsafe { from.copy_to_nonoverlapping(target.row(batch, row, head), bytes) }
            }
        }
    });
}

/// Rounds all rows of a float32 array to the type of `target`, ties to even.
pub fn cast(isa: Isa, pool: &rayon::ThreadPool, source: &HostArray, target: &HostArray) {
    each_block(pool, source.batch, &source.rows, |batch, rows| {
        isa.run(Cast { source, target, batch, rows });
    });
}

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
                // SAFETY: both arrays have this row, and this task alone writes it.
                unsafe { pack::store_row(simd, from, 1.0, to, target.dtype, source.dim) }
            }
        }
    }
}
