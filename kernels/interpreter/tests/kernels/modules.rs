//! Searches in a compiled kernel.

use cutile_ir::Module;
use cutile_ir::bytecode::Opcode;
use cutile_ir::ir::{OpId, RegionId, Type};

/// Returns all operations of a region in order, with nested operations.
fn operations(module: &Module, region: RegionId) -> Vec<OpId> {
    let blocks = &module.region(region).blocks;
    let direct = blocks.iter().flat_map(|&block| &module.block(block).ops);
    direct.flat_map(|&id| std::iter::once(id).chain(inside(module, id))).collect()
}

/// Returns all operations inside of an operation.
pub fn inside(module: &Module, id: OpId) -> Vec<OpId> {
    module.op(id).regions.iter().flat_map(|&region| operations(module, region)).collect()
}

/// Returns the operations of an opcode among some operations.
pub fn of(module: &Module, among: Vec<OpId>, opcode: Opcode) -> Vec<OpId> {
    among.into_iter().filter(|&id| module.op(id).opcode == opcode).collect()
}

/// Returns all operations of an opcode in a kernel.
pub fn find(module: &Module, opcode: Opcode) -> Vec<OpId> {
    of(module, inside(module, module.functions[0]), opcode)
}

/// Returns the loops over tiles, which have no other loop inside.
pub fn innermost_loops(module: &Module) -> Vec<OpId> {
    let mut loops = find(module, Opcode::For);
    loops.retain(|&id| of(module, inside(module, id), Opcode::For).is_empty());
    loops
}

/// Returns the loop over tiles that need a mask, which compares positions.
pub fn masked_loop(module: &Module) -> OpId {
    let loops = innermost_loops(module);
    let compares = |&&id: &&OpId| {
        let found = of(module, inside(module, id), Opcode::CmpI);
        found.into_iter().any(|id| is_wide(module, id))
    };
    *loops.iter().find(compares).expect("a loop over tiles that need a mask")
}

/// Returns operations of an opcode in the loop over tiles that need a mask.
pub fn masked(module: &Module, opcode: Opcode) -> Vec<OpId> {
    of(module, inside(module, masked_loop(module)), opcode)
}

/// Returns operations of an opcode in the loop over tiles that need a mask, outside of any branch.
pub fn masked_always(module: &Module, opcode: Opcode) -> Vec<OpId> {
    let mut always = masked(module, opcode);
    for branch in masked(module, Opcode::If) {
        let inner = inside(module, branch);
        always.retain(|id| !inner.contains(id));
    }
    always
}

/// Whether a result of the operation is a tile of more than one number.
pub fn is_wide(module: &Module, id: OpId) -> bool {
    let wide = |ty: &Type| matches!(ty, Type::Tile(tile) if !tile.shape.is_empty());
    module.op(id).result_types.iter().any(wide)
}
