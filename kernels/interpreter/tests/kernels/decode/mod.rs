//! Decode: `decode` and `decode_merge` against dense attention.

mod case;
mod coverage;

use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{Launch, Split};
use cutile_ir::Module;
use cutile_ir::bytecode::Opcode::{self, MinI, MmaF, MulF, Select};
use cutile_ir::ir::ValueProducer;

use crate::footprints::suffices;
use crate::linear::{near, rounding};
use crate::modules::{find, inside, is_wide, of};
use crate::mutants::{force, reroute_all, scale, swap};
use crate::world::{Change, Stores, World};
use case::{CASE, Case, place};

/// Runs the launches in two orders of blocks. Returns o and lse.
fn run(case: &Case, change: Change) -> Result<[Vec<f32>; 2], String> {
    let inputs = case.inputs();
    let [one, other] = [1, 2].map(|seed| {
        let mut world = World::new(seed, change);
        let (description, arrays) = place(case, &inputs, &mut world);
        let launches = description.launches(case.target).map_err(|error| error.to_string())?;
        world.run(launches, |_| None)?;
        for input in &arrays.inputs {
            world.audit(&[(input, Stores::Never)])?;
        }
        world.audit(&[(&arrays.workspace, Stores::AtMost(1))])?;
        world.audit(&[&arrays.o, &arrays.lse].map(|array| (array, Stores::Exactly(1))))?;
        Ok::<_, String>([&arrays.o, &arrays.lse].map(|array| array.read(&world.memory)))
    });
    let (one, other) = (one?, other?);
    let bits = |found: &[Vec<f32>]| found.concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    match bits(&one) == bits(&other) {
        true => Ok(one),
        false => Err("another order of blocks gives other bits".into()),
    }
}

/// Returns the error of o, relative to its bound.
fn check(case: &Case, change: Change) -> Result<f64, String> {
    let [o, lse] = run(case, change)?;
    let (exact, exact_lse) = case.exact(&case.inputs());
    for (at, (&got, &want)) in lse.iter().zip(&exact_lse).enumerate() {
        let is_empty = want == f64::NEG_INFINITY;
        let agrees = if is_empty {
            f64::from(got) == want
        } else {
            (f64::from(got) - want).abs() < 1e-5 * want.abs().max(1.0)
        };
        if !agrees {
            return Err(format!("lse {at} is {got}, expected {want}"));
        }
        let row = &o[at * case.value_dim..][..case.value_dim];
        if is_empty && row.iter().any(|&x| x != 0.0) {
            return Err(format!("row {at} sees nothing, but o is {row:?}"));
        }
    }
    let rows = o.chunks(case.value_dim).zip(exact.chunks(case.value_dim)).zip(&exact_lse);
    let seen = rows.filter(|(_, lse)| lse.is_finite());
    seen.map(|((o, exact), _)| near("o", o, exact, 2.0 * rounding(case.element)))
        .try_fold(0f64, |worst, found| Ok(worst.max(found?)))
}

fn check_all(cases: &[Case]) {
    let mut worst = 0f64;
    for case in cases {
        let found = check(case, Change::None).unwrap_or_else(|error| panic!("{case:?}: {error}"));
        println!("{found:.2}");
        worst = worst.max(found);
    }
    assert!(worst > 0.3, "bounds that say little: {worst}");
}

const PAGED: Case = Case { page_rows: 64, source_pages: 5, spare: 3, ..CASE };
const SHORT: Case = Case { page_rows: 16, source_pages: 20, spare: 2, ..CASE };
const MANY: Case = Case {
    lengths: &[300, 300, 130, 130],
    starts: &[320, 310, 131, 400],
    entries: 2,
    queries: 4,
    ..CASE
};

#[test]
fn sequences_of_any_length_in_any_pages() {
    check_all(&[CASE, PAGED, SHORT, Case { element: Element::F16, ..PAGED }]);
    check_all(&[
        Case { page_rows: 128, source_pages: 3, ..PAGED },
        Case { page_rows: 8, source_pages: 40, ..SHORT },
        Case { page_rows: 32, source_pages: 10, ..SHORT },
    ]);
}

#[test]
fn few_and_many_queries() {
    let ragged: &[i32] = &[3, 0, 1, 2];
    check_all(&[
        Case { queries: 4, query_lengths: ragged, ..CASE },
        Case { queries: 16, group: 1, ..PAGED },
        Case { queries: 16, group: 6, kv_heads: 1, ..CASE },
        Case { queries: 2, group: 48, kv_heads: 1, lengths: &[70], ..CASE },
        Case { queries: 5, group: 4, ..SHORT },
        MANY,
    ]);
}

