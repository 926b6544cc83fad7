//! Features: segments, a soft cap, slopes, dropout, and values with other columns than keys.

use burst_attention_kernels::instances::Element::{self, *};

use super::case::{CASE, CAUSAL, Case, NONE, Runs};
use super::problem::Problem;
use super::values::check;

/// One segment for all rows.
pub const ONE: Runs = &[(1, 3)];
/// Documents that begin within tiles, one of them a single row and one of them in two parts.
pub const DOCUMENTS: Runs = &[(45, 7), (1, 2), (83, 0), (37, 3), (64, 7)];
/// Documents in order, some longer than tiles and one of a single row.
pub const SORTED: Runs = &[(70, 0), (1, 1), (60, 2), (90, 3), (400, 4)];
/// Many short documents.
pub const SHORT: Runs = &[
    (7, 0),
    (19, 1),
    (11, 2),
    (5, 3),
    (23, 4),
    (13, 5),
    (17, 6),
    (9, 7),
    (2, 8),
    (21, 9),
    (6, 10),
    (15, 11),
    (31, 12),
    (8, 13),
    (3, 14),
    (12, 15),
    (27, 16),
    (10, 17),
    (4, 18),
    (22, 19),
    (400, 20),
];
/// One long document between two other documents.
pub const LONG: Runs = &[(3, 0), (280, 1), (400, 2)];
/// Few rows with segments, then padding.
pub const PADDED: Runs = &[(61, 0), (30, 1), (400, -1)];
/// Segments of keys that lack some of the documents and have other documents.
pub const OTHERS: Runs = &[(50, 3), (29, -1), (70, 9), (31, i32::MIN), (40, 7), (7, i32::MAX)];
/// Negative segments only.
const NOBODY: Runs = &[(33, -1), (20, -7)];

const SEGMENTED: Case = Case { segments: Some((DOCUMENTS, DOCUMENTS)), ..CASE };
const BIASED: Case = Case { slopes: true, ..CASE };
/// A case with two tiles of each side, two entries, and groups of two heads.
const WIDE: Case =
    Case { q_len: 200, kv_len: 180, batch: 2, heads: 2, head_dim: 24, soft_cap: 4.0, ..SEGMENTED };

/// Checks segments under a causal mask at some widths.
fn cut_tiles(dims: [(usize, Element); 2]) {
    let causal = Case { q_len: 190, kv_len: 170, heads: 2, band: CAUSAL, ..SEGMENTED };
    check(&dims.map(|(head_dim, element)| Case { head_dim, element, ..causal }));
}

#[test]
#[ignore = "takes long: make test-full"]
fn segments_that_cut_tiles() {
    cut_tiles([(64, Bf16), (256, F16)]);
}

#[test]
#[ignore = "takes long: make test-full"]
fn segments_that_cut_tiles_of_other_widths() {
    cut_tiles([(96, F16), (128, Bf16)]);
}

#[test]
#[ignore = "takes long: make test-full"]
fn one_segment_and_no_cap_are_the_plain_kernels() {
    let plain = Case { q_len: 190, kv_len: 170, heads: 2, band: (-100, 30), ..CASE };
    check(&[plain, Case { segments: Some((ONE, ONE)), ..plain }]);
}

#[test]
fn padding_and_segments_that_one_side_lacks() {
    let pairs = [
        (PADDED, PADDED),
        (DOCUMENTS, OTHERS),
        (OTHERS, OTHERS),
        (DOCUMENTS, NOBODY),
        (NOBODY, NOBODY),
    ];
    let case = Case { soft_cap: 0.0, ..WIDE };
    check(&pairs.map(|segments| Case { segments: Some(segments), ..case }));
    for band in [CAUSAL, (-40, 10)] {
        check(&[Case { segments: Some((DOCUMENTS, OTHERS)), band, ..case }]);
    }
}

