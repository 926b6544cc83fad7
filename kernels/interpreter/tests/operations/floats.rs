//! Floating-point operations.

use super::build::*;
use burst_attention_interpreter::Fault;
use cutile_ir::bytecode::Opcode::*;
use cutile_ir::ir::ScalarType::{BF16, F32, F64, I1};
use half::bf16;

const NEAREST: (&str, cutile_ir::ir::Attribute) = (
    "rounding_mode",
    cutile_ir::ir::Attribute::Integer(
        0,
        cutile_ir::ir::Type::Scalar(cutile_ir::ir::ScalarType::I32),
    ),
);
/// Smallest subnormal float32.
const TINY: f32 = f32::from_bits(1);

#[test]
fn arithmetic_rounds_once_per_operation() {
    let inputs = [f32s(&[1.0, -0.0, 3.0]), f32s(&[f32::EPSILON / 2.0, -0.0, 7.0])];
    let bits = |opcode| apply(opcode, &[NEAREST], &inputs, F32).unwrap().bits();
    assert_eq!(bits(AddF), [1.0f32, -0.0, 10.0].map(f32::to_bits));
    assert_eq!(bits(SubF), [1.0 - f32::EPSILON / 2.0, 0.0, -4.0].map(f32::to_bits));
    assert_eq!(bits(MulF), [f32::EPSILON / 2.0, 0.0, 21.0].map(f32::to_bits));
    assert_eq!(bits(DivF)[2], (3.0f32 / 7.0).to_bits());
    let wide = [f64s(&[1.0]), f64s(&[f64::EPSILON])];
    assert_eq!(apply(AddF, &[NEAREST], &wide, F64).unwrap(), f64s(&[1.0 + f64::EPSILON]));
    // 1 + 2^-8 lies between two bfloat16; the even one is 1.
    let narrow =
        [bf16s(&[bf16::ONE, bf16::ONE]), bf16s(&[0.00390625, 0.01171875].map(bf16::from_f32))];
    let sums = [1.0, 1.015625].map(bf16::from_f32);
    assert_eq!(apply(AddF, &[NEAREST], &narrow, BF16).unwrap(), bf16s(&sums));
}

#[test]
fn other_roundings_are_refused() {
    for mode in [1, 2, 3, 7] {
        let inputs = [f32s(&[1.0]), f32s(&[1.0])];
        let fault = fault(apply(AddF, &[int("rounding_mode", mode)], &inputs, F32));
        assert!(matches!(fault, Fault::Unsupported(_)), "{fault}");
    }
}

#[test]
fn approximate_quotients_vanish_beyond_2_to_126() {
    let big = 2f32.powi(127);
    let inputs = [f32s(&[big, 6.0, f32::INFINITY]), f32s(&[big, 3.0, big])];
    let got = apply(DivF, &[int("rounding_mode", 4)], &inputs, F32).unwrap().f32s();
    assert_eq!(got[..2], [0.0, 2.0]);
    assert!(got[2].is_nan());
    let got = apply(DivF, &[NEAREST], &inputs, F32).unwrap().f32s();
    assert_eq!(got, [1.0, 2.0, f32::INFINITY]);
}

#[test]
fn subnormals_flush_only_where_asked() {
    let inputs = [f32s(&[TINY, -TINY]), f32s(&[1.0, 1.0])];
    let kept = apply(MulF, &[NEAREST], &inputs, F32).unwrap();
    assert_eq!(kept.bits(), [TINY, -TINY].map(f32::to_bits));
    let flushed = apply(MulF, &[NEAREST, flag("flush_to_zero")], &inputs, F32).unwrap();
    assert_eq!(flushed.bits(), [0.0f32, -0.0].map(f32::to_bits));
    // Operands are flushed too: TINY / TINY is 0 / 0.
    let inputs = [f32s(&[TINY]), f32s(&[TINY])];
    assert_eq!(apply(DivF, &[NEAREST], &inputs, F32).unwrap(), f32s(&[1.0]));
    let flushed = apply(DivF, &[NEAREST, flag("flush_to_zero")], &inputs, F32).unwrap();
    assert!(flushed.f32s()[0].is_nan());
    let deep = f32s(&[-140.0, -3.0]);
    let kept = apply(Exp2, &[], std::slice::from_ref(&deep), F32).unwrap();
    assert_eq!(kept.f32s(), [2f32.powi(-140), 0.125]);
    let flushed = apply(Exp2, &[flag("flush_to_zero")], &[deep], F32).unwrap();
    assert_eq!(flushed.f32s(), [0.0, 0.125]);
    let fault = fault(apply(Exp2, &[flag("flush_to_zero")], &[f64s(&[1.0])], F64));
    assert!(matches!(fault, Fault::Unsupported(_)), "{fault}");
}

