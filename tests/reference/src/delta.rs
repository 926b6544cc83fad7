//! The delta rule of one head, token by token.

use crate::linear::Head;

/// The inputs of one head: those of linear attention, and the rates β.
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaHead {
    /// Queries, keys, values, gradient of o, and decays.
    pub head: Head,
    /// Rate β of each token.
    pub rates: Vec<f64>,
}

/// The results of one head.
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaResults {
    /// Outputs `[tokens, v_dim]`.
    pub o: Vec<f64>,
    /// Corrected values `[tokens, v_dim]`.
    pub u: Vec<f64>,
    /// The state after the last token, `[k_dim, v_dim]`.
    pub after: Vec<f64>,
    /// Gradient of q.
    pub dq: Vec<f64>,
    /// Gradient of k.
    pub dk: Vec<f64>,
    /// The part of dk that comes from the states that keys add to.
    pub dk_of_states: Vec<f64>,
    /// Gradient of v.
    pub dv: Vec<f64>,
    /// Gradient of v, if all rates were 1.
    pub dy: Vec<f64>,
    /// Gradient of the natural logarithm of each token's decay.
    pub dlog_decay: Vec<f64>,
    /// Gradient of the rates.
    pub dbeta: Vec<f64>,
    /// Gradient of the state before the first token.
    pub dbefore: Vec<f64>,
}

impl DeltaHead {
    /// Computes both passes from the state before the first token and the gradient of the state
    /// after the last one:
    ///
    /// ```text
    /// R = λ_t S_(t−1)     u_t = β_t (v_t − Rᵀ k_t)    S_t = R + k_t u_tᵀ    o_t = S_tᵀ q_t
    /// D = D_t + q_t dout_tᵀ     dq_t = S_t dout_t     dy_t = Dᵀ k_t     dv_t = β_t dy_t
    /// dk_t = D u_t − R dv_t     dβ_t = dy_t · (v_t − Rᵀ k_t)
    /// D' = D − k_t dv_tᵀ        D_(t−1) = λ_t D'      dlog λ_t = Σ R ∘ D'
    /// ```
    pub fn recurrence(&self, before: &[f64], dafter: &[f64]) -> DeltaResults {
        let Head { dims: [k_dim, v_dim], ref q, ref k, ref v, ref dout, ref decays } = self.head;
        let tokens = decays.len();
        let zeros = |dim: usize| vec![0.0; tokens * dim];
        let (mut o, mut u, mut missing) = (zeros(v_dim), zeros(v_dim), v.clone());
        let mut dq = zeros(k_dim);
        let mut decayed = vec![];
        let mut after = before.to_vec();
        let place = |t: usize, i: usize| (t * k_dim + i / v_dim, t * v_dim + i % v_dim);
        for t in 0..tokens {
            let kept: Vec<f64> = after.iter().map(|x| decays[t] * x).collect();
            for (i, x) in kept.iter().enumerate() {
                let (row, column) = place(t, i);
                missing[column] -= k[row] * x;
            }
            for column in t * v_dim..(t + 1) * v_dim {
                u[column] = self.rates[t] * missing[column];
            }
            for (i, x) in after.iter_mut().enumerate() {
                let (row, column) = place(t, i);
                *x = kept[i] + k[row] * u[column];
                o[column] += q[row] * *x;
                dq[row] += *x * dout[column];
            }
            decayed.push(kept);
        }
        let (mut dk, mut dk_of_states) = (zeros(k_dim), zeros(k_dim));
        let (mut dv, mut dy) = (zeros(v_dim), zeros(v_dim));
        let (mut dlog_decay, mut dbeta) = (zeros(1), zeros(1));
        let mut dbefore = dafter.to_vec();
        for t in (0..tokens).rev() {
            for (i, d) in dbefore.iter_mut().enumerate() {
                let (row, column) = place(t, i);
                *d += q[row] * dout[column];
                dk_of_states[row] += *d * u[column];
                dy[column] += *d * k[row];
            }
            for column in t * v_dim..(t + 1) * v_dim {
                dv[column] = self.rates[t] * dy[column];
                dbeta[t] += dy[column] * missing[column];
            }
            for row in t * k_dim..(t + 1) * k_dim {
                dk[row] = dk_of_states[row];
            }
            for (i, d) in dbefore.iter_mut().enumerate() {
                let (row, column) = place(t, i);
                dk[row] -= decayed[t][i] * dv[column];
                *d -= k[row] * dv[column];
                dlog_decay[t] += decayed[t][i] * *d;
                *d *= decays[t];
            }
        }
        DeltaResults { o, u, after, dq, dk, dk_of_states, dv, dy, dlog_decay, dbeta, dbefore }
    }
}
