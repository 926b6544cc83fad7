//! A problem with its inputs and what is right, cut into the ranks' shards.

use burst_attention::cuda::rank::{Arrays, Extras};
use burst_attention::{Pass, Problem};
use burst_attention_interpreter::{Address, Memory};
use burst_attention_kernels::instances::Element;
use half::{bf16, f16};

use super::dropout::numbers;
use super::{Case, Dense, Inputs, World, dense, round};

/// What a shard's array holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Activations `[batch, n, heads, head_dim]`.
    Queries,
    /// Activations `[batch, n, heads, value_dim]`.
    Outputs,
    /// Activations `[batch, n, kv_heads, head_dim]`.
    Keys,
    /// Activations `[batch, n, kv_heads, value_dim]`.
    Values,
    /// Float32 `[batch, n, heads]`.
    PerQuery,
}

/// Addresses of one rank's arrays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// Queries.
    pub q: Address,
    /// Keys.
    pub k: Address,
    /// Values.
    pub v: Address,
    /// Result of the forward pass.
    pub o: Address,
    /// Its log-sum-exp, per query.
    pub lse: Address,
    /// Gradient of `o`.
    pub dout: Address,
    /// Gradient of `lse`.
    pub dlse: Address,
    /// Result of the backward pass.
    pub dq: Address,
    /// Result, as `k`.
    pub dk: Address,
    /// Result, as `v`.
    pub dv: Address,
    /// What features need: segments of queries and of keys, slopes, numbers for dropout; and what
    /// each query adds to the slopes' gradient.
    pub extras: [Address; 5],
}

impl Shard {
    /// As the executor takes them.
    pub fn arrays(&self, pass: Pass) -> Arrays {
        let Shard { q, k, v, o, lse, dout, dlse, dq, dk, dv, extras } = *self;
        let [q_segments, k_segments, slopes, dropout, dslopes] = extras.map(|at| at.0);
        let extras = Extras { q_segments, k_segments, slopes, dropout, dslopes };
        let [q, k, v, o, lse] = [q, k, v, o, lse].map(|at| at.0);
        let [dout, dlse, dq, dk, dv] = [dout, dlse, dq, dk, dv].map(|at| at.0);
        match pass {
            Pass::Forward => Arrays::Forward { q, k, v, o, lse, extras },
            Pass::Backward => Arrays::Backward { q, k, v, o, lse, dout, dlse, dq, dk, dv, extras },
        }
    }
}

/// A problem with random inputs, and its results in float64 and float32. All values are in the
/// order of the sequence: `[batch, world_size · n, heads, head_dim]`, or without the last.
pub struct Ring {
    /// What each rank is told.
    pub problem: Problem,
    /// The same of all ranks together.
    pub case: Case,
    /// Rounded to the type of the activations.
    pub inputs: Inputs,
    /// In float64.
    pub exact: Dense,
    /// In float32, where o is rounded before delta is computed from it.
    pub plain: Dense,
}

impl Ring {
    /// With inputs of a seed.
    pub fn new(problem: Problem, seed: u64) -> Ring {
        let case = Case::of(&problem);
        let inputs = Inputs::new(&case, seed);
        let exact = dense::<f64>(&case, &inputs, |o| o);
        let plain = dense::<f32>(&case, &inputs, |o| round(case.element, o));
        Ring { problem, case, inputs, exact, plain }
    }

    /// Elements of a row.
    fn width(&self, kind: Kind) -> usize {
        match kind {
            Kind::Queries => self.case.heads * self.case.head_dim,
            Kind::Outputs => self.case.heads * self.case.value_dim,
            Kind::Keys => self.case.kv_heads * self.case.head_dim,
            Kind::Values => self.case.kv_heads * self.case.value_dim,
            Kind::PerQuery => self.case.heads,
        }
    }

    /// Rows of a rank.
    fn rows(&self, kind: Kind) -> usize {
        match kind {
            Kind::Keys | Kind::Values => self.problem.kv_len,
            _ => self.problem.q_len,
        }
    }

