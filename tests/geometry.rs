//! Layouts, masks and problems against their definitions.

mod common;

use burst_attention::layout::StridedRange;
use burst_attention::mask::{Band, Coverage, Span};
use burst_attention::problem::{Features, Problem};
use burst_attention::schedule::{QUERY_GRAIN, rectangles};
use burst_attention::{Error, Layout, Window};
use common::{problem, windowed, windows};

#[test]
fn every_layout_holds_every_position_once() {
    for layout in Layout::ALL {
        for world_size in 1..=9 {
            for n in [2, 4, 6, 10] {
                let ranks = 0..world_size;
                let all = ranks.flat_map(|rank| (0..n).map(move |local| (rank, local)));
                let mut positions: Vec<usize> =
                    all.map(|(rank, local)| layout.position(rank, local, world_size, n)).collect();
                positions.sort_unstable();
                assert!(positions.into_iter().eq(0..world_size * n), "{layout} {world_size} {n}");
            }
        }
    }
}

#[test]
fn layouts_place_tokens_as_documented() {
    let shard = |layout: Layout, rank| -> Vec<usize> {
        (0..4).map(|local| layout.position(rank, local, 2, 4)).collect()
    };
    assert_eq!(shard(Layout::Contiguous, 1), [4, 5, 6, 7]);
    assert_eq!(shard(Layout::Zigzag, 0), [0, 1, 6, 7]);
    assert_eq!(shard(Layout::Zigzag, 1), [2, 3, 4, 5]);
    assert_eq!(shard(Layout::Striped, 1), [1, 3, 5, 7]);
}

#[test]
fn a_band_agrees_with_its_definition_on_every_small_rectangle() {
    let limits = [i64::MIN, -4, -1, 0, 1, 3, i64::MAX];
    for band in limits.iter().flat_map(|&lower| limits.map(|upper| Band { lower, upper })) {
        for (q_start, q_end) in [(0, 0), (0, 1), (0, 5), (2, 5), (3, 9)] {
            for (k_start, k_end) in [(0, 0), (0, 1), (0, 4), (1, 6), (5, 8)] {
                let (queries, keys) = (q_start..q_end, k_start..k_end);
                let allowed = |i: usize, j: usize| {
                    let diagonal = j as i64 - i as i64;
                    band.lower <= diagonal && diagonal <= band.upper
                };
                let total = queries.len() * keys.len();
                let pairs: usize =
                    queries.clone().map(|i| keys.clone().filter(|&j| allowed(i, j)).count()).sum();
                let coverage = match pairs {
                    0 => Coverage::Empty,
                    some if some == total => Coverage::Full,
                    _ => Coverage::Partial,
                };
                assert_eq!(
                    band.coverage(&queries, &keys),
                    coverage,
                    "{band:?} {queries:?} {keys:?}"
                );
                assert_eq!(band.pairs(&queries, &keys), pairs);
                let seeing = queries.clone().filter(|&i| keys.clone().any(|j| allowed(i, j)));
                let seen = keys.clone().filter(|&j| queries.clone().any(|i| allowed(i, j)));
                let (q_rows, k_rows) = band.trim(&queries, &keys);
                assert!(q_rows.eq(seeing), "{band:?} trims {queries:?} against {keys:?}");
                assert!(k_rows.eq(seen), "{band:?} trims {keys:?} against {queries:?}");
                for i in queries.clone() {
                    let seen: Vec<usize> = keys.clone().filter(|&j| allowed(i, j)).collect();
                    assert!(band.keys_of(i, &keys).eq(seen), "{band:?} keys of {i}");
                }
                for j in keys.clone() {
                    let seen: Vec<usize> = queries.clone().filter(|&i| allowed(i, j)).collect();
                    assert!(band.queries_of(j, &queries).eq(seen), "{band:?} queries of {j}");
                }
            }
        }
    }
}

#[test]
fn rectangles_cover_exactly_the_allowed_pairs_of_two_ranks() {
    let tokens = [(1, 1), (2, 2), (4, 4), (8, 8), (4, 6), (6, 4), (2, 8), (8, 2), (10, 14)];
    for problem in windowed([1, 2, 3, 5], &tokens, &windows()) {
        let Problem { layout, window, world_size, q_len, kv_len, .. } = problem;
        let rectangles = rectangles(&problem);
        for (a, b) in (0..world_size).flat_map(|a| (0..world_size).map(move |b| (a, b))) {
            let query = |row| layout.position(a, row, world_size, q_len);
            let key = |row| layout.position(b, row, world_size, kv_len);
            let allowed = |i: usize, j: usize| window.allows(query(i), key(j));
            let found = &rectangles[a * world_size + b];
            for (i, j) in (0..q_len).flat_map(|i| (0..kv_len).map(move |j| (i, j))) {
                let covered = found.iter().filter(|rectangle| {
                    rectangle.queries.contains(&i)
                        && rectangle.keys.contains(&j)
                        && rectangle.band.allows(i, j)
                });
                let expected = usize::from(allowed(i, j));
                assert_eq!(covered.count(), expected, "{problem:?} {a} {b}");
            }
            if layout == Layout::Striped {
                continue;
            }
            for rectangle in found {
                let sees = |i: usize| rectangle.keys.clone().any(|j| allowed(i, j));
                let is_seen = |j: usize| rectangle.queries.clone().any(|i| allowed(i, j));
                let mut keys = rectangle.keys.clone();
                assert!(keys.all(is_seen), "{problem:?} {a} {b}: {rectangle:?}");
                let mut covered = Vec::new();
                for range in layout.strided_ranges(a, world_size, q_len) {
                    for grain in range.rows.clone().step_by(QUERY_GRAIN) {
                        let rows = grain..range.rows.end.min(grain + QUERY_GRAIN);
                        if rectangle.queries.contains(&grain) && rows.clone().any(sees) {
                            covered.extend(rows);
                        }
                    }
                }
                assert!(rectangle.queries.clone().eq(covered), "{problem:?} {a}: {rectangle:?}");
            }
        }
    }
}

