//! Tile IR as bytes, which a later run reads back. The crate of Tile IR writes bytecode, and reads
//! none.

use std::collections::HashMap;

use cutile_ir::Module;
use cutile_ir::bytecode::Opcode;
use cutile_ir::ir::{
    Attribute, Block, BlockId, Bounded, DICompileUnit, DIFile, DILexicalBlock, DISubprogram,
    DebugInfoLoc, DebugScope, DenseElements, DivBy, FuncType, Location, OpId, Operation,
    OptimizationHints, PaddingValue, PartitionViewType, PointerAttribute, PointerType, Region,
    SameElements, ScalarType, StridedViewType, TensorViewType, TileElementType, TileType, Type,
    Value, ValueProducer,
};

/// Returns a module's bytes, or nothing if it has parts that no kernel of this crate has.
pub(crate) fn write(module: &Module) -> Option<Vec<u8>> {
    let mut bytes = vec![];
    Tree::of(module)?.put(&mut bytes)?;
    Some(bytes)
}

/// Returns the module of some bytes, or nothing if [`write()`] did not make them.
pub(crate) fn read(mut bytes: &[u8]) -> Option<Module> {
    let tree = Tree::get(&mut bytes)?;
    if bytes.is_empty() { tree.module() } else { None }
}

/// A value with a form in bytes. Both functions return nothing where there is no such form.
trait Code: Sized {
    fn put(&self, out: &mut Vec<u8>) -> Option<()>;
    fn get(from: &mut &[u8]) -> Option<Self>;
}

macro_rules! numbers {
    ($($name:ty)*) => {$(
        impl Code for $name {
            fn put(&self, out: &mut Vec<u8>) -> Option<()> {
                out.extend(self.to_le_bytes());
                Some(())
            }

            fn get(from: &mut &[u8]) -> Option<Self> {
                let (head, rest) = from.split_first_chunk()?;
                *from = rest;
                Some(Self::from_le_bytes(*head))
            }
        }
    )*};
}

macro_rules! structs {
    ($($name:ident { $($field:ident)* })*) => {$(
        impl Code for $name {
            fn put(&self, out: &mut Vec<u8>) -> Option<()> {
                $(self.$field.put(out)?;)*
                Some(())
            }

            fn get(from: &mut &[u8]) -> Option<Self> {
                Some(Self { $($field: Code::get(from)?),* })
            }
        }
    )*};
}

