//! The fused backward kernel: dk, dv, and dq, to which its blocks add in any order.

use burst_attention_kernels::instances::Element::*;
use burst_attention_kernels::instances::{Kernel, Target, TileShape};
use burst_attention_kernels::launch::{Cast, MAX_VIEW_BYTES};
use cutile_ir::Module;
use cutile_ir::bytecode::Opcode::*;
use cutile_ir::ir::{BlockId, OpId};
use std::ops::{Range, RangeInclusive};

use super::case::{CASE, CAUSAL, Case, NONE};
use super::features::{DOCUMENTS, ONE, OTHERS, PADDED, SHORT, SORTED};
use super::gradients::{add_key_grads, compare_dq, compare_keys};
use super::modules::{innermost_loops, inside, of};
use super::problem::{Found, Problem};
use super::world::{Array, Change, Scalar, Stores, World};

/// Runs the launches. Returns dk, dv, the sums of dq, and dq; and the number of launches.
pub fn run(problem: &Problem, seed: u64, change: Change) -> Result<(Vec<Vec<f32>>, usize), String> {
    let case = &problem.case;
    let Case { batch, q_len, heads, head_dim, margin, .. } = *case;
    let mut world = World::new(seed, change);
    let sizes = [batch, q_len, heads, head_dim];
    let dq_acc = world.rows("dq_acc", Scalar::F32, sizes, 3 * margin);
    dq_acc.fill(&mut world.memory, 0..q_len, &vec![0.0; sizes.iter().product()]);
    let mut outputs = add_key_grads(&mut world, problem, Some(&dq_acc))?;
    if case.limit == MAX_VIEW_BYTES {
        count_additions(problem, &world, &dq_acc)?;
    }
    let launches = world.launches();
    outputs.push(dq_acc.read(&world.memory));
    outputs.push(cast(&mut world, case, &dq_acc)?);
    Ok((outputs, launches))
}

/// Runs `cast`, which makes dq of the sums.
fn cast(world: &mut World, case: &Case, sums: &Array) -> Result<Vec<f32>, String> {
    let Case { batch, q_len: rows, heads, head_dim, margin, element, .. } = *case;
    let dq = world.rows("dq", Scalar::Activation(element), [batch, rows, heads, head_dim], margin);
    let (a, out, scale) = (sums.rows(0), dq.rows(0), case.scale());
    let cast = Cast { batch, rows, heads, head_dim, element, a, b: None, out, scale };
    let launches = cast.launches(case.target).map_err(|error| error.to_string())?;
    let change = std::mem::replace(&mut world.change, Change::None);
    world.run(launches, |_| None)?;
    world.change = change;
    world.audit(&[(&dq, Stores::Exactly(1))])?;
    Ok(dq.read(&world.memory))
}

/// Checks that each tile of pairs that a block visits adds once to each of its rows of dq.
fn count_additions(problem: &Problem, world: &World, sums: &Array) -> Result<(), String> {
    let Case { batch, q_len, heads, .. } = problem.case;
    for b in 0..batch {
        for i in 0..q_len {
            let expected = visits(problem, b, i);
            for h in 0..heads {
                let counts = sums.stores_of(&world.memory, (b, i, h));
                if let Some(count) = counts.iter().find(|&count| !expected.contains(count)) {
                    return Err(format!(
                        "row {i} of head {h} of entry {b} is added to {count} times, expected \
                         {expected:?}"
                    ));
                }
            }
        }
    }
    Ok(())
}