const UNEVEN: Case =
    Case { q_len: 150, kv_len: 140, heads: 4, kv_heads: 2, band: (-90, 20), ..CASE };

/// Checks columns of keys and of values.
fn columns(dims: &[(usize, usize, Element)]) {
    for &(head_dim, value_dim, element) in dims {
        check(&[Case { head_dim, value_dim: Some(value_dim), element, ..UNEVEN }]);
    }
}

#[test]
#[ignore = "takes long: make test-full"]
fn values_of_many_columns() {
    columns(&[(64, 128, Bf16), (8, 256, F16), (96, 64, Bf16), (192, 128, Bf16), (40, 8, F16)]);
    check(&[
        Case { batch: 2, head_dim: 16, value_dim: Some(40), soft_cap: 3.0, ..UNEVEN },
        Case { batch: 2, margin: 0, head_dim: 32, value_dim: Some(16), ..UNEVEN },
    ]);
}

#[test]
#[ignore = "takes long: make test-full"]
fn values_of_other_columns_than_keys() {
    let case = UNEVEN;
    columns(&[(24, 16, F16)]);
    check(&[Case { batch: 2, segments: Some((DOCUMENTS, OTHERS)), value_dim: Some(24), ..case }]);
    // A launch over one entry gets a stride of its own, which depends on the columns.
    check(&[Case { batch: 2, limit: 150_000, value_dim: Some(72), band: NONE, ..case }]);
}

#[test]
#[ignore = "takes long: make test-full"]
fn scores_with_a_bias_by_distance() {
    let case = Case { q_len: 150, kv_len: 170, heads: 4, kv_heads: 2, head_dim: 24, ..BIASED };
    check(&[
        Case { batch: 2, band: CAUSAL, ..case },
        Case { positions: (37, 0, 1), element: F16, ..case },
        Case { positions: (0, 500, 8), band: (-90, 20), head_dim: 72, ..case },
        Case { positions: (2, 1000, 3), q_len: 31, head_dim: 160, ..case },
        Case { batch: 3, segments: Some((DOCUMENTS, OTHERS)), soft_cap: 5.0, ..case },
        Case { batch: 2, value_dim: Some(40), margin: 0, ..case },
    ]);
}

/// Dropout draws by head, by entry and by positions, also by positions beyond the integers of
/// float32.
#[test]
#[ignore = "takes long: make test-full"]
fn weights_that_are_dropped() {
    let case = Case { q_len: 150, kv_len: 170, heads: 4, kv_heads: 2, head_dim: 24, ..CASE };
    let case = Case { dropout: Some(0.3), ..case };
    check(&[
        Case { batch: 2, band: CAUSAL, ..case },
        Case { positions: (37, 2, 1), element: F16, dropout: Some(0.9), ..case },
        Case { positions: (5, 1 << 30, 8), band: (-90, 20), head_dim: 72, ..case },
        Case { positions: (1 << 30, 3, 3), q_len: 31, head_dim: 160, dropout: Some(0.0), ..case },
        Case { batch: 3, segments: Some((DOCUMENTS, OTHERS)), soft_cap: 5.0, ..case },
        Case { batch: 2, slopes: true, value_dim: Some(40), margin: 0, ..case },
    ]);
}

#[test]
#[ignore = "takes long: make test-full"]
fn dropped_pieces_count_positions_from_their_own_rows() {
    const ORDER: &[(usize, usize)] = &[(132, 200), (0, 60), (60, 132)];
    let case = Case { q_len: 200, kv_len: 200, heads: 2, dropout: Some(0.5), ..CASE };
    check(&[
        Case { steps: ORDER, band: CAUSAL, ..case },
        Case { steps: ORDER, positions: (9, 1, 2), finished: false, element: F16, ..case },
        Case { batch: 2, q_len: 300, kv_len: 300, kv_heads: 2, limit: 70_000, ..case },
    ]);
}

