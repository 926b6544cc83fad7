use rayon::ThreadPool;

use super::reference::{Inputs, Outputs};
use super::*;
use burst_attention::host::backward::{BackwardTile, backward};
use burst_attention::host::features::TileFeatures;
use burst_attention::host::tile::TileInputs;

/// Returns dq, dk and dv after a tile for each pair of a key range and a query range.
pub fn run(
    isa: Isa,
    pool: &ThreadPool,
    shape: &Shape,
    inputs: &Inputs,
    [lse, delta]: [&HostArray; 2],
    parts: [&[Range<usize>]; 2],
) -> [HostArray; 3] {
    let Shape { batch, queries, keys, kv_heads, dim, v_dim, .. } = *shape;
    // The gradients have three kinds of strides.
    let dq = empty(Dtype::F32, [batch, queries, shape.heads(), dim], 0);
    let dk = empty(Dtype::F32, [batch, keys, kv_heads, dim], 3);
    let dv = HostArray::accumulator(batch, 0..keys, kv_heads, v_dim);
    for (k_step, k_rows) in parts[0].iter().enumerate() {
        for (q_step, q_rows) in parts[1].iter().enumerate() {
            backward(
                isa,
                pool,
                &BackwardTile {
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
                    dout: &inputs.dout,
                    lse,
                    delta,
                    query_grads: &[dq.slice(q_rows.clone())],
                    key_grads: &[dk.slice(k_rows.clone()), dv.clone()],
                    dq_first: k_step == 0,
                    dkv_first: q_step == 0,
                },
            );
        }
    }
    [dq, dk, dv]
}

fn assert_gradients(case: &dyn std::fmt::Debug, got: &[HostArray; 3], expected: &Outputs) {
    let expected = [("dq", &expected.dq), ("dk", &expected.dk), ("dv", &expected.dv)];
    for (got, (name, expected)) in got.iter().zip(expected) {
        assert_close(name, case, got, expected, 1.5e-6);
    }
}

#[test]
fn one_tile_matches_the_reference() {
    let pool = pool(2);
    for shape in shapes() {
        let inputs = Inputs::random(&shape, 1);
        let expected = Outputs::of(&shape, &inputs);
        let (lse, delta) = (expected.lse.rounded(), expected.delta.rounded());
        for isa in Isa::available() {
            let whole: [&[_]; 2] = [&cut(shape.keys, &[]), &cut(shape.queries, &[])];
            let got = run(isa, &pool, &shape, &inputs, [&lse, &delta], whole);
            assert_gradients(&(isa, &shape), &got, &expected);
        }
    }
}

#[test]
fn tiles_add_up() {
    let pool = pool(2);
    for shape in shapes() {
        let inputs = Inputs::random(&shape, 2);
        let expected = Outputs::of(&shape, &inputs);
        let (lse, delta) = (expected.lse.rounded(), expected.delta.rounded());
        let (mut keys, queries) = (cut(shape.keys, &[0.3, 0.31, 0.7]), cut(shape.queries, &[0.4]));
        keys.push(shape.keys..shape.keys);
        for isa in Isa::available() {
            keys.rotate_left(1);
            let got = run(isa, &pool, &shape, &inputs, [&lse, &delta], [&keys, &queries]);
            assert_gradients(&(isa, &shape, &keys), &got, &expected);
        }
    }
}

#[test]
fn error_does_not_grow_with_eight_thousand_rows() {
    for shape in [Shape::new(40, 8000, 64), Shape::new(8000, 40, 64)] {
        let inputs = Inputs::random(&shape, 3);
        let expected = Outputs::of(&shape, &inputs);
        let (lse, delta) = (expected.lse.rounded(), expected.delta.rounded());
        for isa in Isa::available() {
            let whole: [&[_]; 2] = [&cut(shape.keys, &[]), &cut(shape.queries, &[])];
            let got = run(isa, &pool(2), &shape, &inputs, [&lse, &delta], whole);
            assert_gradients(&(isa, &shape), &got, &expected);
        }
    }
}

