//! Launches of the delta rule: together they compute every part once, each within 32 bits.

use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{
    DeltaGrad, DeltaInverse, DeltaKeys, DeltaResults, DeltaState, DeltaTokens, LINEAR_TILE, Launch,
    LaunchError, TileOperation,
};
use burst_attention_kernels::record::Value;
use burst_attention_kernels::variant::Decays;

use crate::random::Random;
use crate::trial::integer;

fn tokens(batch: usize, rows: usize, part_rows: usize, dims: (usize, usize)) -> DeltaTokens {
    DeltaTokens {
        batch,
        rows,
        heads: 3,
        head_dim: dims.0,
        value_dim: dims.1,
        element: Element::Bf16,
        part_rows,
        decays: Decays::Heads,
        k: 1 << 48,
        sums: 2 << 48,
        beta: 3 << 48,
        inverse: 4 << 48,
    }
}

/// Returns one operation of each kind, and of each set of results.
fn operations(tokens: DeltaTokens) -> [TileOperation; 6] {
    let at = |n: u64| n << 48;
    let of_tokens = DeltaResults::Tokens { before: at(5), values: at(6) };
    let of_parts = DeltaResults::Parts { state: at(7), transfer: at(8) };
    let (q, u, dout, dv) = (at(9), at(10), at(11), at(12));
    let of_channels = |n| if tokens.decays == Decays::Heads { 0 } else { at(n) };
    let (kh, pairs) = (of_channels(17), of_channels(18));
    let levels = [19, 20, 21].map(of_channels);
    let state = |results| DeltaState { tokens, kh, v: at(13), results }.into();
    let grad = |results| DeltaGrad { tokens, q, kh, dout, pairs, results }.into();
    let (turned, dk, dots) = (at(14), at(15), at(16));
    [
        DeltaInverse { tokens, pairs }.into(),
        state(of_tokens),
        state(of_parts),
        grad(of_tokens),
        grad(of_parts),
        DeltaKeys { tokens, q, u, dout, dv, turned, levels, dk, dots }.into(),
    ]
}

fn launches_within(
    operation: &TileOperation,
    target: Target,
    limit: u64,
) -> Result<Vec<Launch>, LaunchError> {
    match operation {
        TileOperation::DeltaInverse(it) => it.launches_within(target, limit),
        TileOperation::DeltaState(it) => it.launches_within(target, limit),
        TileOperation::DeltaGrad(it) => it.launches_within(target, limit),
        TileOperation::DeltaKeys(it) => it.launches_within(target, limit),
        other => unreachable!("{}", other.name()),
    }
}

/// Returns how often the launches compute each part of each entry, by where their keys begin.
fn times(tokens: &DeltaTokens, launches: &[Launch], limit: u64) -> Vec<u32> {
    let mut times = vec![0; tokens.batch * tokens.parts()];
    for launch in launches {
        launch.check().expect("values are as the record says");
        for touched in launch.footprint() {
            assert!(touched.bytes.end - touched.bytes.start < limit, "{touched:?}");
        }
        let Some(Value::Pointer(k)) = launch.value("k") else { panic!("no keys") };
        let row = (k - (1 << 48)) as usize / (2 * tokens.heads * tokens.head_dim);
        let (entry, first) = (row / tokens.rows, row % tokens.rows / tokens.part_rows);
        let [entries, parts, rows] = ["batch", "parts", "rows"].map(|name| integer(launch, name));
        assert!(parts as usize == tokens.parts() || entries == 1);
        let left = tokens.rows - first * tokens.part_rows;
        assert_eq!(rows as usize, left.min(parts as usize * tokens.part_rows));
        for entry in entry..entry + entries as usize {
            let begin = entry * tokens.parts() + first;
            times[begin..begin + parts as usize].iter_mut().for_each(|count| *count += 1);
        }
        assert_eq!(launch.grid[0] as usize % ((entries * parts) as usize * tokens.heads), 0);
    }
    times
}

#[test]
fn launches_compute_every_part_once() {
    let mut random = Random(17);
    let mut cut = 0;
    for _ in 0..100 {
        let dims = (8 * (1 + random.below(32)), 8 * (1 + random.below(32)));
        let part = LINEAR_TILE * (1 + random.below(4));
        let decays = random.of(&[Decays::Heads, Decays::KeyChannels]);
        let most = if decays == Decays::Heads { 256 } else { 128 };
        let dims = (dims.0.min(most), dims.1.min(most));
        let tokens = tokens(1 + random.below(3), 1 + random.below(1500), part, dims);
        let tokens = DeltaTokens { decays, ..tokens };
        let widest = dims.0.max(dims.1);
        let least = 12 * (part * widest.max(LINEAR_TILE) + 2 * tokens.padded_rows() * 4);
        let least = least.max(12 * widest * widest) + 1024;
        // Arrays of levels have six rows for each token.
        let least = if decays == Decays::Heads { least } else { 6 * least };
        let limit = (least * (1 + random.below(6))) as u64;
        let target = random.of(&Target::ALL);
        for operation in operations(tokens) {
            let launches = launches_within(&operation, target, limit).expect("a part fits");
            cut += usize::from(launches.len() > 1);
            assert!(times(&tokens, &launches, limit).iter().all(|&count| count == 1));
        }
    }
    assert!(cut > 100, "only {cut} were cut");
}

