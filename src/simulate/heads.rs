//! Exchanges of rows for heads and back: Ulysses, and its hybrid with the ring.
//!
//! ```text
//! forward     q, k, v there      attention of a part of the heads      o, lse back
//! backward    dout there         its gradients                         dq, dk, dv back
//! ```
//!
//! A rank keeps the inputs that came in the forward pass for the backward pass, with o and lse.
//! Every rank sends each other rank of its group an equal part of its rows' bytes, and keeps one
//! part.

use super::machine::Machine;
use super::script::Script;
use crate::error::Result;
use crate::problem::{Pass, Problem, Travels};
use crate::schedule::{Family, schedule};
use crate::types::invalid;

/// Returns the scripts of all ranks, and the side that travels, if one does.
pub(super) fn scripts<'a>(
    problem: &Problem,
    inner: usize,
    pass: Pass,
    travels: Option<Travels>,
    machine: &'a Machine,
) -> Result<(Option<Travels>, Vec<Script<'a>>)> {
    let ring = between_groups(problem, inner)?;
    let schedules = schedule(&ring, Family::Ring, pass, travels)?;
    let [there, back] = volume(problem, inner, pass);
    let held = buffer_bytes(problem, inner, pass);
    let script = |rank: usize| {
        let mut script = Script::new(rank, machine);
        exchange(&mut script, rank, inner, there);
        let schedule = &schedules[rank / inner];
        script.follow(&ring, schedule, |group| group * inner + rank % inner);
        exchange(&mut script, rank, inner, back);
        script.report.buffer_bytes += held;
        script
    };
    let scripts = (0..problem.world_size).map(script).collect();
    let travels = schedules.first().filter(|_| ring.world_size > 1).map(|first| first.travels);
    Ok((travels, scripts))
}

/// Returns the problem of each ring between groups, after rows were exchanged for heads.
pub(super) fn between_groups(problem: &Problem, inner: usize) -> Result<Problem> {
    let Problem { heads, q_len, kv_len, world_size, .. } = *problem;
    Family::DoubleRing { inner }.validate(world_size)?;
    if !heads.is_multiple_of(inner) {
        let expected = format!("a multiple of the {inner} ranks that divide them");
        return Err(invalid("query heads", expected, heads));
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

/// Returns the number of key/value heads, each repeated until ranks can get equally many.
fn repeated(problem: &Problem, inner: usize) -> usize {
    let mut repeated = (1..=inner).map(|times| times * problem.kv_heads);
    repeated.find(|heads| heads.is_multiple_of(inner)).unwrap_or(inner)
}

/// Returns the bytes of a rank's rows with all heads, on their way there and back.
pub(super) fn volume(problem: &Problem, inner: usize, pass: Pass) -> [u64; 2] {
    let Problem { batch, q_len, kv_len, heads, head_dim, value_dim, dtype, .. } = *problem;
    let of_queries = |per_head: usize| (batch * q_len * heads * per_head) as u64;
    let keys = batch * kv_len * repeated(problem, inner) * (head_dim + value_dim) * dtype.bytes();
    // Inputs are as large as their gradients.
    let inputs = of_queries(head_dim * dtype.bytes()) + keys as u64;
    let outputs = value_dim * dtype.bytes();
    match pass {
        Pass::Forward => [inputs, of_queries(outputs + 4)],
        Pass::Backward => [of_queries(outputs), inputs],
    }
}

/// Returns the bytes of a rank's buffers for exchanges. In the backward pass these include the
/// buffers that it keeps since the forward pass.
pub(super) fn buffer_bytes(problem: &Problem, inner: usize, pass: Pass) -> u64 {
    let passes = [Pass::Forward, Pass::Backward].into_iter();
    let kept = passes.filter(|kept| [Pass::Forward, pass].contains(kept));
    kept.flat_map(|pass| volume(problem, inner, pass)).sum()
}

/// Adds a step in which a rank exchanges all its `bytes` with the other ranks of its group.
fn exchange(script: &mut Script<'_>, rank: usize, inner: usize, bytes: u64) {
    let first = rank - rank % inner;
    let peers = (first..first + inner).filter(move |peer| *peer != rank);
    script.exchange(peers.clone(), peers, bytes / inner as u64);
}
