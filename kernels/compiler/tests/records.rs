//! Launch records beside the kernels' own parameter lists.

use burst_attention_kernels::features::FeatureSet;
use burst_attention_kernels::instances::{Element, Instance, Kernel, Target};
use burst_attention_kernels::record::{Access, Kind, Shape, View};

const SOURCES: [&str; 7] = [
    include_str!("../src/device/forward.rs"),
    include_str!("../src/device/backward_keys.rs"),
    include_str!("../src/device/backward_queries.rs"),
    include_str!("../src/device/segments.rs"),
    include_str!("../src/device/rows.rs"),
    include_str!("../src/device/join.rs"),
    include_str!("../src/device/linear.rs"),
];

/// Name and type of each parameter in the kernel's source.
fn parameters(kernel: Kernel) -> Vec<(&'static str, Kind)> {
    let start = format!("unsafe fn {}<", kernel.name());
    let mut found = SOURCES.iter().filter_map(|source| source.split_once(&start));
    let (_, rest) = found.next().unwrap_or_else(|| panic!("{start} is in no source"));
    let list = rest.split_once(">(").unwrap().1.split_once(") {").unwrap().0;
    let parameters = list.split(',').map(str::trim).filter(|parameter| !parameter.is_empty());
    parameters
        .map(|parameter| {
            let (name, kind) = parameter.split_once(": ").unwrap();
            let kind = match kind {
                "*mut E" => Kind::Activations,
                "*mut f32" => Kind::Float32s,
                "*mut i32" => Kind::Int32s,
                "i32" => Kind::I32,
                "f32" => Kind::F32,
                other => panic!("{name} of {start} is a {other}"),
            };
            (name, kind)
        })
        .collect()
}

#[test]
fn records_are_the_kernels_parameter_lists() {
    for kernel in Kernel::ALL {
        let record: Vec<_> =
            kernel.arguments().iter().map(|argument| (argument.name, argument.kind)).collect();
        assert_eq!(record, parameters(kernel), "{}", kernel.name());
    }
}

/// Arrays of different columns cannot have the same batch stride.
#[test]
fn arrays_that_share_a_stride_have_the_same_columns() {
    for kernel in Kernel::ALL {
        let is_apart = kernel.arguments().iter().any(|argument| argument.name == "value_dim");
        let views: Vec<_> =
            kernel.arguments().iter().filter_map(|argument| argument.view).collect();
        let of_values = |view: &View| matches!(view.shape, Shape::Values | Shape::Results);
        for one in views.iter().filter(|view| is_apart && of_values(view)) {
            let mut shared = views.iter().filter(|view| view.batch_stride == one.batch_stride);
            assert!(shared.all(of_values), "{} of {}", one.batch_stride, kernel.name());
        }
    }
}

#[test]
fn every_argument_says_what_it_means() {
    for kernel in Kernel::ALL {
        for argument in kernel.arguments() {
            assert!(argument.doc.len() > 3, "{} of {}", argument.name, kernel.name());
            assert!(argument.divisor > 0 && 16 % argument.divisor == 0, "{}", argument.name);
        }
    }
}

#[test]
fn every_pointer_has_a_view_that_arguments_of_its_kernel_describe() {
    for kernel in Kernel::ALL {
        let is_integer = |name: &str| {
            let arguments = kernel.arguments().iter();
            arguments.filter(|other| other.kind == Kind::I32).any(|other| other.name == name)
        };
        for argument in kernel.arguments() {
            let name = format!("{} of {}", argument.name, kernel.name());
            assert_eq!(argument.view.is_some(), argument.kind.is_pointer(), "{name}");
            let Some(view) = argument.view else { continue };
            assert!(is_integer(view.batch_stride), "{name}: {}", view.batch_stride);
            let sizes: &[&str] = match view.shape {
                Shape::Queries if is_integer("rows") => &["rows", "heads", "head_dim"],
                Shape::Queries => &["q_len", "heads", "head_dim"],
                Shape::Keys => &["kv_len", "kv_heads", "head_dim"],
                Shape::Results if !is_integer("value_dim") => &["q_len", "heads", "head_dim"],
                Shape::Results => &["q_len", "heads", "value_dim"],
                Shape::Values if !is_integer("value_dim") => &["kv_len", "kv_heads", "head_dim"],
                Shape::Values => &["kv_len", "kv_heads", "value_dim"],
                Shape::PerQuery => &["q_len", "heads"],
                Shape::Statistics => &["q_len", "heads"],
                Shape::QueryTokens => &["q_len"],
                Shape::KeyTokens => &["kv_len"],
                Shape::Ranges if kernel == Kernel::KeyGrads => &["kv_len"],
                Shape::Ranges => &["q_len"],
                Shape::PerHead => &["heads"],
                Shape::PerEntry => &[],
                Shape::LinearQueries => &["rows", "q_heads", "head_dim"],
                Shape::LinearKeys => &["rows", "kv_heads", "head_dim"],
                Shape::LinearValues => &["rows", "kv_heads", "value_dim"],
                Shape::LinearOthers => &["rows", "q_heads", "value_dim"],
                Shape::LinearResults => &["rows", "heads", "value_dim"],
                Shape::LinearSums => &["padded_rows", "heads"],
                Shape::LinearDots => &["padded_rows", "dot_heads"],
                Shape::LinearStates => &["parts", "heads", "head_dim", "value_dim"],
            };
            assert!(sizes.iter().all(|size| is_integer(size)), "{name}: {sizes:?}");
            assert_eq!(view.head_stride.is_some(), view.shape.has_head_stride(), "{name}");
            assert!(view.head_stride.is_none_or(is_integer), "{name}: {view:?}");
        }
    }
}

