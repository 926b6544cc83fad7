//! Mistakes in features.
//!
//! One mistake is missing: a backward pass that lets negative segments see each other. Such queries
//! have a huge `lse_log2`, so p = 0 in any case.

use burst_attention_kernels::launch::Launch;
use burst_attention_kernels::record::Value;
use cutile_ir::Module;
use cutile_ir::bytecode::Opcode::*;
use cutile_ir::ir::{OpId, ScalarType, TileElementType, Type, ValueProducer};

use super::case::{CASE, CAUSAL, Case, NONE};
use super::features::{DOCUMENTS, OTHERS, PADDED, SORTED};
use super::forward::check as fwd;
use super::gradients::{check_keys as dkdv, check_queries as dq};
use super::modules::{find, inside, is_wide, masked, masked_always};
use super::mutants::{ENTRY, Mutant, TILE, assert_found, reroute, scale, set, swap};
use super::world::Change::{Launch as Launched, Module as Compiled, Ranges};

const INTEGER: TileElementType = TileElementType::Scalar(ScalarType::I32);

/// A case with two entries and two tiles of rows.
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

const UNEVEN: Case = Case { heads: 4, value_dim: Some(24), ..TEXT };
const BIASED: Case = Case { segments: None, heads: 4, slopes: true, positions: (40, 0, 2), ..TEXT };
const BIASED_STEPS: Case = Case { steps: &[(0, 64), (64, 150)], ..BIASED };
/// A case with both sides of the diagonal, and a bias beyond the end that float32 has no power of 2
/// for.
const BIASED_END: Case = Case { band: NONE, positions: (0, 20_000, 1), ..BIASED };
const DROPPED: Case = Case { slopes: false, dropout: Some(0.4), positions: (40, 0, 3), ..BIASED };
/// A case for the image with all features, where the launch says which features are on.
const ALL: Case = Case { segments: Some((SORTED, SORTED)), soft_cap: 2.0, slopes: true, ..DROPPED };
const PACKED: Case = Case { segments: Some((SORTED, SORTED)), q_len: 290, kv_len: 290, ..TEXT };
const DROPPED_STEPS: Case = Case { steps: &[(0, 64), (64, 150)], ..DROPPED };
const UNEVEN_STEPS: Case = Case { steps: &[(0, 64), (64, 150)], ..UNEVEN };

/// Drops the last condition on a pair: that its segments are equal.
fn drop_segments(module: &mut Module) {
    // The conditions of dropout, which come later, are of integers.
    let last = masked_always(module, AndI).len() - 1;
    reroute(module, AndI, last, 1, 0);
}

/// Compares segments of resident rows with themselves.
fn compare_own(module: &mut Module) {
    let compare = masked_always(module, CmpI);
    let compare = compare.into_iter().rev().find(|&id| is_wide(module, id));
    let op = module.op_mut(compare.expect("a comparison of segments"));
    op.operands[1] = op.operands[0];
}

/// Mistakes one coordinate for another where the kernel loads segments of streamed rows.
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

/// Returns the operation of the soft cap's slope, 1 − tanh²: the last fused product of the masked
/// loop, −tanh · tanh + 1.
fn slope(module: &Module) -> OpId {
    *masked(module, Fma).last().expect("the soft cap's slope")
}

/// Replaces p · (1 − tanh²) by p · (1 − tanh).
fn forget_square(module: &mut Module) {
    let fma = slope(module);
    let op = module.op_mut(fma);
    op.operands[1] = op.operands[2];
}

/// Replaces p · (1 − tanh²) by p · 1.
fn drop_slope(module: &mut Module) {
    let (fma, select) = (slope(module), *masked_always(module, Select).last().expect("a mask"));
    let zero = module.op(select).operands[2];
    module.op_mut(fma).operands[0] = zero;
}

/// Whether a type is a tile of one number.
fn is_single(ty: &Type) -> bool {
    matches!(ty, Type::Tile(tile) if !tile.shape.is_empty() && tile.shape.iter().all(|&n| n == 1))
}

