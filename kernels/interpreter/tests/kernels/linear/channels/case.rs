//! A case of decays of channels: its inputs, and the reference's results.

use burst_attention_kernels::instances::{Element, Target};
use burst_attention_kernels::launch::{LINEAR_TILE, MAX_VIEW_BYTES};
use burst_attention_kernels::variant::Decays as Of;
use burst_attention_reference::linear::{Head, Results, add_rows, rows_of};

use crate::case::{Random, round};
use crate::linear::case::{Decays, FORGOTTEN};

/// A case. In pairs and with decays of keys there are `head_dim` channels, otherwise `value_dim`.
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
    pub of: Of,
    pub reverse: bool,
    pub strict: bool,
    pub decays: Decays,
    /// Factors on queries and keys, and on values.
    pub sizes: [f32; 2],
    pub limit: u64,
}

pub const KEYS: Case = Case {
    element: Element::Bf16,
    target: Target::Sm90,
    batch: 2,
    rows: 150,
    heads: 2,
    head_dim: 16,
    value_dim: 24,
    part: 128,
    of: Of::KeyChannels,
    reverse: false,
    strict: false,
    decays: Decays::Random(3.0),
    sizes: [1.0; 2],
    limit: MAX_VIEW_BYTES,
};
pub const VALUES: Case = Case { of: Of::ValueChannels, ..KEYS };
const LEVELS: [usize; 6] = [1, 2, 4, 8, 16, 32];

pub struct Inputs {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub other: Vec<f32>,
    /// Log decays in base 2 `[batch, rows, heads, channels]`.
    pub logs: Vec<f32>,
    /// States where parts begin, in reverse behind them.
    pub before: Vec<f32>,
}

/// The results of the reference.
pub struct Exact {
    pub pairs: Vec<f64>,
    pub states: Vec<f64>,
    pub out: Vec<f64>,
    pub products: Vec<f64>,
}

impl Case {
    pub fn parts(&self) -> usize {
        self.rows.div_ceil(self.part)
    }

    pub fn padded(&self) -> usize {
        self.rows.next_multiple_of(LINEAR_TILE)
    }

    pub fn channels(&self) -> usize {
        if self.of == Of::ValueChannels { self.value_dim } else { self.head_dim }
    }

    pub fn inputs(&self) -> Inputs {
        let mut random = Random(9);
        let rows = self.batch * self.rows * self.heads;
        let (row, states) = (self.heads * self.channels(), self.batch * self.parts() * self.heads);
        let to = |x| round(self.element, x);
        let log = |at: usize, random: &mut Random| match self.decays {
            Decays::All(log) => log,
            Decays::Random(most) => -most * random.normal().abs().min(2.0) / 2.0,
            Decays::Resets(every) if (at / row) % every == every - 1 => FORGOTTEN,
            Decays::Resets(_) => -0.02,
        };
        Inputs {
            q: random.tensor(rows * self.head_dim, |x| to(x * self.sizes[0])),
            k: random.tensor(rows * self.head_dim, |x| to(x * self.sizes[0])),
            v: random.tensor(rows * self.value_dim, |x| to(x * self.sizes[1])),
            other: random.tensor(rows * self.value_dim, to),
            logs: (0..rows * self.channels()).map(|at| log(at, &mut random)).collect(),
            before: random.tensor(states * self.head_dim * self.value_dim, |x| x),
        }
    }

    /// Returns a number for each token, head and channel `[batch, padded rows, heads, channels]`;
    /// `of` gets the sums of log decays of a tile's channel, and the token's place in the tile.
    pub fn of_tiles(&self, inputs: &Inputs, of: impl Fn(&[f32], usize) -> f32) -> Vec<f32> {
        let columns = self.heads * self.channels();
        let mut found = vec![0.0; self.batch * self.padded() * columns];
        for (b, start) in (0..self.batch)
            .flat_map(|b| (0..self.padded()).step_by(LINEAR_TILE).map(move |start| (b, start)))
        {
            for column in 0..columns {
                let mut sum = 0.0;
                let sums = [0; LINEAR_TILE].iter().enumerate().map(|(i, _)| {
                    let row = start + i;
                    let log = inputs.logs.get((b * self.rows + row) * columns + column);
                    sum += if row < self.rows { *log.expect("a token's") } else { 0.0 };
                    sum
                });
                let sums: Vec<f32> = sums.collect();
                for i in 0..LINEAR_TILE {
                    found[(b * self.padded() + start + i) * columns + column] = of(&sums, i);
                }
            }
        }
        found
    }

