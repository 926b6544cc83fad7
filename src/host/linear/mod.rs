//! Linear attention with decay over the tokens of one rank, on the CPU.
//!
//! ```text
//! S_t = λ_t S_(t−1) + k_t v_tᵀ;  o_t = scale · q_tᵀ S_t
//! ```
//!
//! Each head of decays has a state and outputs. An array of queries, keys or values may have fewer
//! heads; each of these serves the same number of consecutive heads (see [`head_of`]).
//!
//! A task takes the tokens of one head chunk by chunk and keeps one state S. Within a chunk,
//! products of small matrices combine tokens with tokens. The state brings the part of all tokens
//! before the chunk:
//!
//! ```text
//! o = ((q kᵀ) ∘ λ^(a−b), a ≥ b) v + λ^(a) q S;   S = λ^(n) S + Σ_b λ^(n−b) k_b v_bᵀ
//! ```
//!
//! The exponents stand for sums of log decays. Source: Qin et al., Lightning Attention-2 and LASP.

mod backward;
mod chunk;
mod decays;
mod forward;
mod gradients;
mod large_pages;
mod prefetch;
mod scan;

use rayon::ThreadPool;
use rayon::prelude::*;

use super::array::HostArray;
use super::isa::Isa;
use super::scratch::{InScratch, ScratchTask};

/// An instruction set and the threads that compute.
pub type Device<'a> = (Isa, &'a ThreadPool);

/// The state that one rank's tokens leave, without the tokens of ranks before:
///
/// ```text
/// Σ_t left_t right_tᵀ e^(Σ_(s>t) log λ_s);   backward: … e^(Σ_(s≤t) log λ_s)
/// ```
#[derive(Debug)]
pub struct Scan<'a> {
    /// Keys, or queries if `backward`: `[batch, seq, some heads, k_dim]`.
    pub left: &'a HostArray,
    /// Values, or the gradient of the output if `backward`: `[batch, seq, some heads, v_dim]`.
    pub right: &'a HostArray,
    /// Factor on `left`.
    pub scale: f32,
    /// Log decays, float32 `[batch, seq, heads, 1]`; −∞ for a token that sees no token before
    /// itself.
    pub log_decay: &'a HostArray,
    /// Whether to go from the last token to the first.
    pub backward: bool,
    /// Result: the state, float32 `[batch, k_dim, heads, v_dim]`, stored by head.
    pub out: &'a HostArray,
}

/// The arrays of the forward pass.
#[derive(Debug, Clone)]
pub struct ForwardIo {
    /// Queries `[batch, seq, q_heads, k_dim]`.
    pub q: HostArray,
    /// Keys `[batch, seq, k_heads, k_dim]`.
    pub k: HostArray,
    /// Values `[batch, seq, v_heads, v_dim]`.
    pub v: HostArray,
    /// Factor on the queries.
    pub scale: f32,
    /// Log decays, as in [`Scan`].
    pub log_decay: HostArray,
    /// The state before the first token, stored as [`Scan::out`].
    pub before: HostArray,
    /// Result: the output `[batch, seq, heads, v_dim]`.
    pub o: HostArray,
    /// Result: the state after the last token.
    pub after: HostArray,
}

/// The arrays of the backward pass.
#[derive(Debug, Clone)]
pub struct BackwardIo {
    /// Queries.
    pub q: HostArray,
    /// Keys.
    pub k: HostArray,
    /// Values.
    pub v: HostArray,
    /// Factor on the queries.
    pub scale: f32,
    /// Log decays, as in [`Scan`].
    pub log_decay: HostArray,
    /// The state before the first token.
    pub before: HostArray,
    /// Gradient of the output.
    pub dout: HostArray,
    /// Gradient of the state after the last token.
    pub dafter: HostArray,
    /// Result: the gradient of the queries.
    pub dq: HostArray,
    /// Result: the gradient of the keys.
    pub dk: HostArray,
    /// Result: the gradient of the values.
    pub dv: HostArray,
    /// Result: the gradient of the log decays; 0 where they are −∞.
    pub dlog_decay: HostArray,
    /// Result: the gradient of the state before the first token.
    pub dbefore: HostArray,
}

/// Computes the state that tokens leave.
///
/// # Panics
/// If the CPU lacks the instruction set.
pub fn scan(device: Device<'_>, scan: &Scan<'_>) {
    let heads = scan.log_decay.heads;
    each(device, scan.left.batch, heads, |head| scan::ScanHead { scan, head });
}

/// Computes the outputs and the state after the last token.
///
/// # Panics
/// If the CPU lacks the instruction set.
pub fn forward(device: Device<'_>, io: &ForwardIo) {
    large_pages::ask_for(&io.o);
    let (batches, heads) = (io.q.batch, io.log_decay.heads);
    each(device, batches, heads, |head| forward::ForwardHead { io, head });
}

/// Computes all gradients, where q stands for the scaled queries:
///
/// ```text
/// D_(t−1) = λ_t (D_t + q_t dout_tᵀ), from D = dafter;   dq_t = scale · S_t dout_t
/// dk_t = (D_t + q_t dout_tᵀ) v_t;   dv_t = (D_t + q_t dout_tᵀ)ᵀ k_t
/// d log λ_t = λ_t ⟨S_(t−1), D_t + q_t dout_tᵀ⟩
/// ```
///
/// # Panics
/// If the CPU lacks the instruction set.
pub fn backward(device: Device<'_>, io: &BackwardIo) {
    [&io.dq, &io.dk, &io.dv].into_iter().for_each(large_pages::ask_for);
    each(device, io.q.batch, backward::groups(io), |group| backward::BackwardGroup { io, group });
}

/// Returns the batch entry and the head of an array that a head of decays uses.
fn head_of(
    array: &HostArray,
    log_decay: &HostArray,
    (batch, head): (usize, usize),
) -> (usize, usize) {
    (batch, head * array.heads / log_decay.heads)
}

/// Runs a task for each head of each batch entry.
fn each<T: ScratchTask>(
    (isa, pool): Device<'_>,
    batches: usize,
    heads: usize,
    task: impl Fn((usize, usize)) -> T + Sync,
) {
    pool.install(|| {
        (0..batches * heads)
            .into_par_iter()
            .for_each(|index| isa.run(InScratch(task((index / heads, index % heads)))));
    });
}
