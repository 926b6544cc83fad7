//! Launches of the fused kernel, which computes dk, dv and dq at once.

use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{Dropout, Features, KeyGrads, Rectangle, Rows, Statistics};

use crate::footprint::only;
use crate::samples::{K, O, STATISTICS, key_grads, segments, shape};
use crate::trial::{integer, pointer};

const DQ: Rows = Rows { address: 0x9000, batch_stride: 1 << 24 };

/// Targets that have fused kernels.
const FUSED_TARGETS: [Target; 3] = [Target::Sm90, Target::Sm100, Target::Sm103];

fn fused(rectangle: Rectangle) -> KeyGrads {
    KeyGrads { dq_acc: Some(DQ), ..key_grads(rectangle) }
}

/// Returns each choice of features.
fn each_choice() -> Vec<Features> {
    let rows = Rows { address: 0xa000, batch_stride: 32 };
    let mut choices = Vec::new();
    for bits in 0..16 {
        let is_on = |bit: i32| bits & (1 << bit) != 0;
        choices.push(Features {
            segments: is_on(0).then(segments),
            soft_cap: if is_on(1) { 20.0 } else { 0.0 },
            slopes: is_on(2).then_some(rows),
            dropout: is_on(3).then_some(Dropout { numbers: rows, rate: 0.1 }),
            ..Features::default()
        });
    }
    choices
}

#[test]
fn dq_is_added_to_where_something_is_streamed() {
    let touched = only(&fused(shape(100, 90)).launches(Target::Sm90).unwrap());
    let end = 0x9000 + 4 * ((1 << 24) + 100 * 32 * 128);
    assert!(touched.contains(&("dq_acc", 0x9000, end, true, true)), "{touched:?}");
    let names = |description: KeyGrads| {
        let launches = description.launches(Target::Sm90).unwrap();
        only(&launches).into_iter().map(|it| it.0).collect::<Vec<_>>()
    };
    for rectangle in [shape(0, 90), Rectangle { upper: -300, ..shape(100, 90) }] {
        assert_eq!(names(fused(rectangle)), ["k", "v", "dk", "dv"], "{rectangle:?}");
    }
    assert!(!names(key_grads(shape(100, 90))).contains(&"dq_acc"));
}

#[test]
fn dq_that_is_not_given_is_stood_in_for() {
    let launches = key_grads(shape(100, 90)).launches(Target::Sm90).unwrap();
    assert_eq!(pointer(&launches[0], "dq_acc"), 0x1000);
    let launches = fused(shape(100, 90)).launches(Target::Sm90).unwrap();
    assert_eq!(pointer(&launches[0], "dq_acc"), DQ.address);
    assert_eq!(integer(&launches[0], "dq_acc_batch_stride"), 1 << 24);
}

#[test]
fn cuts_of_keys_add_to_all_queries_that_they_stream() {
    let rectangle = Rectangle { batch: 1, ..shape(1000, 1000) };
    let near = Statistics { head_stride: 1024, ..STATISTICS };
    let description = KeyGrads { lse_log2: near, delta: near, ..fused(rectangle) };
    let description = KeyGrads { dk_acc: Some(K), dv_acc: Some(O), ..description };
    // The limit holds 255 rows of dq_acc and 1023 rows of the accumulators of keys.
    let launches = description.launches_within(Target::Sm90, 4 << 20).unwrap();
    assert!(launches.len() > 4);
    let row = 32 * 128;
    for launch in &launches {
        assert!(launch.instance().variant.fused);
        let q = (pointer(launch, "q") - 0x1000) / 2 / row;
        let dq = (pointer(launch, "dq_acc") - DQ.address) / 4 / row;
        assert_eq!(q, dq, "{launch:?}");
    }
}

#[test]
fn what_has_no_fused_kernel_is_refused_and_can_fuse_says_so() {
    let (mut fusing, mut refused) = (0, 0);
    for target in Target::ALL {
        for (element, columns, lower, features) in each_case() {
            let sizes = Rectangle { head_dim: columns, value_dim: 64, ..shape(100, 100) };
            let rectangle = Rectangle { element, lower, ..sizes };
            let case = format!("{rectangle:?} {features:?} {target:?}");
            let window = lower > -99;
            let set = [
                features.segments.is_some(),
                features.soft_cap != 0.0 || features.slopes.is_some() || features.dropout.is_some(),
            ];
            let expected = FUSED_TARGETS.contains(&target)
                && columns <= 128
                && match set {
                    [false, false] => !window,
                    [true, false] => element == Element::Bf16 && columns > 64,
                    [_, true] => false,
                };
            assert_eq!(
                KeyGrads::fused(rectangle, features).can_fuse(target).is_ok(),
                expected,
                "{case}"
            );
            let launches = KeyGrads { features, ..fused(rectangle) }.launches(target);
            match launches {
                Ok(launches) => {
                    let main = launches.last().expect("there is a launch");
                    assert!(expected && main.instance().variant.fused, "{case}");
                    fusing += 1;
                }
                Err(error) => {
                    let message = error.to_string();
                    assert!(!expected, "{case}: {message}");
                    let said = "dq_acc must be none, since no fused kernel computes this (see \
                                can_fuse), got an accumulator";
                    assert_eq!(message, said, "{case}");
                    refused += 1;
                }
            }
            // The kernel that is not fused serves every case.
            assert!(KeyGrads { features, ..key_grads(rectangle) }.launches(target).is_ok());
        }
    }
    assert!(fusing > 20 && refused > 500, "{fusing}, {refused}");
}

fn each_case() -> Vec<(Element, usize, i64, Features)> {
    let mut cases = Vec::new();
    for element in Element::ALL {
        for columns in [64, 128, 136] {
            for lower in [i64::MIN, -99, -98] {
                cases.extend(each_choice().into_iter().map(|it| (element, columns, lower, it)));
            }
        }
    }
    cases
}

#[test]
fn no_dimension_without_a_kernel_can_be_fused() {
    let rectangle = Rectangle { head_dim: 264, ..shape(100, 100) };
    assert!(KeyGrads::fused(rectangle, Features::default()).can_fuse(Target::Sm90).is_err());
}
