//! The files of images that the build made: complete, as their launch records say, and of the
//! quality that was accepted.

use std::env::consts::ARCH;
use std::path::Path;

use burst_attention_compiler::model::predict::{predictions, rates};
use burst_attention_compiler::quality::{Tables, faults, qualities};
use burst_attention_kernels::cubin::Cubin;
use burst_attention_kernels::host::Host;
use burst_attention_kernels::images::Images;
use burst_attention_kernels::instances::{Instance, Target};
use burst_attention_kernels::launch::layout;
use burst_attention_kernels::rates::TABLE;

/// Where `make images` puts the files.
fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../jax_plugin/burst_attention/images"))
}

/// Every instance has an image, for its target and for this host, with the arguments that its record
/// says.
fn check_images(targets: &[Target]) {
    for &target in targets {
        let images = Images::read(folder(), target).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(images.count(), Instance::of_target(target).count());
        for instance in Instance::of_target(target) {
            let image = images.get(&instance).unwrap_or_else(|error| panic!("{error}"));
            let cubin = Cubin::parse(image).unwrap_or_else(|e| panic!("{instance}: {e}"));
            let (architecture, target) = (cubin.architecture.to_string(), target.name());
            assert!(
                architecture == target || architecture == format!("{target}a"),
                "{instance} is for {architecture}"
            );
            let host = cubin.kernel.host.map(Host::name);
            assert_eq!(host, Some(ARCH), "{instance}: the host that it holds code for");
            assert_eq!(cubin.kernel.name, instance.entry());
            assert_eq!(
                cubin.kernel.parameters,
                layout(instance.kernel.arguments()),
                "{instance}: parameters"
            );
        }
    }
}

fn check_quality(targets: &[Target]) {
    let qualities = qualities(folder(), targets).unwrap_or_else(|error| panic!("{error}"));
    let mut faults: Vec<String> = qualities.iter().flat_map(faults).collect();
    let accepted = Tables::accepted(targets).unwrap();
    faults.extend(accepted.regressions(&Tables::new(&qualities)));
    if targets.contains(&Target::Sm90) {
        assert_eq!(rates(&predictions(&qualities)), TABLE, "make kernel-quality WRITE=1");
    }
    assert!(
        faults.is_empty(),
        "{}\nif that is meant: make kernel-quality WRITE=1",
        faults.join("\n")
    );
}

#[test]
fn images_for_sm_90_are_complete_and_declare_what_their_records_say() {
    check_images(&[Target::Sm90]);
}

#[test]
fn compiled_quality_for_sm_90_is_what_was_accepted() {
    check_quality(&[Target::Sm90]);
}

#[test]
#[ignore = "needs the images of all targets: make test-full"]
fn images_of_all_targets_are_complete_and_declare_what_their_records_say() {
    check_images(&Target::ALL);
}

#[test]
#[ignore = "needs the images of all targets: make test-full"]
fn compiled_quality_of_all_targets_is_what_was_accepted() {
    check_quality(&Target::ALL);
}