/// Returns the only load of a single number, which loads a slope.
fn load_of_slope(module: &Module) -> OpId {
    let is_one = |&id: &OpId| module.op(id).result_types.iter().any(is_single);
    find(module, LoadViewTko).into_iter().find(is_one).expect("a load of a slope")
}

/// Gives all heads the slope of the first head.
fn one_slope(module: &mut Module) {
    let load = load_of_slope(module);
    let op = module.op_mut(load);
    op.operands[2] = op.operands[1];
}

/// Leaves slopes out of base 2: users of the only product of single numbers get its factor.
fn natural_slopes(module: &mut Module) {
    let is_one = |&id: &OpId| module.op(id).result_types.iter().any(is_single);
    let product = find(module, MulF).into_iter().find(is_one).expect("slope · log2 e");
    let slope = module.op(product).operands[0];
    for id in inside(module, module.functions[0]) {
        let mut operands = module.op(id).operands.clone();
        for operand in &mut operands {
            match module.value_data(*operand).producer {
                ValueProducer::OpResult { op, .. } if op == product => *operand = slope,
                _ => {}
            }
        }
        module.op_mut(id).operands = operands;
    }
}

/// Swaps the operands of the difference of positions, which is the second difference of wide tiles,
/// after the soft cap's.
fn turn_distances(module: &mut Module) {
    let wide = |id: &OpId| is_wide(module, *id);
    let mut differences = masked(module, SubF).into_iter().filter(wide);
    let difference = differences.nth(1).expect("a difference of positions");
    module.op_mut(difference).operands.swap(0, 1);
}

/// Sums ds itself instead of ds times distances.
fn forget_distances(module: &mut Module) {
    let sum = masked(module, Reduce)[0];
    let summed = module.op(sum).operands[0];
    let ValueProducer::OpResult { op, .. } = module.value_data(summed).producer else {
        panic!("a sum of products");
    };
    module.op_mut(sum).operands[0] = module.op(op).operands[0];
}

/// Makes Philox multiply by the same number twice.
fn one_multiplier(module: &mut Module) {
    let products = masked(module, MulhiI);
    let number = module.op(products[0]).operands[0];
    module.op_mut(products[1]).operands[0] = number;
}

/// Gives each of four keys the word of the first or third key.
fn first_word(module: &mut Module) {
    let integers = |ty: &Type| matches!(ty, Type::Tile(tile) if tile.element_type == INTEGER);
    let selects = masked(module, Select);
    let of_words = |id: &OpId| module.op(*id).result_types.iter().any(integers);
    let word = selects.into_iter().find(of_words).expect("a choice of words");
    let op = module.op_mut(word);
    op.operands[1] = op.operands[2];
}

pub fn force(launch: &mut Launch, name: &str, value: i32) {
    set(launch, name, |_| Value::I32(value));
}

pub fn move_a_row(launch: &mut Launch, name: &str) {
    set(launch, name, |value| match value {
        Value::Pointer(at) => Value::Pointer(at + 4),
        other => other,
    });
}

/// Gives blocks of 64 rows the ranges of the next block.
fn next_ranges(launch: &mut Launch) {
    set(launch, "ranges", |value| match value {
        Value::Pointer(at) => Value::Pointer(at + 16),
        other => other,
    });
}

/// Stores one of the four numbers of a range in place of another number.
fn misplace_range(module: &mut Module, to: usize, from: usize) {
    let stores = find(module, StoreViewTko);
    assert_eq!(stores.len(), 4, "a store of each number");
    let value = module.op(stores[from]).operands[0];
    module.op_mut(stores[to]).operands[0] = value;
}

/// Gives an argument the value of another argument.
fn copy(launch: &mut Launch, to: &str, from: &str) {
    let value = launch.value(from).expect("an argument of that name");
    set(launch, to, |_| value);
}

fn swap_strides(launch: &mut Launch) {
    swap(launch, "q_segments_batch_stride", "kv_segments_batch_stride");
}

