//! Tile IR as bytes, which a later run reads back. The crate of Tile IR writes bytecode, and reads
//! none.

use std::collections::HashMap;

use cutile_ir::Module;
use cutile_ir::bytecode::Opcode;
use cutile_ir::ir::{
    Attribute, Block, BlockId, Bounded, DICompileUnit, DIFile, DISubprogram, DebugInfoLoc,
    DebugScope, DenseElements, DivBy, FuncType, Location, OpId, Operation, OptimizationHints,
    PaddingValue, PartitionViewType, PointerType, Region, RegionId, ScalarType, TensorViewType,
    TileElementType, TileType, Type, Value, ValueProducer,
};
use cutile_ir::requirements::OPCODES;

/// Returns a module's bytes, or nothing if it has parts that no kernel of this crate has.
pub(crate) fn write(module: &Module) -> Option<Vec<u8>> {
    let (bytes, results, arguments) = Default::default();
    let mut writer = Writer { module, bytes, results, arguments, count: 0 };
    module.name.put(&mut writer)?;
    module.producer.put(&mut writer)?;
    module.functions.put(&mut writer)?;
    module.globals.is_empty().then_some(writer.bytes)
}

/// Returns the module of some bytes, or nothing if [`write()`] did not make them.
pub(crate) fn read(bytes: &[u8]) -> Option<Module> {
    let mut reader = Reader { bytes, module: Module::new(""), values: vec![] };
    reader.module.name = Code::get(&mut reader)?;
    reader.module.producer = Code::get(&mut reader)?;
    reader.module.functions = Code::get(&mut reader)?;
    reader.bytes.is_empty().then_some(reader.module)
}

/// A module on its way to bytes. Its values are numbered in the order in which operations and blocks
/// begin.
struct Writer<'a> {
    module: &'a Module,
    bytes: Vec<u8>,
    /// The number of each operation's first result.
    results: HashMap<OpId, u32>,
    arguments: HashMap<Value, u32>,
    count: u32,
}

/// Bytes on their way to a module.
struct Reader<'a> {
    bytes: &'a [u8],
    module: Module,
    /// The values by the numbers of [`Writer`].
    values: Vec<Value>,
}

