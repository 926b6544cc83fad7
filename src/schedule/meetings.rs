//! Who has what to compute with whom.

use super::Rows;
use super::geometry::{Rectangle, rectangles};
use crate::problem::{Problem, Travels};

/// The rectangles of all pairs of ranks.
pub(super) struct Meetings {
    /// `[rank of the queries][rank of the keys]`
    rectangles: Vec<Vec<Vec<Rectangle>>>,
}

impl Meetings {
    pub fn new(problem: &Problem) -> Meetings {
        let ranks = 0..problem.world_size;
        let of = |queries| ranks.clone().map(|keys| rectangles(problem, queries, keys)).collect();
        Meetings { rectangles: ranks.clone().map(of).collect() }
    }

    pub fn world_size(&self) -> usize {
        self.rectangles.len()
    }

    /// Between the chunk of `owner`, of the side that travels, and what `rank` keeps at home.
    pub fn of(&self, travels: Travels, owner: usize, rank: usize) -> &[Rectangle] {
        match travels {
            Travels::Keys => &self.rectangles[rank][owner],
            Travels::Queries => &self.rectangles[owner][rank],
        }
    }

    /// The rows of that chunk that `rank` computes with.
    pub fn needed(&self, travels: Travels, owner: usize, rank: usize) -> Rows {
        let mut rows = Rows::default();
        let met = self.of(travels, owner, rank);
        met.iter().for_each(|met| rows.insert(met.travelling(travels).clone()));
        rows
    }
}
