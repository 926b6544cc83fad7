//! Additions through views: sums of several blocks, ragged edges, accesses that conflict with them.

use super::build::*;
use super::sample;
use burst_attention_interpreter::{Argument, Error, Fault, GridRun, Memory};
use cutile_ir::Module;
use cutile_ir::bytecode::Opcode::{self, *};
use cutile_ir::ir::ScalarType::*;
use cutile_ir::ir::{PaddingValue, PartitionViewType, ScalarType, TensorViewType, Type};

/// Adds parts `[count, length, 16]` in row tiles of 8 to a sum `[length, columns]`.
struct Sum {
    parts: Vec<f32>,
    length: usize,
    columns: usize,
}

impl Sum {
    fn of(count: usize, length: usize, columns: usize, part: impl Fn(usize) -> f32) -> Self {
        Self { parts: (0..count * length * 16).map(part).collect(), length, columns }
    }

    /// Returns the sum and the number of additions to each element, with one row of margin behind.
    fn run(&self, module: &Module, seed: u64) -> (Vec<f32>, Vec<u32>) {
        let Self { parts, length, columns } = self;
        let (count, elements) = (parts.len() / length / 16, (length + 1) * columns);
        let (mut memory, from) = buffer(parts);
        let to = memory.allocate("sum", 4 * elements as u64);
        memory.write_f32(to, &vec![0.5; elements]);
        memory.set_audit(true);
        let sizes = [count, *length, *columns].map(|size| Argument::I32(size as i32));
        let arguments = [[from, to].map(Argument::Pointer).as_slice(), &sizes].concat();
        let grid = [count as u32, length.div_ceil(8) as u32, 1];
        let launch = GridRun { seed, ..GridRun::default() };
        launch.run(module, "add_entry", grid, &arguments, &mut memory).unwrap();
        (memory.read_f32(to, elements), memory.stores(to, elements, 4))
    }
}

#[test]
fn blocks_add_to_the_same_elements_and_drop_what_lies_outside() {
    let module = sample::compile("add", &[8, 16]);
    // The last tile has 3 of its 8 rows; the sum has 12 of 16 columns.
    let sum = Sum::of(5, 19, 12, |at| at as f32);
    for seed in 0..4 {
        let (sums, additions) = sum.run(&module, seed);
        for (at, (got, times)) in sums.into_iter().zip(additions).enumerate() {
            let (row, column) = (at / 12, at % 12);
            let parts = sum.parts.chunks_exact(19 * 16);
            let expected: f32 = parts.filter_map(|part| part.get(row * 16 + column)).sum();
            assert_eq!(got, 0.5 + expected, "row {row}, column {column}, seed {seed}");
            assert_eq!(times, if row < 19 { 5 } else { 0 }, "row {row}, column {column}");
        }
    }
}

#[test]
fn sums_depend_on_the_order_of_blocks_in_the_last_bits() {
    let module = sample::compile("add", &[8, 16]);
    let sum = Sum::of(9, 8, 16, |at| 1.0 / (1.0 + at as f32));
    let sums: Vec<_> = (0..4).map(|seed| sum.run(&module, seed).0).collect();
    assert!(sums[1..].iter().any(|other| other != &sums[0]), "every order gives the same");
    for (a, b) in sums.iter().flat_map(|other| other.iter().zip(&sums[0])) {
        assert!((a - b).abs() <= 9.0 * f32::EPSILON * a, "{a} and {b}");
    }
}

/// A kernel whose blocks access a view of 12 elements in tiles of 4.
#[derive(Clone)]
struct Case {
    element: ScalarType,
    padding: Option<PaddingValue>,
    ordering: i64,
    scope: i64,
    mode: i64,
    /// A load or a store of tile (block + 1) after the addition to tile 1 of the view.
    plain: Option<Opcode>,
    blocks: u32,
    /// Elements in memory.
    length: usize,
}

const CASE: Case = Case {
    element: F32,
    padding: None,
    ordering: 1,
    scope: 1,
    mode: 4,
    plain: None,
    blocks: 1,
    length: 12,
};

