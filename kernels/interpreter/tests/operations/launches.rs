//! Entries, arguments, blocks, and reports of memory.

use super::build::*;
use burst_attention_interpreter::{Address, Argument, Error, Fault, GridRun, Memory};
use cutile_ir::Module;
use cutile_ir::bytecode::Opcode::*;
use cutile_ir::ir::ScalarType::*;
use cutile_ir::ir::{Attribute, Type};

/// Returns a module in which each block writes, at its own index, the number of blocks before it.
fn tickets() -> Module {
    let (mut build, parameters) =
        Build::new(&[pointers(I32, &[]), pointers(I32, &[]), tile(I32, &[])]);
    let ids = build.op_with(GetTileBlockId, &[], &vec![tile(I32, &[]); 3], &[], &[]);
    let sizes = build.op_with(GetNumTileBlocks, &[], &vec![tile(I32, &[]); 3], &[], &[]);
    let wrap = [int("overflow", 0)];
    let row = build.op(MulI, &[ids[1], sizes[0]], tile(I32, &[]), &wrap);
    let index = build.op(AddI, &[row, ids[0]], tile(I32, &[]), &wrap);
    let at = build.op(Offset, &[parameters[1], index], pointers(I32, &[]), &[]);
    let attributes = [
        int("memory_ordering_semantics", 1),
        int("memory_scope", 1),
        int("mode", 3),
        segments(&[1, 1, 0, 0]),
    ];
    let results = [tile(I32, &[]), Type::Token];
    let operands = [parameters[0], parameters[2]];
    let ticket = build.op_with(AtomicRMW, &operands, &results, &attributes, &[])[0];
    build.store(at, ticket);
    build.finish()
}

fn order(launch: &GridRun, grid: [u32; 3]) -> Result<Vec<i32>, Error> {
    let mut memory = Memory::new();
    let [counter, out] = [4, 24].map(|bytes| memory.allocate("tickets", bytes));
    memory.write_i32(counter, &[0]);
    memory.write_i32(out, &[-1; 6]);
    let arguments = [Argument::Pointer(counter), Argument::Pointer(out), Argument::I32(1)];
    launch.run(&tickets(), "test", grid, &arguments, &mut memory)?;
    Ok(memory.read_i32(out, 6))
}

#[test]
fn every_block_runs_once_in_an_order_of_the_seed() {
    let orders: Vec<_> = (0..4)
        .map(|seed| order(&GridRun { seed, ..GridRun::default() }, [3, 2, 1]).unwrap())
        .collect();
    for order in &orders {
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, [0, 1, 2, 3, 4, 5]);
    }
    assert!(orders.iter().any(|order| *order != orders[0]), "{orders:?}");
    assert_eq!(order(&GridRun::default(), [3, 2, 1]).unwrap(), orders[0]);
}

#[test]
fn only_the_blocks_asked_for_run() {
    let launch = GridRun { blocks: Some(vec![[2, 1, 0], [0, 0, 0]]), ..GridRun::default() };
    assert_eq!(order(&launch, [3, 2, 1]).unwrap(), [1, -1, -1, -1, -1, 0]);
    let error = order(&launch, [2, 2, 1]).unwrap_err();
    assert_eq!(error, Error::Grid { grid: [2, 2, 1], block: [2, 1, 0] });
}

#[test]
fn arguments_must_match_the_entry() {
    let mut memory = Memory::new();
    let at = memory.allocate("buffer", 4);
    let pointer = Argument::Pointer(at);
    let mut launch = |name: &str, arguments: &[Argument]| {
        run(&tickets(), name, [1; 3], arguments, &mut memory).unwrap_err()
    };
    let error = launch("test", &[pointer]);
    assert_eq!(error.to_string(), "'test' takes 3 arguments, got 1");
    for (index, arguments) in [
        (2, [pointer, pointer, Argument::I64(1)]),
        (2, [pointer, pointer, pointer]),
        (0, [Argument::I64(1), pointer, Argument::I32(1)]),
    ] {
        let error = launch("test", &arguments);
        assert!(matches!(error, Error::ArgumentType { index: i, .. } if i == index), "{error}");
    }
    let error = launch("tset", &[pointer]);
    assert!(matches!(error, Error::NoEntry { .. }), "{error}");
}

