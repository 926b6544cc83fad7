//! An entry as nested lists of steps, checked once before the first block runs.

use super::attributes;
use super::error::{Error, Fault, Outcome, malformed};
use cutile_ir::Module;
use cutile_ir::bytecode::Opcode;
use cutile_ir::ir::{Attribute, Location, OpId, Operation, RegionId, Type, Value, ValueProducer};
use std::collections::HashMap;

/// An operation, and the slots of its results.
pub(super) struct Step<'m> {
    pub id: OpId,
    pub op: &'m Operation,
    /// Slot of each result; `None` where nothing uses the result.
    pub results: Vec<Option<usize>>,
    pub regions: Vec<Body<'m>>,
}

/// The only block of a region.
pub(super) struct Body<'m> {
    pub args: Vec<(usize, &'m Type)>,
    pub steps: Vec<Step<'m>>,
}

pub(super) struct Program<'m> {
    pub name: String,
    pub body: Body<'m>,
    pub slots: usize,
}

impl Body<'_> {
    /// Whether the body contains an operation of a kind, directly or in a region of an operation.
    pub fn contains(&self, opcode: Opcode) -> bool {
        let mut steps = self.steps.iter();
        steps.any(|step| {
            step.op.opcode == opcode || step.regions.iter().any(|body| body.contains(opcode))
        })
    }
}

type ResultSlots = HashMap<OpId, Vec<Option<usize>>>;

impl<'m> Program<'m> {
    pub fn lower(module: &'m Module, entry: OpId, name: &str) -> Result<Self, Error> {
        let mut slots = ResultSlots::new();
        collect(module, entry, &mut slots);
        let step = lower_step(module, entry, &slots).map_err(|(op, fault)| {
            let place = (name, [0; 3]);
            at(place, op, fault)
        })?;
        let place = (name, [0; 3]);
        let [body] = <[Body; 1]>::try_from(step.regions).map_err(|regions| {
            let what = format!("an entry has one region, got {}", regions.len());
            at(place, step.op, Fault::Malformed(what))
        })?;
        Ok(Self { name: name.into(), body, slots: module.num_values() })
    }
}

/// Returns the error of an operation, with its place in the source.
pub(super) fn at((kernel, block): (&str, [u32; 3]), op: &Operation, fault: Fault) -> Error {
    Error::Operation {
        kernel: kernel.into(),
        block,
        op: op.opcode.name(),
        location: line(&op.location),
        fault: Box::new(fault),
    }
}

fn line(location: &Location) -> String {
    match location {
        Location::Unknown => "unknown line".into(),
        Location::FileLineCol { filename, line, .. } => format!("{filename}:{line}"),
        Location::DebugInfo(info) => format!("{}:{}", info.filename, info.line),
        Location::CallSite { callee, .. } => line(callee),
    }
}

/// Returns the symbol name of a function.
pub(super) fn function_name(op: &Operation) -> Option<&str> {
    op.attributes.iter().find_map(|(name, value)| match value {
        Attribute::String(text) if name == "sym_name" => Some(text.as_str()),
        _ => None,
    })
}

/// Finds the slots of results through their uses, because the module lists results nowhere else.
fn collect(module: &Module, id: OpId, slots: &mut ResultSlots) {
    let op = module.op(id);
    for &operand in &op.operands {
        let producer = module.value_data(operand).producer;
        if let ValueProducer::OpResult { op, result_index } = producer {
            let results = slots.entry(op).or_default();
            let index = result_index as usize;
            results.resize(results.len().max(index + 1), None);
            results[index] = Some(slot(operand));
        }
    }
    let blocks = op.regions.iter().flat_map(|&region| &module.region(region).blocks);
    for &block in blocks {
        module.block(block).ops.iter().for_each(|&inner| collect(module, inner, slots));
    }
}

pub(super) fn slot(value: Value) -> usize {
    value.index() as usize
}

type Lowered<'m, T> = Result<T, (&'m Operation, Fault)>;

fn lower_step<'m>(module: &'m Module, id: OpId, slots: &ResultSlots) -> Lowered<'m, Step<'m>> {
    let op = module.op(id);
    attributes::check(op).map_err(|fault| (op, fault))?;
    let mut results = slots.get(&id).cloned().unwrap_or_default();
    if results.len() > op.result_types.len() {
        let declared = op.result_types.len();
        let what = format!("{declared} results declared, {} used", results.len());
        return Err((op, Fault::Malformed(what)));
    }
    results.resize(op.result_types.len(), None);
    let lower = |&region: &_| lower_body(module, op, region, slots);
    let regions = op.regions.iter().map(lower).collect::<Result<_, _>>()?;
    Ok(Step { id, op, results, regions })
}

fn lower_body<'m>(
    module: &'m Module,
    parent: &'m Operation,
    region: RegionId,
    slots: &ResultSlots,
) -> Lowered<'m, Body<'m>> {
    let block = single_block(module, region).map_err(|fault| (parent, fault))?;
    let args = block.args.iter().map(|(value, ty)| (slot(*value), ty)).collect();
    let lower = |&id: &_| lower_step(module, id, slots);
    let steps = block.ops.iter().map(lower).collect::<Result<_, _>>()?;
    Ok(Body { args, steps })
}

fn single_block(module: &Module, region: RegionId) -> Outcome<&cutile_ir::ir::Block> {
    match module.region(region).blocks[..] {
        [block] => Ok(module.block(block)),
        ref blocks => malformed(format!("a region has one block, got {}", blocks.len())),
    }
}
