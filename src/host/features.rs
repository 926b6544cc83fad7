//! The features of a tile: their arrays, and the positions of its rows.

mod panel;

use super::array::HostArray;
use super::buffer::HostBuffer;
use super::philox::Philox;
use super::visibility::{Visibility, integer};
use crate::layout::StridedRange;
use crate::operands::{Arrays, Operand};
use crate::problem::{Features, Problem};
use crate::schedule::Tile;

pub(super) use panel::{FeatureScratch, PanelFeatures};

/// The global positions of a shard's rows.
#[derive(Debug, Clone, Default)]
pub struct RowPositions<'a> {
    /// Positions by the layout.
    ranges: Vec<StridedRange>,
    /// Positions by the call.
    data: Option<&'a HostArray>,
}

impl<'a> RowPositions<'a> {
    /// Returns the positions of the `len` rows that `owner` holds: `data`, or else the layout's.
    pub fn new(
        problem: &Problem,
        owner: usize,
        len: usize,
        data: Option<&'a HostArray>,
    ) -> RowPositions<'a> {
        let ranges = problem.layout.strided_ranges(owner, problem.world_size, len);
        RowPositions { ranges, data }
    }

    /// Returns the position of a row.
    fn of(&self, batch: usize, row: usize) -> i64 {
        if let Some(data) = self.data {
            return integer(data, batch, row, 0).into();
        }
        let range = self.ranges.iter().find(|range| range.rows.contains(&row));
        range.map_or(0, |range| range.position(row) as i64)
    }
}

/// The arrays of a tile's features; by default none.
#[derive(Debug, Clone, Default)]
pub struct TileFeatures<'a> {
    /// The pairs that data hide.
    pub visibility: Visibility<'a>,
    /// Positions of the query owner's rows and of the key owner's rows.
    pub positions: [RowPositions<'a>; 2],
    /// The features of the problem.
    given: Features,
    /// The arrays of the rank, and of the tile's queries and keys.
    arrays: Option<(&'a Arrays<HostArray>, [&'a HostBuffer; 2])>,
}

impl<'a> TileFeatures<'a> {
    /// Finds the features of a tile among the arrays of its rank and of its chunks.
    pub(super) fn new(
        problem: &Problem,
        arrays: &'a Arrays<HostArray>,
        tile: &Tile,
        queries: &'a HostBuffer,
        keys: &'a HostBuffer,
    ) -> TileFeatures<'a> {
        let features = &problem.features;
        let query_positions = queries.of_feature(features, Operand::QueryPositions);
        let key_positions = keys.of_feature(features, Operand::KeyPositions);
        TileFeatures {
            visibility: Visibility::new(features, queries, keys),
            positions: [
                RowPositions::new(problem, tile.queries.owner, problem.q_len, query_positions),
                RowPositions::new(problem, tile.keys.owner, problem.kv_len, key_positions),
            ],
            given: *features,
            arrays: Some((arrays, [queries, keys])),
        }
    }
}

impl TileFeatures<'_> {
    /// Returns an array of a feature: the rank's, or that of the chunk that the tile has rows of.
    pub(super) fn array(&self, operand: Operand) -> Option<&HostArray> {
        let (arrays, sides) = self.arrays?;
        match operand.side() {
            Some(side) => sides[side as usize].of_feature(&self.given, operand),
            None => arrays.get(operand),
        }
    }

    /// Whether weights are dropped.
    pub(super) fn drops(&self) -> bool {
        self.given.dropout.is_some()
    }

    /// Whether the tile has no feature except perhaps a soft cap. Positions alone change nothing.
    pub(super) fn is_empty(&self) -> bool {
        Features { soft_cap: None, positions: false, ..self.given } == Features::NONE
    }

    /// Returns the random numbers of one head, and the probability of dropout.
    fn philox(&self, batch: usize, head: usize) -> Option<(Philox, f32)> {
        let (array, rate) = self.array(Operand::Dropout).zip(self.given.dropout)?;
        let at = array.row(batch, 0, 0).cast::<u32>();
        // SAFETY: the maker of the tile gave each batch entry four words, which no task writes.
        let [k0, k1, entry, first] = unsafe { [*at, *at.add(1), *at.add(2), *at.add(3)] };
        let head = first.wrapping_add(head as u32);
        Some((Philox { key: [k0, k1], head, entry }, rate))
    }
}