/// Returns how many tiles of pairs with query `i` blocks may visit. They must visit tiles with a
/// visible pair, and may visit tiles with a pair that the band allows. Blocks treat the last tile
/// of queries as a whole tile.
fn visits(problem: &Problem, b: usize, i: usize) -> RangeInclusive<u32> {
    let case = &problem.case;
    let TileShape { rows, keys, .. } = tile(case);
    let step = case.ranges(case.q_len).into_iter().find(|step| step.contains(&i));
    let Some(step) = step else { return 0..=0 };
    let first = step.start + (i - step.start) / rows as usize * rows as usize;
    let (whole, end) = (first..first + rows as usize, step.end);
    let any = |keys: &Range<usize>, end: usize, is: &dyn Fn(usize, usize) -> bool| {
        let queries = whole.start..whole.end.min(end);
        queries.into_iter().any(|i| keys.clone().any(|j| is(i, j)))
    };
    let tiles = (0..case.kv_len).step_by(keys as usize);
    let tiles = tiles.map(|first| first..case.kv_len.min(first + keys as usize));
    let seen = tiles.clone().filter(|keys| any(keys, end, &|i, j| case.sees(b, i, j)));
    let allowed = tiles.filter(|keys| any(keys, usize::MAX, &|i, j| case.allows(i, j)));
    seen.count() as u32..=allowed.count() as u32
}

fn tile(case: &Case) -> TileShape {
    let instance = case.instance(Kernel::KeyGrads, true);
    instance.unwrap_or_else(|| panic!("no fused kernel for {case:?}")).tile()
}

/// Checks dk, dv and dq. dk and dv must have the same bits in any order of blocks; dq may differ by
/// float32's rounding.
pub fn check(problem: &Problem, change: Change) -> Result<Found, String> {
    let (outputs, others, launches) = problem.twice_of(2, |seed| run(problem, seed, change))?;
    let norm = |values: &mut dyn Iterator<Item = f32>| {
        values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
    };
    let (sums, of_others) = (&outputs[2], &others[2]);
    let apart = norm(&mut sums.iter().zip(of_others).map(|(one, other)| one - other));
    let size = norm(&mut sums.iter().copied());
    if apart > size * 2f64.powi(-20) {
        return Err(format!("sums of dq differ by {apart:e} of {size:e} in another order"));
    }
    let mut worst = compare_keys(problem, &outputs[0], &outputs[1])?;
    for dq in [&outputs[3], &others[3]] {
        worst = worst.max(compare_dq(problem, dq)?);
    }
    Ok(Found { worst, launches })
}

fn check_all(cases: &[Case]) {
    for case in cases {
        let found = check(&Problem::new(*case), Change::None);
        let found = found.unwrap_or_else(|error| panic!("{error}\n{case:?}"));
        println!("fused {:.2} {case:?}", found.worst);
    }
}

/// A case with two entries, groups of two heads, three tiles of keys and of queries.
const WIDE: Case =
    Case { batch: 2, heads: 4, kv_heads: 2, q_len: 290, kv_len: 270, head_dim: 24, ..CASE };
const TEXT: Case =
    Case { segments: Some((DOCUMENTS, DOCUMENTS)), head_dim: 72, band: CAUSAL, ..WIDE };

#[test]
fn fused_gradients() {
    check_all(&[
        WIDE,
        Case { band: CAUSAL, head_dim: 128, q_len: 150, kv_len: 140, ..WIDE },
        Case { band: CAUSAL, element: F16, batch: 1, ..WIDE },
        Case { band: (i64::MIN, 57), batch: 1, heads: 2, value_dim: Some(40), ..WIDE },
        TEXT,
        Case { segments: Some((SORTED, SORTED)), heads: 2, kv_heads: 1, ..TEXT },
        Case { segments: Some((SHORT, SHORT)), band: NONE, heads: 2, kv_heads: 1, ..TEXT },
        Case { band: NONE, segments: Some((DOCUMENTS, OTHERS)), batch: 1, ..TEXT },
        Case { band: (-100, 30), segments: Some((PADDED, PADDED)), batch: 1, ..TEXT },
        Case { segments: Some((ONE, ONE)), batch: 1, q_len: 150, ..TEXT },
    ]);
}

#[test]
fn fused_gradients_of_few_rows() {
    let lengths =
        [(1, 1), (1, 200), (200, 1), (128, 128), (129, 257), (300, 77), (31, 300), (5, 0), (0, 5)];
    for band in [NONE, CAUSAL, (i64::MIN, -129), (i64::MIN, -500)] {
        check_all(&lengths.map(|(q_len, kv_len)| Case { q_len, kv_len, band, ..CASE }));
    }
}

