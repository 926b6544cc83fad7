//! Attention to a cache on the host agrees with its definition in float64.

mod common;

use burst_attention::Dtype;
use burst_attention::host::isa::Isa;
use common::cache::{CASE, Case, Data};
use common::recurrence::pool;

/// Largest error of a float32 output, as a part of the largest output, and of lse.
const BOUND: f64 = 3e-6;

/// Asserts that the results are those of the reference, for every instruction set.
fn assert_right(data: &Data) {
    let [outputs, sums] = data.reference();
    let largest = outputs.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    for isa in Isa::available() {
        data.run(isa, &pool(2));
        for (got, want) in data.o.values().iter().zip(&outputs) {
            let error = (got - want).abs();
            assert!(error <= BOUND * largest, "{got} instead of {want}, {isa}, {:?}", data.case);
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
    for heads in [[1, 1], [2, 1], [3, 1], [6, 2], [5, 5], [8, 1], [48, 1], [40, 8]] {
        check([[1, 1], [16, 16], [24, 40], [64, 128], [100, 20]].map(|dims| Case {
            heads,
            dims,
            ..CASE
        }));
    }
}

#[test]
fn all_numbers_of_queries_agree() {
    check((1..=17).map(|len| Case { queries: [3, len], ..CASE }));
}

#[test]
fn all_element_types_agree() {
    for heads in [[1, 1], [4, 2], [16, 1]] {
        check([Dtype::F32, Dtype::Bf16, Dtype::F16].map(|dtype| Case { dtype, heads, ..CASE }));
    }
}
