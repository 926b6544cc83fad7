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

/// Those in the loop over tiles that need a mask, which comes after the one over tiles that don't,
/// where there is one.
pub fn masked(module: &Module, opcode: Opcode) -> Vec<OpId> {
    let last = *find(module, Opcode::For).last().expect("a loop over tiles");
    of(module, inside(module, last), opcode)
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
