//! Launches in a memory that holds only their footprints.

use std::sync::Mutex;

use burst_attention_interpreter::{Address, GridRun, Memory};
use burst_attention_kernels::instances::{Element, Kernel};
use burst_attention_kernels::kernel::Role;
use burst_attention_kernels::launch::{Footprint, Launch};
use burst_attention_kernels::record::Value;
use burst_attention_kernels::variant::{FeatureSet, Variant};

use super::case::{CASE, CAUSAL, Case};
use super::features::{DOCUMENTS, ONE, OTHERS};
use super::fused;
use super::problem::Problem;
use super::values::check_with;
use super::visible::{ANY, OPEN, PLACES};
use super::world::{Change, KERNELS};

/// A case with two entries and two heads for each key head.
const SMALL: Case =
    Case { batch: 2, heads: 4, kv_heads: 2, q_len: 41, kv_len: 53, head_dim: 16, ..CASE };
const GENERAL: Case = Case { segments: Some((DOCUMENTS, OTHERS)), soft_cap: 3.0, ..SMALL };
const TEXT: Case = Case { segments: Some((DOCUMENTS, OTHERS)), ..SMALL };
const UNEVEN: Case =
    Case { value_dim: Some(8), slopes: true, dropout: Some(0.3), positions: (0, 3, 1), ..SMALL };
/// A case whose data hide no pair, so that launches read all rows.
const MASKED: Case = Case { masks: Some(OPEN), segments: Some((ONE, ONE)), ..SMALL };
/// A case with two tiles of each side, where a launch takes one tile.
const CUT: Case = Case { q_len: 150, kv_len: 170, heads: 2, limit: 20_000, ..SMALL };
const SEGMENTS: Variant = Variant::WINDOW.with(FeatureSet::SEGMENTS);
const STEPS: &[(usize, usize)] = &[(0, 12), (12, 28), (28, 53)];
const NOBODY: (i64, i64) = (i64::MIN, -800);

/// Runs a launch in a memory that holds only `footprint`. Loads find only the parts that the launch
/// reads, and stores may go only to the parts that it writes.
fn run(
    launch: &Launch,
    order: &GridRun,
    memory: &Memory,
    footprint: &[Footprint],
) -> Result<(), String> {
    let mut alone = Memory::new();
    alone.set_audit(true);
    for Footprint { name, bytes, reads, .. } in footprint {
        let (at, length) = (Address(bytes.start), bytes.end - bytes.start);
        alone.allocate_at(name, at, length);
        if *reads {
            alone.write(at, &memory.read(at, length as usize));
        }
    }
    KERNELS.run(launch, order, &mut alone).map_err(|error| error.to_string())?;
    for Footprint { name, bytes, .. } in footprint.iter().filter(|part| !part.writes) {
        let stores = alone.stores(Address(bytes.start), (bytes.end - bytes.start) as usize, 1);
        if let Some(at) = stores.iter().position(|&count| count > 0) {
            return Err(format!("byte {at} of {name}, which is not written, was stored"));
        }
    }
    Ok(())
}

pub fn suffices(launch: &Launch, order: &GridRun, memory: &Memory) -> Result<(), String> {
    run(launch, order, memory, &launch.footprint())
}

/// Returns smaller parts: without the last or the first two bytes, not read, not written, and none.
fn smaller(part: &Footprint) -> Vec<Option<Footprint>> {
    let (start, end) = (part.bytes.start, part.bytes.end);
    let mut smaller = vec![
        None,
        Some(Footprint { bytes: start..end - 2, ..part.clone() }),
        Some(Footprint { bytes: start + 2..end, ..part.clone() }),
    ];
    if part.reads {
        smaller.push(Some(Footprint { reads: false, ..part.clone() }));
    }
    if part.writes {
        smaller.push(Some(Footprint { writes: false, ..part.clone() }));
    }
    smaller
}

/// The launches for which no smaller footprint sufficed: kernel, variant, first, last, whether
/// they streamed anything.
static SEEN: Mutex<Vec<(Kernel, Variant, [bool; 3])>> = Mutex::new(Vec::new());

/// Whether a part holds packed numbers of rows, of which a kernel reads some only.
fn is_packed(launch: &Launch, part: &Footprint) -> bool {
    match part.name {
        "q_segments" | "kv_segments" => launch.instance().variant.has(FeatureSet::VISIBLE),
        name => name == "other_rows",
    }
}