#[test]
fn a_device_holds_some_of_the_positions() {
    let striped = |rank, interleave| Case { world_size: 3, rank, interleave, ..CASE };
    check_all(&[
        Case { lengths: &[900, 0, 1, 129], queries: 3, ..striped(1, 1) },
        Case { lengths: &[900, 5, 1, 200], ..striped(2, 16) },
        Case { lengths: &[900, 5, 330, 320], queries: 2, ..striped(1, 0) },
        Case { lengths: &[700, 0, 65, 64], world_size: 2, rank: 1, interleave: 64, ..PAGED },
        Case { lengths: &[700, 0, 17, 16], world_size: 2, interleave: 16, ..SHORT },
    ]);
}

#[test]
fn windows_caps_and_slopes() {
    let window = Case { window: Some(70), queries: 3, ..CASE };
    let all = Case { soft_cap: 2.0, slopes: true, ..window };
    check_all(&[
        window,
        Case { window: Some(0), ..PAGED },
        Case { soft_cap: 1.5, ..SHORT },
        Case { slopes: true, ..PAGED },
        all,
        Case { world_size: 2, rank: 1, interleave: 16, lengths: &[500, 0, 30, 129], ..all },
        Case { window: Some(90), soft_cap: 2.0, slopes: true, ..MANY },
    ]);
}

/// Rows of a page whose id is out of range are hidden, and the id is not followed.
#[test]
fn pages_out_of_range_are_hidden() {
    for id in [-1, -7, 1000, i32::MAX - 127] {
        check_all(&[
            Case { missing: Some((0, 2, id)), ..PAGED },
            Case { missing: Some((0, 0, id)), queries: 3, ..SHORT },
        ]);
    }
    let only = Case { lengths: &[40], missing: Some((0, 0, -1)), ..PAGED };
    assert_eq!(run(&only, Change::None).expect("results")[1], [f32::NEG_INFINITY; 6]);
}

#[test]
fn the_cut_into_pieces_makes_no_difference() {
    let runs = [1, 2, 7, 40, 300].map(|runs| Case { split: Split::Runs(runs), ..PAGED });
    check_all(&runs);
    check_all(&[
        Case { split: Split::Slices(5), ..PAGED },
        Case { split: Split::Slices(3), slice: 2, ..PAGED },
        Case { split: Split::Slices(2), slice: 4, queries: 3, window: Some(100), ..SHORT },
    ]);
}

/// With slices, no bit of a sequence depends on other sequences, its slot or its pages.
#[test]
fn slices_give_a_sequence_the_same_bits_in_every_batch() {
    let paged = Case { split: Split::Slices(5), lengths: &[300], spare: 0, ..PAGED };
    let short = Case { split: Split::Slices(3), slice: 2, queries: 2, ..SHORT };
    for alone in [paged, Case { lengths: &[300], spare: 0, ..short }] {
        let want = run(&alone, Change::None).expect("results");
        let batch = Case { lengths: &[0, 17, 300, 256], spare: 5, ..alone };
        // The same sequence: its queries, and its rows in other pages.
        let [own, mut shared] = [alone, batch].map(|case| case.inputs());
        copy_sequence((&alone, &own), (&batch, &mut shared), 2);
        let found = run_with(&batch, &shared);
        for (found, want) in found.iter().zip(want) {
            assert_eq!(found[2 * want.len()..3 * want.len()], want);
        }
    }
}

fn copy_sequence(
    (from, source): (&Case, &case::Inputs),
    (to, target): (&Case, &mut case::Inputs),
    unit: usize,
) {
    let rows = from.kv_heads * from.rows() * from.head_dim;
    target.q[unit * rows..][..rows].copy_from_slice(&source.q);
    for page in 0..from.source_pages {
        let [old, new] = [from.page_id(0, page), to.page_id(unit, page)].map(|id| id as usize);
        for (source, target, dim) in
            [(&source.k, &mut target.k, from.head_dim), (&source.v, &mut target.v, from.value_dim)]
        {
            let count = from.page_rows * from.kv_heads * dim;
            target[new * count..][..count].copy_from_slice(&source[old * count..][..count]);
        }
    }
}

/// Returns o and lse of other inputs.
fn run_with(case: &Case, inputs: &case::Inputs) -> [Vec<f32>; 2] {
    let mut world = World::new(1, Change::None);
    let (description, arrays) = place(case, inputs, &mut world);
    let launches = description.launches(case.target).expect("launches");
    world.run(launches, |_| None).expect("results");
    [&arrays.o, &arrays.lse].map(|array| array.read(&world.memory))
}

