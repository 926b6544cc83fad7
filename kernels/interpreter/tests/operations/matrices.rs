//! Matrix products.

use super::build::*;
use burst_attention_interpreter::Fault;
use cutile_ir::bytecode::Opcode::{MmaF, MmaI};
use cutile_ir::ir::ScalarType::*;
use half::bf16;

/// Returns small integers, so that every order of summation is exact.
fn numbers(count: i64, salt: i64) -> Vec<f32> {
    (0..count).map(|i| ((i * 7 + salt) % 13 - 6) as f32).collect()
}

fn product(batch: i64, m: i64, k: i64, n: i64, a: &[f32], b: &[f32], c: &[f32]) -> Vec<f32> {
    let mut out = vec![];
    for element in 0..batch * m * n {
        let (row, column) = (element / n, element % n);
        let terms = (0..k)
            .map(|i| a[(row * k + i) as usize] * b[((row / m * k + i) * n + column) as usize]);
        out.push(c[element as usize] + terms.sum::<f32>());
    }
    out
}

#[test]
fn floats_multiply_and_accumulate() {
    for (batch, m, k, n) in [(1, 4, 8, 2), (1, 3, 7, 5), (1, 1, 1, 1), (3, 2, 6, 4)] {
        let [a, b, c] =
            [(m * k, 1), (k * n, 5), (m * n, 9)].map(|(size, salt)| numbers(batch * size, salt));
        let shapes = [[batch, m, k], [batch, k, n], [batch, m, n]];
        let skip = usize::from(batch == 1);
        let [lhs, rhs, acc] = shapes.map(|shape| shape[skip..].to_vec());
        let expected = f32s(&product(batch, m, k, n, &a, &b, &c)).shaped(&acc);
        let narrow = |x: &[f32]| bf16s(&x.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>());
        let acc_in = f32s(&c).shaped(&acc);
        let inputs = [narrow(&a).shaped(&lhs), narrow(&b).shaped(&rhs), acc_in.clone()];
        assert_eq!(apply_to(MmaF, &[], &inputs, F32, &acc).unwrap(), expected);
        let inputs = [f32s(&a).shaped(&lhs), f32s(&b).shaped(&rhs), acc_in];
        assert_eq!(apply_to(MmaF, &[], &inputs, F32, &acc).unwrap(), expected);
    }
}

#[test]
fn sums_are_float32_and_run_in_ascending_order() {
    // 2^24 absorbs each 1 that is added to it alone; any other order, or a wider sum, keeps some.
    let ones = [[1, 5], [5, 1]].map(|shape| f32s(&[1.0; 5]).shaped(&shape));
    let [lhs, rhs] = ones;
    let inputs = [lhs, rhs, f32s(&[16_777_216.0]).shaped(&[1, 1])];
    let got = apply_to(MmaF, &[], &inputs, F32, &[1, 1]).unwrap();
    assert_eq!(got.f32s(), [16_777_216.0]);
}

#[test]
fn bytes_multiply_by_their_signedness() {
    let inputs = [
        i8s(&[-1, 2]).shaped(&[1, 2]),
        i8s(&[3, -4]).shaped(&[2, 1]),
        i32s(&[1000]).shaped(&[1, 1]),
    ];
    let multiply = |lhs, rhs| {
        let attributes = [int("signedness_lhs", lhs), int("signedness_rhs", rhs)];
        apply_to(MmaI, &attributes, &inputs, I32, &[1, 1]).unwrap()
    };
    assert_eq!(multiply(1, 1), i32s(&[1000 - 3 - 8]).shaped(&[1, 1]));
    assert_eq!(multiply(0, 1), i32s(&[1000 + 255 * 3 - 8]).shaped(&[1, 1]));
    assert_eq!(multiply(1, 0), i32s(&[1000 - 3 + 2 * 252]).shaped(&[1, 1]));
}

#[test]
fn shapes_and_types_must_fit() {
    let [a, b] = [f32s(&[1.0; 6]).shaped(&[2, 3]), f32s(&[1.0; 4]).shaped(&[2, 2])];
    let fault_a = fault(apply_to(MmaF, &[], &[a, b.clone(), b.clone()], F32, &[2, 2]));
    assert!(matches!(fault_a, Fault::Malformed(_)), "{fault_a}");
    let narrow = bf16s(&[bf16::ONE; 4]).shaped(&[2, 2]);
    let fault_b =
        fault(apply_to(MmaF, &[], &[narrow.clone(), narrow.clone(), narrow], BF16, &[2, 2]));
    assert!(matches!(fault_b, Fault::Unsupported(_)), "{fault_b}");
}
