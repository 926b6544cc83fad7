//! Softmax attention and its gradients with every feature, each pair of rows on its own.

use crate::{Dropout, Real};

/// An attention problem without its activations.
#[derive(Debug, Clone, PartialEq)]
pub struct Attention {
    /// Batch entries.
    pub batch: usize,
    /// Queries of each entry.
    pub q_len: usize,
    /// Keys of each entry.
    pub kv_len: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads, a divisor of `heads`.
    pub kv_heads: usize,
    /// Columns of queries and keys.
    pub head_dim: usize,
    /// Columns of values.
    pub value_dim: usize,
    /// Factor on q·k.
    pub softmax_scale: f32,
    /// The mask and the features.
    pub features: Features,
}

/// The mask and the features of a problem. By default every query sees every key.
#[derive(Debug, Clone, PartialEq)]
pub struct Features {
    /// Smallest and largest key row − query row that a query sees.
    pub band: (i64, i64),
    /// Segments of the query rows and of the key rows, `[batch, rows]`. A query sees the keys of its
    /// segment; a query of a negative segment sees none.
    pub segments: Option<[Vec<i32>; 2]>,
    /// Scores are bent to cap · tanh(score / cap).
    pub soft_cap: Option<f32>,
    /// Positions of query row 0 and of key row 0, and the distance of neighbouring rows. Slopes and
    /// dropout depend on positions.
    pub positions: (i64, i64, i64),
    /// Positions of the query rows and of the key rows, `[batch, rows]`, in place of `positions`.
    pub counted_positions: Option<[Vec<i32>; 2]>,
    /// Intervals of keys.
    pub visible: Option<Visible>,
    /// Factors on key position − query position, which are added to scores, `[batch, heads]`.
    pub slopes: Option<Vec<f32>>,
    /// Dropout of the weights.
    pub dropout: Option<Dropout>,
}

/// A query sees a key only if the query's position lies in an interval of the key.
#[derive(Debug, Clone, PartialEq)]
pub struct Visible {
    /// Positions of the query rows, `[batch, q_len]`.
    pub positions: Vec<i32>,
    /// Intervals of the key rows, `[batch, kv_len]`: the first position and the one behind the last.
    pub intervals: Vec<Vec<[i32; 2]>>,
}

impl Features {
    /// Returns the band of a window that reaches `left` rows back and `right` rows ahead; `None` is
    /// no limit.
    pub fn window(left: Option<i64>, right: Option<i64>) -> (i64, i64) {
        (left.map_or(i64::MIN, |rows| -rows), right.unwrap_or(i64::MAX))
    }
}

impl Default for Features {
    fn default() -> Features {
        Features {
            band: (i64::MIN, i64::MAX),
            segments: None,
            soft_cap: None,
            positions: (0, 0, 1),
            counted_positions: None,
            visible: None,
            slopes: None,
            dropout: None,
        }
    }
}

/// The arrays that attention takes. Each 16-bit number is a float32 number too.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Queries `[batch, q_len, heads, head_dim]`.
    pub q: &'a [f32],
    /// Keys `[batch, kv_len, kv_heads, head_dim]`.
    pub k: &'a [f32],
    /// Values `[batch, kv_len, kv_heads, value_dim]`.
    pub v: &'a [f32],
    /// Gradient of o, `[batch, q_len, heads, value_dim]`.
    pub dout: &'a [f32],
    /// Gradient of lse, `[batch, q_len, heads]`.
    pub dlse: &'a [f32],
}

/// Results as float64, of a computation in any precision.
#[derive(Debug, Clone, PartialEq)]
pub struct Dense {
    /// Output `[batch, q_len, heads, value_dim]`.
    pub o: Vec<f64>,
    /// Log-sum-exp of the scores, `[batch, q_len, heads]`.
    pub lse: Vec<f64>,
    /// rowsum(dout ∘ o) − dlse, as `lse`.
    pub delta: Vec<f64>,
    /// Gradient of q.
    pub dq: Vec<f64>,
    /// Gradient of k.
    pub dk: Vec<f64>,
    /// Gradient of v.
    pub dv: Vec<f64>,
    /// Each query's term of the gradient of its head's slope, as `lse`; 0 without slopes.
    pub dslopes: Vec<f64>,
    /// The largest absolute value of a score as the softmax takes it.
    pub largest: f64,
}

