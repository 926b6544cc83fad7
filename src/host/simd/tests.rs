//! Tests of every operation on every instruction set of this CPU against its definition.

use half::{bf16, f16};

use super::super::isa::Isa;
use super::{Simd, Task};

/// Returns values that conversions may get wrong: ties, denormals, large values, infinities and
/// NaN.
fn awkward() -> Vec<f32> {
    let mut values = vec![0.0, -0.0, 1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX];
    values.extend([1.0e-40, -3.0e-41, 65504.0, 65519.9, 65520.0, 6.0e-8, 2.9e-8, 3.0e-8, 1.0e-5]);
    for bits in 0..64u32 {
        // These are halves of the last place of bfloat16 and binary16, and their neighbours.
        values.push(f32::from_bits(0x3f80_0000 | (bits >> 2) << 15 | (bits & 3).wrapping_sub(1)));
        values.push(f32::from_bits(0x3f80_0000 | (bits >> 2) << 12 | (bits & 3).wrapping_sub(1)));
    }
    values
}

/// Converts values to bfloat16 and binary16 and back, and pushes the bits of all four.
struct Convert<'a> {
    values: &'a [f32],
    out: &'a mut Vec<[u64; 4]>,
}

impl Task for Convert<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for chunk in self.values.chunks_exact(S::LANES) {
            let (mut halves, mut floats) = ([[0u16; 16]; 2], [[0f32; 16]; 2]);
            // SAFETY: the chunk and all arrays have at least as many values as a vector has lanes.
            unsafe {
                let x = simd.load(chunk.as_ptr());
                simd.store_bf16(halves[0].as_mut_ptr(), x);
                simd.store_f16(halves[1].as_mut_ptr(), x);
                simd.store(floats[0].as_mut_ptr(), simd.load_bf16(halves[0].as_ptr()));
                simd.store(floats[1].as_mut_ptr(), simd.load_f16(halves[1].as_ptr()));
            }
            for lane in 0..S::LANES {
                let [b, h] = [halves[0][lane], halves[1][lane]].map(u64::from);
                let [wide_b, wide_h] = [floats[0][lane], floats[1][lane]];
                let bits = |x: f32| if x.is_nan() { u64::MAX } else { u64::from(x.to_bits()) };
                self.out.push([b, h, bits(wide_b), bits(wide_h)]);
            }
        }
    }
}

#[test]
fn conversions_round_to_nearest_even() {
    let mut values = awkward();
    values.resize(values.len().next_multiple_of(16), 1.5);
    for isa in Isa::available() {
        let mut out = Vec::new();
        isa.run(Convert { values: &values, out: &mut out });
        assert_eq!(out.len(), values.len());
        for (x, [b, h, wide_b, wide_h]) in values.iter().zip(out) {
            let (want_b, want_h) = (bf16::from_f32(*x), f16::from_f32(*x));
            if x.is_nan() {
                assert!(wide_b == u64::MAX && wide_h == u64::MAX, "{isa}: NaN is lost");
                continue;
            }
            assert_eq!(b, u64::from(want_b.to_bits()), "{isa}: {x:e} to bfloat16");
            assert_eq!(h, u64::from(want_h.to_bits()), "{isa}: {x:e} to binary16");
            assert_eq!(wide_b, u64::from(want_b.to_f32().to_bits()), "{isa}: {x:e} from bfloat16");
            assert_eq!(wide_h, u64::from(want_h.to_f32().to_bits()), "{isa}: {x:e} from binary16");
        }
    }
}

/// Replaces each x by 2ˣ, or by eˣ if `natural`.
struct Exp2<'a> {
    values: &'a mut [f32],
    natural: bool,
}

impl Task for Exp2<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for chunk in self.values.chunks_exact_mut(S::LANES) {
            // SAFETY: the chunk is as long as a vector.
            unsafe {
                let x = simd.load(chunk.as_ptr());
                let power = if self.natural { simd.exp(x) } else { simd.exp2(x) };
                simd.store(chunk.as_mut_ptr(), power);
            }
        }
    }
}

