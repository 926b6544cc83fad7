//! What the features of a problem need beside q, k and v: segments, slopes, random numbers, and the
//! positions of rows.

use std::ops::Range;

use super::array::HostArray;
use super::pack::Scratch;
use super::philox::{Philox, WIDTH};
use super::simd::Simd;
use super::softmax::{At, Between, SoftCap};
use crate::layout::Piece;
use crate::mask::{Coverage, Span};
use crate::problem::Problem;

/// Arrays of one rank that only problems with the feature have. Whole numbers of 32 bits lie in
/// arrays of float32, which are copied but never computed with.
#[derive(Debug, Clone, Default)]
pub struct Extras {
    /// int32 `[batch, seq, 1, 1]`, one for each query.
    pub q_segments: Option<HostArray>,
    /// int32 `[batch, seq, 1, 1]`, one for each key.
    pub k_segments: Option<HostArray>,
    /// float32 `[batch, 1, heads, 1]`.
    pub slopes: Option<HostArray>,
    /// uint32 `[batch, 1, 1, 4]`: the two words of the key, the index of the batch entry and that of
    /// the first query head in the whole model.
    pub dropout: Option<HostArray>,
    /// Result of the backward pass like `slopes`: this rank's part of their gradient.
    pub dslopes: Option<HostArray>,
}

/// Global positions of a shard's rows.
#[derive(Debug, Clone, Default)]
pub struct Positions(Vec<Piece>);

impl Positions {
    /// Those of `owner`, which holds `len` rows.
    pub fn new(problem: &Problem, owner: usize, len: usize) -> Positions {
        Positions(problem.layout.pieces(owner, problem.world_size, len))
    }

    /// Of one row.
    fn of(&self, row: usize) -> usize {
        let piece = self.0.iter().find(|piece| piece.rows.contains(&row));
        piece.map_or(0, |piece| piece.position(row))
    }
}

/// What a tile needs beside its operands; nothing by default.
#[derive(Debug, Clone, Default)]
pub struct TileExtras<'a> {
    /// Of queries and of keys.
    pub segments: Option<[&'a HostArray; 2]>,
    /// As [`Extras::slopes`].
    pub slopes: Option<&'a HostArray>,
    /// As [`Extras::dropout`], and the rate.
    pub dropout: Option<(&'a HostArray, f32)>,
    /// As [`Extras::dslopes`]: what is added to.
    pub dslopes: Option<&'a HostArray>,
    /// Of the owners of queries and of keys.
    pub positions: [Positions; 2],
}

impl TileExtras<'_> {
    /// Is there none?
    pub(super) fn is_empty(&self) -> bool {
        self.segments.is_none() && self.slopes.is_none() && self.dropout.is_none()
    }

    /// How much of queries × keys their segments allow.
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

    /// The segment of a query, if there are segments.
    pub(super) fn query_segment(&self, batch: usize, row: usize) -> Option<i32> {
        self.segments.map(|[queries, _]| segment(queries, batch, row))
    }

    /// Runs of one segment among `rows`, with the segment; rows without one are left out.
    pub(super) fn runs(
        &self,
        which: Which,
        batch: usize,
        rows: &Range<usize>,
    ) -> Vec<(Range<usize>, i32)> {
        let mut runs: Vec<(Range<usize>, i32)> = Vec::new();
        let Some(arrays) = self.segments else { return runs };
        for row in rows.clone() {
            let id = segment(arrays[which as usize], batch, row);
            match runs.last_mut() {
                Some((run, last)) if *last == id && run.end == row => run.end += 1,
                _ if id >= 0 => runs.push((row..row + 1, id)),
                _ => {}
            }
        }
        runs
    }

    /// The random numbers of one head.
    fn philox(&self, batch: usize, head: usize) -> Option<(Philox, f32)> {
        let (array, rate) = self.dropout?;
        let at = array.row(batch, 0, 0).cast::<u32>();
        // SAFETY: the array has four words for each batch entry, which nobody writes.
        let [k0, k1, entry, first] = unsafe { [*at, *at.add(1), *at.add(2), *at.add(3)] };
        let head = first.wrapping_add(head as u32);
        Some((Philox { key: [k0, k1], head, entry }, rate))
    }
}

