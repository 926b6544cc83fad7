//! A case of the delta rule: its inputs, and the reference's results.

use std::ops::Range;

use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{LINEAR_TILE, MAX_VIEW_BYTES};
use burst_attention_reference::linear::{Head, Results, add_rows, rows_of};

use crate::case::{Random, round};
use crate::linear::case::{Decays, FORGOTTEN};
use crate::linear::channels::case as channels;

/// A case.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub element: Element,
    pub target: Target,
    pub batch: usize,
    pub rows: usize,
    pub heads: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    pub part: usize,
    pub decays: Decays,
    /// Whether each column of keys has a decay.
    pub of_channels: bool,
    /// The largest rate.
    pub rate: f32,
    /// How much of all keys is one direction, from 0 to 1.
    pub alike: f32,
    /// Length of keys.
    pub key: f32,
    /// Factor on queries.
    pub query: f32,
    /// Factor on values, and on gradients of outputs.
    pub value: f32,
    /// Factor on the states at the beginning of parts.
    pub start: f32,
    /// A token whose keys, values and gradients are NaN.
    pub spoilt: Option<usize>,
    /// Whether the states at the beginning of parts are NaN.
    pub spoils_states: bool,
    pub limit: u64,
}

pub const CASE: Case = Case {
    element: Element::Bf16,
    target: Target::Sm90,
    batch: 2,
    rows: 150,
    heads: 2,
    head_dim: 16,
    value_dim: 24,
    part: 128,
    decays: Decays::All(-0.015),
    of_channels: false,
    rate: 1.0,
    alike: 0.0,
    key: 1.0,
    query: 1.0,
    value: 1.0,
    start: 1.0,
    spoilt: None,
    spoils_states: false,
    limit: MAX_VIEW_BYTES,
};

/// Arrays `[batch, rows, heads, dim]`, rates `[batch, rows, heads]`, log decays like rates or like
/// keys, and states before parts `[batch, parts, heads, head_dim, value_dim]`.
pub struct Inputs {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub dout: Vec<f32>,
    pub logs: Vec<f32>,
    pub rates: Vec<f32>,
    pub before: Vec<f32>,
}

/// What the reference says of all parts.
#[derive(Default)]
pub struct Exact {
    pub inverse: Vec<f64>,
    pub u: Vec<f64>,
    pub dy: Vec<f64>,
    pub dk: Vec<f64>,
    /// The products by row of dk with k `[batch, heads, rows]`; of channels those of all elements,
    /// without a token's own part `[batch, rows, heads, head_dim]`.
    pub dots: Vec<f64>,
    /// States, and transfers, after parts; gradients before them.
    pub states: [Vec<f64>; 2],
    pub gradients: [Vec<f64>; 2],
}

impl Case {
    pub fn parts(&self) -> usize {
        self.rows.div_ceil(self.part)
    }

    /// Returns the error that results may have, in roundings. Rates above 1 turn states round instead
    /// of taking from them. Keys that are alike, or of few columns, make large terms cancel.
    pub fn bounds(&self) -> f64 {
        if self.rate > 1.0 || self.alike > 0.0 || self.head_dim < 16 { 4.0 } else { 2.5 }
    }

    /// Returns the log decays of a token and head.
    fn each(&self) -> usize {
        if self.of_channels { self.head_dim } else { 1 }
    }

    pub fn padded(&self) -> usize {
        self.rows.next_multiple_of(LINEAR_TILE)
    }

