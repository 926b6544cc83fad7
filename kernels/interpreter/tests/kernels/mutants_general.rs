//! Mistakes in what only the general variants do.
//!
//! Not among them: a backward pass that lets negative segments see each other. Such queries have
//! a huge `lse_log2`, hence p = 0 all the same.

use burst_attention_kernels::launch::Launch;
use burst_attention_kernels::record::Value;
use cutile_ir::Module;
use cutile_ir::bytecode::Opcode::*;
use cutile_ir::ir::{OpId, ScalarType, TileElementType, Type};

use super::case::{CASE, CAUSAL, Case};
use super::forward::check as fwd;
use super::general::{DOCUMENTS, OTHERS, PADDED};
use super::gradients::{check_keys as dkdv, check_queries as dq};
use super::modules::{is_wide, masked};
use super::mutants::{ENTRY, Mutant, TILE, assert_found, reroute, scale, set, swap};
use super::world::Change::{Launch as Launched, Module as Compiled};

const INTEGER: TileElementType = TileElementType::Scalar(ScalarType::I32);

/// Two entries, two tiles of rows.
const TEXT: Case = Case {
    batch: 2,
    heads: 2,
    q_len: 150,
    kv_len: 150,
    head_dim: 16,
    band: CAUSAL,
    segments: Some((DOCUMENTS, DOCUMENTS)),
    ..CASE
};
const CROSS: Case = Case { segments: Some((DOCUMENTS, OTHERS)), band: (-90, 90), ..TEXT };
const BATCH_END: Case = Case { segments: Some((PADDED, PADDED)), ..TEXT };
const CAPPED: Case = Case { segments: None, soft_cap: 2.0, magnitude: 2.0, ..TEXT };

/// The last condition on a pair, that it is of one segment, is dropped.
fn drop_segments(module: &mut Module) {
    let last = masked(module, AndI).len() - 1;
    reroute(module, AndI, last, 1, 0);
}

/// Segments of resident rows are compared with themselves.
fn compare_own(module: &mut Module) {
    let compare = masked(module, CmpI).into_iter().filter(|&id| is_wide(module, id)).rev().nth(1);
    let op = module.op_mut(compare.expect("a comparison of segments before that with 0"));
    op.operands[1] = op.operands[0];
}

/// Segments of streamed rows are loaded where one coordinate is mistaken for another.
fn reroute_segments(module: &mut Module, to: usize, from: usize) {
    let integers = |ty: &Type| matches!(ty, Type::Tile(tile) if tile.element_type == INTEGER);
    let mut loads = masked(module, LoadViewTko).into_iter();
    let load = loads.find(|&id| module.op(id).result_types.iter().any(integers));
    let op = module.op_mut(load.expect("a load of segments"));
    op.operands[to] = op.operands[from];
}

fn another_tile(module: &mut Module) {
    reroute_segments(module, TILE, ENTRY);
}

fn another_entry(module: &mut Module) {
    reroute_segments(module, ENTRY, TILE);
}

/// The soft cap's slope, 1 − tanh²: the last fused product of the masked loop, −tanh · tanh + 1.
fn slope(module: &Module) -> OpId {
    *masked(module, Fma).last().expect("the soft cap's slope")
}

/// p · (1 − tanh²) becomes p · (1 − tanh).
fn forget_square(module: &mut Module) {
    let fma = slope(module);
    let op = module.op_mut(fma);
    op.operands[1] = op.operands[2];
}

/// p · (1 − tanh²) becomes p · 1.
fn drop_slope(module: &mut Module) {
    let (fma, select) = (slope(module), *masked(module, Select).last().expect("a mask"));
    let zero = module.op(select).operands[2];
    module.op_mut(fma).operands[0] = zero;
}

fn move_a_row(launch: &mut Launch, name: &str) {
    set(launch, name, |value| match value {
        Value::Pointer(at) => Value::Pointer(at + 4),
        other => other,
    });
}

fn swap_strides(launch: &mut Launch) {
    swap(launch, "q_segments_batch_stride", "kv_segments_batch_stride");
}

fn swap_sides(launch: &mut Launch) {
    swap(launch, "q_segments", "kv_segments");
    swap_strides(launch);
}

#[rustfmt::skip]
const MUTANTS: [Mutant; 26] = [
    ("fwd: segments ignored", fwd, TEXT, Compiled(drop_segments)),
    ("fwd: own segments twice", fwd, TEXT, Compiled(compare_own)),
    ("fwd: segments of another tile", fwd, TEXT, Compiled(another_tile)),
    ("fwd: segments of another entry", fwd, TEXT, Compiled(another_entry)),
    ("fwd: padding sees padding", fwd, BATCH_END, Compiled(|m| reroute(m, AndI, 1, 1, 0))),
    ("fwd: sides swapped", fwd, CROSS, Launched(swap_sides)),
    ("fwd: strides swapped", fwd, TEXT, Launched(swap_strides)),
    ("fwd: segments a row further on", fwd, TEXT, Launched(|l| move_a_row(l, "kv_segments"))),
    ("fwd: no cap", fwd, CAPPED, Launched(|l| scale(l, "cap_log2", 0.0))),
    ("fwd: cap for e", fwd, CAPPED, Launched(|l| scale(l, "cap_log2", 2.0))),
    ("fwd: half the score capped", fwd, CAPPED, Launched(|l| scale(l, "twice_by_cap", 0.25))),
    ("dkdv: segments ignored", dkdv, TEXT, Compiled(drop_segments)),
    ("dkdv: own segments twice", dkdv, TEXT, Compiled(compare_own)),
    ("dkdv: segments of another tile", dkdv, TEXT, Compiled(another_tile)),
    ("dkdv: sides swapped", dkdv, CROSS, Launched(swap_sides)),
    ("dkdv: strides swapped", dkdv, TEXT, Launched(swap_strides)),
    ("dkdv: the slope's square forgotten", dkdv, CAPPED, Compiled(forget_square)),
    ("dkdv: no slope", dkdv, CAPPED, Compiled(drop_slope)),
    ("dkdv: cap for e", dkdv, CAPPED, Launched(|l| scale(l, "cap_log2", 2.0))),
    ("dq: segments ignored", dq, TEXT, Compiled(drop_segments)),
    ("dq: own segments twice", dq, TEXT, Compiled(compare_own)),
    ("dq: segments of another tile", dq, TEXT, Compiled(another_tile)),
    ("dq: sides swapped", dq, CROSS, Launched(swap_sides)),
    ("dq: the slope's square forgotten", dq, CAPPED, Compiled(forget_square)),
    ("dq: no slope", dq, CAPPED, Compiled(drop_slope)),
    ("dq: no cap", dq, CAPPED, Launched(|l| scale(l, "cap_log2", 0.0))),
];

#[test]
fn every_mistake_of_the_general_variants_is_found() {
    assert_found(&[TEXT, CROSS, BATCH_END, CAPPED], &[fwd, dkdv, dq], &MUTANTS);
}
