//! Kernels and launches with one mistake each, which the checks must find.

use burst_attention_kernels::launch::Launch;
use burst_attention_kernels::record::Value;
use cutile_ir::Module;
use cutile_ir::bytecode::Opcode::{self, *};
use cutile_ir::ir::OpId;

use super::case::{CASE, CAUSAL, Case};
use super::combine_softmax::check as combine;
use super::fold_result::check as fold;
use super::forward::check as fwd;
use super::gradients::{check_keys as dkdv, check_queries as dq};
use super::modules::{find, is_wide, masked};
use super::problem::{Found, Problem};
use super::rows::{
    check_accumulate as accumulate, check_add_gradient as add, check_pack_lse as pack,
};
use super::rows::{check_cast as cast, check_delta as delta};
use super::world::Change::{self, Launch as Launched, Module as Compiled};

/// A mistake: its name, the check that must find it, the case, and the change.
pub type Mutant = (&'static str, Check, Case, Change);
type Check = fn(&Problem, Change) -> Result<Found, String>;

/// A case with two entries, two heads for each key head, two tiles of rows.
const FULL: Case =
    Case { batch: 2, heads: 4, kv_heads: 2, q_len: 150, kv_len: 150, head_dim: 16, ..CASE };
const BAND: Case = Case { band: (-60, 4), ..FULL };
/// A case in which all kernels mask tiles.
const HALF: Case = Case { band: CAUSAL, ..FULL };
const BLIND: Case = Case { band: (30, 80), ..FULL };
const STEPS: Case = Case { steps: &[(0, 64), (64, 150)], band: CAUSAL, ..FULL };
/// A case in which each query sees few keys, and one key has nearly all weight: the largest scores
/// of two states are far apart.
const STEEP: Case = Case { magnitude: 1000.0, band: (0, 3), ..FULL };

/// Changes the value of an argument.
pub fn set(launch: &mut Launch, name: &str, change: impl Fn(Value) -> Value) {
    let arguments = launch.instance().kernel.arguments();
    let at = arguments.iter().position(|argument| argument.name == name);
    let value = &mut launch.values[at.unwrap_or_else(|| panic!("no argument {name}"))];
    *value = change(*value);
}

pub fn swap(launch: &mut Launch, one: &str, other: &str) {
    let values = [one, other].map(|name| launch.value(name).expect("an argument of that name"));
    set(launch, one, |_| values[1]);
    set(launch, other, |_| values[0]);
}

pub fn force(launch: &mut Launch, name: &str, value: i32) {
    set(launch, name, |_| Value::I32(value));
}

pub fn scale(launch: &mut Launch, name: &str, value: f32) {
    set(launch, name, |_| Value::F32(value));
}

/// Moves an array of 16-bit rows by one row.
fn move_a_row(launch: &mut Launch, name: &str, heads: &str) {
    let integer = |name: &str| match launch.value(name) {
        Some(Value::I32(value)) => value as u64,
        other => panic!("{name} is {other:?}"),
    };
    let bytes = 2 * integer(heads) * integer("head_dim");
    set(launch, name, |value| match value {
        Value::Pointer(at) => Value::Pointer(at + bytes),
        other => other,
    });
}

/// Replaces an operand of the `n`-th operation in the masked loop by another of its operands.
pub fn reroute(module: &mut Module, opcode: Opcode, n: usize, to: usize, from: usize) {
    let id = masked(module, opcode)[n];
    let op = module.op_mut(id);
    op.operands[to] = op.operands[from];
}

/// Replaces an operand by another operand in all such operations of a kernel.
pub fn reroute_all(module: &mut Module, opcode: Opcode, to: usize, from: usize) {
    for id in find(module, opcode) {
        let op = module.op_mut(id);
        op.operands[to] = op.operands[from];
    }
}

/// Lets the mask's upper limit go beyond the last key.
fn drop_end(module: &mut Module) {
    let wide = |id: &OpId| is_wide(module, *id);
    let limit = masked(module, MinI).into_iter().find(wide).expect("an upper limit of each row");
    let op = module.op_mut(limit);
    op.operands[1] = op.operands[0];
}

/// Lets the last product of the masked loop start from its accumulator before the rescaling.
fn drop_fading(module: &mut Module) {
    let [mul, mma] =
        [MulF, MmaF].map(|opcode| *masked(module, opcode).last().expect("in the loop"));
    let unfaded = module.op(mul).operands[0];
    module.op_mut(mma).operands[2] = unfaded;
}

/// Replaces p·(dp − delta) by p·dp.
fn drop_delta(module: &mut Module) {
    let [mul, sub] =
        [MulF, SubF].map(|opcode| *masked(module, opcode).last().expect("in the loop"));
    let without = module.op(sub).operands[0];
    module.op_mut(mul).operands[1] = without;
}

/// Mistakes rows and heads for each other in the first store.
fn misplace(module: &mut Module) {
    let store = find(module, StoreViewTko)[0];
    module.op_mut(store).operands.swap(3, 4);
}

/// Makes the last choice of a kernel always take its first option.
fn drop_choice(module: &mut Module) {
    let select = *find(module, Select).last().expect("a choice");
    let op = module.op_mut(select);
    op.operands[2] = op.operands[1];
}

/// Replaces a sum by the sum of an operand with itself.
fn add_itself(module: &mut Module, which: usize) {
    let sum = *find(module, AddF).last().expect("a sum");
    let op = module.op_mut(sum);
    op.operands[1 - which] = op.operands[which];
}

/// Gives the first operation of an opcode one of its operands twice.
fn of_one(module: &mut Module, opcode: Opcode, which: usize) {
    let op = module.op_mut(find(module, opcode)[0]);
    op.operands[1 - which] = op.operands[which];
}

/// Gives both states of `combine_softmax` the same weight, in the third and the fourth product.
fn weigh_alike(module: &mut Module) {
    let products = find(module, MulF);
    let weight = module.op(products[2]).operands[1];
    module.op_mut(products[3]).operands[1] = weight;
}

/// The entry among the operands of a load. A load of activations has the operands view, entry,
/// tile, head, column; a load of statistics has view, entry, head, tile.
pub const ENTRY: usize = 1;
pub const TILE: usize = 2;
const HEAD: usize = 3;

#[rustfmt::skip]
static MUTANTS: [Mutant; 67] = [
    ("fwd: keys of another head", fwd, FULL, Compiled(|m| reroute(m, LoadViewTko, 0, HEAD, ENTRY))),
    ("fwd: v of another tile", fwd, FULL, Compiled(|m| reroute(m, LoadViewTko, 1, TILE, ENTRY))),
    ("fwd: no mask", fwd, BAND, Compiled(|m| reroute(m, Select, 0, 2, 1))),
    ("fwd: keys past the end count", fwd, FULL, Compiled(drop_end)),
    ("fwd: accumulator not rescaled", fwd, FULL, Compiled(drop_fading)),
    ("fwd: rows stored as heads", fwd, FULL, Compiled(misplace)),
    ("fwd: lse of blind rows finite", fwd, BLIND, Compiled(drop_choice)),
    ("fwd: k and v swapped", fwd, FULL, Launched(|l| swap(l, "k", "v"))),
    ("fwd: lower and upper swapped", fwd, BAND, Launched(|l| swap(l, "lower", "upper"))),
    ("fwd: upper off by one", fwd, BAND, Launched(|l| force(l, "upper", 5))),
    ("fwd: lower off by one", fwd, BAND, Launched(|l| force(l, "lower", -59))),
    ("fwd: scale for e", fwd, FULL, Launched(|l| scale(l, "scale_log2", 0.25))),
    ("fwd: state not loaded", fwd, STEPS, Launched(|l| force(l, "first", 1))),
    ("fwd: results too early", fwd, STEPS, Launched(|l| force(l, "last", 1))),
    ("fwd: o a row further on", fwd, FULL, Launched(|l| move_a_row(l, "o", "heads"))),
    ("fwd: strides swapped", fwd, FULL, Launched(|l| swap(l, "q_batch_stride", "k_batch_stride"))),
    ("fwd: other sections", fwd, FULL, Launched(|l| force(l, "section", 3))),
    ("fwd: a key too few", fwd, FULL, Launched(|l| force(l, "kv_len", 149))),
    ("fwd: a query too few", fwd, FULL, Launched(|l| force(l, "q_len", 149))),
    ("dkdv: no mask", dkdv, BAND, Compiled(|m| reroute(m, Select, 0, 2, 1))),
    ("dkdv: q of another tile", dkdv, HALF, Compiled(|m| reroute(m, LoadViewTko, 0, TILE, ENTRY))),
    ("dkdv: lse of another head", dkdv, HALF, Compiled(|m| reroute(m, LoadViewTko, 1, 2, ENTRY))),
    ("dkdv: delta not subtracted", dkdv, HALF, Compiled(drop_delta)),
    ("dkdv: rows stored as heads", dkdv, FULL, Compiled(misplace)),
    ("dkdv: dk and dv swapped", dkdv, FULL, Launched(|l| swap(l, "dk", "dv"))),
    ("dkdv: bounds swapped", dkdv, BAND, Launched(|l| swap(l, "lower", "upper"))),
    ("dkdv: dk unscaled", dkdv, FULL, Launched(|l| scale(l, "softmax_scale", 1.0))),
    ("dkdv: accumulators not loaded", dkdv, STEPS, Launched(|l| force(l, "first", 1))),
    ("dkdv: dv a row further on", dkdv, FULL, Launched(|l| move_a_row(l, "dv", "kv_heads"))),
    ("dq: no mask", dq, BAND, Compiled(|m| reroute(m, Select, 0, 2, 1))),
    ("dq: keys of another head", dq, FULL, Compiled(|m| reroute(m, LoadViewTko, 0, HEAD, ENTRY))),
    ("dq: delta not subtracted", dq, FULL, Compiled(drop_delta)),
    ("dq: accumulator not loaded", dq, STEPS, Launched(|l| force(l, "first", 1))),
    ("dq: dout for q", dq, FULL, Launched(|l| swap(l, "q", "dout"))),
    ("delta: dlse ignored", delta, FULL, Launched(|l| force(l, "has_dlse", 0))),
    ("delta: lse of blind rows stays −inf", delta, BLIND, Compiled(drop_choice)),
    ("delta: results swapped", delta, FULL, Launched(|l| swap(l, "lse_log2", "delta"))),
    ("cast: b ignored", cast, FULL, Launched(|l| force(l, "has_b", 0))),
    ("cast: not scaled", cast, FULL, Launched(|l| scale(l, "scale", 1.0))),
    ("delta: zeros left", delta, FULL, Launched(|l| force(l, "has_zeros", 0))),
    ("accumulate: arrived twice", accumulate, FULL, Compiled(|m| add_itself(m, 1))),
    ("accumulate: home twice", accumulate, FULL, Compiled(|m| add_itself(m, 0))),
    ("accumulate: strides swapped", accumulate, FULL, Launched(|l| swap(l, "home_batch_stride", "arrived_batch_stride"))),
    ("accumulate: a row too few", accumulate, FULL, Launched(|l| force(l, "rows", 149))),
    ("combine: m of home alone", combine, STEEP, Compiled(|m| of_one(m, MaxF, 0))),
    ("combine: arrived weighed as home", combine, FULL, Compiled(weigh_alike)),
    ("combine: l of home alone", combine, FULL, Compiled(|m| of_one(m, AddF, 0))),
    ("combine: lse of blind rows finite", combine, BLIND, Compiled(drop_choice)),
    ("combine: strides swapped", combine, FULL, Launched(|l| swap(l, "stat_head_stride", "arrived_stat_head_stride"))),
    ("combine: states mixed", combine, FULL, Launched(|l| swap(l, "row_max", "arrived_max"))),
    ("combine: m and l swapped", combine, FULL, Launched(|l| swap(l, "arrived_max", "arrived_sum"))),
    ("combine: state for results", combine, FULL, Launched(|l| force(l, "last", 0))),
    ("combine: a row too few", combine, FULL, Launched(|l| force(l, "q_len", 149))),
    ("accumulate: not scaled", accumulate, FULL, Launched(|l| scale(l, "scale", 1.0))),
    ("add: sum not loaded", add, FULL, Launched(|l| force(l, "first", 1))),
    ("add: sum for result", add, FULL, Launched(|l| force(l, "last", 0))),
    ("add: strides swapped", add, FULL, Launched(|l| swap(l, "home_batch_stride", "arrived_batch_stride"))),
    ("add: a row too few", add, FULL, Launched(|l| force(l, "rows", 149))),
    ("fold: state not loaded", fold, FULL, Launched(|l| force(l, "first", 1))),
    ("fold: state for results", fold, FULL, Launched(|l| force(l, "last", 0))),
    ("fold: strides swapped", fold, FULL, Launched(|l| swap(l, "stat_head_stride", "arrived_lse_head_stride"))),
    ("fold: m of home alone", fold, STEEP, Compiled(|m| of_one(m, MaxF, 0))),
    ("fold: lse of blind rows finite", fold, BLIND, Compiled(drop_choice)),
    ("fold: a row too few", fold, FULL, Launched(|l| force(l, "q_len", 149))),
    ("pack: strides swapped", pack, FULL, Launched(|l| swap(l, "lse_batch_stride", "packed_lse_batch_stride"))),
    ("pack: a row too few", pack, FULL, Launched(|l| force(l, "q_len", 149))),
    ("cast: out a row further on", cast, FULL, Launched(|l| move_a_row(l, "out", "heads"))),
];

#[test]
fn every_mistake_is_found() {
    assert_found(
        &[FULL, HALF, BAND, BLIND, STEPS, STEEP],
        &[fwd, dkdv, dq, delta, cast, accumulate, add, pack, combine, fold],
        &MUTANTS,
    );
}

/// Asserts that all checks pass in all cases, and that each fails with its mistakes.
pub fn assert_found(cases: &[Case], checks: &[Check], mutants: &[Mutant]) {
    for case in cases {
        let problem = Problem::new(*case);
        for check in checks {
            let found = check(&problem, Change::None);
            found.unwrap_or_else(|error| panic!("without a mistake: {error}\n{case:?}"));
        }
    }
    let mut missed = vec![];
    for (name, check, case, change) in mutants {
        match check(&Problem::new(*case), *change) {
            Ok(found) => missed.push((name, found.worst)),
            Err(error) => println!("{name}: {error}"),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}