#[test]
#[ignore = "takes long: make test-full"]
fn columns_of_any_width() {
    let small = Case { lengths: &[150, 0], kv_heads: 1, ..CASE };
    let dims = [(64, 64), (128, 104), (72, 200), (256, 8)];
    check_all(&dims.map(|(head_dim, value_dim)| Case { head_dim, value_dim, ..small }));
    let wide = Case { head_dim: 256, value_dim: 256, page_rows: 16, source_pages: 10, ..small };
    check_all(&[wide, Case { head_dim: 128, value_dim: 128, ..wide }]);
}

#[test]
#[ignore = "takes long: make test-full"]
fn tiles_of_other_targets() {
    for target in Target::ALL {
        for case in [CASE, PAGED, SHORT, MANY, Case { head_dim: 256, ..CASE }] {
            check_all(&[Case { target, ..case }, Case { target, head_dim: 128, ..case }]);
        }
        let latents = Case { page_rows: 64, source_pages: 3, spare: 2, target, ..LATENTS };
        check_all(&[latents, Case { queries: 8, window: Some(40), soft_cap: 2.0, ..latents }]);
    }
}

const LATENTS: Case = Case {
    lengths: &[150, 0, 1],
    page_rows: 192,
    queries: 2,
    kv_heads: 1,
    group: 5,
    head_dim: 576,
    value_dim: 512,
    values_in_keys: true,
    ..CASE
};

/// A piece of more tiles than a turn of the loop over their levels takes.
const MANY_TILES: Case = Case {
    lengths: &[2000],
    page_rows: 2048,
    split: Split::Runs(1),
    weights_in_memory: true,
    ..LATENTS
};

/// Latents of any width up to 576, of which up to 512 columns are values.
#[test]
fn values_in_the_first_columns_of_keys() {
    let small = Case { lengths: &[70, 0], page_rows: 128, queries: 1, group: 3, ..LATENTS };
    let dims = [(40, 24), (288, 256), (320, 264), (512, 512)];
    let paged = Case { page_rows: 64, source_pages: 3, spare: 2, ..LATENTS };
    for weights_in_memory in [false, true] {
        let of = |case| Case { weights_in_memory, ..case };
        check_all(&dims.map(|(head_dim, value_dim)| of(Case { head_dim, value_dim, ..small })));
        check_all(&[
            of(LATENTS),
            of(paged),
            of(Case { page_rows: 16, source_pages: 12, element: Element::F16, ..paged }),
            of(Case { missing: Some((0, 1, -1)), kv_heads: 2, ..paged }),
            of(Case {
                split: Split::Slices(3),
                window: Some(40),
                soft_cap: 2.0,
                slopes: true,
                ..paged
            }),
        ]);
    }
}

#[test]
fn launches_touch_what_their_footprints_say() {
    let written = Case { weights_in_memory: true, ..LATENTS };
    for case in [Case { slopes: true, hidden: 0.0, ..PAGED }, SHORT, written] {
        check(&case, Change::Before(suffices)).unwrap_or_else(|error| panic!("{error}"));
    }
}

/// Changes an argument in the launches of kernels that have it.
fn force_any(launch: &mut Launch, name: &str, value: i32) {
    if launch.value(name).is_some() {
        force(launch, name, value);
    }
}

/// Changes the pieces' kernel, which has products.
fn in_pieces(module: &mut Module, change: impl FnOnce(&mut Module)) {
    if !find(module, MmaF).is_empty() {
        change(module);
    }
}

/// Changes the kernel that adds pieces.
fn in_merge(module: &mut Module, change: impl FnOnce(&mut Module)) {
    if find(module, MmaF).is_empty() {
        change(module);
    }
}

/// Replaces the last operand of the `n`-th operation of an opcode by its operand before.
fn repeat(module: &mut Module, opcode: Opcode, n: usize) {
    let id = find(module, opcode)[n];
    let op = module.op_mut(id);
    let last = op.operands.len() - 1;
    op.operands[last] = op.operands[last - 1];
}

/// Forgets that sums of earlier tiles are relative to their own level: where a loop finds the level
/// of a piece, it adds them as they are.
fn forget_levels(module: &mut Module) {
    for id in find(module, Opcode::Loop) {
        let of = |opcode| of(module, inside(module, id), opcode);
        if of(Opcode::Exp2).is_empty() || !of(MmaF).is_empty() {
            continue;
        }
        let sum = of(Opcode::AddF).into_iter().find(|&id| is_wide(module, id)).expect("a sum");
        let ValueProducer::OpResult { op, .. } =
            module.value_data(module.op(sum).operands[0]).producer
        else {
            panic!("a product with the earlier sum");
        };
        module.op_mut(sum).operands[0] = module.op(op).operands[0];
    }
}

