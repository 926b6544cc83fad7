//! Branches, loops, reductions and scans.

use super::build::*;
use burst_attention_interpreter::{Argument, Error, Fault, GridRun, Memory};
use cutile_ir::bytecode::Opcode::*;
use cutile_ir::ir::ScalarType::{self, *};
use cutile_ir::ir::{Attribute, RegionId, Type, Value};

const SIGNED: (&str, Attribute) = ("signedness", Attribute::Bool(true));

pub fn int32() -> Type {
    tile(I32, &[])
}

pub fn sum(build: &mut Build, x: Value, y: Value) -> Value {
    build.op(AddI, &[x, y], int32(), &[int("overflow", 0)])
}

pub fn compare(build: &mut Build, predicate: i64, x: Value, y: Value) -> Value {
    let attributes = [int("comparison_predicate", predicate), SIGNED];
    build.op(CmpI, &[x, y], tile(I1, &[]), &attributes)
}

fn choose(condition: bool) -> Result<Column, Error> {
    compute(|build| {
        let condition = build.constant(&bools(&[condition]).shaped(&[]));
        let arms = [10, 20].map(|value| {
            build.region(&[], |build, _| {
                let value = build.scalar(value);
                build.op_with(Yield, &[value], &[], &[], &[]);
            })
        });
        build.op_with(If, &[condition], &[int32()], &[], &arms)[0]
    })
}

#[test]
fn if_takes_one_arm() {
    assert_eq!(choose(true).unwrap(), i32s(&[10]).shaped(&[]));
    assert_eq!(choose(false).unwrap(), i32s(&[20]).shaped(&[]));
}

/// Returns the sum of all induction values and a first value of 100.
fn count(bounds: [i32; 3], attributes: Attributes) -> Result<Column, Error> {
    compute(|build| {
        let [lower, upper, step] = bounds.map(|bound| build.scalar(bound));
        let start = build.scalar(100);
        let body = build.region(&[int32(), int32()], |build, arguments| {
            let total = sum(build, arguments[0], arguments[1]);
            build.op_with(Continue, &[total], &[], &[], &[]);
        });
        build.op_with(For, &[lower, upper, step, start], &[int32()], attributes, &[body])[0]
    })
}

#[test]
fn for_counts_a_half_open_range() {
    let total = |bounds| count(bounds, &[]).unwrap();
    assert_eq!(total([2, 9, 3]), i32s(&[100 + 2 + 5 + 8]).shaped(&[]));
    assert_eq!(total([-3, 0, 1]), i32s(&[100 - 6]).shaped(&[]));
    assert_eq!(total([5, 5, 1]), i32s(&[100]).shaped(&[]));
    // -2 as an unsigned bound is far above 0: two steps of 2^31 fit below it.
    let unsigned = count([0, -2, i32::MIN], &[flag("unsigned_cmp")]).unwrap();
    assert_eq!(unsigned, i32s(&[100i32.wrapping_add(i32::MIN)]).shaped(&[]));
    let fault = fault(count([0, 1, 0], &[]));
    assert!(matches!(fault, Fault::Undefined(_)), "{fault}");
}

/// Returns a module that counts up from 0 and breaks with ten times the count at `end`, from inside
/// of an `if`.
fn count_to(end: i32) -> cutile_ir::Module {
    let (mut build, parameters) = Build::new(&[pointers(I32, &[])]);
    let zero = build.scalar(0);
    let body = build.region(&[int32()], |build, arguments| {
        let end = build.scalar(end);
        let done = compare(build, 0, arguments[0], end);
        let arm = build.region(&[], |build, _| {
            let ten = build.scalar(10);
            let result = build.op(MulI, &[arguments[0], ten], int32(), &[int("overflow", 0)]);
            build.op_with(Break, &[result], &[], &[], &[]);
        });
        build.op_with(If, &[done], &[], &[], &[arm]);
        let one = build.scalar(1);
        let next = sum(build, arguments[0], one);
        build.op_with(Continue, &[next], &[], &[], &[]);
    });
    let result = build.op_with(Loop, &[zero], &[int32()], &[], &[body])[0];
    build.store(parameters[0], result);
    build.finish()
}

#[test]
fn loop_breaks_from_inside_a_branch() {
    let mut memory = Memory::new();
    let out = memory.allocate("out", 4);
    let arguments = [Argument::Pointer(out)];
    GridRun::default().run(&count_to(7), "test", [1; 3], &arguments, &mut memory).unwrap();
    assert_eq!(memory.read_i32(out, 1), [70]);
    let launch = GridRun { operation_limit: 1000, ..GridRun::default() };
    let endless = launch.run(&count_to(-1), "test", [1; 3], &arguments, &mut memory);
    assert_eq!(fault(endless), Fault::Limit(1000));
}

fn identities(values: &[Attribute]) -> (&'static str, Attribute) {
    ("identities", Attribute::Array(values.to_vec()))
}

/// Builds a region of one operation on the two elements.
fn body(
    build: &mut Build,
    opcode: cutile_ir::bytecode::Opcode,
    ty: ScalarType,
    attributes: Attributes,
) -> RegionId {
    let scalar = tile(ty, &[]);
    build.region(&[scalar.clone(), scalar.clone()], |build, arguments| {
        let result = build.op(opcode, arguments, scalar, attributes);
        build.op_with(Yield, &[result], &[], &[], &[]);
    })
}

