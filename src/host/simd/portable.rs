//! Vectors of 8 lanes in plain Rust. The compiler maps them to the vectors that every CPU of the
//! target has.

use half::{bf16, f16};

use super::{Simd, Task};

/// An instruction set that every CPU has.
#[derive(Clone, Copy)]
pub(in crate::host) struct Portable;

const LANES: usize = 8;
type Vector = [f32; LANES];

#[inline(always)]
fn each(mut lane: impl FnMut(usize) -> f32) -> Vector {
    let mut out = [0.0; LANES];
    for (i, x) in out.iter_mut().enumerate() {
        *x = lane(i);
    }
    out
}

/// Defines methods that compute each lane by itself.
macro_rules! lane_operations {
    ($(fn $name:ident($($argument:ident: $kind:ty),*) |$lane:pat_param| { $body:expr })*) => {$(
        #[inline(always)]
        fn $name(self, $($argument: $kind),*) -> Vector {
            each(|$lane| $body)
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

    lane_operations! {
        fn splat(x: f32) |_| { x }
        fn add(a: Vector, b: Vector) |i| { a[i] + b[i] }
        fn sub(a: Vector, b: Vector) |i| { a[i] - b[i] }
        fn mul(a: Vector, b: Vector) |i| { a[i] * b[i] }
        // `f32::mul_add` calls libm where the target has no such instruction.
        fn mul_add(a: Vector, b: Vector, c: Vector) |i| { a[i] * b[i] + c[i] }
        // The first of two parts of ln 2 has few bits, so its product is exact without `mul_add`.
        fn exp_remainder(x: Vector, n: Vector) |i| {
            (x[i] - n[i] * (355.0 / 512.0)) + n[i] * 2.121_944_4e-4
        }
        fn max(a: Vector, b: Vector) |i| { if a[i] > b[i] { a[i] } else { b[i] } }
        fn min(a: Vector, b: Vector) |i| { if a[i] < b[i] { a[i] } else { b[i] } }
        fn div(a: Vector, b: Vector) |i| { a[i] / b[i] }
        fn round(x: Vector) |i| {{
            // Adding 1.5·2²³ leaves no bits for a fraction. That is right for |x| < 2²².
            const MAGIC: f32 = 12_582_912.0;
            (x[i] + MAGIC) - MAGIC
        }}
        fn scale(x: Vector, n: Vector) |i| {{
            let bits = x[i].to_bits().wrapping_add((n[i] as i32 as u32) << 23);
            if n[i] < -125.0 { 0.0 } else { f32::from_bits(bits) }
        }}
        fn low_bf16(x: Vector) |i| { f32::from_bits(x[i].to_bits() << 16) }
        fn high_bf16(x: Vector) |i| { f32::from_bits(x[i].to_bits() & 0xffff_0000) }
        fn inside(start: usize, end: usize, x: Vector, other: Vector) |i| {
            if start <= i && i < end { x[i] } else { other[i] }
        }
        fn where_same_bits(a: Vector, b: Vector, x: Vector, other: Vector) |i| {
            if a[i].to_bits() == b[i].to_bits() { x[i] } else { other[i] }
        }
        fn where_less(a: Vector, b: Vector, x: Vector, other: Vector) |i| {
            if (a[i].to_bits() as i32) < b[i].to_bits() as i32 { x[i] } else { other[i] }
        }
    }

    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
        for column in 0..LANES {
            for row in 0..LANES {
                // SAFETY: the caller guarantees that both squares are this thread's memory.
                unsafe { *to.add(column * to_row + row) = *from.add(row * from_row + column) }
            }
        }
    }

    #[inline(always)]
    fn max_of_quads(self, x: Vector) -> Vector {
        each(|i| x[i / 4 * 4..][..4].iter().copied().fold(f32::NEG_INFINITY, f32::max))
    }

    #[inline(always)]
    fn sum_each(self, x: [Vector; 16]) -> Vector {
        each(|i| x[i].iter().sum())
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
        fn load_bf16(ptr: *const u16) -> Vector {{
            let bits = ptr.cast::<[u16; LANES]>().read_unaligned();
            each(|i| bf16::from_bits(bits[i]).to_f32())
        }}
        fn load_f16(ptr: *const u16) -> Vector {{
            let bits = ptr.cast::<[u16; LANES]>().read_unaligned();
            each(|i| f16::from_bits(bits[i]).to_f32())
        }}
        fn store_bf16(ptr: *mut u16, x: Vector) {
            ptr.cast::<[u16; LANES]>().write_unaligned(x.map(|x| bf16::from_f32(x).to_bits()))
        }
        fn store_f16(ptr: *mut u16, x: Vector) {
            ptr.cast::<[u16; LANES]>().write_unaligned(x.map(|x| f16::from_f32(x).to_bits()))
        }
    }
}
