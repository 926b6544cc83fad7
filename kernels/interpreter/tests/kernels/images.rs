//! Small cases for every image of the attention passes.

use std::collections::BTreeSet;
use std::sync::Mutex;

use burst_attention_interpreter::{GridRun, Memory};
use burst_attention_kernels::instances::{Element, Instance, Kernel, Target};
use burst_attention_kernels::launch::Launch;
use burst_attention_kernels::variant::FeatureSet;

use super::case::{CASE, CAUSAL, Case, NONE, Runs};
use super::coverage::Group;
use super::features::{DOCUMENTS, LONG, ONE, OTHERS, PADDED, SHORT, SORTED};
use super::problem::Problem;
use super::visible::{ANY, COMBS, OPEN, STRETCHES, TREE, TURNED};
use super::world::Change;
use super::{forward, fused, gradients};

/// The images that ran.
static SEEN: Mutex<BTreeSet<Instance>> = Mutex::new(BTreeSet::new());

fn see(launch: &Launch, _: &GridRun, _: &Memory) -> Result<(), String> {
    SEEN.lock().expect("no panics").insert(launch.instance());
    Ok(())
}

/// Returns the images of a target for the attention passes.
fn images(target: Target) -> impl Iterator<Item = Instance> {
    let is_pass = |kernel: Kernel| kernel.has_pairs();
    Instance::of_target(target).filter(move |instance| is_pass(instance.kernel))
}

/// A case with two entries, groups of two heads, and last tiles that are not full.
const SMALL: Case =
    Case { batch: 2, heads: 2, kv_heads: 1, q_len: 150, kv_len: 170, positions: (9, 2, 3), ..CASE };

const SEGMENTS: [(Runs, Runs); 6] = [
    (SORTED, SORTED),
    (SHORT, SHORT),
    (LONG, LONG),
    (PADDED, PADDED),
    (DOCUMENTS, OTHERS),
    (DOCUMENTS, DOCUMENTS),
];

/// Returns at most `count` cases that an image computes.
fn cases(instance: &Instance, count: usize) -> Vec<Case> {
    let Instance { variant, element, width, target, .. } = *instance;
    let has = |feature| variant.has(feature);
    let head_dim = width as usize - 8;
    let case = Case { element, target, head_dim, ..SMALL };
    let case = Case {
        soft_cap: if has(FeatureSet::SOFT_CAP) { 4.0 } else { 0.0 },
        slopes: has(FeatureSet::SLOPES),
        dropout: has(FeatureSet::DROPOUT).then_some(0.3),
        ..case
    };
    let segments: Vec<_> = match has(FeatureSet::SEGMENTS) {
        true => SEGMENTS.map(Some).to_vec(),
        false => vec![None],
    };
    let masks = if variant.is_general() { [TURNED, TREE] } else { [TREE, ANY] };
    let masks = masks.map(|masks| has(FeatureSet::VISIBLE).then_some(masks));
    let takes = |band: &(i64, i64)| {
        let case = Case { band: *band, segments: segments[0], masks: masks[0], ..case };
        case.instance(instance.kernel, variant.fused) == Some(*instance)
    };
    let bands = [CAUSAL, NONE, (-60, 4), (30, 80), (-20, i64::MAX)];
    let bands: Vec<_> = bands.into_iter().filter(takes).collect();
    // Pairs each set of segments with a band, and each band with a set of segments.
    let rounds = segments.len().max(bands.len()).min(count);
    let at = |n: usize| Case {
        segments: segments[n % segments.len()],
        band: bands[n % bands.len()],
        masks: masks[n % 2],
        // Long documents have more than two tiles.
        q_len: if segments[n % segments.len()].is_some() { 290 } else { case.q_len },
        ..case
    };
    (0..rounds).map(at).collect()
}

