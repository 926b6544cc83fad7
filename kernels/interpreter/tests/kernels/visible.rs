//! Masks as data: intervals of keys, and positions of rows.

use burst_attention_kernels::instances::Element::F16;

use super::case::{CASE, CAUSAL, Case, Masks};
use super::features::{DOCUMENTS, OTHERS, PADDED};
use super::values::check;

/// Positions beyond those of any row.
const EVER: i32 = i32::MAX;

fn row(_: usize, i: usize) -> i32 {
    i as i32
}

/// The positions of 290 rows in another order in each entry.
fn turned(b: usize, i: usize) -> i32 {
    ((i * 37 + 101 * b) % 290) as i32
}

fn never(_: usize, _: usize) -> [[i32; 2]; 2] {
    [[5, 5], [9, -9]]
}

/// Intervals that begin and end anywhere, some of them empty, some beyond all rows.
fn any(b: usize, j: usize) -> [[i32; 2]; 2] {
    let n = ((j + 13 * b) as i32).wrapping_mul(7919);
    [[n.rem_euclid(311) - 20, n.rem_euclid(283)], [n.rem_euclid(97), n.rem_euclid(53)]]
}

/// A prefix that branches share: keys before 70 for all queries, then branches of 60 rows.
fn tree(b: usize, j: usize) -> [[i32; 2]; 2] {
    let branch = (j as i32 - 70).div_euclid(60);
    let end = 70 + 60 * (branch + 1);
    let first = if branch < 0 { [j as i32, EVER] } else { [j as i32, end] };
    // Queries of the last branch see the first branch too.
    let second = if branch == 0 { [190 + b as i32, 250] } else { [0, 0] };
    [first, second]
}

/// Blocks of keys that every fifth stretch of 64 queries sees: more runs than a block keeps.
fn combs(_: usize, j: usize) -> [[i32; 2]; 2] {
    let stretch = j as i32 / 64 % 3;
    [[64 * stretch, 64 * stretch + 64], [256, if stretch == 1 { 256 } else { 400 }]]
}

/// All queries see all keys.
fn open(_: usize, _: usize) -> [[i32; 2]; 2] {
    [[0, EVER]; 2]
}

/// Each key is seen by the next 200 queries.
fn local(_: usize, j: usize) -> [[i32; 2]; 2] {
    [[j as i32, j as i32 + 200], [0, 0]]
}

/// Positions of which every second stretch of 64 rows is beyond 1,000.
fn by_turns(_: usize, i: usize) -> i32 {
    let i = i as i32;
    i + 1000 * (i / 64 % 2)
}

fn early(_: usize, _: usize) -> [[i32; 2]; 2] {
    [[0, 1000], [0, 0]]
}

pub const ANY: Masks = Masks { position: row, intervals: any, count: 2, counted: None };
pub const TREE: Masks = Masks { intervals: tree, ..ANY };
pub const COMBS: Masks = Masks { intervals: combs, ..ANY };
/// Many runs of queries see all keys.
pub const STRETCHES: Masks = Masks { position: by_turns, intervals: early, ..ANY };
pub const OPEN: Masks = Masks { intervals: open, ..ANY };
pub const LOCAL: Masks = Masks { intervals: local, ..ANY };
const PREFIX: Masks = Masks { count: 1, ..TREE };
pub const TURNED: Masks = Masks { position: turned, counted: Some(turned), ..ANY };
const NEVER: Masks = Masks { intervals: never, ..ANY };
/// Positions without intervals.
pub const PLACES: Masks = Masks { count: 0, ..TURNED };

const MASKED: Case = Case { q_len: 290, kv_len: 290, head_dim: 32, masks: Some(TREE), ..CASE };

#[test]
fn intervals_of_keys() {
    check(&[
        MASKED,
        Case { batch: 2, heads: 2, masks: Some(ANY), ..MASKED },
        Case { masks: Some(PREFIX), band: CAUSAL, segments: Some((PADDED, PADDED)), ..MASKED },
        Case { masks: Some(TURNED), segments: Some((DOCUMENTS, OTHERS)), ..MASKED },
    ]);
}

#[test]
#[ignore = "takes long: make test-full"]
fn intervals_that_hide_all_or_come_in_many_runs() {
    let long = Case { q_len: 300, kv_len: 900, masks: Some(COMBS), ..MASKED };
    check(&[
        Case { masks: Some(NEVER), q_len: 90, ..MASKED },
        long,
        Case { band: (-100, 500), element: F16, ..long },
        Case { q_len: 900, kv_len: 300, head_dim: 128, ..long },
        Case { q_len: 1, kv_len: 70, ..MASKED },
        Case { q_len: 70, kv_len: 1, masks: Some(ANY), ..MASKED },
        Case { q_len: 0, kv_len: 5, ..MASKED },
        Case { q_len: 5, kv_len: 0, ..MASKED },
    ]);
}

#[test]
#[ignore = "takes long: make test-full"]
fn masks_with_all_features() {
    let general = Case {
        q_len: 150,
        kv_len: 170,
        batch: 2,
        heads: 2,
        slopes: true,
        dropout: Some(0.3),
        soft_cap: 3.0,
        masks: Some(TURNED),
        ..MASKED
    };
    check(&[
        general,
        Case { masks: Some(PLACES), soft_cap: 0.0, ..general },
        Case { masks: Some(TREE), positions: (40, 7, 2), value_dim: Some(24), ..general },
    ]);
}

#[test]
#[ignore = "takes long: make test-full"]
fn masks_in_steps_and_cuts() {
    const ORDER: &[(usize, usize)] = &[(132, 290), (0, 60), (60, 132)];
    let steps = Case { steps: ORDER, batch: 2, heads: 2, ..MASKED };
    check(&[
        steps,
        Case { finished: false, masks: Some(TURNED), segments: Some((PADDED, PADDED)), ..steps },
        Case { slopes: true, dropout: Some(0.4), masks: Some(TURNED), ..steps },
        Case { slopes: true, positions: (9, 1, 2), masks: Some(TREE), ..steps },
    ]);
    let cut = Case { batch: 2, heads: 2, kv_heads: 2, limit: 70_000, ..MASKED };
    let launches = check(&[cut, Case { masks: Some(TURNED), dropout: Some(0.4), ..cut }]);
    assert!(launches[0][..3].iter().all(|&launches| launches > cut.batch), "{launches:?}");
    check(&[Case { batch: 3, q_len: 40, kv_len: 40, limit: 60_000, ..cut }]);
}

#[test]
#[ignore = "takes long: make test-full"]
fn masks_of_all_widths() {
    let wide = Case { masks: Some(TURNED), segments: Some((DOCUMENTS, DOCUMENTS)), ..MASKED };
    check(&[
        Case { head_dim: 64, ..wide },
        Case { head_dim: 128, band: (-90, 40), ..wide },
        Case { head_dim: 256, masks: Some(TREE), element: F16, ..wide },
        Case { head_dim: 128, slopes: true, soft_cap: 2.0, ..wide },
    ]);
}
