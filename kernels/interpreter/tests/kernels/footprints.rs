//! Launches where no other memory is there than what they say that they touch.

use std::sync::Mutex;

use burst_attention_interpreter::{Address, Launch as Order, Memory};
use burst_attention_kernels::instances::{Element, Kernel};
use burst_attention_kernels::launch::{Footprint, Launch};
use burst_attention_kernels::record::Value;

use super::case::{CASE, CAUSAL, Case};
use super::general::{DOCUMENTS, OTHERS};
use super::values::check_with;
use super::world::{Change, KERNELS};

/// Two entries, two heads per key head.
const SMALL: Case =
    Case { batch: 2, heads: 4, kv_heads: 2, q_len: 41, kv_len: 53, head_dim: 16, ..CASE };
const GENERAL: Case = Case { segments: Some((DOCUMENTS, OTHERS)), soft_cap: 3.0, ..SMALL };
const UNEVEN: Case =
    Case { value_dim: Some(8), slopes: true, dropout: Some(0.3), positions: (0, 3, 1), ..SMALL };
/// Two tiles of each side, of which one launch takes one.
const CUT: Case = Case { q_len: 150, kv_len: 170, heads: 2, limit: 20_000, ..SMALL };
const STEPS: &[(usize, usize)] = &[(0, 12), (12, 28), (28, 53)];
const NOBODY: (i64, i64) = (700, 900);

/// Runs a launch in a memory of nothing but `footprint`: loads find what is read alone, and stores
/// may go to what is written alone.
fn run(
    launch: &Launch,
    order: &Order,
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

pub fn suffices(launch: &Launch, order: &Order, memory: &Memory) -> Result<(), String> {
    run(launch, order, memory, &launch.footprint())
}

/// A part without its last or its first two bytes, not read, not written, and not there.
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

/// What launches there were of which nothing less sufficed: kernel, first, last, whether anything
/// was streamed.
static SEEN: Mutex<Vec<(Kernel, [bool; 3])>> = Mutex::new(Vec::new());

fn nothing_less_suffices(launch: &Launch, order: &Order, memory: &Memory) -> Result<(), String> {
    suffices(launch, order, memory)?;
    let footprint = launch.footprint();
    for (n, part) in footprint.iter().enumerate() {
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
    SEEN.lock().expect("no panics").push((launch.instance.kernel, kind));
    Ok(())
}

#[test]
#[ignore = "takes long: make test-full"]
fn a_footprint_is_all_that_a_launch_touches_and_no_more() {
    let cases = [SMALL, GENERAL, UNEVEN].map(|small| {
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
    let seen = SEEN.lock().expect("no panics");
    for kernel in Kernel::SOFTMAX.into_iter().filter(|kernel| kernel.is_attention()) {
        let each_way = [[true, true], [true, false], [false, true], [false, false]];
        for [first, last] in each_way {
            assert!(seen.contains(&(kernel, [first, last, true])), "{kernel:?} {first} {last}");
        }
        for [first, last] in &each_way[..3] {
            assert!(seen.contains(&(kernel, [*first, *last, false])), "{kernel:?} {first} {last}");
        }
    }
    let per_row = Kernel::SOFTMAX.into_iter().filter(|kernel| !kernel.is_attention());
    assert!(per_row.into_iter().all(|kernel| seen.contains(&(kernel, [true; 3]))));
}

/// Where the band hides some of the streamed rows they may be read all the same.
#[test]
fn a_footprint_is_enough_where_rows_are_hidden() {
    let cut = Case { band: (-60, 4), ..CUT };
    let steps: &[_] = &[(88, 170), (0, 88)];
    let cases = [
        Case { band: CAUSAL, ..SMALL },
        cut,
        Case { steps, ..cut },
        Case { band: (i64::MIN, -130), steps, ..cut },
        Case { segments: GENERAL.segments, soft_cap: 3.0, ..cut },
        Case { q_len: 129, kv_len: 1, ..SMALL },
        Case { q_len: 3, kv_len: 0, ..GENERAL },
    ];
    check_with(&cases, Change::Before(suffices));
}
