//! Placements: where all chunks are at one step.
//!
//! At each step the chunk of every owner is at one rank, and every rank has one chunk. Chunks come
//! from the ranks of an earlier placement, so the placements are a tree whose root, placement 0, is
//! home. Accumulators travel with their chunks as long as a placement's source is the placement
//! just before it. Such a run of placements is an *accumulator chain*: its accumulators go home
//! from its last rank.

use crate::problem::Travels;

/// Where all chunks are at the step that has the placement's number.
#[derive(Debug)]
pub(super) struct Placement {
    /// The rank at which the chunk of each owner is.
    pub ranks: Vec<usize>,
    /// The owner of the chunk at each rank.
    pub owners: Vec<usize>,
    /// The side of each owner's chunk; `None` where no row of the chunk travels.
    pub sides: Vec<Option<Travels>>,
    /// The placement that chunks come from.
    pub source: usize,
    /// The step at which chunks leave their source. They arrive before the placement's step begins.
    pub leaves: usize,
    /// The step at which accumulators that go home from here are merged. They leave at the step
    /// after the placement's.
    pub returns: usize,
}

impl Placement {
    /// Chunks of `side` at `ranks`. They leave `source` one step before the placement's.
    pub fn new(number: usize, ranks: Vec<usize>, side: Travels, source: usize) -> Placement {
        let mut owners = vec![0; ranks.len()];
        ranks.iter().enumerate().for_each(|(owner, rank)| owners[*rank] = owner);
        let sides = vec![Some(side); ranks.len()];
        let (leaves, returns) = (number.saturating_sub(1), number + 1);
        Placement { ranks, owners, sides, source, leaves, returns }
    }
}

/// Whether placement `number` continues the accumulator chain of the placement before it.
pub(super) fn continues(placements: &[Placement], number: usize) -> bool {
    number > 1 && placements.get(number).is_some_and(|placement| placement.source + 1 == number)
}