#[test]
fn extremes_order_zeros_and_treat_nan_as_asked() {
    let nan = f32::NAN;
    let inputs = [f32s(&[-0.0, 0.0, nan, 1.0, nan]), f32s(&[0.0, -0.0, 1.0, nan, nan])];
    let bits = |opcode, attributes: Attributes| {
        let got = apply(opcode, attributes, &inputs, F32).unwrap().f32s();
        got.into_iter().map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }).collect::<Vec<_>>()
    };
    let [zero, minus, one, none] = [0, (-0.0f32).to_bits(), 1f32.to_bits(), u32::MAX];
    assert_eq!(bits(MaxF, &[]), [zero, zero, one, one, none]);
    assert_eq!(bits(MinF, &[]), [minus, minus, one, one, none]);
    assert_eq!(bits(MaxF, &[flag("propagate_nan")]), [zero, zero, none, none, none]);
    assert_eq!(bits(MinF, &[flag("propagate_nan")]), [minus, minus, none, none, none]);
}

#[test]
fn comparisons_with_nan_depend_on_the_ordering() {
    let inputs = [f32s(&[1.0, f32::NAN, -0.0, 2.0]), f32s(&[2.0, 1.0, 0.0, 1.0])];
    let expected = [
        [false, false, true, false],
        [true, false, false, true],
        [true, false, false, false],
        [true, false, true, false],
        [false, false, false, true],
        [false, false, true, true],
    ];
    for (predicate, ordered) in expected.into_iter().enumerate() {
        let predicate = int("comparison_predicate", predicate as i64);
        let mut unordered = ordered;
        unordered[1] = true;
        for (ordering, expected) in [(1, ordered), (0, unordered)] {
            let attributes = [predicate.clone(), int("comparison_ordering", ordering)];
            assert_eq!(apply(CmpF, &attributes, &inputs, I1).unwrap(), bools(&expected));
        }
    }
}

#[test]
fn functions_are_rounded_once() {
    let x = [0.3f32, 1.7, 5.25];
    let f = |x: f32| f64::from(x);
    type Function = fn(f64) -> f64;
    let cases: [(_, Function); 14] = [
        (Exp, |x| std::f64::consts::E.powf(x)),
        (Exp2, |x| 2f64.powf(x)),
        (Log, |x| x.log2() * std::f64::consts::LN_2),
        (Log2, |x| x.ln() / std::f64::consts::LN_2),
        (Rsqrt, |x| x.powf(-0.5)),
        (Sin, |x| (std::f64::consts::FRAC_PI_2 - x).cos()),
        (Cos, |x| (std::f64::consts::FRAC_PI_2 - x).sin()),
        (Tan, |x| x.sin() / x.cos()),
        (SinH, |x| (x.exp() - (-x).exp()) / 2.0),
        (CosH, |x| (x.exp() + (-x).exp()) / 2.0),
        (TanH, |x| 1.0 - 2.0 / ((2.0 * x).exp() + 1.0)),
        (Ceil, |x| -(-x).floor()),
        (Floor, |x| x - x.rem_euclid(1.0)),
        (AbsF, |x| x),
    ];
    for (opcode, reference) in cases {
        let got = apply(opcode, &[], &[f32s(&x)], F32).unwrap().f32s();
        for (got, x) in got.into_iter().zip(x) {
            let expected = reference(f(x));
            let bound = 0.51 * f64::from(f32::EPSILON) * expected.abs();
            let error = (f(got) - expected).abs();
            assert!(error <= bound, "{opcode:?} {x}: {got}, not {expected}");
        }
    }
    let roots = apply(Sqrt, &[NEAREST], &[f32s(&[2.0, -0.0, 9.0])], F32).unwrap();
    assert_eq!(roots.bits(), [std::f32::consts::SQRT_2, -0.0, 3.0].map(f32::to_bits));
    let signs = apply(NegF, &[], &[f32s(&[0.0, -2.0])], F32).unwrap();
    assert_eq!(signs.bits(), [-0.0f32, 2.0].map(f32::to_bits));
    assert_eq!(apply(AbsF, &[], &[f32s(&[-2.5])], F32).unwrap(), f32s(&[2.5]));
}

#[test]
fn functions_of_two_and_three_operands() {
    let inputs = [f32s(&[-7.5, 7.5]), f32s(&[2.0, -2.0])];
    assert_eq!(apply(RemF, &[], &inputs, F32).unwrap(), f32s(&[-1.5, 1.5]));
    assert_eq!(apply(Pow, &[], &[f32s(&[3.0]), f32s(&[4.0])], F32).unwrap(), f32s(&[81.0]));
    let quarter = apply(Atan2, &[], &[f32s(&[1.0]), f32s(&[-1.0])], F32).unwrap();
    assert_eq!(quarter, f32s(&[(3.0 * std::f64::consts::FRAC_PI_4) as f32]));
    // Fused: the square of 1 + 2^-12 minus its rounding leaves the lost 2^-24.
    let x = 1.0 + 2f32.powi(-12);
    let inputs = [f32s(&[x]), f32s(&[x]), f32s(&[-(x * x)])];
    assert_eq!(apply(Fma, &[NEAREST], &inputs, F32).unwrap(), f32s(&[2f32.powi(-24)]));
}