/// Runs an image's kernel on a case.
fn check_image(instance: &Instance, case: Case) {
    let problem = Problem::new(case);
    let check = match instance.kernel {
        Kernel::Forward => forward::check,
        Kernel::QueryGrads => gradients::check_queries,
        _ if instance.variant.fused => fused::check,
        _ => gradients::check_keys,
    };
    let found = check(&problem, Change::Before(see));
    let found = found.unwrap_or_else(|error| panic!("{instance}: {error}\n{case:?}"));
    println!("{instance} {:.2}", found.worst);
}

/// Runs some images on some of their cases.
fn check(images: impl Iterator<Item = Instance>, count: usize) {
    let images: Vec<_> = images.collect();
    for instance in &images {
        for case in cases(instance, count) {
            check_image(instance, case);
        }
    }
    let seen = SEEN.lock().expect("no panics");
    let missed = images.iter().find(|&instance| !seen.contains(instance));
    assert_eq!(missed, None, "an image that no case took");
}

/// Returns cases in which the kernels' branches and loops go every way.
fn ways(instance: &Instance) -> Vec<Case> {
    let Instance { kernel, variant, .. } = *instance;
    let small = Case { batch: 1, heads: 1, ..cases(instance, 1)[0] };
    let long = Case { q_len: 660, kv_len: 660, ..small };
    let mut all = vec![
        long,
        Case { band: (-600, 4), ..long },
        Case { band: (i64::MIN, 57), ..long },
        Case { heads: 2, ..small },
        Case { heads: 2, band: (-60, 4), ..small },
        Case { band: (-20, i64::MAX), ..small },
        Case { band: (i64::MIN, -600), ..small },
        Case { steps: &[(0, 64), (64, 290)], ..small },
        Case { q_len: 5, kv_len: 0, ..small },
    ];
    // More keys than the kernels that prepare others take at once.
    if kernel == Kernel::Forward {
        all.push(Case { q_len: 70, kv_len: 2100, ..small });
    }
    if variant.has(FeatureSet::SEGMENTS) {
        all.push(Case { segments: Some((ONE, ONE)), band: (-600, 4), ..long });
    }
    if variant.has(FeatureSet::VISIBLE) {
        let masked = |masks| Case { masks: Some(masks), band: NONE, segments: None, ..long };
        all.extend([COMBS, STRETCHES, OPEN].map(masked));
    }
    if variant.is_general() {
        let off = Case { segments: None, soft_cap: 0.0, slopes: false, dropout: None, ..small };
        all.push(Case { dropout: Some(0.3), ..off });
        all.push(Case { soft_cap: 4.0, slopes: true, ..off });
    }
    all
}

/// Takes each variant with as few columns as it has. Some cases run another variant, and the fused
/// kernel leaves out what it does not compute.
#[test]
#[ignore = "takes long: make test-full"]
fn branches_and_loops_go_every_way() {
    let mut known = BTreeSet::new();
    let images = images(Target::Sm90).filter(|image| image.element == Element::Bf16);
    let images: Vec<_> =
        images.filter(|image| known.insert((image.kernel, image.variant))).collect();
    Group::Attention.assert_reached(|| {
        for instance in &images {
            let mut all = ways(instance);
            let fused = instance.variant.fused;
            all.retain(|case| case.instance(instance.kernel, fused).is_some());
            all.into_iter().for_each(|case| check_image(instance, case));
        }
    });
}

#[test]
#[ignore = "takes long: make test-full"]
fn every_image_of_hopper() {
    check(images(Target::Sm90), 2);
}

#[test]
#[ignore = "takes long: make test-images"]
fn every_case_of_hopper() {
    check(images(Target::Sm90), usize::MAX);
}

/// Runs images of other targets whose tiles differ from Hopper's tiles, each shape once.
#[test]
#[ignore = "takes long: make test-images"]
fn every_tile_of_other_targets() {
    let key = |instance: &Instance| {
        let tile = instance.tile();
        let shape = (tile.rows, tile.keys);
        (instance.kernel, instance.variant, instance.element, instance.width, shape)
    };
    let mut known: BTreeSet<_> = images(Target::Sm90).map(|instance| key(&instance)).collect();
    let others = Target::ALL.into_iter().flat_map(images);
    check(others.filter(|instance| known.insert(key(instance))), 2);
}
