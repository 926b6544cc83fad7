//! The ring: chunks go from rank to rank.

use super::{Crossing, Spec, double_ring};

pub(super) const SPEC: Spec = Spec {
    crossing: Crossing::OneRank,
    ..Spec::new("ring", "Chunks go from rank to rank.", |pairs, travels, _| {
        double_ring::placements(pairs, travels, pairs.world_size)
    })
};
