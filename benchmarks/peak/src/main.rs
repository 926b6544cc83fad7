//! Times float32 matrix products of the `gemm` crate on all cores and prints the fastest one as
//! JSON.
//!
//! Usage: `burst-attention-peak [SIZE [ROUNDS]]`. The matrices are SIZE × SIZE. The defaults are
//! 4096 and 5.

use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<usize>());
    let size = arguments.next().unwrap_or(Ok(4096));
    let rounds = arguments.next().unwrap_or(Ok(5));
    let (Ok(size @ 1..), Ok(rounds @ 1..)) = (size, rounds) else {
        eprintln!("expected burst-attention-peak [SIZE [ROUNDS]], two positive numbers");
        return ExitCode::FAILURE;
    };
    let lhs = matrix(size, 7);
    let rhs = matrix(size, 11);
    let mut product = vec![0.0; size * size];
    multiply(size, &mut product, &lhs, &rhs);
    let seconds = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            multiply(size, &mut product, &lhs, &rhs);
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min);
    let gflops = 2.0 * (size as f64).powi(3) / seconds / 1e9;
    println!("{{\"size\": {size}, \"seconds\": {seconds}, \"gflops\": {gflops}}}");
    ExitCode::SUCCESS
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
