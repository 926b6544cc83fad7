//! The memory that a launch says it touches.

use burst_attention_kernels::instances::{Element, Kernel, Target};
use burst_attention_kernels::launch::{
    Cast, Delta, Footprint, Forward, Launch, Rectangle, Rows, Statistics,
};
use burst_attention_kernels::record::Value;

use crate::cuts::{each_huge_trial, each_small_trial, span};
use crate::samples::{forward, shape};
use crate::trial::{Trial, integer, pointer};

const READ: (bool, bool) = (true, false);
const WRITTEN: (bool, bool) = (false, true);
const BOTH: (bool, bool) = (true, true);

/// The arrays of queries that both backward passes read.
const SAVED: [&str; 4] = ["q", "dout", "lse_log2", "delta"];

/// The flag and the arrays of each feature that has arrays.
const FEATURES: [(&str, &[&str]); 3] = [
    ("has_segments", &["q_segments", "kv_segments", "ranges"]),
    ("has_slopes", &["slopes"]),
    ("has_dropout", &["dropout"]),
];

/// Returns the arrays that a launch touches, and whether it reads and writes each.
fn touched(launch: &Launch) -> Vec<(&'static str, (bool, bool))> {
    let is = |name| integer(launch, name) == 1;
    let kernel = launch.instance().kernel;
    let mut touched = match kernel {
        Kernel::Delta => {
            let mut touched = vec![("o", READ), ("dout", READ), ("lse", READ)];
            touched.extend(is("has_dlse").then_some(("dlse", READ)));
            touched.extend([("lse_log2", WRITTEN), ("delta", WRITTEN)]);
            touched.extend(is("has_zeros").then_some(("zeros", WRITTEN)));
            return touched;
        }
        Kernel::Cast => {
            let b = is("has_b").then_some(("b", READ));
            return [Some(("a", READ)), b, Some(("out", WRITTEN))].into_iter().flatten().collect();
        }
        Kernel::Accumulate => return vec![("home", BOTH), ("arrived", READ)],
        Kernel::PackLse => return vec![("lse", READ), ("packed_lse", WRITTEN)],
        Kernel::MaskRows => {
            let arrays = ["segments", "visible", "also_visible", "positions", "places"];
            let flags = [
                "has_segment_ids",
                "has_visible",
                "has_also_visible",
                "has_positions",
                "has_places",
            ];
            let read = arrays.into_iter().zip(flags).filter(|(_, flag)| is(flag));
            let read = read.map(|(name, _)| (name, READ));
            return read.chain([("packed", WRITTEN)]).collect();
        }
        Kernel::MaskRuns => {
            return vec![("own_rows", READ), ("other_rows", READ), ("runs", WRITTEN)];
        }
        Kernel::SegmentRanges => {
            return vec![("segments", READ), ("others", READ), ("ranges", WRITTEN)];
        }
        Kernel::AddGradient | Kernel::FoldResult => {
            let (home, arrived, out): (&[_], &[_], &[_]) = match kernel {
                Kernel::AddGradient => (&["home"], &["arrived"], &["out"]),
                _ => {
                    let arrived = &["arrived_o", "arrived_lse"];
                    (&["acc", "row_max", "row_sum"], arrived, &["o", "lse"])
                }
            };
            let state = (!is("first"), !is("last"));
            let home = home.iter().filter(|_| state != (false, false)).map(|name| (*name, state));
            let arrived = arrived.iter().map(|name| (*name, READ));
            let out = out.iter().filter(|_| is("last")).map(|name| (*name, WRITTEN));
            return home.chain(arrived).chain(out).collect();
        }
        Kernel::CombineSoftmax => {
            let home = ["acc", "row_max", "row_sum"].map(|name| (name, (true, !is("last"))));
            let arrived = ["arrived_acc", "arrived_max", "arrived_sum"].map(|name| (name, READ));
            let results = ["o", "lse"].into_iter().filter(|_| is("last"));
            let results = results.map(|name| (name, WRITTEN));
            return home.into_iter().chain(arrived).chain(results).collect();
        }
        _ => vec![],
    };
    let streams = integer(launch, "lower") <= integer(launch, "upper");
    let (of_queries, state, results): (&[&str], &[&str], &[&str]) = match kernel {
        Kernel::Forward => (&["q"], &["acc", "row_max", "row_sum"], &["o", "lse"]),
        Kernel::KeyGrads => (&SAVED, &["dk_acc", "dv_acc"], &["dk", "dv"]),
        _ => (&SAVED, &["dq_acc"], &["dq"]),
    };
    let keys_stay = kernel == Kernel::KeyGrads;
    for (arrays, stay) in [(of_queries, !keys_stay), (&["k", "v"], keys_stay)] {
        if stay || streams {
            touched.extend(arrays.iter().map(|&name| (name, READ)));
        }
    }
    for (flag, arrays) in FEATURES {
        if streams && is(flag) {
            touched.extend(arrays.iter().map(|&name| (name, READ)));
        }
    }
    if keys_stay && streams && launch.instance().variant.fused {
        touched.push(("dq_acc", BOTH));
    }
    if kernel == Kernel::QueryGrads && is("has_dslopes") {
        touched.push(("dslopes", BOTH));
    }
    if !is("first") || !is("last") {
        touched.extend(state.iter().map(|&name| (name, (!is("first"), !is("last")))));
    }
    if is("last") {
        touched.extend(results.iter().map(|&name| (name, WRITTEN)));
    }
    touched
}

