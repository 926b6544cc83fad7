//! Passes over whole arrays: delta, sums of accumulators, and the cast to the output type.

use std::ops::Range;

use rayon::prelude::*;

use super::array::HostArray;
use super::isa::Isa;
use super::pack;
use super::simd::{Simd, Task};
use crate::problem::Dtype;

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
        let Delta { o, dout, dlse, delta, batch, rows } = self;
        for row in rows {
            for head in 0..o.heads {
                let sides = [o, dout].map(|array| (array.row(batch, row, head), array.dtype));
                // SAFETY: the arrays have this row, and this task alone writes it.
                unsafe {
                    let dlse = *dlse.row(batch, row, head).cast::<f32>();
                    let sum = dot(simd, sides, o.dim);
                    *delta.row(batch, row, head).cast::<f32>() = sum - dlse;
                }
            }
        }
    }
}

/// Σ a·b over `dim` elements of any type.
///
/// # Safety
/// They are readable.
#[inline(always)]
unsafe fn dot<S: Simd>(simd: S, sides: [(*mut u8, Dtype); 2], dim: usize) -> f32 {
    let whole = dim - dim % S::LANES;
    let mut sums = simd.zero();
    let mut lanes = [0.0f32; 16];
    // SAFETY: the caller vouches for the elements; no vector has more than 16 lanes.
    unsafe {
        for d in (0..whole).step_by(S::LANES) {
            let [a, b] =
                sides.map(|(row, dtype)| pack::load(simd, row.add(d * dtype.bytes()), dtype));
            sums = simd.mul_add(a, b, sums);
        }
        simd.store(lanes.as_mut_ptr(), sums);
        let mut sum = lanes.iter().sum();
        for d in whole..dim {
            let [a, b] =
                sides.map(|(row, dtype)| pack::load_one(row.add(d * dtype.bytes()), dtype));
            sum += a * b;
        }
        sum
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
pub fn cast(pool: &rayon::ThreadPool, source: &HostArray, target: &HostArray) {
    let isa = Isa::best();
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
