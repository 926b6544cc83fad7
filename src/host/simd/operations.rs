//! Macros for the methods of `Simd` that instruction sets define alike.

/// Defines a type whose values prove that the CPU has some instructions.
#[cfg(target_arch = "x86_64")]
macro_rules! instruction_set {
    ($(#[$doc:meta])* $name:ident: $features:tt) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(in crate::host) struct $name(());

        impl $name {
            /// Returns a proof that the CPU has the instructions.
            ///
            /// # Safety
            /// The caller has made sure that the CPU has the instructions.
            #[inline(always)]
            pub(in crate::host) unsafe fn new() -> $name {
                $name(())
            }

            /// Runs a task in a function that may use the instructions.
            ///
            /// # Safety
            /// The CPU has the instructions; `self` proves it.
            #[target_feature(enable = $features)]
            unsafe fn run<T: Task>(self, task: T) {
                task.run(self);
            }
        }
    };
}

/// Defines the methods of `Simd` that all x86-64 instruction sets have in common. The arguments are
/// intrinsics that work within each part of 128 bits.
#[cfg(target_arch = "x86_64")]
macro_rules! x86_methods {
    ($unpack_low:ident, $unpack_high:ident, $shuffle:ident) => {
        fn vectorize<T: Task>(self, task: T) {
            // SAFETY: `self` proves that the CPU has the instructions.
            unsafe { self.run(task) }
        }

        #[inline(always)]
        unsafe fn transpose(self, from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
            // Each of a, b, c and d takes four columns of every fourth row, a row in each part of
            // 128 bits. Then a square of 4 × 4 remains in each part.
            // SAFETY: `self` proves that the CPU has the instructions. The caller guarantees that
            // both squares are this thread's memory.
            unsafe {
                for column in (0..Self::LANES).step_by(4) {
                    let from = from.add(column);
                    let a = self.load_fourth_rows(from, from_row);
                    let b = self.load_fourth_rows(from.add(from_row), from_row);
                    let c = self.load_fourth_rows(from.add(2 * from_row), from_row);
                    let d = self.load_fourth_rows(from.add(3 * from_row), from_row);
                    let to = to.add(column * to_row);
                    let (ab, cd) = ($unpack_low(a, b), $unpack_low(c, d));
                    self.store(to, $shuffle::<0x44>(ab, cd));
                    self.store(to.add(to_row), $shuffle::<0xee>(ab, cd));
                    let (ab, cd) = ($unpack_high(a, b), $unpack_high(c, d));
                    self.store(to.add(2 * to_row), $shuffle::<0x44>(ab, cd));
                    self.store(to.add(3 * to_row), $shuffle::<0xee>(ab, cd));
                }
            }
        }

        #[inline(always)]
        fn max_of_quads(self, x: Self::Vector) -> Self::Vector {
            // SAFETY: `self` proves that the CPU has the instructions.
            unsafe {
                let pairs = self.max(x, $shuffle::<0xb1>(x, x));
                self.max(pairs, $shuffle::<0x4e>(pairs, pairs))
            }
        }

        #[inline(always)]
        fn sum_each(self, x: [Self::Vector; 16]) -> Self::Vector {
            // Sums of four lanes and of four vectors come to lie in each part of 128 bits.
            let mut parts = [x[0]; 4];
            for i in 0..Self::LANES / 4 {
                let (a, b, c, d) = (x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
                // SAFETY: `self` proves that the CPU has the instructions.
                parts[i] = unsafe {
                    let ab = self.add($unpack_low(a, b), $unpack_high(a, b));
                    let cd = self.add($unpack_low(c, d), $unpack_high(c, d));
                    self.add($shuffle::<0x44>(ab, cd), $shuffle::<0xee>(ab, cd))
                };
            }
            self.sum_parts(parts)
        }

        #[inline(always)]
        fn fence(self) {
            // SAFETY: every x86-64 CPU has the instruction.
            unsafe { _mm_sfence() }
        }

        #[inline(always)]
        fn prefetch(self, at: *const u8) {
            // SAFETY: the instruction is a hint, which fails for no address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
        }

        #[inline(always)]
        fn prefetch_far(self, at: *const u8) {
            // SAFETY: the instruction is a hint, which fails for no address.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
        }
    };
}

/// Defines methods that are one expression of intrinsics on values.
#[cfg(target_arch = "x86_64")]
macro_rules! operations {
    ($(fn $name:ident($($argument:ident: $kind:ty),*) -> $result:ty { $body:expr })*) => {$(
        #[inline(always)]
        fn $name(self, $($argument: $kind),*) -> $result {
            // SAFETY: `self` proves that the CPU has the instructions.
            unsafe { $body }
        }
    )*};
}

/// Defines methods that are one expression which loads or stores.
macro_rules! memory_operations {
    ($(fn $name:ident($($argument:ident: $kind:ty),*) $(-> $result:ty)? { $body:expr })*) => {$(
        #[inline(always)]
        unsafe fn $name(self, $($argument: $kind),*) $(-> $result)? {
            // SAFETY: `self` proves that the CPU has the instructions. The caller guarantees that
            // the elements at `ptr` are readable, or writable for a store.
            unsafe { $body }
        }
    )*};
}
