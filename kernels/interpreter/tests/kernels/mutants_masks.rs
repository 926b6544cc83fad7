//! Mistakes in masks as data.

use burst_attention_kernels::launch::Launch;
use burst_attention_kernels::record::Value;
use cutile_ir::Module;
use cutile_ir::bytecode::Opcode::*;

use super::case::{CASE, Case};
use super::features::DOCUMENTS;
use super::forward::check as fwd;
use super::gradients::{check_keys as dkdv, check_queries as dq};
use super::modules::{find, is_wide, masked_always};
use super::mutants::{Mutant, assert_found, set};
use super::mutants_features::{force, move_a_row};
use super::visible::{ANY, COMBS, LOCAL, TREE, TURNED};
use super::world::Change::{Launch as Launched, Module as Compiled, Ranges};

/// A case with two entries and three tiles of rows, whose branches share a prefix.
const BRANCHES: Case =
    Case { batch: 2, heads: 2, q_len: 290, kv_len: 290, head_dim: 16, masks: Some(TREE), ..CASE };
/// A case in which documents and intervals hide pairs.
const BOTH: Case = Case { masks: Some(ANY), segments: Some((DOCUMENTS, DOCUMENTS)), ..BRANCHES };
/// A case in which slopes and dropout count by positions that are data.
const PLACED: Case =
    Case { masks: Some(TURNED), slopes: true, dropout: Some(0.4), q_len: 150, ..BRANCHES };

/// A case in which rows see several runs.
const SPREAD: Case = Case { masks: Some(COMBS), kv_len: 700, ..BRANCHES };
/// A case in which keys are seen by the next 200 queries.
const NEAR: Case = Case { masks: Some(LOCAL), ..BRANCHES };

const PACKED: usize = 6;
const RUNS: usize = 10;

/// Stores one of `count` numbers in place of another number, in the kernel that stores so many.
fn misplace(module: &mut Module, count: usize, to: usize, from: usize) {
    let stores = find(module, StoreViewTko);
    if stores.len() == count {
        let value = module.op(stores[from]).operands[0];
        module.op_mut(stores[to]).operands[0] = value;
    }
}

/// Drops the last condition on a pair: that data allow it.
fn ignore_data(module: &mut Module) {
    let mut conditions = masked_always(module, AndI).into_iter();
    let last = conditions.rfind(|&id| is_wide(module, id)).expect("conditions on pairs");
    let op = module.op_mut(last);
    op.operands[1] = op.operands[0];
}

/// Gives each of 128 rows the runs of the next.
fn next_runs(launch: &mut Launch) {
    set(launch, "ranges", |value| match value {
        Value::Pointer(at) => Value::Pointer(at + 40),
        other => other,
    });
}

#[rustfmt::skip]
const MUTANTS: [Mutant; 25] = [
    ("fwd: data ignored", fwd, BRANCHES, Compiled(ignore_data)),
    ("fwd: runs of the next rows", fwd, BRANCHES, Launched(next_runs)),
    ("fwd: keys a row further on", fwd, BRANCHES, Launched(|l| move_a_row(l, "kv_segments"))),
    ("fwd: queries a row further on", fwd, BRANCHES, Launched(|l| move_a_row(l, "q_segments"))),
    ("fwd: the first run ends early", fwd, BRANCHES, Ranges(|m| misplace(m, RUNS, 1, 0))),
    ("fwd: the second run is lost", fwd, SPREAD, Ranges(|m| misplace(m, RUNS, 3, 2))),
    ("fwd: even from the start", fwd, BOTH, Ranges(|m| misplace(m, RUNS, 8, 0))),
    ("fwd: even to the end", fwd, BRANCHES, Ranges(|m| misplace(m, RUNS, 9, 7))),
    ("fwd: intervals begin early", fwd, BRANCHES, Ranges(|m| misplace(m, PACKED, 2, 0))),
    ("fwd: intervals end early", fwd, BRANCHES, Ranges(|m| misplace(m, PACKED, 3, 2))),
    ("fwd: second intervals empty", fwd, BRANCHES, Ranges(|m| misplace(m, PACKED, 5, 4))),
    ("fwd: segments for positions", fwd, PLACED, Ranges(|m| misplace(m, PACKED, 1, 0))),
    ("fwd: no bias", fwd, PLACED, Launched(|l| force(l, "has_slopes", 0))),
    ("dkdv: data ignored", dkdv, BRANCHES, Compiled(ignore_data)),
    ("dkdv: runs of the next rows", dkdv, BRANCHES, Launched(next_runs)),
    ("dkdv: queries a row further on", dkdv, BRANCHES, Launched(|l| move_a_row(l, "q_segments"))),
    ("dkdv: even to the end", dkdv, NEAR, Ranges(|m| misplace(m, RUNS, 9, 7))),
    ("dkdv: second intervals empty", dkdv, BRANCHES, Ranges(|m| misplace(m, PACKED, 5, 4))),
    ("dkdv: segments for positions", dkdv, PLACED, Ranges(|m| misplace(m, PACKED, 1, 0))),
    ("dq: data ignored", dq, BRANCHES, Compiled(ignore_data)),
    ("dq: runs of the next rows", dq, BRANCHES, Launched(next_runs)),
    ("dq: even to the end", dq, BRANCHES, Ranges(|m| misplace(m, RUNS, 9, 7))),
    ("dq: keys a row further on", dq, BRANCHES, Launched(|l| move_a_row(l, "kv_segments"))),
    ("dq: second intervals empty", dq, BRANCHES, Ranges(|m| misplace(m, PACKED, 5, 4))),
    ("dq: segments for positions", dq, PLACED, Ranges(|m| misplace(m, PACKED, 1, 0))),
];

#[test]
#[ignore = "takes long: make test-full"]
fn every_mistake_of_masks_is_found() {
    assert_found(&[BRANCHES, BOTH, PLACED, SPREAD, NEAR], &[fwd, dkdv, dq], &MUTANTS);
}
