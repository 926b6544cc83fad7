//! Vectors of 8 lanes in the vectors that every CPU of the target has.

use half::{bf16, f16};
use wide::bytemuck::cast;
use wide::{f32x8, i32x8, u16x8, u32x8};

use super::{Simd, Task};

/// An instruction set that every CPU has.
#[derive(Clone, Copy)]
pub(in crate::host) struct Portable;

const LANES: usize = 8;
type Vector = f32x8;

/// Defines methods that are one expression of vectors.
macro_rules! vector_operations {
    ($(fn $name:ident($($argument:ident: $kind:ty),*) { $body:expr })*) => {$(
        #[inline(always)]
        fn $name(self, $($argument: $kind),*) -> Vector {
            $body
        }
    )*};
}

impl Simd for Portable {
    const LANES: usize = LANES;
    // 8 of SSE2's 16 registers are accumulators.
    const TILE_ROWS: usize = 4;
    const TILE_VECTORS: usize = 1;
    type Vector = Vector;

    #[inline(never)]
    fn vectorize<T: Task>(self, task: T) {
        task.run(self);
    }

    vector_operations! {
        fn splat(x: f32) { f32x8::splat(x) }
        fn add(a: Vector, b: Vector) { a + b }
        fn sub(a: Vector, b: Vector) { a - b }
        fn mul(a: Vector, b: Vector) { a * b }
        // Rounded twice, because not every CPU rounds once.
        fn mul_add(a: Vector, b: Vector, c: Vector) { a * b + c }
        // The first of two parts of ln 2 has few bits, so its product is exact without `mul_add`.
        fn exp_remainder(x: Vector, n: Vector) {
            (x - n * f32x8::splat(355.0 / 512.0)) + n * f32x8::splat(2.121_944_4e-4)
        }
        fn max(a: Vector, b: Vector) { a.simd_gt(b).select(a, b) }
        fn min(a: Vector, b: Vector) { a.simd_lt(b).select(a, b) }
        fn div(a: Vector, b: Vector) { a / b }
        fn round(x: Vector) {{
            // Adding 1.5·2²³ leaves no bits for a fraction. That is right for |x| < 2²².
            let magic = f32x8::splat(12_582_912.0);
            (x + magic) - magic
        }}
        fn scale(x: Vector, n: Vector) {{
            let bits = cast::<_, i32x8>(x) + (n.fast_trunc_int() << 23);
            n.simd_lt(f32x8::splat(-125.0)).select(f32x8::ZERO, cast(bits))
        }}
        fn low_bf16(x: Vector) { cast(cast::<_, u32x8>(x) << 16) }
        fn high_bf16(x: Vector) { cast(cast::<_, u32x8>(x) & u32x8::splat(0xffff_0000)) }
        fn low_halves(a: Vector, b: Vector) {
            cast((cast::<_, u32x8>(a) & u32x8::splat(0xffff)) | (cast::<_, u32x8>(b) << 16))
        }
        fn high_halves(a: Vector, b: Vector) {
            cast((cast::<_, u32x8>(a) >> 16) | (cast::<_, u32x8>(b) & u32x8::splat(0xffff_0000)))
        }
        fn inside(start: usize, end: usize, x: Vector, other: Vector) {{
            let lanes = i32x8::new([0, 1, 2, 3, 4, 5, 6, 7]);
            let [start, end] = [start, end].map(|lane| i32x8::splat(lane.min(LANES) as i32));
            let is_outside = start.simd_gt(lanes) | !end.simd_gt(lanes);
            cast::<_, Vector>(is_outside).select(other, x)
        }}
        fn where_same_bits(a: Vector, b: Vector, x: Vector, other: Vector) {
            cast::<_, Vector>(cast::<_, i32x8>(a).simd_eq(cast::<_, i32x8>(b))).select(x, other)
        }
        fn where_less(a: Vector, b: Vector, x: Vector, other: Vector) {
            cast::<_, Vector>(cast::<_, i32x8>(a).simd_lt(cast::<_, i32x8>(b))).select(x, other)
        }
    }

    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
        // SAFETY: the caller guarantees that both squares are this thread's memory.
        unsafe {
            let rows = std::array::from_fn(|row| self.load(from.add(row * from_row)));
            for (column, x) in f32x8::transpose(rows).into_iter().enumerate() {
                self.store(to.add(column * to_row), x);
            }
        }
    }

    #[inline(always)]
    fn max_of_quads(self, x: Vector) -> Vector {
        let x = x.to_array();
        let [low, high] =
            [0, 4].map(|first| x[first..][..4].iter().copied().fold(x[first], f32::max));
        f32x8::new([low, low, low, low, high, high, high, high])
    }

    #[inline(always)]
    fn sum_each(self, x: [Vector; 16]) -> Vector {
        let [first, rest @ ..] = f32x8::transpose(std::array::from_fn(|i| x[i]));
        rest.into_iter().fold(first, |sum, x| sum + x)
    }

    #[inline(always)]
    fn fence(self) {}

    #[inline(always)]
    fn prefetch(self, _: *const u8) {}

    #[inline(always)]
    fn prefetch_far(self, _: *const u8) {}

    memory_operations! {
        fn stream(ptr: *mut f32, x: Vector) { ptr.cast::<Vector>().write_unaligned(x) }
        fn load(ptr: *const f32) -> Vector { ptr.cast::<Vector>().read_unaligned() }
        fn store(ptr: *mut f32, x: Vector) { ptr.cast::<Vector>().write_unaligned(x) }
        fn load_bf16(ptr: *const u16) -> Vector {
            cast(u32x8::from(ptr.cast::<u16x8>().read_unaligned()) << 16)
        }
        fn load_f16(ptr: *const u16) -> Vector {
            widen(ptr.cast::<[f16; LANES]>().read_unaligned())
        }
        fn store_bf16(ptr: *mut u16, x: Vector) {
            ptr.cast::<[bf16; LANES]>().write_unaligned(to_bf16(x))
        }
        fn store_f16(ptr: *mut u16, x: Vector) {
            ptr.cast::<[f16; LANES]>().write_unaligned(to_f16(x))
        }
    }
}

// Functions of their own, because copies of these long conversions in each kernel would double the
// time that the crate takes to compile.

#[inline(never)]
fn widen(x: [f16; LANES]) -> Vector {
    f32x8::new(x.map(f16::to_f32))
}

#[inline(never)]
fn to_bf16(x: Vector) -> [bf16; LANES] {
    x.to_array().map(bf16::from_f32)
}

#[inline(never)]
fn to_f16(x: Vector) -> [f16; LANES] {
    x.to_array().map(f16::from_f32)
}