#[test]
fn fused_steps_carry_their_state() {
    const ORDERS: [&[(usize, usize)]; 3] =
        [&[(0, 100), (100, 300)], &[(200, 300), (0, 64), (64, 200)], &[(128, 300), (0, 128)]];
    let long = Case { q_len: 300, kv_len: 300, heads: 2, head_dim: 32, band: CAUSAL, ..CASE };
    check_all(&ORDERS.map(|steps| Case { steps, ..long }));
    check_all(&[
        Case { steps: ORDERS[1], finished: false, ..long },
        Case { steps: ORDERS[0], band: (i64::MIN, -250), ..long },
        Case { steps: ORDERS[2], band: (i64::MIN, -250), ..long },
        Case { steps: ORDERS[1], segments: TEXT.segments, head_dim: 72, ..long },
        Case { batch: 2, limit: 70_000, kv_heads: 2, head_dim: 64, ..long },
    ]);
}

#[test]
fn targets_with_fused_kernels_agree_on_them() {
    for target in [Target::Sm90, Target::Sm100] {
        let case = Case { target, head_dim: 128, q_len: 140, kv_len: 150, band: CAUSAL, ..CASE };
        check_all(&[case, Case { segments: Some((DOCUMENTS, DOCUMENTS)), ..case }]);
    }
    for target in [Target::Sm80, Target::Sm120] {
        let case = Case { target, ..CASE };
        assert_eq!(case.instance(Kernel::KeyGrads, true), None);
    }
}

/// Finds the addition to dq in the `n`-th loop over tiles, and its block.
fn addition(module: &Module, n: usize) -> (BlockId, OpId) {
    let loops = innermost_loops(module);
    let region = module.op(loops[n]).regions[0];
    let found = of(module, inside(module, loops[n]), AtomicRedViewTko);
    let [op] = found[..] else { panic!("one addition, got {}", found.len()) };
    let mut blocks = module.region(region).blocks.iter().copied();
    let block = blocks.find(|&block| module.block(block).ops.contains(&op));
    (block.expect("the addition is in the loop's own block"), op)
}

fn skip(module: &mut Module, n: usize) {
    let (block, op) = addition(module, n);
    module.block_mut(block).ops.retain(|&id| id != op);
}

fn double(module: &mut Module, n: usize) {
    let (block, op) = addition(module, n);
    let ops = &mut module.block_mut(block).ops;
    let at = ops.iter().position(|&id| id == op).expect("it is there");
    ops.insert(at, op);
}

/// Replaces an operand of an addition by another operand. Behind the view the operands are entry,
/// tile, head, column.
fn reroute(module: &mut Module, n: usize, to: usize, from: usize) {
    let (_, op) = addition(module, n);
    let op = module.op_mut(op);
    op.operands[to] = op.operands[from];
}

type Mistake = (&'static str, fn(&mut Module));

#[test]
fn mistakes_of_additions_are_found() {
    let mutants: [Mistake; 6] = [
        ("no tile without a mask", |m| skip(m, 1)),
        ("no tile with a mask", |m| skip(m, 0)),
        ("a tile without a mask twice", |m| double(m, 1)),
        ("a tile with a mask twice", |m| double(m, 0)),
        ("another tile", |m| reroute(m, 1, 2, 1)),
        ("another head", |m| reroute(m, 1, 3, 1)),
    ];
    let problem = Problem::new(Case { band: CAUSAL, batch: 1, heads: 2, kv_heads: 1, ..WIDE });
    check(&problem, Change::None).expect("there is no mistake");
    let mut missed = vec![];
    for (name, mutant) in mutants {
        match check(&problem, Change::Module(mutant)) {
            Ok(found) => missed.push((name, found.worst)),
            Err(error) => println!("{name}: {error}"),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}
