//! Linear attention with decay over the tokens of one rank, on the CPU, also with the delta rule.
//!
//! ```text
//! S_t = λ_t ∘ S_(t−1) + k_t u_tᵀ;  o_t = scale · q_tᵀ S_t
//! u_t = v_t, or with the delta rule u_t = β_t (v_t − (λ_t ∘ S_(t−1))ᵀ k_t)
//! ```
//!
//! λ_t is a number, or a number for each row of S, a channel of keys. Each head of decays has a state
//! and outputs. An array of queries, keys or values may have fewer heads; each of these serves the
//! same number of consecutive heads (see [`head_of`]).
//!
//! A task takes the tokens of one head chunk by chunk and keeps one state S. Within a chunk,
//! products of small matrices combine tokens with tokens. The state brings the part of all tokens
//! before the chunk:
//!
//! ```text
//! o = ((q kᵀ) ∘ λ^(a−b), a ≥ b) u + λ^(a) q S;   S = λ^(n) S + Σ_b λ^(n−b) k_b u_bᵀ
//! ```
//!
//! The exponents stand for sums of log decays. Source: Qin et al., Lightning Attention-2 and LASP.
//! The delta rule corrects the values of a chunk by a triangular system of equations, and the rest
//! is the same. Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule.
//!
//! Passes are sequences of [`Steps`](steps::Steps): states and outputs forward, gradients backward.

mod backward;
mod by_channel;
mod by_head;
mod chunk;
mod correct;
mod decay_gradients;
mod decays;
mod finish;
mod gradients;
mod large_pages;
mod prefetch;
mod runs;
mod sequence;
mod states;
mod steps;
mod turns;

use rayon::ThreadPool;
use rayon::prelude::*;

use super::array::HostArray;
use super::isa::Isa;
use gradients::GradientSteps;
use sequence::{Workers, pass_on};
use states::StateSteps;
use steps::Chunks;

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
    /// Log decays, float32 `[batch, seq, heads, 1]`, or `[batch, seq, heads, k_dim]` with a decay for
    /// each row of the state; −∞, in all rows, for a token that sees no token before itself.
    pub log_decay: &'a HostArray,
    /// Whether to go from the last token to the first.
    pub backward: bool,
    /// Result: the state, float32 `[batch, k_dim, heads, v_dim]`, stored by head.
    pub out: &'a HostArray,
}

/// What tokens do to the state before them with the delta rule: S after them is A S + M.
#[derive(Debug)]
pub struct Transfer<'a> {
    /// Keys.
    pub k: &'a HostArray,
    /// Values.
    pub v: &'a HostArray,
    /// Log decays, as in [`Scan`].
    pub log_decay: &'a HostArray,
    /// β of each token, float32 `[batch, seq, heads, 1]`.
    pub beta: &'a HostArray,
    /// Result: A and M beside each other, float32 `[batch, k_dim, heads, k_dim + v_dim]`, stored by
    /// head. A is 0 if a reset lets nothing pass.
    pub out: &'a HostArray,
}

/// The gradient of the state before tokens with the delta rule, if no token after them has any.
#[derive(Debug)]
pub struct StateGradient<'a> {
    /// Queries.
    pub q: &'a HostArray,
    /// Keys.
    pub k: &'a HostArray,
    /// Factor on the queries.
    pub scale: f32,
    /// Gradient of the output.
    pub dout: &'a HostArray,
    /// Log decays, as in [`Scan`].
    pub log_decay: &'a HostArray,
    /// β of each token.
    pub beta: &'a HostArray,
    /// Result: the gradient, stored as [`Scan::out`].
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
    /// β of each token, float32 `[batch, seq, heads, 1]`, which makes the rule the delta rule.
    pub beta: Option<HostArray>,
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
    /// β of each token, float32 `[batch, seq, heads, 1]`, which makes the rule the delta rule.
    pub beta: Option<HostArray>,
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
    /// Result: the gradient of β, for the delta rule.
    pub dbeta: Option<HostArray>,
    /// Result: the gradient of the state before the first token.
    pub dbefore: HostArray,
}

