//! A case of linear attention: its inputs, and the reference's results.

use std::ops::Range;

use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{
    LINEAR_TILE, LinearState, MAX_VIEW_BYTES, Part, column_tiles,
};
use burst_attention_kernels::variant;
use burst_attention_reference::linear::{Head, add_rows, rows_of};

use crate::case::{Random, round};
use crate::world::{Array, Scalar, World};

/// A case.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub element: Element,
    pub target: Target,
    pub batch: usize,
    pub rows: usize,
    pub heads: usize,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    pub part: usize,
    pub reverse: bool,
    pub strict: bool,
    pub decays: Decays,
    /// Factors on queries, keys and values.
    pub sizes: [f32; 3],
    pub spoil: Spoil,
    pub limit: u64,
}

/// Inputs that are not finite, or that overflow.
#[derive(Debug, Clone, Copy)]
pub enum Spoil {
    Nothing,
    /// Keys and values of a token, set to a value.
    Token(usize, f32),
    /// The states at the beginning of parts.
    States,
}

/// Log decays in base 2.
#[derive(Debug, Clone, Copy)]
pub enum Decays {
    All(f32),
    /// A decay of each token and head, from 0 to a limit.
    Random(f32),
    /// No decay, except at regular distances in tokens, where the state is forgotten.
    Resets(usize),
}

pub const CASE: Case = Case {
    element: Element::Bf16,
    target: Target::Sm90,
    batch: 2,
    rows: 150,
    heads: 4,
    q_heads: 4,
    kv_heads: 2,
    head_dim: 16,
    value_dim: 24,
    part: 64,
    reverse: false,
    strict: false,
    decays: Decays::All(-0.015),
    sizes: [1.0; 3],
    spoil: Spoil::Nothing,
    limit: MAX_VIEW_BYTES,
};

/// An exponent x with 2^x = 0.
pub const FORGOTTEN: f32 = -150.0;

pub struct Inputs {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub other: Vec<f32>,
    /// Log decays `[batch, rows, heads]`.
    pub logs: Vec<f32>,
    /// States before parts `[batch, parts, heads, head_dim, value_dim]`.
    pub before: Vec<f32>,
}

impl Case {
    pub fn parts(&self) -> usize {
        self.rows.div_ceil(self.part)
    }

    pub fn state(&self) -> usize {
        self.head_dim * self.value_dim
    }

    pub fn padded(&self) -> usize {
        self.rows.next_multiple_of(LINEAR_TILE)
    }

    pub fn inputs(&self) -> Inputs {
        let mut random = Random(3);
        let tokens = self.batch * self.rows;
        let to = |x| round(self.element, x);
        let [queries, keys] = [self.q_heads, self.kv_heads].map(|heads| tokens * heads);
        let log = |at: usize, random: &mut Random| match self.decays {
            Decays::All(log) => log,
            Decays::Random(most) => -most * random.normal().abs().min(2.0) / 2.0,
            Decays::Resets(every) if (at / self.heads) % every == every - 1 => FORGOTTEN,
            Decays::Resets(_) => 0.0,
        };
        let mut inputs = Inputs {
            q: random.tensor(queries * self.head_dim, |x| to(x * self.sizes[0])),
            k: random.tensor(keys * self.head_dim, |x| to(x * self.sizes[1])),
            v: random.tensor(keys * self.value_dim, |x| to(x * self.sizes[2])),
            other: random.tensor(queries * self.value_dim, to),
            logs: (0..tokens * self.heads).map(|at| log(at, &mut random)).collect(),
            before: random.tensor(self.batch * self.parts() * self.heads * self.state(), |x| x),
        };
        match self.spoil {
            Spoil::Nothing => {}
            Spoil::Token(token, value) => {
                for (x, dim) in [(&mut inputs.k, self.head_dim), (&mut inputs.v, self.value_dim)] {
                    let row = self.kv_heads * dim;
                    x[token * row..(token + 1) * row].fill(to(value));
                }
            }
            Spoil::States => inputs.before.fill(f32::NAN),
        }
        inputs
    }

    /// Returns sums of logs since the start of each tile `[batch, heads, padded rows]`.
    pub fn sums(&self, inputs: &Inputs) -> Vec<f32> {
        let mut sums = vec![];
        for (b, h) in (0..self.batch).flat_map(|b| (0..self.heads).map(move |h| (b, h))) {
            let mut sum = 0.0;
            for row in 0..self.padded() {
                let log = inputs.logs.get(((b * self.rows + row) * self.heads) + h);
                let start = if row % LINEAR_TILE == 0 { 0.0 } else { sum };
                sum = start + if row < self.rows { *log.expect("a token's") } else { 0.0 };
                sums.push(sum);
            }
        }
        sums
    }

    pub fn description(&self, [k, v, sums, state]: [&Array; 4]) -> LinearState {
        let at = |array: &Array| array.rows(0).address;
        LinearState {
            batch: self.batch,
            rows: self.rows,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            value_dim: self.value_dim,
            element: self.element,
            part: Part { rows: self.part, reverse: self.reverse },
            decays: variant::Decays::Heads,
            k: at(k),
            v: at(v),
            sums: at(sums),
            state: at(state),
        }
    }

