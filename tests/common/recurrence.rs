//! Linear attention's arrays, and its numbers token by token in float64.

use std::ops::Range;

use burst_attention::Dtype;
use burst_attention::host::array::HostArray;
use burst_attention::host::isa::Isa;
use burst_attention::host::linear::{BackwardIo, ForwardIo, backward, forward};
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::data::{Array, Random};

pub const NAMES: [&str; 7] = ["o", "after", "dq", "dk", "dv", "dlog_decay", "dbefore"];

/// Natural logs of the decays.
#[derive(Debug, Clone, Copy)]
pub enum Logs {
    /// Of one decay for all tokens.
    Of(f64),
    /// From decays that leave nothing after a few tokens to some that hardly decay.
    Random,
    /// As `Random`, and one token in so many has this one.
    Sometimes(usize, f32),
}

#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub batch: usize,
    pub tokens: usize,
    pub heads: [usize; 2],
    pub dims: [usize; 2],
    pub dtype: Dtype,
    pub logs: Logs,
}

pub const CASE: Case = Case {
    batch: 2,
    tokens: 150,
    heads: [4, 2],
    dims: [24, 40],
    dtype: Dtype::F32,
    logs: Logs::Random,
};

/// All arrays of both passes. States are `[batch, heads, k_dim, v_dim]`.
pub struct Data {
    pub case: Case,
    pub q: Array,
    pub k: Array,
    pub v: Array,
    pub logs: Array,
    pub before: Array,
    pub dout: Array,
    pub dafter: Array,
    /// As [`NAMES`].
    pub results: [Array; 7],
}

impl Data {
    pub fn new(case: Case) -> Data {
        let Case { batch, tokens, heads: [heads, kv_heads], dims: [k_dim, v_dim], .. } = case;
        let mut random = Random::new(tokens as u64);
        let mut array = |dtype, shape| Array::random(&mut random, dtype, shape);
        let (per_token, state) = ([batch, tokens, heads, 1], [batch, heads, k_dim, v_dim]);
        let rows = |heads, dim| [batch, tokens, heads, dim];
        let mut logs = array(Dtype::F32, per_token);
        for index in 0..batch * tokens * heads {
            let spread = -(3.0 * logs.get(index) - 2.0).exp();
            let rare = |every| (index / heads * 5 + index % heads * 3) % every == every - 1;
            logs.set(
                index,
                match case.logs {
                    Logs::Of(decay) => decay.ln() as f32,
                    Logs::Sometimes(every, log) if rare(every) => log,
                    _ => spread as f32,
                },
            );
        }
        let zeros = Array::zeros;
        Data {
            case,
            q: array(case.dtype, rows(heads, k_dim)),
            k: array(case.dtype, rows(kv_heads, k_dim)),
            v: array(case.dtype, rows(kv_heads, v_dim)),
            before: array(Dtype::F32, state),
            dout: array(case.dtype, rows(heads, v_dim)),
            dafter: array(Dtype::F32, state),
            logs,
            results: [
                zeros(case.dtype, rows(heads, v_dim)),
                zeros(Dtype::F32, state),
                zeros(case.dtype, rows(heads, k_dim)),
                zeros(case.dtype, rows(kv_heads, k_dim)),
                zeros(case.dtype, rows(kv_heads, v_dim)),
                zeros(Dtype::F32, per_token),
                zeros(Dtype::F32, state),
            ],
        }
    }

    /// Both passes over these tokens, with the states and their gradients at their ends.
    pub fn pass(&self, device: (Isa, &ThreadPool), tokens: Range<usize>, states: [&Array; 4]) {
        let [o, _, dq, dk, dv, dlogs, _] = &self.results;
        let rows = |array: &Array| {
            let len = tokens.len();
            HostArray { rows: 0..len, ..array.view().slice(tokens.clone()) }
        };
        let [before, after, dafter, dbefore] = states.map(state);
        let (q, k, v, log_decay) = (rows(&self.q), rows(&self.k), rows(&self.v), rows(&self.logs));
        forward(
            device,
            &ForwardIo {
                q: q.clone(),
                k: k.clone(),
                v: v.clone(),
                log_decay: log_decay.clone(),
                before: before.clone(),
                o: rows(o),
                after,
            },
        );
        backward(
            device,
            &BackwardIo {
                q,
                k,
                v,
                log_decay,
                before,
                dout: rows(&self.dout),
                dafter,
                dq: rows(dq),
                dk: rows(dk),
                dv: rows(dv),
                dlog_decay: rows(dlogs),
                dbefore,
            },
        );
    }

