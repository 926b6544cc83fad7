//! A problem with its inputs and exact results, cut into the ranks' shards.

use burst_attention::operands::{Arrays, Operand};
use burst_attention::{Features, Pass, Problem};
use burst_attention_interpreter::{Address, Memory};
use burst_attention_kernels::instances::Element;
use burst_attention_reference::{dense, numbers};
use half::{bf16, f16};

use super::{Case, Dense, Inputs, World, round};

/// The shape and type of a shard's array.
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

/// The addresses of one rank's arrays.
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
    /// The log-sum-exp of each query.
    pub lse: Address,
    /// The gradient of `o`.
    pub dout: Address,
    /// The gradient of `lse`.
    pub dlse: Address,
    /// Result of the backward pass: the gradient of `q`.
    pub dq: Address,
    /// Result of the backward pass: the gradient of `k`.
    pub dk: Address,
    /// Result of the backward pass: the gradient of `v`.
    pub dv: Address,
    /// The arrays of features: segments of queries, segments of keys, slopes, numbers for dropout,
    /// and each query's summand of the slopes' gradient.
    pub extras: [Address; 5],
}

impl Shard {
    /// As the executor takes them.
    pub fn arrays(&self, pass: Pass, features: &Features) -> Arrays<u64> {
        let [q_segments, k_segments, slopes, dropout, dslopes] = self.extras;
        let address = |operand| match operand {
            Operand::Query => self.q,
            Operand::Key => self.k,
            Operand::Value => self.v,
            Operand::Out => self.o,
            Operand::Lse => self.lse,
            Operand::OutGrad => self.dout,
            Operand::LseGrad => self.dlse,
            Operand::QuerySegments => q_segments,
            Operand::KeySegments => k_segments,
            Operand::Slopes => slopes,
            Operand::Dropout => dropout,
            Operand::QueryGrad => self.dq,
            Operand::KeyGrad => self.dk,
            Operand::ValueGrad => self.dv,
            Operand::SlopeGrad => dslopes,
        };
        Arrays::new(pass, features, |operand| address(operand).0)
    }
}

/// A problem with random inputs, and its results in float64 and float32. All values are in the
/// order of the sequence: `[batch, world_size · n, heads, head_dim]`, or without the last
/// dimension.
pub struct Ring {
    /// The problem that each rank gets.
    pub problem: Problem,
    /// The problem of all ranks together.
    pub case: Case,
    /// The inputs, rounded to the type of the activations.
    pub inputs: Inputs,
    /// The results in float64.
    pub exact: Dense,
    /// The results in float32, with o rounded before delta is computed from it.
    pub plain: Dense,
}

impl Ring {
    /// Returns a ring with the inputs of a seed.
    pub fn new(problem: Problem, seed: u64) -> Ring {
        let case = Case::of(&problem);
        let inputs = Inputs::new(&case, seed);
        let (attention, arrays) = (case.attention(&inputs), inputs.arrays());
        let exact = dense::<f64>(&attention, &arrays, |o| o);
        let plain = dense::<f32>(&attention, &arrays, |o| round(case.element, o));
        Ring { problem, case, inputs, exact, plain }
    }

    /// Returns the number of elements of a row.
    fn width(&self, kind: Kind) -> usize {
        match kind {
            Kind::Queries => self.case.heads * self.case.head_dim,
            Kind::Outputs => self.case.heads * self.case.value_dim,
            Kind::Keys => self.case.kv_heads * self.case.head_dim,
            Kind::Values => self.case.kv_heads * self.case.value_dim,
            Kind::PerQuery => self.case.heads,
        }
    }

    /// Returns the number of rows of a rank.
    fn rows(&self, kind: Kind) -> usize {
        match kind {
            Kind::Keys | Kind::Values => self.problem.kv_len,
            _ => self.problem.q_len,
        }
    }

    /// Returns, for each element of a rank's array, its index in the order of the sequence.
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

    /// Cuts a rank's part from values in the order of the sequence.
    pub fn shard(&self, rank: usize, kind: Kind, values: &[f32]) -> Vec<f32> {
        self.places(rank, kind).map(|place| values[place]).collect()
    }

    /// Joins the parts of all ranks into values in the order of the sequence.
    pub fn gather(&self, kind: Kind, shards: &[Vec<f32>]) -> Vec<f32> {
        let mut values = vec![f32::NAN; shards.iter().map(Vec::len).sum()];
        for (rank, shard) in shards.iter().enumerate() {
            self.places(rank, kind).zip(shard).for_each(|(place, value)| values[place] = *value);
        }
        values
    }

    /// Allocates the arrays of all ranks, those of rank `r` on device `device(r)`, and writes the
    /// inputs. Results stay unwritten.
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

    /// Allocates and writes the arrays of features.
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

    /// Writes the o and lse of an exact forward pass, for a test of the backward pass alone.
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

    /// Reads an array of all ranks, in the order of the sequence. Unwritten elements are NaN.
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

    /// Checks o and lse of all ranks. Returns the ratio of o's error to the error of plain float32.
    ///
    /// # Errors
    /// The array that is wrong, and its error.
    pub fn check_forward(&self, world: &World, shards: &[Shard]) -> Result<f64, String> {
        let memory = &world.memory;
        let lse = self.read(memory, shards, Kind::PerQuery, |shard| shard.lse);
        // The bound allows three float32 roundings of a number of this size, and the roundings of a
        // dot product.
        let bound = (1.0 + self.exact.largest) * 2f64.powi(-20);
        let off = |(got, exact): (&f32, &f64)| {
            let equal = f64::from(*got) == *exact;
            !(equal || (f64::from(*got) - exact).abs() < bound)
        };
        if let Some(at) = lse.iter().zip(&self.exact.lse).position(off) {
            return Err(format!("lse {at} is {}, expected {}", lse[at], self.exact.lse[at]));
        }
        let o = self.read(memory, shards, Kind::Outputs, |shard| shard.o);
        // The floor allows one rounding of p's sum to float32, for rows that see a single key.
        self.ratio("o", &o, &self.exact.o, &self.plain.o, 2f64.powi(-24))
    }

    /// Checks dq, dk and dv of all ranks. Returns the largest ratio of an error to the error of
    /// plain float32.
    ///
    /// # Errors
    /// The array that is wrong, and its error.
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

    /// Checks the gradient of slopes, which is summed over the arrays of all ranks. Where queries
    /// travel, a rank's array may hold the summands of other ranks' queries.
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
        let floor =
            self.gradient_floor() / f64::from(self.case.softmax_scale) * self.case.q_len as f64;
        self.ratio("dslopes", &got, &exact, &plain, floor)
    }

    /// Returns float32's rounding of the terms that cancel where one key has all the weight. There
    /// dp = delta, both dot products of `head_dim` terms, and plain float32 may hit 0 exactly.
    fn gradient_floor(&self) -> f64 {
        let dot = f64::from(self.case.softmax_scale) * (self.case.head_dim as f64).sqrt();
        4.0 * 2f64.powi(-24) * dot
    }

    /// Returns the ratio of an error to the error of float32 that is rounded once at the end. The
    /// ratio must be at most 2, and no element may be NaN. `floor` is the root mean square of an
    /// error that is always allowed.
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
