//! The launches that find which rows segments let a cut see.

use burst_attention_kernels::instances::{Element, Instance, Kernel, Target};
use burst_attention_kernels::launch::{
    Features, Forward, KeyGrads, Launch, QueryGrads, Rectangle, Statistics,
};
use burst_attention_kernels::variant::{FeatureSet, Variant};

use crate::cuts::{each_huge_trial, each_small_trial};
use crate::footprint::only;
use crate::samples::{O, Q, forward, key_grads, query_grads, segments, shape};
use crate::trial::{PASSES, Trial, integer, pointer};

fn with_segments() -> Features {
    Features { segments: Some(segments()), ..Features::default() }
}

/// Asserts that `ranges` writes the ranges that `main` reads, for the rows of `main`.
fn assert_prepares(ranges: &Launch, main: &Launch) {
    let queries = ("q_segments", "q_len");
    let keys = ("kv_segments", "kv_len");
    let keys_stay = main.instance().kernel == Kernel::KeyGrads;
    let (own, other) = if keys_stay { (keys, queries) } else { (queries, keys) };
    for (name, of_main) in [("segments", own.0), ("others", other.0), ("ranges", "ranges")] {
        assert_eq!(pointer(ranges, name), pointer(main, of_main), "{name} for {main:?}");
        let stride = |launch, name| integer(launch, &format!("{name}_batch_stride"));
        assert_eq!(stride(ranges, name), stride(main, of_main), "{name} for {main:?}");
    }
    for (name, of_main) in [("q_len", own.1), ("kv_len", other.1), ("batch", "batch")] {
        assert_eq!(integer(ranges, name), integer(main, of_main), "{name} for {main:?}");
    }
    let blocks = integer(main, own.1).unsigned_abs().div_ceil(64);
    let blocks = integer(main, "batch").unsigned_abs() * blocks;
    assert_eq!(ranges.grid.map(u64::from), [blocks, 1, 1], "{ranges:?}");
    let image = Instance::plain(Kernel::SegmentRanges, Element::Bf16, 64, main.instance().target);
    assert_eq!(ranges.instance(), image);
    let bytes = |launch: &Launch| {
        let found = launch.footprint().into_iter().find(|touched| touched.name == "ranges");
        found.map(|touched| touched.bytes)
    };
    assert!(bytes(ranges).is_some() && bytes(ranges) == bytes(main), "{main:?}");
}

fn streams(launch: &Launch) -> bool {
    integer(launch, "lower") <= integer(launch, "upper")
}

/// Asserts that every launch with segments that streams comes right behind a launch that prepares
/// it, and that no other launch is prepared. Returns the number of prepared launches.
fn count_prepared(trial: &Trial, launches: &[Launch]) -> usize {
    let mut count = 0;
    let mut before: Option<&Launch> = None;
    for launch in launches {
        if launch.instance().kernel == Kernel::SegmentRanges {
            assert_eq!(before.replace(launch), None, "two in a row");
            continue;
        }
        assert_eq!(launch.instance().kernel, trial.kernel);
        let wanted = trial.wanted.has(FeatureSet::SEGMENTS) && streams(launch);
        assert_eq!(before.is_some(), wanted, "{launch:?}");
        if let Some(ranges) = before.take() {
            assert_prepares(ranges, launch);
            count += 1;
        }
    }
    assert_eq!(before, None, "nothing reads it");
    count
}

#[test]
fn each_launch_with_segments_is_prepared() {
    let (mut small, mut huge) = (0, 0);
    each_small_trial(|trial, launches| small += count_prepared(trial, launches));
    each_huge_trial(|trial, launches| huge += count_prepared(trial, launches));
    assert!(small > 100 && huge > 100, "only {small} and {huge} are prepared");
}

#[test]
fn cuts_in_the_middle_of_a_chain_are_prepared_whatever_their_band() {
    // Far from the rectangle's first rows, and neither the first nor the last cut.
    for kernel in PASSES {
        for (lower, upper) in [(400, 500), (-500, -400), (i64::MIN, -600), (600, i64::MAX)] {
            let rectangle = Rectangle { batch: 1, kv_heads: 32, lower, upper, ..shape(1000, 1000) };
            let mut trial = Trial::new(kernel, rectangle, 3 << 20, 1)
                .with(Variant::PLAIN.with(FeatureSet::SEGMENTS));
            (trial.first, trial.last) = (false, false);
            let launches = trial.launches(Target::Sm90).unwrap();
            assert!(launches.len() > 4, "{kernel:?} is not cut");
            assert_eq!(2 * count_prepared(&trial, &launches), launches.len());
        }
    }
}

