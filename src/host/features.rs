//! The features of a tile, and how they change its scores and weights.

use std::ops::Range;

use super::array::HostArray;
use super::buffer::HostBuffer;
use super::philox::{Philox, WIDTH};
use super::scratch::Scratch;
use super::simd::Simd;
use super::softmax::{Logits, ScoreFeatures, SoftCap, VectorPlace};
use super::tile::TileInputs;
use crate::layout::Piece;
use crate::mask::{Coverage, Span};
use crate::operands::{Arrays, Operand, Side};
use crate::problem::Problem;
use crate::schedule::Tile;

/// The global positions of a shard's rows.
#[derive(Debug, Clone, Default)]
pub struct RowPositions(Vec<Piece>);

impl RowPositions {
    /// Returns the positions of the `len` rows that `owner` holds.
    pub fn new(problem: &Problem, owner: usize, len: usize) -> RowPositions {
        RowPositions(problem.layout.pieces(owner, problem.world_size, len))
    }

    /// Returns the position of a row.
    fn of(&self, row: usize) -> usize {
        let piece = self.0.iter().find(|piece| piece.rows.contains(&row));
        piece.map_or(0, |piece| piece.position(row))
    }
}

/// The arrays of a tile's features; by default none.
#[derive(Debug, Clone, Default)]
pub struct TileFeatures<'a> {
    /// Segments of queries and of keys.
    pub segments: Option<[&'a HostArray; 2]>,
    /// [`Operand::Slopes`].
    pub slopes: Option<&'a HostArray>,
    /// [`Operand::Dropout`], and the probability with which a weight is dropped.
    pub dropout: Option<(&'a HostArray, f32)>,
    /// [`Operand::SlopeGrad`], which the tile adds to.
    pub dslopes: Option<&'a HostArray>,
    /// Positions of the query owner's rows and of the key owner's rows.
    pub positions: [RowPositions; 2],
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
        let query_segments = queries.of_feature(features, Operand::QuerySegments);
        let key_segments = keys.of_feature(features, Operand::KeySegments);
        TileFeatures {
            segments: query_segments.zip(key_segments).map(|(queries, keys)| [queries, keys]),
            slopes: arrays.get(Operand::Slopes),
            dropout: arrays.get(Operand::Dropout).zip(features.dropout),
            dslopes: arrays.get(Operand::SlopeGrad),
            positions: [
                RowPositions::new(problem, tile.queries.owner, problem.q_len),
                RowPositions::new(problem, tile.keys.owner, problem.kv_len),
            ],
        }
    }
}

