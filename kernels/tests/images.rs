//! The embedded images: complete, as their launch records say, and of the quality that was
//! accepted.
#![cfg(feature = "cuda")]

use burst_attention_kernels::cubin::{Cubin, regressions};
use burst_attention_kernels::images::{IMAGES, image};
use burst_attention_kernels::instances::Instance;
use burst_attention_kernels::launch::layout;
use burst_attention_kernels::quality::{BASELINE, faults, parse, qualities, table};

#[test]
fn every_instance_has_one_image() {
    assert_eq!(IMAGES.len(), Instance::all().count());
    for instance in Instance::all() {
        let image = image(&instance).unwrap_or_else(|| panic!("{instance} has no image"));
        assert_eq!(image.instance, instance);
    }
}

#[test]
fn images_are_for_their_target_and_declare_what_their_records_say() {
    for image in IMAGES {
        let instance = image.instance;
        let cubin = Cubin::parse(image.cubin).unwrap_or_else(|e| panic!("{instance}: {e}"));
        let architecture = cubin.architecture.to_string();
        let target = instance.target.name();
        assert!(
            architecture == target || architecture == format!("{target}a"),
            "{instance} is for {architecture}"
        );
        assert_eq!(cubin.kernel.name, instance.entry());
        assert_eq!(
            cubin.kernel.parameters,
            layout(instance.kernel.arguments()),
            "{instance}: parameters"
        );
    }
}

#[test]
fn compiled_quality_is_what_was_accepted() {
    let qualities = qualities().unwrap();
    let mut faults: Vec<String> = qualities.iter().flat_map(|(i, q)| faults(i, q)).collect();
    let baseline = parse(BASELINE).unwrap();
    faults.extend(regressions(&baseline, &parse(&table(&qualities)).unwrap()));
    assert!(
        faults.is_empty(),
        "{}\nif that is meant: make kernel-quality WRITE=1",
        faults.join("\n")
    );
}