#[test]
fn rows_that_stay_have_ranges_of_those_that_are_streamed() {
    let (features, rectangle) = (with_segments(), shape(100, 200));
    let queries = ("q_segments", 0x6000, 0x6000 + 4 * (1024 + 100));
    let keys = ("kv_segments", 0x7000, 0x7000 + 4 * (2048 + 200));
    // Two entries 128 numbers apart; two blocks of queries, four blocks of keys.
    let [of_queries, of_keys] = [2, 4].map(|blocks| 0x8000 + 4 * (128 + 4 * blocks));
    let check = |launches: Vec<Launch>, own: (_, u64, u64), other: (_, u64, u64), end| {
        assert_eq!(launches.len(), 2);
        let expected = [
            ("segments", own.1, own.2, true, false),
            ("others", other.1, other.2, true, false),
            ("ranges", 0x8000, end, false, true),
        ];
        assert_eq!(only(&launches[..1]), expected);
        let read = only(&launches[1..]);
        for (name, start, end) in [own, other, ("ranges", 0x8000, end)] {
            assert!(read.contains(&(name, start, end, true, false)), "{name} in {read:?}");
        }
    };
    let launches = Forward { features, ..forward(rectangle) }.launches(Target::Sm90).unwrap();
    check(launches, queries, keys, of_queries);
    let launches = QueryGrads { features, ..query_grads(rectangle) }.launches(Target::Sm90);
    check(launches.unwrap(), queries, keys, of_queries);
    let launches = KeyGrads { features, ..key_grads(rectangle) }.launches(Target::Sm90).unwrap();
    check(launches, keys, queries, of_keys);
}

#[test]
fn cuts_use_the_workspace_of_ranges_from_its_beginning() {
    let features = with_segments();
    let at = Statistics { address: 0x5000, batch_stride: 32 * 1024, head_stride: 1024 };
    let state =
        Forward { acc: Some(Q), row_max: Some(at), row_sum: Some(at), ..forward(shape(1000, 900)) };
    // The limit holds 256 rows of the state in float32.
    let limit = 256 * 32 * 128 * 4 + 1;
    let launches = Forward { features, ..state }.launches_within(Target::Sm90, limit).unwrap();
    let ranges: Vec<_> =
        launches.iter().filter(|it| it.instance().kernel == Kernel::SegmentRanges).collect();
    assert!(ranges.len() >= 8, "{} cuts", ranges.len());
    assert_eq!(2 * ranges.len(), launches.len());
    let mut starts: Vec<_> = Vec::new();
    for launch in ranges {
        let blocks = integer(launch, "q_len").unsigned_abs().div_ceil(64);
        let (_, start, end, ..) = only(std::slice::from_ref(launch))[2];
        assert_eq!(end - start, 16 * blocks, "{launch:?}");
        starts.push(start);
    }
    starts.dedup();
    assert_eq!(starts, [0x8000, 0x8000 + 4 * 128], "one place for each batch entry");
}

#[test]
fn what_streams_nothing_is_not_prepared() {
    let features = with_segments();
    for rectangle in [shape(100, 0), Rectangle { lower: 300, ..shape(100, 90) }] {
        let launches = Forward { features, ..forward(rectangle) }.launches(Target::Sm90).unwrap();
        let touched = only(&launches);
        let names: Vec<_> = touched.iter().map(|it| it.0).collect();
        assert_eq!(names, ["q", "o", "lse"], "{rectangle:?}");
    }
    let keys = KeyGrads { features, dk: Some(O), ..key_grads(shape(0, 100)) };
    assert_eq!(keys.launches(Target::Sm90).unwrap().len(), 1);
    let nothing = Forward { features, ..forward(shape(0, 100)) };
    assert_eq!(nothing.launches(Target::Sm90).unwrap(), []);
}