    /// For each element of a rank's array where it is in the order of the sequence.
    fn places(&self, rank: usize, kind: Kind) -> impl Iterator<Item = usize> {
        let Problem { batch, layout, world_size, .. } = self.problem;
        let n = self.rows(kind);
        let width = self.width(kind);
        let rows = (0..batch).flat_map(move |entry| (0..n).map(move |row| (entry, row)));
        rows.flat_map(move |(entry, row)| {
            let position = layout.position(rank, row, world_size, n);
            let start = (entry * world_size * n + position) * width;
            start..start + width
        })
    }

    /// A rank's part of values in the order of the sequence.
    pub fn shard(&self, rank: usize, kind: Kind, values: &[f32]) -> Vec<f32> {
        self.places(rank, kind).map(|place| values[place]).collect()
    }

    /// Values in the order of the sequence from all ranks' parts.
    pub fn gather(&self, kind: Kind, shards: &[Vec<f32>]) -> Vec<f32> {
        let mut values = vec![f32::NAN; shards.iter().map(Vec::len).sum()];
        for (rank, shard) in shards.iter().enumerate() {
            self.places(rank, kind).zip(shard).for_each(|(place, value)| values[place] = *value);
        }
        values
    }

    /// Allocates all ranks' arrays, rank `r`'s on device `device(r)`, and writes the inputs. What
    /// the passes compute is not written.
    pub fn place(&self, world: &mut World, device: impl Fn(usize) -> usize) -> Vec<Shard> {
        (0..self.problem.world_size).map(|rank| self.place_one(world, rank, device(rank))).collect()
    }

    fn place_one(&self, world: &mut World, rank: usize, device: usize) -> Shard {
        let batch = self.problem.batch;
        let mut array = |name: &str, kind| {
            let bytes = if kind == Kind::PerQuery { 4 } else { 2 };
            let bytes = (batch * self.rows(kind) * self.width(kind) * bytes) as u64;
            world.allocate(device, &format!("{name} of rank {rank}"), bytes)
        };
        let shard = Shard {
            q: array("q", Kind::Queries),
            k: array("k", Kind::Keys),
            v: array("v", Kind::Values),
            o: array("o", Kind::Outputs),
            lse: array("lse", Kind::PerQuery),
            dout: array("dout", Kind::Outputs),
            dlse: array("dlse", Kind::PerQuery),
            dq: array("dq", Kind::Queries),
            dk: array("dk", Kind::Keys),
            dv: array("dv", Kind::Values),
            extras: self.place_extras(world, rank, device),
        };
        let inputs = &self.inputs;
        self.write(world, rank, (shard.q, Kind::Queries), &inputs.q);
        self.write(world, rank, (shard.k, Kind::Keys), &inputs.k);
        self.write(world, rank, (shard.v, Kind::Values), &inputs.v);
        self.write(world, rank, (shard.dout, Kind::Outputs), &inputs.dout);
        self.write(world, rank, (shard.dlse, Kind::PerQuery), &inputs.dlse);
        shard
    }

    /// Allocates and writes what features need.
    fn place_extras(&self, world: &mut World, rank: usize, device: usize) -> [Address; 5] {
        let Problem { batch, layout, world_size, q_len, kv_len, heads, features, .. } =
            self.problem;
        let mut array = |name: &str, wanted: bool, words: Vec<f32>| {
            if !wanted {
                return Address(0);
            }
            let at = world.allocate(device, &format!("{name} of {rank}"), 4 * words.len() as u64);
            world.memory.write_f32(at, &words);
            at
        };
        let segments = |len: usize| -> Vec<f32> {
            let rows = (0..batch).flat_map(|entry| (0..len).map(move |row| (entry, row)));
            let id = |(entry, row)| {
                self.case.segment(entry, layout.position(rank, row, world_size, len)) as u32
            };
            rows.map(|row| f32::from_bits(id(row))).collect()
        };
        let words = (0..batch).flat_map(numbers).map(f32::from_bits).collect();
        [
            array("segments of queries", features.segments, segments(q_len)),
            array("segments of keys", features.segments, segments(kv_len)),
            array("slopes", features.slopes, self.inputs.slopes.clone()),
            array("numbers for dropout", features.dropout.is_some(), words),
            array("gradient of slopes", features.slopes, vec![0.0; batch * q_len * heads]),
        ]
    }