/// The segment of a row.
pub(super) fn segment(array: &HostArray, batch: usize, row: usize) -> i32 {
    // SAFETY: the array has one int32 for each row, which nobody writes.
    unsafe { *array.row(batch, row, 0).cast::<i32>() }
}

/// What is known of a run of rows, queries or keys, in scratch.
#[derive(Clone, Copy)]
pub(super) struct Side {
    /// Segments as bits; negative ones so that those of queries and keys never equal.
    segments: *mut f32,
    /// Positions from the tile's first query on.
    distances: *mut f32,
    /// Positions as bits.
    positions: *mut f32,
}

impl Side {
    /// Lengths of the scratch for `len` rows.
    pub fn sizes(extras: &TileExtras<'_>, len: usize) -> [usize; 3] {
        [if extras.is_empty() { 0 } else { len }; 3]
    }

    /// In scratch of these sizes.
    pub fn new([segments, distances, positions]: [*mut f32; 3]) -> Side {
        Side { segments, distances, positions }
    }

    /// From row `first` on.
    fn from(self, first: usize) -> Side {
        let at = |ptr: *mut f32| ptr.wrapping_add(first);
        Side::new([at(self.segments), at(self.distances), at(self.positions)])
    }

    fn position(self, row: usize) -> u32 {
        // SAFETY: the scratch holds the row.
        unsafe { (*self.positions.add(row)).to_bits() }
    }
}

/// Which of the two sides.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Which {
    Queries,
    Keys,
}

