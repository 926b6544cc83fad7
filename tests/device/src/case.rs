//! The attention over the whole sequence, as no rank sees it.

use burst_attention::{Dtype, Problem, Window};
use burst_attention_kernels::instances::Element;
use half::{bf16, f16};

use crate::dropout::{kept, numbers};

/// What is computed over all ranks' tokens, in the order of the sequence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Case {
    /// Type of the activations.
    pub element: Element,
    /// Batch entries.
    pub batch: usize,
    /// Queries of all ranks.
    pub q_len: usize,
    /// Keys of all ranks.
    pub kv_len: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Columns.
    pub head_dim: usize,
    /// Columns of values.
    pub value_dim: usize,
    /// Does a query see keys up to its own position only?
    pub window: Window,
    /// Factor on q·k.
    pub softmax_scale: f32,
    /// 0 for none.
    pub soft_cap: f32,
    /// Are there segments?
    pub segments: bool,
    /// Are there slopes?
    pub slopes: bool,
    /// The rate at which weights are dropped.
    pub dropout: Option<f32>,
}

impl Case {
    /// Of a ring's problem.
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

    /// The factor on q·k.
    pub fn scale(&self) -> f32 {
        self.softmax_scale
    }

    /// Columns of values.
    pub fn value_dim(&self) -> usize {
        self.value_dim
    }

    /// The segment of a position: documents of seven tokens, and a few tokens in none.
    pub fn segment(&self, entry: usize, position: usize) -> i32 {
        let document = (position + 3 * entry) / 7;
        if position % 11 == 4 { -1 } else { document as i32 }
    }

    /// Does query `i` see key `j`?
    pub fn sees(&self, entry: usize, i: usize, j: usize) -> bool {
        let (query, key) = (self.segment(entry, i), self.segment(entry, j));
        self.window.allows(i, j) && (!self.segments || query == key && query >= 0)
    }

    /// Position of key `j` minus that of query `i`, where there are slopes.
    pub fn distance(&self, i: usize, j: usize) -> i64 {
        if self.slopes { j as i64 - i as i64 } else { 0 }
    }

    /// What the weight of query `i` and key `j` is times, of an entry and a head.
    pub fn kept(&self, (b, h): (usize, usize), i: usize, j: usize) -> f32 {
        self.dropout.map_or(1.0, |rate| kept(numbers(b), h, (i as u32, j as u32), rate))
    }
}

/// Rounds to the type of the activations.
pub fn round(element: Element, value: f32) -> f32 {
    match element {
        Element::Bf16 => bf16::from_f32(value).to_f32(),
        Element::F16 => f16::from_f32(value).to_f32(),
    }
}

/// Activations `[batch, rows, heads, head_dim]` as they are in 16 bits, and
/// dlse `[batch, q_len, heads]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Inputs {
    /// Queries.
    pub q: Vec<f32>,
    /// Keys.
    pub k: Vec<f32>,
    /// Values.
    pub v: Vec<f32>,
    /// Gradient of o.
    pub dout: Vec<f32>,
    /// Gradient of lse.
    pub dlse: Vec<f32>,
    /// Slopes `[batch, heads]`.
    pub slopes: Vec<f32>,
}

impl Inputs {
    /// Numbers about normally distributed, the same for the same seed.
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
}

/// splitmix64.
struct Random(u64);

impl Random {
    /// From −½ to ½.
    fn uniform(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let bits = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (bits >> 40) as f32 / (1 << 24) as f32 - 0.5
    }

    /// The sum of twelve uniform numbers, of variance 1.
    fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum()
    }
}