#[test]
#[ignore = "takes long: make test-full"]
fn biased_pieces_count_positions_from_their_own_rows() {
    const ORDER: &[(usize, usize)] = &[(132, 200), (0, 60), (60, 132)];
    let case = Case { q_len: 200, kv_len: 200, heads: 2, positions: (60, 0, 2), ..BIASED };
    check(&[
        Case { steps: ORDER, band: CAUSAL, ..case },
        Case { steps: ORDER, finished: false, element: F16, ..case },
        Case { batch: 2, q_len: 300, kv_len: 300, kv_heads: 2, limit: 70_000, ..case },
    ]);
}

/// Rows beyond the end read as segment 0, which is also the segment of the last rows here.
#[test]
#[ignore = "takes long: make test-full"]
fn general_lengths() {
    const ENDING: Runs = &[(30, 5), (400, 0)];
    let lengths = [(1, 1), (1, 140), (140, 1), (129, 257), (31, 150), (5, 0), (0, 5)];
    check(&lengths.map(|(q_len, kv_len)| Case {
        q_len,
        kv_len,
        head_dim: 32,
        segments: Some((ENDING, ENDING)),
        soft_cap: 2.0,
        ..CASE
    }));
    // Biases beyond the end are exponents that float32 has no power of 2 for.
    for positions in [(20_000, 0, 1), (0, 20_000, 1)] {
        check(&lengths.map(|(q_len, kv_len)| Case {
            q_len,
            kv_len,
            heads: 2,
            positions,
            ..BIASED
        }));
    }
}

const LARGE: Case = Case { magnitude: 30.0, band: CAUSAL, ..CASE };

#[test]
fn soft_caps_of_large_logits() {
    assert!(Problem::new(LARGE).exact.largest > 100.0);
    check(&[1.0, 20.0, 50.0].map(|soft_cap| Case { soft_cap, ..LARGE }));
}

#[test]
#[ignore = "takes long: make test-full"]
fn soft_caps_of_many_sizes() {
    let large = LARGE;
    check(&[
        Case { soft_cap: 1e-3, ..CASE },
        // The cap's error is proportional to the cap, and still below the rounding of f16.
        Case { soft_cap: 1000.0, element: F16, ..CASE },
        Case { soft_cap: 20.0, element: F16, magnitude: 1.0, ..large },
        Case { soft_cap: 20.0, magnitude: 2500.0, ..large },
        Case { soft_cap: 30.0, softmax_scale: Some(1.0), head_dim: 128, ..large },
    ]);
}

#[test]
fn general_steps_carry_their_state() {
    const ORDERS: [&[(usize, usize)]; 2] =
        [&[(0, 76), (76, 200)], &[(132, 200), (0, 60), (60, 132)]];
    let long = Case { q_len: 200, kv_len: 200, batch: 1, ..WIDE };
    check(&[
        Case { steps: ORDERS[0], ..long },
        Case { steps: ORDERS[1], band: CAUSAL, element: F16, ..long },
        Case { steps: ORDERS[1], segments: Some((PADDED, PADDED)), finished: false, ..long },
        Case { steps: ORDERS[0], value_dim: Some(40), ..long },
        Case { steps: ORDERS[1], value_dim: Some(16), finished: false, ..long },
    ]);
}

#[test]
#[ignore = "takes long: make test-full"]
fn large_general_problems_are_cut() {
    let cut = Case {
        batch: 2,
        q_len: 300,
        kv_len: 300,
        heads: 2,
        kv_heads: 2,
        limit: 70_000,
        soft_cap: 2.0,
        ..SEGMENTED
    };
    let launches = check(&[Case { band: (-130, 20), ..cut }]);
    assert!(launches[0][..3].iter().all(|&launches| launches > cut.batch), "{launches:?}");
    // Several entries fit the limit.
    check(&[Case { batch: 3, q_len: 40, kv_len: 40, limit: 60_000, band: NONE, ..cut }]);
}
