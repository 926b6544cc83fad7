//! Vectors of float32 lanes: one trait, with one implementation per instruction set.
//!
//! A value of an implementing type proves that the CPU has the instructions. So arithmetic is safe,
//! and only memory access is unsafe. Everything is inlined into [`Simd::vectorize`], the one place
//! where the compiler may use the instructions.

use std::f32::consts::{LN_2, LOG2_E};

#[macro_use]
mod operations;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::Avx512;
pub(super) use portable::Portable;

/// Code that is generic over the instruction set.
pub(super) trait Task {
    /// Does the work. An implementation is `#[inline(always)]`, and so is every function that it
    /// calls with `simd`; else the compiler would not use the instructions there.
    fn run<S: Simd>(self, simd: S);
}

/// Operations on vectors of `LANES` float32 values.
pub(super) trait Simd: Copy {
    /// Number of values in a vector, at most 16.
    const LANES: usize;
    /// Number of rows of the register tile of a matrix product.
    const TILE_ROWS: usize;
    /// Number of vectors in a row of the register tile of a matrix product, at most 4.
    const TILE_VECTORS: usize;
    /// A vector.
    type Vector: Copy;

    /// Runs `task` as a function of its own that may use the instructions.
    fn vectorize<T: Task>(self, task: T);

    /// Whether the CPU has [`Simd::add_pairs`].
    #[inline(always)]
    fn has_pairs(self) -> bool {
        false
    }
    /// Runs `task` as [`Simd::vectorize`] does, in a function that may use [`Simd::add_pairs`].
    ///
    /// # Safety
    /// The caller has made sure that the CPU has pairs ([`Simd::has_pairs`]).
    unsafe fn vectorize_pairs<T: Task>(self, task: T) {
        self.vectorize(task);
    }
    /// Returns `a · b + c`, where each lane of a and b has two bfloat16, and the products of both are
    /// added. Denormal elements count as 0.
    ///
    /// # Safety
    /// The caller has made sure that the CPU has pairs ([`Simd::has_pairs`]).
    #[inline(always)]
    unsafe fn add_pairs(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
        _ = (a, b, c);
        unreachable!("the caller asks Simd::has_pairs first")
    }

