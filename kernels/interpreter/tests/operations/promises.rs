//! Assumptions and assertions.

use super::build::*;
use burst_attention_interpreter::Fault;
use cutile_ir::bytecode::Opcode::{Assert, Assume};
use cutile_ir::ir::ScalarType::I32;
use cutile_ir::ir::{Attribute, Bounded, DivBy, SameElements};

fn assume(predicate: Attribute, values: &Column) -> Result<(), Fault> {
    let got = apply(Assume, &[("predicate", predicate)], std::slice::from_ref(values), I32);
    match got {
        Ok(got) => {
            assert_eq!(got, *values, "an assumption passes its value through");
            Ok(())
        }
        Err(error) => Err(error.fault().expect("an operation failed").clone()),
    }
}

fn broken(predicate: Attribute, values: &Column) {
    let fault = assume(predicate, values).expect_err("the assumption does not hold");
    assert!(matches!(fault, Fault::Promise(_)), "{fault}");
}

#[test]
fn divisibility_is_checked() {
    let by = |divisor| Attribute::DivBy(DivBy { divisor, every: None, along: None });
    assume(by(16), &i32s(&[32, 0, -16])).unwrap();
    broken(by(16), &i32s(&[32, 8]));
    let groups = |axis| Attribute::DivBy(DivBy { divisor: 4, every: Some(2), along: Some(axis) });
    assume(groups(1), &i32s(&[4, 5, 8, 9]).shaped(&[2, 2])).unwrap();
    broken(groups(0), &i32s(&[4, 5, 8, 9]).shaped(&[2, 2]));
    broken(groups(1), &i32s(&[4, 6, 8, 9]).shaped(&[2, 2]));
    assume(groups(0), &i32s(&[4, 8, 5, 9]).shaped(&[2, 2])).unwrap();
}

#[test]
fn bounds_are_checked_and_inclusive() {
    let bounds = |lb, ub| Attribute::Bounded(Bounded { lb, ub });
    assume(bounds(Some(0), Some(5)), &i32s(&[0, 5])).unwrap();
    assume(bounds(None, None), &i32s(&[i32::MIN])).unwrap();
    broken(bounds(Some(0), None), &i32s(&[3, -1]));
    broken(bounds(None, Some(5)), &i32s(&[6]));
}

#[test]
fn equal_groups_are_checked() {
    let same = |values: &[i64]| Attribute::SameElements(SameElements { values: values.to_vec() });
    let values = i32s(&[1, 1, 2, 2, 1, 1, 3, 3]).shaped(&[2, 4]);
    assume(same(&[1, 2]), &values).unwrap();
    broken(same(&[2, 2]), &values);
    broken(same(&[1, 4]), &values);
}

#[test]
fn assertions_name_the_element() {
    let check = |values: &[bool]| {
        compute(|build| {
            let values = build.constant(&bools(values));
            let message = Attribute::String("in range".into());
            build.op_with(Assert, &[values], &[], &[("message", message)], &[]);
            build.scalar(1)
        })
    };
    assert!(check(&[true, true]).is_ok());
    let expected = Fault::Assertion { element: 1, message: "in range".into() };
    assert_eq!(fault(check(&[true, false])), expected);
}
