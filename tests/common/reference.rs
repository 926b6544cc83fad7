//! Dense attention in float64 on the rounded inputs: the definition, nothing else.

use burst_attention::problem::Problem;

use super::data::{Array, Shard};

/// Results of all ranks in the order of [`Shard::outputs`], each `[rank][element]`.
pub fn dense(problem: &Problem, shards: &[Shard]) -> [Vec<Vec<f64>>; 5] {
    let zeros = |pick: fn(&Shard) -> &Array| -> Vec<Vec<f64>> {
        shards.iter().map(|shard| vec![0.0; pick(shard).values().len()]).collect()
    };
    let mut results =
        [zeros(|s| &s.o), zeros(|s| &s.lse), zeros(|s| &s.dq), zeros(|s| &s.dk), zeros(|s| &s.dv)];
    for batch in 0..problem.batch {
        for head in 0..problem.heads {
            for rank in 0..problem.world_size {
                for row in 0..problem.q_len {
                    query(problem, shards, [batch, row, head], rank, &mut results);
                }
            }
        }
    }
    results
}

/// Everything that one query row contributes.
fn query(
    problem: &Problem,
    shards: &[Shard],
    [batch, row, head]: [usize; 3],
    rank: usize,
    [o, lse, dq, dk, dv]: &mut [Vec<Vec<f64>>; 5],
) {
    let Problem { world_size, q_len: n, heads, kv_heads, head_dim, .. } = *problem;
    let (kv_head, scale) = (head / problem.group_size(), f64::from(problem.softmax_scale));
    let position = |rank, row| problem.layout.position(rank, row, world_size, n);
    let shard = &shards[rank];
    let own = |array: &Array, d| array.at([batch, row, head, d]);
    let other = |array: &Array, key: usize, d| array.at([batch, key, kv_head, d]);
    let dot = |mine: &Array, theirs: &Array, key| -> f64 {
        (0..head_dim).map(|d| own(mine, d) * other(theirs, key, d)).sum()
    };
    let sees = |r: usize, key: usize| !problem.causal || position(r, key) <= position(rank, row);
    let keys: Vec<(usize, usize)> = (0..world_size)
        .flat_map(|r| (0..n).map(move |key| (r, key)))
        .filter(|&(r, key)| sees(r, key))
        .collect();
    let logits: Vec<f64> =
        keys.iter().map(|&(r, key)| scale * dot(&shard.q, &shards[r].k, key)).collect();
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|s| (s - max).exp()).sum();
    let log_sum = max + sum.ln();
    let at = |heads: usize, row: usize, head: usize| ((batch * n + row) * heads + head) * head_dim;
    lse[rank][(batch * n + row) * heads + head] = log_sum;
    let p: Vec<f64> = logits.iter().map(|s| (s - log_sum).exp()).collect();
    let dp: Vec<f64> = keys.iter().map(|&(r, key)| dot(&shard.dout, &shards[r].v, key)).collect();
    let delta: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
    let dlse = shard.dlse.at([batch, row, head, 0]);
    for (index, &(r, key)) in keys.iter().enumerate() {
        let ds = scale * p[index] * (dp[index] - delta + dlse);
        for d in 0..head_dim {
            o[rank][at(heads, row, head) + d] += p[index] * other(&shards[r].v, key, d);
            dq[rank][at(heads, row, head) + d] += ds * other(&shards[r].k, key, d);
            dk[r][at(kv_heads, key, kv_head) + d] += ds * own(&shard.q, d);
            dv[r][at(kv_heads, key, kv_head) + d] += p[index] * own(&shard.dout, d);
        }
    }
}