/// The byte of a variant is its place in the list. A variant that is not listed has no bytes.
macro_rules! enums {
    ($($name:ident { $($variant:ident $(($($part:ident)*))? $({ $($field:ident)* })?)* })*) => {$(
        impl Code for $name {
            fn put(&self, out: &mut Vec<u8>) -> Option<()> {
                const NAMES: &[&str] = &[$(stringify!($variant)),*];
                let mut tag = |name| {
                    let place = NAMES.iter().position(|other| *other == name);
                    place.and_then(|place| u8::try_from(place).ok()?.put(out))
                };
                #[allow(unreachable_patterns)]
                match self {
                    $(Self::$variant $(($($part),*))? $({ $($field),* })? => {
                        tag(stringify!($variant))?;
                        $($($part.put(out)?;)*)?
                        $($($field.put(out)?;)*)?
                    })*
                    _ => return None,
                }
                Some(())
            }

            fn get(from: &mut &[u8]) -> Option<Self> {
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

numbers! { u8 u32 u64 i32 i64 f64 }

structs! {
    PointerType { pointee }
    TileType { shape element_type }
    TensorViewType { element_type shape strides }
    PartitionViewType { tile_shape tensor_view dim_map padding_value }
    StridedViewType { tile_shape traversal_strides tensor_view dim_map padding_value }
    FuncType { inputs results }
    DivBy { divisor every along }
    SameElements { values }
    Bounded { lb ub }
    OptimizationHints { entries }
    DenseElements { element_type shape data }
    DebugInfoLoc { filename line column scope }
    DIFile { name directory }
    DICompileUnit { file }
    DISubprogram { file line name linkage_name compile_unit scope_line }
    DILexicalBlock { scope file line column }
    Tree { name producer functions }
    Step { opcode operands results attributes location regions }
    Steps { arguments steps }
}

enums! {
    ScalarType { I1 I8 I16 I32 I64 F16 BF16 F32 F64 }
    TileElementType { Scalar(scalar) Pointer(pointer) }
    PointerAttribute { None }
    PaddingValue { Zero NegZero Nan PosInf NegInf }
    Type {
        Scalar(ty) Pointer(ty) Tile(ty) TensorView(ty) PartitionView(ty) StridedView(ty) Func(ty)
        Token WithPointerAttribute(ty attribute)
    }
    Attribute {
        Integer(value ty) Float(value ty) Bool(value) Type(ty) String(text) Array(values)
        DenseElements(elements) DenseI32Array(values) DivBy(predicate) SameElements(predicate)
        Dictionary(entries) OptimizationHints(hints) Bounded(predicate)
    }
    Location {
        Unknown FileLineCol { filename line column } DebugInfo(info) CallSite { callee caller }
    }
    DebugScope { Subprogram(scope) LexicalBlock(scope) }
    Origin { Result(number index) Argument(number index) }
    Opcode {
        AbsF AbsI AddF AddI AndI Assert Assume AtomicCAS AtomicRMW AtomicRedViewTko Bitcast Break
        Broadcast Cat Ceil CmpF CmpI Constant Continue Cos CosH DivF DivI Entry Exp Exp2 ExtI
        Extract Floor Fma For FToF FToI GdcLaunchDependentsTko GdcWaitTko GetIndexSpaceShape
        GetNumTileBlocks GetTensorShape GetTileBlockId If Insert IntToPtr Iota IToF JoinTokens
        LoadPtrTko LoadViewTko Log Log2 Loop MakePartitionView MakeStridedView MakeTensorView
        MakeToken MaxF MaxI MemoryFenceAliasTko MinF MinI MmaF MmaI MulF MulhiI MulI NegF NegI
        Offset OrI Pack Permute Pow Print PtrToInt PtrToPtr Reduce RemF RemI Reshape Return Rsqrt
        Scan Select ShLI ShRI Sin SinH Sqrt StorePtrTko StoreViewTko SubF SubI Tan TanH TruncI
        Unpack XOrI Yield
    }
}

impl Code for bool {
    fn put(&self, out: &mut Vec<u8>) -> Option<()> {
        u8::from(*self).put(out)
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        Some(u8::get(from)? == 1)
    }
}

impl Code for String {
    fn put(&self, out: &mut Vec<u8>) -> Option<()> {
        self.as_bytes().to_vec().put(out)
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        Self::from_utf8(Vec::get(from)?).ok()
    }
}

impl<T: Code> Code for Vec<T> {
    fn put(&self, out: &mut Vec<u8>) -> Option<()> {
        u32::try_from(self.len()).ok()?.put(out)?;
        self.iter().try_for_each(|x| x.put(out))
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        let count = u32::get(from)?;
        (0..count).map(|_| T::get(from)).collect()
    }
}

impl<T: Code> Code for Option<T> {
    fn put(&self, out: &mut Vec<u8>) -> Option<()> {
        self.is_some().put(out)?;
        self.iter().try_for_each(|x| x.put(out))
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        Some(if bool::get(from)? { Some(T::get(from)?) } else { None })
    }
}

impl<T: Code> Code for Box<T> {
    fn put(&self, out: &mut Vec<u8>) -> Option<()> {
        self.as_ref().put(out)
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        T::get(from).map(Self::new)
    }
}

impl<A: Code, B: Code> Code for (A, B) {
    fn put(&self, out: &mut Vec<u8>) -> Option<()> {
        self.0.put(out)?;
        self.1.put(out)
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        Some((A::get(from)?, B::get(from)?))
    }
}

/// A module in which operations contain each other, in place of the module's own lists.
struct Tree {
    name: String,
    producer: Option<String>,
    functions: Vec<Step>,
}

/// An operation.
struct Step {
    opcode: Opcode,
    operands: Vec<Origin>,
    results: Vec<Type>,
    attributes: Vec<(String, Attribute)>,
    location: Location,
    regions: Vec<Vec<Steps>>,
}

/// A block.
struct Steps {
    arguments: Vec<Type>,
    steps: Vec<Step>,
}

/// A result of an operation, or an argument of a block. Operations and blocks are numbered in the
/// order in which they begin.
enum Origin {
    Result(u32, u32),
    Argument(u32, u32),
}

impl Tree {
    fn of(module: &Module) -> Option<Self> {
        let Module { name, producer, functions, globals, .. } = module;
        let mut numbers = Numbers::default();
        functions.iter().for_each(|&id| numbers.add(module, id));
        let functions = functions.iter().map(|&id| numbers.step(module, id));
        let functions = functions.collect::<Option<_>>().filter(|_| globals.is_empty())?;
        Some(Self { name: name.clone(), producer: producer.clone(), functions })
    }

    fn module(self) -> Option<Module> {
        let (results, arguments, operands) = (vec![], vec![], vec![]);
        let module = Module::new(self.name);
        let mut builder = Builder { module, results, arguments, operands };
        builder.module.producer = self.producer;
        let functions = self.functions.into_iter().map(|step| builder.operation(step)).collect();
        builder.module.functions = functions;
        for (id, origins) in std::mem::take(&mut builder.operands) {
            let values = origins.iter().map(|origin| builder.value(origin));
            builder.module.op_mut(id).operands = values.collect::<Option<_>>()?;
        }
        Some(builder.module)
    }
}

/// The numbers of operations and blocks.
#[derive(Default)]
struct Numbers {
    operations: HashMap<OpId, u32>,
    blocks: HashMap<BlockId, u32>,
}

impl Numbers {
    fn add(&mut self, module: &Module, id: OpId) {
        self.operations.insert(id, self.operations.len() as u32);
        for &region in &module.op(id).regions {
            for &block in &module.region(region).blocks {
                self.blocks.insert(block, self.blocks.len() as u32);
                module.block(block).ops.iter().for_each(|&inner| self.add(module, inner));
            }
        }
    }

    fn step(&self, module: &Module, id: OpId) -> Option<Step> {
        let operation = module.op(id);
        let steps = |block: &BlockId| {
            let Block { args, ops } = module.block(*block);
            let steps = ops.iter().map(|&id| self.step(module, id)).collect::<Option<_>>()?;
            Some(Steps { arguments: args.iter().map(|(_, ty)| ty.clone()).collect(), steps })
        };
        let regions = operation.regions.iter();
        let regions =
            regions.map(|&region| module.region(region).blocks.iter().map(steps).collect());
        let operands = operation.operands.iter().map(|&value| self.origin(module, value));
        Some(Step {
            opcode: operation.opcode,
            operands: operands.collect::<Option<_>>()?,
            results: operation.result_types.clone(),
            attributes: operation.attributes.clone(),
            location: operation.location.clone(),
            regions: regions.collect::<Option<_>>()?,
        })
    }

    fn origin(&self, module: &Module, value: Value) -> Option<Origin> {
        Some(match module.value_data(value).producer {
            ValueProducer::OpResult { op, result_index } => {
                Origin::Result(*self.operations.get(&op)?, result_index)
            }
            ValueProducer::BlockArg { block, arg_index } => {
                Origin::Argument(*self.blocks.get(&block)?, arg_index)
            }
        })
    }
}

/// A module that grows, with the values of its operations and blocks by their numbers.
struct Builder {
    module: Module,
    results: Vec<Vec<Value>>,
    arguments: Vec<Vec<Value>>,
    /// Operands wait until all values are there.
    operands: Vec<(OpId, Vec<Origin>)>,
}

impl Builder {
    fn operation(&mut self, step: Step) -> OpId {
        let Step { opcode, operands, results, attributes, location, regions } = step;
        let id = self.module.alloc_op(Operation {
            opcode,
            operands: vec![],
            result_types: results.clone(),
            attributes,
            regions: vec![],
            location,
        });
        let result = |index| ValueProducer::OpResult { op: id, result_index: index };
        let values = results.into_iter().zip(0..);
        let values = values.map(|(ty, index)| self.module.alloc_value(ty, result(index))).collect();
        self.results.push(values);
        self.operands.push((id, operands));
        for blocks in regions {
            let blocks = blocks.into_iter().map(|steps| self.block(steps)).collect();
            let region = self.module.alloc_region(Region { blocks });
            self.module.op_mut(id).regions.push(region);
        }
        id
    }

    fn block(&mut self, Steps { arguments, steps }: Steps) -> BlockId {
        let id = self.module.alloc_block(Block { args: vec![], ops: vec![] });
        let argument = |index| ValueProducer::BlockArg { block: id, arg_index: index };
        let pairs = arguments.into_iter().zip(0..);
        let pairs =
            pairs.map(|(ty, index)| (self.module.alloc_value(ty.clone(), argument(index)), ty));
        let args: Vec<_> = pairs.collect();
        self.arguments.push(args.iter().map(|(value, _)| *value).collect());
        let ops = steps.into_iter().map(|step| self.operation(step)).collect();
        *self.module.block_mut(id) = Block { args, ops };
        id
    }

    fn value(&self, origin: &Origin) -> Option<Value> {
        let (values, number, index) = match origin {
            Origin::Result(number, index) => (&self.results, number, index),
            Origin::Argument(number, index) => (&self.arguments, number, index),
        };
        values.get(*number as usize)?.get(*index as usize).copied()
    }
}

#[cfg(test)]
mod tests {
    use burst_attention_kernels::instances::{Instance, Target};
    use burst_attention_kernels::kernel::Kernel;

    use super::*;
    use crate::compile::{Front, STACK, bytecode};

    /// Asserts that a kernel comes back with the same bytecode, and with the locations of its lines,
    /// which bytecode without debug information lacks.
    fn assert_comes_back(kernel: Kernel) {
        let mut instances = Instance::of_target(Target::Sm90);
        let instance = instances.find(|instance| instance.kernel == kernel).expect("an instance");
        let module = Front::default().compile(&instance).expect("a kernel that compiles");
        let bytes = write(&module).expect("a module with a form in bytes");
        let back = read(&bytes).expect("a module");
        assert_eq!(bytecode(&back), bytecode(&module), "{instance}");
        assert_eq!(write(&back), Some(bytes), "{instance}");
    }

    fn with_stack(work: impl FnOnce() + Send + 'static) {
        let thread = std::thread::Builder::new().stack_size(STACK).spawn(work);
        thread.expect("a thread").join().expect("no panic");
    }

    #[test]
    fn a_kernel_comes_back() {
        with_stack(|| assert_comes_back(Kernel::MaskRuns));
    }

    #[test]
    #[ignore = "compiles all kernels: for make test-full"]
    fn all_kernels_come_back() {
        with_stack(|| Kernel::ALL.into_iter().for_each(assert_comes_back));
    }

    #[test]
    fn other_bytes_are_no_module() {
        with_stack(|| {
            let mut instances = Instance::of_target(Target::Sm90);
            let instance = instances.find(|instance| instance.kernel == Kernel::MaskRuns);
            let module = Front::default().compile(&instance.expect("an instance"));
            let bytes = write(&module.expect("a kernel that compiles")).expect("bytes");
            for end in [0, 1, bytes.len() / 2, bytes.len() - 1] {
                assert!(read(&bytes[..end]).is_none(), "{end} of {} bytes", bytes.len());
            }
            assert!(read(&[&bytes[..], &[0]].concat()).is_none());
        });
    }
}
