//! The arrays of linear attention on the host, and the reference's results for them.

use std::ops::Range;

use burst_attention::Dtype;
use burst_attention::host::array::HostArray;
use burst_attention::host::isa::Isa;
use burst_attention::host::linear::{BackwardIo, ForwardIo, backward, forward};
use burst_attention_reference::linear::{Head, add_rows, rows_of};
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::data::{Array, Random};

pub const NAMES: [&str; 8] = ["o", "after", "dq", "dk", "dv", "dlog_decay", "dbefore", "dbeta"];

/// Natural logarithms of the decays.
#[derive(Debug, Clone, Copy)]
pub enum Logs {
    /// The logarithm of one decay, for all tokens.
    Of(f64),
    /// Logarithms from strong decays, which leave nothing after a few tokens, to very weak ones.
    Random,
    /// `Random`, except that one token in `.0` has the logarithm `.1`.
    Sometimes(usize, f32),
}

#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub batch: usize,
    pub tokens: usize,
    /// Heads of q, k and v.
    pub heads: [usize; 3],
    pub dims: [usize; 2],
    pub dtype: Dtype,
    pub logs: Logs,
    pub scale: f32,
    /// Whether each column of keys has decays of its own.
    pub by_channel: bool,
    /// The largest β of the delta rule, or 0 without the rule. Keys have unit norm with the rule.
    pub beta: f32,
}

pub const CASE: Case = Case {
    batch: 2,
    tokens: 150,
    heads: [4, 2, 2],
    dims: [24, 40],
    dtype: Dtype::F32,
    logs: Logs::Random,
    scale: 1.0,
    by_channel: false,
    beta: 0.0,
};

impl Case {
    /// Returns the heads of decays, states and outputs.
    pub fn all_heads(&self) -> usize {
        self.heads[0].max(self.heads[2])
    }

    /// Returns the decays of a head and a token.
    pub fn decays(&self) -> usize {
        if self.by_channel { self.dims[0] } else { 1 }
    }

    /// Returns the array of β, if the case has the delta rule.
    pub fn delta<'a>(&self, array: &'a Array) -> Option<&'a Array> {
        (self.beta > 0.0).then_some(array)
    }
}

/// All arrays of both passes. States are `[batch, heads, k_dim, v_dim]`.
pub struct Data {
    pub case: Case,
    pub q: Array,
    pub k: Array,
    pub v: Array,
    pub logs: Array,
    pub beta: Array,
    pub before: Array,
    pub dout: Array,
    pub dafter: Array,
    /// The results, in the order of [`NAMES`].
    pub results: [Array; 8],
}