    /// Returns rows with a weight for each token, head and channel, rounded.
    pub fn faded(&self, x: &[f32], weights: &[f32]) -> Vec<f32> {
        let row = self.heads * self.channels();
        let place = |at: usize| (at / row / self.rows, at / row % self.rows, at % row);
        let weight = |(b, t, c): (usize, usize, usize)| weights[(b * self.padded() + t) * row + c];
        let faded = x.iter().enumerate().map(|(at, x)| round(self.element, x * weight(place(at))));
        faded.collect()
    }

    /// Returns rows with their decays from the start of tiles, or to the end.
    pub fn faded_from_start(&self, inputs: &Inputs, x: &[f32]) -> Vec<f32> {
        self.faded(x, &self.of_tiles(inputs, |sums, i| sums[i].exp2()))
    }

    pub fn faded_to_end(&self, inputs: &Inputs, x: &[f32]) -> Vec<f32> {
        self.faded(x, &self.of_tiles(inputs, |sums, i| (sums[LINEAR_TILE - 1] - sums[i]).exp2()))
    }

    /// Returns for each level rows of odd and of even blocks with decays, and the decays.
    pub fn levels(&self, inputs: &Inputs, odd: &[f32], even: &[f32]) -> [Vec<f32>; 2] {
        let row = self.heads * self.channels();
        let levels = LEVELS.map(|m| {
            let weights = self.of_tiles(inputs, |sums, i| {
                let middle = sums[(i | (2 * m - 1)) - m];
                let left = if i & m > 0 { sums[i] - middle } else { middle - sums[i] };
                left.exp2()
            });
            let is_odd = |at: usize| (at / row % self.rows) & m > 0;
            let both = (0..odd.len()).map(|at| if is_odd(at) { odd[at] } else { even[at] });
            let both: Vec<f32> = both.collect();
            [self.faded(&both, &weights), self.faded(&vec![1.0; both.len()], &weights)]
        });
        [0, 1].map(|n| {
            let rows = (0..self.batch * self.rows)
                .flat_map(|at| LEVELS.map(|_| at).into_iter().enumerate());
            rows.flat_map(|(level, at)| levels[level][n][at * row..][..row].to_vec()).collect()
        })
    }

    pub fn exact(&self, inputs: &Inputs) -> Exact {
        let Case { batch, rows, heads, head_dim, value_dim, .. } = *self;
        let size = head_dim * value_dim;
        let mut exact = Exact {
            pairs: vec![0.0; batch * self.padded() * heads * LINEAR_TILE],
            states: vec![],
            out: vec![0.0; batch * rows * heads * value_dim],
            products: vec![0.0; batch * self.padded() * heads * value_dim],
        };
        for b in 0..batch {
            for part in 0..self.parts() {
                for h in 0..heads {
                    let tokens = part * self.part..rows.min((part + 1) * self.part);
                    let place = ((b * self.parts() + part) * heads + h) * size;
                    let start = &inputs.before[place..][..size];
                    let of =
                        |x: &[f32], dim| rows_of(x, [rows, heads, dim], (b, h), tokens.clone());
                    let decays: Vec<f64> = of(&inputs.logs, self.channels())
                        .into_iter()
                        .map(|log| if log <= f64::from(FORGOTTEN) { 0.0 } else { log.exp2() })
                        .collect();
                    let (q, k, v) = (
                        of(&inputs.q, head_dim),
                        of(&inputs.k, head_dim),
                        of(&inputs.v, value_dim),
                    );
                    let zeros = vec![0.0; size];
                    exact.states.extend(self.passed([&q, &k, &v], &decays, &zeros).1);
                    let start: Vec<f64> = start.iter().map(|&x| f64::from(x)).collect();
                    let (out, _) = self.passed([&q, &k, &v], &decays, &start);
                    let shape = [rows, heads, value_dim];
                    let mut own = vec![];
                    for (t, v) in v.chunks(value_dim).enumerate() {
                        let of_row = |x: &[f64], i: usize| x[t * head_dim + i];
                        let score: f64 = (0..head_dim).map(|i| of_row(&q, i) * of_row(&k, i)).sum();
                        own.extend(v.iter().map(|v| score * v));
                    }
                    let kept =
                        |(out, own): (&f64, &f64)| if self.strict { out - own } else { *out };
                    let kept: Vec<f64> = out.iter().zip(&own).map(kept).collect();
                    add_rows(&mut exact.out, shape, (b, h), tokens.clone(), &kept);
                    let other = of(&inputs.other, value_dim);
                    let terms: Vec<f64> =
                        (0..out.len()).map(|at| (out[at] - own[at]) * other[at]).collect();
                    let shape = [self.padded(), heads, value_dim];
                    add_rows(&mut exact.products, shape, (b, h), tokens.clone(), &terms);
                    if self.of == Of::KeyChannels {
                        let (later, earlier) = if self.reverse { (&k, &q) } else { (&q, &k) };
                        let pairs = self.exact_pairs(later, earlier, &decays);
                        let shape = [self.padded(), heads, LINEAR_TILE];
                        add_rows(&mut exact.pairs, shape, (b, h), tokens, &pairs);
                    }
                }
            }
        }
        exact
    }

