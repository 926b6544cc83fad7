//! Images are complete, match their launch records and have the accepted quality.

use std::env;
use std::env::consts::ARCH;
use std::path::Path;

use burst_attention_compiler::assembler::Assembler;
use burst_attention_compiler::cubin::Cubin;
use burst_attention_compiler::images::of_instances;
use burst_attention_compiler::model::predict::{predictions, rates};
use burst_attention_compiler::quality::{Report, Tables, faults, qualities, reports};
use burst_attention_kernels::host::Host;
use burst_attention_kernels::images::Images;
use burst_attention_kernels::instances::{Element, Instance, Kernel, Target};
use burst_attention_kernels::rates::TABLE;
use burst_attention_kernels::record::layout;
use burst_attention_kernels::variant::Variant;

/// Returns the folder where `make images` puts the files.
fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../jax_plugin/burst_attention/images"))
}

fn check_image(instance: Instance, image: &[u8]) {
    let cubin = Cubin::parse(image).unwrap_or_else(|e| panic!("{instance}: {e}"));
    let (architecture, target) = (cubin.architecture.to_string(), instance.target.name());
    assert!(
        architecture == target || architecture == format!("{target}a"),
        "{instance} is for {architecture}"
    );
    let host = cubin.kernel.host.map(Host::name);
    assert_eq!(host, Some(ARCH), "{instance}: the host that it holds code for");
    assert_eq!(cubin.kernel.name, instance.entry());
    let expected = layout(instance.kernel.arguments());
    assert_eq!(cubin.kernel.parameters, expected, "{instance}: parameters");
}

fn check_quality(reports: &[Report]) {
    let mut faults: Vec<String> = reports.iter().flat_map(faults).collect();
    let accepted = Tables::accepted(reports.iter().map(|report| report.instance)).unwrap();
    faults.extend(accepted.regressions(&Tables::new(reports)));
    let advice = "if that is meant: make kernel-quality WRITE=1";
    assert!(faults.is_empty(), "{}\n{advice}", faults.join("\n"));
}

/// Compiles the images that train most models, in the same way as `make images`.
#[test]
fn main_images_are_what_was_accepted() {
    let assembler = Assembler::find(env::var_os("CUTILE_TILEIRAS_PATH"), env::var_os("CUDA_HOME"));
    let assembler = assembler.unwrap_or_else(|error| panic!("{error}"));
    let store = Path::new(env!("CARGO_TARGET_TMPDIR")).join("images");
    let plain = |kernel| Instance::plain(kernel, Element::Bf16, 128, Target::Sm90);
    let fused = Instance { variant: Variant::FUSED, ..plain(Kernel::KeyGrads) };
    let instances = [plain(Kernel::Forward), fused, plain(Kernel::QueryGrads)];
    let host = Host::of_name(ARCH).expect("the machine that builds is a host");
    let images = of_instances(&assembler, host, &instances, &store);
    let images = images.unwrap_or_else(|error| panic!("{error}"));
    images.iter().for_each(|(instance, image)| check_image(*instance, image));
    check_quality(&reports(&images).unwrap_or_else(|error| panic!("{error}")));
}

#[test]
#[ignore = "needs the images of all targets: make test-images"]
fn images_of_all_targets_are_complete_and_declare_what_their_records_say() {
    for target in Target::ALL {
        let images = Images::read(folder(), target).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(images.count(), Instance::of_target(target).count());
        for instance in Instance::of_target(target) {
            let image = images.get(&instance).unwrap_or_else(|error| panic!("{error}"));
            check_image(instance, image);
        }
    }
}

#[test]
#[ignore = "needs the images of all targets: make test-images"]
fn compiled_quality_of_all_targets_is_what_was_accepted() {
    let reports = qualities(folder(), &Target::ALL).unwrap_or_else(|error| panic!("{error}"));
    check_quality(&reports);
    assert_eq!(rates(&predictions(&reports)), TABLE, "make kernel-quality WRITE=1");
}
