//! Both passes compute the same scores, however large they are.

use super::reference::{Inputs, Outputs};
use super::*;
use burst_attention::host::per_row::delta;

/// Returns inputs whose largest score is `most`. A row gets zeros as cotangents if its largest score
/// leads by too little for one key to take all weight.
fn magnified(shape: &Shape, most: f64) -> Inputs {
    let inputs = Inputs::random(shape, 6);
    let score = |[b, i, h, _]: [usize; 4], j: usize| -> f64 {
        let kv = h / shape.group_size;
        let products =
            (0..shape.dim).map(|d| get(&inputs.q, [b, i, h, d]) * get(&inputs.k, [b, j, kv, d]));
        f64::from(shape.scale()) * products.sum::<f64>()
    };
    let rows = || indices(&inputs.dlse);
    let largest = rows().flat_map(|row| (0..shape.keys).map(move |j| score(row, j).abs()));
    let factor = most / largest.fold(0.0, f64::max);
    for row in rows() {
        let seen = (0..shape.keys).filter(|j| shape.band.allows(row[1], *j));
        let mut scores: Vec<f64> = seen.map(|j| factor * score(row, j)).collect();
        scores.sort_by(f64::total_cmp);
        let leads = match scores.as_slice() {
            [.., second, first] => first - second > f64::max(30.0, 1e-6 * most),
            _ => true,
        };
        set(&inputs.dlse, row, 0.0);
        for d in 0..shape.v_dim {
            let at = [row[0], row[1], row[2], d];
            set(&inputs.dout, at, if leads { get(&inputs.dout, at) } else { 0.0 });
        }
    }
    for at in indices(&inputs.q) {
        set(&inputs.q, at, factor * get(&inputs.q, at));
    }
    inputs
}

#[test]
fn a_key_that_takes_all_weight_gets_all_of_the_cotangent() {
    let (pool, causal) = (pool(2), (i64::MIN, 0));
    let grouped = Shape { group_size: 2, ..Shape::new(70, 150, 40) };
    let ragged = Shape { v_dim: 72, ..Shape::new(140, 140, 128).band(causal) };
    let rounded = Shape { dtype: Dtype::Bf16, ..Shape::new(70, 70, 64).band(causal) };
    for (shape, most) in [(&grouped, 1e4), (&grouped, 1e9), (&ragged, 1e5), (&rounded, 1e7)] {
        let inputs = magnified(shape, most);
        let expected = Outputs::of(shape, &inputs);
        // The passes cut tiles at different rows, so each score lies in another place of its panel.
        let (keys, queries) = (cut(shape.keys, &[0.3, 0.31]), cut(shape.queries, &[0.4]));
        let whole: [&[_]; 2] = [&cut(shape.keys, &[]), &cut(shape.queries, &[])];
        for isa in Isa::available() {
            let (o, lse) = forward::run(isa, &pool, shape, &inputs, &keys, &queries);
            let of_rows = empty(Dtype::F32, [1, shape.queries, shape.heads(), 1], 0);
            delta(isa, &pool, &o, &inputs.dout, &inputs.dlse, &of_rows);
            let statistics = [&lse, &of_rows];
            let [dq, dk, dv] = backward::run(isa, &pool, shape, &inputs, statistics, whole);
            assert_close("dv", &(isa, shape, most), &dv, &expected.dv, 1e-6);
            // Scores have no gradient where one weight is 1 and all other weights are 0.
            for (name, array) in [("dq", &dq), ("dk", &dk)] {
                for at in indices(array) {
                    let x = get(array, at);
                    assert!(x.abs() <= 1e-12 * most, "{isa} {most:e} {name} {x:e} at {at:?}");
                }
            }
        }
    }
}
