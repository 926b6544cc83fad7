//! Vectors of 16 lanes with AVX-512.

use std::arch::x86_64::*;
use std::mem::transmute;

use super::{Simd, Task};

instruction_set! {
    /// Proof that the CPU has AVX-512 (F, BW, DQ, VL), AVX2, FMA and F16C.
    Avx512: "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
}

impl Avx512 {
    /// Runs a task in a function that may also multiply pairs.
    ///
    /// # Safety
    /// The caller has made sure that the CPU has AVX-512 BF16. `self` proves the other instructions.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    unsafe fn run_pairs<T: Task>(self, task: T) {
        task.run(self);
    }

    /// Returns four floats of the row at `from` and of the fourth, eighth and twelfth row after it.
    ///
    /// # Safety
    /// The caller guarantees that all four rows are readable.
    #[inline(always)]
    unsafe fn load_fourth_rows(self, from: *const f32, row: usize) -> __m512 {
        // SAFETY: `self` proves that the CPU has the instructions, and the caller guarantees the
        // rows.
        unsafe {
            let x = _mm512_castps128_ps512(_mm_loadu_ps(from));
            let x = _mm512_insertf32x4::<1>(x, _mm_loadu_ps(from.add(4 * row)));
            let x = _mm512_insertf32x4::<2>(x, _mm_loadu_ps(from.add(8 * row)));
            _mm512_insertf32x4::<3>(x, _mm_loadu_ps(from.add(12 * row)))
        }
    }

    /// Returns a vector whose parts of 128 bits are the sums of each vector's parts.
    #[inline(always)]
    fn sum_parts(self, [a, b, c, d]: [__m512; 4]) -> __m512 {
        // SAFETY: `self` proves that the CPU has the instructions.
        unsafe {
            let even = _mm512_shuffle_f32x4::<0x88>(a, b);
            let ab = _mm512_add_ps(even, _mm512_shuffle_f32x4::<0xdd>(a, b));
            let even = _mm512_shuffle_f32x4::<0x88>(c, d);
            let cd = _mm512_add_ps(even, _mm512_shuffle_f32x4::<0xdd>(c, d));
            let even = _mm512_shuffle_f32x4::<0x88>(ab, cd);
            _mm512_add_ps(even, _mm512_shuffle_f32x4::<0xdd>(ab, cd))
        }
    }
}

impl Simd for Avx512 {
    const LANES: usize = 16;
    // 24 accumulators, 4 vectors of the right side and up to 4 broadcasts fill 32 registers.
    const TILE_ROWS: usize = 6;
    const TILE_VECTORS: usize = 4;
    type Vector = __m512;

    x86_methods!(_mm512_unpacklo_ps, _mm512_unpackhi_ps, _mm512_shuffle_ps);

    #[inline(always)]
    fn has_pairs(self) -> bool {
        is_x86_feature_detected!("avx512bf16")
    }

    unsafe fn vectorize_pairs<T: Task>(self, task: T) {
        // SAFETY: `self` proves that the CPU has AVX-512, and the caller that it has AVX-512 BF16.
        unsafe { self.run_pairs(task) }
    }

    #[inline(always)]
    unsafe fn add_pairs(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: the caller has made sure of the instruction. Both types are 512 bits.
        unsafe {
            _mm512_dpbf16_ps(c, transmute::<__m512, __m512bh>(a), transmute::<__m512, __m512bh>(b))
        }
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
        fn low_bf16(x: __m512) -> __m512 {
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_castps_si512(x)))
        }
        fn high_bf16(x: __m512) -> __m512 {
            _mm512_and_ps(x, _mm512_castsi512_ps(_mm512_set1_epi32(0xffff_0000u32 as i32)))
        }
        fn low_halves(a: __m512, b: __m512) -> __m512 {{
            let (a, b) = (_mm512_castps_si512(a), _mm512_castps_si512(b));
            let b = _mm512_slli_epi32::<16>(b);
            _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaa_aaaa, a, b))
        }}
        fn high_halves(a: __m512, b: __m512) -> __m512 {{
            let (a, b) = (_mm512_castps_si512(a), _mm512_castps_si512(b));
            let a = _mm512_srli_epi32::<16>(a);
            _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaa_aaaa, a, b))
        }}
        fn inside(start: usize, end: usize, x: __m512, other: __m512) -> __m512 {
            _mm512_mask_mov_ps(other, lanes_below(end) & !lanes_below(start), x)
        }
        fn where_same_bits(a: __m512, b: __m512, x: __m512, other: __m512) -> __m512 {{
            let same = _mm512_cmpeq_epi32_mask(_mm512_castps_si512(a), _mm512_castps_si512(b));
            _mm512_mask_mov_ps(other, same, x)
        }}
        fn where_less(a: __m512, b: __m512, x: __m512, other: __m512) -> __m512 {{
            let less = _mm512_cmplt_epi32_mask(_mm512_castps_si512(a), _mm512_castps_si512(b));
            _mm512_mask_mov_ps(other, less, x)
        }}
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

/// Returns the mask of the lanes before `end`.
#[inline(always)]
fn lanes_below(end: usize) -> u16 {
    ((1u32 << end.min(16)) - 1) as u16
}
