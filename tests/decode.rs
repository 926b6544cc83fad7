//! Attention to a cache on the host agrees with its definition in float64.

mod common;

use std::ops::Range;

use burst_attention::Dtype;
use burst_attention::host::isa::Isa;
use common::cache::{CASE, Case, Data};
use common::recurrence::pool;

/// Largest error of a float32 output, as a part of the largest output, and of lse.
const BOUND: f64 = 3e-6;

/// Largest further error of an output whose weights are rounded to bfloat16, as a part of the mean
/// distance of the values from the output.
///
/// A chunk divides Σ p (1 + δ) v by Σ p (1 + δ), where |δ| ≤ 2⁻⁹. So its error is
/// Σ p δ (v − o) / Σ p (1 + δ), at most 2⁻⁹ times the mean of |v − o| over the chunk, but for a factor
/// 1 + 2⁻⁸. The distances from the outputs of chunks have at most twice the mean of those from the
/// output of all. Chunks and ranks are merged by sums of weights that are not rounded.
const ROUNDED: f64 = 1.0 / 256.0;

/// Whether a call multiplies pairs of bfloat16 elements, and so rounds the weights.
fn in_pairs(isa: Isa, Case { heads, dims, dtype, .. }: Case) -> bool {
    #[cfg(target_arch = "x86_64")]
    let can = isa == Isa::Avx512 && is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    let can = false;
    let whole = dims.iter().all(|dim| dim % 32 == 0);
    can && dtype == Dtype::Bf16 && heads[0] / heads[1] >= 16 && whole
}

/// Asserts that the results are those of the reference, for every instruction set.
fn assert_right(data: &Data) {
    let [outputs, sums, spreads] = data.reference();
    let largest = outputs.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    let pool = pool(2);
    for isa in Isa::available() {
        data.run(isa, &pool);
        let rounded = if in_pairs(isa, data.case) { ROUNDED } else { 0.0 };
        for ((got, want), spread) in data.o.values().iter().zip(&outputs).zip(&spreads) {
            let right = (got - want).abs() <= BOUND * largest + rounded * spread;
            assert!(right, "{got} instead of {want}, {isa}, {:?}", data.case);
        }
        for (got, want) in data.lse.values().iter().zip(&sums) {
            let right = got == want || (got - want).abs() <= BOUND * want.abs().max(1.0);
            assert!(right, "lse {got} instead of {want}, {isa}, {:?}", data.case);
        }
    }
}

fn check(cases: impl IntoIterator<Item = Case>) {
    for (seed, case) in cases.into_iter().enumerate() {
        assert_right(&Data::new(case, seed as u64 + 1));
    }
}

#[test]
fn all_heads_and_dims_agree() {
    let dims = [[1, 1], [16, 16], [24, 40], [64, 128], [100, 20]];
    for heads in [[1, 1], [2, 1], [3, 1], [6, 2], [5, 5], [48, 1], [20, 4]] {
        check(dims.map(|dims| Case { heads, dims, ..CASE }));
    }
}

#[test]
fn all_numbers_of_queries_agree() {
    check((1..=17).map(|len| Case { queries: [3, len], ..CASE }));
}

#[test]
fn all_element_types_agree() {
    for heads in [[1, 1], [4, 2], [16, 1]] {
        for dims in [[32, 64], [48, 16]] {
            let types = [Dtype::F32, Dtype::Bf16, Dtype::F16];
            check(types.map(|dtype| Case { dtype, heads, dims, ..CASE }));
        }
    }
}

/// Few rows read the cache, and many rows read copies. Some rows consist of whole loads.
#[test]
fn values_in_the_first_columns_of_keys_agree() {
    for heads in [[1, 1], [4, 2], [12, 4], [128, 1], [48, 2]] {
        for dims in [[16, 8], [40, 24], [96, 64], [64, 64], [100, 20]] {
            let types = [Dtype::F32, Dtype::Bf16, Dtype::F16];
            let case = Case { values_in_keys: true, queries: [2, 1], heads, dims, ..CASE };
            check(types.map(|dtype| Case { dtype, ..case }));
        }
    }
    let latents = Case { values_in_keys: true, heads: [128, 1], dims: [576, 512], ..CASE };
    check([Dtype::F32, Dtype::Bf16].map(|dtype| Case { dtype, queries: [2, 2], ..latents }));
}