#[test]
fn exp2_is_accurate_and_knows_its_limits() {
    for isa in Isa::available() {
        let inputs: Vec<f32> = (0..1_600_000).map(|i| 1.0 - i as f32 * 7.8e-5).collect();
        let mut outputs = inputs.clone();
        isa.run(Exp2 { values: &mut outputs, natural: false });
        for (x, y) in inputs.iter().zip(outputs) {
            let expected = f64::from(*x).exp2();
            let error = (f64::from(y) - expected).abs() / expected;
            assert!(error < 1.2e-7, "{isa}: 2^{x} = {y:e}, off by {error:e}");
        }
        let mut edges = [0.0; 16];
        edges[..4].copy_from_slice(&[f32::NEG_INFINITY, f32::NAN, -300.0, -1e30]);
        isa.run(Exp2 { values: &mut edges, natural: false });
        assert!(edges[1].is_nan());
        assert_eq!([edges[0], edges[2], edges[3], edges[4]], [0.0, 0.0, 0.0, 1.0], "{isa}");
    }
}

#[test]
fn exp_is_accurate_and_knows_its_limits() {
    for isa in Isa::available() {
        let inputs: Vec<f32> = (0..400_000).map(|i| 0.5 - i as f32 * 2.18e-4).collect();
        let mut outputs = inputs.clone();
        isa.run(Exp2 { values: &mut outputs, natural: true });
        for (x, y) in inputs.iter().zip(outputs) {
            let expected = f64::from(*x).exp();
            let error = (f64::from(y) - expected).abs() / expected;
            let bound = if *x >= -15.0 { 1.3e-7 } else { 3.5e-7 };
            assert!(error < bound, "{isa}: e^{x} = {y:e}, off by {error:e}");
        }
        let mut edges = [0.0; 16];
        edges[..4].copy_from_slice(&[f32::NEG_INFINITY, f32::NAN, -200.0, -1e30]);
        isa.run(Exp2 { values: &mut edges, natural: true });
        assert!(edges[1].is_nan());
        assert_eq!([edges[0], edges[2], edges[3], edges[4]], [0.0, 0.0, 0.0, 1.0], "{isa}");
    }
}

/// Writes tanh and its slope for the first number of each pair.
struct Tanh<'a>(&'a mut [[f32; 2]]);

impl Task for Tanh<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for pairs in self.0.chunks_exact_mut(16) {
            let inputs: [f32; 16] = std::array::from_fn(|i| pairs[i][0]);
            let (mut values, mut slopes) = ([0f32; 16], [0f32; 16]);
            for first in (0..16).step_by(S::LANES) {
                // SAFETY: no vector has more than 16 lanes, and 16 is a multiple of the lanes.
                unsafe {
                    let (tanh, slope) = simd.tanh(simd.load(inputs.as_ptr().add(first)));
                    simd.store(values.as_mut_ptr().add(first), tanh);
                    simd.store(slopes.as_mut_ptr().add(first), slope);
                }
            }
            pairs.iter_mut().enumerate().for_each(|(i, pair)| *pair = [values[i], slopes[i]]);
        }
    }
}

#[test]
fn tanh_and_its_slope_have_small_relative_errors() {
    let mut inputs: Vec<f32> = (-40_000..40_000).map(|i| i as f32 * 3e-3).collect();
    // Near the smallest floats e − 1 is a difference of nearly equal numbers.
    inputs.extend((0..1200).flat_map(|i| [1.0, -1.0].map(|sign| sign * 1.1f32.powi(-i))));
    for isa in Isa::available() {
        let mut pairs: Vec<[f32; 2]> = inputs.iter().map(|x| [*x, 0.0]).collect();
        pairs.resize(inputs.len().next_multiple_of(16), [0.0; 2]);
        isa.run(Tanh(&mut pairs));
        let mut largest = [0f64; 2];
        for (x, [tanh, slope]) in inputs.iter().zip(&pairs) {
            let z = f64::from(*x) * std::f64::consts::LN_2 / 2.0;
            let expected = [z.tanh(), 1.0 / z.cosh().powi(2)];
            for (n, (got, expected)) in [tanh, slope].into_iter().zip(expected).enumerate() {
                // Denormal results have fewer bits.
                let size = expected.abs().max(f64::from(f32::MIN_POSITIVE));
                let error = (f64::from(*got) - expected).abs() / size;
                assert!(error < 6e-7, "{isa}: {n} of {x:e} is {got:e}, off by {error:e}");
                largest[n] = largest[n].max(error);
            }
        }
        println!("{isa}: {largest:?}");
        let mut edges = [[0f32; 2]; 16];
        let beyond = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e30, -1e30];
        beyond.iter().zip(&mut edges).for_each(|(x, edge)| edge[0] = *x);
        isa.run(Tanh(&mut edges));
        assert_eq!(edges.map(|[tanh, _]| tanh)[..2], [1.0, -1.0], "{isa}");
        assert_eq!(edges.map(|[tanh, _]| tanh)[3..6], [1.0, -1.0, 0.0], "{isa}");
        assert!(edges[2].iter().all(|x| x.is_nan()), "{isa}: NaN is lost");
        assert!([0, 1, 3, 4].iter().all(|&n| edges[n][1] < 1e-30), "{isa}: {edges:?}");
        assert_eq!(edges[5][1], 1.0, "{isa}: the slope at 0");
    }
}