/// A key that a query sees.
struct Pair<R> {
    /// Row of the keys, over batch entries and key/value heads.
    key: usize,
    /// The score as the softmax takes it.
    score: R,
    /// The derivative of the score by scale · q·k.
    cap_slope: R,
    /// The factor that dropout puts on the weight.
    keep: R,
    /// Key position − query position, or 0 without slopes.
    distance: R,
}

impl Attention {
    /// Whether query row `i` sees key row `j` in a batch entry.
    fn sees(&self, entry: usize, i: usize, j: usize) -> bool {
        let (lower, upper) = self.features.band;
        let same_segment = self.features.segments.as_ref().is_none_or(|[queries, keys]| {
            let segment = queries[entry * self.q_len + i];
            segment >= 0 && segment == keys[entry * self.kv_len + j]
        });
        let is_visible = self.features.visible.as_ref().is_none_or(|visible| {
            let position = visible.positions[entry * self.q_len + i];
            let mut intervals = visible.intervals[entry * self.kv_len + j].iter();
            intervals.any(|&[start, stop]| (start..stop).contains(&position))
        });
        same_segment && is_visible && (lower..=upper).contains(&(j as i64 - i as i64))
    }

    /// Returns the scaled score after the soft cap, cap · tanh(s / cap), and its derivative,
    /// 1 − tanh²(s / cap).
    fn capped<R: Real>(&self, score: R) -> (R, R) {
        let one = R::from(1.0);
        let Some(cap) = self.features.soft_cap.map(R::from) else { return (score, one) };
        let ratio = (score / cap).tanh();
        (cap * ratio, one - ratio * ratio)
    }

    /// Returns the positions of query row `i` and of key row `j`.
    fn positions(&self, entry: usize, i: usize, j: usize) -> (i64, i64) {
        if let Some([queries, keys]) = &self.features.counted_positions {
            let (query, key) = (queries[entry * self.q_len + i], keys[entry * self.kv_len + j]);
            return (query.into(), key.into());
        }
        let (query, key, stride) = self.features.positions;
        (query + stride * i as i64, key + stride * j as i64)
    }

    /// Returns the keys that the query of row `at` sees, `at` counted over entries and heads.
    fn pairs<R: Real>(&self, at: usize, q: &[R], k: &[Vec<R>]) -> Vec<Pair<R>> {
        let Attention { q_len, kv_len, heads, kv_heads, .. } = *self;
        let Features { slopes, dropout, .. } = &self.features;
        let (entry, i, head) = (at / heads / q_len, at / heads % q_len, at % heads);
        let pair = |j: usize| {
            let (query, position) = self.positions(entry, i, j);
            let key = (entry * kv_len + j) * kv_heads + head / (heads / kv_heads);
            let product = dot(q, &k[key]);
            let (mut score, cap_slope) = self.capped(R::from(self.softmax_scale) * product);
            let mut distance = R::from(0.0);
            if let Some(slopes) = slopes {
                distance = R::from((position - query) as f32);
                score += R::from(slopes[entry * heads + head]) * distance;
            }
            let factor = |dropout: &Dropout| dropout.factor(entry, head, query, position);
            let keep = dropout.as_ref().map_or(R::from(1.0), factor);
            Pair { key, score, cap_slope, keep, distance }
        };
        (0..kv_len).filter(|&j| self.sees(entry, i, j)).map(pair).collect()
    }
}

fn row<R: Real>(array: &[f32], index: usize, dim: usize) -> Vec<R> {
    array[index * dim..][..dim].iter().map(|&x| R::from(x)).collect()
}

fn rows<R: Real>(array: &[f32], dim: usize) -> Vec<Vec<R>> {
    (0..array.len() / dim).map(|index| row(array, index, dim)).collect()
}

fn dot<R: Real>(a: &[R], b: &[R]) -> R {
    a.iter().zip(b).fold(R::from(0.0), |sum, (&a, &b)| sum + a * b)
}

fn add_scaled<R: Real>(sum: &mut [R], factor: R, row: &[R]) {
    sum.iter_mut().zip(row).for_each(|(sum, &x)| *sum += factor * x);
}

/// [`Dense`] while it is computed.
struct Results<R> {
    o: Vec<R>,
    lse: Vec<R>,
    delta: Vec<R>,
    dq: Vec<R>,
    dk: Vec<R>,
    dv: Vec<R>,
    dslopes: Vec<R>,
    largest: f64,
}