    /// Both passes over all tokens.
    pub fn run(&self, device: (Isa, &ThreadPool)) {
        let [_, after, .., dbefore] = &self.results;
        let states = [&self.before, after, &self.dafter, dbefore];
        self.pass(device, 0..self.case.tokens, states);
    }

    /// The same in two calls, from the first tokens to the last and back.
    pub fn run_halves(&self, device: (Isa, &ThreadPool), at: usize) {
        let [_, after, .., dbefore] = &self.results;
        let [between, dbetween, nothing] = [(); 3].map(|()| Array::zeros(Dtype::F32, after.shape));
        let tokens = self.case.tokens;
        // The gradient in the middle is there after the second call, so the first is made again.
        self.pass(device, 0..at, [&self.before, &between, &nothing, dbefore]);
        self.pass(device, at..tokens, [&between, after, &self.dafter, &dbetween]);
        self.pass(device, 0..at, [&self.before, &between, &dbetween, dbefore]);
    }
}

pub fn state(array: &Array) -> HostArray {
    let [batch, heads, k_dim, v_dim] = array.shape;
    let (row_stride, head_stride) = (v_dim, k_dim * v_dim);
    let view = HostArray::jax(array.view().ptr, Dtype::F32, [batch, k_dim, heads, v_dim]);
    HostArray { row_stride, head_stride, ..view }
}

pub fn pool(threads: usize) -> ThreadPool {
    ThreadPoolBuilder::new().num_threads(threads).build().expect("threads")
}

/// What [`NAMES`] says, by the definition:
///
/// ```text
/// S_t = λ_t S_(t−1) + k_t v_tᵀ;  o_t = q_tᵀ S_t;  D_(t−1) = λ_t (D_t + q_t dout_tᵀ)
/// ```
pub fn recurrence(data: &Data) -> [Vec<f64>; 7] {
    let Case { batch, tokens, heads: [heads, kv_heads], dims: [k_dim, v_dim], .. } = data.case;
    let mut results = data.results.each_ref().map(|array| vec![0.0; array.values().len()]);
    let [o, after, dq, dk, dv, dlogs, dbefore] = &mut results;
    let [q, k, v, logs, dout] =
        [&data.q, &data.k, &data.v, &data.logs, &data.dout].map(Array::values);
    for (entry, head) in (0..batch).flat_map(|entry| (0..heads).map(move |head| (entry, head))) {
        let at = |t: usize| (entry * tokens + t) * heads + head;
        let kv_at = |t: usize| (entry * tokens + t) * kv_heads + head * kv_heads / heads;
        let whole = (entry * heads + head) * k_dim * v_dim..;
        let mut state: Vec<f64> = data.before.values()[whole.clone()][..k_dim * v_dim].to_vec();
        let mut states = vec![];
        for t in 0..tokens {
            states.push(state.clone());
            let decay = logs[at(t)].exp();
            for (i, x) in state.iter_mut().enumerate() {
                let (row, column) = (i / v_dim, i % v_dim);
                *x = decay * *x + k[kv_at(t) * k_dim + row] * v[kv_at(t) * v_dim + column];
                o[at(t) * v_dim + column] += q[at(t) * k_dim + row] * *x;
                dq[at(t) * k_dim + row] += *x * dout[at(t) * v_dim + column];
            }
        }
        after[whole.clone()][..k_dim * v_dim].copy_from_slice(&state);
        let mut d: Vec<f64> = data.dafter.values()[whole.clone()][..k_dim * v_dim].to_vec();
        for t in (0..tokens).rev() {
            let decay = logs[at(t)].exp();
            for (i, d) in d.iter_mut().enumerate() {
                let (row, column) = (i / v_dim, i % v_dim);
                *d += q[at(t) * k_dim + row] * dout[at(t) * v_dim + column];
                dk[kv_at(t) * k_dim + row] += *d * v[kv_at(t) * v_dim + column];
                dv[kv_at(t) * v_dim + column] += *d * k[kv_at(t) * k_dim + row];
                *d *= decay;
                dlogs[at(t)] += states[t][i] * *d;
            }
        }
        dbefore[whole][..k_dim * v_dim].copy_from_slice(&d);
    }
    results
}
