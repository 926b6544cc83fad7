//! One rank's pass in several calls, between which someone else carries the messages.
//!
//! Ranks of other processes can't be reached from here. So a program walks the schedule: a call
//! does the rank's work up to where it needs what others send, and puts what it sends itself into
//! parcels; the program moves these between ranks, and gives them to the next call. What a rank
//! keeps meanwhile lies in memory of the program, an [`Arena`].
//!
//! Every call walks the whole schedule with the same engine as a ring within one process, but only
//! in its own stretch anything is computed or copied.

mod arena;
mod plan;
mod stretch;

use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::Arc;

pub use arena::Arena;
pub use plan::{Hop, Plan};

use super::checks;
use super::kernel::{HostKernel, RankBuffers};
use super::ring::Executor;
use super::trace;
use crate::engine::walk;
use crate::error::{Error, Result};
use crate::problem::{Pass, Problem, Travels};
use crate::schedule::{self, Family, Kept, Schedule};
use crate::transport::Transport;
use arena::Blocks;
use stretch::{StretchKernel, StretchTransport};

/// How a pass of a problem is cut; for one batch entry, whatever the problem's number of them.
#[derive(Debug)]
pub struct Relay {
    /// The schedules of all ranks.
    pub schedules: Arc<Vec<Schedule>>,
    /// The stretches and the messages between them.
    pub plan: Plan,
    /// What a rank keeps between them.
    pub arena: Arena,
}

/// Plans a pass, once for each problem.
///
/// # Errors
/// If the problem is invalid, or the family does not fit the number of ranks.
pub fn relay(
    problem: &Problem,
    family: Family,
    pass: Pass,
    travels: Option<Travels>,
) -> Result<Arc<Relay>> {
    static RELAYS: Kept<Arc<Relay>> = Kept::new();
    problem.validate()?;
    let one = Problem { batch: 1, ..problem.clone() };
    RELAYS.get((one, family, pass, travels), |(one, ..)| {
        let schedules = schedule::kept(one, family, pass, travels)?;
        let plan = Plan::new(one, &schedules)?;
        let arena = Arena::new(one, &schedules);
        Ok(Arc::new(Relay { schedules, plan, arena }))
    })
}

/// The memory of one call.
#[derive(Debug)]
pub struct Memory {
    /// Inputs and outputs of the rank. The outputs are those of all calls of a pass.
    pub buffers: RankBuffers,
    /// `batch` blocks of [`Arena::bytes`], which hold what the call before left there.
    pub arena: NonNull<u8>,
    /// For each hop to this stretch, in the plan's order, `batch` parcels of [`Hop::bytes`].
    pub arrivals: Vec<NonNull<u8>>,
    /// For each hop from this stretch likewise.
    pub departures: Vec<NonNull<u8>>,
}

/// Does the work of one stretch on one rank, and returns the bytes that it sends. Blocks for as
/// long as that takes, but waits for no other rank.
///
/// # Errors
/// If a buffer does not fit the problem, or rank or stretch do not exist.
pub fn run(
    relay: &Relay,
    problem: &Problem,
    rank: usize,
    own: usize,
    memory: Memory,
) -> Result<u64> {
    let Relay { schedules, plan, arena } = relay;
    checks::rank(problem, &memory.buffers)?;
    let invalid = |name, expected, got: usize| {
        Err(Error::InvalidProblem {
            name,
            expected: format!("below {expected}"),
            got: got.to_string(),
        })
    };
    let Some(schedule) = schedules.get(rank) else { return invalid("rank", schedules.len(), rank) };
    if own >= plan.stretches() {
        return invalid("stretch", plan.stretches(), own);
    }
    let Executor { isa, pool } = Executor::global()?;
    let device = (*isa, pool);
    let room = Blocks { problem, arena, first: memory.arena };
    let kernel = match memory.buffers {
        RankBuffers::Forward(io) => {
            HostKernel::forward(device, problem, schedule, *io, room, trace::next_ring())
        }
        RankBuffers::Backward(io) => {
            HostKernel::backward(device, problem, schedule, *io, room, trace::next_ring())
        }
    };
    let now = Cell::new(0);
    let mut transport = StretchTransport::new(
        (plan, own, &now),
        rank,
        (pool, room),
        &memory.arrivals,
        &memory.departures,
    )?;
    let mut kernel = StretchKernel { kernel, plan, own, now: &now };
    walk(schedule, &mut kernel, &mut transport)?;
    Ok(transport.bytes_sent())
}