/// Computes the state that tokens leave.
///
/// # Panics
/// If the CPU lacks the instruction set.
pub fn scan(device: Device<'_>, scan: &Scan<'_>) {
    let Scan { left, right, scale, log_decay, backward, out } = *scan;
    let chunks = Chunks::all(left.rows.len(), backward);
    each(device, left.batch, log_decay.heads, |workers, head| {
        if backward {
            let heads = (head.0, head.1..head.1 + 1);
            let (q, dout, k, beta, all) = (left, right, None, None, None);
            let steps = GradientSteps { q, k, scale, dout, log_decay, beta, heads, all };
            pass_on(workers, &steps, &chunks, None, (out, head), |_| ());
        } else {
            let (k, v, outputs, beta) = (left, right, None, None);
            let steps = StateSteps { outputs, k, scale, v, log_decay, beta, head, zeros: 0 };
            pass_on(workers, &steps, &chunks, None, (out, head), |_| ());
        }
    });
}

/// Computes what tokens do to the state before them.
///
/// # Panics
/// If the CPU lacks the instruction set.
pub fn transfer(device: Device<'_>, transfer: &Transfer<'_>) {
    let Transfer { k, v, log_decay, beta, out } = *transfer;
    let chunks = Chunks::all(k.rows.len(), false);
    each(device, k.batch, log_decay.heads, |workers, head| {
        let (beta, zeros) = (Some(beta), k.dim);
        let steps = StateSteps { outputs: None, k, scale: 1.0, v, log_decay, beta, head, zeros };
        pass_on(workers, &steps, &chunks, None, (out, head), |state| {
            for row in 0..k.dim {
                // SAFETY: the state has `k.dim` rows and at least as many columns.
                unsafe { *state.at.add(row * state.row + row) = 1.0 }
            }
        });
    });
}

/// Computes the gradient of the state before the tokens.
///
/// # Panics
/// If the CPU lacks the instruction set.
pub fn state_gradient(device: Device<'_>, gradient: &StateGradient<'_>) {
    let StateGradient { q, k, scale, dout, log_decay, beta, out } = *gradient;
    let chunks = Chunks::all(q.rows.len(), true);
    each(device, q.batch, log_decay.heads, |workers, head| {
        let (heads, k, beta) = ((head.0, head.1..head.1 + 1), Some(k), Some(beta));
        let steps = GradientSteps { q, k, scale, dout, log_decay, beta, heads, all: None };
        pass_on(workers, &steps, &chunks, None, (out, head), |_| ());
    });
}

/// Computes the outputs and the state after the last token.
///
/// # Panics
/// If the CPU lacks the instruction set.
pub fn forward(device: Device<'_>, io: &ForwardIo) {
    large_pages::ask_for(&io.o);
    let chunks = Chunks::all(io.q.rows.len(), false);
    each(device, io.q.batch, io.log_decay.heads, |workers, head| {
        let ForwardIo { q, k, v, scale, log_decay, beta, before, o, after } = io;
        let (outputs, beta) = (Some((q, *scale, o)), beta.as_ref());
        let steps = StateSteps { outputs, k, scale: 1.0, v, log_decay, beta, head, zeros: 0 };
        pass_on(workers, &steps, &chunks, Some(before), (after, head), |_| ());
    });
}

/// Computes all gradients, where q stands for the scaled queries:
///
/// ```text
/// D_(t−1) = λ_t (D_t + q_t dout_tᵀ), from D = dafter;   dq_t = scale · S_t dout_t
/// dk_t = (D_t + q_t dout_tᵀ) v_t;   dv_t = (D_t + q_t dout_tᵀ)ᵀ k_t
/// d log λ_t = λ_t ⟨S_(t−1), D_t + q_t dout_tᵀ⟩
/// ```
///
/// [`GradientSteps`] has the terms of the delta rule.
///
/// # Panics
/// If the CPU lacks the instruction set.
pub fn backward(device: Device<'_>, io: &BackwardIo) {
    [&io.dq, &io.dk, &io.dv].into_iter().for_each(large_pages::ask_for);
    each(device, io.q.batch, backward::groups(io), |workers, group| {
        backward::group(workers, io, group)
    });
}

/// Returns the batch entry and the head of an array that a head of decays uses.
fn head_of(
    array: &HostArray,
    log_decay: &HostArray,
    (batch, head): (usize, usize),
) -> (usize, usize) {
    (batch, head * array.heads / log_decay.heads)
}

/// Calls `work` for each head of each batch entry, in parallel. If these are fewer than the threads,
/// the threads share the chunks of each.
fn each(
    (isa, pool): Device<'_>,
    batches: usize,
    heads: usize,
    work: impl Fn(Workers, (usize, usize)) + Sync,
) {
    let (count, threads) = (batches * heads, pool.current_num_threads());
    let workers = Workers { isa, threads: if count < threads { threads } else { 1 } };
    pool.install(|| {
        (0..count).into_par_iter().for_each(|index| work(workers, (index / heads, index % heads)));
    });
}
