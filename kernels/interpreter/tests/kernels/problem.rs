//! A case with its inputs and its exact results, and the errors that results may have.

use std::ops::Range;

use burst_attention_kernels::instances::{Kernel, TileShape};
use std::f64::consts::LOG2_E;

use super::case::{Case, Inputs, round};
use super::reference::{Dense, dense};

/// The arrays that a chain of launches writes.
pub type Outputs = Vec<Vec<f32>>;

/// The lse of a row that sees nothing.
const HUGE: f32 = 1.0e38;

/// The arrays that the forward pass and `delta` leave to the backward pass.
pub struct Saved {
    /// o rounded to 16 bits.
    pub o: Vec<f32>,
    pub lse: Vec<f32>,
    pub lse_log2: Vec<f32>,
    pub delta: Vec<f32>,
}

pub struct Problem {
    pub case: Case,
    pub inputs: Inputs,
    /// Exact arrays, rounded once, until a test replaces them.
    pub saved: Saved,
    /// Results in float64.
    pub exact: Dense,
    /// Results in float32, not rounded further.
    pub plain: Dense,
}

/// The result of a check.
#[derive(Debug, Clone, Copy)]
pub struct Found {
    /// The largest ratio of an output's error to its measure; 2 is the limit.
    pub worst: f64,
    /// Launches of all steps.
    pub launches: usize,
}

/// An output, its exact value, and its value in plain float32.
pub struct Output<'a> {
    pub name: &'static str,
    pub got: &'a [f32],
    pub exact: &'a [f64],
    pub plain: &'a [f64],
    /// Root mean square of an error that is allowed whatever plain float32's error is.
    pub floor: f64,
}

impl Problem {
    pub fn new(case: Case) -> Problem {
        let inputs = Inputs::new(&case);
        let exact = dense::<f64>(&case, &inputs, |o| o);
        let plain = dense::<f32>(&case, &inputs, |o| o);
        let in_base_2 = |&lse: &f64| match lse == f64::NEG_INFINITY {
            true => HUGE,
            false => (lse * LOG2_E) as f32,
        };
        let saved = Saved {
            o: exact.o.iter().map(|&x| round(case.element, x as f32)).collect(),
            lse: exact.lse.iter().map(|&x| x as f32).collect(),
            lse_log2: exact.lse.iter().map(in_base_2).collect(),
            delta: exact.delta.iter().map(|&x| x as f32).collect(),
        };
        Problem { case, inputs, saved, exact, plain }
    }

    /// Returns the tile shape of a kernel for this case.
    pub fn tile(&self, kernel: Kernel) -> TileShape {
        let instance = self.case.instance(kernel, false);
        instance.expect("an image for every case").tile()
    }

    /// Returns a floor of a gradient's error: float32's rounding, 2^-24, of terms that cancel in
    /// the gradient's sum. The terms are p·scale·(dp − delta)·x with x of size `factor`; dp and
    /// delta are dot products of `value_dim` terms of about 1, so their size is about its root. The
    /// floor is four roundings, for cases where one key has all the weight: then dp = delta, and
    /// plain float32 may hit 0.
    pub fn gradient_floor(&self, factor: f32) -> f64 {
        let dot = f64::from(self.case.scale()) * (self.case.value_dim() as f64).sqrt();
        4.0 * 2f64.powi(-24) * dot * f64::from(factor)
    }

    /// Returns the ratio of errors. It must be at most 2, and nothing may be NaN.
    pub fn ratio(&self, output: &Output) -> Result<f64, String> {
        let Output { name, got, exact, plain, floor } = *output;
        if got.len() != exact.len() {
            return Err(format!("{} elements of {name}, expected {}", got.len(), exact.len()));
        }
        if let Some(at) = got.iter().position(|x| !x.is_finite()) {
            return Err(format!("element {at} of {name} is {}", got[at]));
        }
        let rounded = plain.iter().map(|&x| f64::from(round(self.case.element, x as f32)));
        let error = norm(got.iter().zip(exact).map(|(&got, exact)| f64::from(got) - exact));
        let bar = norm(rounded.zip(exact).map(|(plain, exact)| plain - exact));
        let floor = floor * (got.len() as f64).sqrt();
        let ratio = if error == 0.0 { 0.0 } else { error / (bar + floor / 2.0) };
        let relative = error / norm(exact.iter().copied());
        match ratio <= 2.0 {
            true => Ok(ratio),
            false => {
                Err(format!("{name} is off by {relative:.2e}, {ratio:.2} times plain float32"))
            }
        }
    }

