//! Arrays with random contents, and the distance between two arrays.

use std::ptr::NonNull;

use burst_attention::host::array::HostArray;
use burst_attention::operands::{Arrays, Operand};
use burst_attention::problem::{Dtype, Pass, Problem};
use half::{bf16, f16};

/// xorshift64*: a repeatable generator, good enough to fill arrays.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() >> 33) as usize % limit
    }

    /// Roughly normal: the sum of twelve uniform numbers, mean 0, variance 1.
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| (self.next() >> 11) as f64 / (1u64 << 53) as f64).sum::<f64>() - 6.0
    }
}

/// An owned row-major array `[batch, rows, heads, dim]`.
#[derive(Clone)]
pub struct Array {
    bytes: Vec<u32>,
    pub shape: [usize; 4],
    pub dtype: Dtype,
}

impl Array {
    pub fn zeros(dtype: Dtype, shape: [usize; 4]) -> Array {
        let len = shape.iter().product::<usize>() * dtype.bytes();
        Array { bytes: vec![0; len.div_ceil(4).max(1)], shape, dtype }
    }

    pub fn random(random: &mut Random, dtype: Dtype, shape: [usize; 4]) -> Array {
        let mut array = Array::zeros(dtype, shape);
        for index in 0..shape.iter().product() {
            array.set(index, random.normal() as f32);
        }
        array
    }

    /// The view that executors use. The array must outlive it.
    pub fn view(&self) -> HostArray {
        let ptr = NonNull::new(self.bytes.as_ptr().cast_mut()).expect("not null").cast();
        HostArray::jax(ptr, self.dtype, self.shape)
    }

    pub fn set(&mut self, index: usize, value: f32) {
        let base = self.bytes.as_mut_ptr();
        // SAFETY: `zeros` allocates room for every index of the shape, and callers pass such an
        // index.
        unsafe {
            match self.dtype {
                Dtype::F32 => base.cast::<f32>().add(index).write(value),
                Dtype::Bf16 => base.cast::<bf16>().add(index).write(bf16::from_f32(value)),
                Dtype::F16 => base.cast::<f16>().add(index).write(f16::from_f32(value)),
            }
        }
    }

    /// Writes a whole number in place of a float32.
    pub fn set_word(&mut self, index: usize, word: u32) {
        self.bytes[index] = word;
    }

    pub fn word(&self, index: usize) -> u32 {
        self.bytes[index]
    }

    pub fn get(&self, index: usize) -> f64 {
        let base = self.bytes.as_ptr();
        // SAFETY: `zeros` allocates room for every index of the shape, and callers pass such an
        // index.
        unsafe {
            match self.dtype {
                Dtype::F32 => f64::from(base.cast::<f32>().add(index).read()),
                Dtype::Bf16 => base.cast::<bf16>().add(index).read().to_f64(),
                Dtype::F16 => base.cast::<f16>().add(index).read().to_f64(),
            }
        }
    }

    pub fn at(&self, [b, row, head, dim]: [usize; 4]) -> f64 {
        let [_, rows, heads, dims] = self.shape;
        self.get(((b * rows + row) * heads + head) * dims + dim)
    }

    pub fn values(&self) -> Vec<f64> {
        (0..self.shape.iter().product()).map(|index| self.get(index)).collect()
    }

    pub fn bits(&self) -> &[u32] {
        &self.bytes
    }
}

/// The arrays that the features of a problem read and write. Those of unused features are absent.
#[derive(Clone)]
pub struct ExtraArrays {
    pub q_segments: Option<Array>,
    pub k_segments: Option<Array>,
    pub slopes: Option<Array>,
    pub dropout: Option<Array>,
    pub dslopes: Option<Array>,
}

/// The first query head and the first batch entry, from which random numbers count.
pub const FIRST: [u32; 2] = [3, 5];

impl ExtraArrays {
    fn random(problem: &Problem, rank: usize, seed: u64) -> ExtraArrays {
        let Problem { batch, q_len, kv_len, heads, features, .. } = *problem;
        let segments = |len: usize| {
            let mut array = Array::zeros(Dtype::F32, [batch, len, 1, 1]);
            for (entry, row) in (0..batch).flat_map(|b| (0..len).map(move |row| (b, row))) {
                let position = problem.layout.position(rank, row, problem.world_size, len);
                array.set_word(entry * len + row, segment(seed, entry, position) as u32);
            }
            array
        };
        // All ranks have the same slopes and keys.
        let mut random = Random::new(seed + 77);
        let per_head = [batch, 1, heads, 1];
        let mut slopes = Array::random(&mut random, Dtype::F32, per_head);
        // In float32, scores of hundreds would be too inexact.
        (0..batch * heads).for_each(|i| slopes.set(i, 0.1 * slopes.get(i) as f32));
        let mut dropout = Array::zeros(Dtype::F32, [batch, 1, 1, 4]);
        for entry in 0..batch {
            let words = [seed as u32 ^ 0xdead_beef, 17, FIRST[1] + entry as u32, FIRST[0]];
            words.iter().enumerate().for_each(|(i, word)| dropout.set_word(4 * entry + i, *word));
        }
        ExtraArrays {
            q_segments: features.segments.then(|| segments(q_len)),
            k_segments: features.segments.then(|| segments(kv_len)),
            dslopes: features.slopes.then(|| Array::random(&mut random, Dtype::F32, per_head)),
            slopes: features.slopes.then_some(slopes),
            dropout: features.dropout.map(|_| dropout),
        }
    }
}

