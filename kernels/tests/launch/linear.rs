//! Launches of linear attention: together they compute every part once, each within 32 bits.

use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{
    ChannelPairs, LINEAR_TILE, Launch, LaunchError, LinearAttend, LinearState, MAX_VIEW_BYTES,
    Part, column_tiles,
};
use burst_attention_kernels::record::Value;
use burst_attention_kernels::variant::Decays;

use crate::random::Random;
use crate::trial::integer;

const AT: [u64; 4] = [1 << 48, 2 << 48, 3 << 48, 4 << 48];

fn state(
    batch: usize,
    rows: usize,
    part: usize,
    heads: usize,
    dims: (usize, usize),
) -> LinearState {
    LinearState {
        batch,
        rows,
        heads,
        kv_heads: heads / 2,
        head_dim: dims.0,
        value_dim: dims.1,
        element: Element::Bf16,
        part: Part { rows: part, reverse: false },
        decays: Decays::Heads,
        k: AT[0],
        v: AT[1],
        sums: AT[2],
        state: AT[3],
    }
}

fn attend(tokens: LinearState) -> LinearAttend {
    let dots = Some((7 << 48, 8 << 48));
    LinearAttend {
        tokens,
        q_heads: tokens.heads,
        q: 5 << 48,
        o: 6 << 48,
        pairs: 0,
        levels: [0; 2],
        dots,
        strict: false,
    }
}

fn address(launch: &Launch, name: &str) -> u64 {
    match launch.value(name) {
        Some(Value::Pointer(address)) => address,
        other => panic!("{name} is {other:?}"),
    }
}

/// Returns the entry and the part that a launch begins with. Each of its arrays must begin there.
fn begin(tokens: &LinearState, launch: &Launch) -> (usize, usize) {
    let LinearState { batch, rows, heads, head_dim, value_dim, part, .. } = *tokens;
    let states = heads * head_dim * value_dim;
    let at = (address(launch, "state") - AT[3]) as usize / 4 / states;
    let (entry, first) = (at / tokens.parts(), at % tokens.parts());
    assert!(entry < batch);
    let row = |heads: usize, dim: usize| heads * dim * 2 * (entry * rows + first * part.rows);
    assert_eq!(address(launch, "k") - AT[0], row(heads / 2, head_dim) as u64);
    assert_eq!(address(launch, "v") - AT[1], row(heads / 2, value_dim) as u64);
    let sums = 4 * (entry * heads * tokens.padded_rows() + first * part.rows);
    assert_eq!(address(launch, "sums") - AT[2], sums as u64);
    if launch.value("q").is_some() {
        assert_eq!(address(launch, "q") - (5 << 48), row(heads, head_dim) as u64);
        assert_eq!(address(launch, "o") - (6 << 48), row(heads, value_dim) as u64);
        assert_eq!(address(launch, "other") - (7 << 48), row(heads, value_dim) as u64);
        let columns = column_tiles(head_dim, value_dim).expect("dims are in range");
        let dots = 4 * (entry * heads * columns * tokens.padded_rows() + first * part.rows);
        assert_eq!(address(launch, "dots") - (8 << 48), dots as u64);
    }
    (entry, first)
}

/// Returns how often the launches compute each part of each entry. Every array must be in reach.
fn times(tokens: &LinearState, launches: &[Launch], limit: u64) -> Vec<u32> {
    let mut times = vec![0; tokens.batch * tokens.parts()];
    for launch in launches {
        launch.check().expect("values are as the record says");
        for touched in launch.footprint() {
            assert!(touched.bytes.end - touched.bytes.start < limit, "{touched:?}");
        }
        let (entry, first) = begin(tokens, launch);
        let [entries, parts, rows] = ["batch", "parts", "rows"].map(|name| integer(launch, name));
        assert!(parts as usize == tokens.parts() || entries == 1);
        let rows_of = |part: usize| part.min(parts as usize) * tokens.part.rows;
        assert_eq!(rows as usize, rows_of(usize::MAX).min(tokens.rows - first * tokens.part.rows));
        for entry in entry..entry + entries as usize {
            let begin = entry * tokens.parts() + first;
            times[begin..begin + parts as usize].iter_mut().for_each(|count| *count += 1);
        }
        let heads = (entries * parts) as usize * tokens.heads;
        assert_eq!(launch.grid[0] as usize % heads, 0);
    }
    times
}