fn swap_sides(launch: &mut Launch) {
    swap(launch, "q_segments", "kv_segments");
    swap_strides(launch);
}

#[rustfmt::skip]
static MUTANTS: [Mutant; 88] = [
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
    ("fwd: no segments", fwd, ALL, Launched(|l| force(l, "has_segments", 0))),
    ("dkdv: no segments", dkdv, ALL, Launched(|l| force(l, "has_segments", 0))),
    ("dq: no segments", dq, ALL, Launched(|l| force(l, "has_segments", 0))),
    ("fwd: ranges of the next rows", fwd, PACKED, Launched(next_ranges)),
    ("dkdv: ranges of the next rows", dkdv, PACKED, Launched(next_ranges)),
    ("dq: ranges of the next rows", dq, PACKED, Launched(next_ranges)),
    ("fwd: ranges of one entry", fwd, PACKED, Launched(|l| force(l, "ranges_batch_stride", 4))),
    ("fwd: ranges end early", fwd, PACKED, Ranges(|m| misplace_range(m, 3, 0))),
    ("fwd: ranges begin late", fwd, PACKED, Ranges(|m| misplace_range(m, 0, 1))),
    ("fwd: ranges are even from the start", fwd, PACKED, Ranges(|m| misplace_range(m, 1, 0))),
    ("dkdv: ranges are even to the end", dkdv, PACKED, Ranges(|m| misplace_range(m, 2, 3))),
    ("dq: ranges are even to the end", dq, PACKED, Ranges(|m| misplace_range(m, 2, 3))),
    ("fwd: as many columns of v as of k", fwd, UNEVEN, Launched(|l| swap(l, "value_dim", "head_dim"))),
    ("fwd: v's columns for all", fwd, UNEVEN, Launched(|l| copy(l, "head_dim", "value_dim"))),
    ("fwd: k's columns for all", fwd, UNEVEN, Launched(|l| copy(l, "value_dim", "head_dim"))),
    ("fwd: v strided as k", fwd, UNEVEN, Launched(|l| copy(l, "v_batch_stride", "k_batch_stride"))),
    ("dkdv: v's columns for all", dkdv, UNEVEN, Launched(|l| copy(l, "head_dim", "value_dim"))),
    ("dkdv: k's columns for all", dkdv, UNEVEN, Launched(|l| copy(l, "value_dim", "head_dim"))),
    ("dkdv: v strided as k", dkdv, UNEVEN, Launched(|l| copy(l, "v_batch_stride", "k_batch_stride"))),
    ("dkdv: dout strided as q", dkdv, UNEVEN, Launched(|l| copy(l, "dout_batch_stride", "q_batch_stride"))),
    ("dkdv: dv strided as dk", dkdv, UNEVEN, Launched(|l| copy(l, "dv_batch_stride", "dk_batch_stride"))),
    ("dkdv: dv_acc strided as dk_acc", dkdv, UNEVEN_STEPS, Launched(|l| copy(l, "dv_acc_batch_stride", "dk_acc_batch_stride"))),
    ("dq: v strided as k", dq, UNEVEN, Launched(|l| copy(l, "v_batch_stride", "k_batch_stride"))),
    ("dq: dout strided as q", dq, UNEVEN, Launched(|l| copy(l, "dout_batch_stride", "q_batch_stride"))),
    ("fwd: no bias", fwd, ALL, Launched(|l| force(l, "has_slopes", 0))),
    ("fwd: another distance", fwd, BIASED_STEPS, Launched(|l| force(l, "k_position", 0))),
    ("fwd: rows one position apart", fwd, BIASED, Launched(|l| force(l, "position_stride", 1))),
    ("fwd: slopes of the next head", fwd, BIASED, Launched(|l| move_a_row(l, "slopes"))),
    ("fwd: slopes of one entry", fwd, BIASED, Launched(|l| force(l, "slopes_batch_stride", 1))),
    ("fwd: slopes for e", fwd, BIASED, Compiled(natural_slopes)),
    ("fwd: queries after keys", fwd, BIASED, Compiled(turn_distances)),
    ("dkdv: no bias", dkdv, ALL, Launched(|l| force(l, "has_slopes", 0))),
    ("dkdv: another distance", dkdv, BIASED_STEPS, Launched(|l| force(l, "q_position", 40))),
    ("dkdv: slopes of one head", dkdv, BIASED, Compiled(one_slope)),
    ("dkdv: slopes for e", dkdv, BIASED, Compiled(natural_slopes)),
    ("dkdv: queries after keys", dkdv, BIASED, Compiled(turn_distances)),
    ("dq: no bias", dq, ALL, Launched(|l| force(l, "has_slopes", 0))),
    ("dq: slopes for e", dq, BIASED, Compiled(natural_slopes)),
    ("dq: queries after keys", dq, BIASED, Compiled(turn_distances)),
    ("dq: the slopes' gradient without distances", dq, BIASED, Compiled(forget_distances)),
    ("dq: no gradient of slopes", dq, BIASED, Launched(|l| force(l, "has_dslopes", 0))),
    ("dq: the slopes' gradient of another head", dq, BIASED, Launched(|l| move_a_row(l, "dslopes"))),
    ("dq: the slopes' gradient of one entry", dq, BIASED, Launched(|l| force(l, "dslopes_batch_stride", 600))),
    ("fwd: nothing dropped", fwd, DROPPED, Launched(|l| force(l, "has_dropout", 0))),
    ("fwd: what stays is not scaled", fwd, DROPPED, Launched(|l| scale(l, "keep_scale", 0.6))),
    ("fwd: what is dropped stays", fwd, DROPPED, Launched(|l| force(l, "threshold", 0))),
    ("fwd: one multiplier for both", fwd, DROPPED, Compiled(one_multiplier)),
    ("fwd: the first of four words for all", fwd, DROPPED, Compiled(first_word)),
    ("fwd: another rate", fwd, DROPPED, Launched(|l| force(l, "threshold", 1 << 30))),
    ("fwd: keys from the first on", fwd, DROPPED_STEPS, Launched(|l| force(l, "k_position", 0))),
    ("fwd: a query further on", fwd, DROPPED, Launched(|l| force(l, "q_position", 41))),
    ("fwd: a key further on", fwd, DROPPED, Launched(|l| force(l, "k_position", 1))),
    ("fwd: rows one apart", fwd, DROPPED, Launched(|l| force(l, "position_stride", 1))),
    ("fwd: numbers of one entry", fwd, DROPPED, Launched(|l| force(l, "dropout_batch_stride", 0))),
    ("fwd: numbers a word further on", fwd, DROPPED, Launched(|l| move_a_row(l, "dropout"))),
    ("dkdv: nothing dropped", dkdv, DROPPED, Launched(|l| force(l, "has_dropout", 0))),
    ("dkdv: what stays is not scaled", dkdv, DROPPED, Launched(|l| scale(l, "keep_scale", 0.6))),
    ("dkdv: queries from the first on", dkdv, DROPPED_STEPS, Launched(|l| force(l, "q_position", 40))),
    ("dkdv: a key further on", dkdv, DROPPED, Launched(|l| force(l, "k_position", 1))),
    ("dq: nothing dropped", dq, DROPPED, Launched(|l| force(l, "has_dropout", 0))),
    ("dq: what stays is not scaled", dq, DROPPED, Launched(|l| scale(l, "keep_scale", 0.6))),
    ("dq: a query further on", dq, DROPPED, Launched(|l| force(l, "q_position", 41))),
];

#[test]
#[ignore = "takes long: make test-full"]
fn every_mistake_of_features_is_found() {
    assert_found(
        &[
            TEXT,
            CROSS,
            BATCH_END,
            CAPPED,
            ALL,
            PACKED,
            UNEVEN,
            UNEVEN_STEPS,
            BIASED,
            BIASED_STEPS,
            BIASED_END,
            DROPPED,
            DROPPED_STEPS,
        ],
        &[fwd, dkdv, dq],
        &MUTANTS,
    );
}
