//! The state of a running block, and the table of operations.

use super::additions::Accesses;
use super::error::{Error, Fault, Outcome, malformed, unsupported};
use super::launch::GridRun;
use super::memory::Memory;
use super::program::{Body, Program, Step, at, slot};
use super::reach::Turns;
use super::tile::{Tile, declared_tile};
use super::view::{TensorView, TileView};
use cutile_ir::bytecode::Opcode;
use cutile_ir::ir::{OpId, ScalarType, Type, format_type};
use std::collections::HashMap;
use std::rc::Rc;

#[derive(Debug, Clone)]
pub(super) enum Value {
    Tile(Tile),
    Tensor(Rc<TensorView>),
    View(Rc<TileView>),
    Token,
}

/// The way in which a body ended.
pub(super) enum Flow {
    /// The body ended without a terminator.
    End,
    Yield(Vec<Value>),
    Continue(Vec<Value>),
    Break(Vec<Value>),
    Return,
}

pub(super) struct Machine<'a> {
    program: &'a Program<'a>,
    grid: [u32; 3],
    block: [u32; 3],
    pub memory: &'a mut Memory,
    pub allow_zero_strides: bool,
    limit: u64,
    operations: u64,
    slots: Vec<Option<Value>>,
    /// The number of elements that the body of a reduction runs on at once. Its scalars are then
    /// tiles of this many elements.
    pub lanes: Option<usize>,
    /// How often bodies of branches and loops ran, if someone asks for it.
    pub turns: Option<HashMap<OpId, Turns>>,
    /// The error, with its place, of the innermost failed operation.
    failed: Option<Error>,
}

impl<'a> Machine<'a> {
    pub fn new(
        program: &'a Program<'a>,
        grid: [u32; 3],
        memory: &'a mut Memory,
        grid_run: &GridRun,
    ) -> Self {
        Self {
            program,
            grid,
            block: [0; 3],
            memory,
            allow_zero_strides: grid_run.allow_zero_strides,
            limit: grid_run.operation_limit,
            operations: 0,
            slots: vec![None; program.slots],
            lanes: None,
            turns: grid_run.reach.is_some().then(HashMap::new),
            failed: None,
        }
    }

    pub fn run_block(&mut self, block: [u32; 3], arguments: &[Value]) -> Result<(), Error> {
        self.block = block;
        self.memory.accesses.iter_mut().for_each(Accesses::begin_block);
        self.slots.fill(None);
        let program = self.program;
        let flow = self.run(&program.body, arguments.to_vec());
        match flow {
            Ok(Flow::Return | Flow::End) => Ok(()),
            Ok(_) => {
                let last = program.body.steps.last().expect("a terminator ended the entry");
                let fault = Fault::Malformed("does not end an entry".into());
                Err(at((&program.name, block), last.op, fault))
            }
            Err(fault) => Err(self.failed.take().unwrap_or_else(|| Error::Operation {
                kernel: program.name.clone(),
                block,
                op: Opcode::Entry.name(),
                location: String::new(),
                fault: Box::new(fault),
            })),
        }
    }

    /// Runs a body with values for its arguments.
    pub fn run(&mut self, body: &Body<'a>, arguments: Vec<Value>) -> Outcome<Flow> {
        if arguments.len() != body.args.len() {
            let (expected, got) = (body.args.len(), arguments.len());
            return malformed(format!("a region of {expected} arguments, got {got}"));
        }
        for (&(slot, ty), value) in body.args.iter().zip(arguments) {
            self.check_type(ty, &value)?;
            self.slots[slot] = Some(value);
        }
        for step in &body.steps {
            let flow = match self.step(step) {
                Ok(flow) => flow,
                Err(fault) => {
                    let place = (self.program.name.as_str(), self.block);
                    self.failed.get_or_insert_with(|| at(place, step.op, fault.clone()));
                    return Err(fault);
                }
            };
            if !matches!(flow, Flow::End) {
                return Ok(flow);
            }
        }
        Ok(Flow::End)
    }

    /// Records how often the body of a branch or of a loop ran.
    pub fn note(&mut self, step: &Step, turns: u64) {
        if let Some(all) = &mut self.turns {
            all.entry(step.id).or_default().add(turns);
        }
    }

    fn step(&mut self, step: &Step<'a>) -> Outcome<Flow> {
        self.operations += 1;
        if self.operations > self.limit {
            return Err(Fault::Limit(self.limit));
        }
        let results = match step.op.opcode {
            Opcode::Yield => return Ok(Flow::Yield(self.operands(step)?)),
            Opcode::Continue => return Ok(Flow::Continue(self.operands(step)?)),
            Opcode::Break => return Ok(Flow::Break(self.operands(step)?)),
            Opcode::Return => return Ok(Flow::Return),
            Opcode::If => match self.branch(step)? {
                Flow::Yield(results) => results,
                Flow::End => vec![],
                other => return Ok(other),
            },
            Opcode::For => match self.count_loop(step)? {
                Flow::Continue(results) => results,
                other => return Ok(other),
            },
            Opcode::Loop => match self.endless_loop(step)? {
                Flow::Break(results) => results,
                other => return Ok(other),
            },
            _ => self.evaluate(step)?,
        };
        if results.len() != step.results.len() {
            let (expected, got) = (step.results.len(), results.len());
            return malformed(format!("{expected} results declared, got {got}"));
        }
        let declared = step.results.iter().zip(&step.op.result_types);
        for ((&slot, ty), value) in declared.zip(results) {
            self.check_type(ty, &value)?;
            if let Some(slot) = slot {
                self.slots[slot] = Some(value);
            }
        }
        Ok(Flow::End)
    }

