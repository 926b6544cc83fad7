//! The double ring: rings within groups of neighbours, and rings from group to group.
//!
//! The chunks of the next group cross a slow link while those of the current group go round, and
//! the accumulators of each group go straight home, with as much time. Beyond its shard, a rank
//! holds two chunks of inputs for each of its rings: one to compute with, and one on its way. With
//! a full or a causal mask it holds at most four accumulators: two in the inner ring, one that
//! leaves for home, and one that comes home. It holds more in windows, where accumulators come home
//! from both directions.

use super::{Crossing, Spec};
use crate::error::Result;
use crate::schedule::Rows;
use crate::schedule::directions::hops_by_direction;
use crate::schedule::placement::Placement;
use crate::schedule::rank_pairs::RankPairs;
use crate::types::{Travels, invalid};

pub(super) const SPEC: Spec = Spec {
    validate,
    has_far_links: |world_size, inner| 1 < inner && inner < world_size,
    crossing: Crossing::AllRanksInTurns,
    ..Spec::new(
        "double_ring",
        "Rings of neighbouring ranks, and rings between these groups.",
        placements,
    )
};

fn validate(world_size: usize, inner: usize) -> Result<()> {
    let fits = inner > 0 && world_size.is_multiple_of(inner);
    let expected = || format!("a divisor of the number of ranks ({world_size})");
    if fits { Ok(()) } else { Err(invalid("ranks of an inner ring", expected(), inner)) }
}

/// Rings within groups of `inner` neighbours, and rings from group to group over the ranks with the
/// same number in their groups. One group, or groups of one rank, are a single ring.
///
/// A *turn* is the time in which the chunks of one group go round another group. When it begins,
/// each rank of the other group has the chunk of its fellow, the rank with the same number. During
/// the turn it also sends this chunk to its fellow in the next group.
///
/// ```text
/// turn 0: home, then the other ranks of the own group       1: the fellow in the next group, …
/// ```
pub(super) fn placements(pairs: &RankPairs, travels: Travels, inner: usize) -> Vec<Placement> {
    let world_size = pairs.world_size;
    let outer = world_size / inner;
    let onward = |owner: usize, groups: usize, ranks: usize| {
        (owner / inner + groups) % outer * inner + (owner % inner + ranks) % inner
    };
    let needed = |owner: usize, groups: usize, ranks: usize| {
        pairs.needed(travels, owner, onward(owner, groups, ranks))
    };
    let needed_in_group = |owner: usize, groups: usize| {
        let mut rows = Rows::default();
        (0..inner).for_each(|ranks| rows.extend(&needed(owner, groups, ranks)));
        rows
    };
    // What a chunk's own rank or group needs makes no hop.
    let hops = |length: usize, rows: &dyn Fn(usize, usize) -> Rows| {
        let of = |owner, n| if n == 0 { Rows::default() } else { rows(owner, n) };
        let needed = (0..world_size).map(|owner| (0..length).map(|n| of(owner, n)).collect());
        hops_by_direction(&Vec::from_iter(needed))
    };
    // How many groups onward each turn is, and the turn whose ranks send the chunks.
    let mut turns = vec![(0, 0)];
    for direction in hops(outer, &needed_in_group) {
        let mut source = 0;
        for groups in direction {
            turns.push((groups, source));
            source = turns.len() - 1;
        }
    }
    let mut placements = vec![Placement::new(0, (0..world_size).collect(), travels, 0)];
    // The first placement of each turn.
    let mut firsts = vec![0];
    for (turn, &(groups, source)) in turns.iter().enumerate() {
        let mut place = |source, ranks| {
            let ranks = (0..world_size).map(|owner| onward(owner, groups, ranks)).collect();
            placements.push(Placement::new(placements.len(), ranks, travels, source));
            placements.len() - 1
        };
        if turn > 0 {
            firsts.push(place(firsts[source], 0));
        }
        for direction in hops(inner, &|owner, ranks| needed(owner, groups, ranks)) {
            direction.iter().fold(firsts[turn], |source, ranks| place(source, *ranks));
        }
    }
    // Messages from group to group have a whole turn's time.
    for turn in 1..firsts.len() {
        let start = |turn: usize| firsts.get(turn).copied().unwrap_or(placements.len());
        let (end, next_end) = (start(turn + 1), start(turn + 2));
        let returns = if end < placements.len() { next_end - 1 } else { end };
        placements[firsts[turn]].leaves = firsts[turn - 1];
        placements[firsts[turn]..end].iter_mut().for_each(|p| p.returns = returns);
    }
    placements
}
