//! Vectors of 8 lanes with AVX2, FMA and F16C.

use std::arch::x86_64::*;

use super::{Simd, Task};

instruction_set! {
    /// Proof that the CPU has AVX2, FMA and F16C.
    Avx2: "avx2,fma,f16c"
}

impl Avx2 {
    /// Returns four floats of the row at `from` and of the fourth row after it.
    ///
    /// # Safety
    /// The caller guarantees that both rows are readable.
    #[inline(always)]
    unsafe fn load_fourth_rows(self, from: *const f32, row: usize) -> __m256 {
        // SAFETY: `self` proves that the CPU has the instructions, and the caller guarantees the
        // rows.
        unsafe { _mm256_loadu2_m128(from.add(4 * row), from) }
    }

    /// Returns a vector whose parts of 128 bits are the sums of the first two vectors' parts.
    #[inline(always)]
    fn sum_parts(self, [a, b, ..]: [__m256; 4]) -> __m256 {
        // SAFETY: `self` proves that the CPU has the instructions.
        unsafe {
            let low = _mm256_permute2f128_ps::<0x20>(a, b);
            _mm256_add_ps(low, _mm256_permute2f128_ps::<0x31>(a, b))
        }
    }
}

impl Simd for Avx2 {
    const LANES: usize = 8;
    // 12 accumulators, 2 vectors of the right side and 2 broadcasts fill 16 registers.
    const TILE_ROWS: usize = 6;
    const TILE_VECTORS: usize = 2;
    type Vector = __m256;

    x86_methods!(_mm256_unpacklo_ps, _mm256_unpackhi_ps, _mm256_shuffle_ps);

    operations! {
        fn splat(x: f32) -> __m256 { _mm256_set1_ps(x) }
        fn add(a: __m256, b: __m256) -> __m256 { _mm256_add_ps(a, b) }
        fn sub(a: __m256, b: __m256) -> __m256 { _mm256_sub_ps(a, b) }
        fn mul(a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
        fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fmadd_ps(a, b, c) }
        fn max(a: __m256, b: __m256) -> __m256 { _mm256_max_ps(a, b) }
        fn min(a: __m256, b: __m256) -> __m256 { _mm256_min_ps(a, b) }
        fn div(a: __m256, b: __m256) -> __m256 { _mm256_div_ps(a, b) }
        fn round(x: __m256) -> __m256 { _mm256_round_ps::<0x08>(x) }
        fn scale(x: __m256, n: __m256) -> __m256 {{
            // Adding n to the exponent is wrong below −126, where 0 replaces the result.
            let exponent = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n));
            let bits = _mm256_add_epi32(_mm256_castps_si256(x), exponent);
            let tiny = _mm256_cmp_ps::<_CMP_LT_OQ>(n, _mm256_set1_ps(-125.0));
            _mm256_andnot_ps(tiny, _mm256_castsi256_ps(bits))
        }}
        fn low_bf16(x: __m256) -> __m256 {
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(x)))
        }
        fn high_bf16(x: __m256) -> __m256 {
            _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0xffff_0000u32 as i32)))
        }
        fn low_halves(a: __m256, b: __m256) -> __m256 {{
            let (a, b) = (_mm256_castps_si256(a), _mm256_castps_si256(b));
            _mm256_castsi256_ps(_mm256_blend_epi16::<0xaa>(a, _mm256_slli_epi32::<16>(b)))
        }}
        fn high_halves(a: __m256, b: __m256) -> __m256 {{
            let (a, b) = (_mm256_castps_si256(a), _mm256_castps_si256(b));
            _mm256_castsi256_ps(_mm256_blend_epi16::<0xaa>(_mm256_srli_epi32::<16>(a), b))
        }}
        fn inside(start: usize, end: usize, x: __m256, other: __m256) -> __m256 {{
            let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let end = _mm256_set1_epi32(end.min(8) as i32);
            let start = _mm256_set1_epi32(start.min(8) as i32);
            let inside =
                _mm256_andnot_si256(_mm256_cmpgt_epi32(start, lane), _mm256_cmpgt_epi32(end, lane));
            _mm256_blendv_ps(other, x, _mm256_castsi256_ps(inside))
        }}
        fn where_same_bits(a: __m256, b: __m256, x: __m256, other: __m256) -> __m256 {{
            let same = _mm256_cmpeq_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b));
            _mm256_blendv_ps(other, x, _mm256_castsi256_ps(same))
        }}
        fn where_less(a: __m256, b: __m256, x: __m256, other: __m256) -> __m256 {{
            let less = _mm256_cmpgt_epi32(_mm256_castps_si256(b), _mm256_castps_si256(a));
            _mm256_blendv_ps(other, x, _mm256_castsi256_ps(less))
        }}
    }

    memory_operations! {
        fn load(ptr: *const f32) -> __m256 { _mm256_loadu_ps(ptr) }
        fn store(ptr: *mut f32, x: __m256) { _mm256_storeu_ps(ptr, x) }
        fn stream(ptr: *mut f32, x: __m256) { _mm256_stream_ps(ptr, x) }
        fn load_bf16(ptr: *const u16) -> __m256 {
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(
                _mm_loadu_si128(ptr.cast()),
            )))
        }
        fn load_f16(ptr: *const u16) -> __m256 { _mm256_cvtph_ps(_mm_loadu_si128(ptr.cast())) }
        fn store_bf16(ptr: *mut u16, x: __m256) {{
            let bits = _mm256_castps_si256(x);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
            let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, bias));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
            let value = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
            let low = _mm256_castsi256_si128(value);
            let high = _mm256_extracti128_si256::<1>(value);
            _mm_storeu_si128(ptr.cast(), _mm_packus_epi32(low, high))
        }}
        fn store_f16(ptr: *mut u16, x: __m256) {
            _mm_storeu_si128(ptr.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x))
        }
    }
}
