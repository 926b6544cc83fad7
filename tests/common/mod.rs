//! Helpers of the integration tests.
#![allow(dead_code, reason = "each test binary uses its own part")]

pub mod adversary;
pub mod cache;
pub mod data;
pub mod devices;
pub mod held;
pub mod needs;
pub mod proofs;
pub mod recurrence;
pub mod reference;
pub mod runs;
pub mod spoilers;

use burst_attention::Layout;
use burst_attention::mask::Window;
use burst_attention::problem::{Dtype, Features, Pass, Problem, Travels};

/// Both passes.
pub const PASSES: [Pass; 2] = [Pass::Forward, Pass::Backward];
/// Both sides that may travel.
pub const SIDES: [Travels; 2] = [Travels::Keys, Travels::Queries];

/// Both passes, each with both sides.
pub fn passes_and_sides() -> impl Iterator<Item = (Pass, Travels)> {
    PASSES.into_iter().flat_map(|pass| SIDES.map(|side| (pass, side)))
}

/// A small problem with `n` tokens on each of `world_size` ranks.
pub fn problem(world_size: usize, n: usize) -> Problem {
    Problem {
        batch: 2,
        q_len: n,
        kv_len: n,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        value_dim: 16,
        dtype: Dtype::F32,
        window: Window::CAUSAL,
        softmax_scale: 0.25,
        features: Features::default(),
        layout: Layout::Contiguous,
        world_size,
    }
}

/// All valid problems with these world sizes and tokens per rank, in every layout, with a full and
/// a causal mask.
pub fn problems(worlds: impl IntoIterator<Item = usize>, tokens: &[usize]) -> Vec<Problem> {
    let mut all = Vec::new();
    for world_size in worlds {
        for &n in tokens {
            for layout in Layout::ALL {
                for window in [Window::FULL, Window::CAUSAL] {
                    let problem = Problem { layout, window, ..problem(world_size, n) };
                    all.extend(problem.validate().is_ok().then_some(problem));
                }
            }
        }
    }
    all
}

/// Windows with every combination of some limits to the left and to the right, and windows of
/// queries that stand elsewhere than their place says.
pub fn windows() -> Vec<Window> {
    let limits = [None, Some(0), Some(1), Some(2), Some(3), Some(5), Some(11)];
    let around = limits.into_iter().flat_map(|left| limits.map(move |right| (left, right)));
    let moved = [(None, -3), (Some(7), -2), (Some(-2), 6), (Some(-4), 2), (Some(-9), 30)];
    let moved = moved.into_iter().map(|(left, right)| (left, Some(right)));
    around.chain(moved).map(|(left, right)| Window { left, right }).collect()
}

/// All valid problems with these world sizes, (queries, keys) per rank and windows, in every
/// layout.
pub fn windowed(
    worlds: impl IntoIterator<Item = usize>,
    tokens: &[(usize, usize)],
    windows: &[Window],
) -> Vec<Problem> {
    let mut all = Vec::new();
    for world_size in worlds {
        for &(q_len, kv_len) in tokens {
            for layout in Layout::ALL {
                for &window in windows {
                    let problem = Problem { layout, window, kv_len, ..problem(world_size, q_len) };
                    all.extend(problem.validate().is_ok().then_some(problem));
                }
            }
        }
    }
    all
}