/// Many rows share a head of keys, as those of latents do. Some fill their last vector, and some do
/// not. Pages end within tiles and within pairs of keys.
#[test]
fn many_rows_agree() {
    let types = [Dtype::F32, Dtype::Bf16, Dtype::F16];
    for (heads, dims) in [
        ([16, 1], [32, 32]),
        ([17, 1], [64, 96]),
        ([40, 2], [96, 64]),
        ([33, 1], [160, 32]),
        ([130, 1], [24, 40]),
    ] {
        for (queries, window) in [([3, 1], None), ([3, 5], Some(20))] {
            let pages = [[5, 13], [16, 5], [1, 39]][queries[1] % 3];
            let case = Case { queries, window, heads, dims, pages, ..CASE };
            check(types.map(|dtype| Case { dtype, ..case }));
            let case = Case { soft_cap: 2.0, slopes: true, rank: (1, 2), interleave: 5, ..case };
            check(types.map(|dtype| Case { dtype, ..case }));
        }
    }
}

/// Sources of several chunks, whose partial results are merged.
#[test]
fn long_sources_agree() {
    for (queries, heads) in
        [([2, 1], [4, 2]), ([2, 5], [8, 1]), ([1, 40], [2, 1]), ([2, 1], [16, 1])]
    {
        let case = Case { queries, heads, sources: 2, pages: [64, 12], ..CASE };
        check([Dtype::F32, Dtype::Bf16].map(|dtype| Case { dtype, window: Some(300), ..case }));
        check([Case { rank: (1, 2), interleave: 64, ..case }]);
    }
    // One query in two chunks: the fewest tasks whose results are merged.
    check([Case { queries: [1, 1], sources: 1, pages: [64, 4], ..CASE }]);
}

#[test]
fn every_rank_of_every_layout_agrees() {
    for world_size in 1..=8 {
        for rank in 0..world_size {
            let case = Case { rank: (rank, world_size), slopes: rank % 2 == 1, ..CASE };
            let whole = case.capacity() as i64;
            check([1, 3, 16, whole].map(|interleave| Case { interleave, ..case }));
        }
    }
}

#[test]
fn all_features_agree() {
    let windows = [None, Some(0), Some(1), Some(40), Some(u32::MAX)];
    for (window, soft_cap) in windows.into_iter().flat_map(|w| [0.0, 2.0].map(|cap| (w, cap))) {
        let case = Case { window, soft_cap, queries: [3, 5], rank: (1, 2), ..CASE };
        check([false, true].map(|slopes| Case { slopes, ..case }));
    }
}

/// Every source has several readers with other lengths, as shared prefixes do.
#[test]
fn entries_share_sources() {
    for (len, dtype) in [(1, Dtype::F32), (3, Dtype::F32), (2, Dtype::Bf16)] {
        let case = Case { queries: [40, len], dtype, pages: [16, 24], dims: [32, 32], ..CASE };
        let mut data = Data::new(case, 5);
        data.source = (0..40).map(|entry| entry % 4 - 1).collect();
        assert_right(&data);
        data.starts.fill(case.capacity() as i32);
        assert_right(&data);
    }
    // Of the readers of a source, the first one needs the last chunk alone.
    let case = Case { queries: [3, 1], sources: 1, pages: [16, 24], window: Some(20), ..CASE };
    let mut data = Data::new(case, 5);
    data.source.fill(0);
    data.starts = vec![380, 200, 30];
    data.lengths = vec![384; 3];
    assert_right(&data);
}

/// No integer leads out of bounds: what does not exist is hidden.
#[test]
fn hostile_integers_are_defined() {
    let extremes = [i32::MIN, -1, 0, 1, 7, 80, i32::MAX];
    for (at, value) in extremes.into_iter().enumerate() {
        for field in 0..5 {
            let case = Case { slopes: at % 2 == 0, rank: (1, 3), window: Some(30), ..CASE };
            let mut data = Data::new(case, at as u64 + 1);
            let fields = [
                &mut data.lengths,
                &mut data.starts,
                &mut data.query_lengths,
                &mut data.source,
                &mut data.page_table,
            ];
            fields[field].iter_mut().step_by(2).for_each(|x| *x = value);
            assert_right(&data);
        }
    }
}

/// A call that reads nothing still writes its results.
#[test]
fn empty_caches_agree() {
    let case = Case { pages: [16, 0], ..CASE };
    check([case, Case { sources: 0, ..CASE }, Case { queries: [0, 1], ..CASE }]);
}

