//! The image that a launch takes: the smallest that serves it.

use burst_attention_kernels::instances::{Element, Instance, Kernel, Target, width_of};
use burst_attention_kernels::launch::{MAX_VIEW_BYTES, Rectangle};
use burst_attention_kernels::variant::{FeatureSet, Variant};

use crate::samples::{forward, key_grads, query_grads, shape};
use crate::trial::{PASSES, Trial};

const NONE: FeatureSet = FeatureSet::NONE;
const SEGMENTS: FeatureSet = FeatureSet::SEGMENTS;
const SOFT_CAP: FeatureSet = FeatureSet::SOFT_CAP;
const SLOPES: FeatureSet = FeatureSet::SLOPES;
const DROPOUT: FeatureSet = FeatureSet::DROPOUT;
const ALL: FeatureSet = FeatureSet::ALL;
const PLAIN: Variant = Variant::PLAIN;
const WINDOW: Variant = Variant::WINDOW;
const GENERAL: Variant = Variant::GENERAL;
const FUSED: Variant = Variant::FUSED;
const FUSED_WINDOW: Variant = Variant { window: true, ..FUSED };

/// Features that launches want without and with a window, and the variants of their images where
/// the most images exist: in bfloat16, up to 128 columns, on Hopper and its successors in data
/// centers.
const MOST_IMAGES: [(FeatureSet, Variant, Variant); 12] = [
    (NONE, PLAIN, WINDOW),
    (SEGMENTS, WINDOW.with(SEGMENTS), WINDOW.with(SEGMENTS)),
    (SOFT_CAP, WINDOW.with(SOFT_CAP), WINDOW.with(SOFT_CAP)),
    (SLOPES, WINDOW.with(SLOPES), WINDOW.with(SLOPES)),
    (DROPOUT, GENERAL, GENERAL),
    (SEGMENTS.and(SOFT_CAP), GENERAL, GENERAL),
    (SEGMENTS.and(SLOPES), GENERAL, GENERAL),
    (SEGMENTS.and(DROPOUT), GENERAL, GENERAL),
    (SOFT_CAP.and(SLOPES), GENERAL, GENERAL),
    (SOFT_CAP.and(DROPOUT), GENERAL, GENERAL),
    (SLOPES.and(DROPOUT), GENERAL, GENERAL),
    (ALL, GENERAL, GENERAL),
];

/// Variants that fused launches want, and those of their images in bfloat16 and in float16, up to
/// 128 columns on the same GPUs. Elsewhere fused launches have no image.
const FUSED_IMAGES: [(Variant, Option<Variant>, Option<Variant>); 7] = [
    (FUSED, Some(FUSED), Some(FUSED)),
    (FUSED.with(SEGMENTS), Some(FUSED_WINDOW.with(SEGMENTS)), None),
    (FUSED_WINDOW.with(SEGMENTS), Some(FUSED_WINDOW.with(SEGMENTS)), None),
    (FUSED_WINDOW, None, None),
    (FUSED.with(SOFT_CAP), None, None),
    (FUSED.with(SLOPES), None, None),
    (FUSED_WINDOW.with(ALL), None, None),
];

fn has_most_images(target: Target, width: i32) -> bool {
    matches!(target, Target::Sm90 | Target::Sm100 | Target::Sm103) && width <= 128
}

/// Returns the image that a launch takes which wants a variant.
fn taken(
    kernel: Kernel,
    wanted: Variant,
    (element, columns, target): (Element, usize, Target),
) -> Instance {
    let lower = if wanted.window { -4 } else { i64::MIN };
    let sizes = Rectangle { head_dim: columns, value_dim: 8, ..shape(100, 100) };
    let rectangle = Rectangle { element, lower, ..sizes };
    let mut trial = Trial::new(kernel, rectangle, MAX_VIEW_BYTES, 1).with(wanted);
    let launches = trial.launches(target).unwrap();
    let mut images = trial.main(&launches).map(|launch| launch.instance());
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
        for (features, plain, windowed) in MOST_IMAGES {
            for (window, where_most_are) in [(false, plain), (true, windowed)] {
                let variant = match has_most_images(target, width) && element == Element::Bf16 {
                    true => where_most_are,
                    false if features == NONE => WINDOW,
                    false => GENERAL,
                };
                let wanted = Variant { window, ..PLAIN.with(features) };
                for kernel in PASSES {
                    let expected = Instance { kernel, variant, element, width, target };
                    assert_eq!(taken(kernel, wanted, (element, columns, target)), expected);
                }
            }
        }
    }
}

