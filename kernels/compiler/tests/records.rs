//! Launch records against the parameter lists in the kernels' source.

use burst_attention_kernels::instances::{Element, Instance, Kernel, Target};
use burst_attention_kernels::kernel::Role;
use burst_attention_kernels::record::{Access, Argument, Kind, Meaning, Size, View};

const SOURCES: [&str; 17] = [
    include_str!("../src/device/forward.rs"),
    include_str!("../src/device/backward_keys.rs"),
    include_str!("../src/device/backward_queries.rs"),
    include_str!("../src/device/segments.rs"),
    include_str!("../src/device/masks.rs"),
    include_str!("../src/device/rows.rs"),
    include_str!("../src/device/combine_softmax.rs"),
    include_str!("../src/device/linear.rs"),
    include_str!("../src/device/channels.rs"),
    include_str!("../src/device/delta_inverse.rs"),
    include_str!("../src/device/delta_rule.rs"),
    include_str!("../src/device/delta_keys.rs"),
    include_str!("../src/device/decode.rs"),
    include_str!("../src/device/decode_latents.rs"),
    include_str!("../src/device/latent_weights.rs"),
    include_str!("../src/device/latent_values.rs"),
    include_str!("../src/device/decode_merge.rs"),
];

/// Returns name and type of each parameter in the kernel's source.
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
        let views: Vec<_> =
            kernel.arguments().iter().filter_map(|argument| argument.view).collect();
        let of_values = |view: &View| view.dims.contains(&Size::ValueDim);
        for one in views.iter().filter(|view| of_values(view)) {
            let mut shared = views.iter().filter(|view| view.batch_stride == one.batch_stride);
            assert!(shared.all(of_values), "{:?} of {}", one.batch_stride, kernel.name());
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

/// Whether the kernel has an integer of this meaning.
fn has_integer(kernel: Kernel, meaning: Meaning) -> bool {
    kernel.arguments().iter().any(|it| it.kind == Kind::I32 && it.meaning == meaning)
}

#[test]
fn every_meaning_has_one_argument() {
    for kernel in Kernel::ALL {
        let meanings: Vec<_> = kernel.arguments().iter().map(|argument| argument.meaning).collect();
        for (n, meaning) in meanings.iter().enumerate() {
            // Linear attention has two flags for the same array.
            let is_twin = kernel.is_linear() && matches!(meaning, Meaning::Has(_));
            assert!(
                is_twin || !meanings[..n].contains(meaning),
                "{meaning:?} of {}",
                kernel.name()
            );
        }
    }
}

#[test]
fn arguments_of_a_name_mean_the_same_in_all_kernels() {
    let all = || Kernel::ALL.into_iter().flat_map(|kernel| kernel.arguments());
    // Strides of statistics belong to the first statistics of each kernel.
    let is_stride = |argument: &&Argument| argument.name.starts_with("stat_");
    for one in all().filter(|argument| !is_stride(argument)) {
        let mut same = all().filter(|other| other.name == one.name);
        assert!(same.all(|other| other.meaning == one.meaning), "{}", one.name);
    }
}

#[test]
fn every_pointer_has_a_view_that_arguments_of_its_kernel_describe() {
    for kernel in Kernel::ALL {
        for argument in kernel.arguments() {
            let name = format!("{} of {}", argument.name, kernel.name());
            assert_eq!(argument.view.is_some(), argument.kind.is_pointer(), "{name}");
            assert_eq!(
                matches!(argument.meaning, Meaning::Address(_)),
                argument.kind.is_pointer(),
                "{name}"
            );
            let Some(view) = argument.view else { continue };
            let is_decode = matches!(kernel.spec().role, Role::Decode | Role::DecodeMerge);
            let is_contiguous = is_decode
                || matches!(view.dims, [Size::Parts | Size::RunBlocks, ..] | [_, Size::Six]);
            let stride = Meaning::BatchStride(view.batch_stride);
            assert_eq!(has_integer(kernel, stride), !is_contiguous, "{name}: {stride:?}");
            for &size in view.dims {
                let is_fixed = matches!(size, Size::RangeBlocks | Size::RunBlocks);
                let is_fixed = is_fixed || size.fixed().is_some();
                assert!(is_fixed || has_integer(kernel, Meaning::Size(size)), "{name}: {size:?}");
            }
            let is_by_head = matches!(view.dims, [Size::Heads | Size::DotHeads, _]);
            assert_eq!(view.head_stride.is_some(), is_by_head, "{name}");
            let has_stride = |of| has_integer(kernel, Meaning::HeadStride(of));
            assert!(view.head_stride.is_none_or(has_stride), "{name}: {view:?}");
        }
    }
}

#[test]
fn flags_of_arrays_are_arguments() {
    for kernel in Kernel::ALL {
        for argument in kernel.arguments() {
            let name = format!("{} of {}", argument.name, kernel.name());
            let Some(flag) = argument.flag.map(Meaning::Has) else { continue };
            assert!(has_integer(kernel, flag), "{flag:?} of {name}");
        }
        for flag in kernel.arguments().iter().filter(|it| matches!(it.meaning, Meaning::Has(_))) {
            assert!(flag.name.starts_with("has_"), "{} of {}", flag.name, kernel.name());
        }
    }
}

#[test]
fn only_kernels_with_fused_images_add_to_dq() {
    for kernel in Kernel::ALL {
        let added = kernel.arguments().iter().filter(|it| it.access == Access::FusedAdd);
        let names: Vec<_> = added.map(|argument| argument.name).collect();
        let has_fused = kernel.spec().variants.iter().any(|variant| variant.fused);
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
    assert!(names.contains(&"accumulate_d128_sm_90".to_owned()));
    assert!(names.contains(&"segment_ranges_d64_sm_90".to_owned()));
    assert!(names.contains(&"attention_fwd_visible_bf16_d128_sm_90".to_owned()));
    assert!(names.contains(&"attention_bwd_dq_general_visible_f16_d64_sm_80".to_owned()));
    assert!(names.contains(&"attention_fwd_window_bf16_d256_sm_80".to_owned()));
    assert!(names.contains(&"attention_fwd_general_f16_d64_sm_120".to_owned()));
    assert!(names.contains(&"attention_bwd_dq_window_soft_cap_bf16_d64_sm_100".to_owned()));
    assert!(names.contains(&"attention_bwd_dkdv_fused_window_segments_bf16_d128_sm_90".to_owned()));
}

/// Returns the image of a name, whose parts from the end on are target, width, element type,
/// features and kernel.
fn read_back(name: &str) -> Option<Instance> {
    let target = Target::ALL.into_iter().find(|target| name.ends_with(target.name()))?;
    let (rest, width) = name.strip_suffix(target.name())?.strip_suffix('_')?.rsplit_once("_d")?;
    let element = Element::ALL.into_iter().find_map(|element| {
        let rest = rest.strip_suffix(element.name())?.strip_suffix('_')?;
        Some((rest, element))
    });
    let (rest, element) = element.unwrap_or((rest, Element::Bf16));
    let of_kernel = |kernel: Kernel| {
        let variants = kernel.spec().variants.iter();
        let mut named = variants.filter(move |it| rest == format!("{}{it}", kernel.name()));
        named.next().map(|&variant| (kernel, variant))
    };
    let mut kernels = Kernel::ALL.into_iter().filter_map(of_kernel);
    let (Some((kernel, variant)), None) = (kernels.next(), kernels.next()) else { return None };
    Some(Instance { kernel, variant, element, width: width.parse().ok()?, target })
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
