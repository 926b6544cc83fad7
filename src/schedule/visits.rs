//! Where chunks are at each step: what tells the families of schedules apart.
//!
//! A *visit* is what happens at one step: the chunk of every owner is at one rank, and every rank
//! has one chunk. Chunks come from an earlier visit, or from home, so that all visits of a chunk
//! are a tree. The sums that follow a chunk go along where a visit's source is the visit just
//! before it; a run of such visits is a *strand*, and its sums go home from its last rank.

use super::meetings::Meetings;
use super::ways::legs;
use super::{Family, Rows};
use crate::problem::Travels;

/// Where all chunks are at one step; its number is that of the step. Number 0 is home.
#[derive(Debug)]
pub(super) struct Visit {
    /// The rank at which the chunk of each owner is.
    pub ranks: Vec<usize>,
    /// The owner of the chunk that each rank has.
    pub owners: Vec<usize>,
    /// What it is a chunk of; `None` if nothing of it is there.
    pub sides: Vec<Option<Travels>>,
    /// The visit from whose ranks chunks come.
    pub source: usize,
    /// The step at which they leave there. They are there when the visit begins.
    pub leaves: usize,
    /// The step at which sums that go home from here are added there. They leave at the step after
    /// the visit.
    pub returns: usize,
}

impl Visit {
    /// With chunks of the side that travels, from `source`, which they leave as the visit before
    /// begins.
    pub fn new(number: usize, ranks: Vec<usize>, travels: Travels, source: usize) -> Visit {
        let mut owners = vec![0; ranks.len()];
        ranks.iter().enumerate().for_each(|(owner, rank)| owners[*rank] = owner);
        let sides = vec![Some(travels); ranks.len()];
        Visit { ranks, owners, sides, source, leaves: number.max(1) - 1, returns: number + 1 }
    }
}

/// Do the sums of the visit before go on to visit `number`?
pub(super) fn continues(visits: &[Visit], number: usize) -> bool {
    number > 1 && visits.get(number).is_some_and(|visit| visit.source + 1 == number)
}

/// All visits of a family's schedules.
pub(super) fn visits(family: Family, meetings: &Meetings, travels: Travels) -> Vec<Visit> {
    match family {
        Family::Ring => double_ring(meetings, travels, meetings.world_size()),
        Family::DoubleRing { inner } => double_ring(meetings, travels, inner),
        Family::AllGather => all_gather(meetings, travels),
        Family::Balanced => balanced(meetings, travels),
    }
}

/// Rings within groups of `inner` neighbours, and from group to group rings over the ranks with the
/// same number in their groups. A *turn* is the time in which a group's chunks go round another
/// group, once its ranks have got one each from their fellows; meanwhile these pass it on to the
/// next group.
///
/// ```text
/// turn 0: home, then the other ranks of the own group       1: the fellow in the next group, …
/// ```
///
/// One group, or groups of one rank, are a single ring.
fn double_ring(meetings: &Meetings, travels: Travels, inner: usize) -> Vec<Visit> {
    let world_size = meetings.world_size();
    let outer = world_size / inner;
    let onward = |owner: usize, groups: usize, ranks: usize| {
        (owner / inner + groups) % outer * inner + (owner % inner + ranks) % inner
    };
    let needed = |owner: usize, groups: usize, ranks: usize| {
        meetings.needed(travels, owner, onward(owner, groups, ranks))
    };
    let of_group = |owner: usize, groups: usize| {
        let mut rows = Rows::default();
        (0..inner).for_each(|ranks| rows.extend(&needed(owner, groups, ranks)));
        rows
    };
    // What a chunk's own rank or group needs makes no hop.
    let per_owner = |length: usize, rows: &dyn Fn(usize, usize) -> Rows| -> Vec<Vec<Rows>> {
        let of = |owner| (1..length).map(move |n| rows(owner, n));
        let all = |owner| [Rows::default()].into_iter().chain(of(owner)).collect();
        (0..world_size).map(all).collect()
    };
    // Groups onward, and the turn from which chunks are passed on.
    let mut turns = vec![(0, 0)];
    for leg in legs(&per_owner(outer, &of_group)) {
        let mut source = 0;
        for groups in leg {
            turns.push((groups, source));
            source = turns.len() - 1;
        }
    }
    let mut visits = vec![Visit::new(0, (0..world_size).collect(), travels, 0)];
    // The first visit of each turn.
    let mut firsts = vec![0];
    for (turn, &(groups, source)) in turns.iter().enumerate() {
        let mut visit = |source, ranks| {
            let ranks = (0..world_size).map(|owner| onward(owner, groups, ranks)).collect();
            visits.push(Visit::new(visits.len(), ranks, travels, source));
            visits.len() - 1
        };
        if turn > 0 {
            firsts.push(visit(firsts[source], 0));
        }
        for leg in legs(&per_owner(inner, &|owner, ranks| needed(owner, groups, ranks))) {
            leg.iter().fold(firsts[turn], |source, ranks| visit(source, *ranks));
        }
    }
    // What goes from group to group has a whole turn for it.
    for turn in 1..firsts.len() {
        let start = |turn: usize| firsts.get(turn).copied();
        let end = start(turn + 1).unwrap_or(visits.len());
        let next_end = start(turn + 2).unwrap_or(visits.len());
        let returns = if end < visits.len() { next_end - 1 } else { end };
        visits[firsts[turn]].leaves = firsts[turn - 1];
        visits[firsts[turn]..end].iter_mut().for_each(|visit| visit.returns = returns);
    }
    visits
}