impl TileFeatures<'_> {
    /// Whether the tile has no feature except perhaps a soft cap.
    pub(super) fn is_empty(&self) -> bool {
        self.segments.is_none() && self.slopes.is_none() && self.dropout.is_none()
    }

    /// Returns how much of queries × keys their segments allow.
    pub(super) fn coverage(
        &self,
        batch: usize,
        queries: &Range<usize>,
        keys: &Range<usize>,
    ) -> Coverage {
        let Some([q, k]) = self.segments else { return Coverage::Full };
        let span = |array: &HostArray, rows: &Range<usize>| {
            Span::of(rows.clone().map(|row| segment(array, batch, row)))
        };
        span(q, queries).coverage(span(k, keys))
    }

    /// Returns the segment of a query, if the tile has segments.
    pub(super) fn query_segment(&self, batch: usize, row: usize) -> Option<i32> {
        self.segments.map(|[queries, _]| segment(queries, batch, row))
    }

    /// Returns the runs of one segment among `rows`, each with its segment. Rows of negative
    /// segments are in no run.
    pub(super) fn runs(
        &self,
        of: Side,
        batch: usize,
        rows: &Range<usize>,
    ) -> Vec<(Range<usize>, i32)> {
        let mut runs: Vec<(Range<usize>, i32)> = Vec::new();
        let Some(arrays) = self.segments else { return runs };
        for row in rows.clone() {
            let id = segment(arrays[of as usize], batch, row);
            match runs.last_mut() {
                Some((run, last)) if *last == id && run.end == row => run.end += 1,
                _ if id >= 0 => runs.push((row..row + 1, id)),
                _ => {}
            }
        }
        runs
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

/// Returns the segment of a row.
pub(super) fn segment(array: &HostArray, batch: usize, row: usize) -> i32 {
    // SAFETY: the maker of the tile gave each row one int32, which no task writes.
    unsafe { *array.row(batch, row, 0).cast::<i32>() }
}

/// Segments and positions of a run of queries or of keys, in scratch.
#[derive(Clone, Copy)]
struct SideScratch {
    /// Segments as bits. Negative segments of queries and of keys become different numbers.
    segments: *mut f32,
    /// Positions, less the position of the tile's first query.
    distances: *mut f32,
    /// Positions as bits.
    positions: *mut f32,
}

impl SideScratch {
    /// Takes scratch for `len` rows.
    fn take(scratch: &mut Scratch, len: usize) -> SideScratch {
        let [segments, distances, positions] = [(); 3].map(|()| scratch.take(len));
        SideScratch { segments, distances, positions }
    }

    /// Returns the rows from `first` on.
    fn skip(self, first: usize) -> SideScratch {
        let [segments, distances, positions] =
            [self.segments, self.distances, self.positions].map(|ptr| ptr.wrapping_add(first));
        SideScratch { segments, distances, positions }
    }

    fn position(self, row: usize) -> u32 {
        // SAFETY: `FeatureScratch::load` filled all rows and lanes that a panel asks for.
        unsafe { (*self.positions.add(row)).to_bits() }
    }
}

/// Segments and positions of a block of queries and a block of keys, and the factors of dropout.
#[derive(Clone, Copy)]
pub(super) struct FeatureScratch {
    queries: SideScratch,
    keys: SideScratch,
    /// Factors of the weights of one panel, in its layout; for dropout only.
    keep: *mut f32,
}

impl FeatureScratch {
    /// Takes scratch for blocks of `queries` and of `keys`, and for a panel of `panel` floats.
    pub fn take(
        scratch: &mut Scratch,
        features: &TileFeatures<'_>,
        [queries, keys]: [usize; 2],
        panel: usize,
    ) -> FeatureScratch {
        let [queries, keys] = [queries, keys].map(|len| if features.is_empty() { 0 } else { len });
        FeatureScratch {
            queries: SideScratch::take(scratch, queries),
            keys: SideScratch::take(scratch, keys),
            keep: scratch.take(if features.dropout.is_some() { panel } else { 0 }),
        }
    }

    /// Reads the segments and positions of `rows`, and fills the scratch up to `padded` rows.
    ///
    /// # Safety
    /// The caller guarantees that the scratch is this thread's, and was taken for the tile's
    /// features and for `padded` rows or more.
    pub unsafe fn load(
        self,
        (tile, of): (&TileInputs<'_>, Side),
        batch: usize,
        rows: &Range<usize>,
        padded: usize,
    ) {
        let features = &tile.features;
        if features.is_empty() {
            return;
        }
        let side = if of == Side::Queries { self.queries } else { self.keys };
        let base = features.positions[0].of(tile.q_rows.start);
        let index = of as usize;
        let no_segment = -1 - index as i32;
        for i in 0..padded {
            let row = rows.start + i;
            let mut id = no_segment;
            let mut position = base;
            if rows.contains(&row) {
                id = features.segments.map_or(0, |arrays| segment(arrays[index], batch, row));
                position = features.positions[index].of(row);
            }
            let id = if id < 0 { no_segment } else { id };
            // SAFETY: the caller guarantees room for `padded` rows.
            unsafe {
                *side.segments.add(i) = f32::from_bits(id as u32);
                *side.distances.add(i) = (position as i64 - base as i64) as f32;
                *side.positions.add(i) = f32::from_bits(position as u32);
            }
        }
    }
}

/// The features of one head, on the rows and lanes of a panel.
#[derive(Clone, Copy)]
pub(super) struct PanelFeatures {
    cap: Option<SoftCap>,
    /// Whether the segments of the rows and lanes have to be compared.
    compares: bool,
    /// Factor for the distance of the row's position from the lane's position.
    slope: Option<f32>,
    dropout: Option<(Philox, f32)>,
    lanes: SideScratch,
    rows: SideScratch,
    lanes_are: Side,
    /// Factors of the weights, in the layout of the panel; for dropout only.
    keep: *mut f32,
    /// Lanes of the panel.
    across: usize,
}

impl PanelFeatures {
    /// Returns the features of one head, or `None` if the tile has none except perhaps a soft cap.
    pub fn new(
        tile: &TileInputs<'_>,
        (batch, head): (usize, usize),
        lanes_are: Side,
        FeatureScratch { queries, keys, keep }: FeatureScratch,
    ) -> Option<PanelFeatures> {
        let features = &tile.features;
        if features.is_empty() {
            return None;
        }
        let (lanes, rows, toward_keys) = match lanes_are {
            Side::Queries => (queries, keys, 1.0),
            Side::Keys => (keys, queries, -1.0),
        };
        let slope = features.slopes.map(|slopes| {
            // SAFETY: the maker of the tile gave each head one float32, which no task writes.
            unsafe { *slopes.row(batch, 0, head).cast::<f32>() * toward_keys }
        });
        let dropout = features.philox(batch, head);
        let (cap, compares, across) = (tile.soft_cap.map(SoftCap::new), false, 0);
        Some(PanelFeatures { cap, compares, slope, dropout, lanes, rows, lanes_are, keep, across })
    }

    /// Returns the features on the panel of `lanes`.
    pub fn on(self, lanes: &Range<usize>, compares: bool) -> PanelFeatures {
        let across = lanes.len();
        PanelFeatures { lanes: self.lanes.skip(lanes.start), across, compares, ..self }
    }

    /// Whether weights are dropped.
    pub fn drops(&self) -> bool {
        self.dropout.is_some()
    }

    /// Computes the factors of the weights in `rows` of the panel: 0 or 1 / (1 − rate).
    ///
    /// # Safety
    /// The caller guarantees that the scratch is this thread's, and that it was loaded for these
    /// rows and lanes.
    #[inline(always)]
    pub unsafe fn fill_keep(&self, rows: Range<usize>) {
        let Some((philox, rate)) = self.dropout else { return };
        // The rate is rounded to the nearest of 2³² steps.
        let threshold = (f64::from(rate) * 4_294_967_296.0).round() as u32;
        let factor = |word: u32| if word >= threshold { 1.0 / (1.0 - rate) } else { 0.0 };
        match self.lanes_are {
            // SAFETY: the caller guarantees the scratch.
            Side::Queries => unsafe { self.keep_by_keys(philox, rows, factor) },
            // SAFETY: the caller guarantees the scratch.
            Side::Keys => unsafe { self.keep_by_queries(philox, rows, factor) },
        }
    }

    /// Computes the factors for queries in lanes. The four words of a quad serve up to four rows.
    ///
    /// # Safety
    /// The caller guarantees what [`PanelFeatures::fill_keep`] asks for.
    #[inline(always)]
    unsafe fn keep_by_keys(&self, philox: Philox, rows: Range<usize>, factor: impl Fn(u32) -> f32) {
        for first in (0..self.across).step_by(WIDTH) {
            let count = WIDTH.min(self.across - first);
            let queries = std::array::from_fn(|i| self.lanes.position(first + i.min(count - 1)));
            let (mut made, mut words) = (None, [[0; WIDTH]; 4]);
            for row in rows.clone() {
                let key = self.rows.position(row);
                if made != Some(key / 4) {
                    words = philox.words(&[key / 4; WIDTH], &queries);
                    made = Some(key / 4);
                }
                for (lane, word) in words[key as usize % 4][..count].iter().enumerate() {
                    // SAFETY: the caller guarantees that the scratch has these rows and lanes.
                    unsafe { *self.keep.add(row * self.across + first + lane) = factor(*word) }
                }
            }
        }
    }

    /// Computes the factors for keys in lanes. Each quad of keys is computed once in a row.
    ///
    /// # Safety
    /// The caller guarantees what [`PanelFeatures::fill_keep`] asks for.
    #[inline(always)]
    unsafe fn keep_by_queries(
        &self,
        philox: Philox,
        rows: Range<usize>,
        factor: impl Fn(u32) -> f32,
    ) {
        const MOST: usize = 64;
        // No register tile is wider than 64 lanes.
        assert!(self.across <= MOST, "a panel of {} lanes", self.across);
        let (mut quads, mut slots, mut count) = ([0; MOST], [0; MOST], 0);
        for (lane, slot) in slots.iter_mut().enumerate().take(self.across) {
            let quad = self.lanes.position(lane) / 4;
            if count == 0 || quads[count - 1] != quad {
                quads[count] = quad;
                count += 1;
            }
            *slot = count - 1;
        }
        let mut words = [[0; MOST]; 4];
        for row in rows {
            let queries = [self.rows.position(row); WIDTH];
            for first in (0..count).step_by(WIDTH) {
                let some = std::array::from_fn(|i| quads[(first + i).min(MOST - 1)]);
                for (all, some) in words.iter_mut().zip(philox.words(&some, &queries)) {
                    all[first..first + WIDTH].copy_from_slice(&some);
                }
            }
            for (lane, slot) in slots.iter().enumerate().take(self.across) {
                let word = words[self.lanes.position(lane) as usize % 4][*slot];
                // SAFETY: the caller guarantees that the scratch has these rows and lanes.
                unsafe { *self.keep.add(row * self.across + lane) = factor(word) }
            }
        }
    }
}

impl ScoreFeatures for PanelFeatures {
    #[inline(always)]
    fn logits<S: Simd>(self, simd: S, s: S::Vector, at: VectorPlace) -> Logits<S::Vector> {
        let (mut s, derivative) = match self.cap {
            Some(cap) => cap.logits(simd, s, at),
            None => (s, None),
        };
        if let Some(slope) = self.slope {
            let distance = self.distance(simd, at);
            s = simd.mul_add(distance, simd.splat(slope), s);
        }
        (self.visible(simd, s, f32::NEG_INFINITY, at), derivative)
    }

    #[inline(always)]
    fn visible<S: Simd>(self, simd: S, x: S::Vector, other: f32, at: VectorPlace) -> S::Vector {
        if !self.compares {
            return x;
        }
        // SAFETY: `FeatureScratch::load` filled all rows and lanes of the panel.
        unsafe {
            let own = simd.splat(*self.rows.segments.add(at.row));
            let lanes = simd.load(self.lanes.segments.add(at.first));
            simd.where_same_bits(lanes, own, x, simd.splat(other))
        }
    }

    #[inline(always)]
    fn kept<S: Simd>(self, simd: S, at: VectorPlace) -> Option<S::Vector> {
        // SAFETY: `fill_keep` computed the factors of all rows and lanes of the panel.
        self.dropout.map(|_| unsafe { simd.load(self.keep.add(at.row * self.across + at.first)) })
    }

    #[inline(always)]
    fn distance<S: Simd>(self, simd: S, at: VectorPlace) -> S::Vector {
        // SAFETY: `FeatureScratch::load` filled all rows and lanes of the panel.
        unsafe {
            let row = simd.splat(*self.rows.distances.add(at.row));
            simd.sub(row, simd.load(self.lanes.distances.add(at.first)))
        }
    }
}
