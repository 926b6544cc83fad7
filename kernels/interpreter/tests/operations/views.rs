//! Views: tiles in memory, ragged edges, padding, permuted axes.

use super::build::*;
use burst_attention_interpreter::{Argument, Error, Fault, GridRun, Memory};
use cutile_ir::bytecode::Opcode::*;
use cutile_ir::ir::ScalarType::*;
use cutile_ir::ir::*;

/// A view of `[sizes; strides]` in tiles, loaded or stored at an index.
#[derive(Clone)]
struct Case {
    sizes: Vec<i64>,
    strides: Vec<i64>,
    tile: Vec<i32>,
    axes: Vec<i32>,
    padding: Option<PaddingValue>,
    index: Vec<i32>,
    inbounds: Option<Vec<bool>>,
    launch: GridRun,
}

fn case(sizes: &[i64], tile: &[i32], index: &[i32]) -> Case {
    let mut strides = vec![1; sizes.len()];
    for axis in (1..sizes.len()).rev() {
        strides[axis - 1] = strides[axis] * sizes[axis];
    }
    Case {
        sizes: sizes.to_vec(),
        strides,
        tile: tile.to_vec(),
        axes: (0..sizes.len() as i32).collect(),
        padding: Some(PaddingValue::Zero),
        index: index.to_vec(),
        inbounds: None,
        launch: GridRun::default(),
    }
}

impl Case {
    fn tile_type(&self) -> Type {
        tile(F32, &self.tile.iter().map(|&size| size.into()).collect::<Vec<_>>())
    }

    /// Returns the partition view; every size and every stride but the last is dynamic.
    fn view(&self, build: &mut Build, base: Value) -> Value {
        let rank = self.sizes.len();
        let fixed = usize::from(self.strides[rank - 1] == 1);
        let mut strides = vec![DYNAMIC; rank];
        strides[rank - fixed..].fill(1);
        let view = TensorViewType { element_type: F32, shape: vec![DYNAMIC; rank], strides };
        let dynamic = self.sizes.iter().chain(&self.strides[..rank - fixed]);
        let mut operands = vec![base];
        operands.extend(dynamic.map(|&x| build.constant(&i64s(&[x]).shaped(&[]))));
        let groups = segments(&[1, rank as i64, (rank - fixed) as i64]);
        let tensor = build.op(MakeTensorView, &operands, Type::TensorView(view.clone()), &[groups]);
        let partition = Type::PartitionView(PartitionViewType {
            tile_shape: self.tile.clone(),
            tensor_view: view,
            dim_map: self.axes.clone(),
            padding_value: self.padding,
        });
        build.op(MakePartitionView, &[tensor], partition, &[])
    }

    fn access(&self, build: &mut Build, store: bool, first: &[Value]) -> Value {
        let mut operands = first.to_vec();
        operands.extend(self.index.iter().map(|&index| build.scalar(index)));
        let mut groups = vec![1; first.len()];
        groups.extend([self.index.len() as i64, 0]);
        let mut attributes = vec![WEAK, segments(&groups)];
        if let Some(inbounds) = &self.inbounds {
            attributes.push(("inbounds", Attribute::dense_bool_array(inbounds.clone())));
        }
        let (opcode, results) = if store {
            (StoreViewTko, vec![Type::Token])
        } else {
            (LoadViewTko, vec![self.tile_type(), Type::Token])
        };
        build.op_with(opcode, &operands, &results, &attributes, &[])[0]
    }

    fn load(&self, input: &[f32]) -> Result<Vec<f32>, Error> {
        let (mut build, parameters) = Build::new(&[pointers(F32, &[]), pointers(F32, &[])]);
        let view = self.view(&mut build, parameters[0]);
        let loaded = self.access(&mut build, false, &[view]);
        build.store(parameters[1], loaded);
        let (mut memory, at) = buffer(input);
        let count = self.tile.iter().product::<i32>() as usize;
        let out = memory.allocate("out", 4 * count as u64);
        let arguments = [at, out].map(Argument::Pointer);
        self.launch.run(&build.finish(), "test", [1; 3], &arguments, &mut memory)?;
        Ok(memory.read_f32(out, count))
    }

