//! The image that a launch takes: the smallest that serves it.

use burst_attention_kernels::features::FeatureSet;
use burst_attention_kernels::instances::{Element, Instance, Kernel, Target, width_of};
use burst_attention_kernels::launch::{MAX_VIEW_BYTES, Rectangle};

use crate::samples::{forward, key_grads, query_grads, shape};
use crate::trial::{PASSES, Trial};

const NONE: FeatureSet = FeatureSet::NONE;
const WINDOW: FeatureSet = FeatureSet::WINDOW;
const SEGMENTS: FeatureSet = FeatureSet::SEGMENTS;
const SOFT_CAP: FeatureSet = FeatureSet::SOFT_CAP;
const SLOPES: FeatureSet = FeatureSet::SLOPES;
const DROPOUT: FeatureSet = FeatureSet::DROPOUT;
const FUSED: FeatureSet = FeatureSet::FUSED;
const ALL: FeatureSet = FeatureSet::ALL;

/// Features that launches want, and the features of their image where the most images exist: in
/// bfloat16, up to 128 columns, on Hopper and its successors in data centers.
const MOST_IMAGES: [(FeatureSet, FeatureSet); 19] = [
    (NONE, NONE),
    (WINDOW, WINDOW),
    (SEGMENTS, WINDOW.and(SEGMENTS)),
    (WINDOW.and(SEGMENTS), WINDOW.and(SEGMENTS)),
    (SOFT_CAP, WINDOW.and(SOFT_CAP)),
    (WINDOW.and(SOFT_CAP), WINDOW.and(SOFT_CAP)),
    (SLOPES, WINDOW.and(SLOPES)),
    (WINDOW.and(SLOPES), WINDOW.and(SLOPES)),
    (DROPOUT, ALL),
    (WINDOW.and(DROPOUT), ALL),
    (SEGMENTS.and(SOFT_CAP), ALL),
    (WINDOW.and(SEGMENTS).and(SOFT_CAP), ALL),
    (SEGMENTS.and(SLOPES), ALL),
    (SEGMENTS.and(DROPOUT), ALL),
    (SOFT_CAP.and(SLOPES), ALL),
    (SOFT_CAP.and(DROPOUT), ALL),
    (SLOPES.and(DROPOUT), ALL),
    (SEGMENTS.and(SOFT_CAP).and(SLOPES).and(DROPOUT), ALL),
    (ALL, ALL),
];

/// Features that fused launches want, and the features of their image in bfloat16 and in float16,
/// up to 128 columns on the same GPUs. Elsewhere fused launches have no image.
const FUSED_IMAGES: [(FeatureSet, Option<FeatureSet>, Option<FeatureSet>); 7] = [
    (FUSED, Some(FUSED), Some(FUSED)),
    (FUSED.and(SEGMENTS), Some(FUSED.and(WINDOW).and(SEGMENTS)), None),
    (FUSED.and(WINDOW).and(SEGMENTS), Some(FUSED.and(WINDOW).and(SEGMENTS)), None),
    (FUSED.and(WINDOW), None, None),
    (FUSED.and(SOFT_CAP), None, None),
    (FUSED.and(SLOPES), None, None),
    (FUSED.and(ALL), None, None),
];

fn has_most_images(target: Target, width: i32) -> bool {
    matches!(target, Target::Sm90 | Target::Sm100 | Target::Sm103) && width <= 128
}

/// Returns the image that a launch with features takes.
fn taken(
    kernel: Kernel,
    features: FeatureSet,
    (element, columns, target): (Element, usize, Target),
) -> Instance {
    let lower = if features.has(WINDOW) { -4 } else { i64::MIN };
    let sizes = Rectangle { head_dim: columns, value_dim: 8, ..shape(100, 100) };
    let rectangle = Rectangle { element, lower, ..sizes };
    let mut trial = Trial::new(kernel, rectangle, MAX_VIEW_BYTES, 1).with(features);
    let launches = trial.launches(target).unwrap();
    let mut images = trial.main(&launches).map(|launch| launch.instance);
    images.next().expect("there is a launch")
}

/// Returns each choice of element type, columns and target.
fn each_place() -> impl Iterator<Item = (Element, usize, Target)> {
    let of = |target| {
        let sizes = [8, 64, 72, 128, 136, 256];
        let of_element = move |element| sizes.map(move |columns| (element, columns, target));
        Element::ALL.into_iter().flat_map(of_element)
    };
    Target::ALL.into_iter().flat_map(of)
}

#[test]
fn launches_take_the_smallest_image() {
    for (element, columns, target) in each_place() {
        let width = width_of(columns).unwrap();
        for (wanted, where_most_are) in MOST_IMAGES {
            let features = match has_most_images(target, width) && element == Element::Bf16 {
                true => where_most_are,
                false if WINDOW.has(wanted) => WINDOW,
                false => ALL,
            };
            for kernel in PASSES {
                let expected = Instance { kernel, features, element, width, target };
                assert_eq!(taken(kernel, wanted, (element, columns, target)), expected);
            }
        }
    }
}