#[test]
fn every_mistake_is_found() {
    let all =
        Case { window: Some(70), queries: 3, soft_cap: 2.0, slopes: true, world_size: 2, ..PAGED };
    let striped = Case { interleave: 16, rank: 1, lengths: &[500, 0, 30, 129], ..all };
    let missing = Case { missing: Some((0, 2, -1)), ..PAGED };
    let sliced = Case { split: Split::Slices(3), slice: 2, ..PAGED };
    let even = Case { value_dim: 16, hidden: 0.0, ..PAGED };
    type Mutant = (&'static str, Case, Change);
    let latents = Case { kv_heads: 2, ..LATENTS };
    let written = Case { weights_in_memory: true, ..LATENTS };
    #[rustfmt::skip]
    let mutants: [Mutant; 29] = [
        ("weights of other keys", written, Change::Launch(|l| if l.value("piece_acc").is_some() { force_any(l, "capacity", 128); })),
        ("levels mistaken for sums", written, Change::Launch(|l| if l.value("piece_acc").is_some() && l.value("tile_max").is_some() { swap(l, "tile_max", "tile_sum"); })),
        ("weights of half of the latents", written, Change::Launch(|l| if l.value("q").is_some() { force(l, "head_dim", 256); })),
        ("levels of earlier tiles forgotten", MANY_TILES, Change::Module(forget_levels)),
        ("weights without masks", written, Change::Module(|m| in_pieces(m, |m| reroute_all(m, Select, 2, 1)))),
        ("latents of other columns", latents, Change::Launch(|l| force_any(l, "head_dim", 512))),
        ("half of the values", LATENTS, Change::Launch(|l| if l.value("k").is_some() { force(l, "value_dim", 256); })),
        ("parts of columns added twice", LATENTS, Change::Module(|m| in_pieces(m, |m| repeat(m, Opcode::AddF, 0)))),
        ("no rest of columns", LATENTS, Change::Module(|m| in_pieces(m, |m| repeat(m, Opcode::AddF, 1)))),
        ("latents without masks", LATENTS, Change::Module(|m| in_pieces(m, |m| reroute_all(m, Select, 2, 1)))),
        ("k and v swapped", even, Change::Launch(|l| if l.value("k").is_some() { swap(l, "k", "v"); })),
        ("a page too few", PAGED, Change::Launch(|l| force_any(l, "pages", 14))),
        ("pages of another length", PAGED, Change::Launch(|l| force_any(l, "page_shift", 1))),
        ("pages of another source", PAGED, Change::Launch(|l| force_any(l, "source_pages", 4))),
        ("a source too few", PAGED, Change::Launch(|l| force_any(l, "sources", 3))),
        ("tiles too long", SHORT, Change::Launch(|l| force_any(l, "slice_tiles", 1))),
        ("other runs in the sum", PAGED, Change::Launch(|l| if l.value("o").is_some() { force(l, "run_count", 4); })),
        ("slices as runs", sliced, Change::Launch(|l| if l.value("o").is_some() { force(l, "most_slices", 0); })),
        ("a row too few", CASE, Change::Launch(|l| force_any(l, "rows", 2))),
        ("heads mistaken", CASE, Change::Launch(|l| force_any(l, "kv_heads", 1))),
        ("no soft cap", all, Change::Launch(|l| if l.value("cap_log2").is_some() { scale(l, "cap_log2", 0.0); })),
        ("no slopes", all, Change::Launch(|l| force_any(l, "has_slopes", 0))),
        ("another layout", striped, Change::Launch(|l| force_any(l, "interleave", 32))),
        ("another world", striped, Change::Launch(|l| force_any(l, "world_size", 1))),
        ("scale for e", CASE, Change::Launch(|l| if l.value("scale_log2").is_some() { scale(l, "scale_log2", 0.25); })),
        ("no mask", all, Change::Module(|m| in_pieces(m, |m| reroute_all(m, Select, 2, 1)))),
        ("missing pages seen", missing, Change::Module(|m| in_pieces(m, |m| {
            for id in find(m, MinI).into_iter().filter(|&id| is_wide(m, id)).collect::<Vec<_>>() {
                let op = m.op_mut(id);
                op.operands[1] = op.operands[0];
            }
        }))),
        ("states not weighed", PAGED, Change::Module(|m| in_merge(m, |m| repeat(m, MulF, 2)))),
        ("blind rows have a finite lse", CASE, Change::Module(|m| in_merge(m, |m| {
            let select = *find(m, Select).last().expect("a choice");
            let op = m.op_mut(select);
            op.operands[1] = op.operands[2];
        }))),
    ];
    let mut missed = vec![];
    for (name, case, change) in mutants {
        check(&case, Change::None).unwrap_or_else(|error| panic!("{name} without it: {error}"));
        match check(&case, change) {
            Ok(found) => missed.push((name, found)),
            Err(error) => println!("{name}: {error}"),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}
