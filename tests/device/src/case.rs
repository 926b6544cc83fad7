//! Attention over the whole sequence, which no rank holds.

use burst_attention::{Dtype, Problem, Window};
use burst_attention_kernels::instances::Element;
use burst_attention_reference::{self as reference, Attention, Dropout, Features, numbers};
use half::{bf16, f16};

/// What is computed over all ranks' tokens, in the order of the sequence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Case {
    /// The type of the activations.
    pub element: Element,
    /// The number of batch entries.
    pub batch: usize,
    /// The number of queries of all ranks.
    pub q_len: usize,
    /// The number of keys of all ranks.
    pub kv_len: usize,
    /// The number of query heads.
    pub heads: usize,
    /// The number of key/value heads.
    pub kv_heads: usize,
    /// The columns of queries and keys.
    pub head_dim: usize,
    /// The columns of values.
    pub value_dim: usize,
    /// The keys that a query sees.
    pub window: Window,
    /// The factor on q·k.
    pub softmax_scale: f32,
    /// The soft cap; 0 for none.
    pub soft_cap: f32,
    /// Whether the problem has segments.
    pub segments: bool,
    /// Whether the problem has slopes.
    pub slopes: bool,
    /// The rate at which weights are dropped.
    pub dropout: Option<f32>,
}

impl Case {
    /// Returns the case of a ring's problem.
    ///
    /// # Panics
    /// For float32, which no kernel takes.
    pub fn of(problem: &Problem) -> Case {
        let Problem { batch, q_len, kv_len, heads, kv_heads, head_dim, .. } = *problem;
        let Problem { window, softmax_scale, features, world_size, .. } = *problem;
        let element = match problem.dtype {
            Dtype::Bf16 => Element::Bf16,
            Dtype::F16 => Element::F16,
            Dtype::F32 => panic!("kernels take 16-bit activations"),
        };
        let (q_len, kv_len) = (q_len * world_size, kv_len * world_size);
        Case {
            element,
            batch,
            q_len,
            kv_len,
            heads,
            kv_heads,
            head_dim,
            value_dim: problem.value_dim,
            window,
            softmax_scale,
            soft_cap: features.soft_cap.unwrap_or(0.0),
            segments: features.segments,
            slopes: features.slopes,
            dropout: features.dropout,
        }
    }

    /// The segment of a position: documents of seven tokens, and a few tokens in none.
    pub fn segment(&self, entry: usize, position: usize) -> i32 {
        let document = (position + 3 * entry) / 7;
        if position % 11 == 4 { -1 } else { document as i32 }
    }

    /// The same problem for the reference.
    pub fn attention(&self, inputs: &Inputs) -> Attention {
        let Case { batch, q_len, kv_len, heads, kv_heads, head_dim, value_dim, .. } = *self;
        let Window { left, right } = self.window;
        let segments = |rows: usize| {
            let rows = (0..batch).flat_map(move |entry| (0..rows).map(move |row| (entry, row)));
            rows.map(|(entry, row)| self.segment(entry, row)).collect()
        };
        let numbers = || (0..batch).map(numbers).collect();
        Attention {
            batch,
            q_len,
            kv_len,
            heads,
            kv_heads,
            head_dim,
            value_dim,
            softmax_scale: self.softmax_scale,
            features: Features {
                band: Features::window(left, right),
                segments: self.segments.then(|| [segments(q_len), segments(kv_len)]),
                soft_cap: (self.soft_cap != 0.0).then_some(self.soft_cap),
                slopes: self.slopes.then(|| inputs.slopes.clone()),
                dropout: self.dropout.map(|rate| Dropout { rate, numbers: numbers() }),
                ..Features::default()
            },
        }
    }
}

/// Rounds to the type of the activations.
pub fn round(element: Element, value: f32) -> f32 {
    match element {
        Element::Bf16 => bf16::from_f32(value).to_f32(),
        Element::F16 => f16::from_f32(value).to_f32(),
    }
}

/// Activations `[batch, rows, heads, head_dim]`, rounded to 16 bits, and other inputs.
#[derive(Debug, Clone, PartialEq)]
pub struct Inputs {
    /// Queries.
    pub q: Vec<f32>,
    /// Keys.
    pub k: Vec<f32>,
    /// Values.
    pub v: Vec<f32>,
    /// The gradient of o.
    pub dout: Vec<f32>,
    /// The gradient of lse, `[batch, q_len, heads]`.
    pub dlse: Vec<f32>,
    /// Slopes, `[batch, heads]`.
    pub slopes: Vec<f32>,
}

impl Inputs {
    /// Returns nearly normal random inputs, the same for the same seed.
    pub fn new(case: &Case, seed: u64) -> Inputs {
        let mut random = Random(seed);
        let queries = case.batch * case.q_len * case.heads;
        let keys = case.batch * case.kv_len * case.kv_heads;
        let mut rounded = |count: usize| -> Vec<f32> {
            (0..count).map(|_| round(case.element, random.normal())).collect()
        };
        let (q, dout) = (rounded(queries * case.head_dim), rounded(queries * case.value_dim));
        let (k, v) = (rounded(keys * case.head_dim), rounded(keys * case.value_dim));
        let dlse = (0..queries).map(|_| random.normal()).collect();
        let slopes = (0..case.batch * case.heads).map(|_| 0.1 * random.normal()).collect();
        Inputs { q, k, v, dout, dlse, slopes }
    }

    /// The arrays for the reference.
    pub fn arrays(&self) -> reference::Inputs<'_> {
        let Inputs { q, k, v, dout, dlse, .. } = self;
        reference::Inputs { q, k, v, dout, dlse }
    }
}

/// The random numbers of splitmix64.
struct Random(u64);

impl Random {
    /// Returns a number from −½ to ½.
    fn uniform(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let bits = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (bits >> 40) as f32 / (1 << 24) as f32 - 0.5
    }

    /// Returns the sum of twelve uniform numbers, whose variance is 1.
    fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum()
    }
}
