//! Modules built by hand, and columns of numbers for them.

use burst_attention_interpreter::{Address, Argument, Error, Fault, GridRun, Memory};
use cutile_ir::builder::{OpBuilder, append_op, build_single_block_region};
use cutile_ir::bytecode::Opcode;
use cutile_ir::ir::*;
use half::{bf16, f16};

/// Attributes of an operation.
pub type Attributes<'a> = &'a [(&'a str, Attribute)];

/// The numbers of a tile.
#[derive(Debug, Clone, PartialEq)]
pub struct Column {
    pub ty: ScalarType,
    pub bytes: Vec<u8>,
    pub shape: Vec<i64>,
}

macro_rules! columns {
    ($($name:ident, $type:ty, $scalar:ident;)*) => {$(
        pub fn $name(values: &[$type]) -> Column {
            let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            Column { ty: ScalarType::$scalar, bytes, shape: vec![values.len() as i64] }
        }
    )*};
}

columns! {
    i8s, i8, I8;
    i16s, i16, I16;
    i32s, i32, I32;
    i64s, i64, I64;
    f16s, f16, F16;
    bf16s, bf16, BF16;
    f32s, f32, F32;
    f64s, f64, F64;
}

pub fn bools(values: &[bool]) -> Column {
    let bytes = values.iter().map(|&x| x.into()).collect();
    Column { ty: ScalarType::I1, bytes, shape: vec![values.len() as i64] }
}

impl Column {
    pub fn shaped(mut self, shape: &[i64]) -> Self {
        self.shape = shape.to_vec();
        self
    }

    pub fn f32s(&self) -> Vec<f32> {
        assert_eq!(self.ty, ScalarType::F32);
        self.bytes.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect()
    }

    pub fn bits(&self) -> Vec<u32> {
        self.f32s().into_iter().map(f32::to_bits).collect()
    }
}

pub fn tile(ty: ScalarType, shape: &[i64]) -> Type {
    Type::Tile(TileType { shape: shape.to_vec(), element_type: TileElementType::Scalar(ty) })
}

pub fn pointers(pointee: ScalarType, shape: &[i64]) -> Type {
    let element_type = TileElementType::Pointer(Box::new(PointerType { pointee }));
    Type::Tile(TileType { shape: shape.to_vec(), element_type })
}

pub fn segments(sizes: &[i64]) -> (&'static str, Attribute) {
    let sizes = sizes.iter().map(|&size| Attribute::i32(size)).collect();
    ("operandSegmentSizes", Attribute::Array(sizes))
}

pub const WEAK: (&str, Attribute) =
    ("memory_ordering_semantics", Attribute::Integer(0, Type::Scalar(ScalarType::I32)));

/// Returns an attribute that is an enumerant or a number.
pub fn int(name: &str, value: i64) -> (&str, Attribute) {
    (name, Attribute::i32(value))
}

pub fn flag(name: &str) -> (&str, Attribute) {
    (name, Attribute::Bool(true))
}

/// A module with one entry, `test`, under construction.
pub struct Build {
    pub module: Module,
    pub block: BlockId,
    region: RegionId,
}

impl Build {
    pub fn new(parameters: &[Type]) -> (Self, Vec<Value>) {
        let mut module = Module::new("test");
        let (region, block, arguments) = build_single_block_region(&mut module, parameters);
        (Self { module, block, region }, arguments)
    }

    /// Appends an operation with regions.
    pub fn op_with(
        &mut self,
        opcode: Opcode,
        operands: &[Value],
        results: &[Type],
        attributes: Attributes,
        regions: &[RegionId],
    ) -> Vec<Value> {
        let attributes = attributes.iter().map(|(name, value)| (name.to_string(), value.clone()));
        let (id, values) = OpBuilder::new(opcode, Location::Unknown)
            .operands(operands.iter().copied())
            .results(results.iter().cloned())
            .attrs(attributes)
            .regions(regions.iter().copied())
            .build(&mut self.module);
        append_op(&mut self.module, self.block, id);
        values
    }

    pub fn op(
        &mut self,
        opcode: Opcode,
        operands: &[Value],
        result: Type,
        attributes: Attributes,
    ) -> Value {
        self.op_with(opcode, operands, &[result], attributes, &[])[0]
    }

    /// Builds a region of the operations that `fill` appends.
    pub fn region(
        &mut self,
        arguments: &[Type],
        fill: impl FnOnce(&mut Self, &[Value]),
    ) -> RegionId {
        let (region, block, values) = build_single_block_region(&mut self.module, arguments);
        let outer = std::mem::replace(&mut self.block, block);
        fill(self, &values);
        self.block = outer;
        region
    }

    pub fn constant(&mut self, column: &Column) -> Value {
        let element_type = tile(column.ty, &column.shape);
        let value = Attribute::DenseElements(DenseElements {
            element_type: element_type.clone(),
            shape: column.shape.clone(),
            data: column.bytes.clone(),
        });
        self.op(Opcode::Constant, &[], element_type, &[("value", value)])
    }

    pub fn scalar(&mut self, value: i32) -> Value {
        self.constant(&i32s(&[value]).shaped(&[]))
    }

    /// Returns pointers to the `count` elements from a scalar pointer on.
    pub fn span(&mut self, base: Value, ty: ScalarType, count: i64) -> Value {
        let one = self.op(Opcode::Reshape, &[base], pointers(ty, &[1]), &[]);
        let all = self.op(Opcode::Broadcast, &[one], pointers(ty, &[count]), &[]);
        let iota = self.op(Opcode::Iota, &[], tile(ScalarType::I32, &[count]), &[]);
        self.op(Opcode::Offset, &[all, iota], pointers(ty, &[count]), &[])
    }

    /// Stores a tile row-major from a scalar pointer on.
    pub fn store(&mut self, base: Value, value: Value) {
        let Type::Tile(ty) = self.module.value_type(value).clone() else { panic!("a tile") };
        let TileElementType::Scalar(scalar) = ty.element_type else { panic!("scalars") };
        let count = ty.shape.iter().product();
        let flat = self.op(Opcode::Reshape, &[value], tile(scalar, &[count]), &[]);
        let span = self.span(base, scalar, count);
        let attributes = [WEAK, segments(&[1, 1, 0, 0])];
        self.op(Opcode::StorePtrTko, &[span, flat], Type::Token, &attributes);
    }

    pub fn finish(mut self) -> Module {
        self.op_with(Opcode::Return, &[], &[], &[], &[]);
        let name = Attribute::String("test".into());
        let (entry, _) = OpBuilder::new(Opcode::Entry, Location::Unknown)
            .attr("sym_name", name)
            .region(self.region)
            .build(&mut self.module);
        self.module.functions.push(entry);
        self.module
    }
}

/// Returns the tile that an entry without arguments computes and stores.
pub fn compute(fill: impl FnOnce(&mut Build) -> Value) -> Result<Column, Error> {
    // The type of the pointer follows from the result, so this builds the entry twice.
    let (mut build, parameters) = Build::new(&[pointers(ScalarType::I8, &[])]);
    let result = fill(&mut build);
    let Type::Tile(ty) = build.module.value_type(result).clone() else { panic!("a tile") };
    let TileElementType::Scalar(scalar) = ty.element_type else { panic!("scalars") };
    let cast = build.op(Opcode::PtrToPtr, &parameters, pointers(scalar, &[]), &[]);
    build.store(cast, result);
    let count = ty.shape.iter().product::<i64>() as usize;
    let bytes = count * scalar.byte_width();
    let mut memory = Memory::new();
    let out = memory.allocate("out", bytes as u64);
    run(&build.finish(), "test", [1; 3], &[Argument::Pointer(out)], &mut memory)?;
    Ok(Column { ty: scalar, bytes: memory.read(out, bytes), shape: ty.shape })
}

/// Returns the result of an operation on constants, with the shape of the first constant.
pub fn apply(
    opcode: Opcode,
    attributes: Attributes,
    inputs: &[Column],
    result: ScalarType,
) -> Result<Column, Error> {
    let shape = inputs[0].shape.clone();
    apply_to(opcode, attributes, inputs, result, &shape)
}

/// Returns the result of an operation on constants.
pub fn apply_to(
    opcode: Opcode,
    attributes: Attributes,
    inputs: &[Column],
    result: ScalarType,
    shape: &[i64],
) -> Result<Column, Error> {
    compute(|build| {
        let inputs: Vec<_> = inputs.iter().map(|input| build.constant(input)).collect();
        build.op(opcode, &inputs, tile(result, shape), attributes)
    })
}

/// Runs every block of a grid.
pub fn run(
    module: &Module,
    entry: &str,
    grid: [u32; 3],
    arguments: &[Argument],
    memory: &mut Memory,
) -> Result<(), Error> {
    GridRun::default().run(module, entry, grid, arguments, memory)
}

/// Returns why a run failed.
pub fn fault<T: std::fmt::Debug>(outcome: Result<T, Error>) -> Fault {
    let error = outcome.expect_err("the run must fail");
    error.fault().unwrap_or_else(|| panic!("no operation failed: {error}")).clone()
}

/// Returns a memory with one float32 buffer.
pub fn buffer(values: &[f32]) -> (Memory, Address) {
    let mut memory = Memory::new();
    let at = memory.allocate("buffer", 4 * values.len() as u64);
    memory.write_f32(at, values);
    (memory, at)
}