#[test]
fn fused_launches_take_the_smallest_fused_image() {
    for (element, columns, target) in each_place() {
        let width = width_of(columns).unwrap();
        for (wanted, in_bf16, in_f16) in FUSED_IMAGES {
            let features = if element == Element::Bf16 { in_bf16 } else { in_f16 };
            let features = features.filter(|_| has_most_images(target, width));
            // With segments and 64 columns two kernels are faster.
            let features = features.filter(|set| width > 64 || !set.has(SEGMENTS));
            let (kernel, of) = (Kernel::KeyGrads, |features| Instance {
                kernel: Kernel::KeyGrads,
                features,
                element,
                width,
                target,
            });
            assert_eq!(of(wanted).smallest(), features.map(of), "{wanted} {element:?} {target:?}");
            if let Some(features) = features {
                assert_eq!(taken(kernel, wanted, (element, columns, target)), of(features));
            }
        }
    }
}

#[test]
fn wider_values_take_a_wider_image() {
    for (head_dim, value_dim, width) in [(64, 72, 128), (8, 256, 256), (128, 8, 128)] {
        let rectangle = Rectangle { head_dim, value_dim, ..shape(100, 100) };
        let launches = forward(rectangle).launches(Target::Sm90).unwrap();
        assert_eq!(launches[0].instance.width, width);
    }
}

/// Returns all sets of features that a launch may want.
fn each_wanted() -> impl Iterator<Item = FeatureSet> {
    (0..64).map(|bits: u32| {
        let single = [WINDOW, SEGMENTS, SOFT_CAP, SLOPES, DROPOUT, FUSED].into_iter().enumerate();
        let on = single.filter(|(n, _)| bits & (1 << n) != 0);
        on.fold(NONE, |set, (_, feature)| set.and(feature))
    })
}

fn count(features: FeatureSet) -> usize {
    let single = [WINDOW, SEGMENTS, SOFT_CAP, SLOPES, DROPOUT, FUSED];
    single.into_iter().filter(|&feature| features.has(feature)).count()
}

/// Whether an image computes the wanted features and no others. Only the image with all features
/// asks the launch which features are on, and a window may be endless.
fn does(image: FeatureSet, wanted: FeatureSet) -> bool {
    let exactly = image == wanted || image == wanted.and(WINDOW);
    exactly || (image == ALL && ALL.has(wanted))
}

#[test]
fn no_image_does_what_a_launch_does_not_want() {
    for kernel in PASSES {
        for (element, columns, target) in each_place() {
            let width = width_of(columns).unwrap();
            for wanted in each_wanted() {
                let of = |features| Instance { kernel, features, element, width, target };
                let Some(image) = of(wanted).smallest() else {
                    assert!(wanted.has(FUSED), "{wanted} of {kernel:?} has no image");
                    continue;
                };
                assert_eq!(image, of(image.features));
                assert!(does(image.features, wanted), "{image} for {wanted}");
            }
        }
    }
}

#[test]
fn no_smaller_image_would_do() {
    for target in Target::ALL {
        let images: Vec<_> = Instance::of_target(target).collect();
        for image in images.iter().filter(|image| PASSES.contains(&image.kernel)) {
            for wanted in each_wanted() {
                let found = Instance { features: wanted, ..*image }.smallest();
                if does(image.features, wanted) {
                    let found = found.expect("this image serves it");
                    assert!(images.contains(&found), "{found} is no image");
                    assert!(count(found.features) <= count(image.features), "{found}, {image}");
                }
            }
        }
    }
}

#[test]
fn a_window_is_wanted_where_it_hides_the_first_key_from_the_last_query() {
    let has_window = |q_len, kv_len, lower, upper| {
        let rectangle = Rectangle { element: Element::Bf16, lower, upper, ..shape(q_len, kv_len) };
        let images = [
            forward(rectangle).launches(Target::Sm90),
            key_grads(rectangle).launches(Target::Sm90),
            query_grads(rectangle).launches(Target::Sm90),
        ];
        let images = images.map(|launches| launches.unwrap()[0].instance.features);
        assert!(images.iter().all(|features| *features == images[0]), "{images:?}");
        assert!(images[0] == WINDOW || images[0] == NONE, "{images:?}");
        images[0] == WINDOW
    };
    assert!(!has_window(100, 90, i64::MIN, i64::MAX));
    assert!(!has_window(100, 90, i64::MIN, 0));
    assert!(!has_window(100, 90, -99, 0));
    assert!(has_window(100, 90, -98, 0));
    assert!(has_window(100, 90, -98, i64::MAX));
    assert!(has_window(100, 90, 5, 70));
    assert!(!has_window(1, 90, 0, 10));
    assert!(has_window(1, 90, 1, 10));
}

#[test]
fn kernels_of_rows_have_no_features() {
    let has_none = |kernel: &Kernel| !PASSES.contains(kernel) && *kernel != Kernel::Decode;
    let kernels = Kernel::ALL.into_iter().filter(has_none);
    for kernel in kernels {
        let mut images = Instance::all().filter(|image| image.kernel == kernel);
        assert!(images.all(|image| image.features == NONE), "{kernel:?}");
    }
}