    /// Returns the results of an operation without control flow.
    fn evaluate(&mut self, step: &Step<'a>) -> Outcome<Vec<Value>> {
        use Opcode::*;
        let tile = match step.op.opcode {
            AddI | SubI | MulI | DivI | RemI | MulhiI | MaxI | MinI | AndI | OrI | XOrI | ShLI
            | ShRI => self.int_binary(step)?,
            AbsI | NegI => self.int_unary(step)?,
            CmpI => self.int_compare(step)?,
            AddF | SubF | MulF | DivF | RemF | MaxF | MinF | Pow | Atan2 => {
                self.float_binary(step)?
            }
            AbsF | NegF | Ceil | Floor | Exp | Exp2 | Log | Log2 | Sqrt | Rsqrt | Sin | Cos
            | Tan | SinH | CosH | TanH => self.float_unary(step)?,
            Fma => self.float_fma(step)?,
            CmpF => self.float_compare(step)?,
            FToF | FToI | IToF | ExtI | TruncI | Bitcast | PtrToInt | IntToPtr | PtrToPtr
            | Pack | Unpack => self.convert(step)?,
            Constant | Iota | Reshape | Broadcast | Permute | Extract | Insert | Cat | Select => {
                self.arrange(step)?
            }
            MmaF | MmaI => self.multiply(step)?,
            Offset => self.offset(step)?,
            Assume => return self.assume(step),
            Assert => return self.assert(step),
            Reduce => return self.reduce(step),
            Scan => return self.scan(step),
            MakeTensorView | MakePartitionView | MakeStridedView => return self.make_view(step),
            GetTensorShape | GetIndexSpaceShape => return self.view_shape(step),
            LoadViewTko => return self.load_view(step),
            StoreViewTko => return self.store_view(step),
            AtomicRedViewTko => return self.reduce_view(step),
            LoadPtrTko => return self.load_pointers(step),
            StorePtrTko => return self.store_pointers(step),
            AtomicRMW | AtomicCAS => return self.atomic(step),
            GetTileBlockId => return Ok(ids(self.block)),
            GetNumTileBlocks => return Ok(ids(self.grid)),
            // One block runs at a time, in program order, so there is nothing to order.
            MakeToken
            | JoinTokens
            | MemoryFenceAliasTko
            | GdcLaunchDependentsTko
            | GdcWaitTko
            | Print => {
                self.operands(step)?;
                return Ok(vec![Value::Token; step.op.result_types.len()]);
            }
            other => return unsupported(format!("operation {}", other.name())),
        };
        Ok(vec![Value::Tile(tile)])
    }

    fn check_type(&self, ty: &Type, value: &Value) -> Outcome<()> {
        let fits = match value {
            Value::Tile(tile) => {
                let (element, shape) = declared_tile(ty)?;
                let lanes = self.lanes.is_some() && shape.is_empty();
                let sizes = tile.shape.iter().map(|&size| size as i64);
                element == tile.element && (lanes || shape.iter().copied().eq(sizes))
            }
            Value::Tensor(_) => matches!(ty.without_pointer_attribute(), Type::TensorView(_)),
            Value::View(_) => matches!(
                ty.without_pointer_attribute(),
                Type::PartitionView(_) | Type::StridedView(_)
            ),
            Value::Token => matches!(ty, Type::Token),
        };
        if fits {
            return Ok(());
        }
        let got = match value {
            Value::Tile(tile) => format!("{:?} of {:?}", tile.shape, tile.element),
            Value::Tensor(_) => "a tensor view".into(),
            Value::View(_) => "a tile view".into(),
            Value::Token => "a token".into(),
        };
        malformed(format!("{} declared, got {got}", format_type(ty)))
    }

    pub fn value(&self, value: cutile_ir::ir::Value) -> Outcome<&Value> {
        let defined = self.slots[slot(value)].as_ref();
        defined.map_or_else(|| malformed(format!("%{} is not defined yet", value.index())), Ok)
    }

    pub fn operands(&self, step: &Step) -> Outcome<Vec<Value>> {
        step.op.operands.iter().map(|&operand| self.value(operand).cloned()).collect()
    }

    /// Returns a value that must be a tile. A scalar from outside of a reduction's body becomes
    /// lanes.
    pub fn tile_of(&self, value: cutile_ir::ir::Value) -> Outcome<Tile> {
        match (self.value(value)?, self.lanes) {
            (Value::Tile(tile), Some(lanes)) if tile.shape.is_empty() => Ok(tile.splat(lanes)),
            (Value::Tile(tile), _) => Ok(tile.clone()),
            (other, _) => malformed(format!("a tile expected, got {other:?}")),
        }
    }

    /// Returns all operands, which must be exactly `N` tiles.
    pub fn tiles<const N: usize>(&self, step: &Step) -> Outcome<[Tile; N]> {
        let tiles = step.op.operands.iter().map(|&value| self.tile_of(value));
        let tiles = tiles.collect::<Outcome<Vec<_>>>()?;
        let count = tiles.len();
        tiles.try_into().or_else(|_| malformed(format!("{N} operands expected, got {count}")))
    }
}

/// Returns three block coordinates as scalar tiles.
fn ids(values: [u32; 3]) -> Vec<Value> {
    values.map(|x| Value::Tile(Tile::scalar_int(ScalarType::I32, x as i32 as i64))).into()
}
