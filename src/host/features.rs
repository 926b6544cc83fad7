//! The features of a tile: their arrays, and the positions of its rows.

mod panel;

use super::array::HostArray;
use super::buffer::HostBuffer;
use super::philox::Philox;
use super::visibility::{Visibility, integer};
use crate::layout::StridedRange;
use crate::operands::{Arrays, Operand};
use crate::problem::Problem;
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
    /// [`Operand::Slopes`].
    pub slopes: Option<&'a HostArray>,
    /// [`Operand::Dropout`], and the probability with which a weight is dropped.
    pub dropout: Option<(&'a HostArray, f32)>,
    /// [`Operand::SlopeGrad`], which the tile adds to.
    pub dslopes: Option<&'a HostArray>,
    /// Positions of the query owner's rows and of the key owner's rows.
    pub positions: [RowPositions<'a>; 2],
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
            slopes: arrays.get(Operand::Slopes),
            dropout: arrays.get(Operand::Dropout).zip(features.dropout),
            dslopes: arrays.get(Operand::SlopeGrad),
            positions: [
                RowPositions::new(problem, tile.queries.owner, problem.q_len, query_positions),
                RowPositions::new(problem, tile.keys.owner, problem.kv_len, key_positions),
            ],
        }
    }
}

impl TileFeatures<'_> {
    /// Whether the tile has no feature except perhaps a soft cap.
    pub(super) fn is_empty(&self) -> bool {
        self.visibility.is_empty() && self.slopes.is_none() && self.dropout.is_none()
    }

    /// Returns the random numbers of one head, and the probability of dropout.
    fn philox(&self, batch: usize, head: usize) -> Option<(Philox, f32)> {
        let (array, rate) = self.dropout?;
        let at = array.row(batch, 0, 0).cast::<u32>();
        // SAFETY: the maker of the tile gave each batch entry four words, which no task writes.
        let [k0, k1, entry, first] = unsafe { [*at, *at.add(1), *at.add(2), *at.add(3)] };
        let head = first.wrapping_add(head as u32);
        Some((Philox { key: [k0, k1], head, entry }, rate))
    }
}