    /// Writes o and lse as an exact forward pass would leave them, for a backward pass alone.
    pub fn save(&self, world: &mut World, shards: &[Shard]) {
        let narrow = |values: &[f64]| values.iter().map(|x| *x as f32).collect::<Vec<_>>();
        let (o, lse) = (narrow(&self.exact.o), narrow(&self.exact.lse));
        for (rank, shard) in shards.iter().enumerate() {
            self.write(world, rank, (shard.o, Kind::Outputs), &o);
            self.write(world, rank, (shard.lse, Kind::PerQuery), &lse);
        }
    }

    /// Writes a rank's part of `values`, which are in the order of the sequence.
    pub fn write(
        &self,
        world: &mut World,
        rank: usize,
        (at, kind): (Address, Kind),
        values: &[f32],
    ) {
        let values = self.shard(rank, kind, values);
        match (kind, self.case.element) {
            (Kind::PerQuery, _) => world.memory.write_f32(at, &values),
            (_, Element::Bf16) => {
                let values: Vec<_> = values.into_iter().map(bf16::from_f32).collect();
                world.memory.write_bf16(at, &values);
            }
            (_, Element::F16) => {
                let values: Vec<_> = values.into_iter().map(f16::from_f32).collect();
                world.memory.write_f16(at, &values);
            }
        }
    }

    /// Gathers an array of all ranks; what nobody wrote is NaN.
    pub fn read(
        &self,
        memory: &Memory,
        shards: &[Shard],
        kind: Kind,
        array: impl Fn(&Shard) -> Address,
    ) -> Vec<f32> {
        let count = self.problem.batch * self.rows(kind) * self.width(kind);
        let of = |shard: &Shard| -> Vec<f32> {
            let at = array(shard);
            match (kind, self.case.element) {
                (Kind::PerQuery, _) => memory.read_f32(at, count),
                (_, Element::Bf16) => {
                    memory.read_bf16(at, count).into_iter().map(bf16::to_f32).collect()
                }
                (_, Element::F16) => {
                    memory.read_f16(at, count).into_iter().map(f16::to_f32).collect()
                }
            }
        };
        self.gather(kind, &shards.iter().map(of).collect::<Vec<_>>())
    }

    /// Checks o and lse of all ranks; the ratio of o's error to plain float32's.
    ///
    /// # Errors
    /// What is off, and by how much.
    pub fn check_forward(&self, world: &World, shards: &[Shard]) -> Result<f64, String> {
        let memory = &world.memory;
        let lse = self.read(memory, shards, Kind::PerQuery, |shard| shard.lse);
        // Three float32 roundings of a number as large, and those of a dot product.
        let bound = (1.0 + self.exact.largest) * 2f64.powi(-20);
        let off = |(got, exact): (&f32, &f64)| {
            let equal = f64::from(*got) == *exact;
            !(equal || (f64::from(*got) - exact).abs() < bound)
        };
        if let Some(at) = lse.iter().zip(&self.exact.lse).position(off) {
            return Err(format!("lse {at} is {}, expected {}", lse[at], self.exact.lse[at]));
        }
        let o = self.read(memory, shards, Kind::Outputs, |shard| shard.o);
        // One rounding of p's sum to float32, for rows that see a single key.
        self.ratio("o", &o, &self.exact.o, &self.plain.o, 2f64.powi(-24))
    }

