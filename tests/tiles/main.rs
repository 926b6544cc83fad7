//! The host kernels agree with dense attention in float64 on every instruction set of this CPU.

mod backward;
mod forward;
mod large;
mod passes;
mod reference;

use std::ops::Range;

use half::{bf16, f16};
use rayon::ThreadPool;

use burst_attention::host::array::HostArray;
use burst_attention::host::isa::Isa;
use burst_attention::mask::Band;
use burst_attention::problem::Dtype;

const NO_LIMIT: (i64, i64) = (i64::MIN, i64::MAX);

/// The shape of a test: q is `[batch, queries, heads, dim]`, and shards begin at row 0.
#[derive(Debug, Clone)]
struct Shape {
    batch: usize,
    queries: usize,
    keys: usize,
    kv_heads: usize,
    group_size: usize,
    dim: usize,
    v_dim: usize,
    band: Band,
    dtype: Dtype,
    soft_cap: Option<f32>,
}

impl Shape {
    fn new(queries: usize, keys: usize, dim: usize) -> Shape {
        Shape {
            batch: 1,
            queries,
            keys,
            kv_heads: 1,
            group_size: 1,
            dim,
            v_dim: dim,
            band: Band::FULL,
            dtype: Dtype::F32,
            soft_cap: None,
        }
    }

    fn capped(self, cap: f32) -> Shape {
        Shape { soft_cap: Some(cap), ..self }
    }

    fn band(self, (lower, upper): (i64, i64)) -> Shape {
        Shape { band: Band { lower, upper }, ..self }
    }

    fn heads(&self) -> usize {
        self.kv_heads * self.group_size
    }

    fn scale(&self) -> f32 {
        (self.dim as f32).powf(-0.5)
    }
}

/// Returns shapes that together reach every branch of the kernels: ragged lengths, narrow and wide
/// heads, groups, and bands of all kinds.
fn shapes() -> Vec<Shape> {
    let mut shapes = vec![
        Shape::new(1, 1, 8),
        Shape::new(7, 33, 8),
        Shape::new(33, 7, 24),
        Shape::new(130, 300, 64),
        Shape::new(300, 130, 64).band((i64::MIN, 0)),
        Shape::new(130, 300, 80).band((i64::MIN, 100)),
        Shape::new(300, 300, 32).band((-40, -7)),
        Shape::new(300, 300, 32).band((3, 3)),
        Shape::new(130, 300, 128).band((20, i64::MAX)),
        Shape::new(130, 130, 256).band((i64::MIN, -1)),
        Shape::new(130, 130, 32).band((5, -5)),
        Shape { batch: 2, kv_heads: 2, ..Shape::new(33, 130, 40) },
        Shape { group_size: 4, kv_heads: 2, ..Shape::new(70, 70, 64).band((i64::MIN, 0)) },
        Shape { v_dim: 72, ..Shape::new(100, 90, 32).band((-20, 60)) },
        Shape { v_dim: 16, ..Shape::new(100, 90, 136) },
        Shape::new(600, 530, 16).band((i64::MIN, 0)),
        // Most logits, some and none reach these caps. Smaller caps magnify the logits' rounding.
        Shape::new(33, 130, 40).capped(0.3),
        Shape::new(130, 300, 64).band((i64::MIN, 100)).capped(1.0),
        Shape { group_size: 2, ..Shape::new(100, 90, 32).band((-20, 60)) }.capped(1e6),
        // With this many heads the forward pass takes larger blocks.
        Shape { batch: 8, kv_heads: 8, ..Shape::new(140, 150, 8).band((-60, 5)) },
    ];
    for (i, dtype) in [Dtype::Bf16, Dtype::F16].into_iter().enumerate() {
        for dim in [8, 80, 128] {
            let shape = Shape { batch: 2, kv_heads: 2, group_size: 2, ..Shape::new(70, 90, dim) };
            shapes.push(Shape { dtype, ..shape.band((i64::MIN, 10 * i as i64)) });
        }
    }
    shapes
}

fn pool(threads: usize) -> ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads")
}

/// Reproducible numbers in [0, 1).
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns a number of about normal distribution.
    fn normal(&mut self) -> f64 {
        ((0..6).map(|_| self.next()).sum::<f64>() - 3.0) * std::f64::consts::SQRT_2
    }
}

