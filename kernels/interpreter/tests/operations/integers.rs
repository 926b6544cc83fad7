//! Integer operations.

use super::build::*;
use burst_attention_interpreter::Fault;
use cutile_ir::bytecode::Opcode::*;
use cutile_ir::ir::ScalarType::{I1, I8, I32, I64};

const UNSIGNED: i64 = 0;
const SIGNED: i64 = 1;

#[test]
fn division_rounds_as_asked() {
    let (x, y) = (i32s(&[7, -7, 7, -7, 6, -6]), i32s(&[2, 2, -2, -2, 3, 3]));
    for (mode, expected) in
        [(1, [3, -3, -3, 3, 2, -2]), (2, [3, -4, -4, 3, 2, -2]), (3, [4, -3, -3, 4, 2, -2])]
    {
        let attributes = [int("signedness", SIGNED), int("rounding", mode)];
        let got = apply(DivI, &attributes, &[x.clone(), y.clone()], I32).unwrap();
        assert_eq!(got, i32s(&expected), "rounding {mode}");
    }
}

#[test]
fn unsigned_division_and_remainder_read_the_bits_as_unsigned() {
    let inputs = [i32s(&[-1, 7]), i32s(&[2, 2])];
    let ceiling = [int("signedness", UNSIGNED), int("rounding", 3)];
    assert_eq!(apply(DivI, &ceiling, &inputs, I32).unwrap(), i32s(&[i32::MIN, 4]));
    let unsigned = [int("signedness", UNSIGNED)];
    assert_eq!(apply(DivI, &unsigned, &inputs, I32).unwrap(), i32s(&[i32::MAX, 3]));
    assert_eq!(apply(RemI, &unsigned, &[i32s(&[-1]), i32s(&[10])], I32).unwrap(), i32s(&[5]));
}

#[test]
fn remainder_has_the_dividend_s_sign() {
    let inputs = [i32s(&[7, 7, -7, -7]), i32s(&[3, -3, 3, -3])];
    let got = apply(RemI, &[int("signedness", SIGNED)], &inputs, I32).unwrap();
    assert_eq!(got, i32s(&[1, 1, -1, -1]));
}

#[test]
fn undefined_divisions_are_errors() {
    let signed = [int("signedness", SIGNED)];
    for inputs in [[i32s(&[1]), i32s(&[0])], [i32s(&[i32::MIN]), i32s(&[-1])]] {
        let fault = fault(apply(DivI, &signed, &inputs, I32));
        assert!(matches!(fault, Fault::Undefined(_)), "{fault}");
    }
    let floor = [int("signedness", UNSIGNED), int("rounding", 2)];
    let fault = fault(apply(DivI, &floor, &[i32s(&[1]), i32s(&[1])], I32));
    assert!(matches!(fault, Fault::Unsupported(_)), "{fault}");
}

#[test]
fn sums_wrap_unless_they_promise_not_to() {
    let inputs = [i32s(&[i32::MAX]), i32s(&[1])];
    assert_eq!(apply(AddI, &[int("overflow", 0)], &inputs, I32).unwrap(), i32s(&[i32::MIN]));
    // As unsigned numbers these do not overflow.
    assert_eq!(apply(AddI, &[int("overflow", 2)], &inputs, I32).unwrap(), i32s(&[i32::MIN]));
    let broken = fault(apply(AddI, &[int("overflow", 1)], &inputs, I32));
    assert!(matches!(broken, Fault::Promise(_)), "{broken}");
    let below_zero = [i32s(&[1]), i32s(&[2])];
    assert_eq!(apply(SubI, &[int("overflow", 1)], &below_zero, I32).unwrap(), i32s(&[-1]));
    let broken = fault(apply(SubI, &[int("overflow", 2)], &below_zero, I32));
    assert!(matches!(broken, Fault::Promise(_)), "{broken}");
}

