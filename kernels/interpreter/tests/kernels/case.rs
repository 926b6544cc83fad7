//! Cases: sizes, band, the way in which the work is cut, and the inputs.

use burst_attention_kernels::instances::{Element, Instance, Kernel, Target, width_of};
use burst_attention_kernels::launch::{MAX_VIEW_BYTES, Rectangle};
use burst_attention_kernels::variant::{FeatureSet, Variant};
use half::{bf16, f16};
use std::ops::Range;

/// No limit of a band.
pub const NONE: (i64, i64) = (i64::MIN, i64::MAX);
/// The band in which each query sees the keys up to its own position.
pub const CAUSAL: (i64, i64) = (i64::MIN, 0);

/// Segments of rows: a number of rows and their segment, one after the other, then again from the
/// start.
pub type Runs = &'static [(usize, i32)];

/// Masks as data, from entry and row.
#[derive(Debug, Clone, Copy)]
pub struct Masks {
    /// Position of a query.
    pub position: fn(usize, usize) -> i32,
    /// Intervals of a key.
    pub intervals: fn(usize, usize) -> [[i32; 2]; 2],
    /// How many of these intervals count; without any, each query sees each key.
    pub count: usize,
    /// Position of a key, if slopes and dropout count by the positions of both sides.
    pub counted: Option<fn(usize, usize) -> i32>,
}

#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub element: Element,
    pub target: Target,
    pub batch: usize,
    pub q_len: usize,
    pub kv_len: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Columns of values, if they differ from the columns of keys.
    pub value_dim: Option<usize>,
    /// Smallest and largest key row − query row of pairs that see each other.
    pub band: (i64, i64),
    /// Segments of queries and of keys; without them all rows share a segment.
    pub segments: Option<(Runs, Runs)>,
    /// Masks as data.
    pub masks: Option<Masks>,
    /// Soft cap; 0 for none.
    pub soft_cap: f32,
    /// Whether there is a bias by distance.
    pub slopes: bool,
    /// Rate at which weights are dropped.
    pub dropout: Option<f32>,
    /// Positions of query row 0 and of key row 0, and the distance of rows.
    pub positions: (i64, i64, i64),
    /// Scale, if it differs from the default.
    pub softmax_scale: Option<f32>,
    /// Factor on the queries, to make logits large.
    pub magnitude: f32,
    /// Rows of each array before and after the rows in use.
    pub margin: usize,
    /// Limit that a view's bytes stay below.
    pub limit: u64,
    /// The streamed rows of each step, in order; without steps, one step streams all rows.
    pub steps: &'static [(usize, usize)],
    /// Whether the last step writes the results instead of the running state.
    pub finished: bool,
    /// Whether streamed rows that no block may visit stay unwritten, for a single resident tile
    /// only.
    pub lean: bool,
    /// Whether lse has a gradient (for `delta`), and whether there is a second summand (for
    /// `cast`).
    pub second: bool,
}

pub const CASE: Case = Case {
    element: Element::Bf16,
    target: Target::Sm90,
    batch: 1,
    q_len: 100,
    kv_len: 100,
    heads: 1,
    kv_heads: 1,
    head_dim: 64,
    value_dim: None,
    band: NONE,
    segments: None,
    masks: None,
    soft_cap: 0.0,
    slopes: false,
    dropout: None,
    positions: (0, 0, 1),
    softmax_scale: None,
    magnitude: 1.0,
    margin: 4,
    limit: MAX_VIEW_BYTES,
    steps: &[],
    finished: true,
    lean: false,
    second: true,
};

impl Case {
    pub fn scale(&self) -> f32 {
        self.softmax_scale.unwrap_or_else(|| (self.head_dim as f32).sqrt().recip())
    }

    /// Returns the columns of values.
    pub fn value_dim(&self) -> usize {
        self.value_dim.unwrap_or(self.head_dim)
    }

    /// Returns the variant that an image must serve to compute the case in one step.
    pub fn variant(&self) -> Variant {
        let features = FeatureSet::SEGMENTS
            .when(self.segments.is_some())
            .and(FeatureSet::VISIBLE.when(self.masks.is_some()))
            .and(FeatureSet::SOFT_CAP.when(self.soft_cap > 0.0))
            .and(FeatureSet::SLOPES.when(self.slopes))
            .and(FeatureSet::DROPOUT.when(self.dropout.is_some()));
        // The first key is hidden from the last query.
        let window = self.band.0 > 1 - self.q_len as i64;
        Variant { window, ..Variant::PLAIN.with(features) }
    }

    /// Whether kernels without features compute the case too.
    pub fn suits_rows(&self) -> bool {
        self.variant().features == FeatureSet::NONE && self.value_dim.is_none()
    }

    /// Returns the image of a kernel that computes the case in one step, fused or not, if such an
    /// image exists.
    pub fn instance(&self, kernel: Kernel, fused: bool) -> Option<Instance> {
        let variant = Variant { fused, ..self.variant() };
        let variant = if kernel.has_pairs() { variant } else { Variant::PLAIN };
        let width = width_of(self.head_dim.max(self.value_dim()))?;
        let (element, target) = (self.element, self.target);
        Instance { kernel, variant, element, width, target }.smallest()
    }

    /// Returns the segment of query row `i` of entry `b`.
    pub fn q_segment(&self, b: usize, i: usize) -> i32 {
        self.segments.map_or(0, |(runs, _)| segment(runs, b, i))
    }

