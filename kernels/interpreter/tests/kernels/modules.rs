//! Looking into a compiled kernel.

use cutile_ir::Module;
use cutile_ir::bytecode::Opcode;
use cutile_ir::ir::{OpId, RegionId, Type};

/// All operations of a region in order, nested ones included.
fn operations(module: &Module, region: RegionId) -> Vec<OpId> {
    let blocks = &module.region(region).blocks;
    let direct = blocks.iter().flat_map(|&block| &module.block(block).ops);
    direct.flat_map(|&id| std::iter::once(id).chain(inside(module, id))).collect()
}

/// All operations inside of one.
pub fn inside(module: &Module, id: OpId) -> Vec<OpId> {
    module.op(id).regions.iter().flat_map(|&region| operations(module, region)).collect()
}

/// Those of some with that opcode.
pub fn of(module: &Module, among: Vec<OpId>, opcode: Opcode) -> Vec<OpId> {
    among.into_iter().filter(|&id| module.op(id).opcode == opcode).collect()
}

/// All operations of a kernel with that opcode.
pub fn find(module: &Module, opcode: Opcode) -> Vec<OpId> {
    of(module, inside(module, module.functions[0]), opcode)
}

/// The loops over tiles: those with no other loop inside.
pub fn innermost_loops(module: &Module) -> Vec<OpId> {
    let mut loops = find(module, Opcode::For);
    loops.retain(|&id| of(module, inside(module, id), Opcode::For).is_empty());
    loops
}

/// The loop over tiles that need a mask: the one that compares positions.
pub fn masked_loop(module: &Module) -> OpId {
    let loops = innermost_loops(module);
    let compares = |&&id: &&OpId| {
        let found = of(module, inside(module, id), Opcode::CmpI);
        found.into_iter().any(|id| is_wide(module, id))
    };
    *loops.iter().find(compares).expect("a loop over tiles that need a mask")
}

/// Operations in the loop over tiles that need a mask.
pub fn masked(module: &Module, opcode: Opcode) -> Vec<OpId> {
    of(module, inside(module, masked_loop(module)), opcode)
}

/// Those of them that no branch surrounds.
pub fn masked_always(module: &Module, opcode: Opcode) -> Vec<OpId> {
    let mut always = masked(module, opcode);
    for branch in masked(module, Opcode::If) {
        let inner = inside(module, branch);
        always.retain(|id| !inner.contains(id));
    }
    always
}

/// Is a result of the operation a tile of more than one number?
pub fn is_wide(module: &Module, id: OpId) -> bool {
    let wide = |ty: &Type| matches!(ty, Type::Tile(tile) if !tile.shape.is_empty());
    module.op(id).result_types.iter().any(wide)
}