impl Data {
    pub fn new(case: Case) -> Data {
        let Case { batch, tokens, heads: [q_heads, k_heads, v_heads], .. } = case;
        let (heads, [k_dim, v_dim]) = (case.all_heads(), case.dims);
        let mut random = Random::new(tokens as u64);
        let mut array = |dtype, shape| Array::random(&mut random, dtype, shape);
        let (per_token, state) = ([batch, tokens, heads, 1], [batch, heads, k_dim, v_dim]);
        let rows = |heads, dim| [batch, tokens, heads, dim];
        let decays = case.decays();
        let mut logs = array(Dtype::F32, rows(heads, decays));
        for index in 0..batch * tokens * heads * decays {
            let (spread, token) = (-(3.0 * logs.get(index) - 2.0).exp(), index / decays);
            let rare = |every| (token / heads * 5 + token % heads * 3) % every == every - 1;
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
        let q = array(case.dtype, rows(q_heads, k_dim));
        let mut k = array(case.dtype, rows(k_heads, k_dim));
        let mut beta = zeros(Dtype::F32, per_token);
        if case.beta > 0.0 {
            (0..batch * tokens * k_heads).for_each(|row| normalise(&mut k, row, k_dim));
            let mut random = Random::new(tokens as u64 + 1);
            let steps = |random: &mut Random| random.below(257) as f32 / 256.0;
            (0..batch * tokens * heads).for_each(|at| beta.set(at, case.beta * steps(&mut random)));
        }
        Data {
            case,
            q,
            k,
            beta,
            v: array(case.dtype, rows(v_heads, v_dim)),
            before: array(Dtype::F32, state),
            dout: array(case.dtype, rows(heads, v_dim)),
            dafter: array(Dtype::F32, state),
            logs,
            results: [
                zeros(case.dtype, rows(heads, v_dim)),
                zeros(Dtype::F32, state),
                zeros(case.dtype, rows(q_heads, k_dim)),
                zeros(case.dtype, rows(k_heads, k_dim)),
                zeros(case.dtype, rows(v_heads, v_dim)),
                zeros(Dtype::F32, rows(heads, decays)),
                zeros(Dtype::F32, state),
                zeros(Dtype::F32, per_token),
            ],
        }
    }

    /// Runs both passes over some tokens. `states` are the states before and after them, and the
    /// gradients after and before them.
    pub fn pass(&self, device: (Isa, &ThreadPool), tokens: Range<usize>, states: [&Array; 4]) {
        let [o, _, dq, dk, dv, dlogs, _, dbeta] = &self.results;
        let rows = |array: &Array| {
            let len = tokens.len();
            HostArray { rows: 0..len, ..array.view().slice(tokens.clone()) }
        };
        let [before, after, dafter, dbefore] = states.map(state);
        let scale = self.case.scale;
        let (beta, dbeta) =
            (self.case.delta(&self.beta).map(rows), self.case.delta(dbeta).map(rows));
        let (q, k, v, log_decay) = (rows(&self.q), rows(&self.k), rows(&self.v), rows(&self.logs));
        forward(
            device,
            &ForwardIo {
                q: q.clone(),
                k: k.clone(),
                v: v.clone(),
                scale,
                log_decay: log_decay.clone(),
                beta: beta.clone(),
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
                scale,
                log_decay,
                beta,
                before,
                dout: rows(&self.dout),
                dafter,
                dq: rows(dq),
                dk: rows(dk),
                dv: rows(dv),
                dlog_decay: rows(dlogs),
                dbeta,
                dbefore,
            },
        );
    }

    /// Runs both passes over all tokens.
    pub fn run(&self, device: (Isa, &ThreadPool)) {
        let [_, after, .., dbefore, _] = &self.results;
        let states = [&self.before, after, &self.dafter, dbefore];
        self.pass(device, 0..self.case.tokens, states);
    }

    /// Runs both passes in two calls of each, over the tokens before `at` and over the rest.
    pub fn run_halves(&self, device: (Isa, &ThreadPool), at: usize) {
        let [_, after, .., dbefore, _] = &self.results;
        let [between, dbetween, nothing] = [(); 3].map(|()| Array::zeros(Dtype::F32, after.shape));
        let tokens = self.case.tokens;
        // The second call gives the gradient in the middle, so the first call is repeated with it.
        self.pass(device, 0..at, [&self.before, &between, &nothing, dbefore]);
        self.pass(device, at..tokens, [&between, after, &self.dafter, &dbetween]);
        self.pass(device, 0..at, [&self.before, &between, &dbetween, dbefore]);
    }
}

/// Gives a row unit norm.
fn normalise(array: &mut Array, row: usize, dim: usize) {
    let norm = (row * dim..(row + 1) * dim).map(|at| array.get(at).powi(2)).sum::<f64>().sqrt();
    (row * dim..(row + 1) * dim).for_each(|at| array.set(at, (array.get(at) / norm) as f32));
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

/// Returns ‖got − want‖ / ‖want‖, or infinity where that is not finite.
pub fn error(got: &[f64], want: &[f64]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let size = norm(&mut want.iter().copied());
    let off = norm(&mut got.iter().zip(want).map(|(got, want)| got - want));
    match off / size {
        _ if off == 0.0 => 0.0,
        error if error.is_finite() => error,
        _ => f64::INFINITY,
    }
}

/// Returns the results that [`NAMES`] lists, by the definition.
pub fn recurrence(data: &Data) -> [Vec<f64>; 8] {
    let Case { batch, tokens, heads: own_heads, dims: [k_dim, v_dim], .. } = data.case;
    let (heads, scale) = (data.case.all_heads(), f64::from(data.case.scale));
    let mut results = data.results.each_ref().map(|array| vec![0.0; array.values().len()]);
    let [q, k, v, logs, beta] =
        [&data.q, &data.k, &data.v, &data.logs, &data.beta].map(Array::values);
    let [before, dout, dafter] = [&data.before, &data.dout, &data.dafter].map(Array::values);
    let per_head = |dim| [tokens, heads, dim];
    let [q_shape, k_shape, v_shape] =
        [0, 1, 2].map(|i| [tokens, own_heads[i], if i < 2 { k_dim } else { v_dim }]);
    let (state, per_decay) = ([1, heads, k_dim * v_dim], per_head(data.case.decays()));
    let delta = data.case.delta(&data.beta);
    for (entry, head) in (0..batch).flat_map(|entry| (0..heads).map(move |head| (entry, head))) {
        let own = (entry, head);
        let [of_q, of_k, of_v] = own_heads.map(|count| (entry, head * count / heads));
        let scaled = |x: Vec<f64>| x.into_iter().map(|x| scale * x).collect::<Vec<_>>();
        let head = Head {
            dims: [k_dim, v_dim],
            q: scaled(rows_of(&q, q_shape, of_q, 0..tokens)),
            k: rows_of(&k, k_shape, of_k, 0..tokens),
            v: rows_of(&v, v_shape, of_v, 0..tokens),
            dout: rows_of(&dout, per_head(v_dim), own, 0..tokens),
            decays: rows_of(&logs, per_decay, own, 0..tokens).into_iter().map(f64::exp).collect(),
            beta: delta.map(|_| rows_of(&beta, per_head(1), own, 0..tokens)),
        };
        let [before, dafter] = [&before, &dafter].map(|array| rows_of(array, state, own, 0..1));
        let found = head.recurrence(&before, &dafter);
        let [o, after, dq, dk, dv, dlogs, dbefore, dbeta] = &mut results;
        add_rows(o, per_head(v_dim), own, 0..tokens, &found.o);
        add_rows(after, state, own, 0..1, &found.after);
        add_rows(dq, q_shape, of_q, 0..tokens, &scaled(found.dq));
        add_rows(dk, k_shape, of_k, 0..tokens, &found.dk);
        add_rows(dv, v_shape, of_v, 0..tokens, &found.dv);
        add_rows(dlogs, per_decay, own, 0..tokens, &found.dlog_decay);
        if delta.is_some() {
            add_rows(dbeta, per_head(1), own, 0..tokens, &found.dbeta);
        }
        add_rows(dbefore, state, own, 0..1, &found.dbefore);
    }
    results
}
