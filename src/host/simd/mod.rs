//! Vectors of float32 lanes: one trait, one implementation per instruction set.
//!
//! A value of an implementing type is the proof that the CPU has the instructions, so arithmetic
//! is safe and only memory access is not. Everything is inlined into [`Simd::vectorize`], the one
//! place where the compiler may use the instructions.

use std::f32::consts::{LN_2, LOG2_E};

#[cfg(target_arch = "x86_64")]
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
    /// Does the work. Implementations are `#[inline(always)]`, as are all functions they call
    /// with `simd`, or else they are compiled without the instructions.
    fn run<S: Simd>(self, simd: S);
}

/// Operations on vectors of `LANES` float32 values.
pub(super) trait Simd: Copy {
    /// Values in a vector.
    const LANES: usize;
    /// Rows of the register tile of a matrix product.
    const TILE_ROWS: usize;
    /// Vectors across the register tile of a matrix product, at most 4.
    const TILE_VECTORS: usize;
    /// A vector.
    type Vector: Copy;

    /// Runs `task` as a function of its own that may use the instructions.
    fn vectorize<T: Task>(self, task: T);

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::Vector;
    /// `a + b`
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a − b`
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a · b`
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a · b + c`, rounded once where the CPU can.
    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// The larger of both; `b` where either is NaN.
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// The smaller of both; `b` where either is NaN.
    fn min(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a / b`
    fn div(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// The nearest integers.
    fn round(self, x: Self::Vector) -> Self::Vector;
    /// `x · 2ⁿ` for integral `n` and x in [½, 2]; 0 instead of denormal results is allowed.
    fn scale(self, x: Self::Vector, n: Self::Vector) -> Self::Vector;
    /// `x` in lanes `start ≤ lane < end`, `other` elsewhere.
    fn inside(self, start: usize, end: usize, x: Self::Vector, other: Self::Vector)
    -> Self::Vector;

    /// `x` in lanes where the bits of `a` and `b` are the same, `other` elsewhere.
    fn where_same_bits(
        self,
        a: Self::Vector,
        b: Self::Vector,
        x: Self::Vector,
        other: Self::Vector,
    ) -> Self::Vector;

    /// Reads a vector.
    ///
    /// # Safety
    /// `LANES` values at `ptr` are readable; no alignment is needed. So for all loads.
    unsafe fn load(self, ptr: *const f32) -> Self::Vector;
    /// Writes a vector.
    ///
    /// # Safety
    /// `LANES` values at `ptr` are writable; no alignment is needed. So for all stores.
    unsafe fn store(self, ptr: *mut f32, x: Self::Vector);
    /// Reads bfloat16 values.
    ///
    /// # Safety
    /// As [`Simd::load`].
    unsafe fn load_bf16(self, ptr: *const u16) -> Self::Vector;
    /// Reads binary16 values.
    ///
    /// # Safety
    /// As [`Simd::load`].
    unsafe fn load_f16(self, ptr: *const u16) -> Self::Vector;
    /// Rounds to bfloat16, ties to even, NaN to NaN.
    ///
    /// # Safety
    /// As [`Simd::store`].
    unsafe fn store_bf16(self, ptr: *mut u16, x: Self::Vector);
    /// Rounds to binary16, ties to even, NaN to NaN.
    ///
    /// # Safety
    /// As [`Simd::store`].
    unsafe fn store_f16(self, ptr: *mut u16, x: Self::Vector);

    /// Writes the columns of a square of `LANES` rows as rows; `from_row` and `to_row` are the floats
    /// between rows.
    ///
    /// # Safety
    /// Both squares lie in memory of this thread and do not overlap.
    unsafe fn transpose(self, from: *const f32, from_row: usize, to: *mut f32, to_row: usize);
    /// Writes a vector past the caches; [`Simd::fence`] comes before another thread reads it.
    ///
    /// # Safety
    /// As [`Simd::store`], and `ptr` is a multiple of the vector's bytes.
    unsafe fn stream(self, ptr: *mut f32, x: Self::Vector);
    /// Waits until all that was streamed is in memory.
    fn fence(self);
    /// Asks for the cache line at any address; nothing happens where there is no memory.
    fn prefetch(self, at: *const u8);

    /// All lanes 0.
    #[inline(always)]
    fn zero(self) -> Self::Vector {
        self.splat(0.0)
    }

    /// 2ˣ with a relative error below 1.2e-7; 0 below −126 or so, NaN for NaN.
    ///
    /// 2ˣ = 2ⁿ · 2ʳ with n the nearest integer and a polynomial for 2ʳ, the minimax one for the
    /// relative error on [−½, ½] that is exact at 0.
    #[inline(always)]
    fn exp2(self, x: Self::Vector) -> Self::Vector {
        // −∞ − n would be NaN; the operand order keeps NaN.
        let x = self.max(self.splat(-200.0), x);
        let n = self.round(x);
        let r = self.sub(x, n);
        let p = self.mul_add(self.exp2_polynomial(r), r, self.splat(1.0));
        self.scale(p, n)
    }

    /// eˣ with a relative error below 1.3e-7 from −15 on, 3.5e-7 below; 0 below −87 or so, NaN for
    /// NaN. x is at most 10⁶.
    ///
    /// eˣ = 2ⁿ · eʳ with n the integer nearest to x / ln 2, and the polynomial of
    /// [`Simd::exp2_polynomial`] in r / ln 2.
    #[inline(always)]
    fn exp(self, x: Self::Vector) -> Self::Vector {
        const COEFFICIENTS: [f32; 6] =
            [1.3843654e-3, 8.3741555e-3, 4.1668e-2, 1.666643e-1, 4.9999994e-1, 1.0];
        // Adding 1.5·2²³ leaves no bits for a fraction: one operation fewer than rounding a product.
        const MAGIC: f32 = 12_582_912.0;
        // −∞ − n would be NaN; the operand order keeps NaN.
        let x = self.max(self.splat(-140.0), x);
        let shifted = self.mul_add(x, self.splat(LOG2_E), self.splat(MAGIC));
        let n = self.sub(shifted, self.splat(MAGIC));
        let r = self.exp_remainder(x, n);
        let mut p = self.splat(COEFFICIENTS[0]);
        for c in &COEFFICIENTS[1..] {
            p = self.mul_add(p, r, self.splat(*c));
        }
        self.scale(self.mul_add(p, r, self.splat(1.0)), n)
    }

    /// x − n · ln 2, hardly rounded.
    #[inline(always)]
    fn exp_remainder(self, x: Self::Vector, n: Self::Vector) -> Self::Vector {
        self.mul_add(n, self.splat(-LN_2), x)
    }

    /// (2ʳ − 1) / r for r in [−½, ½].
    #[inline(always)]
    fn exp2_polynomial(self, r: Self::Vector) -> Self::Vector {
        const COEFFICIENTS: [f32; 6] =
            [1.5353362e-4, 1.3398875e-3, 9.618437e-3, 5.5503324e-2, 2.4022648e-1, 6.931472e-1];
        let mut p = self.splat(COEFFICIENTS[0]);
        for c in &COEFFICIENTS[1..] {
            p = self.mul_add(p, r, self.splat(*c));
        }
        p
    }

    /// tanh z and 1 − tanh² z, from the x for which e^(2z) = 2ˣ; NaN for NaN. Both have a relative
    /// error below 6e-7, however small z is; the slope stays above 0 where it would underflow.
    ///
    /// With e = 2ˣ and e − 1 = 2ⁿ·(2ʳ − 1) + (2ⁿ − 1), which loses nothing near 0:
    ///
    /// ```text
    /// tanh z = (e − 1) / (e + 1);  1 − tanh² z = 4 e / (e + 1)²
    /// ```
    #[inline(always)]
    fn tanh(self, x: Self::Vector) -> (Self::Vector, Self::Vector) {
        // Far beyond where tanh rounds to ±1; the operand order keeps NaN.
        let x = self.min(self.splat(120.0), self.max(self.splat(-120.0), x));
        let (n, two) = (self.round(x), self.splat(2.0));
        let r = self.sub(x, n);
        let less = self.mul(self.exp2_polynomial(r), r);
        let power = self.scale(self.splat(1.0), n);
        let e = self.mul_add(power, less, power);
        let less = self.mul_add(power, less, self.sub(power, self.splat(1.0)));
        let more = self.add(less, two);
        let half = self.div(two, more);
        // In this order nothing overflows, as half · e is at most 2.
        (self.div(less, more), self.mul(half, self.mul(half, e)))
    }
}

#[cfg(test)]
mod tests;