    /// Checks dq, dk and dv of all ranks; the largest ratio of an error to plain float32's.
    ///
    /// # Errors
    /// What is off, and by how much.
    pub fn check_backward(&self, world: &World, shards: &[Shard]) -> Result<f64, String> {
        let memory = &world.memory;
        let dq = self.read(memory, shards, Kind::Queries, |shard| shard.dq);
        let dk = self.read(memory, shards, Kind::Keys, |shard| shard.dk);
        let dv = self.read(memory, shards, Kind::Values, |shard| shard.dv);
        let (exact, plain) = (&self.exact, &self.plain);
        let ratios = [
            self.ratio("dq", &dq, &exact.dq, &plain.dq, self.gradient_floor())?,
            self.ratio("dk", &dk, &exact.dk, &plain.dk, self.gradient_floor())?,
            self.ratio("dv", &dv, &exact.dv, &plain.dv, 0.0)?,
        ];
        let worst = ratios.into_iter().fold(0.0, f64::max);
        if self.case.slopes { Ok(worst.max(self.check_slopes(memory, shards)?)) } else { Ok(worst) }
    }

    /// The sum over all ranks' arrays, which are of different queries where those travel.
    fn check_slopes(&self, memory: &Memory, shards: &[Shard]) -> Result<f64, String> {
        let Problem { batch, q_len, heads, .. } = self.problem;
        let sums = |terms: &mut dyn Iterator<Item = (usize, f64)>| {
            let mut sums = vec![0.0; batch * heads];
            terms.for_each(|(at, term)| sums[at] += term);
            sums
        };
        let of = |at: usize, rows: usize| at / heads / rows * heads + at % heads;
        let whole = |terms: &[f64]| {
            let rows = self.case.q_len;
            sums(&mut terms.iter().enumerate().map(|(at, term)| (of(at, rows), *term)))
        };
        let arrays =
            shards.iter().map(|shard| memory.read_f32(shard.extras[4], batch * q_len * heads));
        let got = sums(&mut arrays.flat_map(|array| {
            let terms = array.into_iter().enumerate();
            terms.map(|(at, term)| (of(at, q_len), f64::from(term))).collect::<Vec<_>>()
        }));
        let got: Vec<f32> = got.into_iter().map(|sum| sum as f32).collect();
        let (exact, plain) = (whole(&self.exact.dslopes), whole(&self.plain.dslopes));
        // Roundings of the terms, each of about the size of a distance.
        let floor = self.gradient_floor() / f64::from(self.case.scale()) * self.case.q_len as f64;
        self.ratio("dslopes", &got, &exact, &plain, floor)
    }

    /// Float32's rounding of what a gradient's sum cancels where one key has all the weight, so
    /// that dp = delta and plain float32 may hit 0: both are dot products of `head_dim` terms.
    fn gradient_floor(&self) -> f64 {
        let dot = f64::from(self.case.scale()) * (self.case.head_dim as f64).sqrt();
        4.0 * 2f64.powi(-24) * dot
    }

    /// The ratio of an error to that of float32 which is rounded once at the end; at most 2, and
    /// nothing may be NaN. `floor` is the root mean square of an error that is allowed anyway.
    fn ratio(
        &self,
        name: &str,
        got: &[f32],
        exact: &[f64],
        plain: &[f64],
        floor: f64,
    ) -> Result<f64, String> {
        assert_eq!(got.len(), exact.len(), "elements of {name}");
        if let Some(at) = got.iter().position(|x| !x.is_finite()) {
            return Err(format!("element {at} of {name} is {}", got[at]));
        }
        let plain = plain.iter().map(|x| f64::from(round(self.case.element, *x as f32)));
        let bar = distance(plain, exact) + floor * (got.len() as f64).sqrt() / 2.0;
        let error = distance(got.iter().map(|x| f64::from(*x)), exact);
        let ratio = if error == 0.0 { 0.0 } else { error / bar };
        match ratio <= 2.0 {
            true => Ok(ratio),
            false => Err(format!("{name} is off by {error:.2e}, {ratio:.2} times plain float32")),
        }
    }
}

fn distance(values: impl Iterator<Item = f64>, from: &[f64]) -> f64 {
    values.zip(from).map(|(x, exact)| (x - exact).powi(2)).sum::<f64>().sqrt()
}
