//! Methods of `Simd` that are one expression of intrinsics.

/// Arithmetic.
macro_rules! operations {
    ($(fn $name:ident($($argument:ident: $kind:ty),*) -> $result:ty { $body:expr })*) => {$(
        #[inline(always)]
        fn $name(self, $($argument: $kind),*) -> $result {
            // SAFETY: `self` proves that the CPU has the instructions.
            unsafe { $body }
        }
    )*};
}

/// Loads and stores.
macro_rules! memory_operations {
    ($(fn $name:ident($($argument:ident: $kind:ty),*) $(-> $result:ty)? { $body:expr })*) => {$(
        #[inline(always)]
        unsafe fn $name(self, $($argument: $kind),*) $(-> $result)? {
            // SAFETY: `self` proves that the CPU has the instructions; the caller vouches for the
            // memory.
            unsafe { $body }
        }
    )*};
}