    pub fn inputs(&self) -> Inputs {
        let mut random = Random(5);
        let tokens = self.batch * self.rows * self.heads;
        let to = |x| round(self.element, x);
        let direction = random.tensor(self.head_dim, |x| x);
        let mut keys = vec![];
        for _ in 0..tokens {
            let own = random.tensor(self.head_dim, |x| x);
            let mixed = |(own, all): (&f32, &f32)| (1.0 - self.alike) * own + self.alike * all;
            let key: Vec<f32> = own.iter().zip(&direction).map(mixed).collect();
            let norm = key.iter().map(|x| x * x).sum::<f32>().sqrt();
            keys.extend(key.iter().map(|x| to(x * self.key / norm)));
        }
        let log = |at: usize, random: &mut Random| match self.decays {
            Decays::All(log) => log,
            Decays::Random(most) => -most * random.normal().abs().min(2.0) / 2.0,
            Decays::Resets(every) if (at / self.heads / self.each()) % every == every - 1 => {
                FORGOTTEN
            }
            Decays::Resets(_) => 0.0,
        };
        let states = self.batch * self.parts() * self.heads * self.head_dim * self.value_dim;
        let mut inputs = Inputs {
            q: random.tensor(tokens * self.head_dim, |x| to(x * 0.25 * self.query)),
            k: keys,
            v: random.tensor(tokens * self.value_dim, |x| to(x * self.value)),
            dout: random.tensor(tokens * self.value_dim, |x| to(x * self.value)),
            logs: (0..tokens * self.each()).map(|at| log(at, &mut random)).collect(),
            rates: random.tensor(tokens, |x| self.rate * (0.2 + 0.4 * x.abs()).min(1.0)),
            before: random.tensor(states, |x| x * self.start),
        };
        if let Some(token) = self.spoilt {
            let (k, v) = (self.heads * self.head_dim, self.heads * self.value_dim);
            let Inputs { q, k: keys, v: values, dout, .. } = &mut inputs;
            for (array, row) in [(q, k), (keys, k), (values, v), (dout, v)] {
                array[token * row..(token + 1) * row].fill(f32::NAN);
            }
        }
        if self.spoils_states {
            inputs.before.fill(f32::NAN);
        }
        inputs
    }

    /// Returns `of` each token `[batch, heads, padded rows]`; `of` gets the value before the token in
    /// its tile, and the token's place in arrays, behind the last token `None`.
    fn statistics(&self, of: impl Fn(f32, Option<usize>) -> f32) -> Vec<f32> {
        let mut found = vec![];
        for (b, h) in (0..self.batch).flat_map(|b| (0..self.heads).map(move |h| (b, h))) {
            let mut last = 0.0;
            for row in 0..self.padded() {
                let at = (row < self.rows).then_some((b * self.rows + row) * self.heads + h);
                last = of(if row % LINEAR_TILE == 0 { 0.0 } else { last }, at);
                found.push(last);
            }
        }
        found
    }

    pub fn sums(&self, inputs: &Inputs) -> Vec<f32> {
        if self.of_channels {
            let (of, logs) = self.channels(inputs);
            return of.of_tiles(&logs, |sums, i| sums[i]);
        }
        self.statistics(|sum, at| sum + at.map_or(0.0, |at| inputs.logs[at]))
    }

    /// Returns the case of decays of channels with these tokens, and its inputs, of which it has the
    /// log decays alone.
    pub fn channels(&self, inputs: &Inputs) -> (channels::Case, channels::Inputs) {
        let Case { element, batch, rows, heads, head_dim, part, .. } = *self;
        let case = channels::Case { element, batch, rows, heads, head_dim, part, ..channels::KEYS };
        let [q, k, v, other, before] = [(); 5].map(|()| vec![]);
        (case, channels::Inputs { q, k, v, other, logs: inputs.logs.clone(), before })
    }

