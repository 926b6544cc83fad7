//! Layouts, masks and problems against their definitions.

mod common;

use burst_attention::mask::{Band, Coverage};
use burst_attention::problem::Problem;
use burst_attention::schedule::rectangles;
use burst_attention::{Error, Layout};
use common::problem;

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
    for layout in Layout::ALL {
        for (world_size, n, causal) in [1, 2, 5]
            .into_iter()
            .flat_map(|w| [2, 4, 8].map(|n| [(w, n, false), (w, n, true)]))
            .flatten()
        {
            let problem = Problem { layout, causal, ..problem(world_size, n) };
            for (a, b) in (0..world_size).flat_map(|a| (0..world_size).map(move |b| (a, b))) {
                let found = rectangles(&problem, a, b);
                for (i, j) in (0..n).flat_map(|i| (0..n).map(move |j| (i, j))) {
                    let covered = found.iter().filter(|rectangle| {
                        rectangle.queries.contains(&i)
                            && rectangle.keys.contains(&j)
                            && rectangle.band.allows(i, j)
                    });
                    let position = |rank, row| layout.position(rank, row, world_size, n);
                    let allowed = !causal || position(b, j) <= position(a, i);
                    assert_eq!(covered.count(), usize::from(allowed), "{problem:?} {a} {b}");
                }
            }
        }
    }
}

#[test]
fn problems_that_no_kernel_can_do_are_refused_with_the_reason() {
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
        "tokens per rank must be even in the zigzag layout (a shard is two equal chunks), got 5"
    );
    assert_eq!(
        refused(Problem { world_size: 0, ..base() }),
        "world_size must be at least 1, got 0"
    );
    assert_eq!(
        refused(Problem { softmax_scale: f32::NAN, ..base() }),
        "scale must be finite, got NaN"
    );
    let error = "zig-zag".parse::<Layout>().expect_err("misspelt");
    assert!(matches!(error, Error::InvalidProblem { .. }));
    assert_eq!(error.to_string(), "layout must be contiguous, zigzag or striped, got \"zig-zag\"");
}