/// Transposes a square of one table into another table, and streams a row of the result.
struct Transpose<'a> {
    table: &'a [f32],
    out: &'a mut Vec<f32>,
    lanes: &'a mut usize,
}

impl Task for Transpose<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        #[repr(align(64))]
        struct Row([f32; 16]);
        let (mut columns, mut row) = (vec![0.0; 16 * 20], Row([0.0; 16]));
        // SAFETY: no vector has more than 16 lanes. The table holds 16 rows of 19 floats from the
        // second float on, `columns` holds 16 rows of 20 floats, and `row` is aligned.
        unsafe {
            simd.transpose(self.table.as_ptr().add(1), 19, columns.as_mut_ptr(), 20);
            simd.stream(row.0.as_mut_ptr(), simd.load(columns.as_ptr().add(20)));
        }
        simd.fence();
        *self.lanes = S::LANES;
        self.out.extend(columns);
        self.out.extend(row.0);
    }
}

#[test]
fn transpose_makes_columns_rows_and_touches_nothing_else() {
    let table: Vec<f32> = (0..17 * 19).map(|i| 1.0 + i as f32).collect();
    for isa in Isa::available() {
        let (mut out, mut lanes) = (vec![], 0);
        isa.run(Transpose { table: &table, out: &mut out, lanes: &mut lanes });
        let (columns, streamed) = out.split_at(16 * 20);
        for (at, got) in columns.iter().enumerate() {
            let (row, column) = (at / 20, at % 20);
            let inside = row < lanes && column < lanes;
            let expected = if inside { table[1 + column * 19 + row] } else { 0.0 };
            assert_eq!(*got, expected, "{isa}: row {row}, column {column}");
        }
        assert_eq!(streamed[..lanes], columns[20..][..lanes], "{isa}: the streamed row");
    }
}

/// Pushes the difference of `inside` from its definition for some ranges of lanes.
struct Inside<'a>(&'a mut Vec<f32>);

impl Task for Inside<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (start, end) in [(0, 0), (0, 3), (2, 5), (7, 40), (20, 40), (5, 2), (0, 16)] {
            let mut lanes = [0.0; 16];
            let value = simd.inside(start, end, simd.splat(1.0), simd.splat(0.0));
            // SAFETY: no vector has more than 16 lanes, so `lanes` has room.
            unsafe { simd.store(lanes.as_mut_ptr(), value) };
            let expected = |lane: usize| lane < S::LANES && start <= lane && lane < end;
            self.0.extend((0..16).map(|lane| lanes[lane] - f32::from(u8::from(expected(lane)))));
        }
    }
}

#[test]
fn inside_keeps_the_lanes_of_its_range() {
    for isa in Isa::available() {
        let mut differences = Vec::new();
        isa.run(Inside(&mut differences));
        assert!(differences.iter().all(|x| *x == 0.0), "{isa}: {differences:?}");
    }
}

/// Pushes the sums of vectors, the largest lanes of quads, and the two bfloat16 of a lane.
struct AcrossLanes<'a> {
    table: &'a [f32; 256],
    out: &'a mut Vec<[f32; 16]>,
    lanes: &'a mut usize,
}

impl Task for AcrossLanes<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mut rows = [simd.zero(); 16];
        for (i, row) in rows.iter_mut().enumerate() {
            // SAFETY: the table has 16 rows of 16 floats, and no vector has more than 16 lanes.
            *row = unsafe { simd.load(self.table.as_ptr().add(16 * i)) };
        }
        let odd = simd.splat(f32::from_bits(0x4049_3fc0));
        let found = [
            simd.sum_each(rows),
            simd.max_of_quads(rows[5]),
            simd.low_bf16(odd),
            simd.high_bf16(odd),
        ];
        for x in found {
            let mut lanes = [0.0; 16];
            // SAFETY: no vector has more than 16 lanes, so `lanes` has room.
            unsafe { simd.store(lanes.as_mut_ptr(), x) };
            self.out.push(lanes);
        }
        *self.lanes = S::LANES;
    }
}