#[test]
fn reduce_folds_along_its_axis() {
    let values = f32s(&[1.0, 5.0, -2.0, 4.0, 0.0, 9.0]).shaped(&[2, 3]);
    for (axis, shape, expected) in [(0, [3], &[4.0, 5.0, 9.0][..]), (1, [2], &[5.0, 9.0])] {
        let got = compute(|build| {
            let values = build.constant(&values);
            let body = body(build, MaxF, F32, &[]);
            let low = identities(&[Attribute::float(f64::NEG_INFINITY, F32)]);
            build.op_with(
                Reduce,
                &[values],
                &[tile(F32, &shape)],
                &[int("dim", axis), low],
                &[body],
            )[0]
        });
        assert_eq!(got.unwrap(), f32s(expected), "axis {axis}");
    }
}

#[test]
fn reduce_starts_from_the_identity() {
    let got = compute(|build| {
        let values = build.constant(&i32s(&[1, 2, 3, 4]));
        let body = body(build, AddI, I32, &[int("overflow", 0)]);
        let wrong = identities(&[Attribute::i32(1000)]);
        build.op_with(Reduce, &[values], &[int32()], &[int("dim", 0), wrong], &[body])[0]
    });
    assert_eq!(got.unwrap(), i32s(&[1010]).shaped(&[]));
}

/// Returns the largest value of each row and its column; the region branches or selects.
fn argmax(branch: bool) -> Column {
    let result = compute(|build| {
        let values = build.constant(&i32s(&[3, 9, 1, 8, 2, 7]).shaped(&[2, 3]));
        let columns = build.constant(&i32s(&[0, 1, 2, 0, 1, 2]).shaped(&[2, 3]));
        let types = vec![int32(); 4];
        let body = build.region(&types, |build, arguments| {
            let &[x, best, at, best_at] = arguments else { panic!("four arguments") };
            let larger = compare(build, 4, x, best);
            let results = if branch {
                let arms = [[x, at], [best, best_at]].map(|pair| {
                    build.region(&[], |build, _| {
                        build.op_with(Yield, &pair, &[], &[], &[]);
                    })
                });
                build.op_with(If, &[larger], &[int32(), int32()], &[], &arms)
            } else {
                let value = build.op(Select, &[larger, x, best], int32(), &[]);
                vec![value, build.op(Select, &[larger, at, best_at], int32(), &[])]
            };
            build.op_with(Yield, &results, &[], &[], &[]);
        });
        let start = identities(&[Attribute::i32(-1), Attribute::i32(-1)]);
        let results = [tile(I32, &[2]), tile(I32, &[2])];
        let best =
            build.op_with(Reduce, &[values, columns], &results, &[int("dim", 1), start], &[body]);
        build.op(Cat, &best, tile(I32, &[4]), &[int("dim", 0)])
    });
    result.unwrap()
}

#[test]
fn reduce_takes_several_tiles_and_any_region() {
    assert_eq!(argmax(false), i32s(&[9, 8, 1, 0]));
    assert_eq!(argmax(true), i32s(&[9, 8, 1, 0]));
}

#[test]
fn reduce_regions_may_use_scalars_from_outside() {
    let got = compute(|build| {
        let values = build.constant(&i32s(&[1, 2, 3, 4]).shaped(&[2, 2]));
        let factor = build.scalar(10);
        let body = build.region(&[int32(), int32()], |build, arguments| {
            let one = build.scalar(1);
            let scaled = build.op(MulI, &[arguments[0], factor], int32(), &[int("overflow", 0)]);
            let more = sum(build, scaled, one);
            let total = sum(build, more, arguments[1]);
            build.op_with(Yield, &[total], &[], &[], &[]);
        });
        let zero = identities(&[Attribute::i32(0)]);
        build.op_with(Reduce, &[values], &[tile(I32, &[2])], &[int("dim", 1), zero], &[body])[0]
    });
    assert_eq!(got.unwrap(), i32s(&[32, 72]));
}

#[test]
fn scan_keeps_every_prefix() {
    let scan = |axis, reverse| {
        compute(|build| {
            let values = build.constant(&i32s(&[1, 2, 3, 4, 5, 6]).shaped(&[2, 3]));
            let body = body(build, AddI, I32, &[int("overflow", 0)]);
            let zero = identities(&[Attribute::i32(0)]);
            let attributes = [int("dim", axis), ("reverse", Attribute::Bool(reverse)), zero];
            build.op_with(Scan, &[values], &[tile(I32, &[2, 3])], &attributes, &[body])[0]
        })
        .unwrap()
    };
    assert_eq!(scan(1, false), i32s(&[1, 3, 6, 4, 9, 15]).shaped(&[2, 3]));
    assert_eq!(scan(1, true), i32s(&[6, 5, 3, 15, 11, 6]).shaped(&[2, 3]));
    assert_eq!(scan(0, false), i32s(&[1, 2, 3, 5, 7, 9]).shaped(&[2, 3]));
}