    /// Checks that the rows which `dead` names are 0.
    pub fn zero(
        &self,
        name: &str,
        got: &[f32],
        dead: impl Fn(usize) -> bool,
    ) -> Result<(), String> {
        let of_values = matches!(name, "o" | "dv");
        let columns = if of_values { self.case.value_dim() } else { self.case.head_dim };
        let rows = got.chunks(columns).enumerate();
        match rows.clone().find(|(at, row)| dead(*at) && row.iter().any(|&x| x != 0.0)) {
            None => Ok(()),
            Some((at, _)) => Err(format!("row {at} of {name} sees nothing and is not 0")),
        }
    }

    /// Returns the largest distance of a query and a key that it sees.
    pub fn farthest(&self) -> f32 {
        let Case { batch, q_len, kv_len, .. } = self.case;
        let seen = |b, i| (0..kv_len).filter(move |&j| self.case.sees(b, i, j));
        let rows = (0..batch).flat_map(|b| (0..q_len).map(move |i| (b, i)));
        let far =
            rows.flat_map(|(b, i)| seen(b, i).map(move |j| self.case.distance(b, i, j).abs()));
        far.max().unwrap_or(0) as f32
    }

    /// Whether query row `at`, counted over entries and heads, sees no key.
    pub fn blind(&self, at: usize) -> bool {
        let Case { q_len, kv_len, heads, .. } = self.case;
        let (b, i) = (at / heads / q_len, at / heads % q_len);
        (0..kv_len).all(|j| !self.case.sees(b, i, j))
    }

    /// Whether no query sees key row `at`, counted over entries and heads.
    pub fn unseen(&self, at: usize) -> bool {
        let Case { q_len, kv_len, kv_heads, .. } = self.case;
        let (b, j) = (at / kv_heads / kv_len, at / kv_heads % kv_len);
        (0..q_len).all(|i| !self.case.sees(b, i, j))
    }

    /// Runs a chain of launches with blocks in two orders. The outputs must be the same bits.
    pub fn twice<T>(
        &self,
        run: impl Fn(u64) -> Result<(Outputs, T), String>,
    ) -> Result<(Outputs, T), String> {
        let (first, _, more) = self.twice_of(usize::MAX, run)?;
        Ok((first, more))
    }

    /// Runs a chain of launches with blocks in two orders. The first `fixed` outputs must be the
    /// same bits. Returns the outputs of both orders.
    pub fn twice_of<T>(
        &self,
        fixed: usize,
        run: impl Fn(u64) -> Result<(Outputs, T), String>,
    ) -> Result<(Outputs, Outputs, T), String> {
        let (first, more) = run(1)?;
        let second = run(2)?.0;
        let bits = |outputs: &[Vec<f32>]| -> Vec<u32> {
            outputs.iter().take(fixed).flatten().map(|x| x.to_bits()).collect()
        };
        match bits(&first) == bits(&second) {
            true => Ok((first, second, more)),
            false => Err("another order of blocks gives other bits".into()),
        }
    }

    /// Returns the keys that a lean case has: the tiles with a visible row.
    pub fn visited_keys(&self, kernel: Kernel) -> Range<usize> {
        self.visited(self.tile(kernel).keys as usize, self.case.kv_len, |j| {
            (0..self.case.q_len).any(|i| self.case.sees(0, i, j))
        })
    }

    /// Returns the queries that a lean case has: the tiles with a row that sees something.
    pub fn visited_queries(&self, kernel: Kernel) -> Range<usize> {
        self.visited(self.tile(kernel).rows as usize, self.case.q_len, |i| {
            (0..self.case.kv_len).any(|j| self.case.sees(0, i, j))
        })
    }

    fn visited(&self, unit: usize, len: usize, seen: impl Fn(usize) -> bool) -> Range<usize> {
        if !self.case.lean {
            return 0..len;
        }
        let first = (0..len).find(|&row| seen(row)).unwrap_or(0);
        let end = (0..len).rfind(|&row| seen(row)).map_or(0, |last| last + 1);
        first / unit * unit..end.next_multiple_of(unit).min(len)
    }
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|x| x * x).sum::<f64>().sqrt()
}
