//! Work that is not done: tiles that nobody sees, masks where everything is seen, rows that a
//! launch has nothing to do with.

use burst_attention_kernels::instances::{Element, Instance, Kernel, Target, WIDTHS};
use cutile_ir::bytecode::Opcode::*;

use super::case::{CASE, CAUSAL, Case};
use super::general::ONE;
use super::modules::{find, inside, is_wide, masked, of};
use super::problem::Problem;
use super::world::{Change, KERNELS};
use super::{forward, gradients};

/// One tile of queries, five of keys.
const LEAN_KEYS: Case = Case { lean: true, q_len: 120, kv_len: 600, head_dim: 32, ..CASE };
const GENERAL: Case = Case { segments: Some((ONE, ONE)), soft_cap: 9.0, ..LEAN_KEYS };
/// One tile of keys, ten of queries.
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

/// A kernel that goes through hidden tiles too, with masks: right, but it reads them.
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
fn tiles_inside_the_band_pay_for_no_mask() {
    for kernel in [Kernel::Forward, Kernel::KeyGrads, Kernel::QueryGrads] {
        for width in WIDTHS {
            let instance = Instance { kernel, element: Element::Bf16, width, target: Target::Sm90 };
            let module = KERNELS.module(&instance).expect("kernels compile");
            let loops = find(&module, For);
            assert_eq!(loops.len(), 2, "{instance}");
            for opcode in [Select, CmpI, CmpF, Iota, AndI] {
                let mut found = of(&module, inside(&module, loops[0]), opcode);
                found.retain(|&id| is_wide(&module, id));
                assert!(found.is_empty(), "{instance}: {} in the unmasked loop", opcode.name());
            }
            assert_eq!(masked(&module, Select).len(), 1, "{instance}");
        }
    }
}

/// A kernel whose masks hide everything: right only where all tiles lie inside the band.
#[test]
fn tiles_inside_the_band_are_not_masked() {
    let hide_all = Change::Module(|module| {
        let select = masked(module, Select)[0];
        let op = module.op_mut(select);
        op.operands[1] = op.operands[2];
    });
    let whole = Case { q_len: 256, kv_len: 256, heads: 2, head_dim: 16, ..CASE };
    for check in [forward::check, gradients::check_keys, gradients::check_queries] {
        check(&Problem::new(whole), hide_all).expect("no tile needs a mask");
        check(&Problem::new(Case { band: CAUSAL, ..whole }), hide_all).expect_err("some do");
    }
}