fn nothing_less_suffices(launch: &Launch, order: &GridRun, memory: &Memory) -> Result<(), String> {
    suffices(launch, order, memory)?;
    let footprint = launch.footprint();
    let parts = footprint.iter().enumerate().filter(|(_, part)| !is_packed(launch, part));
    for (n, part) in parts {
        for less in smaller(part) {
            let mut changed = footprint.clone();
            changed.splice(n..=n, less.clone());
            if run(launch, order, memory, &changed).is_ok() {
                return Err(format!("{less:?} is enough of {part:?}"));
            }
        }
    }
    let integer = |name| match launch.value(name) {
        Some(Value::I32(value)) => value,
        _ => 1,
    };
    let kind = [integer("first") == 1, integer("last") == 1, integer("lower") <= integer("upper")];
    SEEN.lock().expect("no panics").push((
        launch.instance().kernel,
        launch.instance().variant,
        kind,
    ));
    Ok(())
}

#[test]
#[ignore = "takes long: make test-full"]
fn a_footprint_is_all_that_a_launch_touches_and_no_more() {
    let placed = Case { masks: Some(PLACES), ..UNEVEN };
    let cases = [SMALL, TEXT, GENERAL, UNEVEN, MASKED, placed].map(|small| {
        let steps = Case { steps: STEPS, ..small };
        [
            Case { second: false, element: Element::F16, ..small },
            Case { margin: 0, batch: 1, heads: 2, kv_heads: 1, ..small },
            steps,
            Case { finished: false, batch: 1, ..steps },
            Case { band: NOBODY, ..steps },
            Case { band: NOBODY, ..small },
            Case { q_len: CUT.q_len, kv_len: CUT.kv_len, heads: 2, limit: CUT.limit, ..small },
        ]
    });
    check_with(cases.as_flattened(), Change::Before(nothing_less_suffices));
    for steps in [&[], STEPS] {
        let problem = Problem::new(Case { steps, ..SMALL });
        let found = fused::check(&problem, Change::Before(nothing_less_suffices));
        found.unwrap_or_else(|error| panic!("{error}\n{:?}", problem.case));
    }
    let seen = SEEN.lock().expect("no panics");
    for kernel in [Kernel::Forward, Kernel::KeyGrads, Kernel::QueryGrads] {
        for variant in [Variant::PLAIN, SEGMENTS, Variant::GENERAL] {
            let each_way = [[true, true], [true, false], [false, true], [false, false]];
            let was = |kind| seen.contains(&(kernel, variant, kind));
            for [first, last] in each_way {
                assert!(was([first, last, true]), "{kernel:?}{variant} {first} {last}");
            }
            for [first, last] in &each_way[..3] {
                assert!(was([*first, *last, false]), "{kernel:?}{variant} {first} {last}");
            }
        }
    }
    let mut per_row = Kernel::ALL.into_iter().filter(|kernel| kernel.spec().role == Role::Rows);
    let was = |kernel| seen.contains(&(kernel, Variant::PLAIN, [true; 3]));
    assert!(per_row.all(was));
}

/// A launch may read streamed rows that the band hides.
#[test]
#[ignore = "takes long: make test-full"]
fn a_footprint_is_enough_where_rows_are_hidden() {
    let cut = Case { band: (-60, 4), ..CUT };
    let steps: &[_] = &[(88, 170), (0, 88)];
    let cases = [
        Case { band: CAUSAL, ..SMALL },
        cut,
        Case { steps, ..cut },
        Case { band: (i64::MIN, -130), steps, ..cut },
        Case { segments: GENERAL.segments, soft_cap: 3.0, ..cut },
        Case { segments: GENERAL.segments, masks: Some(ANY), ..cut },
        Case { q_len: 129, kv_len: 1, ..SMALL },
        Case { q_len: 3, kv_len: 0, ..GENERAL },
    ];
    check_with(&cases, Change::Before(suffices));
}

/// Blocks of the fused kernel add to dq in any order. Where they see nothing they leave all
/// streamed arrays alone.
#[test]
fn a_footprint_is_enough_for_the_fused_kernel() {
    let text = Case { segments: Some((DOCUMENTS, DOCUMENTS)), head_dim: 72, ..SMALL };
    let cases = [
        SMALL,
        text,
        Case { band: CAUSAL, steps: STEPS, ..SMALL },
        Case { band: NOBODY, ..SMALL },
        Case { band: NOBODY, ..text },
        Case { band: NOBODY, steps: STEPS, ..text },
        Case { limit: 40_000, ..CUT },
    ];
    for case in cases {
        let found = fused::check(&Problem::new(case), Change::Before(suffices));
        found.unwrap_or_else(|error| panic!("{error}\n{case:?}"));
    }
}