    /// Stores 1, 2, 3, ... over a buffer of zeros. Returns the buffer, and the number of stores to
    /// each element.
    fn store(&self, length: usize) -> Result<(Vec<f32>, Vec<u32>), Error> {
        let (mut build, parameters) = Build::new(&[pointers(F32, &[])]);
        let view = self.view(&mut build, parameters[0]);
        let count = self.tile.iter().product::<i32>();
        let shape: Vec<i64> = self.tile.iter().map(|&size| size.into()).collect();
        let value = (1..=count).map(|x| x as f32).collect::<Vec<_>>();
        let value = build.constant(&f32s(&value).shaped(&shape));
        self.access(&mut build, true, &[value, view]);
        let (mut memory, at) = buffer(&vec![0.0; length]);
        memory.set_audit(true);
        let arguments = [Argument::Pointer(at)];
        self.launch.run(&build.finish(), "test", [1; 3], &arguments, &mut memory)?;
        Ok((memory.read_f32(at, length), memory.stores(at, length, 4)))
    }
}

fn counting(count: usize) -> Vec<f32> {
    (0..count).map(|x| x as f32).collect()
}

#[test]
fn ragged_tiles_are_padded() {
    // The last tile of a 3 x 5 tensor in tiles of 2 x 4 has one element.
    let mut case = case(&[3, 5], &[2, 4], &[1, 1]);
    for (padding, expected) in [
        (PaddingValue::Zero, 0.0f32),
        (PaddingValue::NegZero, -0.0),
        (PaddingValue::PosInf, f32::INFINITY),
        (PaddingValue::NegInf, f32::NEG_INFINITY),
    ] {
        case.padding = Some(padding);
        let bits: Vec<_> =
            case.load(&counting(15)).unwrap().into_iter().map(f32::to_bits).collect();
        let mut all = [expected.to_bits(); 8];
        all[0] = 14f32.to_bits();
        assert_eq!(bits, all, "{padding:?}");
    }
    for unspecified in [Some(PaddingValue::Nan), None] {
        case.padding = unspecified;
        let got = case.load(&counting(15)).unwrap();
        assert!(got[0] == 14.0 && got[1..].iter().all(|x| x.is_nan()), "{got:?}");
    }
}

#[test]
fn tiles_of_rank_five_follow_strides() {
    let mut case = case(&[2, 1, 2, 3, 2], &[1, 1, 2, 2, 2], &[1, 0, 0, 1, 0]);
    case.strides = vec![40, 7, 20, 2, 1];
    let got = case.load(&counting(80)).unwrap();
    assert_eq!(got, [44.0, 45.0, 0.0, 0.0, 64.0, 65.0, 0.0, 0.0]);
}

#[test]
fn a_dim_map_permutes_index_and_tile() {
    // Axis 0 of the tile runs along axis 1 of the 4 x 6 tensor.
    let mut case = case(&[4, 6], &[4, 2], &[0, 1]);
    case.axes = vec![1, 0];
    assert_eq!(case.load(&counting(24)).unwrap(), [12.0, 18.0, 13.0, 19.0, 14.0, 20.0, 15.0, 21.0]);
    case.index = vec![1, 0];
    assert_eq!(case.load(&counting(24)).unwrap(), [4.0, 10.0, 5.0, 11.0, 0.0, 0.0, 0.0, 0.0]);
    let mut three = self::case(&[2, 4, 8], &[8, 2, 4], &[0, 0, 0]);
    three.axes = vec![2, 0, 1];
    let got = three.load(&counting(64)).unwrap();
    assert_eq!(got[(3 * 2 + 1) * 4 + 2], (32 + 2 * 8 + 3) as f32);
}

#[test]
fn strides_of_zero_repeat_elements_only_where_allowed() {
    let mut case = case(&[4, 2], &[2, 2], &[1, 0]);
    case.strides = vec![0, 1];
    let fault = fault(case.load(&[7.0, 8.0]));
    assert!(matches!(fault, Fault::Undefined(_)), "{fault}");
    case.launch.allow_zero_strides = true;
    assert_eq!(case.load(&[7.0, 8.0]).unwrap(), [7.0, 8.0, 7.0, 8.0]);
}

