//! Who has what to compute with whom.

use super::Rows;
use super::geometry::{Cutter, Rectangle};
use crate::problem::{Problem, Travels};

/// The rectangles of all pairs of ranks.
pub(super) struct Meetings {
    world_size: usize,
    /// Those of one pair after those of another: for each rank of the queries, all ranks of the keys.
    rectangles: Vec<Rectangle>,
    /// Where those of each pair begin; one more at the end.
    starts: Vec<usize>,
}

impl Meetings {
    pub fn new(problem: &Problem) -> Meetings {
        let world_size = problem.world_size;
        let (mut rectangles, mut starts) = (Vec::new(), Vec::with_capacity(world_size.pow(2) + 1));
        let mut cutter = Cutter::new(problem);
        for (queries, keys) in (0..world_size).flat_map(|q| (0..world_size).map(move |k| (q, k))) {
            starts.push(rectangles.len());
            cutter.rectangles(queries, keys, &mut rectangles);
        }
        starts.push(rectangles.len());
        Meetings { world_size, rectangles, starts }
    }

    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Between the chunk of `owner`, of the side that travels, and what `rank` keeps at home.
    pub fn of(&self, travels: Travels, owner: usize, rank: usize) -> &[Rectangle] {
        let pair = match travels {
            Travels::Keys => rank * self.world_size + owner,
            Travels::Queries => owner * self.world_size + rank,
        };
        &self.rectangles[self.starts[pair]..self.starts[pair + 1]]
    }

    /// The rows of that chunk that `rank` computes with.
    pub fn needed(&self, travels: Travels, owner: usize, rank: usize) -> Rows {
        let mut rows = Rows::default();
        let met = self.of(travels, owner, rank);
        met.iter().for_each(|met| rows.insert(met.travelling(travels).clone()));
        rows
    }
}