/// Returns new memory in JAX's order, filled with NaN, with `gap` unused floats behind each row.
fn empty(dtype: Dtype, [batch, len, heads, dim]: [usize; 4], gap: usize) -> HostArray {
    let mut array = HostArray::accumulator(batch, 0..len, heads, dim + gap);
    array.dim = dim;
    (array.row_stride, array.head_stride) = (heads * (dim + gap), dim + gap);
    for i in 0..batch * len * heads * (dim + gap) {
        // SAFETY: `accumulator` allocated this many floats.
        unsafe { *array.ptr.as_ptr().cast::<f32>().add(i) = f32::NAN }
    }
    array.dtype = dtype;
    array
}

/// Returns memory of normally distributed numbers, without gaps.
fn random(dtype: Dtype, shape: [usize; 4], seed: u64) -> HostArray {
    let array = empty(dtype, shape, 0);
    let mut random = Random(seed);
    for at in indices(&array) {
        set(&array, at, random.normal());
    }
    array
}

fn indices(array: &HostArray) -> impl Iterator<Item = [usize; 4]> + use<> {
    let HostArray { batch, ref rows, heads, dim, .. } = *array;
    let rows = rows.clone();
    (0..batch).flat_map(move |b| {
        rows.clone().flat_map(move |row| {
            (0..heads).flat_map(move |head| (0..dim).map(move |d| [b, row, head, d]))
        })
    })
}

fn get(array: &HostArray, [b, row, head, d]: [usize; 4]) -> f64 {
    let at = array.row(b, row, head);
    // SAFETY: the caller's index lies in the array, whose memory no other thread uses.
    unsafe {
        match array.dtype {
            Dtype::F32 => f64::from(*at.cast::<f32>().add(d)),
            Dtype::Bf16 => (*at.cast::<bf16>().add(d)).to_f64(),
            Dtype::F16 => (*at.cast::<f16>().add(d)).to_f64(),
        }
    }
}

fn set(array: &HostArray, [b, row, head, d]: [usize; 4], value: f64) {
    let at = array.row(b, row, head);
    // SAFETY: the caller's index lies in the array, whose memory no other thread uses.
    unsafe {
        match array.dtype {
            Dtype::F32 => *at.cast::<f32>().add(d) = value as f32,
            Dtype::Bf16 => *at.cast::<bf16>().add(d) = bf16::from_f32(value as f32),
            Dtype::F16 => *at.cast::<f16>().add(d) = f16::from_f32(value as f32),
        }
    }
}

/// Returns the bits of all values.
fn bits(array: &HostArray) -> Vec<u64> {
    indices(array).map(|at| get(array, at).to_bits()).collect()
}

/// Asserts that two arrays agree: ‖got − expected‖ ≤ tolerance · ‖expected‖, and no NaN.
fn assert_close(
    what: &str,
    case: &dyn std::fmt::Debug,
    got: &HostArray,
    expected: &HostArray64,
    tolerance: f64,
) {
    let (mut error, mut norm) = (0.0, 0.0);
    for at in indices(got) {
        let (x, y) = (get(got, at), expected.get(at));
        if x == y {
            norm += if y.is_finite() { y * y } else { 0.0 };
            continue;
        }
        error += (x - y) * (x - y);
        norm += y * y;
    }
    let ratio = if error == 0.0 { 0.0 } else { (error / norm).sqrt() };
    assert!(
        ratio <= tolerance,
        "{what}: relative error {ratio:.2e} > {tolerance:.2e} for {case:?}"
    );
}

/// A dense float64 array with the indices of a [`HostArray`].
#[derive(Debug, Clone)]
struct HostArray64 {
    shape: [usize; 4],
    values: Vec<f64>,
}

impl HostArray64 {
    fn at(&mut self, index: [usize; 4]) -> &mut f64 {
        let offset = self.offset(index);
        &mut self.values[offset]
    }

    fn get(&self, index: [usize; 4]) -> f64 {
        self.values[self.offset(index)]
    }

    fn offset(&self, [b, row, head, d]: [usize; 4]) -> usize {
        let [_, rows, heads, dim] = self.shape;
        ((b * rows + row) * heads + head) * dim + d
    }

    /// The same values, rounded to float32 in new memory.
    fn rounded(&self) -> HostArray {
        let array = empty(Dtype::F32, self.shape, 0);
        for at in indices(&array) {
            set(&array, at, self.get(at));
        }
        array
    }
}

/// Cuts `0..len` at some fractions of the length.
fn cut(len: usize, fractions: &[f64]) -> Vec<Range<usize>> {
    let mut edges = vec![0];
    edges.extend(fractions.iter().map(|f| (len as f64 * f) as usize));
    edges.push(len);
    edges.windows(2).map(|edge| edge[0]..edge[1]).collect()
}