impl Case {
    fn run(&self, seed: u64) -> Result<Vec<f32>, Error> {
        let (mut build, parameters) = Build::new(&[pointers(self.element, &[])]);
        let ty = TensorViewType { element_type: self.element, shape: vec![12], strides: vec![1] };
        let groups = segments(&[1, 0, 0]);
        let tensor = build.op(MakeTensorView, &parameters, Type::TensorView(ty.clone()), &[groups]);
        let partition = Type::PartitionView(PartitionViewType {
            tile_shape: vec![4],
            tensor_view: ty,
            dim_map: vec![0],
            padding_value: self.padding,
        });
        let view = build.op(MakePartitionView, &[tensor], partition, &[]);
        let ones = if self.element == F32 { f32s(&[1.0; 4]) } else { i32s(&[1; 4]) };
        let (one, ones) = (build.scalar(1), build.constant(&ones));
        let attributes = [
            int("memory_ordering_semantics", self.ordering),
            int("memory_scope", self.scope),
            int("mode", self.mode),
            segments(&[1, 1, 1, 0]),
        ];
        build.op(AtomicRedViewTko, &[view, one, ones], Type::Token, &attributes);
        let id = build.op_with(GetTileBlockId, &[], &vec![tile(I32, &[]); 3], &[], &[])[0];
        let next = build.op(AddI, &[id, one], tile(I32, &[]), &[int("overflow", 0)]);
        match self.plain {
            Some(StoreViewTko) => {
                let attributes = [WEAK, segments(&[1, 1, 1, 0])];
                build.op(StoreViewTko, &[ones, view, next], Type::Token, &attributes);
            }
            Some(LoadViewTko) => {
                let results = [tile(self.element, &[4]), Type::Token];
                let attributes = [WEAK, segments(&[1, 1, 0])];
                build.op_with(LoadViewTko, &[view, next], &results, &attributes, &[]);
            }
            _ => {}
        }
        let mut memory = Memory::new();
        let at = memory.allocate("sums", 4 * self.length as u64);
        memory.write(at, &vec![0; 4 * self.length]);
        let (launch, arguments) = (GridRun { seed, ..GridRun::default() }, [Argument::Pointer(at)]);
        let grid = [self.blocks, 1, 1];
        launch.run(&build.finish(), "test", grid, &arguments, &mut memory)?;
        Ok(memory.read_f32(at, self.length))
    }
}

#[test]
fn a_block_may_load_and_store_what_it_adds_to_alone() {
    let zeros_and = |sums: [f32; 4]| [[0.0; 4], sums, [0.0; 4]].concat();
    let stored = Case { plain: Some(StoreViewTko), ..CASE }.run(0);
    assert_eq!(stored.unwrap(), zeros_and([1.0; 4]));
    let loaded = Case { plain: Some(LoadViewTko), ..CASE }.run(0);
    assert_eq!(loaded.unwrap(), zeros_and([1.0; 4]));
    assert_eq!(Case { blocks: 3, ..CASE }.run(0).unwrap(), zeros_and([3.0; 4]));
}

#[test]
fn loads_and_stores_must_not_meet_additions_of_other_blocks() {
    // Block 0 loads or stores the elements that both blocks add to, in either order of blocks.
    for (opcode, name) in [(LoadViewTko, "load"), (StoreViewTko, "store")] {
        let mut seen = vec![];
        for seed in 0..8 {
            let error = Case { plain: Some(opcode), blocks: 2, ..CASE }.run(seed).unwrap_err();
            let message = error.to_string();
            assert!(message.contains("byte 16 of 'sums'"), "{message}");
            let Some(Fault::Conflict { access, .. }) = error.fault() else { panic!("{message}") };
            seen.push(*access);
        }
        assert!(seen.iter().all(|access| [name, "addition"].contains(access)), "{seen:?}");
        assert!(seen.contains(&name) && seen.contains(&"addition"), "{seen:?}");
    }
}

#[test]
fn a_launch_may_load_and_store_what_another_launch_added_to() {
    let module = sample::compile("add", &[8, 16]);
    let (mut memory, at) = buffer(&[1.0; 8 * 16]);
    let to = memory.allocate("sum", 4 * 8 * 16);
    memory.write_f32(to, &[1.0; 8 * 16]);
    // The second launch loads the elements that the first launch added to, and the reverse.
    for (from, to) in [(at, to), (to, at)] {
        let sizes = [1, 8, 16].map(Argument::I32);
        let arguments = [[from, to].map(Argument::Pointer).as_slice(), &sizes].concat();
        GridRun::default().run(&module, "add_entry", [1; 3], &arguments, &mut memory).unwrap();
    }
    assert_eq!([memory.read_f32(at, 1), memory.read_f32(to, 1)], [[3.0], [2.0]]);
}

#[test]
fn other_reductions_are_refused_by_name() {
    let refused = |case: Case, part: &str| {
        let message = case.run(0).unwrap_err().to_string();
        for part in ["atomic_red_view_tko", part] {
            assert!(message.contains(part), "{part} in {message}");
        }
    };
    refused(Case { mode: 3, ..CASE }, "mode 3 of Scalar(F32)");
    refused(Case { element: I32, ..CASE }, "mode 4 of Scalar(I32)");
    refused(Case { mode: 9, ..CASE }, "mode 9, exchange");
    refused(Case { mode: 10, ..CASE }, "mode 10");
    refused(Case { ordering: 4, ..CASE }, "ordering 4 and scope 1; expected relaxed (1)");
    refused(Case { scope: 0, ..CASE }, "ordering 1 and scope 0; expected relaxed (1) and device");
    refused(Case { padding: Some(PaddingValue::Zero), ..CASE }, "padded view");
    refused(Case { length: 7, ..CASE }, "byte 28 of 'sums', which has 28");
}