fn assert_footprint(_: &Trial, launches: &[Launch]) {
    for launch in launches {
        let touched = touched(launch);
        let expected = launch.instance().kernel.arguments().iter().filter_map(|argument| {
            let &(name, (reads, writes)) = touched.iter().find(|(n, _)| *n == argument.name)?;
            let start = pointer(launch, name);
            let bytes = start..start + span(launch, name, argument.kind);
            Some(Footprint { name, bytes, reads, writes })
        });
        let expected: Vec<_> = expected.collect();
        assert_eq!(expected.len(), touched.len(), "{touched:?}");
        assert_eq!(launch.footprint(), expected, "{launch:?}");
    }
}

#[test]
fn the_views_of_what_is_used_are_the_footprint() {
    each_small_trial(assert_footprint);
    each_huge_trial(assert_footprint);
}

/// Returns name, first and last address of each array that the only launch touches, and whether it
/// reads and writes the array.
pub fn only(launches: &[Launch]) -> Vec<(&'static str, u64, u64, bool, bool)> {
    assert_eq!(launches.len(), 1);
    let all = launches[0].footprint().into_iter();
    all.map(|it| (it.name, it.bytes.start, it.bytes.end, it.reads, it.writes)).collect()
}

#[test]
fn an_array_ends_with_the_last_row_of_its_last_entry() {
    let launches = forward(shape(100, 90)).launches(Target::Sm90).unwrap();
    // Two entries 2^24 elements apart; 32 heads of queries and 8 of keys, 128 columns.
    let expected = [
        ("q", 0x1000, 0x1000 + 2 * ((1 << 24) + 100 * 32 * 128), true, false),
        ("k", 0x2000, 0x2000 + 2 * ((1 << 24) + 90 * 8 * 128), true, false),
        ("v", 0x2000, 0x2000 + 2 * ((1 << 24) + 90 * 8 * 128), true, false),
        ("o", 0x3000, 0x3000 + 2 * ((1 << 24) + 100 * 32 * 128), false, true),
        ("lse", 0x4000, 0x4000 + 4 * ((1 << 24) + 100 * 32), false, true),
    ];
    assert_eq!(only(&launches), expected);
}

#[test]
fn with_no_keys_only_queries_and_results_are_touched() {
    for rectangle in [shape(100, 0), Rectangle { lower: 300, ..shape(100, 90) }] {
        let touched = only(&forward(rectangle).launches(Target::Sm90).unwrap());
        let names: Vec<_> = touched.iter().map(|it| it.0).collect();
        assert_eq!(names, ["q", "o", "lse"], "{rectangle:?}");
    }
}

