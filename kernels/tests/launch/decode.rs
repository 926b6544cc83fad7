//! Launches of decode: room for their pieces, and the number of their blocks.

use burst_attention_kernels::instances::{Element, Kernel, Target};
use burst_attention_kernels::launch::{Decode, MOST_RUNS, Split};

/// Returns units of `rows` rows over eight key heads, in pages of `page_rows`.
fn decode(units: usize, rows: usize, dim: usize, page_rows: usize, split: Split) -> Decode {
    let mut description = Decode {
        units,
        rows,
        kv_heads: 8,
        head_dim: dim,
        value_dim: dim,
        values_in_keys: false,
        weights_in_memory: false,
        element: Element::Bf16,
        pages: 100,
        page_rows,
        sources: units,
        source_pages: 4,
        slice_tiles: 0,
        split,
        softmax_scale: 0.125,
        soft_cap: 0.0,
        interleave: 1,
        world_size: 1,
        arrays: [1, 2, 3, 4, 5, 6, 7, 0, 0, 9, 10].map(|number| number << 48),
        workspace: 8 << 48,
    };
    description.slice_tiles = description.step_tiles();
    description
}

/// Python makes one workspace for all devices, in tiles of 16 or 64 rows.
#[test]
fn one_workspace_is_large_enough_on_every_target() {
    for (dim, rows, page_rows) in [(64, 4, 16), (128, 4, 64), (128, 40, 64), (256, 70, 64)] {
        for split in [Split::Runs(1), Split::Slices(3)] {
            for units in [1, 3, 40] {
                let call = decode(units, rows, dim, page_rows, split);
                let tile = if rows > 16 { 64 } else { 16 };
                let pairs = units * 8 * rows.div_ceil(tile);
                let slots = if split == Split::Slices(3) { 3 * pairs } else { MOST_RUNS + pairs };
                assert_eq!(call.most_workspace_bytes(), (slots * tile * (dim + 2) * 4) as u64);
                for target in Target::ALL {
                    let split = match split {
                        Split::Runs(_) => Split::Runs(call.runs(target)),
                        slices => slices,
                    };
                    let call = Decode { split, ..call };
                    assert!(call.workspace_bytes(target) <= call.most_workspace_bytes());
                    let [pieces, merge] = &call.launches(target).expect("launches")[..] else {
                        panic!("two launches");
                    };
                    assert_eq!(pieces.grid, [call.slots(target) as u32, 1, 1]);
                    assert_eq!(merge.grid, [(units * 8 * rows) as u32, 1, 1]);
                }
            }
        }
    }
}

/// An H100 has 132 multiprocessors, and an A100 108, which two blocks of narrow tiles share.
#[test]
fn pieces_of_few_pairs_run_at_once() {
    let slots = |units, dim, target| {
        let call = decode(units, 4, dim, 64, Split::Runs(1));
        Decode { split: Split::Runs(call.runs(target)), ..call }.slots(target)
    };
    let on_h100 = |units, dim| slots(units, dim, Target::Sm90);
    assert_eq!([on_h100(1, 128), on_h100(8, 128), on_h100(8, 64)], [132; 3]);
    assert_eq!(slots(8, 64, Target::Sm80), 216);
    // More pairs are cut into short pieces instead.
    assert_eq!([on_h100(9, 128), on_h100(17, 64)], [264 + 72, 264 + 136]);
    assert_eq!(slots(17, 64, Target::Sm80), 432 + 136);
}

/// Returns units of one token with 128 heads over latents.
fn latents(units: usize, value_dim: usize) -> Decode {
    let call = decode(units, 128, 576, 64, Split::Runs(1));
    Decode { kv_heads: 1, value_dim, values_in_keys: true, ..call }
}