#[test]
fn arrays_that_may_be_left_out_have_a_flag() {
    for kernel in Kernel::ALL {
        for argument in kernel.arguments() {
            let name = format!("{} of {}", argument.name, kernel.name());
            let may_be_absent = matches!(
                argument.access,
                Access::MaybeIn | Access::MaybeUpdate | Access::OptionalOut
            );
            assert_eq!(argument.flag.is_some(), may_be_absent, "{name}");
            let Some(flag) = argument.flag else { continue };
            let mut flags = kernel.arguments().iter().filter(|other| other.name == flag);
            assert!(flags.any(|flag| flag.kind == Kind::I32), "{flag} of {name}");
            assert!(flag.starts_with("has_"), "{flag} of {name}");
        }
    }
}

#[test]
fn only_kernels_with_fused_images_add_to_dq() {
    for kernel in Kernel::ALL {
        let added = kernel.arguments().iter().filter(|it| it.access == Access::FusedAdd);
        let names: Vec<_> = added.map(|argument| argument.name).collect();
        let has_fused = kernel.spec().features.iter().any(|set| set.has(FeatureSet::FUSED));
        assert_eq!(names, if has_fused { vec!["dq_acc"] } else { vec![] }, "{}", kernel.name());
    }
}

#[test]
fn names_of_images_tell_them_apart() {
    let mut names: Vec<String> = Instance::all().map(|instance| instance.to_string()).collect();
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count);
    assert!(names.contains(&"attention_fwd_bf16_d128_sm_90".to_owned()));
    assert!(names.contains(&"merge_d128_sm_90".to_owned()));
    assert!(names.contains(&"segment_ranges_d64_sm_90".to_owned()));
    assert!(names.contains(&"attention_fwd_window_bf16_d256_sm_80".to_owned()));
    assert!(names.contains(&"attention_fwd_general_f16_d64_sm_120".to_owned()));
    assert!(names.contains(&"attention_bwd_dq_window_soft_cap_bf16_d64_sm_100".to_owned()));
    assert!(names.contains(&"attention_bwd_dkdv_fused_window_segments_bf16_d128_sm_90".to_owned()));
}

/// The image of a name, whose parts from the end on are target, width, element type, features and
/// kernel.
fn read_back(name: &str) -> Option<Instance> {
    let target = Target::ALL.into_iter().find(|target| name.ends_with(target.name()))?;
    let (rest, width) = name.strip_suffix(target.name())?.strip_suffix('_')?.rsplit_once("_d")?;
    let element = Element::ALL.into_iter().find_map(|element| {
        let rest = rest.strip_suffix(element.name())?.strip_suffix('_')?;
        Some((rest, element))
    });
    let (rest, element) = element.unwrap_or((rest, Element::Bf16));
    let of_kernel = |kernel: Kernel| {
        let sets = kernel.spec().features.iter();
        let mut named = sets.filter(move |set| rest == format!("{}{set}", kernel.name()));
        named.next().map(|&features| (kernel, features))
    };
    let mut kernels = Kernel::ALL.into_iter().filter_map(of_kernel);
    let (Some((kernel, features)), None) = (kernels.next(), kernels.next()) else { return None };
    Some(Instance { kernel, features, element, width: width.parse().ok()?, target })
}

#[test]
fn names_of_images_are_read_back() {
    for instance in Instance::all() {
        assert_eq!(read_back(&instance.to_string()), Some(instance), "{instance}");
    }
}

#[test]
fn capabilities_find_their_target() {
    assert_eq!(Target::of_capability(8, 6), Some(Target::Sm80));
    assert_eq!(Target::of_capability(9, 0), Some(Target::Sm90));
    assert_eq!(Target::of_capability(10, 3), Some(Target::Sm103));
    assert_eq!(Target::of_capability(12, 1), None);
    assert_eq!(Target::of_capability(7, 5), None);
}