/// A value with a form in bytes. Both functions return nothing where there is no such form.
trait Code: Sized {
    fn put(&self, to: &mut Writer<'_>) -> Option<()>;
    fn get(from: &mut Reader<'_>) -> Option<Self>;
}

macro_rules! numbers {
    ($($name:ty)*) => {$(
        impl Code for $name {
            fn put(&self, to: &mut Writer<'_>) -> Option<()> {
                to.bytes.extend(self.to_le_bytes());
                Some(())
            }

            fn get(from: &mut Reader<'_>) -> Option<Self> {
                let (head, rest) = from.bytes.split_first_chunk()?;
                from.bytes = rest;
                Some(Self::from_le_bytes(*head))
            }
        }
    )*};
}

macro_rules! structs {
    ($($name:ident { $($field:ident)* })*) => {$(
        impl Code for $name {
            fn put(&self, to: &mut Writer<'_>) -> Option<()> {
                $(self.$field.put(to)?;)*
                Some(())
            }

            fn get(from: &mut Reader<'_>) -> Option<Self> {
                Some(Self { $($field: Code::get(from)?),* })
            }
        }
    )*};
}

/// The byte of a variant is its place in the list. A variant that is not listed has no bytes.
macro_rules! enums {
    ($($name:ident { $($variant:ident $(($($part:ident)*))? $({ $($field:ident)* })?)* })*) => {$(
        impl Code for $name {
            fn put(&self, to: &mut Writer<'_>) -> Option<()> {
                const NAMES: &[&str] = &[$(stringify!($variant)),*];
                let mut tag = |name| {
                    let place = NAMES.iter().position(|other| *other == name);
                    place.and_then(|place| u8::try_from(place).ok()?.put(to))
                };
                #[allow(unreachable_patterns)]
                match self {
                    $(Self::$variant $(($($part),*))? $({ $($field),* })? => {
                        tag(stringify!($variant))?;
                        $($($part.put(to)?;)*)?
                        $($($field.put(to)?;)*)?
                    })*
                    _ => return None,
                }
                Some(())
            }

            fn get(from: &mut Reader<'_>) -> Option<Self> {
                const NAMES: &[&str] = &[$(stringify!($variant)),*];
                let name = *NAMES.get(usize::from(u8::get(from)?))?;
                $(if name == stringify!($variant) {
                    $($(let $part = Code::get(from)?;)*)?
                    $($(let $field = Code::get(from)?;)*)?
                    return Some(Self::$variant $(($($part),*))? $({ $($field),* })?);
                })*
                None
            }
        }
    )*};
}

numbers! { u8 u16 u32 u64 i32 i64 f64 }

structs! {
    PointerType { pointee }
    TileType { shape element_type }
    TensorViewType { element_type shape strides }
    PartitionViewType { tile_shape tensor_view dim_map padding_value }
    FuncType { inputs results }
    DivBy { divisor every along }
    Bounded { lb ub }
    OptimizationHints { entries }
    DenseElements { element_type shape data }
    DebugInfoLoc { filename line column scope }
    DISubprogram { file line name linkage_name compile_unit scope_line }
    DICompileUnit { file }
    DIFile { name directory }
}

enums! {
    ScalarType { I1 I8 I16 I32 I64 F16 BF16 F32 F64 }
    TileElementType { Scalar(scalar) Pointer(pointer) }
    PaddingValue { Zero NegZero Nan PosInf NegInf }
    Type { Scalar(ty) Pointer(ty) Tile(ty) TensorView(ty) PartitionView(ty) Func(ty) Token }
    Attribute {
        Integer(value ty) Float(value ty) Bool(value) Type(ty) String(text) Array(values)
        DenseElements(elements) DenseI32Array(values) DivBy(predicate) OptimizationHints(hints)
        Bounded(predicate)
    }
    Location { FileLineCol { filename line column } DebugInfo(info) CallSite { callee caller } }
    DebugScope { Subprogram(scope) }
}

impl Code for Opcode {
    fn put(&self, to: &mut Writer<'_>) -> Option<()> {
        self.as_u16().put(to)
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        let number = u16::get(from)?;
        OPCODES.iter().copied().find(|opcode| opcode.as_u16() == number)
    }
}

impl Code for bool {
    fn put(&self, to: &mut Writer<'_>) -> Option<()> {
        u8::from(*self).put(to)
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        Some(u8::get(from)? == 1)
    }
}

impl Code for String {
    fn put(&self, to: &mut Writer<'_>) -> Option<()> {
        self.as_bytes().to_vec().put(to)
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        Self::from_utf8(Vec::get(from)?).ok()
    }
}

impl<T: Code> Code for Vec<T> {
    fn put(&self, to: &mut Writer<'_>) -> Option<()> {
        u32::try_from(self.len()).ok()?.put(to)?;
        self.iter().try_for_each(|x| x.put(to))
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        let count = u32::get(from)?;
        (0..count).map(|_| T::get(from)).collect()
    }
}

impl<T: Code> Code for Option<T> {
    fn put(&self, to: &mut Writer<'_>) -> Option<()> {
        self.is_some().put(to)?;
        self.iter().try_for_each(|x| x.put(to))
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        Some(if bool::get(from)? { Some(T::get(from)?) } else { None })
    }
}

impl<T: Code> Code for Box<T> {
    fn put(&self, to: &mut Writer<'_>) -> Option<()> {
        self.as_ref().put(to)
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        T::get(from).map(Self::new)
    }
}

impl<A: Code, B: Code> Code for (A, B) {
    fn put(&self, to: &mut Writer<'_>) -> Option<()> {
        self.0.put(to)?;
        self.1.put(to)
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        Some((A::get(from)?, B::get(from)?))
    }
}

impl Code for OpId {
    fn put(&self, to: &mut Writer<'_>) -> Option<()> {
        let module = to.module;
        let operation = module.op(*self);
        operation.opcode.put(to)?;
        operation.operands.put(to)?;
        operation.result_types.put(to)?;
        operation.attributes.put(to)?;
        operation.location.put(to)?;
        to.results.insert(*self, to.count);
        to.count += operation.result_types.len() as u32;
        operation.regions.put(to)
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        let operation = Operation {
            opcode: Code::get(from)?,
            operands: Code::get(from)?,
            result_types: Code::get(from)?,
            attributes: Code::get(from)?,
            location: Code::get(from)?,
            regions: vec![],
        };
        let types = operation.result_types.clone();
        let op = from.module.alloc_op(operation);
        for (ty, result_index) in types.into_iter().zip(0..) {
            let producer = ValueProducer::OpResult { op, result_index };
            from.values.push(from.module.alloc_value(ty, producer));
        }
        from.module.op_mut(op).regions = Code::get(from)?;
        Some(op)
    }
}

impl Code for RegionId {
    fn put(&self, to: &mut Writer<'_>) -> Option<()> {
        to.module.region(*self).blocks.put(to)
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        let blocks = Code::get(from)?;
        Some(from.module.alloc_region(Region { blocks }))
    }
}

impl Code for BlockId {
    fn put(&self, to: &mut Writer<'_>) -> Option<()> {
        let Block { args, ops } = to.module.block(*self);
        let types: Vec<_> = args.iter().map(|(_, ty)| ty.clone()).collect();
        types.put(to)?;
        to.arguments.extend(args.iter().map(|(value, _)| *value).zip(to.count..));
        to.count += args.len() as u32;
        ops.put(to)
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        let block = from.module.alloc_block(Block { args: vec![], ops: vec![] });
        let mut args = vec![];
        for (ty, arg_index) in Vec::<Type>::get(from)?.into_iter().zip(0..) {
            let producer = ValueProducer::BlockArg { block, arg_index };
            args.push((from.module.alloc_value(ty.clone(), producer), ty));
        }
        from.values.extend(args.iter().map(|(value, _)| *value));
        *from.module.block_mut(block) = Block { args, ops: Code::get(from)? };
        Some(block)
    }
}

impl Code for Value {
    fn put(&self, to: &mut Writer<'_>) -> Option<()> {
        let number = match to.module.value_data(*self).producer {
            ValueProducer::OpResult { op, result_index } => to.results.get(&op)? + result_index,
            ValueProducer::BlockArg { .. } => *to.arguments.get(self)?,
        };
        number.put(to)
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        let number = u32::get(from)?;
        from.values.get(number as usize).copied()
    }
}

#[cfg(test)]
mod tests {
    use burst_attention_kernels::instances::{Instance, Target};
    use burst_attention_kernels::kernel::Kernel;

    use super::*;
    use crate::compile::{Front, STACK, bytecode};

    /// Asserts that kernels come back with the same bytecode, and with the locations of their lines,
    /// and that other bytes are no module.
    fn assert_come_back(kernels: &'static [Kernel]) {
        let check = |&kernel: &Kernel| {
            let mut instances = Instance::of_target(Target::Sm90);
            let instance = instances.find(|instance| instance.kernel == kernel).expect("one");
            let module = Front::default().compile(&instance).expect("a kernel that compiles");
            let bytes = write(&module).expect("a module with a form in bytes");
            let back = read(&bytes).expect("a module");
            assert_eq!(bytecode(&back), bytecode(&module), "{instance}");
            assert_eq!(write(&back).as_ref(), Some(&bytes), "{instance}");
            for end in [0, 1, bytes.len() / 2, bytes.len() - 1] {
                assert!(read(&bytes[..end]).is_none(), "{end} of {} bytes", bytes.len());
            }
            assert!(read(&[&bytes[..], &[0]].concat()).is_none(), "{instance}");
        };
        let thread = std::thread::Builder::new().stack_size(STACK);
        let thread = thread.spawn(move || kernels.iter().for_each(check));
        thread.expect("a thread").join().expect("no panic");
    }

    #[test]
    fn a_kernel_comes_back() {
        assert_come_back(&[Kernel::MaskRuns]);
    }

    #[test]
    #[ignore = "compiles all kernels: for make test-full"]
    fn all_kernels_come_back() {
        assert_come_back(&Kernel::ALL);
    }
}