    /// Returns the states that parts leave, the tokens' results, and the products of results with
    /// `other`, by the reference. In reverse, the state is the gradient of the reference's state:
    /// the sum of k vᵀ over later tokens, which each query reads as a key's dv.
    pub fn exact(&self, inputs: &Inputs, from_zero: bool) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let Case { batch, rows, heads, value_dim, .. } = *self;
        let mut states = vec![0.0; batch * self.parts() * heads * self.state()];
        let mut out = vec![0.0; batch * rows * heads * value_dim];
        let mut dots = vec![0.0; batch * heads * rows];
        let entries = (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h)));
        for ((b, h), part) in
            entries.flat_map(|entry| (0..self.parts()).map(move |part| (entry, part)))
        {
            let tokens = part * self.part..rows.min((part + 1) * self.part);
            let place = ((b * self.parts() + part) * heads + h) * self.state();
            let start = &inputs.before[place..][..self.state()];
            let start = start.iter().map(|&x| if from_zero { 0.0 } else { f64::from(x) }).collect();
            let (state, mut o) = self.exact_part(inputs, (b, h), tokens.clone(), start);
            if self.strict {
                self.take_own(inputs, (b, h), tokens.clone(), &mut o);
            }
            states[place..][..self.state()].copy_from_slice(&state);
            add_rows(&mut out, [rows, heads, value_dim], (b, h), tokens.clone(), &o);
            let shape = [rows, self.q_heads, value_dim];
            let other =
                rows_of(&inputs.other, shape, (b, h * self.q_heads / heads), tokens.clone());
            for (at, (o, other)) in o.iter().zip(other).enumerate() {
                dots[(b * heads + h) * rows + tokens.start + at / value_dim] += o * other;
            }
        }
        (states, out, dots)
    }

    /// Takes from results what tokens' own keys and values gave them.
    fn take_own(
        &self,
        inputs: &Inputs,
        (b, h): (usize, usize),
        tokens: Range<usize>,
        o: &mut [f64],
    ) {
        let Case { rows, heads, q_heads, kv_heads, head_dim, value_dim, .. } = *self;
        for (t, o) in tokens.zip(o.chunks_mut(value_dim)) {
            let of = |array: &[f32], array_heads: usize, dim: usize| {
                rows_of(array, [rows, array_heads, dim], (b, h * array_heads / heads), t..t + 1)
            };
            let (q, k) = (of(&inputs.q, q_heads, head_dim), of(&inputs.k, kv_heads, head_dim));
            let score: f64 = q.iter().zip(&k).map(|(q, k)| q * k).sum();
            let v = of(&inputs.v, kv_heads, value_dim);
            o.iter_mut().zip(v).for_each(|(o, v)| *o -= score * v);
        }
    }

    /// Returns the state that some tokens of a head leave, and their results.
    fn exact_part(
        &self,
        inputs: &Inputs,
        (b, h): (usize, usize),
        tokens: Range<usize>,
        start: Vec<f64>,
    ) -> (Vec<f64>, Vec<f64>) {
        let Case { rows, heads, q_heads, kv_heads, head_dim, value_dim, .. } = *self;
        let of = |array: &[f32], array_heads: usize, dim: usize| {
            let place = (b, h * array_heads / heads);
            rows_of(array, [rows, array_heads, dim], place, tokens.clone())
        };
        let decay = |log: f64| if log <= f64::from(FORGOTTEN) { 0.0 } else { log.exp2() };
        let decays = of(&inputs.logs, heads, 1).into_iter().map(decay).collect();
        let (q, k) = (of(&inputs.q, q_heads, head_dim), of(&inputs.k, kv_heads, head_dim));
        let v = of(&inputs.v, kv_heads, value_dim);
        let (dims, zeros) = ([head_dim, value_dim], vec![0.0; self.state()]);
        let nothing = vec![0.0; tokens.len() * value_dim];
        if self.reverse {
            let head = Head { dims, q: k, k: q, v: nothing, dout: v, decays, beta: None };
            let found = head.recurrence(&zeros, &start);
            (found.dbefore, found.dv)
        } else {
            let head = Head { dims, q, k, v, dout: nothing, decays, beta: None };
            let found = head.recurrence(&start, &zeros);
            (found.after, found.o)
        }
    }
}

/// Inputs in memory, and the arrays of results.
pub struct Arrays {
    pub q: Array,
    pub k: Array,
    pub v: Array,
    pub other: Array,
    pub sums: Array,
    pub state: Array,
    pub o: Array,
    pub dots: Array,
}

pub fn place(case: &Case, inputs: &Inputs, world: &mut World) -> Arrays {
    let Case { batch, rows, heads, q_heads, kv_heads, head_dim, value_dim, element, .. } = *case;
    let tiles = column_tiles(head_dim, value_dim).expect("tiles");
    let activations = Scalar::Activation(element);
    let states = [1, batch * case.parts() * heads * head_dim, 1, value_dim];
    let mut tokens = |name, heads, dim| world.rows(name, activations, [batch, rows, heads, dim], 0);
    let (q, k) = (tokens("q", q_heads, head_dim), tokens("k", kv_heads, head_dim));
    let (v, other) = (tokens("v", kv_heads, value_dim), tokens("other", q_heads, value_dim));
    let o = tokens("o", heads, value_dim);
    let arrays = Arrays {
        q,
        k,
        v,
        other,
        o,
        sums: world.rows("sums", Scalar::F32, [1, batch * heads, 1, case.padded()], 0),
        state: world.rows("state", Scalar::F32, states, 0),
        dots: world.rows("dots", Scalar::F32, [1, batch * heads * tiles, 1, case.padded()], 0),
    };
    let memory = &mut world.memory;
    arrays.q.fill(memory, 0..rows, &inputs.q);
    arrays.k.fill(memory, 0..rows, &inputs.k);
    arrays.v.fill(memory, 0..rows, &inputs.v);
    arrays.other.fill(memory, 0..rows, &inputs.other);
    arrays.sums.fill(memory, 0..batch * heads, &case.sums(inputs));
    arrays
}