#[test]
fn a_state_is_read_written_or_both() {
    let at = Statistics { address: 0x5000, batch_stride: 4096, head_stride: 128 };
    let state = Forward { acc: Some(forward(shape(1, 1)).q), ..forward(shape(100, 100)) };
    let state = Forward { row_max: Some(at), row_sum: Some(at), ..state };
    for (first, last) in [(true, false), (false, false), (false, true)] {
        let launches = Forward { first, last, ..state }.launches(Target::Sm90).unwrap();
        let end = 0x5000 + 4 * (4096 + 31 * 128 + 100);
        let found = only(&launches).into_iter().find(|it| it.0 == "row_max").unwrap();
        assert_eq!(found, ("row_max", 0x5000, end, !first, !last));
    }
}

#[test]
fn what_is_not_given_is_not_touched() {
    let (batch, rows, heads, head_dim, element) = (3, 50, 4, 64, Element::F16);
    let at = |address| Rows { address, batch_stride: 1 << 20 };
    let statistics = |address| Statistics { address, batch_stride: 1 << 20, head_stride: 64 };
    let span = |bytes: u64, entry: u64| bytes * ((2 << 20) + entry);
    let (a, b, out) = (at(0x1000), Some(at(0x2000)), at(0x3000));
    let scale = 1.0;
    let cast = Cast { batch, rows, heads, head_dim, element, a, b, out, scale };
    let all = [
        ("a", 0x1000, 0x1000 + span(4, 50 * 4 * 64), true, false),
        ("b", 0x2000, 0x2000 + span(4, 50 * 4 * 64), true, false),
        ("out", 0x3000, 0x3000 + span(2, 50 * 4 * 64), false, true),
    ];
    assert_eq!(only(&cast.launches(Target::Sm80).unwrap()), all);
    let without = Cast { b: None, ..cast }.launches(Target::Sm80).unwrap();
    assert_eq!(only(&without), [all[0], all[2]]);

    let (lse_log2, delta) = (statistics(0x5000), statistics(0x6000));
    let description = Delta {
        batch,
        q_len: rows,
        heads,
        head_dim,
        element,
        o: at(0x1000),
        dout: at(0x2000),
        lse: at(0x3000),
        dlse: Some(at(0x4000)),
        lse_log2,
        delta,
        zeros: Some(at(0x7000)),
    };
    let all = [
        ("o", 0x1000, 0x1000 + span(2, 50 * 4 * 64), true, false),
        ("dout", 0x2000, 0x2000 + span(2, 50 * 4 * 64), true, false),
        ("lse", 0x3000, 0x3000 + span(4, 50 * 4), true, false),
        ("dlse", 0x4000, 0x4000 + span(4, 50 * 4), true, false),
        ("lse_log2", 0x5000, 0x5000 + span(4, 3 * 64 + 50), false, true),
        ("delta", 0x6000, 0x6000 + span(4, 3 * 64 + 50), false, true),
        ("zeros", 0x7000, 0x7000 + span(4, 50 * 4 * 64), false, true),
    ];
    assert_eq!(only(&description.launches(Target::Sm80).unwrap()), all);
    let without = Delta { dlse: None, ..description }.launches(Target::Sm80).unwrap();
    assert_eq!(only(&without), [&all[..3], &all[4..]].concat());
    let without = Delta { zeros: None, ..description }.launches(Target::Sm80).unwrap();
    assert_eq!(only(&without), all[..6]);
}

#[test]
#[should_panic(
    expected = "q of attention_fwd_window_f16_d128_sm_90 must be an address, got Some(I32(7))"
)]
fn a_launch_that_was_changed_by_hand_has_none() {
    let mut launch = forward(shape(100, 100)).launches(Target::Sm90).unwrap().remove(0);
    launch.values[0] = Value::I32(7);
    launch.footprint();
}
