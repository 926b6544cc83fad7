//! Which rectangles each pair of ranks has to compute.

use super::Rows;
use super::geometry::{Rectangle, rectangles};
use crate::problem::{Problem, Travels};

/// The rectangles of all pairs of ranks.
pub(super) struct RankPairs {
    pub world_size: usize,
    /// The rectangles of each pair: for each rank of the queries, all ranks of the keys.
    rectangles: Vec<Vec<Rectangle>>,
}

impl RankPairs {
    pub fn new(problem: &Problem) -> RankPairs {
        RankPairs { world_size: problem.world_size, rectangles: rectangles(problem) }
    }

    /// The rectangles of the chunk of `owner` on `side` with the other side's rows of `rank`.
    pub fn of(&self, side: Travels, owner: usize, rank: usize) -> &[Rectangle] {
        let (queries, keys) = match side {
            Travels::Keys => (rank, owner),
            Travels::Queries => (owner, rank),
        };
        &self.rectangles[queries * self.world_size + keys]
    }

    /// The rows of that chunk that `rank` computes with.
    pub fn needed(&self, side: Travels, owner: usize, rank: usize) -> Rows {
        self.of(side, owner, rank).iter().map(|pair| pair.side(side).clone()).collect()
    }
}
