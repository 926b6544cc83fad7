//! Work that kernels must leave out: tiles without visible pairs, masks where every pair is
//! visible, rows that are not the launch's.

use burst_attention_kernels::instances::{Element, Instance, Kernel, Target, WIDTHS};
use cutile_ir::bytecode::Opcode::*;

use super::case::{CASE, CAUSAL, Case, Runs};
use super::features::{ONE, SORTED};
use super::modules::{find, innermost_loops, inside, is_wide, masked, masked_loop, of};
use super::problem::{Found, Problem};
use super::world::{Change, KERNELS};
use super::{forward, fused, gradients};

/// A case with one tile of queries and five tiles of keys.
const LEAN_KEYS: Case = Case { lean: true, q_len: 120, kv_len: 600, head_dim: 32, ..CASE };
const GENERAL: Case = Case { segments: Some((ONE, ONE)), soft_cap: 9.0, ..LEAN_KEYS };
/// A case with one tile of keys and ten tiles of queries.
const LEAN_QUERIES: Case = Case { q_len: 600, kv_len: 120, ..LEAN_KEYS };

#[test]
fn keys_that_no_query_sees_are_not_read() {
    let general = [CAUSAL, (200, 260)].map(|band| Case { band, ..GENERAL });
    let bands = [CAUSAL, (i64::MIN, 200), (300, i64::MAX), (140, 145), (200, 260), (700, 900)];
    for case in bands.map(|band| Case { band, ..LEAN_KEYS }).into_iter().chain(general) {
        let problem = Problem::new(case);
        let keys = problem.visited_keys(Kernel::Forward);
        assert!(keys.len() < problem.case.kv_len, "{keys:?} of {case:?}");
        for check in [forward::check, gradients::check_queries] {
            check(&problem, Change::None).unwrap_or_else(|error| panic!("{case:?}: {error}"));
        }
    }
}

#[test]
fn queries_that_see_no_key_are_not_read() {
    let Case { q_len, kv_len, .. } = LEAN_QUERIES;
    let general = Case { band: (-260, -200), q_len, kv_len, ..GENERAL };
    let bands = [(-100, i64::MAX), (i64::MIN, -300), (-145, -140), (-260, -200), (700, 900)];
    let plain = bands.map(|band| Case { band, ..LEAN_QUERIES });
    for case in plain.into_iter().chain([general]) {
        let problem = Problem::new(case);
        let queries = problem.visited_queries(Kernel::KeyGrads);
        assert!(queries.len() < problem.case.q_len, "{queries:?} of {case:?}");
        let found = gradients::check_keys(&problem, Change::None);
        found.unwrap_or_else(|error| panic!("{case:?}: {error}"));
    }
}

/// One document.
const ALONE: Runs = &[(1, 5)];
const AMONG: Runs = &[(200, 1), (100, 5), (340, 9)];

/// Documents of two tiles' rows.
const HALVES: Runs = &[(128, 0), (128, 1)];

#[test]
#[ignore = "takes long: make test-full"]
fn rows_of_other_documents_are_not_read() {
    // Gives each block of rows all other rows that exist.
    let all = Change::Ranges(|module| {
        for id in find(module, AndI).into_iter().take(2) {
            let op = module.op_mut(id);
            op.operands[1] = op.operands[0];
        }
    });
    for element in Element::ALL {
        // Whole blocks of 64 rows: rows beyond the end would count as segment 0.
        let case = Case { lean: true, element, head_dim: 32, ..CASE };
        let keys = Case { q_len: 128, kv_len: 640, segments: Some((ALONE, AMONG)), ..case };
        let queries = Case { q_len: 640, kv_len: 128, segments: Some((AMONG, ALONE)), ..case };
        for (case, check) in [
            (keys, forward::check as fn(&_, _) -> _),
            (keys, gradients::check_queries),
            (queries, gradients::check_keys),
        ] {
            let problem = Problem::new(case);
            check(&problem, Change::None).unwrap_or_else(|error| panic!("{error}"));
            let error = check(&problem, all).expect_err("it reads tiles that are not there");
            assert!(error.contains("never written"), "{error}");
            let full = Problem::new(Case { lean: false, ..case });
            check(&full, all).expect("masked tiles change nothing");
        }
        if element == Element::Bf16 {
            let queries = Problem::new(Case { head_dim: 72, ..queries });
            fused::check(&queries, Change::None).expect("it reads no other tiles");
        }
    }
}

