//! Cases that take the branches and loops of decode every way.

use burst_attention_kernels::launch::Split;

use super::case::Case;
use super::{CASE, LATENTS, MANY, MANY_TILES, PAGED, SHORT, check_all};
use crate::coverage::Group;

/// More pages than a block asks for at once, and more pieces than it adds at once.
const MANY_PAGES: Case =
    Case { lengths: &[16_448], source_pages: 257, kv_heads: 1, split: Split::Runs(300), ..PAGED };

/// Returns a case with all features, in slices.
fn with_features(case: Case) -> Case {
    let split = Split::Slices(5);
    Case { window: Some(70), soft_cap: 2.0, slopes: true, split, ..case }
}

/// Returns a case in which all pages are one piece.
fn in_one_piece(case: Case) -> Case {
    Case { split: Split::Runs(1), ..case }
}

#[test]
fn branches_and_loops_go_every_way() {
    let short = Case { page_rows: 8, lengths: &[2056], ..MANY_PAGES };
    let many =
        Case { lengths: &[16_448; 2], starts: &[16_444; 2], entries: 2, queries: 4, ..MANY_PAGES };
    Group::Decode.assert_reached(|| {
        check_all(&[CASE, PAGED, SHORT, MANY, in_one_piece(Case { window: Some(70), ..MANY })]);
        check_all(&[PAGED, SHORT, MANY].map(with_features));
        check_all(&[MANY_PAGES, short, many]);
        check_all(&[MANY_PAGES, short, many].map(in_one_piece));
        for page in 0..4 {
            let missing = Some((0, page, -1));
            check_all(&[Case { missing, ..PAGED }, Case { missing, queries: 3, ..SHORT }]);
        }
    });
}

#[test]
#[ignore = "takes long: make test-full"]
fn branches_and_loops_of_latents_go_every_way() {
    let small = Case { lengths: &[70, 0], page_rows: 128, queries: 1, group: 3, ..LATENTS };
    let paged = Case { page_rows: 64, source_pages: 3, spare: 2, ..LATENTS };
    // Weights come from twice as many pieces.
    let pages = Case { lengths: &[4112], page_rows: 8, source_pages: 514, ..LATENTS };
    let scored = Case { soft_cap: 2.0, slopes: true, ..paged };
    let dims = [(40, 24), (288, 256), (320, 264), (512, 512)];
    Group::Latents.assert_reached(|| {
        for weights_in_memory in [false, true] {
            let of = |case| Case { weights_in_memory, ..case };
            let missing = Case { missing: Some((0, 1, -1)), kv_heads: 2, ..paged };
            let cut = Case { split: Split::Runs(300), ..paged };
            let mut cases = vec![LATENTS, paged, scored, with_features(scored), missing, cut];
            cases.extend([MANY_TILES, in_one_piece(pages)]);
            cases.extend(dims.map(|(head_dim, value_dim)| Case { head_dim, value_dim, ..small }));
            check_all(&cases.into_iter().map(of).collect::<Vec<_>>());
        }
    });
}