/// Reads what is known of `rows` into `side`, which has room for `padded` of them.
///
/// # Safety
/// The scratch is this thread's.
pub(super) unsafe fn load_side(
    (extras, which): (&TileExtras<'_>, Which),
    (batch, base): (usize, usize),
    rows: &Range<usize>,
    padded: usize,
    side: Side,
) {
    if extras.is_empty() {
        return;
    }
    let index = which as usize;
    let nothing = -1 - index as i32;
    for i in 0..padded {
        let row = rows.start + i;
        let mut id = nothing;
        let mut position = base;
        if rows.contains(&row) {
            id = extras.segments.map_or(0, |arrays| segment(arrays[index], batch, row));
            position = extras.positions[index].of(row);
        }
        let id = if id < 0 { nothing } else { id };
        // SAFETY: there is room for `padded` rows.
        unsafe {
            *side.segments.add(i) = f32::from_bits(id as u32);
            *side.distances.add(i) = (position as i64 - base as i64) as f32;
            *side.positions.add(i) = f32::from_bits(position as u32);
        }
    }
}

/// Position that [`load_side`] counts distances from.
pub(super) fn base(extras: &TileExtras<'_>, q_rows: &Range<usize>) -> usize {
    extras.positions[0].of(q_rows.start)
}

/// The features of one head on the rows and lanes of a panel.
#[derive(Clone, Copy)]
pub(super) struct PanelExtras {
    cap: Option<SoftCap>,
    /// Do the segments of this block have to be compared?
    compares: bool,
    /// For distance of the row's position from the lane's.
    slope: Option<f32>,
    dropout: Option<(Philox, f32)>,
    lanes: Side,
    rows: Side,
    lanes_are: Which,
    /// Factors of the weights, as the panel lies; for dropout only.
    keep: *mut f32,
    across: usize,
}

impl PanelExtras {
    /// For one head; `None` where no feature asks for it.
    pub fn new(
        extras: &TileExtras<'_>,
        soft_cap: Option<f32>,
        [batch, head]: [usize; 2],
        lanes_are: Which,
        (lanes, rows): (Side, Side),
        keep: *mut f32,
    ) -> Option<PanelExtras> {
        if extras.is_empty() {
            return None;
        }
        let toward_keys = if lanes_are == Which::Queries { 1.0 } else { -1.0 };
        let slope = extras.slopes.map(|slopes| {
            // SAFETY: the array has one float32 for each head, which nobody writes.
            unsafe { *slopes.row(batch, 0, head).cast::<f32>() * toward_keys }
        });
        let dropout = extras.philox(batch, head);
        let (cap, compares, across) = (soft_cap.map(SoftCap::new), false, 0);
        Some(PanelExtras { cap, compares, slope, dropout, lanes, rows, lanes_are, keep, across })
    }

    /// On the panel of `lanes`, with the segments compared or not.
    pub fn on(self, lanes: &Range<usize>, compares: bool) -> PanelExtras {
        let across = lanes.len();
        PanelExtras { lanes: self.lanes.from(lanes.start), across, compares, ..self }
    }

    /// Are there weights to drop?
    pub fn drops(&self) -> bool {
        self.dropout.is_some()
    }

    /// Makes the factors of the weights in `rows` of the panel: 0 or 1 / (1 − rate).
    ///
    /// # Safety
    /// The scratch is this thread's.
    #[inline(always)]
    pub unsafe fn fill_keep(&self, rows: Range<usize>) {
        let Some((philox, rate)) = self.dropout else { return };
        // Rounded to the nearest of 2³² steps.
        let threshold = (f64::from(rate) * 4_294_967_296.0).round() as u32;
        let factor = |word: u32| if word >= threshold { 1.0 / (1.0 - rate) } else { 0.0 };
        match self.lanes_are {
            // SAFETY: passed on.
            Which::Queries => unsafe { self.keep_by_keys(philox, rows, factor) },
            // SAFETY: passed on.
            Which::Keys => unsafe { self.keep_by_queries(philox, rows, factor) },
        }
    }

    /// Queries in lanes: the four words of a quad serve up to four rows.
    ///
    /// # Safety
    /// As [`PanelExtras::fill_keep`].
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
                    // SAFETY: the caller vouches for the scratch.
                    unsafe { *self.keep.add(row * self.across + first + lane) = factor(*word) }
                }
            }
        }
    }

    /// Keys in lanes: each quad among them is computed once in a row.
    ///
    /// # Safety
    /// As [`PanelExtras::fill_keep`].
    #[inline(always)]
    unsafe fn keep_by_queries(
        &self,
        philox: Philox,
        rows: Range<usize>,
        factor: impl Fn(u32) -> f32,
    ) {
        const MOST: usize = 64;
        // No register tile is wider.
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
                // SAFETY: the caller vouches for the scratch.
                unsafe { *self.keep.add(row * self.across + lane) = factor(word) }
            }
        }
    }
}

impl Between for PanelExtras {
    #[inline(always)]
    fn logits<S: Simd>(self, simd: S, s: S::Vector, at: At) -> (S::Vector, Option<S::Vector>) {
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
    fn visible<S: Simd>(self, simd: S, x: S::Vector, other: f32, at: At) -> S::Vector {
        if !self.compares {
            return x;
        }
        // SAFETY: the scratch holds all lanes and rows of the panel.
        unsafe {
            let own = simd.splat(*self.rows.segments.add(at.row));
            let lanes = simd.load(self.lanes.segments.add(at.first));
            simd.where_same_bits(lanes, own, x, simd.splat(other))
        }
    }

    #[inline(always)]
    fn kept<S: Simd>(self, simd: S, at: At) -> Option<S::Vector> {
        // SAFETY: the scratch holds all lanes and rows of the panel.
        self.dropout.map(|_| unsafe { simd.load(self.keep.add(at.row * self.across + at.first)) })
    }

    #[inline(always)]
    fn distance<S: Simd>(self, simd: S, at: At) -> S::Vector {
        // SAFETY: the scratch holds all lanes and rows of the panel.
        unsafe {
            let row = simd.splat(*self.rows.distances.add(at.row));
            simd.sub(row, simd.load(self.lanes.distances.add(at.first)))
        }
    }
}

/// Lengths of the scratch for the factors of a panel of `rows` rows.
pub(super) fn keep_size(extras: &TileExtras<'_>, rows: usize, panel: usize) -> usize {
    if extras.dropout.is_some() { Scratch::footprint(rows * panel) } else { 0 }
}
