//! Dense attention in float64 on the rounded inputs: the definition, nothing else.

use burst_attention::problem::Problem;

use super::data::{Array, FIRST, Shard};

/// Results of all ranks in the order of [`Shard::outputs`], each `[rank][element]`; of the slopes'
/// gradient the sum over ranks is with the first.
pub fn dense(problem: &Problem, shards: &[Shard]) -> Vec<Vec<Vec<f64>>> {
    let zeros = |array: &Array| vec![0.0; array.values().len()];
    let outputs = shards[0].outputs().len();
    let mut results: Vec<Vec<Vec<f64>>> = (0..outputs)
        .map(|output| shards.iter().map(|shard| zeros(shard.outputs()[output].1)).collect())
        .collect();
    for batch in 0..problem.batch {
        for head in 0..problem.heads {
            for rank in 0..problem.world_size {
                for row in 0..problem.q_len {
                    Query { problem, shards, batch, row, head, rank }.add(&mut results);
                }
            }
        }
    }
    results
}

/// One query row.
struct Query<'a> {
    problem: &'a Problem,
    shards: &'a [Shard],
    batch: usize,
    row: usize,
    head: usize,
    rank: usize,
}

/// One key that a query sees.
struct Seen {
    rank: usize,
    row: usize,
    /// The score as it goes into the softmax, and its derivative by scale · q·k.
    score: (f64, f64),
    /// Key position − query position.
    distance: f64,
    /// Factor of its weight.
    kept: f64,
}

impl Query<'_> {
    /// Everything that the row contributes.
    fn add(&self, results: &mut [Vec<Vec<f64>>]) {
        let Query { problem, shards, batch, row, head, rank } = *self;
        let Problem { q_len, kv_len, heads, kv_heads, head_dim, value_dim, .. } = *problem;
        let (kv_head, scale) = (head / problem.group_size(), f64::from(problem.softmax_scale));
        let shard = &shards[rank];
        let seen = self.seen();
        let max = seen.iter().map(|key| key.score.0).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = seen.iter().map(|key| (key.score.0 - max).exp()).sum();
        let lse = if seen.is_empty() { f64::NEG_INFINITY } else { max + sum.ln() };
        results[1][rank][(batch * q_len + row) * heads + head] = lse;
        let at = |row: usize, dim: usize| ((batch * q_len + row) * heads + head) * dim;
        let key_at = |row: usize, dim: usize| ((batch * kv_len + row) * kv_heads + kv_head) * dim;
        let value = |key: &Seen, d| shards[key.rank].v.at([batch, key.row, kv_head, d]);
        let dout = |d| shard.dout.at([batch, row, head, d]);
        let dp = |key: &Seen| (0..value_dim).map(|d| dout(d) * value(key, d)).sum::<f64>();
        let p = |key: &Seen| (key.score.0 - lse).exp();
        let delta: f64 = seen.iter().map(|key| p(key) * key.kept * dp(key)).sum();
        let dlse = shard.dlse.at([batch, row, head, 0]);
        for key in &seen {
            let weight = p(key) * key.kept;
            let ds = p(key) * (key.kept * dp(key) - delta + dlse);
            for d in 0..value_dim {
                results[0][rank][at(row, value_dim) + d] += weight * value(key, d);
                results[4][key.rank][key_at(key.row, value_dim) + d] += weight * dout(d);
            }
            if let Some(dslopes) = results.get_mut(5) {
                dslopes[0][batch * heads + head] += ds * key.distance;
            }
            let ds = scale * ds * key.score.1;
            for d in 0..head_dim {
                let k = shards[key.rank].k.at([batch, key.row, kv_head, d]);
                results[2][rank][at(row, head_dim) + d] += ds * k;
                let q = shard.q.at([batch, row, head, d]);
                results[3][key.rank][key_at(key.row, head_dim) + d] += ds * q;
            }
        }
    }

    fn seen(&self) -> Vec<Seen> {
        let Problem { world_size, kv_len, .. } = *self.problem;
        let keys = (0..world_size).flat_map(|rank| (0..kv_len).map(move |row| (rank, row)));
        keys.filter_map(|(rank, row)| self.key(rank, row)).collect()
    }

    /// What the row has to do with one key, if it sees it.
    fn key(&self, rank: usize, row: usize) -> Option<Seen> {
        let Problem { layout, world_size, q_len, kv_len, features, .. } = *self.problem;
        let own = &self.shards[self.rank];
        let query_position = layout.position(self.rank, self.row, world_size, q_len);
        let key_position = layout.position(rank, row, world_size, kv_len);
        let extras = (&own.extras, &self.shards[rank].extras);
        if let (Some(q), Some(k)) = (&extras.0.q_segments, &extras.1.k_segments) {
            let query = q.word(self.batch * q_len + self.row) as i32;
            if query < 0 || query != k.word(self.batch * kv_len + row) as i32 {
                return None;
            }
        }
        if !self.problem.window.allows(query_position, key_position) {
            return None;
        }
        let distance = key_position as f64 - query_position as f64;
        let (mut score, derivative) = self.capped(rank, row);
        if let Some(slopes) = &own.extras.slopes {
            score += slopes.at([self.batch, 0, self.head, 0]) * distance;
        }
        let kept = match (&own.extras.dropout, features.dropout) {
            (Some(numbers), Some(rate)) => {
                let word = random_word(
                    [numbers.word(4 * self.batch), numbers.word(4 * self.batch + 1)],
                    [key_position as u32, query_position as u32],
                    [FIRST[0] + self.head as u32, FIRST[1] + self.batch as u32],
                );
                let keeps = f64::from(word) >= (f64::from(rate) * 2f64.powi(32)).round();
                if keeps { 1.0 / (1.0 - f64::from(rate)) } else { 0.0 }
            }
            _ => 1.0,
        };
        Some(Seen { rank, row, score: (score, derivative), distance, kept })
    }

    fn capped(&self, rank: usize, row: usize) -> (f64, f64) {
        let Query { problem, shards, batch, head, .. } = *self;
        let kv_head = head / problem.group_size();
        let product = |d| {
            let k = shards[rank].k.at([batch, row, kv_head, d]);
            shards[self.rank].q.at([batch, self.row, head, d]) * k
        };
        let dot: f64 = (0..problem.head_dim).map(product).sum();
        let s = f64::from(problem.softmax_scale) * dot;
        match problem.features.soft_cap.map(f64::from) {
            Some(cap) => (cap * (s / cap).tanh(), 1.0 / (s / cap).cosh().powi(2)),
            None => (s, 1.0),
        }
    }
}

/// Philox4x32-10, from its definition.
fn random_word(key: [u32; 2], [key_position, query]: [u32; 2], [head, entry]: [u32; 2]) -> u32 {
    let mut counter = [key_position / 4, query, head, entry];
    for round in 0..10u32 {
        let product = |multiplier: u64, word: u32| {
            let product = u128::from(multiplier) * u128::from(word);
            ((product >> 32) as u32, product as u32)
        };
        let ((high_0, low_0), (high_2, low_2)) =
            (product(0xD2511F53, counter[0]), product(0xCD9E8D57, counter[2]));
        let bumped = |n: usize, step: u32| key[n].wrapping_add(step.wrapping_mul(round));
        counter = [
            high_2 ^ counter[1] ^ bumped(0, 0x9E3779B9),
            low_2,
            high_0 ^ counter[3] ^ bumped(1, 0xBB67AE85),
            low_0,
        ];
    }
    counter[key_position as usize % 4]
}
