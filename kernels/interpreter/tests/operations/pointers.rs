//! Loads, stores and atomics through tiles of pointers.

use super::build::*;
use burst_attention_interpreter::{Address, Argument, Error, Fault, Memory};
use cutile_ir::bytecode::Opcode::*;
use cutile_ir::ir::ScalarType::{self, *};
use cutile_ir::ir::{Type, Value};

fn launch(build: Build, arguments: &[Address], memory: &mut Memory) -> Result<(), Error> {
    let arguments: Vec<_> = arguments.iter().map(|&at| Argument::Pointer(at)).collect();
    run(&build.finish(), "test", [1; 3], &arguments, memory)
}

/// Returns pointers at the given element offsets from a scalar pointer.
fn scattered(build: &mut Build, base: Value, offsets: &[i64]) -> Value {
    let count = offsets.len() as i64;
    let one = build.op(Reshape, &[base], pointers(F32, &[1]), &[]);
    let all = build.op(Broadcast, &[one], pointers(F32, &[count]), &[]);
    let offsets = build.constant(&i64s(offsets));
    build.op(Offset, &[all, offsets], pointers(F32, &[count]), &[])
}

/// Loads elements at offsets of the first buffer, masked, and stores them to the second buffer.
fn gather(
    offsets: &[i64],
    mask: Option<&[bool]>,
    padding: Option<f32>,
    input: &[f32],
) -> Result<Vec<f32>, Error> {
    let (mut build, parameters) = Build::new(&[pointers(F32, &[]), pointers(F32, &[])]);
    let mut operands = vec![scattered(&mut build, parameters[0], offsets)];
    operands.extend(mask.map(|mask| build.constant(&bools(mask))));
    operands.extend(padding.map(|x| build.constant(&f32s(&vec![x; offsets.len()]))));
    let results = [tile(F32, &[offsets.len() as i64]), Type::Token];
    let groups = segments(&[1, mask.is_some().into(), padding.is_some().into(), 0]);
    let loaded = build.op_with(LoadPtrTko, &operands, &results, &[WEAK, groups], &[])[0];
    build.store(parameters[1], loaded);
    let (mut memory, at) = buffer(input);
    let out = memory.allocate("out", 4 * offsets.len() as u64);
    launch(build, &[at, out], &mut memory)?;
    Ok(memory.read_f32(out, offsets.len()))
}

#[test]
fn loads_follow_64_bit_offsets_in_any_order() {
    let input = [0.0, 1.0, 2.0, 3.0, 4.0];
    assert_eq!(gather(&[4, 0, 1, 2, 2], None, None, &input).unwrap(), [4.0, 0.0, 1.0, 2.0, 2.0]);
}

#[test]
fn masked_loads_touch_nothing_and_give_the_padding() {
    let mask = [true, false, true];
    let offsets = [1, 1 << 40, 0];
    let got = gather(&offsets, Some(&mask), Some(-7.0), &[5.0, 6.0]).unwrap();
    assert_eq!(got, [6.0, -7.0, 5.0]);
    let got = gather(&offsets, Some(&mask), None, &[5.0, 6.0]).unwrap();
    assert!(got[1].is_nan() && got[0] == 6.0 && got[2] == 5.0, "{got:?}");
}

#[test]
fn loads_outside_of_an_allocation_are_errors() {
    for offset in [2, -1, 1 << 40] {
        let fault = fault(gather(&[0, offset], None, None, &[5.0, 6.0]));
        assert!(matches!(fault, Fault::OutOfBounds { access: "load", .. }), "{fault}");
    }
    let fault = fault(gather(&[i64::MAX], None, None, &[5.0]));
    assert!(matches!(fault, Fault::Undefined(_)), "{fault}");
}

