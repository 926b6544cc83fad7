//! 8 lanes in plain Rust, for the compiler to map to whatever vectors the target always has.

use half::{bf16, f16};

use super::{Simd, Task};

/// Needs nothing of the CPU.
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

    #[inline(always)]
    fn splat(self, x: f32) -> Vector {
        [x; LANES]
    }

    #[inline(always)]
    fn add(self, a: Vector, b: Vector) -> Vector {
        each(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: Vector, b: Vector) -> Vector {
        each(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: Vector, b: Vector) -> Vector {
        each(|i| a[i] * b[i])
    }

    // `f32::mul_add` is a call into libm where the target has no such instruction.
    #[inline(always)]
    fn mul_add(self, a: Vector, b: Vector, c: Vector) -> Vector {
        each(|i| a[i] * b[i] + c[i])
    }

    // Of two parts of ln 2, the first has so few bits that its product is exact without `mul_add`.
    #[inline(always)]
    fn exp_remainder(self, x: Vector, n: Vector) -> Vector {
        each(|i| (x[i] - n[i] * (355.0 / 512.0)) + n[i] * 2.121_944_4e-4)
    }

    #[inline(always)]
    fn max(self, a: Vector, b: Vector) -> Vector {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn min(self, a: Vector, b: Vector) -> Vector {
        each(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn div(self, a: Vector, b: Vector) -> Vector {
        each(|i| a[i] / b[i])
    }

    #[inline(always)]
    fn round(self, x: Vector) -> Vector {
        // Adding 1.5·2²³ leaves no bits for a fraction; good for |x| < 2²².
        const MAGIC: f32 = 12_582_912.0;
        each(|i| (x[i] + MAGIC) - MAGIC)
    }

    #[inline(always)]
    fn scale(self, x: Vector, n: Vector) -> Vector {
        each(|i| {
            let bits = x[i].to_bits().wrapping_add((n[i] as i32 as u32) << 23);
            if n[i] < -125.0 { 0.0 } else { f32::from_bits(bits) }
        })
    }

    #[inline(always)]
    fn inside(self, start: usize, end: usize, x: Vector, other: Vector) -> Vector {
        each(|i| if start <= i && i < end { x[i] } else { other[i] })
    }

    #[inline(always)]
    fn where_same_bits(self, a: Vector, b: Vector, x: Vector, other: Vector) -> Vector {
        each(|i| if a[i].to_bits() == b[i].to_bits() { x[i] } else { other[i] })
    }

    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
        for column in 0..LANES {
            for row in 0..LANES {
                // SAFETY: the caller vouches for the memory.
                unsafe { *to.add(column * to_row + row) = *from.add(row * from_row + column) }
            }
        }
    }

    #[inline(always)]
    unsafe fn stream(self, ptr: *mut f32, x: Vector) {
        // SAFETY: the caller vouches for the memory.
        unsafe { self.store(ptr, x) }
    }

    #[inline(always)]
    fn fence(self) {}

    #[inline(always)]
    fn prefetch(self, _: *const u8) {}

    #[inline(always)]
    unsafe fn load(self, ptr: *const f32) -> Vector {
        // SAFETY: the caller vouches for the memory.
        unsafe { ptr.cast::<Vector>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(self, ptr: *mut f32, x: Vector) {
        // SAFETY: the caller vouches for the memory.
        unsafe { ptr.cast::<Vector>().write_unaligned(x) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, ptr: *const u16) -> Vector {
        // SAFETY: the caller vouches for the memory.
        let bits = unsafe { ptr.cast::<[u16; LANES]>().read_unaligned() };
        each(|i| bf16::from_bits(bits[i]).to_f32())
    }

    #[inline(always)]
    unsafe fn load_f16(self, ptr: *const u16) -> Vector {
        // SAFETY: the caller vouches for the memory.
        let bits = unsafe { ptr.cast::<[u16; LANES]>().read_unaligned() };
        each(|i| f16::from_bits(bits[i]).to_f32())
    }

    #[inline(always)]
    unsafe fn store_bf16(self, ptr: *mut u16, x: Vector) {
        let bits = x.map(|x| bf16::from_f32(x).to_bits());
        // SAFETY: the caller vouches for the memory.
        unsafe { ptr.cast::<[u16; LANES]>().write_unaligned(bits) }
    }

    #[inline(always)]
    unsafe fn store_f16(self, ptr: *mut u16, x: Vector) {
        let bits = x.map(|x| f16::from_f32(x).to_bits());
        // SAFETY: the caller vouches for the memory.
        unsafe { ptr.cast::<[u16; LANES]>().write_unaligned(bits) }
    }
}
