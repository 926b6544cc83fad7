//! The arrays of linear attention on the host, and the reference's results for them.

use std::ops::Range;

use burst_attention::Dtype;
use burst_attention::host::array::HostArray;
use burst_attention::host::isa::Isa;
use burst_attention::host::linear::{BackwardIo, ForwardIo, backward, forward};
use burst_attention_reference::linear::{Head, add_rows, rows_of};
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::data::{Array, Random};

pub const NAMES: [&str; 7] = ["o", "after", "dq", "dk", "dv", "dlog_decay", "dbefore"];

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
}

pub const CASE: Case = Case {
    batch: 2,
    tokens: 150,
    heads: [4, 2, 2],
    dims: [24, 40],
    dtype: Dtype::F32,
    logs: Logs::Random,
    scale: 1.0,
};

impl Case {
    /// Returns the heads of decays, states and outputs.
    pub fn all_heads(&self) -> usize {
        self.heads[0].max(self.heads[2])
    }
}

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
    /// The results, in the order of [`NAMES`].
    pub results: [Array; 7],
}

impl Data {
    pub fn new(case: Case) -> Data {
        let Case { batch, tokens, heads: [q_heads, k_heads, v_heads], .. } = case;
        let (heads, [k_dim, v_dim]) = (case.all_heads(), case.dims);
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
            q: array(case.dtype, rows(q_heads, k_dim)),
            k: array(case.dtype, rows(k_heads, k_dim)),
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
                zeros(Dtype::F32, per_token),
                zeros(Dtype::F32, state),
            ],
        }
    }

    /// Runs both passes over some tokens. `states` are the states before and after them, and the
    /// gradients after and before them.
    pub fn pass(&self, device: (Isa, &ThreadPool), tokens: Range<usize>, states: [&Array; 4]) {
        let [o, _, dq, dk, dv, dlogs, _] = &self.results;
        let rows = |array: &Array| {
            let len = tokens.len();
            HostArray { rows: 0..len, ..array.view().slice(tokens.clone()) }
        };
        let [before, after, dafter, dbefore] = states.map(state);
        let scale = self.case.scale;
        let (q, k, v, log_decay) = (rows(&self.q), rows(&self.k), rows(&self.v), rows(&self.logs));
        forward(
            device,
            &ForwardIo {
                q: q.clone(),
                k: k.clone(),
                v: v.clone(),
                scale,
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
                scale,
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

    /// Runs both passes over all tokens.
    pub fn run(&self, device: (Isa, &ThreadPool)) {
        let [_, after, .., dbefore] = &self.results;
        let states = [&self.before, after, &self.dafter, dbefore];
        self.pass(device, 0..self.case.tokens, states);
    }

    /// Runs both passes in two calls of each, over the tokens before `at` and over the rest.
    pub fn run_halves(&self, device: (Isa, &ThreadPool), at: usize) {
        let [_, after, .., dbefore] = &self.results;
        let [between, dbetween, nothing] = [(); 3].map(|()| Array::zeros(Dtype::F32, after.shape));
        let tokens = self.case.tokens;
        // The second call gives the gradient in the middle, so the first call is repeated with it.
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

/// Returns the results that [`NAMES`] lists, by the definition.
pub fn recurrence(data: &Data) -> [Vec<f64>; 7] {
    let Case { batch, tokens, heads: own_heads, dims: [k_dim, v_dim], .. } = data.case;
    let (heads, scale) = (data.case.all_heads(), f64::from(data.case.scale));
    let mut results = data.results.each_ref().map(|array| vec![0.0; array.values().len()]);
    let [q, k, v, logs, before, dout, dafter] =
        [&data.q, &data.k, &data.v, &data.logs, &data.before, &data.dout, &data.dafter]
            .map(Array::values);
    let per_head = |dim| [tokens, heads, dim];
    let [q_shape, k_shape, v_shape] =
        [0, 1, 2].map(|i| [tokens, own_heads[i], if i < 2 { k_dim } else { v_dim }]);
    let state = [1, heads, k_dim * v_dim];
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
            decays: rows_of(&logs, per_head(1), own, 0..tokens).into_iter().map(f64::exp).collect(),
        };
        let [before, dafter] = [&before, &dafter].map(|array| rows_of(array, state, own, 0..1));
        let found = head.recurrence(&before, &dafter);
        let [o, after, dq, dk, dv, dlogs, dbefore] = &mut results;
        add_rows(o, per_head(v_dim), own, 0..tokens, &found.o);
        add_rows(after, state, own, 0..1, &found.after);
        add_rows(dq, q_shape, of_q, 0..tokens, &scaled(found.dq));
        add_rows(dk, k_shape, of_k, 0..tokens, &found.dk);
        add_rows(dv, v_shape, of_v, 0..tokens, &found.dv);
        add_rows(dlogs, per_head(1), own, 0..tokens, &found.dlog_decay);
        add_rows(dbefore, state, own, 0..1, &found.dbefore);
    }
    results
}
