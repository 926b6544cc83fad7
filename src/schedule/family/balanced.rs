//! The balanced ring: ranks with little to do help ranks with much.
//!
//! With a causal mask over contiguous shards, later ranks have more to do than earlier ranks. So at
//! step t, a rank computes with the keys of the rank t before it. A rank that has no such rank
//! helps instead: it computes with its own keys and the queries of the rank P − t after it.
//!
//! ```text
//! distance of queries from keys    0  1  2  …  ⌊P/2⌋      at step 0 … ⌊P/2⌋, on the queries' ranks
//!                                  P−1  …  ⌊P/2⌋ + 1      at step 1 …, on the keys' ranks
//! ```
//!
//! If queries travel, the two sides change places. If P is even, half of the ranks have nothing to
//! do at the last step.

use super::{Spec, ring};
use crate::layout::Layout;
use crate::problem::{Problem, Travels};
use crate::schedule::placement::Placement;
use crate::schedule::rank_pairs::RankPairs;

pub(super) const SPEC: Spec = Spec {
    auto_axes: &[1],
    same_as_ring,
    ..Spec::new(
        "balanced",
        "A ring in which ranks with little to see compute for ranks with more.",
        placements,
    )
};

fn same_as_ring(problem: &Problem) -> Option<&'static str> {
    let helps = problem.layout == Layout::Contiguous && problem.window.right == Some(0);
    (!helps).then_some("it is for causal masks in the contiguous layout, elsewhere the ring")
}

fn placements(pairs: &RankPairs, travels: Travels, inner: usize) -> Vec<Placement> {
    let world_size = pairs.world_size;
    let has_pairs = |(q, k): &(usize, usize)| !pairs.of(Travels::Keys, *k, *q).is_empty();
    let ranks = (0..world_size).flat_map(|q| (0..world_size).map(move |k| (q, k)));
    let computed: Vec<_> = ranks.filter(has_pairs).collect();
    let looks_ahead = computed.iter().any(|(q, k)| k > q);
    if looks_ahead || !computed.iter().any(|(q, k)| q - k > world_size / 2) {
        return (ring::SPEC.placements)(pairs, travels, inner);
    }
    let place = |step: usize| {
        let to = |owner: usize| match travels {
            Travels::Keys => (owner + step) % world_size,
            Travels::Queries => (owner + world_size - step) % world_size,
        };
        let side = |owner: usize| {
            let side = if to(owner) > owner { Travels::Keys } else { Travels::Queries };
            // Halfway round, helpers would compute what other ranks compute.
            (side == travels || 2 * step < world_size).then_some(side)
        };
        let sides = (0..world_size).map(side).collect();
        let ranks = (0..world_size).map(to).collect();
        Placement { sides, ..Placement::new(step, ranks, travels, 0) }
    };
    (0..=world_size / 2).map(place).collect()
}