#[test]
fn products_keep_low_or_high_bits() {
    let x = [0x9E37_79B9_u32 as i32, -1, 12345];
    let y = [0xD251_1F53_u32 as i32, -1, 678];
    let wide = |i: usize| u64::from(x[i] as u32) * u64::from(y[i] as u32);
    let inputs = [i32s(&x), i32s(&y)];
    let low = apply(MulI, &[int("overflow", 0)], &inputs, I32).unwrap();
    assert_eq!(low, i32s(&[0, 1, 2].map(|i| wide(i) as i32)));
    let high = apply(MulhiI, &[], &inputs, I32).unwrap();
    assert_eq!(high, i32s(&[0, 1, 2].map(|i| (wide(i) >> 32) as i32)));
    let high = apply(MulhiI, &[], &[i64s(&[-1]), i64s(&[-1])], I64).unwrap();
    assert_eq!(high, i64s(&[-2]));
    let high = apply(MulhiI, &[], &[i8s(&[-128]), i8s(&[2])], I8).unwrap();
    assert_eq!(high, i8s(&[1]));
}

#[test]
fn shifts_fill_as_the_sign_says() {
    let inputs = [i32s(&[-8, 8]), i32s(&[1, 1])];
    let signed = apply(ShRI, &[int("signedness", SIGNED)], &inputs, I32).unwrap();
    assert_eq!(signed, i32s(&[-4, 4]));
    let unsigned = apply(ShRI, &[int("signedness", UNSIGNED)], &inputs, I32).unwrap();
    assert_eq!(unsigned, i32s(&[0x7fff_fffc, 4]));
    let left = [i32s(&[3, 1]), i32s(&[31, 4])];
    assert_eq!(apply(ShLI, &[int("overflow", 0)], &left, I32).unwrap(), i32s(&[i32::MIN, 16]));
    let fault = fault(apply(ShLI, &[int("overflow", 0)], &[i32s(&[1]), i32s(&[32])], I32));
    assert!(matches!(fault, Fault::Undefined(_)), "{fault}");
}

#[test]
fn comparisons_and_extremes_know_signedness() {
    let inputs = [i32s(&[-1, 5, 5]), i32s(&[1, 5, 6])];
    // Predicates in Tile IR's order: eq, ne, lt, le, gt, ge.
    let signed = [[false, true, false], [true, false, true], [true, false, true]];
    let signed = signed.into_iter().chain([[true, true, true], [false; 3], [false, true, false]]);
    for (predicate, expected) in signed.enumerate() {
        let attributes = [int("comparison_predicate", predicate as i64), int("signedness", SIGNED)];
        assert_eq!(apply(CmpI, &attributes, &inputs, I1).unwrap(), bools(&expected), "{predicate}");
    }
    let less = [int("comparison_predicate", 2), int("signedness", UNSIGNED)];
    assert_eq!(apply(CmpI, &less, &inputs, I1).unwrap(), bools(&[false, false, true]));
    for (opcode, sign, expected) in [
        (MaxI, SIGNED, [1, 5, 6]),
        (MaxI, UNSIGNED, [-1, 5, 6]),
        (MinI, SIGNED, [-1, 5, 5]),
        (MinI, UNSIGNED, [1, 5, 5]),
    ] {
        let got = apply(opcode, &[int("signedness", sign)], &inputs, I32).unwrap();
        assert_eq!(got, i32s(&expected), "{opcode:?} {sign}");
    }
}

#[test]
fn bits_combine() {
    let inputs = [i32s(&[0b1100]), i32s(&[0b1010])];
    for (opcode, expected) in [(AndI, 0b1000), (OrI, 0b1110), (XOrI, 0b0110)] {
        assert_eq!(apply(opcode, &[], &inputs, I32).unwrap(), i32s(&[expected]), "{opcode:?}");
    }
    let inputs = [bools(&[true, true]), bools(&[true, false])];
    assert_eq!(apply(XOrI, &[], &inputs, I1).unwrap(), bools(&[false, true]));
}

#[test]
fn signs_change() {
    assert_eq!(apply(AbsI, &[], &[i32s(&[-3, 3])], I32).unwrap(), i32s(&[3, 3]));
    assert_eq!(apply(NegI, &[], &[i32s(&[-3, i32::MIN])], I32).unwrap(), i32s(&[3, i32::MIN]));
    let fault = fault(apply(AbsI, &[], &[i32s(&[i32::MIN])], I32));
    assert!(matches!(fault, Fault::Undefined(_)), "{fault}");
}
