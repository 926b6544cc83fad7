//! Times float32 matrix products of the `gemm` crate, or reads of memory, on all cores and prints the
//! fastest one as JSON.
//!
//! Usage: `burst-attention-peak [SIZE [ROUNDS]]`. The matrices are SIZE × SIZE. The defaults are
//! 4096 and 5.
//!
//! Usage: `burst-attention-peak read [MEBIBYTES [ROUNDS]]`. The defaults are 1024 and 9.

use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1).peekable();
    let reads = arguments.next_if(|text| text == "read").is_some();
    let mut numbers = arguments.map(|text| text.parse::<usize>());
    let size = numbers.next().unwrap_or(Ok(if reads { 1024 } else { 4096 }));
    let rounds = numbers.next().unwrap_or(Ok(if reads { 9 } else { 5 }));
    let (Ok(size @ 1..), Ok(rounds @ 1..)) = (size, rounds) else {
        eprintln!("expected burst-attention-peak [read] [SIZE [ROUNDS]], two positive numbers");
        return ExitCode::FAILURE;
    };
    if reads {
        time_reads(size << 20, rounds);
    } else {
        time_products(size, rounds);
    }
    ExitCode::SUCCESS
}

/// Returns the least seconds of some rounds.
fn least_seconds(rounds: usize, mut work: impl FnMut()) -> f64 {
    let seconds = (0..rounds).map(|_| {
        let start = Instant::now();
        work();
        start.elapsed().as_secs_f64()
    });
    seconds.fold(f64::INFINITY, f64::min)
}

fn time_products(size: usize, rounds: usize) {
    let lhs = matrix(size, 7);
    let rhs = matrix(size, 11);
    let mut product = vec![0.0; size * size];
    multiply(size, &mut product, &lhs, &rhs);
    let seconds = least_seconds(rounds, || multiply(size, &mut product, &lhs, &rhs));
    let gflops = 2.0 * (size as f64).powi(3) / seconds / 1e9;
    println!("{{\"size\": {size}, \"seconds\": {seconds}, \"gflops\": {gflops}}}");
}

/// Times sums of all floats of an array, cut into one part for each core.
fn time_reads(bytes: usize, rounds: usize) {
    let values: Vec<f32> = (0..bytes / 4).map(|at| (at % 7) as f32).collect();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let parts: Vec<&[f32]> = values.chunks(values.len().div_ceil(cores)).collect();
    let seconds = least_seconds(rounds, || {
        std::thread::scope(|scope| {
            for part in &parts {
                scope.spawn(|| std::hint::black_box(sum(part)));
            }
        });
    });
    let gigabytes = bytes as f64 / seconds / 1e9;
    println!("{{\"bytes\": {bytes}, \"seconds\": {seconds}, \"gigabytes_per_s\": {gigabytes}}}");
}

/// Returns the sum of floats, by the widest vectors of the CPU.
fn sum(values: &[f32]) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the CPU has the instructions.
        return unsafe { sum_avx512(values) };
    }
    sum_lanes(values)
}

/// Returns what [`sum`] returns, with AVX-512.
///
/// # Safety
/// The caller guarantees that the CPU has AVX-512 F.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn sum_avx512(values: &[f32]) -> f32 {
    sum_lanes(values)
}

/// Adds up eight vectors of 16 lanes, which the compiler keeps in registers.
#[inline(always)]
fn sum_lanes(values: &[f32]) -> f32 {
    let mut sums = [0.0f32; 128];
    for block in values.chunks_exact(128) {
        for (sum, value) in sums.iter_mut().zip(block) {
            *sum += value;
        }
    }
    sums.iter().sum()
}

/// Returns a square matrix of small numbers without a pattern.
fn matrix(size: usize, seed: usize) -> Vec<f32> {
    (0..size * size).map(|at| ((at * seed) % 1009) as f32 / 1009.0 - 0.5).collect()
}

/// Computes product = lhs · rhs on all cores. All three matrices are square and column-major.
fn multiply(size: usize, product: &mut [f32], lhs: &[f32], rhs: &[f32]) {
    assert!([product.len(), lhs.len(), rhs.len()] == [size * size; 3]);
    let stride = size as isize;
    // SAFETY: the assertion guarantees that each slice has size × size numbers, so every index
    // a · stride + b with a, b < size is inside. The mutable borrow guarantees that the product
    // overlaps neither factor.
    unsafe {
        gemm::gemm(
            size,
            size,
            size,
            product.as_mut_ptr(),
            stride,
            1,
            false,
            lhs.as_ptr(),
            stride,
            1,
            rhs.as_ptr(),
            stride,
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::Rayon(0),
        );
    }
}
