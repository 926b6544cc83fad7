//! Helpers of the integration tests.
#![allow(dead_code, reason = "each test binary uses its own part")]

pub mod adversary;
pub mod data;
pub mod devices;
pub mod reference;

use burst_attention::Layout;
use burst_attention::problem::{Dtype, Problem};

/// A small problem with `n` tokens on each of `world_size` ranks.
pub fn problem(world_size: usize, n: usize) -> Problem {
    Problem {
        batch: 2,
        q_len: n,
        kv_len: n,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        dtype: Dtype::F32,
        causal: true,
        softmax_scale: 0.25,
        layout: Layout::Contiguous,
        world_size,
    }
}

/// Every layout and mask for these world sizes and tokens per rank, as far as they are valid.
pub fn problems(worlds: impl IntoIterator<Item = usize>, tokens: &[usize]) -> Vec<Problem> {
    let mut all = Vec::new();
    for world_size in worlds {
        for &n in tokens {
            for layout in Layout::ALL {
                for causal in [false, true] {
                    let problem = Problem { layout, causal, ..problem(world_size, n) };
                    all.extend(problem.validate().is_ok().then_some(problem));
                }
            }
        }
    }
    all
}
