//! Conversions between types.

use super::build::*;
use burst_attention_interpreter::Fault;
use cutile_ir::bytecode::Opcode::*;
use cutile_ir::ir::ScalarType::*;
use half::{bf16, f16};

#[test]
fn float32_becomes_bfloat16_with_ties_to_even() {
    // Bit patterns halfway between neighbours, just above and just below, overflow, infinity.
    let patterns =
        [0x3f80_8000u32, 0x3f81_8000, 0x3f80_8001, 0x3f80_7fff, 0x7f7f_ffff, 0xff80_0000];
    let expected = [0x3f80u16, 0x3f82, 0x3f81, 0x3f80, 0x7f80, 0xff80];
    let from = f32s(&patterns.map(f32::from_bits));
    let got = apply(FToF, &[int("rounding_mode", 0)], &[from], BF16).unwrap();
    assert_eq!(got, bf16s(&expected.map(bf16::from_bits)));
}

#[test]
fn narrow_values_are_rounded_in_the_tile_not_only_in_memory() {
    // Above the tie between 1 and 1 + 2^-7; below half of float16's 2^-10.
    for (ty, expected) in [(BF16, 1.0 + 2f32.powi(-7)), (F16, 1.0 + 2f32.powi(-8))] {
        let got = compute(|build| {
            let x = build.constant(&f32s(&[1.0 + 2f32.powi(-8) + 2f32.powi(-12)]));
            let x = build.op(FToF, &[x], tile(ty, &[1]), &[int("rounding_mode", 0)]);
            build.op(FToF, &[x], tile(F32, &[1]), &[int("rounding_mode", 0)])
        });
        assert_eq!(got.unwrap(), f32s(&[expected]), "{ty:?}");
    }
    // (1 + 2^-8) - 1: bfloat16 rounds the sum back to 1.
    let got = compute(|build| {
        let [one, tiny] = [1.0, 0.00390625].map(|x| build.constant(&bf16s(&[bf16::from_f32(x)])));
        let nearest = [int("rounding_mode", 0)];
        let sum = build.op(AddF, &[one, tiny], tile(BF16, &[1]), &nearest);
        build.op(SubF, &[sum, one], tile(BF16, &[1]), &nearest)
    });
    assert_eq!(got.unwrap(), bf16s(&[bf16::ZERO]));
}

#[test]
fn floats_change_width() {
    let from = [f32s(&[2049.0, 2051.0, 65520.0, 1e-7])];
    let got = apply(FToF, &[int("rounding_mode", 0)], &from, F16).unwrap();
    // Spacing is 2 above 2048; 65520 rounds to infinity; 1e-7 to the subnormal 2 * 2^-24.
    assert_eq!(got, f16s(&[0x6800, 0x6802, 0x7c00, 0x0002].map(f16::from_bits)));
    let wide = f64s(&[1.0 + f64::EPSILON, 0.1]);
    let got = apply(FToF, &[int("rounding_mode", 0)], &[wide], F32).unwrap();
    assert_eq!(got, f32s(&[1.0, 0.1]));
    let got = apply(FToF, &[int("rounding_mode", 0)], &[bf16s(&[bf16::from_f32(1.5)])], F64);
    assert_eq!(got.unwrap(), f64s(&[1.5]));
    let fault = fault(apply(FToF, &[int("rounding_mode", 1)], &[f32s(&[1.0])], BF16));
    assert!(matches!(fault, Fault::Unsupported(_)), "{fault}");
}

#[test]
fn floats_become_integers_toward_zero() {
    let attributes = |signed| [int("signedness", signed), int("rounding_mode", 6)];
    let got = apply(FToI, &attributes(1), &[f32s(&[2.9, -2.9, -0.5])], I32).unwrap();
    assert_eq!(got, i32s(&[2, -2, 0]));
    let got = apply(FToI, &attributes(0), &[f32s(&[4e9])], I32).unwrap();
    assert_eq!(got, i32s(&[4_000_000_000u32 as i32]));
    for out in [f32::NAN, f32::INFINITY, 3e9] {
        let fault = fault(apply(FToI, &attributes(1), &[f32s(&[out])], I32));
        assert!(matches!(fault, Fault::Undefined(_)), "{fault}");
    }
    let [a, b] = attributes(1);
    let saturating = [a, b, flag("saturating")];
    let got = apply(FToI, &saturating, &[f32s(&[3e9, f32::NEG_INFINITY])], I32).unwrap();
    assert_eq!(got, i32s(&[i32::MAX, i32::MIN]));
}

#[test]
fn integers_become_floats_to_nearest_even() {
    let attributes = |signed| [int("signedness", signed), int("rounding_mode", 0)];
    let got = apply(IToF, &attributes(1), &[i32s(&[-1, 16_777_217, 16_777_219])], F32).unwrap();
    assert_eq!(got, f32s(&[-1.0, 16_777_216.0, 16_777_220.0]));
    let got = apply(IToF, &attributes(0), &[i32s(&[-1])], F64).unwrap();
    assert_eq!(got, f64s(&[4_294_967_295.0]));
    let got = apply(IToF, &attributes(1), &[i32s(&[257, 259])], BF16).unwrap();
    assert_eq!(got, bf16s(&[256.0, 260.0].map(bf16::from_f32)));
    let got = apply(IToF, &attributes(0), &[bools(&[true, false])], F32).unwrap();
    assert_eq!(got, f32s(&[1.0, 0.0]));
}

#[test]
fn integers_change_width() {
    let signed = apply(ExtI, &[int("signedness", 1)], &[i8s(&[-2, 3])], I32).unwrap();
    assert_eq!(signed, i32s(&[-2, 3]));
    let unsigned = apply(ExtI, &[int("signedness", 0)], &[i32s(&[-2, 3])], I64).unwrap();
    assert_eq!(unsigned, i64s(&[4_294_967_294, 3]));
    let flags = apply(ExtI, &[int("signedness", 0)], &[bools(&[true, false])], I32).unwrap();
    assert_eq!(flags, i32s(&[1, 0]));
    let from = [i32s(&[0x1_2345, -1])];
    assert_eq!(apply(TruncI, &[int("overflow", 0)], &from, I16).unwrap(), i16s(&[0x2345, -1]));
    let broken = fault(apply(TruncI, &[int("overflow", 1)], &[i32s(&[0x8000])], I16));
    assert!(matches!(broken, Fault::Promise(_)), "{broken}");
    assert!(apply(TruncI, &[int("overflow", 2)], &[i32s(&[0x8000])], I16).is_ok());
    let broken = fault(apply(TruncI, &[int("overflow", 2)], &[i32s(&[-1])], I16));
    assert!(matches!(broken, Fault::Promise(_)), "{broken}");
}

#[test]
fn bits_are_kept() {
    let got = apply(Bitcast, &[], &[f32s(&[1.0, -0.0])], I32).unwrap();
    assert_eq!(got, i32s(&[0x3f80_0000, i32::MIN]));
    let got = apply(Bitcast, &[], &[i16s(&[0x3fc0])], BF16).unwrap();
    assert_eq!(got, bf16s(&[bf16::from_f32(1.5)]));
    let refused = fault(apply(Bitcast, &[], &[f32s(&[1.0])], I64));
    assert!(matches!(refused, Fault::Malformed(_)), "{refused}");
    let bytes = apply_to(Pack, &[], &[i16s(&[0x0102, -1])], I8, &[4]).unwrap();
    assert_eq!(bytes, i8s(&[2, 1, -1, -1]));
    let back = apply_to(Unpack, &[], &[bytes], I16, &[2]).unwrap();
    assert_eq!(back, i16s(&[0x0102, -1]));
}
