//! Decoded kernels.

use crate::collective::Collective;
use crate::compute::Function;
use crate::matrix::Matrix;
use crate::memory::Space;

/// The code of a kernel. The functions that it calls are part of it.
#[derive(Default)]
pub(crate) struct Body {
    pub code: Vec<Instruction>,
    /// Lines and texts that the instructions stand on.
    pub places: Vec<(u32, String)>,
    /// The names of all registers.
    pub registers: Vec<String>,
    /// All registers before a thread writes them.
    pub blank: Vec<Register>,
    /// Bytes of local memory of a thread.
    pub local: usize,
    /// Bytes of shared memory, without the part whose size the launch chooses.
    pub shared: usize,
}

/// The contents of a register.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Register {
    pub value: u64,
    /// The bits that the thread never wrote. They are zeros in the value.
    pub lacking: u64,
}

pub(crate) struct Instruction {
    /// A predicate, and the value that lets the instruction run.
    pub guard: Option<(u32, bool)>,
    pub op: Op,
    /// Index into [`Body::places`].
    pub place: u32,
}

/// Where an operand's value comes from.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Source {
    Register(u32),
    Value(u64),
    Special(Special),
    /// The address of a global variable.
    Global(u32),
    /// The address of the shared memory whose size the launch chooses.
    DynamicShared,
}

/// A register that the hardware sets. Those of three axes have the axis.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Special {
    Thread(usize),
    Threads(usize),
    Block(usize),
    Blocks(usize),
    Lane,
    Warp,
    Warps,
    /// The lanes whose comparison with the thread's own lane holds.
    Lanes(fn(&u32, &u32) -> bool),
    Clock,
}

/// An address, and the size of what lies there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access {
    pub space: Space,
    pub base: Source,
    pub offset: u64,
    /// Bytes of one element.
    pub bytes: usize,
}

/// A register that a load writes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Loaded {
    pub to: Option<u32>,
    /// The bits of the register.
    pub mask: u64,
    /// The number of bits that the sign of a loaded integer is copied into.
    pub unused: u32,
}

/// Addition or subtraction with a carry flag.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Carry {
    pub subtracts: bool,
    /// Whether the operands start with a product, and whether its high half counts.
    pub product: Option<bool>,
    pub reads: bool,
    pub writes: bool,
    pub bits: u32,
    pub to: Option<u32>,
    pub from: [Source; 3],
}

/// `atom` and `red`, on one or several elements.
pub(crate) struct Atomic {
    pub access: Access,
    pub to: Vec<Option<u32>>,
    /// For each element the second operand, and the third operand of `cas`.
    pub from: Vec<[Source; 2]>,
    pub function: Function,
}

pub(crate) enum Op {
    Compute { function: Function, to: Option<u32>, from: Vec<Source>, moved: usize },
    Move { to: Option<u32>, from: Source },
    Carry(Box<Carry>),
    Load { access: Box<Access>, to: Vec<Loaded> },
    Store { access: Box<Access>, from: Vec<Source> },
    Atomic(Box<Atomic>),
    Branch(usize),
    Return,
    Trap,
    Barrier { id: Source, threads: Option<Source>, aligned: bool },
    Collective(Box<Collective>),
    Matrix(Box<Matrix>),
}
