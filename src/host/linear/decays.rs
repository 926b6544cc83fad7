//! The decays between the tokens of a chunk, and the gradients that they take part in.

use std::ops::Range;

use super::by_channel::ChannelDecays;
use super::by_head::HeadDecays;
use super::chunk::CHUNK;
use super::prefetch::Prefetch;
use super::runs::Runs;
use crate::host::array::HostArray;
use crate::host::matmul::{Matrix, Write};
use crate::host::simd::Simd;

/// Least log decay in base 2. 2 to this power is 0 in float32; with smaller log decays, sums would
/// lose the digits of other tokens' decays.
pub(super) const LEAST: f64 = -512.0;

/// Takes scratch: a number of rows of a number of floats.
pub(super) type Take<'a> = dyn FnMut(usize, usize) -> Matrix + 'a;

/// Scratch that the decays of a chunk use.
#[derive(Clone, Copy)]
pub(super) struct DecayScratch {
    /// The part of each row of the state that is left after the chunk, if the state passes at all.
    pub carry: *mut f32,
    /// Number of floats of a row of keys.
    pub width: usize,
    /// Memory for the decays between tokens, one for each pair.
    pub between: Matrix,
    /// Memory for decays of each channel.
    by_channel: Option<ChannelDecays>,
}

/// Whether log decays have a number for each channel of keys.
pub(super) fn by_channel(log_decay: &HostArray) -> bool {
    log_decay.dim > 1
}

impl DecayScratch {
    /// Takes the scratch for rows of `width` floats.
    pub fn take(take: &mut Take<'_>, log_decay: &HostArray, width: usize) -> DecayScratch {
        let carry = take(1, width).at;
        let of_channels = by_channel(log_decay);
        let between = take(if of_channels { 0 } else { CHUNK }, CHUNK);
        let by_channel = of_channels.then(|| ChannelDecays::take(take, width));
        DecayScratch { carry, width, between, by_channel }
    }
}

/// Products of tokens with tokens, p = sign · (a bᵀ) ∘ decay.
#[derive(Clone, Copy)]
pub(super) struct Pairs {
    /// Rows of the tokens that receive.
    pub a: Matrix,
    /// Rows of the tokens that give.
    pub b: Matrix,
    pub p: Matrix,
    pub sign: f32,
    /// Whether a token receives nothing from itself.
    pub strict: bool,
}

impl Pairs {
    /// Returns the end of the tokens that a token receives from.
    pub fn end(&self, row: usize) -> usize {
        row + usize::from(!self.strict)
    }
}

/// Sums for the gradients of decays, a row for each token. With decays of each channel, a row has a
/// sum for each; otherwise it holds a vector whose lanes are yet to be added.
pub(super) struct Terms {
    /// What a token receives from before: its decay and all before it scale this.
    pub by_row: Matrix,
    /// What a token gives to the state after the chunk.
    pub by_key: Matrix,
    /// What a token gives to later tokens of the chunk. With decays of each channel, `by_row` holds
    /// the difference.
    pub by_column: [f32; CHUNK],
}

/// A side of a chunk.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Side {
    Start,
    End,
}

/// The decays of a chunk.
pub(super) struct Decays {
    pub runs: Runs,
    of: Kind,
    carry: *const f32,
}

/// A chunk has one of either; a pointer to the larger would cost more than its room.
#[expect(clippy::large_enum_variant)]
enum Kind {
    Head(HeadDecays),
    Channel(ChannelDecays),
}

impl Decays {
    /// Reads the decays of `rows` of one head. A log decay of −∞ is a reset before its token.
    ///
    /// # Safety
    /// The caller guarantees that the rows are readable, and that the scratch is this thread's and
    /// lives as long as the decays.
    #[inline(always)]
    pub unsafe fn read<S: Simd>(
        simd: S,
        array: &HostArray,
        head: (usize, usize),
        rows: &Range<usize>,
        scratch: &DecayScratch,
    ) -> Decays {
        // SAFETY: the caller guarantees the rows and the scratch.
        let (runs, of) = unsafe {
            match scratch.by_channel {
                Some(decays) => {
                    let runs = decays.read(simd, array, head, rows, scratch.carry);
                    (runs, Kind::Channel(decays))
                }
                None => {
                    let (runs, decays) = HeadDecays::read(simd, array, head, rows, scratch);
                    (runs, Kind::Head(decays))
                }
            }
        };
        Decays { runs, of, carry: scratch.carry }
    }

    /// Returns the parts of the state before the chunk that are left after it, one for each row of
    /// the state, or `None` if a reset lets nothing pass. Not even NaN may pass a reset, so the
    /// state must not be multiplied by 0.
    pub fn carry(&self) -> Option<*const f32> {
        self.runs.passes().then_some(self.carry)
    }

    /// Returns how a product writes the state on the other side of the chunk: the part of `state`
    /// that is left, plus what the chunk adds; without `state` what the chunk adds alone.
    pub fn onto(&self, state: Option<Matrix>) -> Write {
        let left = state.zip(self.carry());
        left.map_or(Write::Set, |(state, carry)| Write::Onto(state.at, carry))
    }

