//! `mask_runs`: how many pairs blocks compute of the pairs that masks as data allow.

use burst_attention_interpreter::Address;
use burst_attention_kernels::instances::Kernel;
use burst_attention_kernels::launch::Features;
use burst_attention_kernels::record::Value;

use super::case::{CASE, Case, Masks};
use super::feature_arrays::MaskArrays;
use super::ranges::preparations;
use super::visible::{ANY, COMBS, TREE};
use super::world::{Change, World};

/// Rows of a document, and of a branch of a tree.
const LENGTH: i32 = 2048;

/// Causal documents, one after the other.
fn documents(_: usize, j: usize) -> [[i32; 2]; 2] {
    let end = (j as i32 / LENGTH + 1) * LENGTH;
    [[j as i32, end], [0, 0]]
}

/// A causal prefix, and causal branches that each see the prefix and themselves.
fn branches(b: usize, j: usize) -> [[i32; 2]; 2] {
    if j < 2 * LENGTH as usize { [[j as i32, i32::MAX], [0, 0]] } else { documents(b, j) }
}

/// Runs the kernels that prepare a forward pass. Returns the runs of each block of 128 queries of
/// the first entry: begin and end of four runs, same, and differs.
fn runs(case: Case) -> Result<Vec<[usize; 10]>, String> {
    let mut world = World::new(3, Change::None);
    let masks = case.masks.map(|masks| MaskArrays::new(&mut world, &case, masks).visible(0, 0));
    let launches = preparations(&case, Features { visible: masks, ..Features::default() })?;
    let Some(Value::Pointer(at)) = launches.last().and_then(|launch| launch.value("runs")) else {
        return Err(format!("expected a launch with runs, came {launches:?}"));
    };
    world.run(launches, |_| None)?;
    let numbers = world.memory.read_i32(Address(at), 10 * case.q_len.div_ceil(128));
    let numbers: Vec<usize> = numbers.into_iter().map(|number| number as usize).collect();
    Ok(numbers.chunks_exact(10).map(|chunk| chunk.try_into().expect("ten numbers")).collect())
}

/// Returns the pairs that blocks compute, and the pairs that the mask allows, after checks that no
/// allowed pair is left out and that all pairs of the tiles without a mask are allowed.
fn pairs(case: Case) -> (usize, usize) {
    let tile = case.instance(Kernel::Forward, false).expect("an image").tile();
    let keys = tile.keys as usize;
    let found = runs(case).unwrap_or_else(|error| panic!("{case:?}: {error}"));
    let (mut computed, mut allowed) = (0, 0);
    for (block, &[.., same, differs]) in found.iter().enumerate() {
        let rows = block * 128..case.q_len.min(block * 128 + 128);
        let begins = found[block][..8].chunks_exact(2).map(|run| (run[0], run[1]));
        let visited: Vec<bool> = (0..case.kv_len)
            .map(|j| begins.clone().any(|(begin, end)| (begin..end).contains(&j)))
            .collect();
        computed +=
            rows.len() * keys * visited.chunks(keys).filter(|tile| tile.contains(&true)).count();
        for (j, &is_visited) in visited.iter().enumerate() {
            let seen = rows.clone().filter(|&i| case.sees(0, i, j)).count();
            assert!(seen == 0 || is_visited, "{case:?}: block {block} leaves out key {j}");
            let whole = !(same..differs).contains(&j) || seen == rows.len();
            assert!(whole, "{case:?}: block {block} does not mask key {j}");
            allowed += seen;
        }
    }
    (computed, allowed)
}

#[test]
fn blocks_compute_few_pairs_that_masks_hide() {
    let rows = 4 * LENGTH as usize;
    for intervals in [documents, branches] {
        let masks = Some(Masks { intervals, count: 1, ..ANY });
        for head_dim in [64, 128] {
            let (computed, allowed) =
                pairs(Case { q_len: rows, kv_len: rows, head_dim, masks, ..CASE });
            let ratio = computed as f64 / allowed as f64;
            assert!((1.0..1.1).contains(&ratio), "{head_dim} columns: {computed} of {allowed}");
        }
    }
}

#[test]
fn blocks_visit_all_keys_that_masks_show() {
    for masks in [ANY, TREE, COMBS] {
        pairs(Case { q_len: 290, kv_len: 610, masks: Some(masks), ..CASE });
    }
}
