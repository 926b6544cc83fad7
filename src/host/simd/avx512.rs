//! 16 lanes with AVX-512.

use std::arch::x86_64::*;

use super::{Simd, Task};

/// Proof that the CPU has AVX-512 (F, BW, DQ, VL), AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(in crate::host) struct Avx512(());

impl Avx512 {
    /// # Safety
    /// The CPU has the instructions.
    #[inline(always)]
    pub(in crate::host) unsafe fn new() -> Avx512 {
        Avx512(())
    }

    /// # Safety
    /// The CPU has the instructions; a value of this type proves it.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn run<T: Task>(self, task: T) {
        task.run(self);
    }
}

impl Simd for Avx512 {
    const LANES: usize = 16;
    // 24 accumulators, 4 vectors of the right side and up to 4 broadcasts fill 32 registers.
    const TILE_ROWS: usize = 6;
    const TILE_VECTORS: usize = 4;
    type Vector = __m512;

    fn vectorize<T: Task>(self, task: T) {
        // SAFETY: `self` proves that the CPU has the instructions.
        unsafe { self.run(task) }
    }

    operations! {
        fn splat(x: f32) -> __m512 { _mm512_set1_ps(x) }
        fn add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        fn sub(a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
        fn mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        fn max(a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) }
        fn min(a: __m512, b: __m512) -> __m512 { _mm512_min_ps(a, b) }
        fn div(a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
        fn round(x: __m512) -> __m512 { _mm512_roundscale_ps::<0x08>(x) }
        fn scale(x: __m512, n: __m512) -> __m512 { _mm512_scalef_ps(x, n) }
        fn inside(start: usize, end: usize, x: __m512, other: __m512) -> __m512 {
            _mm512_mask_mov_ps(other, lanes_below(end) & !lanes_below(start), x)
        }
        fn where_same_bits(a: __m512, b: __m512, x: __m512, other: __m512) -> __m512 {{
            let same = _mm512_cmpeq_epi32_mask(_mm512_castps_si512(a), _mm512_castps_si512(b));
            _mm512_mask_mov_ps(other, same, x)
        }}
    }

    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
        // Each vector takes a quarter of rows n, n + 4, n + 8 and n + 12; then squares of 4 × 4
        // remain, one in each of its four parts.
        // SAFETY: `self` proves that the CPU has the instructions; the caller vouches for the
        // memory.
        unsafe {
            for column in (0..16).step_by(4) {
                let [mut a, mut b, mut c, mut d] = [_mm512_setzero_ps(); 4];
                for (n, x) in [&mut a, &mut b, &mut c, &mut d].into_iter().enumerate() {
                    let from = from.add(n * from_row + column);
                    *x = _mm512_castps128_ps512(_mm_loadu_ps(from));
                    *x = _mm512_insertf32x4::<1>(*x, _mm_loadu_ps(from.add(4 * from_row)));
                    *x = _mm512_insertf32x4::<2>(*x, _mm_loadu_ps(from.add(8 * from_row)));
                    *x = _mm512_insertf32x4::<3>(*x, _mm_loadu_ps(from.add(12 * from_row)));
                }
                let (ab, cd) = (_mm512_unpacklo_ps(a, b), _mm512_unpacklo_ps(c, d));
                _mm512_storeu_ps(to.add(column * to_row), _mm512_shuffle_ps::<0x44>(ab, cd));
                _mm512_storeu_ps(to.add((column + 1) * to_row), _mm512_shuffle_ps::<0xee>(ab, cd));
                let (ab, cd) = (_mm512_unpackhi_ps(a, b), _mm512_unpackhi_ps(c, d));
                _mm512_storeu_ps(to.add((column + 2) * to_row), _mm512_shuffle_ps::<0x44>(ab, cd));
                _mm512_storeu_ps(to.add((column + 3) * to_row), _mm512_shuffle_ps::<0xee>(ab, cd));
            }
        }
    }

    #[inline(always)]
    fn fence(self) {
        // SAFETY: every x86-64 CPU has it.
        unsafe { _mm_sfence() }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a hint, which no address makes fail.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }

    memory_operations! {
        fn load(ptr: *const f32) -> __m512 { _mm512_loadu_ps(ptr) }
        fn store(ptr: *mut f32, x: __m512) { _mm512_storeu_ps(ptr, x) }
        fn stream(ptr: *mut f32, x: __m512) { _mm512_stream_ps(ptr, x) }
        fn load_bf16(ptr: *const u16) -> __m512 {
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(
                _mm256_loadu_si256(ptr.cast()),
            )))
        }
        fn load_f16(ptr: *const u16) -> __m512 {
            _mm512_cvtph_ps(_mm256_loadu_si256(ptr.cast()))
        }
        fn store_bf16(ptr: *mut u16, x: __m512) {{
            let bits = _mm512_castps_si512(x);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, bias));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            let value = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
            _mm256_storeu_si256(ptr.cast(), _mm512_cvtepi32_epi16(value))
        }}
        fn store_f16(ptr: *mut u16, x: __m512) {
            _mm256_storeu_si256(ptr.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x))
        }
    }
}

#[inline(always)]
fn lanes_below(end: usize) -> u16 {
    ((1u32 << end.min(16)) - 1) as u16
}