    /// Returns the segment of key row `j` of entry `b`.
    pub fn kv_segment(&self, b: usize, j: usize) -> i32 {
        self.segments.map_or(0, |(_, runs)| segment(runs, b, j))
    }

    /// Whether the band lets query `i` see key `j`.
    pub fn allows(&self, i: usize, j: usize) -> bool {
        (self.band.0..=self.band.1).contains(&(j as i64 - i as i64))
    }

    /// Whether query `i` of entry `b` sees key `j`.
    pub fn sees(&self, b: usize, i: usize, j: usize) -> bool {
        let segment = self.q_segment(b, i);
        self.allows(i, j) && segment == self.kv_segment(b, j) && segment >= 0 && self.shows(b, i, j)
    }

    /// Whether intervals let query `i` of entry `b` see key `j`.
    fn shows(&self, b: usize, i: usize, j: usize) -> bool {
        self.masks.filter(|masks| masks.count > 0).is_none_or(|masks| {
            let (position, intervals) = ((masks.position)(b, i), (masks.intervals)(b, j));
            let mut intervals = intervals[..masks.count].iter();
            intervals.any(|&[start, stop]| (start..stop).contains(&position))
        })
    }

    /// Returns the positions of query `i` and key `j` that launches count from first rows.
    pub fn even_positions(&self, i: usize, j: usize) -> (i64, i64) {
        let (query, key, stride) = self.positions;
        (query + stride * i as i64, key + stride * j as i64)
    }

    /// Returns the position of key `j` minus the position of query `i`, a factor of slopes; 0
    /// without slopes.
    pub fn distance(&self, b: usize, i: usize, j: usize) -> i64 {
        let data = self.masks.and_then(|masks| Some((masks.position, masks.counted?)));
        let (query, key) = match data {
            Some((of_query, of_key)) => (of_query(b, i).into(), of_key(b, j).into()),
            None => self.even_positions(i, j),
        };
        if self.slopes { key - query } else { 0 }
    }

    /// The streamed rows of each step, `len` in all.
    pub fn ranges(&self, len: usize) -> Vec<Range<usize>> {
        match self.steps {
            [] => std::iter::once(0..len).collect(),
            steps => steps.iter().map(|&(start, end)| start..end.min(len)).collect(),
        }
    }

    /// Returns the rectangle of some queries and some keys.
    pub fn rectangle(&self, queries: &Range<usize>, keys: &Range<usize>) -> Rectangle {
        let shift = queries.start as i64 - keys.start as i64;
        let shifted = |limit: i64| match limit {
            i64::MIN | i64::MAX => limit,
            _ => limit + shift,
        };
        Rectangle {
            batch: self.batch,
            q_len: queries.len(),
            kv_len: keys.len(),
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            value_dim: self.value_dim(),
            element: self.element,
            lower: shifted(self.band.0),
            upper: shifted(self.band.1),
            softmax_scale: self.scale(),
        }
    }
}

/// Returns the segment of a row. Each entry begins 29 rows further on in the runs.
fn segment(runs: Runs, b: usize, row: usize) -> i32 {
    let period: usize = runs.iter().map(|(rows, _)| rows).sum();
    let mut left = (row + 29 * b) % period;
    for &(rows, segment) in runs {
        if left < rows {
            return segment;
        }
        left -= rows;
    }
    unreachable!("row {left} is within the period of {period}")
}

/// Returns a value rounded to the type of the activations.
pub fn round(element: Element, value: f32) -> f32 {
    match element {
        Element::Bf16 => bf16::from_f32(value).to_f32(),
        Element::F16 => f16::from_f32(value).to_f32(),
    }
}

/// A source of numbers that are about normally distributed, the same for the same seed.
pub struct Random(pub u64);

impl Random {
    fn uniform(&mut self) -> f32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1 << 24) as f32 - 0.5
    }

    /// Returns the sum of six uniform numbers, which has variance ½, scaled to variance 1.
    pub fn normal(&mut self) -> f32 {
        (0..6).map(|_| self.uniform()).sum::<f32>() * std::f32::consts::SQRT_2
    }

    pub fn tensor(&mut self, count: usize, to: impl Fn(f32) -> f32) -> Vec<f32> {
        (0..count).map(|_| to(self.normal())).collect()
    }
}

/// Activations `[batch, rows, heads, head_dim]`, with `value_dim` columns for values, rounded to 16
/// bits; and dlse `[batch, q_len, heads]`.
pub struct Inputs {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub dout: Vec<f32>,
    pub dlse: Vec<f32>,
    /// Slopes of either sign, `[batch, heads]`.
    pub slopes: Vec<f32>,
}

impl Inputs {
    pub fn new(case: &Case) -> Inputs {
        let mut random = Random(7);
        let Case { batch, q_len, kv_len, heads, kv_heads, head_dim, .. } = *case;
        let (queries, keys) = (batch * q_len * heads, batch * kv_len * kv_heads);
        let rounded = |value| round(case.element, value);
        Inputs {
            q: random.tensor(queries * head_dim, |value| rounded(value * case.magnitude)),
            k: random.tensor(keys * head_dim, rounded),
            v: random.tensor(keys * case.value_dim(), rounded),
            dout: random.tensor(queries * case.value_dim(), rounded),
            dlse: random.tensor(queries, |value| value),
            slopes: random.tensor(batch * heads, |value| 0.1 * value),
        }
    }
}
