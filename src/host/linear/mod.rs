//! Linear attention with decay over the tokens of one rank, on the CPU.
//!
//! ```text
//! S_t = λ_t S_(t−1) + k_t v_tᵀ;  o_t = q_tᵀ S_t
//! ```
//!
//! A head goes through its tokens chunk by chunk and keeps one state S. Inside a chunk tokens meet
//! tokens, in products of small matrices; what was before comes from the state:
//!
//! ```text
//! o = ((q kᵀ) ∘ λ^(a−b), a ≥ b) v + λ^(a) q S;   S = λ^(n) S + Σ_b λ^(n−b) k_b v_bᵀ
//! ```
//!
//! with exponents that stand for sums of log decays. Source: Qin et al., Lightning Attention-2 and
//! LASP.

mod ahead;
mod backward;
mod chunk;
mod decays;
mod forward;
mod gradients;
mod pages;
mod scan;

use rayon::ThreadPool;
use rayon::prelude::*;

use super::array::HostArray;
use super::isa::Isa;
use super::simd::Task;

/// What a device computes with.
pub type Device<'a> = (Isa, &'a ThreadPool);

/// The state that one rank's tokens leave, without those before:
///
/// ```text
/// Σ_t left_t right_tᵀ e^(Σ_(s>t) log λ_s);   backward: … e^(Σ_(s≤t) log λ_s)
/// ```
#[derive(Debug)]
pub struct Scan<'a> {
    /// Keys, or backward queries: `[batch, seq, heads, k_dim]`.
    pub left: &'a HostArray,
    /// Values, or backward the gradient of the output: `[batch, seq, heads, v_dim]`.
    pub right: &'a HostArray,
    /// Float32 `[batch, seq, heads, 1]`; −∞ before a token that shall see none before itself.
    pub log_decay: &'a HostArray,
    /// From the last token to the first?
    pub backward: bool,
    /// Float32 `[batch, k_dim, heads, v_dim]`, stored by head.
    pub out: &'a HostArray,
}

/// Arrays of the forward pass.
#[derive(Debug, Clone)]
pub struct ForwardIo {
    /// Queries `[batch, seq, heads, k_dim]`.
    pub q: HostArray,
    /// Keys `[batch, seq, kv_heads, k_dim]`; query head h uses head h / group_size.
    pub k: HostArray,
    /// Values `[batch, seq, kv_heads, v_dim]`.
    pub v: HostArray,
    /// As in [`Scan`].
    pub log_decay: HostArray,
    /// The state before the first token, stored as [`Scan::out`].
    pub before: HostArray,
    /// Result, like queries with v_dim.
    pub o: HostArray,
    /// Result: the state after the last token.
    pub after: HostArray,
}

/// Arrays of the backward pass.
#[derive(Debug, Clone)]
pub struct BackwardIo {
    /// Queries.
    pub q: HostArray,
    /// Keys.
    pub k: HostArray,
    /// Values.
    pub v: HostArray,
    /// As in [`Scan`].
    pub log_decay: HostArray,
    /// The state before the first token.
    pub before: HostArray,
    /// Gradient of the output.
    pub dout: HostArray,
    /// Gradient of the state after the last token.
    pub dafter: HostArray,
    /// Result, like queries.
    pub dq: HostArray,
    /// Result, like keys.
    pub dk: HostArray,
    /// Result, like values.
    pub dv: HostArray,
    /// Result, like the log decays; 0 where they are −∞.
    pub dlog_decay: HostArray,
    /// Result: gradient of the state before the first token.
    pub dbefore: HostArray,
}

/// Writes the state.
///
/// # Panics
/// If the CPU lacks the instruction set.
pub fn scan(device: Device<'_>, scan: &Scan<'_>) {
    let heads = scan.log_decay.heads;
    each(device, scan.left.batch, heads, |batch, head| scan::ScanHead { scan, batch, head });
}

/// Writes outputs and the state after them.
///
/// # Panics
/// If the CPU lacks the instruction set.
pub fn forward(device: Device<'_>, io: &ForwardIo) {
    pages::ask(&io.o);
    let (batches, heads) = (io.q.batch, io.q.heads);
    each(device, batches, heads, |batch, head| forward::ForwardHead { io, batch, head });
}

/// Writes all gradients:
///
/// ```text
/// D_(t−1) = λ_t (D_t + q_t dout_tᵀ), from D = dafter;   dq_t = S_t dout_t
/// dk_t = (D_t + q_t dout_tᵀ) v_t;   dv_t = (D_t + q_t dout_tᵀ)ᵀ k_t
/// d log λ_t = λ_t ⟨S_(t−1), D_t + q_t dout_tᵀ⟩
/// ```
///
/// # Panics
/// If the CPU lacks the instruction set.
pub fn backward(device: Device<'_>, io: &BackwardIo) {
    [&io.dq, &io.dk, &io.dv].into_iter().for_each(pages::ask);
    let (batches, heads) = (io.k.batch, io.k.heads);
    each(device, batches, heads, |batch, kv_head| backward::BackwardGroup { io, batch, kv_head });
}

/// A task for each head of each batch entry.
fn each<T: Task>(
    (isa, pool): Device<'_>,
    batches: usize,
    heads: usize,
    task: impl Fn(usize, usize) -> T + Sync,
) {
    pool.install(|| {
        (0..batches * heads)
            .into_par_iter()
            .for_each(|index| isa.run(task(index / heads, index % heads)));
    });
}