    /// Returns the pairs of queries and keys under decays of channels.
    pub fn pairs(&self, inputs: &Inputs, q: &[f32]) -> Vec<f32> {
        let Case { batch, rows, heads, head_dim, .. } = *self;
        let mut pairs = vec![0.0; batch * self.padded() * heads * LINEAR_TILE];
        for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            let head = self.head(inputs, (b, h), 0..rows);
            let q = rows_of(q, [rows, heads, head_dim], (b, h), 0..rows);
            let found = self.channels(inputs).0.exact_pairs(&q, &head.k, &head.decays);
            let shape = [self.padded(), heads, LINEAR_TILE];
            add_rows(&mut pairs, shape, (b, h), 0..rows, &found);
        }
        pairs.into_iter().map(|pair| pair as f32).collect()
    }

    pub fn rates(&self, inputs: &Inputs) -> Vec<f32> {
        self.statistics(|_, at| at.map_or(0.0, |at| inputs.rates[at]))
    }

    /// Returns everything by the reference.
    pub fn exact(&self, inputs: &Inputs) -> Exact {
        let Case { batch, rows, heads, head_dim, value_dim, part, .. } = *self;
        let zeros = |dim: usize| vec![0.0; batch * rows * heads * dim];
        let [u, dy] = [zeros(value_dim), zeros(value_dim)];
        let (inverse, dots) = (zeros(LINEAR_TILE), zeros(self.each()));
        let mut exact = Exact { inverse, u, dy, dk: zeros(head_dim), dots, ..Exact::default() };
        for b in 0..batch {
            for at in 0..self.parts() {
                for h in 0..heads {
                    let tokens = at * part..rows.min((at + 1) * part);
                    self.exact_part(inputs, (b, at, h), tokens, &mut exact);
                }
            }
        }
        exact
    }

    fn exact_part(
        &self,
        inputs: &Inputs,
        (b, at, h): (usize, usize, usize),
        tokens: Range<usize>,
        exact: &mut Exact,
    ) {
        let Case { rows, heads, head_dim, value_dim, .. } = *self;
        let state = head_dim * value_dim;
        let place = ((b * self.parts() + at) * heads + h) * state;
        let start: Vec<f64> =
            inputs.before[place..][..state].iter().map(|&x| f64::from(x)).collect();
        let head = self.head(inputs, (b, h), tokens.clone());
        let Results { u, du, dk_of_states: dk, .. } = head.recurrence(&start, &start);
        let add = |array: &mut Vec<f64>, dim, terms: &[f64]| {
            add_rows(array, [rows, heads, dim], (b, h), tokens.clone(), terms);
        };
        add(&mut exact.u, value_dim, &u);
        add(&mut exact.dy, value_dim, &du);
        add(&mut exact.dk, head_dim, &dk);
        add(&mut exact.inverse, LINEAR_TILE, &inverses(&head));
        for (i, (dk, k)) in dk.iter().zip(&head.k).enumerate() {
            let (t, column) = (i / head_dim, i % head_dim);
            if self.of_channels {
                let row = (b * rows + tokens.start + t) * heads + h;
                let of_token = t * value_dim..(t + 1) * value_dim;
                let score: f64 = of_token.map(|at| u[at] * head.dout[at]).sum();
                exact.dots[row * head_dim + column] = (dk - score * head.q[i]) * k;
            } else {
                exact.dots[(b * heads + h) * rows + tokens.start + t] += dk * k;
            }
        }
        let zeros = vec![0.0; state];
        let from_zero = head.recurrence(&zeros, &zeros);
        let nothing = vec![0.0; tokens.len() * head_dim];
        let identity: Vec<f64> = (0..head_dim * head_dim)
            .map(|i| if i / head_dim == i % head_dim { 1.0 } else { 0.0 })
            .collect();
        let mut of_identity = head;
        of_identity.dims = [head_dim; 2];
        of_identity.v = nothing.clone();
        of_identity.dout = nothing;
        let transfer = of_identity.recurrence(&identity, &identity);
        exact.states[0].extend(from_zero.after);
        exact.states[1].extend(transfer.after);
        exact.gradients[0].extend(from_zero.dbefore);
        exact.gradients[1].extend(transfer.dbefore);
    }

    fn head(&self, inputs: &Inputs, (b, h): (usize, usize), tokens: Range<usize>) -> Head {
        let Case { rows, heads, head_dim, value_dim, .. } = *self;
        let of =
            |array: &[f32], dim: usize| rows_of(array, [rows, heads, dim], (b, h), tokens.clone());
        let decay = |log: f64| if log <= f64::from(FORGOTTEN) { 0.0 } else { log.exp2() };
        Head {
            dims: [head_dim, value_dim],
            q: of(&inputs.q, head_dim),
            k: of(&inputs.k, head_dim),
            v: of(&inputs.v, value_dim),
            dout: of(&inputs.dout, value_dim),
            decays: of(&inputs.logs, self.each()).into_iter().map(decay).collect(),
            beta: Some(of(&inputs.rates, 1)),
        }
    }
}

/// Returns the rows of the inverses of tiles: column j of a tile's inverse is what a value of 1 of
/// token j alone gives, from a state of zeros, if all rates stood on the left side.
fn inverses(head: &Head) -> Vec<f64> {
    let rates = head.beta.as_deref().unwrap_or_default();
    let (tokens, dim) = (rates.len(), head.dims[0]);
    let mut rows = vec![0.0; tokens * LINEAR_TILE];
    for t in 0..tokens {
        let first = t / LINEAR_TILE * LINEAR_TILE;
        rows[t * LINEAR_TILE + t - first] = 1.0;
        let mut decays = vec![1.0; dim];
        for s in (first..t).rev() {
            let each = head.decays.len() / tokens;
            let decay = |i: usize| head.decays[(s + 1) * each + i % each];
            decays.iter_mut().enumerate().for_each(|(i, x)| *x *= decay(i));
            let pair = |i: usize| decays[i] * head.k[t * dim + i] * head.k[s * dim + i];
            let weight = rates[t] * (0..dim).map(pair).sum::<f64>();
            for j in 0..=s - first {
                rows[t * LINEAR_TILE + j] -= weight * rows[s * LINEAR_TILE + j];
            }
        }
    }
    rows
}