#[test]
fn rows_without_a_key_have_no_gradient() {
    let shape = Shape::new(90, 90, 32).band((i64::MIN, -10));
    let inputs = Inputs::random(&shape, 4);
    let expected = Outputs::of(&shape, &inputs);
    let (lse, delta) = (expected.lse.rounded(), expected.delta.rounded());
    for row in 0..10 {
        assert_eq!(get(&lse, [0, row, 0, 0]), f64::NEG_INFINITY);
    }
    for isa in Isa::available() {
        let [dq, dk, dv] =
            run(isa, &pool(1), &shape, &inputs, [&lse, &delta], [&cut(90, &[]), &cut(90, &[])]);
        for at in indices(&dq) {
            let unseeing = at[1] < 10;
            assert!(!unseeing || get(&dq, at).to_bits() == 0, "{isa} dq at {at:?}");
            let unseen = at[1] >= 80;
            assert!(!unseen || get(&dk, at).to_bits() == 0, "{isa} dk at {at:?}");
            assert!(!unseen || get(&dv, at).to_bits() == 0, "{isa} dv at {at:?}");
        }
    }
}

#[test]
fn nan_reaches_the_gradients_that_depend_on_it_and_no_other_gradient() {
    for band in [NO_LIMIT, (i64::MIN, 0), (-17, 20)] {
        let shape = Shape::new(150, 150, 24).band(band);
        let expected = Outputs::of(&shape, &Inputs::random(&shape, 5));
        let (lse, delta) = (expected.lse.rounded(), expected.delta.rounded());
        let sees = |i: usize, j: usize| shape.band.allows(i, j);
        for isa in Isa::available() {
            for (row, victim) in [(0, 0), (77, 1), (131, 2), (70, 3), (149, 0), (66, 2)] {
                let inputs = Inputs::random(&shape, 5);
                let array = [&inputs.q, &inputs.k, &inputs.v, &inputs.dout][victim];
                set(array, [0, row, 0, 5], f64::NAN);
                let whole: [&[_]; 2] = [&cut(150, &[]), &cut(150, &[])];
                let [dq, dk, dv] = run(isa, &pool(1), &shape, &inputs, [&lse, &delta], whole);
                for i in 0..150 {
                    let case = format!("{isa} {band:?} input {victim} row {row}: row {i}");
                    // Whether the gradients of query i and key i sum over a pair with the NaN.
                    let of_query = victim == 0 || victim == 3;
                    let query = if of_query { i == row } else { sees(i, row) };
                    let key = |i: usize| {
                        if of_query {
                            sees(row, i)
                        } else {
                            (0..150).any(|q| sees(q, i) && sees(q, row)) && i == row
                        }
                    };
                    check(&dq, &expected.dq, i, query, &case);
                    check(&dk, &expected.dk, i, key(i), &case);
                    // dv does not depend on v.
                    if victim != 2 {
                        check(&dv, &expected.dv, i, key(i), &case);
                    }
                }
            }
        }
    }
}

/// Asserts that element 5 of a row is NaN if `nan`, and otherwise as expected.
fn check(got: &HostArray, expected: &HostArray64, row: usize, nan: bool, case: &str) {
    let value = get(got, [0, row, 0, 5]);
    let expected = expected.get([0, row, 0, 5]);
    assert_eq!(value.is_nan(), nan, "{case}: {value}, expected {expected}");
    assert!(nan || (value - expected).abs() < 1e-5, "{case}: {value}, expected {expected}");
}

#[test]
fn the_number_of_threads_does_not_matter() {
    // These lengths are cut into several cells.
    let shape = Shape::new(1100, 1030, 16).band((i64::MIN, 0));
    let inputs = Inputs::random(&shape, 7);
    let lse = random(Dtype::F32, [1, shape.queries, 1, 1], 8);
    for isa in Isa::available() {
        let results = [1, 3].map(|threads| {
            let whole: [&[_]; 2] = [&cut(shape.keys, &[]), &cut(shape.queries, &[])];
            let got = run(isa, &pool(threads), &shape, &inputs, [&lse, &inputs.dlse], whole);
            got.each_ref().map(bits)
        });
        assert!(results[0] == results[1], "{isa}");
    }
}
