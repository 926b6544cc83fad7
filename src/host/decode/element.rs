//! Element types of caches, known while compiling.

use super::DecodeIo;
use crate::host::pack::load;
use crate::host::simd::Simd;
use crate::problem::Dtype;

/// An element type. Kernels are compiled for each type, so that no load asks for it.
pub(super) trait Element {
    const DTYPE: Dtype;
    /// Vectors that one load gives. Two vectors hold the elements of even and of odd index.
    const VECTORS: usize;

    /// Reads vector `part` of load `index` of a row.
    ///
    /// # Safety
    /// The caller guarantees that the row's elements up to those of this load are readable.
    unsafe fn load<S: Simd>(simd: S, row: *const u8, index: usize, part: usize) -> S::Vector;
}

/// float32.
pub(super) struct F32;
/// bfloat16. A load of 32-bit lanes gives two vectors by one operation each, which is half of what
/// it takes to widen the elements in their order.
pub(super) struct Bf16;
/// binary16.
pub(super) struct F16;

macro_rules! in_order {
    ($($name:ident)*) => {$(
        impl Element for $name {
            const DTYPE: Dtype = Dtype::$name;
            const VECTORS: usize = 1;

            #[inline(always)]
            unsafe fn load<S: Simd>(
                simd: S,
                row: *const u8,
                index: usize,
                _part: usize,
            ) -> S::Vector {
                let skip = index * S::LANES * Self::DTYPE.bytes();
                // SAFETY: the caller guarantees that the vector is readable.
                unsafe { load(simd, row.add(skip), Self::DTYPE) }
            }
        }
    )*};
}

in_order! { F32 F16 }

impl Element for Bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
    const VECTORS: usize = 2;

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, row: *const u8, index: usize, part: usize) -> S::Vector {
        // SAFETY: the caller guarantees that the lanes are readable.
        let pairs = unsafe { simd.load(row.cast::<f32>().add(index * S::LANES)) };
        if part == 0 { simd.low_bf16(pairs) } else { simd.high_bf16(pairs) }
    }
}

/// Whether rows of keys and values consist of whole loads. Then scratch has the elements of each
/// load in the order of its vectors.
pub(super) fn whole_loads(io: &DecodeIo<'_>, lanes: usize) -> bool {
    let vectors = if io.k.dtype == Dtype::Bf16 { Bf16::VECTORS } else { 1 };
    [io.k.dim, io.v.dim].iter().all(|dim| dim.is_multiple_of(lanes * vectors))
}