    /// Returns the outputs of some tokens, and the state that they leave.
    pub fn passed(
        &self,
        [q, k, v]: [&[f64]; 3],
        decays: &[f64],
        start: &[f64],
    ) -> (Vec<f64>, Vec<f64>) {
        let Case { head_dim, value_dim, .. } = *self;
        let none = |x: &[f64]| vec![0.0; x.len()];
        let (of_values, zeros) = (self.of == Of::ValueChannels, none(start));
        let dims = if of_values { [value_dim, head_dim] } else { [head_dim, value_dim] };
        let [q, k, v] = [q, k, v].map(<[f64]>::to_vec);
        let (nothing, decays) = (none(&v), decays.to_vec());
        let head = |q, k, v, dout| Head { dims, q, k, v, dout, decays, beta: None };
        let turn = |x: &[f64], columns: usize| -> Vec<f64> {
            (0..columns).flat_map(|c| x.iter().skip(c).step_by(columns).copied()).collect()
        };
        match (of_values, self.reverse) {
            (false, false) => {
                let Results { o, after, .. } = head(q, k, v, nothing).recurrence(start, &zeros);
                (o, after)
            }
            (false, true) => {
                let Results { dv, dbefore, .. } = head(k, q, nothing, v).recurrence(&zeros, start);
                (dv, dbefore)
            }
            (true, false) => {
                let start = turn(start, value_dim);
                let Results { dq, after, .. } = head(nothing, v, k, q).recurrence(&start, &zeros);
                (dq, turn(&after, head_dim))
            }
            (true, true) => {
                let start = turn(start, value_dim);
                let found = head(v, nothing, q, k).recurrence(&zeros, &start);
                (found.dk, turn(&found.dbefore, head_dim))
            }
        }
    }

    pub fn exact_pairs(&self, q: &[f64], k: &[f64], decays: &[f64]) -> Vec<f64> {
        let (dim, tokens) = (self.head_dim, q.len() / self.head_dim);
        let mut pairs = vec![0.0; tokens * LINEAR_TILE];
        for t in 0..tokens {
            let mut weights = vec![1.0; dim];
            for s in (t / LINEAR_TILE * LINEAR_TILE..=t).rev() {
                let term = |d: usize| q[t * dim + d] * k[s * dim + d] * weights[d];
                pairs[t * LINEAR_TILE + s % LINEAR_TILE] = (0..dim).map(term).sum();
                weights.iter_mut().enumerate().for_each(|(d, w)| *w *= decays[s * dim + d]);
            }
        }
        pairs
    }
}

/// Returns pairs `[batch, padded rows, heads, 64]` with rows and columns of tiles exchanged.
pub fn turned(pairs: &[f32], heads: usize) -> Vec<f32> {
    let turned = (0..pairs.len()).map(|at| {
        let (row, head, column) =
            (at / LINEAR_TILE / heads, at / LINEAR_TILE % heads, at % LINEAR_TILE);
        let from = row / LINEAR_TILE * LINEAR_TILE + column;
        pairs[(from * heads + head) * LINEAR_TILE + row % LINEAR_TILE]
    });
    turned.collect()
}
