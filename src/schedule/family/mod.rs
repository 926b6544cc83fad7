//! The families of schedules.
//!
//! A family is a file in this folder, whose [`Spec`] tells it from other families, and its lines
//! here: a variant of [`Family`], an entry of [`Family::ALL`] and a row of [`Family::spec`]. All
//! other code, and the tests, find it through these. The Python package lists its name in
//! `Schedule`.

mod all_gather;
mod balanced;
mod double_ring;
mod ring;

use std::fmt;

use super::placement::Placement;
use super::rank_pairs::RankPairs;
use crate::error::Result;
use crate::problem::{Problem, Travels};
use crate::types::invalid;

/// How chunks get to the ranks that compute with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Family {
    /// From rank to rank: up the ring, down, or first up and then down, whichever moves the fewest
    /// rows.
    #[default]
    Ring,
    /// Rings of `inner` neighbouring ranks over fast links, and rings from one such group to the
    /// next over slow links: rank = group · inner + number within the group.
    DoubleRing {
        /// Ranks of a group; divides the number of ranks.
        inner: usize,
    },
    /// A ring in which ranks with nothing left to see compute for ranks with too much: for causal
    /// masks in the contiguous layout. Where it would help no rank, the ring.
    Balanced,
    /// Straight from the owner to each rank that needs a chunk, and accumulators straight back.
    AllGather,
}

/// What tells one family from another. Where a function takes two numbers, these are the ranks of
/// the ring and of an inner ring.
pub(crate) struct Spec {
    /// The name that users write.
    name: &'static str,
    /// How chunks travel, in a sentence.
    doc: &'static str,
    /// Returns where all chunks are at each step, given the ranks of an inner ring.
    placements: fn(&RankPairs, Travels, usize) -> Vec<Placement>,
    /// Checks the numbers of ranks.
    validate: fn(usize, usize) -> Result<()>,
    /// Whether some exchanges have several steps' time.
    has_far_links: fn(usize, usize) -> bool,
    /// The numbers of mesh axes over which `schedule="auto"` compares the family with the ring.
    pub auto_axes: &'static [usize],
    /// Returns why the family's schedules of a problem are those of the ring, if they are.
    pub same_as_ring: fn(&Problem) -> Option<&'static str>,
    /// Which ranks of a node group send to other node groups.
    crossing: Crossing,
}

/// Which ranks of a node group send to other node groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Crossing {
    /// One rank, at every step.
    OneRank,
    /// All ranks, at every step.
    AllRanks,
    /// All ranks, once while chunks go round a node group.
    AllRanksInTurns,
}

impl Spec {
    /// A family for any number of ranks, which differs from the ring for every problem and which
    /// `schedule="auto"` leaves out.
    const fn new(
        name: &'static str,
        doc: &'static str,
        placements: fn(&RankPairs, Travels, usize) -> Vec<Placement>,
    ) -> Spec {
        Spec {
            name,
            doc,
            placements,
            validate: |_, _| Ok(()),
            has_far_links: |_, _| false,
            auto_axes: &[],
            same_as_ring: |_| None,
            crossing: Crossing::AllRanks,
        }
    }
}

impl Family {
    /// Every family, in the order of the documentation; see [`Family::with_inner`] for the length
    /// of inner rings.
    pub const ALL: [Family; 4] =
        [Family::Ring, Family::DoubleRing { inner: 1 }, Family::Balanced, Family::AllGather];

    /// The table of families.
    pub(crate) const fn spec(self) -> &'static Spec {
        match self {
            Family::Ring => &ring::SPEC,
            Family::DoubleRing { .. } => &double_ring::SPEC,
            Family::Balanced => &balanced::SPEC,
            Family::AllGather => &all_gather::SPEC,
        }
    }

    /// The ranks of an inner ring, if the family has inner rings.
    pub const fn inner(self) -> Option<usize> {
        match self {
            Family::DoubleRing { inner } => Some(inner),
            _ => None,
        }
    }

    /// The family with `inner` ranks in each inner ring, if it has inner rings.
    pub const fn with_inner(self, inner: usize) -> Family {
        match self {
            Family::DoubleRing { .. } => Family::DoubleRing { inner },
            flat => flat,
        }
    }

    /// The name that users write.
    pub const fn name(self) -> &'static str {
        self.spec().name
    }

    /// How chunks travel, in a sentence for users.
    pub const fn doc(self) -> &'static str {
        self.spec().doc
    }

    /// The family with this name, and with `inner` ranks in each inner ring if it has inner rings.
    ///
    /// # Errors
    /// [`crate::Error::InvalidProblem`] that lists the names, if no family has this name.
    pub fn named(name: &str, inner: usize) -> Result<Family> {
        let known = Family::ALL.into_iter().find(|family| family.name() == name);
        known.map(|family| family.with_inner(inner)).ok_or_else(|| {
            let [names @ .., last] = &Family::ALL.map(Family::name);
            let expected = format!("{} or {last}", names.join(", "));
            invalid("schedule", expected, format!("{name:?}"))
        })
    }

    /// Whether there are exchanges that have several steps' time, in addition to those from step to
    /// step.
    pub fn has_far_links(self, world_size: usize) -> bool {
        (self.spec().has_far_links)(world_size, self.inner().unwrap_or(1))
    }

    /// Checks that the family has schedules for this number of ranks.
    ///
    /// # Errors
    /// [`crate::Error::InvalidProblem`] if the inner rings of a double ring do not fit.
    pub fn validate(self, world_size: usize) -> Result<()> {
        (self.spec().validate)(world_size, self.inner().unwrap_or(1))
    }

    /// Which ranks of a node group send to other node groups, in schedules of `problem`.
    pub(crate) fn crossing(self, problem: &Problem) -> Crossing {
        let spec = self.spec();
        (spec.same_as_ring)(problem).map_or(spec.crossing, |_| ring::SPEC.crossing)
    }

    /// Where all chunks are at each step.
    pub(super) fn placements(self, pairs: &RankPairs, travels: Travels) -> Vec<Placement> {
        (self.spec().placements)(pairs, travels, self.inner().unwrap_or(1))
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        self.inner().map_or(Ok(()), |inner| write!(f, " of {inner} ranks each"))
    }
}
