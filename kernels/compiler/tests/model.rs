//! Tests the model of main loops on listings of this project's own kernels.

use burst_attention_compiler::cubin::Listing;
use burst_attention_compiler::model::{Modelled, loops};
use burst_attention_kernels::instances::{Kernel, TileShape};

/// Returns the model's results with the listings' tiles, whatever tiles the kernels have now.
fn modelled(kernel: Kernel, width: i32, text: &str) -> Vec<Modelled> {
    let (rows, keys) = match kernel {
        Kernel::Forward => (128, 64),
        Kernel::KeyGrads => (64, 128),
        _ => (128, 128),
    };
    let shape = TileShape { rows, keys, warps: 8, blocks: 1 };
    loops(kernel, shape, width, &Listing::parse(text).expect("a listing")).expect("loops")
}

/// Asserts that the cycles are within 2% of `cycles` and inside the range of all fits. For the
/// forward pass `cycles` come from another program with the same parameters; for the other loops an
/// earlier run of this model gave them.
fn assert_cycles(found: &Modelled, cycles: f64) {
    let (least, most) = found.range;
    assert!((found.cycles / cycles - 1.0).abs() < 0.02, "{cycles}: {found:?}");
    assert!(least <= found.cycles && found.cycles <= most && most < 1.2 * least, "{found:?}");
}

#[test]
fn the_forward_pass_has_two_stages_and_a_mask_costs_it_two_fifths() {
    let text = include_str!("listings/forward_d128.sass");
    let [plain, masked] = &modelled(Kernel::Forward, 128, text)[..] else { panic!("two loops") };
    assert_cycles(plain, 1327.0);
    assert_cycles(masked, 1894.0);
    for found in [plain, masked] {
        assert_eq!((&found.stages[..], found.products), (&[2, 3][..], (12, 2)));
        assert_eq!((found.barriers, found.exposed, found.conversions), (0, 0, 0));
        assert_eq!(found.tensor, 1024.0);
    }
    assert!(plain.masking < 5 && masked.masking > 100, "{plain:?} {masked:?}");
}

#[test]
fn one_stage_a_barrier_and_copies_of_the_same_iteration_are_found() {
    let text = include_str!("listings/key_grads_d128.sass");
    let [found] = &modelled(Kernel::KeyGrads, 128, text)[..] else { panic!("a loop") };
    assert_cycles(found, 4433.0);
    assert_eq!((&found.stages[..], found.products), (&[1, 1][..], (24, 5)));
    assert_eq!((found.barriers, found.exposed, found.conversions), (1, 2, 3));
}

#[test]
fn a_loop_with_one_stage_waits_for_its_tiles() {
    let text = include_str!("listings/query_grads_d64.sass");
    let [found] = &modelled(Kernel::QueryGrads, 64, text)[..] else { panic!("a loop") };
    assert_cycles(found, 3524.0);
    assert_eq!((&found.stages[..], found.tensor), (&[1, 1][..], 1536.0));
}

/// Latents are one tile in parts, so each of the two tiles of this loop has half of its 16,384 bytes.
/// The loop waits for one of them, which comes at 48 bytes a cycle.
#[test]
fn parts_of_a_tile_take_the_time_of_one_tile() {
    let text = include_str!("listings/query_grads_d64.sass");
    let cycles = |kernel| modelled(kernel, 64, text)[0].cycles;
    let saved = cycles(Kernel::QueryGrads) - cycles(Kernel::DecodeLatents);
    assert!((saved / (8192.0 / 48.0) - 1.0).abs() < 0.1, "{saved}");
}

/// Another stage, which the distance of the two barriers says, removes most of the wait.
#[test]
fn a_second_stage_is_worth_what_the_wait_for_tiles_costs() {
    let text = include_str!("listings/query_grads_d64.sass");
    let wait = |line: &&str| line.contains("PHASECHK");
    let arrive = |line: &&str| line.contains("SYNCS.ARRIVE");
    let lines = || text.lines();
    assert_eq!((lines().filter(wait).count(), lines().filter(arrive).count()), (2, 1));
    let found = |text: &str| modelled(Kernel::QueryGrads, 64, text).remove(0);
    let farther: String = lines()
        .map(|line| match line.contains("SYNCS.ARRIVE").then(|| line.split_once("+0x")).flatten() {
            Some((before, rest)) => {
                let (digits, behind) = rest.split_once(']').expect("an address");
                let place = u64::from_str_radix(digits, 16).expect("hexadecimal") + 8;
                format!("{before}+0x{place:x}]{behind}\n")
            }
            None => format!("{line}\n"),
        })
        .collect();
    let (one, two) = (found(text), found(&farther));
    assert_eq!(two.stages, [2, 2]);
    assert!(two.cycles < 0.75 * one.cycles, "{} {}", one.cycles, two.cycles);
}

/// The assembler makes groups of one product each where it cannot keep several products under way.
#[test]
fn groups_of_one_product_each_are_counted() {
    let text = include_str!("listings/forward_d128.sass");
    let serial: String = text
        .lines()
        .map(|line| match line.strip_suffix(';').filter(|l| l.contains("HGMMA")) {
            Some(start) if !start.contains("gsb0") => format!("{start}, gsb0;\n"),
            _ => format!("{line}\n"),
        })
        .collect();
    let [plain, serial] =
        [text, &serial].map(|text| modelled(Kernel::Forward, 128, text).remove(0));
    assert_eq!((plain.products, serial.products), ((12, 2), (12, 12)));
}

#[test]
fn nothing_is_said_without_encodings() {
    let text = include_str!("listings/query_grads_d64.sass");
    let bare: String =
        text.lines().filter(|l| !l.starts_with("/* 0x")).map(|l| format!("{l}\n")).collect();
    assert_eq!(modelled(Kernel::QueryGrads, 64, &bare), []);
}
