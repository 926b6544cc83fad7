//! Linear attention of one head, token by token.

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
    /// Decay λ of each token.
    pub decays: Vec<f64>,
}

/// The results of one head.
#[derive(Debug, Clone, PartialEq)]
pub struct Results {
    /// Outputs `[tokens, v_dim]`.
    pub o: Vec<f64>,
    /// The state after the last token, `[k_dim, v_dim]`.
    pub after: Vec<f64>,
    /// Gradient of q.
    pub dq: Vec<f64>,
    /// Gradient of k.
    pub dk: Vec<f64>,
    /// Gradient of v.
    pub dv: Vec<f64>,
    /// Gradient of the natural logarithm of each token's decay.
    pub dlog_decay: Vec<f64>,
    /// Gradient of the state before the first token.
    pub dbefore: Vec<f64>,
}

impl Head {
    /// Computes both passes from the state before the first token and the gradient of the state
    /// after the last one:
    ///
    /// ```text
    /// S_t = λ_t S_(t−1) + k_t v_tᵀ     o_t = q_tᵀ S_t     dq_t = S_t dout_t
    /// D = D_t + q_t dout_tᵀ            dk_t = D v_t       dv_t = Dᵀ k_t
    /// D_(t−1) = λ_t D                  dlog λ_t = Σ S_(t−1) ∘ D_(t−1)
    /// ```
    pub fn recurrence(&self, before: &[f64], dafter: &[f64]) -> Results {
        let Head { dims: [k_dim, v_dim], ref q, ref k, ref v, ref dout, ref decays } = *self;
        let tokens = decays.len();
        let zeros = |dim: usize| vec![0.0; tokens * dim];
        let (mut o, mut dq) = (zeros(v_dim), zeros(k_dim));
        let mut states = vec![before.to_vec()];
        for t in 0..tokens {
            let mut state = states[t].clone();
            for (i, x) in state.iter_mut().enumerate() {
                let (row, column) = (t * k_dim + i / v_dim, t * v_dim + i % v_dim);
                *x = decays[t] * *x + k[row] * v[column];
                o[column] += q[row] * *x;
                dq[row] += *x * dout[column];
            }
            states.push(state);
        }
        let after = states.pop().expect("the state before the first token at least");
        let (mut dk, mut dv, mut dlog_decay) = (zeros(k_dim), zeros(v_dim), zeros(1));
        let mut dbefore = dafter.to_vec();
        for t in (0..tokens).rev() {
            for (i, d) in dbefore.iter_mut().enumerate() {
                let (row, column) = (t * k_dim + i / v_dim, t * v_dim + i % v_dim);
                *d += q[row] * dout[column];
                dk[row] += *d * v[column];
                dv[column] += *d * k[row];
                *d *= decays[t];
                dlog_decay[t] += states[t][i] * *d;
            }
        }
        Results { o, after, dq, dk, dv, dlog_decay, dbefore }
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