#[test]
fn a_window_beyond_every_sequence_is_no_window() {
    let wide = Window { left: Some(i64::MAX), right: Some(i64::MAX) };
    for layout in Layout::ALL {
        let ranges = |rank| layout.strided_ranges(rank, 3, 4);
        for (queries, keys) in ranges(0).into_iter().zip(ranges(2)) {
            for (queries, keys) in [(&queries, &keys), (&keys, &queries)] {
                let band = Band::between(wide, queries, keys);
                assert_eq!(band.coverage(&queries.rows, &keys.rows), Coverage::Full, "{layout}");
            }
        }
    }
}

/// All sequences of at most three segments from −1 to 2.
fn segments() -> Vec<Vec<i32>> {
    let mut all: Vec<Vec<i32>> = vec![vec![]];
    for length in 0..3 {
        let longest: Vec<_> = all.iter().filter(|ids| ids.len() == length).cloned().collect();
        for ids in longest {
            all.extend((-1..=2).map(|id| [ids.as_slice(), &[id]].concat()));
        }
    }
    all
}

/// The coverage of a matrix of allowed pairs.
fn coverage_of(pairs: impl IntoIterator<Item = bool>) -> Coverage {
    let pairs: Vec<bool> = pairs.into_iter().collect();
    match pairs.iter().filter(|allowed| **allowed).count() {
        0 => Coverage::Empty,
        some if some == pairs.len() => Coverage::Full,
        _ => Coverage::Partial,
    }
}

#[test]
fn the_coverage_of_segments_and_windows_together_is_true_or_partial() {
    let (segments, windows) = (segments(), windows());
    for (queries, keys) in segments.iter().flat_map(|a| segments.iter().map(move |b| (a, b))) {
        let pairs = || (0..queries.len()).flat_map(|i| (0..keys.len()).map(move |j| (i, j)));
        let same = |(i, j): (usize, usize)| queries[i] == keys[j] && queries[i] >= 0;
        let spans = [queries, keys].map(|ids| Span::of(ids.iter().copied()));
        let by_segment = spans[0].coverage(spans[1]);
        assert_eq!(by_segment, spans[1].coverage(spans[0]));
        // Keys start up to three positions before or after the queries.
        for (&window, ahead) in windows.iter().flat_map(|w| (0..7).map(move |ahead| (w, ahead))) {
            let range = |start, len| StridedRange { rows: 0..len, start, stride: 1 };
            let (q_range, k_range) = (range(3, queries.len()), range(ahead, keys.len()));
            let by_window =
                Band::between(window, &q_range, &k_range).coverage(&q_range.rows, &k_range.rows);
            let near = |(i, j)| window.allows(q_range.position(i), k_range.position(j));
            assert_eq!(by_window, coverage_of(pairs().map(near)));
            let truth = coverage_of(pairs().map(|pair| same(pair) && near(pair)));
            let found = by_segment.and(by_window);
            assert_eq!(found, by_window.and(by_segment));
            assert!(
                found == truth || found == Coverage::Partial,
                "{queries:?} {keys:?} {window:?} {ahead}: {found:?}"
            );
        }
        let truth = coverage_of(pairs().map(same));
        let single = spans.iter().all(|span| span.min == span.max);
        let apart = spans[0].max < spans[1].min || spans[1].max < spans[0].min;
        let known = single || apart;
        assert!(by_segment == truth || !known, "{queries:?} {keys:?}: {by_segment:?}");
    }
}

#[test]
fn problems_that_no_kernel_can_compute_are_refused_with_the_reason() {
    let refused = |problem: Problem| problem.validate().expect_err("invalid").to_string();
    let base = || problem(2, 4);
    assert_eq!(
        refused(Problem { head_dim: 20, ..base() }),
        "head_dim must be a multiple of 8 from 8 to 256, got 20"
    );
    assert_eq!(
        refused(Problem { kv_heads: 3, ..base() }),
        "query heads must be a multiple of key/value heads (3), got 4"
    );
    assert_eq!(
        refused(Problem { layout: Layout::Zigzag, q_len: 5, kv_len: 5, ..base() }),
        "queries per rank must be even in the zigzag layout (a shard is two equal chunks), got 5"
    );
    assert_eq!(
        refused(Problem { world_size: 0, ..base() }),
        "world_size must be at least 1, got 0"
    );
    assert_eq!(
        refused(Problem { softmax_scale: f32::NAN, ..base() }),
        "scale must be finite, got NaN"
    );
    for (cap, got) in [(0.0, "0e0"), (-1.0, "-1e0"), (1e-40, "1e-40"), (f32::INFINITY, "inf")] {
        assert_eq!(
            refused(Problem {
                features: Features { soft_cap: Some(cap), ..Features::default() },
                ..base()
            }),
            format!("soft cap must be from 1e-30 to 1e30 (0 or nothing for no cap), got {got}")
        );
    }
    let error = "zig-zag".parse::<Layout>().expect_err("misspelt");
    assert!(matches!(error, Error::InvalidProblem { .. }));
    assert_eq!(error.to_string(), "layout must be contiguous, zigzag or striped, got \"zig-zag\"");
}
