//! What a lane of 32 bits holds of two factors: a float32, or two bfloat16.

use super::element::whole_loads;
use super::tile::Seen;
use super::{DecodeIo, MANY};
use crate::host::simd::{Simd, Task};
use crate::problem::Dtype;

/// The factors of products over many rows.
pub(super) trait Lane {
    /// Elements of a lane. A lane of a query or a key has neighbours of a row. A lane of a value has
    /// elements of one column, of as many keys.
    const ELEMENTS: usize;

    /// Runs `task` as [`Simd::vectorize`] does, in a function that may use [`Lane::add`].
    ///
    /// # Safety
    /// The caller has made sure that the CPU has these products.
    unsafe fn vectorize<S: Simd, T: Task>(simd: S, task: T);

    /// Returns `a · b + c`: the products of all elements of a lane are added.
    ///
    /// # Safety
    /// The caller has made sure that the CPU has these products.
    unsafe fn add<S: Simd>(simd: S, a: S::Vector, b: S::Vector, c: S::Vector) -> S::Vector;

    /// Returns `x` with 0 in place of each element whose bit in `seen` is 0. The places of
    /// elements in the result depend on `seen` alone.
    fn keep<S: Simd>(simd: S, seen: Seen, x: S::Vector) -> S::Vector;
}

/// One float32.
pub(super) struct Float;
/// Two bfloat16.
pub(super) struct Pair;

impl Lane for Float {
    const ELEMENTS: usize = 1;

    #[inline(always)]
    unsafe fn vectorize<S: Simd, T: Task>(simd: S, task: T) {
        simd.vectorize(task);
    }

    #[inline(always)]
    unsafe fn add<S: Simd>(simd: S, a: S::Vector, b: S::Vector, c: S::Vector) -> S::Vector {
        simd.mul_add(a, b, c)
    }

    #[inline(always)]
    fn keep<S: Simd>(_simd: S, _seen: Seen, x: S::Vector) -> S::Vector {
        x
    }
}

impl Lane for Pair {
    const ELEMENTS: usize = 2;

    #[inline(always)]
    unsafe fn vectorize<S: Simd, T: Task>(simd: S, task: T) {
        // SAFETY: the caller has made sure of pairs.
        unsafe { simd.vectorize_pairs(task) }
    }

    #[inline(always)]
    unsafe fn add<S: Simd>(simd: S, a: S::Vector, b: S::Vector, c: S::Vector) -> S::Vector {
        // SAFETY: the caller has made sure of pairs.
        unsafe { simd.add_pairs(a, b, c) }
    }

    #[inline(always)]
    fn keep<S: Simd>(simd: S, seen: Seen, x: S::Vector) -> S::Vector {
        match seen {
            0b01 => simd.low_bf16(x),
            0b10 => simd.high_bf16(x),
            _ => x,
        }
    }
}

/// Whether a call's products are those of pairs. The shapes of its arrays decide it, so that the bits
/// of a query's result do not depend on other queries.
#[inline(always)]
pub(super) fn in_pairs<S: Simd>(simd: S, io: &DecodeIo<'_>) -> bool {
    let whole = io.k.dtype == Dtype::Bf16 && whole_loads(io, S::LANES);
    io.group() >= MANY && whole && simd.has_pairs()
}