/// The segment id of a position: documents of about six tokens with gaps between some, and a few
/// scattered tokens.
fn segment(seed: u64, entry: usize, position: usize) -> i32 {
    let scattered = Random::new(seed * 31 + 7 * position as u64 + entry as u64).below(8) == 0;
    let id = (position + 2 * entry) / 6 % 5;
    if scattered { 1 } else { id as i32 - 1 }
}

/// All arrays of one rank.
#[derive(Clone)]
pub struct Shard {
    pub q: Array,
    pub k: Array,
    pub v: Array,
    pub dout: Array,
    pub dlse: Array,
    pub o: Array,
    pub lse: Array,
    pub dq: Array,
    pub dk: Array,
    pub dv: Array,
    pub extras: ExtraArrays,
}

impl Shard {
    /// Random inputs for every rank. Outputs hold garbage that a run must overwrite.
    pub fn random(problem: &Problem, seed: u64) -> Vec<Shard> {
        let mut random = Random::new(seed);
        let Problem { batch, q_len, kv_len, heads, kv_heads, head_dim, dtype, .. } = *problem;
        let (queries, keys) =
            ([batch, q_len, heads, head_dim], [batch, kv_len, kv_heads, head_dim]);
        let outputs = [batch, q_len, heads, problem.value_dim];
        let values = [batch, kv_len, kv_heads, problem.value_dim];
        let rows = [batch, q_len, heads, 1];
        let mut shard = |rank| Shard {
            extras: ExtraArrays::random(problem, rank, seed),
            q: Array::random(&mut random, dtype, queries),
            k: Array::random(&mut random, dtype, keys),
            v: Array::random(&mut random, dtype, values),
            dout: Array::random(&mut random, dtype, outputs),
            dlse: Array::random(&mut random, Dtype::F32, rows),
            o: Array::random(&mut random, dtype, outputs),
            lse: Array::random(&mut random, Dtype::F32, rows),
            dq: Array::random(&mut random, dtype, queries),
            dk: Array::random(&mut random, dtype, keys),
            dv: Array::random(&mut random, dtype, values),
        };
        (0..problem.world_size).map(&mut shard).collect()
    }

    /// The views that the executor uses in a pass.
    pub fn views(&self, pass: Pass) -> Arrays<HostArray> {
        let mut arrays = Arrays::none(pass);
        let mut view = |operand, array: Option<&Array>| {
            array.into_iter().for_each(|array| arrays.set(operand, array.view()));
        };
        let Shard { q, k, v, dout, dlse, o, lse, dq, dk, dv, extras } = self;
        view(Operand::Query, Some(q));
        view(Operand::Key, Some(k));
        view(Operand::Value, Some(v));
        view(Operand::Out, Some(o));
        view(Operand::Lse, Some(lse));
        view(Operand::QuerySegments, extras.q_segments.as_ref());
        view(Operand::KeySegments, extras.k_segments.as_ref());
        view(Operand::Slopes, extras.slopes.as_ref());
        view(Operand::Dropout, extras.dropout.as_ref());
        if pass == Pass::Backward {
            view(Operand::OutGrad, Some(dout));
            view(Operand::LseGrad, Some(dlse));
            view(Operand::QueryGrad, Some(dq));
            view(Operand::KeyGrad, Some(dk));
            view(Operand::ValueGrad, Some(dv));
            view(Operand::SlopeGrad, extras.dslopes.as_ref());
        }
        arrays
    }

    /// All results; the gradient of slopes where there are any.
    pub fn outputs(&self) -> Vec<(&'static str, &Array)> {
        let Shard { o, lse, dq, dk, dv, .. } = self;
        let mut all = vec![("o", o), ("lse", lse), ("dq", dq), ("dk", dk), ("dv", dv)];
        all.extend(self.extras.dslopes.as_ref().map(|dslopes| ("dslopes", dslopes)));
        all
    }
}

/// Returns ‖got − want‖ / ‖want‖, or ‖got − want‖ if `want` vanishes.
pub fn relative_error(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut got.iter().zip(want).map(|(g, w)| if g == w { 0.0 } else { g - w }));
    let truth = norm(&mut want.iter().filter(|w| w.is_finite()).copied());
    if truth > 1e-12 { difference / truth } else { difference }
}
