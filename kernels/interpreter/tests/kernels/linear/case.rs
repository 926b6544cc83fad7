//! A case of linear attention: its inputs, and what the recurrence gives, token by token in float64.

use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{
    LINEAR_TILE, LinearState, MAX_VIEW_BYTES, Part, column_tiles,
};

use crate::case::{Random, round};
use crate::world::{Array, Scalar, World};

/// What is computed.
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
    pub decays: Decays,
    /// Factors on queries, keys and values.
    pub sizes: [f32; 3],
    pub spoil: Spoil,
    pub limit: u64,
}

/// What is not finite, or overflows.
#[derive(Debug, Clone, Copy)]
pub enum Spoil {
    Nothing,
    /// Keys and values of a token.
    Token(usize, f32),
    /// The states where parts begin.
    States,
}

/// Log decays in base 2.
#[derive(Debug, Clone, Copy)]
pub enum Decays {
    All(f32),
    /// Of each token and head, from 0 to so much.
    Random(f32),
    /// None but before every so many tokens, where all is forgotten.
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
    decays: Decays::All(-0.015),
    sizes: [1.0; 3],
    spoil: Spoil::Nothing,
    limit: MAX_VIEW_BYTES,
};

/// What 2^x is 0 of.
pub const FORGOTTEN: f32 = -150.0;

pub struct Inputs {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub other: Vec<f32>,
    /// `[batch, rows, heads]`
    pub logs: Vec<f32>,
    /// `[batch, parts, heads, head_dim, value_dim]`
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

    /// Sums of logs since each tile began `[batch, heads, padded rows]`.
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
            k: at(k),
            v: at(v),
            sums: at(sums),
            state: at(state),
        }
    }

    /// Of each entry and head its parts, from the one that comes first.
    pub fn each_part(&self, mut body: impl FnMut(usize, usize, usize, Vec<usize>)) {
        for (b, h) in (0..self.batch).flat_map(|b| (0..self.heads).map(move |h| (b, h))) {
            for part in 0..self.parts() {
                let mut rows: Vec<_> =
                    (part * self.part..self.rows.min((part + 1) * self.part)).collect();
                if self.reverse {
                    rows.reverse();
                }
                body(b, h, part, rows);
            }
        }
    }

    /// What parts leave, what tokens get, and the products of that with `other`, in float64.
    pub fn exact(&self, inputs: &Inputs, from_zero: bool) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let Case { batch, rows, heads, q_heads, kv_heads, head_dim, value_dim, .. } = *self;
        let mut states = vec![0.0; batch * self.parts() * heads * self.state()];
        let mut out = vec![0.0; batch * rows * heads * value_dim];
        let mut dots = vec![0.0; batch * heads * rows];
        self.each_part(|b, h, part, tokens| {
            let place = ((b * self.parts() + part) * heads + h) * self.state();
            let start = &inputs.before[place..][..self.state()];
            let mut s: Vec<f64> =
                start.iter().map(|&x| if from_zero { 0.0 } else { f64::from(x) }).collect();
            let fade = |s: &mut Vec<f64>, row: usize| {
                let log = inputs.logs[(b * rows + row) * heads + h];
                let left = if log <= FORGOTTEN { 0.0 } else { f64::from(log).exp2() };
                s.iter_mut().for_each(|x| *x *= left);
            };
            for row in tokens {
                let at = |array_heads: usize, dim: usize| {
                    ((b * rows + row) * array_heads + h * array_heads / heads) * dim
                };
                let q = &inputs.q[at(q_heads, head_dim)..][..head_dim];
                let k = &inputs.k[at(kv_heads, head_dim)..][..head_dim];
                let v = &inputs.v[at(kv_heads, value_dim)..][..value_dim];
                let other = &inputs.other[at(q_heads, value_dim)..][..value_dim];
                if !self.reverse {
                    fade(&mut s, row);
                }
                for (i, j) in (0..head_dim).flat_map(|i| (0..value_dim).map(move |j| (i, j))) {
                    s[i * value_dim + j] += f64::from(k[i]) * f64::from(v[j]);
                }
                for j in 0..value_dim {
                    let o: f64 =
                        (0..head_dim).map(|i| f64::from(q[i]) * s[i * value_dim + j]).sum();
                    out[at(heads, value_dim) + j] = o;
                    dots[(b * heads + h) * rows + row] += o * f64::from(other[j]);
                }
                if self.reverse {
                    fade(&mut s, row);
                }
            }
            states[place..][..self.state()].copy_from_slice(&s);
        });
        (states, out, dots)
    }
}

/// Inputs in memory, and where the results go.
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
