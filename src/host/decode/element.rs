//! Element types of caches, known while compiling.

use crate::host::pack::load;
use crate::host::simd::Simd;
use crate::problem::Dtype;

/// An element type. Kernels are compiled for each type, so that no load asks for it.
pub(super) trait Element {
    const DTYPE: Dtype;

    /// Reads vector `index` of a row.
    ///
    /// # Safety
    /// The caller guarantees that the row's vectors up to this one are readable.
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, row: *const u8, index: usize) -> S::Vector {
        let skip = index * S::LANES * Self::DTYPE.bytes();
        // SAFETY: the caller guarantees that the vector is readable.
        unsafe { load(simd, row.add(skip), Self::DTYPE) }
    }
}

macro_rules! elements {
    ($($name:ident)*) => {$(
        #[doc = concat!("The type [`Dtype::", stringify!($name), "`].")]
        pub(super) struct $name;

        impl Element for $name {
            const DTYPE: Dtype = Dtype::$name;
        }
    )*};
}

elements! { F32 Bf16 F16 }
