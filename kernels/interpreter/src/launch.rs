//! A run of a grid: arguments, and the order of blocks.

use super::additions::Accesses;
use super::error::Error;
use super::machine::{Machine, Value};
use super::memory::{Address, Memory};
use super::program::{Program, function_name};
use super::reach::Reach;
use super::tile::{Data, Element, Tile, tile_type};
use cutile_ir::Module;
use cutile_ir::bytecode::Opcode;
use cutile_ir::ir::{ScalarType, format_type};
use half::{bf16, f16};
use std::cell::RefCell;
use std::rc::Rc;

/// An argument of a launch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Argument {
    /// A pointer to any type.
    Pointer(Address),
    /// A flag.
    I1(bool),
    /// An integer of 8 bits, signed or not.
    I8(i8),
    /// An integer of 16 bits, signed or not.
    I16(i16),
    /// An integer of 32 bits, signed or not.
    I32(i32),
    /// An integer of 64 bits, signed or not.
    I64(i64),
    /// IEEE binary16.
    F16(f16),
    /// bfloat16.
    BF16(bf16),
    /// IEEE binary32.
    F32(f32),
    /// IEEE binary64.
    F64(f64),
}

impl Argument {
    /// Returns the argument as a scalar tile, if its type is `element`.
    fn tile(self, element: Element) -> Option<Tile> {
        let (scalar, data) = match self {
            Self::Pointer(at) => match element {
                Element::Pointer(_) => {
                    return Some(Tile::new(element, [], Data::Int(vec![at.0 as i64])));
                }
                Element::Scalar(_) => return None,
            },
            Self::I1(x) => (ScalarType::I1, Data::Int(vec![-i64::from(x)])),
            Self::I8(x) => (ScalarType::I8, Data::Int(vec![x.into()])),
            Self::I16(x) => (ScalarType::I16, Data::Int(vec![x.into()])),
            Self::I32(x) => (ScalarType::I32, Data::Int(vec![x.into()])),
            Self::I64(x) => (ScalarType::I64, Data::Int(vec![x])),
            Self::F16(x) => (ScalarType::F16, Data::F32(vec![x.to_f32()])),
            Self::BF16(x) => (ScalarType::BF16, Data::F32(vec![x.to_f32()])),
            Self::F32(x) => (ScalarType::F32, Data::F32(vec![x])),
            Self::F64(x) => (ScalarType::F64, Data::F64(vec![x])),
        };
        (element == Element::Scalar(scalar)).then(|| Tile::new(element, [], data))
    }
}

/// A way to run a grid.
#[derive(Debug, Clone, PartialEq)]
pub struct GridRun {
    /// The seed of the order in which blocks run.
    pub seed: u64,
    /// The blocks to run, in this order; without it all blocks, shuffled.
    pub blocks: Option<Vec<[u32; 3]>>,
    /// Whether views may have sizes or strides of 0, which Tile IR's definition excludes.
    pub allow_zero_strides: bool,
    /// The largest number of operations of the launch. It makes a loop without end an error.
    pub operation_limit: u64,
    /// Where to add how often branches and loops ran.
    pub reach: Option<Rc<RefCell<Reach>>>,
}

impl Default for GridRun {
    fn default() -> Self {
        Self {
            seed: 0,
            blocks: None,
            allow_zero_strides: false,
            operation_limit: 1 << 32,
            reach: None,
        }
    }
}

impl GridRun {
    /// Runs blocks of `grid` of the entry with the symbol name `entry` (cuTile appends `_entry` to
    /// the function's name). Stores before an error stay.
    pub fn run(
        &self,
        module: &Module,
        entry: &str,
        grid: [u32; 3],
        arguments: &[Argument],
        memory: &mut Memory,
    ) -> Result<(), Error> {
        let blocks = match &self.blocks {
            Some(blocks) => blocks.clone(),
            None => shuffled(grid, self.seed),
        };
        let outside = |block: &&[u32; 3]| (0..3).any(|axis| block[axis] >= grid[axis]);
        let empty = grid.contains(&0).then_some([0; 3]);
        if let Some(block) = empty.or(blocks.iter().find(outside).copied()) {
            return Err(Error::Grid { grid, block });
        }
        let program = Program::lower(module, find(module, entry)?, entry)?;
        let arguments = bind(&program, entry, arguments)?;
        let adds = program.body.contains(Opcode::AtomicRedViewTko);
        memory.accesses = adds.then(Accesses::default);
        let mut machine = Machine::new(&program, grid, memory, self);
        blocks.into_iter().try_for_each(|block| machine.run_block(block, &arguments))?;
        if let (Some(reach), Some(turns)) = (&self.reach, &machine.turns) {
            reach.borrow_mut().add(&program, turns);
        }
        Ok(())
    }
}

fn find(module: &Module, entry: &str) -> Result<cutile_ir::ir::OpId, Error> {
    let name = |&id: &_| function_name(module.op(id));
    let found = module.functions.iter().find(|id| name(id) == Some(entry));
    found.copied().ok_or_else(|| Error::NoEntry {
        entry: entry.into(),
        known: module.functions.iter().filter_map(name).map(String::from).collect(),
    })
}

fn bind(program: &Program, entry: &str, arguments: &[Argument]) -> Result<Vec<Value>, Error> {
    let parameters = &program.body.args;
    if parameters.len() != arguments.len() {
        return Err(Error::ArgumentCount {
            entry: entry.into(),
            expected: parameters.len(),
            got: arguments.len(),
        });
    }
    let bind_one = |(index, (&(_, ty), &argument))| {
        let declared = tile_type(ty).ok().filter(|(_, shape)| shape.is_empty());
        let tile = declared.and_then(|(element, _)| Argument::tile(argument, element));
        tile.map(Value::Tile).ok_or_else(|| Error::ArgumentType {
            entry: entry.into(),
            index,
            expected: format_type(ty),
            got: format!("{argument:?}"),
        })
    };
    parameters.iter().zip(arguments).enumerate().map(bind_one).collect()
}

/// Returns all blocks of a grid in an order that the seed decides (Fisher-Yates over splitmix64).
fn shuffled(grid: [u32; 3], mut seed: u64) -> Vec<[u32; 3]> {
    let [x, y, z] = grid;
    let plane = |k| (0..y).flat_map(move |j| (0..x).map(move |i| [i, j, k]));
    let mut blocks: Vec<_> = (0..z).flat_map(plane).collect();
    for last in (1..blocks.len()).rev() {
        seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        blocks.swap(last, ((bits ^ (bits >> 31)) % (last as u64 + 1)) as usize);
    }
    blocks
}
