//! Linear attention of one head, also with the delta rule, token by token.

use std::ops::Range;

/// The inputs of one head, in float64.
#[derive(Debug, Clone, PartialEq)]
pub struct Head {
    /// Columns of keys and of values.
    pub dims: [usize; 2],
    /// Queries `[tokens, k_dim]`.
    pub q: Vec<f64>,
    /// Keys `[tokens, k_dim]`.
    pub k: Vec<f64>,
    /// Values `[tokens, v_dim]`.
    pub v: Vec<f64>,
    /// Gradient of o, `[tokens, v_dim]`.
    pub dout: Vec<f64>,
    /// Decay λ of each token, or of each token and each column of keys.
    pub decays: Vec<f64>,
    /// β of each token, which makes the rule the delta rule.
    pub beta: Option<Vec<f64>>,
}

/// The results of one head.
#[derive(Debug, Clone, PartialEq)]
pub struct Results {
    /// Outputs `[tokens, v_dim]`.
    pub o: Vec<f64>,
    /// Values u that tokens write, `[tokens, v_dim]`.
    pub u: Vec<f64>,
    /// The state after the last token, `[k_dim, v_dim]`.
    pub after: Vec<f64>,
    /// Gradient of q.
    pub dq: Vec<f64>,
    /// Gradient of k.
    pub dk: Vec<f64>,
    /// The part of dk that comes from the states that keys add to, D u.
    pub dk_of_states: Vec<f64>,
    /// Gradient of v.
    pub dv: Vec<f64>,
    /// Gradient of u.
    pub du: Vec<f64>,
    /// Gradient of the natural logarithm of each decay.
    pub dlog_decay: Vec<f64>,
    /// Gradient of β; zeros without the delta rule.
    pub dbeta: Vec<f64>,
    /// Gradient of the state before the first token.
    pub dbefore: Vec<f64>,
}

impl Head {
    /// Computes both passes from the state before the first token and the gradient of the state
    /// after the last one, with the values u = v, or u = β (v − Fᵀ k) with the delta rule:
    ///
    /// ```text
    /// F = λ_t ∘ S_(t−1)      S_t = F + k_t u_tᵀ     o_t = q_tᵀ S_t     dq_t = S_t dout_t
    /// D = D_t + q_t dout_tᵀ  dk_t = D u_t           du_t = Dᵀ k_t      dv_t = du_t, or β du_t
    /// dF = D                 D_(t−1) = λ_t ∘ dF     dlog λ_t = F ∘ dF, summed
    /// delta rule: dF = D − k_t dv_tᵀ;  dk_t −= F dv_t;  dβ_t = du_t · (v − Fᵀ k)
    /// ```
    pub fn recurrence(&self, before: &[f64], dafter: &[f64]) -> Results {
        let Head { dims: [k_dim, v_dim], ref q, ref dout, .. } = *self;
        let tokens = q.len() / k_dim;
        let zeros = |dim: usize| vec![0.0; tokens * dim];
        let (mut o, mut written, mut dq) = (zeros(v_dim), vec![], zeros(k_dim));
        let mut states = vec![before.to_vec()];
        for t in 0..tokens {
            let (mut state, k) = (self.faded(t, &states[t]), self.key(t));
            let (_, u) = self.written(t, &state);
            for (i, x) in state.iter_mut().enumerate() {
                let (row, column) = (t * k_dim + i / v_dim, t * v_dim + i % v_dim);
                *x += k[i / v_dim] * u[i % v_dim];
                o[column] += q[row] * *x;
                dq[row] += *x * dout[column];
            }
            written.extend(u);
            states.push(state);
        }
        let after = states.pop().expect("the state before the first token at least");
        let mut results = Results {
            o,
            u: written,
            after,
            dq,
            dk: zeros(k_dim),
            dk_of_states: zeros(k_dim),
            dv: zeros(v_dim),
            du: zeros(v_dim),
            dlog_decay: vec![0.0; self.decays.len()],
            dbeta: zeros(1),
            dbefore: dafter.to_vec(),
        };
        for t in (0..tokens).rev() {
            self.token_gradients(t, &states[t], &mut results);
        }
        results
    }

