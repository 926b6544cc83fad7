use std::ops::Range;

use rayon::ThreadPool;

use super::reference::{Inputs, Outputs};
use super::*;
use burst_attention::host::features::TileFeatures;
use burst_attention::host::forward::{self, ForwardTile, SoftmaxState, forward};
use burst_attention::host::tile::TileInputs;

/// Returns o and lse after a tile for each pair of a key range and a query range.
pub fn run(
    isa: Isa,
    pool: &ThreadPool,
    shape: &Shape,
    inputs: &Inputs,
    k_parts: &[Range<usize>],
    q_parts: &[Range<usize>],
) -> (HostArray, HostArray) {
    let (batch, heads) = (shape.batch, shape.heads());
    let o = empty(shape.dtype, [batch, shape.queries, heads, shape.v_dim], 8);
    let lse = empty(Dtype::F32, [batch, shape.queries, heads, 1], 0);
    for q_rows in q_parts {
        // Like a buffer that travelled here, the state has the rows of the part only.
        let acc = HostArray::accumulator(batch, q_rows.clone(), heads, shape.v_dim);
        let m = HostArray::accumulator(batch, q_rows.clone(), heads, 1);
        let l = HostArray::accumulator(batch, q_rows.clone(), heads, 1);
        for (step, k_rows) in k_parts.iter().enumerate() {
            forward(
                isa,
                pool,
                &ForwardTile {
                    inputs: TileInputs {
                        q: &inputs.q.slice(q_rows.clone()),
                        k: &inputs.k.slice(k_rows.clone()),
                        v: &inputs.v.slice(k_rows.clone()),
                        q_rows: q_rows.clone(),
                        k_rows: k_rows.clone(),
                        band: shape.band,
                        softmax_scale: shape.scale(),
                        soft_cap: shape.soft_cap,
                        features: TileFeatures::default(),
                        pairs: None,
                    },
                    state: Some(SoftmaxState { acc: &acc, m: &m, l: &l }),
                    out: Some(forward::Outputs { o: &o, lse: &lse }),
                    first: step == 0,
                    last: step == k_parts.len() - 1,
                },
            );
        }
    }
    (o, lse)
}

fn tolerance(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 1e-6,
        Dtype::Bf16 => 2f64.powi(-9),
        Dtype::F16 => 2f64.powi(-12),
    }
}

#[test]
fn one_tile_matches_the_reference() {
    let pool = pool(2);
    for shape in shapes() {
        let inputs = Inputs::random(&shape, 1);
        let expected = Outputs::of(&shape, &inputs);
        for isa in Isa::available() {
            let (all_k, all_q) = (cut(shape.keys, &[]), cut(shape.queries, &[]));
            let (o, lse) = run(isa, &pool, &shape, &inputs, &all_k, &all_q);
            assert_close("o", &(isa, &shape), &o, &expected.o, tolerance(shape.dtype));
            assert_close("lse", &(isa, &shape), &lse, &expected.lse, 1e-6);
        }
    }
}

#[test]
fn the_state_carries_over_tiles_in_any_order() {
    let pool = pool(2);
    for shape in shapes() {
        let inputs = Inputs::random(&shape, 2);
        let expected = Outputs::of(&shape, &inputs);
        let mut keys = cut(shape.keys, &[0.2, 0.21, 0.6]);
        let queries = cut(shape.queries, &[0.5]);
        for isa in Isa::available() {
            keys.rotate_left(1);
            let mut parts = keys.clone();
            // The last tile may bring no key at all.
            parts.push(shape.keys..shape.keys);
            let (o, lse) = run(isa, &pool, &shape, &inputs, &parts, &queries);
            assert_close("o", &(isa, &shape, &parts), &o, &expected.o, tolerance(shape.dtype));
            assert_close("lse", &(isa, &shape, &parts), &lse, &expected.lse, 1e-6);
        }
    }
}

#[test]
fn error_does_not_grow_with_eight_thousand_keys() {
    let shape = Shape::new(48, 8000, 64);
    let inputs = Inputs::random(&shape, 3);
    let expected = Outputs::of(&shape, &inputs);
    for isa in Isa::available() {
        let (o, lse) = run(isa, &pool(2), &shape, &inputs, &cut(8000, &[]), &cut(48, &[]));
        assert_close("o", &isa, &o, &expected.o, 1e-6);
        assert_close("lse", &isa, &lse, &expected.lse, 1e-7);
    }
}