/// A block has up to 256 columns of values, and two blocks have a tile of 64 rows on an H100.
#[test]
fn latents_of_many_heads_take_a_block_for_each_half_of_the_values() {
    let grid = |units, value_dim, target| {
        let call = latents(units, value_dim);
        let call = Decode { split: Split::Runs(call.runs(target)), ..call };
        assert!(call.workspace_bytes(target) <= call.most_workspace_bytes());
        let [pieces, merge] = &call.launches(target).expect("launches")[..] else {
            panic!("two launches");
        };
        assert_eq!(pieces.instance().kernel, Kernel::DecodeLatents);
        assert_eq!(merge.grid, [units as u32 * 128, 1, 1]);
        (call.pairs(target), pieces.grid[0])
    };
    assert_eq!(grid(1, 512, Target::Sm90), (2, 2 * 66));
    assert_eq!(grid(1, 264, Target::Sm90), (2, 2 * 66));
    assert_eq!(grid(1, 256, Target::Sm90), (2, 132));
    // Tiles of 16 rows.
    assert_eq!(grid(1, 512, Target::Sm80), (8, 2 * 54));
    assert_eq!(grid(40, 512, Target::Sm120), (320, 2 * (2 * 94 + 320)));
    assert_eq!(grid(1, 512, Target::Sm100), (2, 2 * 74));
    // More pairs are cut into short pieces.
    assert_eq!(grid(17, 512, Target::Sm90), (34, 2 * (2 * 66 + 34)));
    let fixed = Decode { split: Split::Slices(3), ..latents(1, 512) };
    assert_eq!(fixed.launches(Target::Sm90).expect("launches")[0].grid, [2 * 3 * 2, 1, 1]);
}

/// Weights of all rows have as many blocks as the pieces, each for tiles of 64 rows.
#[test]
fn weights_of_latents_go_through_memory() {
    let grids = |units, value_dim, target| {
        let call = Decode { weights_in_memory: true, ..latents(units, value_dim) };
        let call = Decode { split: Split::Runs(call.runs(target)), ..call };
        let [weights, values, merge] = &call.launches(target).expect("launches")[..] else {
            panic!("three launches");
        };
        let kernels = [weights, values, merge].map(|launch| launch.instance().kernel);
        assert_eq!(kernels, [Kernel::LatentWeights, Kernel::LatentValues, Kernel::DecodeMerge]);
        // Four pages of 64 keys, with two bytes a weight and two numbers a tile.
        let room = (units * 128 * 4 * (64 * 2 + 8)) as u64;
        let plain = Decode { weights_in_memory: false, ..call };
        assert_eq!(call.most_workspace_bytes() - room, plain.most_workspace_bytes());
        assert!(call.workspace_bytes(target) <= call.most_workspace_bytes());
        [weights.grid[0], values.grid[0]]
    };
    assert_eq!(grids(1, 512, Target::Sm90), [2 * 64 + 2, 2 * 66]);
    assert_eq!(grids(1, 256, Target::Sm90), [130 + 2, 132]);
    assert_eq!(grids(40, 512, Target::Sm100), [2 * 148 + 80, 2 * (148 + 80)]);
    let fixed = Decode { split: Split::Slices(3), weights_in_memory: true, ..latents(1, 512) };
    let fixed = fixed.launches(Target::Sm90).expect("launches");
    assert_eq!([fixed[0].grid[0], fixed[1].grid[0]], [2 * 3, 2 * 3 * 2]);
}

#[test]
fn weights_without_latents_or_of_too_many_keys_are_refused() {
    let refused = |call: Decode, words: &str| {
        let call = Decode { weights_in_memory: true, ..call };
        let said = call.launches(Target::Sm90).expect_err("refused").to_string();
        assert!(said.contains(words), "{said}");
    };
    refused(decode(1, 4, 64, 64, Split::Runs(1)), "weights_in_memory must be false");
    let long = Decode { page_rows: 1 << 20, source_pages: 8, ..latents(1, 512) };
    refused(long, "elements of weights must be fewer than 2^30");
}

#[test]
fn latents_wider_than_their_tiles_are_refused() {
    let refused = |head_dim, value_dim, words: &str| {
        let call = Decode { head_dim, ..latents(1, value_dim) };
        let said = call.launches(Target::Sm90).expect_err("refused").to_string();
        assert!(said.contains(words), "{said}");
    };
    refused(584, 512, "head_dim must be a multiple of 8 from 8 to 576");
    refused(576, 520, "value_dim must be a multiple of 8 from 8 to 512");
    refused(64, 72, "value_dim must be a multiple of 8 from 8 to 64");
    refused(576, 0, "value_dim must be a multiple of 8 from 8 to 512");
}

#[test]
fn a_soft_cap_is_refused_as_in_attention() {
    for soft_cap in [-1.0, 1e-30, 1e30, f32::NAN] {
        let call = Decode { soft_cap, ..decode(1, 4, 64, 64, Split::Runs(1)) };
        let said = call.launches(Target::Sm90).expect_err("refused").to_string();
        assert!(said.contains("soft_cap must be 0 for none, or from 0.001 to 1000"), "{said}");
    }
}
