//! Arrays with random contents, and how far two of them are apart.

use std::ptr::NonNull;

use burst_attention::host::array::HostArray;
use burst_attention::problem::{Dtype, Problem};
use half::{bf16, f16};

/// xorshift64*: repeatable, and good enough to fill arrays.
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

    /// The view that executors use; the array must outlive it.
    pub fn view(&self) -> HostArray {
        let ptr = NonNull::new(self.bytes.as_ptr().cast_mut()).expect("not null").cast();
        HostArray::jax(ptr, self.dtype, self.shape)
    }

    pub fn set(&mut self, index: usize, value: f32) {
        let base = self.bytes.as_mut_ptr();
        // SAFETY: the index is below the length that `zeros` made room for.
        unsafe {
            match self.dtype {
                Dtype::F32 => base.cast::<f32>().add(index).write(value),
                Dtype::Bf16 => base.cast::<bf16>().add(index).write(bf16::from_f32(value)),
                Dtype::F16 => base.cast::<f16>().add(index).write(f16::from_f32(value)),
            }
        }
    }

    pub fn get(&self, index: usize) -> f64 {
        let base = self.bytes.as_ptr();
        // SAFETY: as in `set`.
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
}

impl Shard {
    /// Random inputs for every rank; outputs hold garbage that a run must overwrite.
    pub fn random(problem: &Problem, seed: u64) -> Vec<Shard> {
        let mut random = Random::new(seed);
        let Problem { batch, q_len, kv_len, heads, kv_heads, head_dim, dtype, .. } = *problem;
        let (queries, keys) =
            ([batch, q_len, heads, head_dim], [batch, kv_len, kv_heads, head_dim]);
        let rows = [batch, q_len, heads, 1];
        let mut shard = |_| Shard {
            q: Array::random(&mut random, dtype, queries),
            k: Array::random(&mut random, dtype, keys),
            v: Array::random(&mut random, dtype, keys),
            dout: Array::random(&mut random, dtype, queries),
            dlse: Array::random(&mut random, Dtype::F32, rows),
            o: Array::random(&mut random, dtype, queries),
            lse: Array::random(&mut random, Dtype::F32, rows),
            dq: Array::random(&mut random, dtype, queries),
            dk: Array::random(&mut random, dtype, keys),
            dv: Array::random(&mut random, dtype, keys),
        };
        (0..problem.world_size).map(&mut shard).collect()
    }

    pub fn outputs(&self) -> [(&'static str, &Array); 5] {
        let Shard { o, lse, dq, dk, dv, .. } = self;
        [("o", o), ("lse", lse), ("dq", dq), ("dk", dk), ("dv", dv)]
    }
}

/// ‖got − want‖ / ‖want‖; the absolute norm where the truth vanishes.
pub fn relative_error(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut got.iter().zip(want).map(|(g, w)| if g == w { 0.0 } else { g - w }));
    let truth = norm(&mut want.iter().filter(|w| w.is_finite()).copied());
    if truth > 1e-12 { difference / truth } else { difference }
}