/// Every rank gets the chunks that it needs from their owners themselves, one after the other, and
/// sends each one's sums back there.
fn all_gather(meetings: &Meetings, travels: Travels) -> Vec<Visit> {
    let world_size = meetings.world_size();
    let onward = |owner: usize, distance: usize| (owner + distance) % world_size;
    let needed = |owner: usize, distance: usize| {
        meetings.needed(travels, owner, onward(owner, distance)).len() > 0
    };
    let used = (1..world_size).filter(|distance| (0..world_size).any(|o| needed(o, *distance)));
    [0].into_iter()
        .chain(used)
        .enumerate()
        .map(|(number, distance)| {
            let ranks = (0..world_size).map(|owner| onward(owner, distance)).collect();
            Visit::new(number, ranks, travels, 0)
        })
        .collect()
}

/// Where nobody sees what comes after its own shard, later ranks have more to do than earlier ones.
/// So at step t a rank computes with the keys of the rank t before it, and where there is none, as
/// helper: with its own keys and the queries of the rank P − t after it.
///
/// ```text
/// distance of queries from keys    0  1  2  …  ⌊P/2⌋      at step 0 … ⌊P/2⌋ by those with the queries
///                                  P−1  …  ⌊P/2⌋ + 1      at step 1 … by those with the keys
/// ```
///
/// If queries travel, it is the same with the names of the two sides exchanged. If P is even, half of
/// the ranks have nothing to do at the last step. Where nobody would be helped, this is the ring.
fn balanced(meetings: &Meetings, travels: Travels) -> Vec<Visit> {
    let world_size = meetings.world_size();
    let ranks = || (0..world_size).flat_map(|q| (0..world_size).map(move |k| (q, k)));
    let met = |(q, k): &(usize, usize)| meetings.needed(Travels::Keys, *k, *q).len() > 0;
    let ahead = ranks().filter(met).any(|(q, k)| k > q);
    if ahead || !ranks().filter(met).any(|(q, k)| q - k > world_size / 2) {
        return visits(Family::Ring, meetings, travels);
    }
    let visit = |step: usize| {
        let to = |owner: usize| match travels {
            Travels::Keys => (owner + step) % world_size,
            Travels::Queries => (owner + world_size - step) % world_size,
        };
        let side = |owner: usize| {
            let side = if to(owner) > owner { Travels::Keys } else { Travels::Queries };
            // At half the way round, helpers would do what others do.
            (side == travels || 2 * step < world_size).then_some(side)
        };
        let sides = (0..world_size).map(side).collect();
        Visit { sides, ..Visit::new(step, (0..world_size).map(to).collect(), travels, 0) }
    };
    (0..=world_size / 2).map(visit).collect()
}
