use super::reference::{Inputs, Outputs};
use super::*;
use burst_attention::host::per_row::{accumulate, cast, delta};

#[test]
fn delta_matches_the_reference() {
    let pool = pool(2);
    for shape in shapes() {
        let inputs = Inputs::random(&shape, 1);
        let o = random(shape.dtype, [shape.batch, shape.queries, shape.heads(), shape.v_dim], 9);
        let mut expected = Outputs::of(&shape, &inputs).delta;
        for at in indices(&inputs.dlse) {
            let [b, row, head, _] = at;
            let products = (0..shape.v_dim)
                .map(|d| get(&o, [b, row, head, d]) * get(&inputs.dout, [b, row, head, d]));
            *expected.at(at) = products.sum::<f64>() - get(&inputs.dlse, at);
        }
        for isa in Isa::available() {
            let got = empty(Dtype::F32, expected.shape, 1);
            delta(isa, &pool, &o, &inputs.dout, &inputs.dlse, &got);
            assert_close("delta", &(isa, &shape), &got, &expected, 1e-6);
        }
    }
}

#[test]
fn accumulate_adds_the_given_rows_only() {
    let shape = [2, 150, 3, 24];
    let (target, arrived) = (random(Dtype::F32, shape, 1), random(Dtype::F32, shape, 2));
    let before = random(Dtype::F32, shape, 1);
    let rows = 17..140;
    accumulate(&pool(2), &target, &arrived.slice(rows.clone()), &rows);
    for at in indices(&target) {
        let term = if rows.contains(&at[1]) { get(&arrived, at) } else { 0.0 };
        let expected = (get(&before, at) as f32 + term as f32) as f64;
        assert_eq!(get(&target, at), expected, "at {at:?}");
    }
}

#[test]
fn cast_rounds_to_nearest_even() {
    let source = HostArray::accumulator(2, 0..100, 3, 40);
    let mut numbers = Random(1);
    for at in indices(&source) {
        set(&source, at, numbers.normal() * 2f64.powf(40.0 * (numbers.next() - 0.5)));
    }
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        let (target, expected) =
            (empty(dtype, [2, 100, 3, 40], 0), empty(dtype, [2, 100, 3, 40], 0));
        for at in indices(&target) {
            set(&expected, at, get(&source, at));
        }
        for isa in Isa::available() {
            cast(isa, &pool(2), &source, &target);
            for at in indices(&target) {
                assert_eq!(get(&target, at), get(&expected, at), "{isa}, {dtype} at {at:?}");
            }
        }
    }
}
