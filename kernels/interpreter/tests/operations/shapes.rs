//! Operations that only move elements.

use super::build::*;
use burst_attention_interpreter::{Error, Fault};
use cutile_ir::bytecode::Opcode::*;
use cutile_ir::ir::Attribute;
use cutile_ir::ir::ScalarType::*;

/// Returns 0, 1, 2, ... in a shape.
fn counting(shape: &[i64]) -> Column {
    let count = shape.iter().product::<i64>() as i32;
    i32s(&(0..count).collect::<Vec<_>>()).shaped(shape)
}

#[test]
fn permute_takes_result_axes_from_the_permutation() {
    let permutation = [("permutation", Attribute::DenseI32Array(vec![2, 0, 1]))];
    let got = apply_to(Permute, &permutation, &[counting(&[2, 4, 8])], I32, &[8, 2, 4]).unwrap();
    let mut expected = vec![];
    for k in 0..8 {
        for i in 0..2 {
            expected.extend((0..4).map(|j| i * 32 + j * 8 + k));
        }
    }
    assert_eq!(got, i32s(&expected).shaped(&[8, 2, 4]));
    let twice = [("permutation", Attribute::DenseI32Array(vec![0, 0, 1]))];
    let fault = fault(apply_to(Permute, &twice, &[counting(&[2, 2, 2])], I32, &[2, 2, 2]));
    assert!(matches!(fault, Fault::Malformed(_)), "{fault}");
}

#[test]
fn broadcast_repeats_axes_of_one() {
    let got = apply_to(Broadcast, &[], &[counting(&[2, 1])], I32, &[2, 3]).unwrap();
    assert_eq!(got, i32s(&[0, 0, 0, 1, 1, 1]).shaped(&[2, 3]));
    let got = apply_to(Broadcast, &[], &[counting(&[1, 3])], I32, &[2, 3]).unwrap();
    assert_eq!(got, i32s(&[0, 1, 2, 0, 1, 2]).shaped(&[2, 3]));
    let fault = fault(apply_to(Broadcast, &[], &[counting(&[2, 1])], I32, &[4, 3]));
    assert!(matches!(fault, Fault::Malformed(_)), "{fault}");
}

#[test]
fn reshape_keeps_the_row_major_order() {
    let got = apply_to(Reshape, &[], &[counting(&[2, 6])], I32, &[3, 4]).unwrap();
    assert_eq!(got, counting(&[3, 4]));
    let fault = fault(apply_to(Reshape, &[], &[counting(&[2, 6])], I32, &[3, 3]));
    assert!(matches!(fault, Fault::Malformed(_)), "{fault}");
}

#[test]
fn cat_joins_along_its_axis() {
    let (a, b) = (counting(&[2, 2]), i32s(&[10, 11, 12, 13]).shaped(&[2, 2]));
    let rows = apply_to(Cat, &[int("dim", 0)], &[a.clone(), b.clone()], I32, &[4, 2]).unwrap();
    assert_eq!(rows, i32s(&[0, 1, 2, 3, 10, 11, 12, 13]).shaped(&[4, 2]));
    let columns = apply_to(Cat, &[int("dim", 1)], &[a, b], I32, &[2, 4]).unwrap();
    assert_eq!(columns, i32s(&[0, 1, 10, 11, 2, 3, 12, 13]).shaped(&[2, 4]));
}

fn extract(index: [i32; 2]) -> Result<Column, Error> {
    compute(|build| {
        let source = build.constant(&counting(&[4, 4]));
        let [i, j] = index.map(|index| build.scalar(index));
        build.op(Extract, &[source, i, j], tile(I32, &[2, 1]), &[])
    })
}

#[test]
fn extract_counts_slices_not_elements() {
    assert_eq!(extract([1, 3]).unwrap(), i32s(&[11, 15]).shaped(&[2, 1]));
    let fault = fault(extract([2, 0]));
    assert!(matches!(fault, Fault::Undefined(_)), "{fault}");
}

#[test]
fn insert_replaces_one_slice() {
    let got = compute(|build| {
        let part = build.constant(&i32s(&[70, 80]).shaped(&[2, 1]));
        let whole = build.constant(&counting(&[4, 2]));
        let [i, j] = [1, 0].map(|index| build.scalar(index));
        build.op(Insert, &[part, whole, i, j], tile(I32, &[4, 2]), &[])
    });
    assert_eq!(got.unwrap(), i32s(&[0, 1, 2, 3, 70, 5, 80, 7]).shaped(&[4, 2]));
}

#[test]
fn select_and_iota() {
    let inputs = [bools(&[true, false]), f32s(&[1.0, 2.0]), f32s(&[3.0, 4.0])];
    let got = apply(Select, &[], &inputs, F32).unwrap();
    assert_eq!(got, f32s(&[1.0, 4.0]));
    let got = compute(|build| build.op(Iota, &[], tile(I64, &[4]), &[])).unwrap();
    assert_eq!(got, i64s(&[0, 1, 2, 3]));
}

#[test]
fn one_value_of_a_constant_stands_for_all() {
    let got = compute(|build| {
        let mut splat = f32s(&[2.5]);
        splat.shape = vec![2, 2];
        build.constant(&splat)
    });
    assert_eq!(got.unwrap(), f32s(&[2.5; 4]).shaped(&[2, 2]));
}

#[test]
fn results_must_have_the_declared_type() {
    let fault = fault(apply(AddI, &[int("overflow", 0)], &[i32s(&[1]), i32s(&[2])], I64));
    assert!(matches!(fault, Fault::Malformed(_)), "{fault}");
}
