//! Proves schedules right by carrying them out on sets instead of numbers.
//!
//! The check takes all ranks through their schedules step by step. In place of a sum, each row of
//! an accumulator holds the set of global positions that were added to it. In the end the
//! accumulators at home show whether every allowed pair was computed exactly once, by a rank that
//! held both sides, and whether its contribution came home.

mod position_set;
mod state;

use std::collections::{HashMap, VecDeque};

use self::state::{Message, RankState};
use super::{Due, Schedule, Step};
use crate::problem::Problem;

/// What is wrong with a set of schedules.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank}, step {step}: {what}")]
pub struct Violation {
    /// The rank where the violation shows.
    pub rank: usize,
    /// The step at which the violation shows.
    pub step: usize,
    /// What contradicts what, with the buffers involved.
    pub what: String,
}

/// Takes all ranks through their schedules of one problem.
///
/// A set of schedules is right if all of this holds:
///
/// - Exactly one tile computes each allowed (query, key) pair, on a rank that holds both rows.
/// - Each send has a receive of the same step, chunk and deadline.
/// - Both ends start their exchanges in the order of deadlines, so that no two ranks wait for each
///   other.
/// - The receiver of a row of inputs computes with the row or sends it on.
/// - No rank writes a buffer while it is sent, or uses a buffer while a message lands in it.
/// - `first` and `last` are true to what was written.
/// - Every accumulator is home at the end.
///
/// # Errors
/// The first [`Violation`].
pub fn check(problem: &Problem, schedules: &[Schedule]) -> Result<(), Violation> {
    let mut ranks: Vec<RankState> =
        schedules.iter().map(|schedule| RankState::new(problem, schedule)).collect();
    let last = schedules.iter().flat_map(|schedule| &schedule.steps).map(|step| step.index).max();
    let end = last.unwrap_or(0) + 1;
    for index in 0..end {
        step(&mut ranks, index)?;
    }
    each(&mut ranks, end, |rank| rank.land(Due::Begin(end)))?;
    each(&mut ranks, end, |rank| rank.end())
}

/// Does something with each rank; what goes wrong becomes a violation at a step.
fn each(
    ranks: &mut [RankState<'_>],
    step: usize,
    mut act: impl FnMut(&mut RankState<'_>) -> Result<(), String>,
) -> Result<(), Violation> {
    let ranks = ranks.iter_mut().enumerate();
    ranks
        .into_iter()
        .try_for_each(|(rank, state)| act(state).map_err(|what| Violation { rank, step, what }))
}

/// One step of all ranks.
fn step(ranks: &mut [RankState<'_>], index: usize) -> Result<(), Violation> {
    each(ranks, index, |rank| rank.land(Due::Begin(index)))?;
    each(ranks, index, |rank| rank.open(index))?;
    exchange(ranks, index)?;
    each(ranks, index, |rank| rank.land(Due::Fold(index)))?;
    each(ranks, index, |rank| {
        let Some(Step { tiles, merges, .. }) = rank.step(index) else { return Ok(()) };
        tiles.iter().try_for_each(|tile| rank.tile(tile))?;
        merges.iter().try_for_each(|merge| rank.merge(merge))
    })
}

/// Starts all exchanges of a step, and gives each receive the message that was sent to it.
fn exchange(ranks: &mut [RankState<'_>], index: usize) -> Result<(), Violation> {
    let mut sent: HashMap<(usize, usize), VecDeque<Message>> = HashMap::new();
    each(ranks, index, |rank| {
        for (peer, message) in rank.send(index)? {
            sent.entry((rank.schedule.rank, peer)).or_default().push_back(message);
        }
        Ok(())
    })?;
    each(ranks, index, |rank| {
        let to = rank.schedule.rank;
        rank.receive(index, |from| sent.get_mut(&(from, to))?.pop_front())
    })?;
    let left = sent.into_iter().find_map(|(ends, mut sent)| Some((ends, sent.pop_front()?)));
    left.map_or(Ok(()), |((rank, peer), message)| {
        let what = format!("rank {peer} does not receive {}", message.chunk);
        Err(Violation { rank, step: index, what })
    })
}