#[test]
fn stores_drop_what_lies_outside() {
    let (stored, counts) = case(&[3, 5], &[2, 4], &[1, 1]).store(16).unwrap();
    let mut expected = [0.0; 16];
    expected[14] = 1.0;
    assert_eq!(stored, expected);
    assert_eq!(counts, expected.map(|x| x as u32));
    let (stored, counts) = case(&[3, 5], &[2, 4], &[0, 0]).store(15).unwrap();
    assert_eq!(stored[..10], [1.0, 2.0, 3.0, 4.0, 0.0, 5.0, 6.0, 7.0, 8.0, 0.0]);
    assert_eq!(counts.iter().sum::<u32>(), 8);
}

#[test]
fn indices_outside_of_the_index_space_are_errors() {
    for index in [[2, 0], [0, 2], [-1, 0]] {
        let fault = fault(case(&[3, 5], &[2, 4], &index).load(&counting(15)));
        assert!(matches!(fault, Fault::Undefined(_)), "{fault}");
    }
}

#[test]
fn inbounds_is_a_promise() {
    let mut case = case(&[3, 5], &[2, 4], &[0, 1]);
    case.inbounds = Some(vec![true, false]);
    assert_eq!(case.load(&counting(15)).unwrap()[..2], [4.0, 0.0]);
    case.inbounds = Some(vec![false, true]);
    let broken = fault(case.load(&counting(15)));
    assert!(matches!(broken, Fault::Promise(_)), "{broken}");
    let broken = fault(case.store(15));
    assert!(matches!(broken, Fault::Promise(_)), "{broken}");
}

#[test]
fn a_view_larger_than_its_allocation_is_an_error_when_used() {
    let fault_load = fault(case(&[4, 4], &[4, 4], &[0, 0]).load(&counting(15)));
    assert!(matches!(fault_load, Fault::OutOfBounds { access: "load", .. }), "{fault_load}");
    let fault_store = fault(case(&[4, 4], &[4, 4], &[0, 0]).store(15));
    assert!(matches!(fault_store, Fault::OutOfBounds { access: "store", .. }), "{fault_store}");
}

#[test]
fn shapes_can_be_asked_for() {
    let got = compute(|build| {
        let null = build.constant(&i64s(&[0]).shaped(&[]));
        let base = build.op(IntToPtr, &[null], pointers(F32, &[]), &[]);
        let mut case = case(&[3, 5], &[4, 2], &[0, 0]);
        case.axes = vec![1, 0];
        let view = case.view(build, base);
        let results = vec![tile(I32, &[]); 2];
        let space = build.op_with(GetIndexSpaceShape, &[view], &results, &[], &[]);
        let vectors: Vec<_> =
            space.into_iter().map(|x| build.op(Reshape, &[x], tile(I32, &[1]), &[])).collect();
        build.op(Cat, &vectors, tile(I32, &[2]), &[int("dim", 0)])
    });
    // Tiles of 4 along the axis of 5, of 2 along the axis of 3.
    assert_eq!(got.unwrap(), i32s(&[2, 2]));
}

#[test]
fn tensors_beyond_2_to_31_elements_take_no_room() {
    let mut case = case(&[1 << 33, 4], &[2, 4], &[0, 0]);
    case.index = vec![i32::MAX, 0];
    let (mut build, parameters) = Build::new(&[pointers(F32, &[]), pointers(F32, &[])]);
    let view = case.view(&mut build, parameters[0]);
    let loaded = case.access(&mut build, false, &[view]);
    build.store(parameters[1], loaded);
    let mut memory = Memory::new();
    let huge = memory.allocate("huge", 16 << 33);
    let out = memory.allocate("out", 32);
    let first = (i32::MAX as u64) * 2 * 16;
    memory.write_f32(huge.offset(first), &counting(8));
    let arguments = [huge, out].map(Argument::Pointer);
    case.launch.run(&build.finish(), "test", [1; 3], &arguments, &mut memory).unwrap();
    assert_eq!(memory.read_f32(out, 8), counting(8));
}