#[test]
fn rows_without_a_key_are_zero() {
    let pool = pool(1);
    for isa in Isa::available() {
        // Rows 0 to 9 see nothing, whether the tile has keys or not.
        for keys in [0..90, 0..0] {
            let shape = Shape { keys: 90, ..Shape::new(90, 90, 32) }.band((i64::MIN, -10));
            let inputs = Inputs::random(&shape, 4);
            let (o, lse) =
                run(isa, &pool, &shape, &inputs, std::slice::from_ref(&keys), &cut(90, &[]));
            for at in indices(&o).filter(|at| at[1] < 10) {
                assert_eq!(get(&o, at).to_bits(), 0, "o at {at:?} with {isa}");
                assert_eq!(get(&lse, [at[0], at[1], at[2], 0]), f64::NEG_INFINITY);
            }
        }
    }
}

#[test]
fn nan_and_infinity_reach_the_rows_that_see_them_and_no_other_row() {
    let pool = pool(1);
    let poisons = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
    for band in [NO_LIMIT, (i64::MIN, 0), (-17, 20)] {
        let shape = Shape::new(200, 200, 24).band(band);
        let clean = Inputs::random(&shape, 5);
        for isa in Isa::available() {
            let (o, lse) = run(isa, &pool, &shape, &clean, &cut(200, &[]), &cut(200, &[]));
            for (row, poison) in [(0, 0), (77, 0), (131, 1), (190, 2)] {
                for victim in 0..3 {
                    let inputs = Inputs::random(&shape, 5);
                    let array = [&inputs.q, &inputs.k, &inputs.v][victim];
                    set(array, [0, row, 0, 5], poisons[poison]);
                    let (bad, bad_lse) =
                        run(isa, &pool, &shape, &inputs, &[0..77, 77..200], &cut(200, &[]));
                    let (good, good_lse) = if victim == 2 && poison == 0 {
                        (o.clone(), lse.clone())
                    } else {
                        run(isa, &pool, &shape, &clean, &[0..77, 77..200], &cut(200, &[]))
                    };
                    for i in 0..200 {
                        let sees = if victim == 0 { i == row } else { shape.band.allows(i, row) };
                        let case = format!("{isa} {band:?} row {i}, input {victim} row {row}");
                        let d = 5;
                        let (got, want) = (get(&bad, [0, i, 0, d]), get(&good, [0, i, 0, d]));
                        if !sees {
                            assert!((got - want).abs() < 1e-6, "{case}: {got} instead of {want}");
                            let at = [0, i, 0, 0];
                            assert!(
                                (get(&bad_lse, at) - get(&good_lse, at)).abs() < 1e-5,
                                "{case}"
                            );
                        } else if poison == 0 {
                            assert!(got.is_nan(), "{case}: NaN became {got}");
                            assert!(victim == 2 || get(&bad_lse, [0, i, 0, 0]).is_nan(), "{case}");
                        } else if victim == 2 {
                            assert!(!got.is_finite(), "{case}: infinity became {got}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn huge_logits_neither_overflow_nor_vanish() {
    let shape = Shape::new(40, 300, 64).band((i64::MIN, 200));
    let inputs = Inputs::random(&shape, 6);
    for at in indices(&inputs.q) {
        set(&inputs.q, at, get(&inputs.q, at) * 1e4);
    }
    let expected = Outputs::of(&shape, &inputs);
    for isa in Isa::available() {
        let (o, lse) = run(isa, &pool(1), &shape, &inputs, &[0..150, 150..300], &cut(40, &[]));
        assert_close("o", &isa, &o, &expected.o, 1e-2);
        assert_close("lse", &isa, &lse, &expected.lse, 1e-6);
    }
}

#[test]
fn the_number_of_threads_does_not_matter() {
    let shape = Shape { batch: 2, kv_heads: 2, ..Shape::new(300, 300, 40) }.band((i64::MIN, 0));
    let inputs = Inputs::random(&shape, 7);
    for isa in Isa::available() {
        let results = [1, 3].map(|threads| {
            let (o, lse) =
                run(isa, &pool(threads), &shape, &inputs, &[0..100, 100..300], &cut(300, &[]));
            (bits(&o), bits(&lse))
        });
        assert!(results[0] == results[1], "{isa}");
    }
}