/// NaN in rows that no query sees, and in pages that no table names, reaches no result.
#[test]
fn hidden_rows_reach_nothing() {
    for case in [
        CASE,
        Case { heads: [16, 1], queries: [3, 4], dtype: Dtype::Bf16, dims: [32, 32], ..CASE },
        Case { heads: [32, 2], queries: [3, 4], pages: [5, 16], dims: [32, 64], ..CASE },
        Case { heads: [32, 2], dtype: Dtype::Bf16, pages: [5, 16], dims: [32, 64], ..CASE },
        Case { window: Some(9), queries: [3, 4], dims: [20, 20], ..CASE },
        Case { pages: [64, 12], sources: 4, ..CASE },
    ] {
        let mut data = Data::new(case, 9);
        let seen: Vec<Vec<usize>> = (0..case.queries[0])
            .map(|entry| (0..case.queries[1]).flat_map(|t| data.seen(entry, t)).collect())
            .collect();
        let [page, pages] = case.pages;
        for (source, row) in
            (0..case.sources).flat_map(|source| (0..case.capacity()).map(move |row| (source, row)))
        {
            if seen.get(source).is_some_and(|rows| rows.contains(&row)) {
                continue;
            }
            spoil(&mut data, source, row..row + 1, f32::NAN);
        }
        // Table entries of pages without a visible row are never followed.
        for (source, rows) in seen.iter().enumerate() {
            for number in 0..pages {
                if !rows.iter().any(|row| row / page == number) {
                    data.page_table[source * pages + number] = -1;
                }
            }
        }
        assert_right(&data);
    }
}

/// A row that one query sees does not reach a query that does not see it, be it NaN or infinite.
#[test]
fn queries_of_one_task_stay_apart() {
    let small = Case { queries: [1, 4], sources: 1, ..CASE };
    let many = Case { heads: [16, 1], dims: [32, 32], ..small };
    for case in [small, many, Case { dtype: Dtype::Bf16, ..many }] {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let [clean, mut spoilt] = [0, 1].map(|_| Data::new(case, 3));
            spoil(&mut spoilt, 0, case.capacity() - 1..case.capacity(), value);
            for isa in Isa::available() {
                for data in [&clean, &spoilt] {
                    data.run(isa, &pool(1));
                }
                let (want, got) = (clean.o.values(), spoilt.o.values());
                let last = want.len() / 4 * 3;
                assert_eq!(got[..last], want[..last], "{isa}, {value}, {case:?}");
                assert!(got[last..].iter().all(|x| !x.is_finite()), "{isa}, {value}, {case:?}");
            }
        }
    }
}

/// A source that is not finite changes no bit of the results on other sources.
#[test]
fn sources_stay_apart() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let case = Case { heads: [16, 1], dims: [32, 32], dtype, ..CASE };
        for value in [f32::NAN, f32::INFINITY] {
            let [clean, mut spoilt] = [0, 1].map(|_| Data::new(case, 3));
            spoil(&mut spoilt, 0, 0..case.capacity(), value);
            for isa in Isa::available() {
                for data in [&clean, &spoilt] {
                    data.run(isa, &pool(2));
                }
                for entry in 1..case.queries[0] {
                    assert_eq!(spoilt.result(entry), clean.result(entry), "{isa}, {value}");
                }
                assert!(spoilt.o.get(0).is_nan(), "{isa}, {value}");
            }
        }
    }
}

/// Writes `value` over rows of a source's keys and values.
fn spoil(data: &mut Data, source: usize, rows: Range<usize>, value: f32) {
    let [page, pages] = data.case.pages;
    for row in rows {
        let id = data.page_table[source * pages + row / page] as usize;
        let at = id * page + row % page;
        for array in [&mut data.k, &mut data.v] {
            let floats = array.shape[2] * array.shape[3];
            (at * floats..(at + 1) * floats).for_each(|index| array.set(index, value));
        }
    }
}

/// The bits of an entry depend neither on other entries, nor on its slot, its page ids or the
/// number of threads.
#[test]
fn bits_depend_on_the_entry_alone() {
    for (len, dtype, heads) in [
        (1, Dtype::F32, [4, 2]),
        (1, Dtype::Bf16, [8, 2]),
        (3, Dtype::F32, [6, 1]),
        (3, Dtype::F32, [16, 1]),
        (3, Dtype::Bf16, [34, 2]),
    ] {
        let (pages, dims) = ([16, 24], [32, 64]);
        let case = Case { queries: [8, len], heads, dims, dtype, pages, sources: 8, ..CASE };
        for isa in Isa::available() {
            let data = Data::new(case, 11);
            data.run(isa, &pool(1));
            let whole = data.clone();
            data.run(isa, &pool(3));
            assert_eq!(data.o.bits(), whole.o.bits(), "threads, {isa}");

            // The last entry alone, in another slot, with a cache in another order.
            let mut moved = whole.clone();
            moved.relocate(7, 2);
            moved.run(isa, &pool(2));
            assert_eq!(moved.result(2), whole.result(7), "slot and pages, {isa}, {dtype:?}");

            // Entries that all read the source of entry 7, so that many rows share a task.
            let mut shared = whole.clone();
            shared.source.fill(7);
            shared.run(isa, &pool(2));
            assert_eq!(shared.result(7), whole.result(7), "shared, {isa}, {dtype:?}");
        }
    }
}