#[test]
fn launches_compute_every_part_once() {
    let mut random = Random(13);
    let mut cut = 0;
    for _ in 0..300 {
        let heads = 2 * (1 + random.below(4));
        let dims = (8 * (1 + random.below(32)), 8 * (1 + random.below(32)));
        let part = LINEAR_TILE * (1 + random.below(4));
        let tokens = state(1 + random.below(3), 1 + random.below(1500), part, heads, dims);
        let least = 4 * heads * (part * dims.0.max(dims.1) + 2 * tokens.padded_rows() * 4);
        let least = least.max(4 * heads * dims.0 * dims.1) + 1024;
        let limit = (least * (1 + random.below(6))) as u64;
        let target = random.of(&Target::ALL);
        for launches in
            [tokens.launches_within(target, limit), attend(tokens).launches_within(target, limit)]
        {
            let launches = launches.expect("a part fits");
            cut += usize::from(launches.len() > 1);
            assert!(times(&tokens, &launches, limit).iter().all(|&count| count == 1));
        }
    }
    assert!(cut > 100, "only {cut} were cut");
}

#[test]
fn arrays_beyond_32_bits_are_cut() {
    let tokens = state(3, 1 << 20, 1 << 14, 32, (128, 256));
    for target in Target::ALL {
        let launches = attend(tokens).launches(target).expect("they are cut");
        assert!(launches.len() > 3 * 8);
        assert!(times(&tokens, &launches, MAX_VIEW_BYTES).iter().all(|&count| count == 1));
    }
}

#[test]
fn nothing_to_do_needs_no_launch() {
    for tokens in [state(0, 100, 64, 2, (8, 8)), state(2, 0, 64, 2, (8, 8))] {
        assert_eq!(tokens.launches(Target::Sm90), Ok(vec![]));
        assert_eq!(attend(tokens).launches(Target::Sm90), Ok(vec![]));
    }
}

#[test]
fn what_kernels_cannot_do_is_refused() {
    let tokens = state(1, 100, 64, 4, (64, 64));
    let refused = |tokens: LinearState, words: &str| {
        let error = tokens.launches(Target::Sm90).expect_err("refused").to_string();
        assert!(error.contains(words), "{words} in {error}");
    };
    refused(LinearState { head_dim: 12, ..tokens }, "head_dim must be a multiple of 8");
    refused(LinearState { value_dim: 264, ..tokens }, "value_dim must be a multiple of 8");
    refused(LinearState { kv_heads: 3, ..tokens }, "kv_heads must be a divisor of heads (4)");
    let part = Part { rows: 100, reverse: false };
    refused(LinearState { part, ..tokens }, "rows of a part must be a multiple of 64, got 100");
    refused(LinearState { k: 0, ..tokens }, "k of linear_state must be the address of an array");
    refused(LinearState { v: AT[1] + 8, ..tokens }, "v must be a multiple of 16 bytes");
    let large = tokens.launches_within(Target::Sm90, 1000).expect_err("not even one part fits");
    assert!(matches!(large, LaunchError::TooLarge { .. }), "{large}");
}

/// What decays of channels bring must be there.
#[test]
fn channels_without_their_arrays_are_refused() {
    let at = |n: u64| n << 48;
    let tokens = LinearState { kv_heads: 4, ..state(1, 100, 64, 4, (64, 64)) };
    let of = |decays| LinearState { decays, ..tokens };
    let refused = |launches: Result<Vec<Launch>, LaunchError>, words: &str| {
        let error = launches.expect_err("refused").to_string();
        assert!(error.contains(words), "{words} in {error}");
    };
    let keys = LinearAttend { pairs: at(9), dots: None, ..attend(of(Decays::KeyChannels)) };
    assert!(keys.launches(Target::Sm90).is_ok());
    let words = "pairs of linear_attend must be the address of an array";
    refused(LinearAttend { pairs: 0, ..keys }.launches(Target::Sm90), words);
    let words = "pairs must be a multiple of 16 bytes";
    refused(LinearAttend { pairs: at(9) + 8, ..keys }.launches(Target::Sm90), words);
    let values = LinearAttend { levels: [at(9), at(10)], ..attend(of(Decays::ValueChannels)) };
    assert!(values.launches(Target::Sm90).is_ok());
    let words = "met of linear_attend must be the address of an array";
    refused(LinearAttend { levels: [0, at(10)], ..values }.launches(Target::Sm90), words);
    let words = "fades of linear_attend must be the address of an array";
    refused(LinearAttend { levels: [at(9), 0], ..values }.launches(Target::Sm90), words);
    let tokens = of(Decays::KeyChannels);
    let pairs = ChannelPairs { tokens, q: at(5), met: at(9), pairs: at(10) };
    assert!(pairs.launches(Target::Sm90).is_ok());
    let words = "met of channel_pairs must be the address of an array";
    refused(ChannelPairs { met: 0, ..pairs }.launches(Target::Sm90), words);
    let words = "at most 128 columns where channels have decays";
    let wide = LinearState { head_dim: 136, ..tokens };
    refused(ChannelPairs { tokens: wide, ..pairs }.launches(Target::Sm90), words);
}