    /// Computes the decays between tokens, which [`Decays::scores`] and [`Decays::gradients`] read.
    ///
    /// # Safety
    /// The caller guarantees that the scratch of the decays is this thread's.
    #[inline(always)]
    pub unsafe fn pair<S: Simd>(&self, simd: S) {
        // SAFETY: the caller guarantees the scratch.
        unsafe {
            match &self.of {
                Kind::Head(of) => of.pair(simd, self.runs.count()),
                Kind::Channel(of) => of.pair(simd, &self.runs),
            }
        }
    }

    /// Computes the products of `pairs`, and writes 0 where a token receives nothing. The rows of
    /// `pairs.b` come as `columns` too, and have `dim` floats.
    ///
    /// # Safety
    /// The caller guarantees that the matrices are this thread's and have the rows of the chunk.
    #[inline(always)]
    pub unsafe fn scores<S: Simd>(
        &self,
        simd: S,
        prefetch: &mut Prefetch,
        pairs: &Pairs,
        columns: Matrix,
        dim: usize,
    ) {
        // SAFETY: the caller guarantees the matrices.
        unsafe {
            match &self.of {
                Kind::Head(of) => of.scores(simd, prefetch, &self.runs, pairs, columns, dim),
                Kind::Channel(of) => of.scores(simd, prefetch, &self.runs, pairs),
            }
        }
    }

    /// Adds the gradients of both sides of `pairs` from the gradient of a bᵀ ∘ decay / sign, which
    /// it overwrites:
    ///
    /// ```text
    /// da += (dp ∘ decay) b;  db += (dp ∘ decay)ᵀ a
    /// ```
    ///
    /// # Safety
    /// The caller guarantees what [`Decays::scores`] asks for.
    #[inline(always)]
    pub unsafe fn gradients<S: Simd>(
        &self,
        simd: S,
        prefetch: &mut Prefetch,
        pairs: (&Pairs, Matrix),
        sides: [Matrix; 2],
        terms: &mut Terms,
    ) {
        // SAFETY: the caller guarantees the matrices.
        unsafe {
            match &self.of {
                Kind::Head(of) => of.gradients(simd, prefetch, &self.runs, pairs, sides, terms),
                Kind::Channel(of) => of.gradients(simd, prefetch, &self.runs, pairs, sides, terms),
            }
        }
    }

    /// Writes factor · x ∘ decay, or adds it if `add`: the decay from the start of the chunk to each
    /// token that the start reaches, or from each token that reaches the end of the chunk to the
    /// end. Rows of other tokens stay.
    ///
    /// # Safety
    /// The caller guarantees that both have the rows of the chunk, of the same number of whole
    /// vectors, and are this thread's.
    #[inline(always)]
    pub unsafe fn fade<S: Simd>(
        &self,
        simd: S,
        side: Side,
        (from, to): (Matrix, Matrix),
        (factor, add): (f32, bool),
    ) {
        let rows = match side {
            Side::Start => self.runs.first(),
            Side::End => self.runs.last(),
        };
        // SAFETY: the caller guarantees the rows.
        unsafe {
            for row in rows {
                let (factors, step) = self.factors(side, row);
                let sign = simd.splat(factor);
                let of_row = simd.mul(simd.splat(*factors), sign);
                for d in (0..to.row).step_by(S::LANES) {
                    let at = to.at.add(row * to.row + d);
                    let factor = match step {
                        0 => of_row,
                        _ => simd.mul(simd.load(factors.add(d)), sign),
                    };
                    let x = simd.mul(simd.load(from.at.add(row * from.row + d)), factor);
                    simd.store(at, if add { simd.add(simd.load(at), x) } else { x });
                }
            }
        }
    }

    /// Returns the decays of a token on a side: one, or with a step of 1 one for each channel.
    #[inline(always)]
    fn factors(&self, side: Side, token: usize) -> (*const f32, usize) {
        match (&self.of, side) {
            (Kind::Head(of), Side::Start) => (&raw const of.from_start[token], 0),
            (Kind::Head(of), Side::End) => (&raw const of.to_end[token], 0),
            (Kind::Channel(of), Side::Start) => (of.from_start.skip(token).at, 1),
            (Kind::Channel(of), Side::End) => (of.to_end.skip(token).at, 1),
        }
    }

    /// Whether there is a decay for each channel.
    pub fn by_channel(&self) -> bool {
        matches!(self.of, Kind::Channel(_))
    }

    /// Adds a ∘ b of some rows to the sums of their tokens. A row has as many floats as in `a`.
    ///
    /// # Safety
    /// The caller guarantees that all three have these rows, and that `sums` are this thread's.
    #[inline(always)]
    pub unsafe fn add_dots<S: Simd>(
        &self,
        simd: S,
        [a, b]: [Matrix; 2],
        rows: Range<usize>,
        sums: Matrix,
    ) {
        let by_channel = self.by_channel();
        for row in rows {
            // SAFETY: the caller guarantees that all three have the row.
            unsafe {
                let at = sums.at.add(row * sums.row);
                let mut dot = simd.load(at);
                for d in (0..a.row).step_by(S::LANES) {
                    let (a, b) = (a.at.add(row * a.row + d), b.at.add(row * b.row + d));
                    let (a, b) = (simd.load(a), simd.load(b));
                    if by_channel {
                        simd.store(at.add(d), simd.mul_add(a, b, simd.load(at.add(d))));
                    } else {
                        dot = simd.mul_add(a, b, dot);
                    }
                }
                if !by_channel {
                    simd.store(at, dot);
                }
            }
        }
    }
}