    /// Returns a vector with `x` in all lanes.
    fn splat(self, x: f32) -> Self::Vector;
    /// Returns `a + b`.
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Returns `a − b`.
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Returns `a · b`.
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Returns `a · b + c`, rounded once where the CPU has such an instruction.
    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// Returns the larger of `a` and `b`, or `b` where either is NaN.
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Returns the smaller of `a` and `b`, or `b` where either is NaN.
    fn min(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Returns `a / b`.
    fn div(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Returns the nearest integers.
    fn round(self, x: Self::Vector) -> Self::Vector;
    /// Returns `x · 2ⁿ` for integral `n` and x in [½, 2]. A result may be 0 instead of denormal.
    fn scale(self, x: Self::Vector, n: Self::Vector) -> Self::Vector;
    /// Returns `x` in lanes `start ≤ lane < end`, and `other` elsewhere.
    fn inside(self, start: usize, end: usize, x: Self::Vector, other: Self::Vector)
    -> Self::Vector;

    /// Returns `x` in lanes where `a` and `b` have the same bits, and `other` elsewhere.
    fn where_same_bits(
        self,
        a: Self::Vector,
        b: Self::Vector,
        x: Self::Vector,
        other: Self::Vector,
    ) -> Self::Vector;

    /// Returns `x` in lanes where the bits of `a`, as signed integers, are less than those of `b`,
    /// and `other` elsewhere.
    fn where_less(
        self,
        a: Self::Vector,
        b: Self::Vector,
        x: Self::Vector,
        other: Self::Vector,
    ) -> Self::Vector;

    /// Returns the bfloat16 in the low half of each lane.
    fn low_bf16(self, x: Self::Vector) -> Self::Vector;
    /// Returns the bfloat16 in the high half of each lane.
    fn high_bf16(self, x: Self::Vector) -> Self::Vector;
    /// Returns the low halves of the lanes of `a`, with those of `b` above them.
    fn low_halves(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Returns the high halves of the lanes of `b`, with those of `a` below them.
    fn high_halves(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Returns, in all four lanes of each quad of lanes, the largest of the four, none of which may be
    /// NaN.
    fn max_of_quads(self, x: Self::Vector) -> Self::Vector;
    /// Returns the sum of the lanes of each of the first `LANES` vectors.
    fn sum_each(self, x: [Self::Vector; 16]) -> Self::Vector;

    /// Reads a vector.
    ///
    /// # Safety
    /// The caller guarantees that `LANES` values at `ptr` are readable; they need no alignment.
    unsafe fn load(self, ptr: *const f32) -> Self::Vector;
    /// Writes a vector.
    ///
    /// # Safety
    /// The caller guarantees that `LANES` values at `ptr` are writable; they need no alignment.
    unsafe fn store(self, ptr: *mut f32, x: Self::Vector);
    /// Reads bfloat16 values.
    ///
    /// # Safety
    /// The caller guarantees that `LANES` values at `ptr` are readable; they need no alignment.
    unsafe fn load_bf16(self, ptr: *const u16) -> Self::Vector;
    /// Reads binary16 values.
    ///
    /// # Safety
    /// The caller guarantees that `LANES` values at `ptr` are readable; they need no alignment.
    unsafe fn load_f16(self, ptr: *const u16) -> Self::Vector;
    /// Rounds to bfloat16, ties to even, NaN to NaN.
    ///
    /// # Safety
    /// The caller guarantees that `LANES` values at `ptr` are writable; they need no alignment.
    unsafe fn store_bf16(self, ptr: *mut u16, x: Self::Vector);
    /// Rounds to binary16, ties to even, NaN to NaN.
    ///
    /// # Safety
    /// The caller guarantees that `LANES` values at `ptr` are writable; they need no alignment.
    unsafe fn store_f16(self, ptr: *mut u16, x: Self::Vector);

    /// Writes the columns of a square of `LANES` rows as rows. `from_row` and `to_row` are the
    /// numbers of floats between rows.
    ///
    /// # Safety
    /// The caller guarantees that both squares are memory of this thread and do not overlap.
    unsafe fn transpose(self, from: *const f32, from_row: usize, to: *mut f32, to_row: usize);
    /// Writes a vector past the caches. [`Simd::fence`] must follow before another thread reads it.
    ///
    /// # Safety
    /// The caller guarantees that `LANES` values at `ptr` are writable, and that `ptr` is a
    /// multiple of the vector's bytes.
    unsafe fn stream(self, ptr: *mut f32, x: Self::Vector);
    /// Waits until all streamed vectors are in memory.
    fn fence(self);
    /// Asks the CPU for the cache line at an address, and does nothing if there is no memory.
    fn prefetch(self, at: *const u8);
    /// Asks for the cache line as [`Simd::prefetch`] does, but not for the cache next to the core.
    fn prefetch_far(self, at: *const u8);

    /// Returns a vector with 0 in all lanes.
    #[inline(always)]
    fn zero(self) -> Self::Vector {
        self.splat(0.0)
    }

    /// Returns 2ˣ with a relative error below 1.2e-7, 0 below about −126, and NaN for NaN.
    ///
    /// 2ˣ = 2ⁿ · 2ʳ, where n is the nearest integer. The polynomial for 2ʳ is the minimax
    /// polynomial for the relative error on [−½, ½] that is exact at 0.
    #[inline(always)]
    fn exp2(self, x: Self::Vector) -> Self::Vector {
        // −∞ − n would be NaN. This order of operands keeps NaN.
        let x = self.max(self.splat(-200.0), x);
        let n = self.round(x);
        let r = self.sub(x, n);
        let p = self.mul_add(self.exp2_polynomial(r), r, self.splat(1.0));
        self.scale(p, n)
    }

    /// Returns eˣ for x up to 10⁶, 0 below about −87, and NaN for NaN. The relative error is below
    /// 1.3e-7 for x ≥ −15, and below 3.5e-7 for smaller x.
    ///
    /// eˣ = 2ⁿ · eʳ, where n is the integer nearest to x / ln 2. The polynomial for eʳ is
    /// [`Simd::exp2_polynomial`], in r / ln 2.
    #[inline(always)]
    fn exp(self, x: Self::Vector) -> Self::Vector {
        const COEFFICIENTS: [f32; 6] =
            [1.3843654e-3, 8.3741555e-3, 4.1668e-2, 1.666643e-1, 4.9999994e-1, 1.0];
        // Adding 1.5·2²³ leaves no bits for a fraction: one operation fewer than rounding a
        // product.
        const MAGIC: f32 = 12_582_912.0;
        // −∞ − n would be NaN. This order of operands keeps NaN.
        let x = self.max(self.splat(-140.0), x);
        let shifted = self.mul_add(x, self.splat(LOG2_E), self.splat(MAGIC));
        let n = self.sub(shifted, self.splat(MAGIC));
        let r = self.exp_remainder(x, n);
        let p = self.horner(r, &COEFFICIENTS);
        self.scale(self.mul_add(p, r, self.splat(1.0)), n)
    }

    /// Returns x − n · ln 2 with hardly any rounding.
    #[inline(always)]
    fn exp_remainder(self, x: Self::Vector, n: Self::Vector) -> Self::Vector {
        self.mul_add(n, self.splat(-LN_2), x)
    }

    /// Returns (2ʳ − 1) / r for r in [−½, ½].
    #[inline(always)]
    fn exp2_polynomial(self, r: Self::Vector) -> Self::Vector {
        const COEFFICIENTS: [f32; 6] =
            [1.5353362e-4, 1.3398875e-3, 9.618437e-3, 5.5503324e-2, 2.4022648e-1, 6.931472e-1];
        self.horner(r, &COEFFICIENTS)
    }

    /// Returns a polynomial of `r`. The coefficient of the highest power comes first.
    #[inline(always)]
    fn horner(self, r: Self::Vector, coefficients: &[f32; 6]) -> Self::Vector {
        let mut p = self.splat(coefficients[0]);
        for c in &coefficients[1..] {
            p = self.mul_add(p, r, self.splat(*c));
        }
        p
    }

    /// Returns tanh z and 1 − tanh² z from the x for which e^(2z) = 2ˣ, and NaN for NaN. Both have
    /// a relative error below 6e-7, however small z is. The slope stays above 0 where it would
    /// underflow.
    ///
    /// With e = 2ˣ and e − 1 = 2ⁿ·(2ʳ − 1) + (2ⁿ − 1), which loses no digits near 0:
    ///
    /// ```text
    /// tanh z = (e − 1) / (e + 1);  1 − tanh² z = 4 e / (e + 1)²
    /// ```
    #[inline(always)]
    fn tanh(self, x: Self::Vector) -> (Self::Vector, Self::Vector) {
        // The limits lie far beyond where tanh rounds to ±1. This order of operands keeps NaN.
        let x = self.min(self.splat(120.0), self.max(self.splat(-120.0), x));
        let (n, two) = (self.round(x), self.splat(2.0));
        let r = self.sub(x, n);
        let less = self.mul(self.exp2_polynomial(r), r);
        let power = self.scale(self.splat(1.0), n);
        let e = self.mul_add(power, less, power);
        let less = self.mul_add(power, less, self.sub(power, self.splat(1.0)));
        let more = self.add(less, two);
        let half = self.div(two, more);
        // In this order nothing overflows, since half · e is at most 2.
        (self.div(less, more), self.mul(half, self.mul(half, e)))
    }
}

#[cfg(test)]
mod tests;
