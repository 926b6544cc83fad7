//! The reference's results for the shards of all ranks.

use burst_attention::mask::Window;
use burst_attention::problem::Problem;
use burst_attention_reference::{self as reference, Attention, Dense, Dropout, Features, Inputs};

use super::data::{Array, Shard};

/// Returns the results of all ranks in the order of [`Shard::outputs`], each `[rank][element]`. The
/// first rank has the slopes' gradient, summed over all ranks.
pub fn dense(problem: &Problem, shards: &[Shard]) -> Vec<Vec<Vec<f64>>> {
    let whole = |array: fn(&Shard) -> &Array| -> Vec<f32> {
        let arrays = shards.iter().map(array);
        gather(problem, &arrays.collect::<Vec<_>>(), |array, index| array.get(index) as f32)
    };
    let inputs = Inputs {
        q: &whole(|shard| &shard.q),
        k: &whole(|shard| &shard.k),
        v: &whole(|shard| &shard.v),
        dout: &whole(|shard| &shard.dout),
        dlse: &whole(|shard| &shard.dlse),
    };
    let Dense { o, lse, dq, dk, dv, dslopes, .. } =
        reference::dense::<f64>(&attention(problem, shards), &inputs, |o| o);
    let outputs = shards[0].outputs();
    let cut = |values: Vec<f64>, output: usize| -> Vec<Vec<f64>> {
        let cut = |rank| places(problem, rank, outputs[output].1.shape).map(|at| values[at]);
        (0..shards.len()).map(|rank| cut(rank).collect()).collect()
    };
    let mut results = vec![cut(o, 0), cut(lse, 1), cut(dq, 2), cut(dk, 3), cut(dv, 4)];
    if shards[0].extras.dslopes.is_some() {
        let mut ranks = vec![vec![0.0; problem.batch * problem.heads]; shards.len()];
        let rows = problem.q_len * problem.world_size;
        for (at, term) in dslopes.iter().enumerate() {
            ranks[0][at / problem.heads / rows * problem.heads + at % problem.heads] += term;
        }
        results.push(ranks);
    }
    results
}

/// The whole problem, with the arrays of its features.
fn attention(problem: &Problem, shards: &[Shard]) -> Attention {
    let Problem { batch, heads, kv_heads, head_dim, value_dim, .. } = *problem;
    let Window { left, right } = problem.window;
    let first = &shards[0].extras;
    let segments = |array: fn(&Shard) -> &Option<Array>| {
        let arrays = shards.iter().flat_map(array);
        gather(problem, &arrays.collect::<Vec<_>>(), |array, index| array.word(index) as i32)
    };
    let numbers = |array: &Array| {
        (0..batch).map(|entry| [0, 1, 2, 3].map(|i| array.word(4 * entry + i))).collect()
    };
    Attention {
        batch,
        q_len: problem.q_len * problem.world_size,
        kv_len: problem.kv_len * problem.world_size,
        heads,
        kv_heads,
        head_dim,
        value_dim,
        softmax_scale: problem.softmax_scale,
        features: Features {
            band: Features::window(left, right),
            segments: first.q_segments.is_some().then(|| {
                [segments(|shard| &shard.extras.q_segments), segments(|s| &s.extras.k_segments)]
            }),
            soft_cap: problem.features.soft_cap,
            slopes: first
                .slopes
                .as_ref()
                .map(|slopes| slopes.values().into_iter().map(|slope| slope as f32).collect()),
            dropout: (first.dropout.as_ref().zip(problem.features.dropout))
                .map(|(array, rate)| Dropout { rate, numbers: numbers(array) }),
            ..Features::default()
        },
    }
}

/// Returns the array whose shards all ranks have, in the order of the sequence.
fn gather<T: Clone + Default>(
    problem: &Problem,
    arrays: &[&Array],
    element: impl Fn(&Array, usize) -> T,
) -> Vec<T> {
    let len = arrays[0].shape.iter().product::<usize>();
    let mut values = vec![T::default(); arrays.len() * len];
    for (rank, array) in arrays.iter().enumerate() {
        let places = places(problem, rank, array.shape).enumerate();
        places.for_each(|(index, place)| values[place] = element(array, index));
    }
    values
}

/// Returns where each element of a rank's array stands in the order of the sequence.
fn places(
    problem: &Problem,
    rank: usize,
    [batch, len, heads, dim]: [usize; 4],
) -> impl Iterator<Item = usize> {
    let (layout, world_size) = (problem.layout, problem.world_size);
    let rows = (0..batch).flat_map(move |entry| (0..len).map(move |row| (entry, row)));
    rows.flat_map(move |(entry, row)| {
        let position = layout.position(rank, row, world_size, len);
        let start = (entry * world_size * len + position) * heads * dim;
        start..start + heads * dim
    })
}