/// A kernel that goes through hidden tiles too, with masks, has right results, but it reads the
/// tiles.
#[test]
fn a_visit_too_many_is_noticed() {
    let from_the_start = Change::Module(|module| {
        let begin = find(module, MaxI)[0];
        let op = module.op_mut(begin);
        op.operands[1] = op.operands[0];
    });
    let keys = Problem::new(Case { band: (200, 260), ..LEAN_KEYS });
    let queries = Problem::new(Case { band: (-260, -200), ..LEAN_QUERIES });
    let full = |problem: &Problem| Problem::new(Case { lean: false, ..problem.case });
    for (problem, check) in [
        (&keys, forward::check as fn(&_, _) -> _),
        (&keys, gradients::check_queries),
        (&queries, gradients::check_keys),
    ] {
        check(&full(problem), from_the_start).expect("masked tiles change nothing");
        let error = check(problem, from_the_start).expect_err("it reads tiles that are not there");
        assert!(error.contains("never written"), "{error}");
    }
}

#[test]
#[ignore = "takes long: make test-full"]
fn tiles_inside_the_band_pay_for_no_mask() {
    pay_for_no_mask(&WIDTHS[..1]);
}

#[test]
#[ignore = "takes long: make test-full"]
fn wider_tiles_inside_the_band_pay_for_no_mask() {
    pay_for_no_mask(&WIDTHS[1..]);
}

/// Checks the loops of all images of some widths, except images with all features, which have a
/// single loop.
fn pay_for_no_mask(widths: &[i32]) {
    for instance in Instance::of_target(Target::Sm90) {
        let is_pass = instance.kernel.has_pairs();
        let is_special = !instance.variant.is_general() && widths.contains(&instance.width);
        if !is_pass || !is_special || instance.element != Element::Bf16 {
            continue;
        }
        let module = KERNELS.module(&instance).expect("kernels compile");
        let (loops, with_mask) = (innermost_loops(&module), masked_loop(&module));
        assert_eq!(loops.len(), 2, "{instance}");
        for inner in loops.into_iter().filter(|&inner| inner != with_mask) {
            for opcode in [Select, CmpI, CmpF, AndI] {
                let mut found = of(&module, inside(&module, inner), opcode);
                found.retain(|&id| is_wide(&module, id));
                assert!(found.is_empty(), "{instance}: {} in the unmasked loop", opcode.name());
            }
        }
        assert_eq!(masked(&module, Select).len(), 1, "{instance}");
    }
}

/// A kernel whose masks hide everything is right only where all tiles lie inside the band.
#[test]
fn tiles_inside_the_band_are_not_masked() {
    let hide_all = Change::Module(|module| {
        let select = masked(module, Select)[0];
        let op = module.op_mut(select);
        op.operands[1] = op.operands[2];
    });
    let whole = Case { q_len: 256, kv_len: 256, heads: 2, head_dim: 16, ..CASE };
    let document = Case { segments: Some((ONE, ONE)), ..whole };
    // Boundaries of documents at boundaries of tiles.
    let documents = Case { segments: Some((HALVES, HALVES)), ..whole };
    let within = Case { segments: Some((SORTED, SORTED)), ..whole };
    type Check = fn(&Problem, Change) -> Result<Found, String>;
    let checks: [(Check, usize); 4] = [
        (forward::check, 16),
        (gradients::check_keys, 16),
        (gradients::check_queries, 16),
        (fused::check, 72),
    ];
    for (check, head_dim) in checks {
        for case in [whole, document, documents] {
            let case = Case { head_dim, ..case };
            check(&Problem::new(case), hide_all).expect("no tile needs a mask");
            check(&Problem::new(Case { band: CAUSAL, ..case }), hide_all).expect_err("some do");
        }
        let within = Problem::new(Case { head_dim, ..within });
        check(&within, hide_all).expect_err("documents meet within tiles");
    }
}