#[test]
fn operations_across_lanes_agree_with_their_definitions() {
    // Whole numbers, so that every order of additions gives the same sum.
    let table: [f32; 256] = std::array::from_fn(|i| ((i * 37) % 101) as f32 - 50.0);
    for isa in Isa::available() {
        let (mut out, mut lanes) = (vec![], 0);
        isa.run(AcrossLanes { table: &table, out: &mut out, lanes: &mut lanes });
        for lane in 0..lanes {
            let sum: f32 = table[16 * lane..][..lanes].iter().sum();
            assert_eq!(out[0][lane], sum, "{isa}: the sum of vector {lane}");
            let quad = &table[16 * 5 + lane / 4 * 4..][..4];
            let most = quad.iter().copied().fold(f32::MIN, f32::max);
            assert_eq!(out[1][lane], most, "{isa}: the largest lane of {quad:?}");
            assert_eq!([out[2][lane], out[3][lane]], [1.5, 3.140625], "{isa}: bfloat16");
        }
    }
}

#[test]
fn only_instruction_sets_of_this_cpu_have_a_name() {
    assert_eq!(Isa::named("neon"), None);
    for isa in Isa::ALL {
        assert_eq!(Isa::named(isa.name()), isa.is_available().then_some(isa));
    }
}

/// Pushes the low halves and the high halves of two vectors, and the products of their pairs plus
/// their sum if the CPU has pairs.
struct Halves<'a> {
    sides: [[[bf16; 2]; 16]; 2],
    out: &'a mut Vec<[u32; 16]>,
    lanes: &'a mut usize,
}

impl Task for Halves<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        // SAFETY: no vector has more than 16 lanes, and each side has as many.
        let [a, b] = self.sides.each_ref().map(|side| unsafe { simd.load(side.as_ptr().cast()) });
        let mut found = vec![simd.low_halves(a, b), simd.high_halves(a, b)];
        if simd.has_pairs() {
            // SAFETY: the CPU has pairs.
            found.push(unsafe { simd.add_pairs(a, b, simd.splat(5.0)) });
        }
        for x in found {
            let mut lanes = [0; 16];
            // SAFETY: no vector has more than 16 lanes, so `lanes` has room.
            unsafe { simd.store(lanes.as_mut_ptr().cast(), x) };
            self.out.push(lanes);
        }
        *self.lanes = S::LANES;
    }
}

#[test]
fn operations_on_pairs_agree_with_scalar_arithmetic() {
    // Whole numbers, so that every order of additions gives the same sum. The last lanes of AVX-512
    // hold what is not finite.
    let whole = |i: usize| bf16::from_f32(((i * 37) % 101) as f32 - 50.0);
    let mut sides = [3, 7].map(|side| std::array::from_fn(|i| [whole(side * i), whole(side + i)]));
    let infinite = [0.0, f32::INFINITY].map(bf16::from_f32);
    sides[0][13] = infinite;
    (sides[0][14], sides[1][14]) = (infinite, [bf16::ONE, bf16::ZERO]);
    sides[1][15][0] = bf16::NAN;
    for isa in Isa::available() {
        let (mut out, mut lanes) = (vec![], 0);
        isa.run(Halves { sides, out: &mut out, lanes: &mut lanes });
        for lane in 0..lanes {
            let [[a, b], [c, d]] = sides.map(|side| side[lane]);
            let bits =
                |low: bf16, high: bf16| u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16;
            assert_eq!(out[0][lane], bits(a, c), "{isa}: low halves of lane {lane}");
            assert_eq!(out[1][lane], bits(b, d), "{isa}: high halves of lane {lane}");
            let [a, b, c, d] = [a, b, c, d].map(bf16::to_f32);
            let want = 5.0 + a * c + b * d;
            if let Some(got) = out.get(2).map(|sums| f32::from_bits(sums[lane])) {
                let right = got == want || got.is_nan() && want.is_nan();
                assert!(right, "{isa}: {got} instead of 5 + {a} · {c} + {b} · {d}");
            }
        }
    }
}