#[test]
fn blocks_share_columns_of_states_and_transfers() {
    let tokens = tokens(2, 300, 128, (72, 200));
    let blocks = operations(tokens).map(|operation| {
        let launches = operation.launches(Target::Sm90).expect("launches");
        assert_eq!(launches.len(), 1);
        launches[0].grid[0] as usize / (2 * 3 * tokens.parts())
    });
    assert_eq!(blocks, [1, 4, 4 + 2, 4, 4 + 2, 2]);
}

#[test]
fn nothing_to_do_needs_no_launch() {
    for tokens in [tokens(0, 100, 64, (8, 8)), tokens(2, 0, 64, (8, 8))] {
        for operation in operations(tokens) {
            assert_eq!(operation.launches(Target::Sm90), Ok(vec![]));
        }
    }
}

#[test]
fn what_kernels_cannot_do_is_refused() {
    let tokens = tokens(1, 100, 64, (64, 64));
    let refused = |tokens: DeltaTokens, words: &str| {
        for operation in operations(tokens) {
            let error = operation.launches(Target::Sm90).expect_err("refused").to_string();
            assert!(error.contains(words), "{words} in {error}");
        }
    };
    refused(DeltaTokens { head_dim: 12, ..tokens }, "head_dim must be a multiple of 8");
    refused(DeltaTokens { value_dim: 264, ..tokens }, "value_dim must be a multiple of 8");
    refused(DeltaTokens { part_rows: 100, ..tokens }, "rows of a part must be a multiple of 64");
    refused(DeltaTokens { k: 0, ..tokens }, "must be the address of an array");
    refused(DeltaTokens { k: tokens.k + 8, ..tokens }, "k must be a multiple of 16 bytes");
}

/// What decays of channels bring must be there, and tiles must hold its columns.
#[test]
fn channels_without_their_arrays_are_refused() {
    let of_channels =
        |dims| DeltaTokens { decays: Decays::KeyChannels, ..tokens(1, 100, 64, dims) };
    let tokens = of_channels((64, 64));
    let results = DeltaResults::Tokens { before: 5 << 48, values: 6 << 48 };
    let [q, dout, v, kh, pairs] = [9, 11, 13, 17, 18].map(|n: u64| n << 48);
    let refused = |launches: Result<Vec<Launch>, LaunchError>, words: &str| {
        let error = launches.expect_err("refused").to_string();
        assert!(error.contains(words), "{words} in {error}");
    };
    let target = Target::Sm90;
    let words = "pairs of delta_rule_inverse must be the address of an array";
    refused(DeltaInverse { tokens, pairs: 0 }.launches(target), words);
    let words = "kh of delta_rule_state must be the address of an array";
    refused(DeltaState { tokens, kh: 0, v, results }.launches(target), words);
    let grad = DeltaGrad { tokens, q, kh, dout, pairs, results };
    let words = "kh of delta_rule_grad must be the address of an array";
    refused(DeltaGrad { kh: 0, ..grad }.launches(target), words);
    let words = "pairs of delta_rule_grad must be the address of an array";
    refused(DeltaGrad { pairs: 0, ..grad }.launches(target), words);
    refused(
        DeltaGrad { pairs: pairs + 8, ..grad }.launches(target),
        "pairs must be a multiple of 16 bytes",
    );
    let TileOperation::DeltaKeys(keys) = operations(tokens)[5] else { panic!("no keys") };
    for (n, name) in ["met", "keys_met", "fades"].into_iter().enumerate() {
        let mut keys = keys;
        keys.levels[n] = 0;
        let words = format!("{name} of delta_rule_keys must be the address of an array");
        refused(keys.launches(target), &words);
    }
    for operation in operations(of_channels((136, 64))) {
        refused(operation.launches(target), "at most 128 columns where channels have decays");
    }
    // The kernel of inverses reads pairs in place of keys and sums.
    let without = DeltaTokens { k: 0, sums: 0, ..tokens };
    assert!(DeltaInverse { tokens: without, pairs }.launches(target).is_ok());
}