#[test]
fn what_has_no_meaning_here_is_refused_by_name() {
    let error = compute(|build| build.op(Alloca, &[], tile(F32, &[4]), &[])).unwrap_err();
    assert!(matches!(error.fault(), Some(Fault::Unsupported(_))), "{error}");
    assert!(error.to_string().contains("alloca"), "{error}");
    let inputs = [i32s(&[1]), i32s(&[2])];
    let strange = [int("overflow", 0), ("saturate", Attribute::Bool(true))];
    let fault_attribute = fault(apply(AddI, &strange, &inputs, I32));
    assert!(matches!(fault_attribute, Fault::Unsupported(_)), "{fault_attribute}");
    let fault_value = fault(apply(AddI, &[int("overflow", 9)], &inputs, I32));
    assert!(matches!(fault_value, Fault::Unsupported(_)), "{fault_value}");
    let fault_type = fault(apply(Bitcast, &[], &[i8s(&[1])], F8E4M3FN));
    assert!(matches!(fault_type, Fault::Unsupported(_)), "{fault_type}");
}

/// Loads one float32 at the first pointer and stores it at the second.
fn copy(memory: &mut Memory, from: Address, to: Address) -> Result<(), Error> {
    let (mut build, parameters) = Build::new(&[pointers(F32, &[]), pointers(F32, &[])]);
    let attributes = [WEAK, segments(&[1, 0, 0, 0])];
    let results = [tile(F32, &[]), Type::Token];
    let loaded = build.op_with(LoadPtrTko, &parameters[..1], &results, &attributes, &[])[0];
    build.store(parameters[1], loaded);
    run(&build.finish(), "test", [1; 3], &[from, to].map(Argument::Pointer), memory)
}

#[test]
fn loads_of_bytes_never_written_are_errors_unless_allowed() {
    let mut memory = Memory::new();
    let [from, to] = ["from", "to"].map(|name| memory.allocate(name, 64));
    memory.write(from, &[0; 3]);
    let unwritten = fault(copy(&mut memory, from, to));
    let address = from.offset(3);
    assert!(matches!(unwritten, Fault::Uninitialised { address: at, .. } if at == address));
    memory.allow_uninitialised(true);
    copy(&mut memory, from.offset(4), to).unwrap();
    assert!(memory.read_f32(to, 1)[0].is_nan());
}

#[test]
fn errors_name_kernel_block_operation_and_the_nearest_allocation() {
    let mut memory = Memory::new();
    let [from, to] = ["from", "to"].map(|name| memory.allocate(name, 64));
    let message = copy(&mut memory, from.offset(64), to).unwrap_err().to_string();
    for part in ["test", "[0, 0, 0]", "load_ptr_tko", "byte 64 of 'from', which has 64"] {
        assert!(message.contains(part), "{part} in {message}");
    }
}

#[test]
fn pointers_must_be_aligned() {
    let mut memory = Memory::new();
    let [from, to] = ["from", "to"].map(|name| memory.allocate(name, 64));
    memory.write(from, &[0; 64]);
    let fault = fault(copy(&mut memory, from.offset(2), to));
    assert!(matches!(fault, Fault::Undefined(_)), "{fault}");
}

#[test]
fn freed_memory_is_gone_and_addresses_can_be_chosen() {
    let mut memory = Memory::new();
    let from = memory.allocate_at("from", Address(0x1000), 4);
    let to = memory.allocate("to", 4);
    assert_eq!(to.0 % 256, 0);
    memory.write_f32(from, &[3.0]);
    copy(&mut memory, from, to).unwrap();
    assert_eq!(memory.read_f32(to, 1), [3.0]);
    memory.free(from);
    assert!(!memory.contains(from, 1));
    let fault_freed = fault(copy(&mut memory, from, to));
    assert!(matches!(fault_freed, Fault::OutOfBounds { .. }), "{fault_freed}");
    memory.allocate_at("again", from, 4);
    let fault_stale = fault(copy(&mut memory, from, to));
    assert!(matches!(fault_stale, Fault::Uninitialised { .. }), "{fault_stale}");
}
