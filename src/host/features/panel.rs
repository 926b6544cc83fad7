//! How features change the scores and weights of a panel.

use std::ops::Range;

use super::super::philox::{Philox, WIDTH};
use super::super::scratch::Scratch;
use super::super::simd::Simd;
use super::super::softmax::{Logits, ScoreFeatures, SoftCap, VectorPlace};
use super::super::tile::TileInputs;
use super::TileFeatures;
use crate::operands::{Operand, Side};

/// The data of a range of queries or of keys, in scratch.
#[derive(Clone, Copy)]
struct SideScratch {
    /// Segments as bits. Negative segments of queries and of keys become different numbers.
    segments: *mut f32,
    /// Positions, less the position of the tile's first query.
    distances: *mut f32,
    /// Positions as bits.
    positions: *mut f32,
    /// Starts and stops of a key's intervals, as bits.
    bounds: [[*mut f32; 2]; 2],
}

impl SideScratch {
    /// Takes scratch for `len` rows.
    fn take(scratch: &mut Scratch, len: usize) -> SideScratch {
        let mut array = || scratch.take(len);
        let [segments, distances, positions] = [(); 3].map(|()| array());
        let bounds = [(); 2].map(|()| [(); 2].map(|()| array()));
        SideScratch { segments, distances, positions, bounds }
    }

    /// Returns the rows from `first` on.
    fn skip(self, first: usize) -> SideScratch {
        let skip = |ptr: *mut f32| ptr.wrapping_add(first);
        let [segments, distances, positions] =
            [self.segments, self.distances, self.positions].map(skip);
        let bounds = self.bounds.map(|pair| pair.map(skip));
        SideScratch { segments, distances, positions, bounds }
    }

    fn position(self, row: usize) -> u32 {
        // SAFETY: `FeatureScratch::load` filled all rows and lanes that a panel asks for.
        unsafe { (*self.positions.add(row)).to_bits() }
    }
}

/// The data of a block of queries and a block of keys, and the factors of dropout.
#[derive(Clone, Copy)]
pub(in super::super) struct FeatureScratch {
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
            keep: scratch.take(if features.drops() { panel } else { 0 }),
        }
    }

    /// Reads the data of `rows`, and fills the scratch up to `padded` rows.
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
        let TileFeatures { visibility, positions, .. } = &tile.features;
        if tile.features.is_empty() {
            return;
        }
        let side = if of == Side::Queries { self.queries } else { self.keys };
        let base = positions[0].of(batch, tile.q_rows.start);
        let index = of as usize;
        let no_segment = -1 - index as i32;
        for i in 0..padded {
            let row = rows.start + i;
            let (mut id, mut position, mut bounds) = (no_segment, base, [[0; 2]; 2]);
            if rows.contains(&row) {
                position = positions[index].of(batch, row);
                id = match of {
                    Side::Queries => visibility.query_segment(batch, row),
                    Side::Keys => visibility.key_segment(batch, row),
                };
                if of == Side::Keys {
                    bounds = visibility.bounds(batch, row);
                }
            }
            let id = if id < 0 { no_segment } else { id };
            let bits = |number: i32| f32::from_bits(number as u32);
            // SAFETY: the caller guarantees room for `padded` rows.
            unsafe {
                *side.segments.add(i) = bits(id);
                *side.distances.add(i) = (position - base) as f32;
                *side.positions.add(i) = bits(position as i32);
                for (to, from) in side.bounds.as_flattened().iter().zip(bounds.as_flattened()) {
                    *to.add(i) = bits(*from);
                }
            }
        }
    }
}

/// The features of one head, on the rows and lanes of a panel.
#[derive(Clone, Copy)]
pub(in super::super) struct PanelFeatures {
    cap: Option<SoftCap>,
    /// Whether data may hide pairs of the panel.
    compares: bool,
    has_segments: bool,
    /// How many intervals each key has.
    intervals: usize,
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
        let slope = features.array(Operand::Slopes).map(|slopes| {
            // SAFETY: the maker of the tile gave each head one float32, which no task writes.
            unsafe { *slopes.row(batch, 0, head).cast::<f32>() * toward_keys }
        });
        let dropout = features.philox(batch, head);
        let (has_segments, intervals) =
            (features.visibility.has_segments(), features.visibility.interval_count());
        let cap = tile.soft_cap.map(SoftCap::new);
        Some(PanelFeatures {
            cap,
            compares: false,
            has_segments,
            intervals,
            slope,
            dropout,
            lanes,
            rows,
            lanes_are,
            keep,
            across: 0,
        })
    }

    /// Returns the features on the panel of `lanes`. `compares`: whether data may hide pairs of the
    /// panel. Returns `None` if none of the features changes the panel, except perhaps a soft cap.
    pub fn on(self, lanes: &Range<usize>, compares: bool) -> Option<PanelFeatures> {
        let across = lanes.len();
        let on = PanelFeatures { lanes: self.lanes.skip(lanes.start), across, compares, ..self };
        (compares || on.slope.is_some() || on.drops()).then_some(on)
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
        let other = simd.splat(other);
        // SAFETY: `FeatureScratch::load` filled all rows and lanes of the panel.
        let of_lanes = |array: *mut f32| unsafe { simd.load(array.add(at.first)) };
        // SAFETY: `FeatureScratch::load` filled all rows and lanes of the panel.
        let of_row = |array: *mut f32| unsafe { simd.splat(*array.add(at.row)) };
        let mut seen = x;
        if self.intervals > 0 {
            seen = other;
            for interval in 0..self.intervals {
                let (position, [start, stop]) = match self.lanes_are {
                    Side::Queries => {
                        (of_lanes(self.lanes.positions), self.rows.bounds[interval].map(of_row))
                    }
                    Side::Keys => {
                        (of_row(self.rows.positions), self.lanes.bounds[interval].map(of_lanes))
                    }
                };
                let before_stop = simd.where_less(position, stop, x, seen);
                seen = simd.where_less(position, start, seen, before_stop);
            }
        }
        if self.has_segments {
            let (own, lanes) = (of_row(self.rows.segments), of_lanes(self.lanes.segments));
            seen = simd.where_same_bits(lanes, own, seen, other);
        }
        seen
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