    /// Computes the gradients of a token from the state before it. `results.dbefore` holds the
    /// gradient of the state after the token, and then of the state before it.
    fn token_gradients(&self, t: usize, before: &[f64], results: &mut Results) {
        let Head { dims: [k_dim, v_dim], ref q, ref dout, ref beta, .. } = *self;
        let (faded, k) = (self.faded(t, before), self.key(t));
        let (error, u) = self.written(t, &faded);
        let Results { dk, dk_of_states, dv, du, dlog_decay, dbeta, dbefore, .. } = results;
        let du = &mut du[t * v_dim..][..v_dim];
        for (i, d) in dbefore.iter_mut().enumerate() {
            let (row, column) = (i / v_dim, i % v_dim);
            *d += q[t * k_dim + row] * dout[t * v_dim + column];
            dk_of_states[t * k_dim + row] += *d * u[column];
            du[column] += *d * k[row];
        }
        let rate = beta.as_ref().map_or(1.0, |beta| beta[t]);
        let dv = &mut dv[t * v_dim..][..v_dim];
        dv.iter_mut().zip(&*du).for_each(|(dv, du)| *dv = rate * du);
        let of_keys = t * k_dim..(t + 1) * k_dim;
        dk[of_keys.clone()].copy_from_slice(&dk_of_states[of_keys]);
        dbeta[t] = du.iter().zip(&error).map(|(du, error)| du * error).sum();
        for (i, d) in dbefore.iter_mut().enumerate() {
            let (row, column) = (i / v_dim, i % v_dim);
            if beta.is_some() {
                *d -= k[row] * dv[column];
                dk[t * k_dim + row] -= faded[i] * dv[column];
            }
            let decay = self.decay(t, row);
            dlog_decay[decay] += faded[i] * *d;
            *d *= self.decays[decay];
        }
    }

    /// Returns the place of the decay of a token in a row of the state.
    fn decay(&self, t: usize, row: usize) -> usize {
        let tokens = self.q.len() / self.dims[0];
        let each = self.decays.len() / tokens;
        t * each + row % each
    }

    /// Returns the state before a token with the token's decay.
    fn faded(&self, t: usize, state: &[f64]) -> Vec<f64> {
        let row = |i| i / self.dims[1];
        let fade = |(i, x): (usize, &f64)| self.decays[self.decay(t, row(i))] * x;
        state.iter().enumerate().map(fade).collect()
    }

    /// Returns the key of a token.
    fn key(&self, t: usize) -> &[f64] {
        &self.k[t * self.dims[0]..][..self.dims[0]]
    }

    /// Returns v − Fᵀ k of a token, and the value that it writes.
    fn written(&self, t: usize, faded: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let v_dim = self.dims[1];
        let v = self.v[t * v_dim..][..v_dim].to_vec();
        let Some(beta) = &self.beta else { return (vec![0.0; v_dim], v) };
        let mut error = v;
        for (i, x) in faded.iter().enumerate() {
            error[i % v_dim] -= x * self.key(t)[i / v_dim];
        }
        let written = error.iter().map(|error| beta[t] * error).collect();
        (error, written)
    }
}

/// Returns some rows of one head of an array `[batch, rows, heads, dim]`.
pub fn rows_of<T: Copy + Into<f64>>(
    array: &[T],
    [rows, heads, dim]: [usize; 3],
    (entry, head): (usize, usize),
    range: Range<usize>,
) -> Vec<f64> {
    let row = |row: usize| &array[((entry * rows + row) * heads + head) * dim..][..dim];
    range.flat_map(row).map(|&x| x.into()).collect()
}

/// Adds to some rows of one head of an array `[batch, rows, heads, dim]`.
pub fn add_rows(
    array: &mut [f64],
    [rows, heads, dim]: [usize; 3],
    (entry, head): (usize, usize),
    range: Range<usize>,
    terms: &[f64],
) {
    for (row, terms) in range.zip(terms.chunks(dim)) {
        let sums = &mut array[((entry * rows + row) * heads + head) * dim..][..dim];
        sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term);
    }
}