#[test]
fn masked_stores_write_only_what_the_mask_leaves() {
    let (mut build, parameters) = Build::new(&[pointers(F32, &[])]);
    let to = scattered(&mut build, parameters[0], &[3, 1, 100]);
    let value = build.constant(&f32s(&[30.0, 10.0, 1000.0]));
    let mask = build.constant(&bools(&[true, true, false]));
    let groups = segments(&[1, 1, 1, 0]);
    build.op(StorePtrTko, &[to, value, mask], Type::Token, &[WEAK, groups]);
    let (mut memory, at) = buffer(&[0.0; 4]);
    memory.set_audit(true);
    let module = build.finish();
    for count in 1..=2 {
        run(&module, "test", [1; 3], &[Argument::Pointer(at)], &mut memory).unwrap();
        assert_eq!(memory.read_f32(at, 4), [0.0, 10.0, 0.0, 30.0]);
        assert_eq!(memory.stores(at, 4, 4), [0, count, 0, count]);
    }
    assert_eq!(memory.stores(at.offset(4), 1, 8), [u32::MAX], "half of it was stored");
    memory.clear_audit();
    assert_eq!(memory.stores(at, 4, 4), [0; 4]);
}

/// Runs an atomic on every element of a buffer. Returns its results, and the buffer.
fn atomic(
    ty: ScalarType,
    mode: i64,
    memory_bytes: &Column,
    operand: &Column,
) -> Result<[Vec<u8>; 2], Error> {
    let count = operand.shape[0];
    let (mut build, parameters) = Build::new(&[pointers(ty, &[]), pointers(ty, &[])]);
    let span = build.span(parameters[0], ty, count);
    let value = build.constant(operand);
    let attributes =
        [int("memory_ordering_semantics", 1), int("memory_scope", 1), int("mode", mode)];
    let attributes: Vec<_> = attributes.into_iter().chain([segments(&[1, 1, 0, 0])]).collect();
    let results = [tile(ty, &[count]), Type::Token];
    let old = build.op_with(AtomicRMW, &[span, value], &results, &attributes, &[])[0];
    build.store(parameters[1], old);
    let mut memory = Memory::new();
    let bytes = memory_bytes.bytes.len();
    let [at, out] = ["buffer", "old"].map(|name| memory.allocate(name, bytes as u64));
    memory.write(at, &memory_bytes.bytes);
    launch(build, &[at, out], &mut memory)?;
    Ok([memory.read(out, bytes), memory.read(at, bytes)])
}

#[test]
fn atomics_give_the_old_and_leave_the_combined() {
    let (old, operand) = (i32s(&[-4, 12]), i32s(&[6, 10]));
    for (mode, expected) in [
        (0, [-4 & 6, 8]),
        (1, [-4 | 6, 14]),
        (2, [-4 ^ 6, 6]),
        (3, [2, 22]),
        (5, [6, 12]),
        (6, [-4, 10]),
        (7, [-4, 12]),
        (8, [6, 10]),
        (9, [6, 10]),
    ] {
        let [before, after] = atomic(I32, mode, &old, &operand).unwrap();
        assert_eq!((before, after), (old.bytes.clone(), i32s(&expected).bytes), "mode {mode}");
    }
    let [_, after] = atomic(F32, 4, &f32s(&[1.5, -2.0]), &f32s(&[0.25, 2.0])).unwrap();
    assert_eq!(after, f32s(&[1.75, 0.0]).bytes);
    let fault = fault(atomic(I32, 4, &old, &operand));
    assert!(matches!(fault, Fault::Unsupported(_)), "{fault}");
}

#[test]
fn compare_and_swap_stores_only_on_a_match() {
    let (mut build, parameters) = Build::new(&[pointers(I32, &[]), pointers(I32, &[])]);
    let span = build.span(parameters[0], I32, 2);
    let expected = build.constant(&i32s(&[1, 1]));
    let value = build.constant(&i32s(&[50, 60]));
    let attributes =
        [int("memory_ordering_semantics", 4), int("memory_scope", 1), segments(&[1, 1, 1, 0, 0])];
    let results = [tile(I32, &[2]), Type::Token];
    let operands = [span, expected, value];
    let old = build.op_with(AtomicCAS, &operands, &results, &attributes, &[])[0];
    build.store(parameters[1], old);
    let mut memory = Memory::new();
    let [at, out] = ["buffer", "old"].map(|name| memory.allocate(name, 8));
    memory.write_i32(at, &[1, 2]);
    launch(build, &[at, out], &mut memory).unwrap();
    assert_eq!(memory.read_i32(at, 2), [50, 2]);
    assert_eq!(memory.read_i32(out, 2), [1, 2]);
}
