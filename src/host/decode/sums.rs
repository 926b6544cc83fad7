//! The inner loops: sums that registers hold.

use super::element::Element;
use super::tile::QUAD;
use crate::host::matmul::Matrix;
use crate::host::simd::Simd;

/// Whether the registers hold `N` sums for each of `R` rows, and the operands. Instruction sets have
/// twice as many registers as a vector has lanes.
pub(super) const fn in_registers<S: Simd, const R: usize, const N: usize>() -> bool {
    R * N <= S::LANES
}

/// Adds a value, times the weight of each row, to `N` vectors of `R` rows. The vectors begin with load
/// `load`, and weights of two rows are [`QUAD`] apart.
///
/// # Safety
/// The caller guarantees that the value and the weights are readable.
#[inline(always)]
pub(super) unsafe fn add<S: Simd, E: Element, const R: usize, const N: usize>(
    simd: S,
    sums: &mut [[S::Vector; N]; R],
    (value, load): (*const u8, usize),
    weights: *const f32,
) {
    // SAFETY: the caller guarantees the memory behind both pointers.
    unsafe {
        let mut right = [simd.zero(); N];
        for (n, right) in right.iter_mut().enumerate() {
            *right = E::load(simd, value, load + n / E::VECTORS, n % E::VECTORS);
        }
        for (r, sums) in sums.iter_mut().enumerate() {
            let weight = simd.splat(*weights.add(r * QUAD));
            for (sum, right) in sums.iter_mut().zip(right) {
                *sum = simd.mul_add(weight, right, *sum);
            }
        }
    }
}

/// Returns the products of `R` rows of queries and `K` keys, before the lanes of each are summed.
///
/// # Safety
/// The caller guarantees that the queries and the keys are readable.
#[inline(always)]
pub(super) unsafe fn products<S: Simd, E: Element, const R: usize, const K: usize>(
    simd: S,
    q: Matrix,
    keys: [*const u8; K],
) -> [[S::Vector; K]; R] {
    let mut sums = [[simd.zero(); K]; R];
    for load in 0..q.row / S::LANES / E::VECTORS {
        for part in 0..E::VECTORS {
            // SAFETY: the caller guarantees the memory behind all pointers.
            unsafe {
                let mut right = [simd.zero(); K];
                for (right, key) in right.iter_mut().zip(keys) {
                    *right = E::load(simd, key, load, part);
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let left = simd.load(q.skip(r).at.add((load * E::VECTORS + part) * S::LANES));
                    for (sum, right) in sums.iter_mut().zip(right) {
                        *sum = simd.mul_add(left, right, *sum);
                    }
                }
            }
        }
    }
    sums
}
