//! Rows for heads and back: Ulysses, and its hybrid with the ring.
//!
//! ```text
//! forward     q, k, v there      attention of a part of the heads      o, lse back
//! backward    dout there         its gradients                         dq, dk, dv back
//! ```
//!
//! What came there forward is kept for the backward pass, with o and lse. Every rank sends each
//! other one of its group an equal part of its rows' bytes and keeps one.

use super::cost::{Costs, Halves};
use super::machine::Machine;
use super::messages::Side;
use super::report::Report;
use super::script::{Script, What};
use super::walk::run;
use crate::error::{Error, Result};
use crate::problem::{Pass, Problem, Travels};
use crate::schedule::{Due, Family, cheapest};

/// Bytes of a rank's rows with all heads, on their way there and back.
#[derive(Debug, Clone, Copy)]
pub(super) struct Volume {
    pub there: u64,
    pub back: u64,
}

/// See [`super::predict`].
pub(super) fn predict(
    problem: &Problem,
    inner: usize,
    pass: Pass,
    travels: Option<Travels>,
    machine: &Machine,
    tells: bool,
) -> Result<Report> {
    let ring = between_groups(problem, inner)?;
    let costs = Costs { problem: &ring, kernels: &machine.kernels };
    let schedules = cheapest(&ring, Family::Ring, pass, travels)?;
    let Volume { there, back } = volume(problem, inner, pass);
    let held = held(problem, inner, pass);
    let script = |rank: usize| {
        let mut script = Script::new(rank, &machine.network);
        exchange(&mut script, rank, inner, there);
        let schedule = &schedules[rank / inner];
        script.follow(&costs, schedule, |group| group * inner + rank % inner);
        exchange(&mut script, rank, inner, back);
        script.report.buffer_bytes += held;
        script
    };
    let scripts: Vec<Script> = (0..problem.world_size).map(script).collect();
    let travels = schedules.first().filter(|_| ring.world_size > 1).map(|first| first.travels);
    run(pass, travels, &scripts, machine, tells)
}

/// The problem of each ring between groups, after rows were exchanged for heads.
pub(super) fn between_groups(problem: &Problem, inner: usize) -> Result<Problem> {
    let Problem { heads, q_len, kv_len, world_size, .. } = *problem;
    Family::DoubleRing { inner }.validate(world_size)?;
    if !heads.is_multiple_of(inner) {
        return Err(Error::InvalidProblem {
            name: "query heads",
            expected: format!("a multiple of the {inner} ranks that divide them"),
            got: heads.to_string(),
        });
    }
    Ok(Problem {
        q_len: q_len * inner,
        kv_len: kv_len * inner,
        heads: heads / inner,
        kv_heads: repeated(problem, inner) / inner,
        world_size: world_size / inner,
        ..problem.clone()
    })
}

/// Key/value heads, each repeated as often as it takes for ranks to get equally many.
fn repeated(problem: &Problem, inner: usize) -> usize {
    let (mut a, mut b) = (problem.kv_heads, inner);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    problem.kv_heads / a * inner
}

/// What a rank exchanges in a pass.
pub(super) fn volume(problem: &Problem, inner: usize, pass: Pass) -> Volume {
    let Problem { batch, q_len, kv_len, heads, head_dim, value_dim, dtype, .. } = *problem;
    let of_queries = |per_head: usize| (batch * q_len * heads * per_head) as u64;
    let keys = batch * kv_len * repeated(problem, inner) * (head_dim + value_dim) * dtype.bytes();
    // As large as their gradients.
    let inputs = of_queries(head_dim * dtype.bytes()) + keys as u64;
    let outputs = value_dim * dtype.bytes();
    match pass {
        Pass::Forward => Volume { there: inputs, back: of_queries(outputs + 4) },
        Pass::Backward => Volume { there: of_queries(outputs), back: inputs },
    }
}

/// Bytes of a rank's buffers for what it exchanges; in the backward pass with what it has kept since
/// the forward pass.
pub(super) fn held(problem: &Problem, inner: usize, pass: Pass) -> u64 {
    let both = |pass| {
        let Volume { there, back } = volume(problem, inner, pass);
        there + back
    };
    match pass {
        Pass::Forward => both(Pass::Forward),
        Pass::Backward => both(Pass::Forward) + both(Pass::Backward),
    }
}

/// A step in which a rank exchanges `bytes`, all that it has, with the others of its group.
fn exchange(script: &mut Script<'_>, rank: usize, inner: usize, bytes: u64) {
    let index = script.steps.last().map_or(0, |step| step.index + 1);
    script.begin(index, Halves::default());
    let first = rank - rank % inner;
    let each = bytes / inner as u64;
    let peers = || (first..first + inner).filter(|peer| *peer != rank);
    let sends = peers().map(|peer| (Side::Send, peer, each, What::Heads(rank as u32)));
    let receives = peers().map(|peer| (Side::Receive, peer, each, What::Heads(peer as u32)));
    script.post(Due::Begin(index + 1), sends.chain(receives));
}
