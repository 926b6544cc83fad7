//! The families of schedules, and what a schedule costs.

use std::fmt;

use super::meetings::Meetings;
use super::tour::Tour;
use super::{Schedule, Transfer};
use crate::error::{Error, Result};
use crate::problem::{Pass, Problem, Travels};

/// How chunks get to the ranks that compute with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Family {
    /// From rank to rank: up the ring, down, or first one and then the other, whichever moves the
    /// fewest rows.
    #[default]
    Ring,
    /// Rings of `inner` neighbouring ranks over fast links, and rings from one such group to the
    /// next over slow ones: rank = number of the group · inner + number within the group. The
    /// chunks of another group cross a slow link while those of the one before go round, and each
    /// group's sums go straight home, with as much time. Of inputs a rank holds, beyond its shard,
    /// two chunks of each of its rings: one at hand and one on its way. With a full or a causal
    /// mask it holds at most four accumulators: two in the inner ring, one that leaves for home and
    /// one that comes; more in windows, where sums come home from both ways round.
    DoubleRing {
        /// Ranks of a group; divides the number of ranks.
        inner: usize,
    },
    /// A ring in which ranks with nothing left to see compute for those with too much: for causal
    /// masks in the contiguous layout. Where no rank would be helped, the ring.
    Balanced,
    /// Straight from the owner to each rank that needs a chunk, and sums straight back. A rank holds
    /// two chunks beyond its shard: one at hand and one on its way.
    AllGather,
}

impl Family {
    /// Are there exchanges that have several steps' time, beside those from step to step?
    pub fn has_far_links(self, world_size: usize) -> bool {
        matches!(self, Family::DoubleRing { inner } if 1 < inner && inner < world_size)
    }

    /// Checks that there is such a schedule for so many ranks.
    ///
    /// # Errors
    /// [`Error::InvalidProblem`] if the inner rings of a double ring do not fit.
    pub fn validate(self, world_size: usize) -> Result<()> {
        match self {
            Family::DoubleRing { inner } if inner == 0 || !world_size.is_multiple_of(inner) => {
                Err(Error::InvalidProblem {
                    name: "ranks of an inner ring",
                    expected: format!("a divisor of the number of ranks ({world_size})"),
                    got: inner.to_string(),
                })
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Family::Ring => f.write_str("ring"),
            Family::DoubleRing { inner } => write!(f, "double ring of {inner} ranks each"),
            Family::Balanced => f.write_str("balanced"),
            Family::AllGather => f.write_str("all_gather"),
        }
    }
}

/// The schedules of all ranks for one pass of `problem`.
///
/// # Errors
/// If the family does not fit the number of ranks.
pub fn schedule(
    problem: &Problem,
    family: Family,
    pass: Pass,
    travels: Travels,
) -> Result<Vec<Schedule>> {
    cheapest(problem, family, pass, Some(travels))
}

/// The same; without `travels`, with the side travelling that [`choose_travels`] names.
///
/// # Errors
/// If the family does not fit the number of ranks.
pub fn cheapest(
    problem: &Problem,
    family: Family,
    pass: Pass,
    travels: Option<Travels>,
) -> Result<Vec<Schedule>> {
    let mut schedules = Vec::with_capacity(problem.world_size);
    each(problem, family, pass, travels, |schedule| schedules.push(schedule))?;
    Ok(schedules)
}

/// Makes the schedules of [`cheapest`] one after the other, for those who need not keep them: of a
/// thousand ranks they take gigabytes. Returns which side travels.
///
/// # Errors
/// If the family does not fit the number of ranks.
pub fn each(
    problem: &Problem,
    family: Family,
    pass: Pass,
    travels: Option<Travels>,
    take: impl FnMut(Schedule),
) -> Result<Travels> {
    let meetings = meetings(problem, family)?;
    let (travels, tour) = match travels {
        Some(travels) => (travels, Tour::new(problem, &meetings, family, travels, pass)),
        None => cheaper(problem, &meetings, family, pass),
    };
    tour.each(problem, travels, take);
    Ok(travels)
}

fn meetings(problem: &Problem, family: Family) -> Result<Meetings> {
    family.validate(problem.world_size)?;
    Ok(Meetings::new(problem))
}

/// The side whose travelling costs fewer bytes, and its tour.
fn cheaper<'a>(
    problem: &Problem,
    meetings: &'a Meetings,
    family: Family,
    pass: Pass,
) -> (Travels, Tour<'a>) {
    let [keys, queries] = [Travels::Keys, Travels::Queries]
        .map(|travels| Tour::new(problem, meetings, family, travels, pass));
    match queries.bytes(problem) < keys.bytes(problem) {
        true => (Travels::Queries, queries),
        false => (Travels::Keys, keys),
    }
}

/// The schedules of all ranks for one pass of `problem` on a single ring.
pub fn ring(problem: &Problem, pass: Pass, travels: Travels) -> Vec<Schedule> {
    schedule(problem, Family::Ring, pass, travels).expect("a ring has any number of ranks")
}

/// Bytes that all ranks together send in one pass.
pub fn total_bytes(problem: &Problem, schedules: &[Schedule]) -> u64 {
    let bytes = |schedule: &Schedule| -> usize {
        let rows = |transfer: &Transfer| transfer.chunk.rows.len();
        let row = |transfer: &Transfer| problem.row_bytes(transfer.chunk.payload, schedule.pass);
        schedule.sends().map(|transfer| rows(transfer) * row(transfer)).sum()
    };
    schedules.iter().map(|schedule| bytes(schedule) as u64).sum()
}

/// The side whose travelling costs fewer bytes; keys where both cost the same.
///
/// # Errors
/// If the family does not fit the number of ranks.
pub fn choose_travels(problem: &Problem, family: Family, pass: Pass) -> Result<Travels> {
    Ok(cheaper(problem, &meetings(problem, family)?, family, pass).0)
}