impl<R: Real> Results<R> {
    fn new(attention: &Attention) -> Results<R> {
        let Attention { batch, q_len, kv_len, heads, kv_heads, head_dim, value_dim, .. } =
            *attention;
        let (queries, keys) = (batch * q_len * heads, batch * kv_len * kv_heads);
        let zeros = |count| vec![R::from(0.0); count];
        Results {
            o: zeros(queries * value_dim),
            lse: vec![R::from(f32::NEG_INFINITY); queries],
            delta: zeros(queries),
            dq: zeros(queries * head_dim),
            dk: zeros(keys * head_dim),
            dv: zeros(keys * value_dim),
            dslopes: zeros(queries),
            largest: 0.0,
        }
    }

    /// Computes o and lse of query row `at`.
    fn forward(&mut self, at: usize, pairs: &[Pair<R>], v: &[Vec<R>], value_dim: usize) {
        let mut max = R::from(f32::NEG_INFINITY);
        for &Pair { score, .. } in pairs {
            max = if score > max { score } else { max };
            self.largest = self.largest.max(score.into().abs());
        }
        if pairs.is_empty() {
            return;
        }
        let total = pairs.iter().fold(R::from(0.0), |sum, pair| sum + (pair.score - max).exp());
        let out = &mut self.o[at * value_dim..][..value_dim];
        self.lse[at] = max + total.ln();
        for pair in pairs {
            add_scaled(out, (pair.score - max).exp() * pair.keep, &v[pair.key]);
        }
        out.iter_mut().for_each(|x| *x = *x / total);
    }

    /// Adds the terms of query row `at`, with its rows of q and dout, to the gradients.
    fn backward(
        &mut self,
        (at, scale): (usize, R),
        pairs: &[Pair<R>],
        [q, dout]: [&[R]; 2],
        [k, v]: [&[Vec<R>]; 2],
    ) {
        let (dim, value_dim) = (q.len(), dout.len());
        for &Pair { key, score, cap_slope, keep, distance } in pairs {
            let p = (score - self.lse[at]).exp();
            let ds = p * (keep * dot(dout, &v[key]) - self.delta[at]);
            self.dslopes[at] += ds * distance;
            add_scaled(&mut self.dq[at * dim..][..dim], scale * ds * cap_slope, &k[key]);
            add_scaled(&mut self.dk[key * dim..][..dim], scale * ds * cap_slope, q);
            add_scaled(&mut self.dv[key * value_dim..][..value_dim], p * keep, dout);
        }
    }
}

/// Computes attention and its gradients with numbers of type `R`:
///
/// ```text
/// s = scale · q·k;  capped: cap · tanh(s / cap);  s += slope · (key position − query position)
/// lse = ln Σ e^s;  p = e^(s − lse);  o = Σ p keep v;  delta = dout·o − dlse
/// ds = p (keep dout·v − delta);  dslope = Σ ds · (key position − query position)
/// dv = Σ p keep dout;  capped: ds ∘= 1 − tanh²;  dq = scale Σ ds k;  dk = scale Σ ds q
/// ```
///
/// A query that sees no key has o = 0 and lse = −∞. `store_o` rounds o before delta is computed
/// from it.
pub fn dense<R: Real>(
    attention: &Attention,
    inputs: &Inputs<'_>,
    store_o: impl Fn(R) -> R,
) -> Dense {
    let Attention { batch, q_len, heads, head_dim, value_dim, .. } = *attention;
    let (k, v) = (rows(inputs.k, head_dim), rows(inputs.v, value_dim));
    let scale = R::from(attention.softmax_scale);
    let mut results = Results::new(attention);
    for at in 0..batch * q_len * heads {
        let (q, dout) = (row(inputs.q, at, head_dim), row(inputs.dout, at, value_dim));
        let pairs = attention.pairs(at, &q, &k);
        results.forward(at, &pairs, &v, value_dim);
        let o = results.o[at * value_dim..][..value_dim].iter();
        let stored: Vec<R> = o.map(|&x| store_o(x)).collect();
        results.delta[at] = dot(&dout, &stored) - R::from(inputs.dlse[at]);
        results.backward((at, scale), &pairs, [&q, &dout], [&k, &v]);
    }
    let wide = |tensor: Vec<R>| tensor.into_iter().map(Into::into).collect();
    let Results { o, lse, delta, dq, dk, dv, dslopes, largest } = results;
    let [o, lse, delta, dq, dk, dv, dslopes] = [o, lse, delta, dq, dk, dv, dslopes].map(wide);
    Dense { o, lse, delta, dq, dk, dv, dslopes, largest }
}
