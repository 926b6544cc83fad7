//! Every rank gets the chunks that it needs from their owners, one after another, and sends the
//! accumulators of each chunk straight back. A rank holds two chunks beyond its shard: one to
//! compute with, and one on its way.

use super::Spec;
use crate::problem::Travels;
use crate::schedule::placement::Placement;
use crate::schedule::rank_pairs::RankPairs;

pub(super) const SPEC: Spec = Spec {
    auto_axes: &[1, 2],
    ..Spec::new(
        "all_gather",
        "Chunks go straight from their owner to each rank that needs them.",
        placements,
    )
};

fn placements(pairs: &RankPairs, travels: Travels, _inner: usize) -> Vec<Placement> {
    let world_size = pairs.world_size;
    let ranks = |distance: usize| (0..world_size).map(move |owner| (owner + distance) % world_size);
    let is_needed = |distance: &usize| {
        let mut ranks = ranks(*distance).enumerate();
        ranks.any(|(owner, rank)| !pairs.of(travels, owner, rank).is_empty())
    };
    let distances = [0].into_iter().chain((1..world_size).filter(is_needed));
    let place = |(number, distance)| Placement::new(number, ranks(distance).collect(), travels, 0);
    distances.enumerate().map(place).collect()
}