#[test]
fn fused_launches_take_the_smallest_fused_image() {
    for (element, columns, target) in each_place() {
        let width = width_of(columns).unwrap();
        for (wanted, in_bf16, in_f16) in FUSED_IMAGES {
            let variant = if element == Element::Bf16 { in_bf16 } else { in_f16 };
            let variant = variant.filter(|_| has_most_images(target, width));
            // With segments and 64 columns two kernels are faster.
            let variant = variant.filter(|it| width > 64 || !it.has(SEGMENTS));
            let kernel = Kernel::KeyGrads;
            let of = |variant| Instance { kernel, variant, element, width, target };
            assert_eq!(of(wanted).smallest(), variant.map(of), "{wanted} {element:?} {target:?}");
            if let Some(variant) = variant {
                assert_eq!(taken(kernel, wanted, (element, columns, target)), of(variant));
            }
        }
    }
}

#[test]
fn wider_values_take_a_wider_image() {
    for (head_dim, value_dim, width) in [(64, 72, 128), (8, 256, 256), (128, 8, 128)] {
        let rectangle = Rectangle { head_dim, value_dim, ..shape(100, 100) };
        let launches = forward(rectangle).launches(Target::Sm90).unwrap();
        assert_eq!(launches[0].instance().width, width);
    }
}

/// Returns all variants that a launch may want.
fn each_wanted() -> impl Iterator<Item = Variant> {
    (0..64).map(|bits: u32| {
        let is_on = |n: usize| bits & (1 << n) != 0;
        let features = [SEGMENTS, SOFT_CAP, SLOPES, DROPOUT].into_iter().enumerate();
        let plain = Variant { window: is_on(4), fused: is_on(5), ..PLAIN };
        features.fold(plain, |variant, (n, feature)| variant.with(feature.when(is_on(n))))
    })
}

fn count(variant: Variant) -> usize {
    let single = [SEGMENTS, SOFT_CAP, SLOPES, DROPOUT].map(|feature| variant.has(feature));
    let all = single.into_iter().chain([variant.window, variant.fused]);
    all.filter(|is_on| *is_on).count()
}

/// Whether an image computes the wanted features and no others. Only the image with all features
/// asks the launch which features are on, and a window may be endless.
fn does(image: Variant, wanted: Variant) -> bool {
    let exactly = image == wanted || image == Variant { window: true, ..wanted };
    exactly || (image == GENERAL && !wanted.fused)
}

#[test]
fn no_image_does_what_a_launch_does_not_want() {
    for kernel in PASSES {
        for (element, columns, target) in each_place() {
            let width = width_of(columns).unwrap();
            for wanted in each_wanted() {
                let of = |variant| Instance { kernel, variant, element, width, target };
                let Some(image) = of(wanted).smallest() else {
                    assert!(wanted.fused, "{wanted} of {kernel:?} has no image");
                    continue;
                };
                assert_eq!(image, of(image.variant));
                assert!(does(image.variant, wanted), "{image} for {wanted}");
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
                let found = Instance { variant: wanted, ..*image }.smallest();
                if does(image.variant, wanted) {
                    let found = found.expect("this image serves it");
                    assert!(images.contains(&found), "{found} is no image");
                    assert!(count(found.variant) <= count(image.variant), "{found}, {image}");
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
        let images = images.map(|launches| launches.unwrap()[0].instance().variant);
        assert!(images.iter().all(|variant| *variant == images[0]), "{images:?}");
        assert!(images[0] == WINDOW || images[0] == PLAIN, "{images:?}");
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
    let has_none = |kernel: &Kernel| {
        !PASSES.contains(kernel) && *kernel != Kernel::Decode && !kernel.is_linear()
    };
    let kernels = Kernel::ALL.into_iter().filter(has_none);
    for kernel in kernels {
        let mut images = Instance::all().filter(|image| image.kernel == kernel);
        assert!(images.all(|image| image.variant == PLAIN), "{kernel:?}");
    }
}
