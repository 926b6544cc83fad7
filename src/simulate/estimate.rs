//! What a pass takes in worlds of any size, without a simulation of every rank.
//!
//! The work of the clock grows with the square of the number of ranks, so it runs for few ranks
//! only. Small worlds give the estimate of a large one, along two lines:
//!
//! - **More node groups.** A node group is an inner ring, a node or one rank. With shards of equal
//!   length, each further group adds as many steps as the one before. So two numbers of groups tell
//!   what any number takes ([`super::line`]).
//! - **Longer node groups.** [`super::shrink`] shrinks a group of many ranks to few. What a pass
//!   takes grows evenly with the length of its groups, too.
//!
//! Where groups of ranks exchange rows for heads, all ranks of a group do the same at the same time.
//! So one rank of each group stands for its group.

use super::heads::{between_groups, buffer_bytes, volume};
use super::line::{LONGEST_GROUP, MOST, MOST_IN_LONG_GROUPS, Setting, over_node_groups};
use super::machine::{Link, Machine};
use super::method::Method;
use super::report::{Bytes, Estimate};
use super::shrink;
use super::travels::with_side;
use crate::error::Result;
use crate::problem::{Pass, Problem, Travels};
use crate::schedule::Family;

/// What both passes take together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Seconds.
    pub seconds: f64,
    /// Seconds in which the rank that waits longest waits for messages.
    pub exposed: f64,
    /// Bytes that all ranks send.
    pub sent: Bytes,
    /// The side that travels in the backward pass, if one does.
    pub backward: Option<Travels>,
    /// Whether smaller worlds gave the numbers.
    pub estimated: bool,
}

/// Returns what both passes of `problem` take together, by [`estimate`].
///
/// # Errors
/// The errors of [`super::predict`].
pub fn cost(
    problem: &Problem,
    method: Method,
    backward: Option<Travels>,
    machine: &Machine,
) -> Result<Cost> {
    let forward = estimate(problem, method, Pass::Forward, None, machine)?;
    let backward = estimate(problem, method, Pass::Backward, backward, machine)?;
    let mut sent = forward.sent;
    sent += backward.sent;
    Ok(Cost {
        seconds: forward.seconds + backward.seconds,
        exposed: forward.exposed + backward.exposed,
        sent,
        backward: backward.travels,
        estimated: forward.estimated,
    })
}

/// Returns what a pass of `problem` takes: a simulation for up to 32 ranks or four short node
/// groups, and for more the line through smaller worlds with shards of the same length. It takes
/// milliseconds, whatever the number of ranks. Without `travels`, the side travels that
/// [`super::predict`] lets travel.
///
/// # Errors
/// The errors of [`super::predict`].
pub fn estimate(
    problem: &Problem,
    method: Method,
    pass: Pass,
    travels: Option<Travels>,
    machine: &Machine,
) -> Result<Estimate> {
    machine.validate()?;
    let seconds = |found: &Estimate| found.seconds;
    with_side((problem, pass, travels), machine, seconds, |travels| {
        estimate_with(problem, method, &Setting { pass, travels, machine })
    })
}

fn estimate_with(problem: &Problem, method: Method, setting: &Setting<'_>) -> Result<Estimate> {
    let (world_size, machine) = (problem.world_size, setting.machine);
    match method {
        Method::Travel(family) => {
            family.validate(world_size)?;
            let node = machine.network.ranks_per_node;
            let group = family.inner().unwrap_or(if node < world_size { node } else { 1 });
            match group > LONGEST_GROUP && world_size > MOST_IN_LONG_GROUPS {
                true => shrink::estimate(problem, family, group, setting),
                false => over_node_groups(problem, family, group, setting),
            }
        }
        Method::Heads { inner } if world_size > MOST => exchanging_heads(problem, inner, setting),
        Method::Heads { .. } => setting.simulated(problem, method),
    }
}

/// Estimates a ring of groups, before and after which each rank of a group exchanges an equal part
/// of its rows with every other rank of the group.
fn exchanging_heads(problem: &Problem, inner: usize, setting: &Setting<'_>) -> Result<Estimate> {
    let local = between_groups(problem, inner)?;
    let network = &setting.machine.network;
    let node = network.ranks_per_node.min(inner);
    let sharing = if network.shared { node } else { 1 };
    // One rank of each group stands for its group, with its part of a shared link.
    let mut groups = setting.machine.clone();
    groups.network.ranks_per_node = (network.ranks_per_node / inner).max(1);
    groups.network.between.bandwidth /= sharing as f64;
    let ring = Method::Travel(Family::Ring);
    let mut all = estimate(&local, ring, setting.pass, setting.travels, &groups)?;
    all.estimated = true;
    all.travels = all.travels.filter(|_| local.world_size > 1);
    all.compute *= inner as f64;
    all.flops *= inner as f64;
    all.sent = all.sent.times(inner);
    all.busiest.steps += 2;
    all.busiest.buffer_bytes += buffer_bytes(problem, inner, setting.pass);
    let peers = [node - 1, inner - node].map(|peers| peers as u64);
    for each in volume(problem, inner, setting.pass).map(|bytes| bytes / inner as u64) {
        let seconds = |peers: u64, sharing: usize, Link { latency, bandwidth }: Link| {
            let bytes = (peers * each) as f64 * sharing as f64;
            if peers > 0 { latency + bytes / bandwidth } else { 0.0 }
        };
        let within = seconds(peers[0], 1, network.within);
        let waits = within.max(seconds(peers[1], sharing, network.between));
        let sent = Bytes { within: peers[0] * each, between: peers[1] * each };
        all.seconds += waits;
        all.exposed += waits;
        all.slow_hops += peers[1] as usize;
        all.sent += sent.times(problem.world_size);
        all.busiest.exposed += waits;
        all.busiest.end += waits;
        all.busiest.slow_hops += peers[1] as usize;
        all.busiest.sent += sent;
    }
    Ok(all)
}
