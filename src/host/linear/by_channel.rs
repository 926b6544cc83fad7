//! The decays between the tokens of a chunk, one number for each token and channel of keys.
//!
//! Token a receives from token b the part 2^(g_a − g_b) of each channel, where g is the sum of log
//! decays in base 2. A product of matrices needs the part as a product of a factor of a and a factor
//! of b. Neither factor may exceed 1, or strong decays would overflow. So the pairs of a chunk are
//! cut into blocks: with the last token m before the later half of some tokens, the later half
//! receives from the earlier half the parts 2^(g_a − g_m) · 2^(g_m − g_b). The halves are cut again,
//! down to blocks of a few tokens, whose pairs are computed one by one.

use std::ops::Range;

use super::chunk::{CHUNK, product, transpose, triangular_product};
use super::decays::{LEAST, Pairs, Take, Terms};
use super::prefetch::Prefetch;
use super::runs::Runs;
use crate::host::array::HostArray;
use crate::host::matmul::{Matrix, Write};
use crate::host::simd::Simd;

/// Tokens of the smallest blocks.
const BLOCK: usize = 4;
/// Tokens of the halves, from the smallest.
const HALVES: [usize; 4] = [4, 8, 16, 32];
/// Floats of a cache line, a multiple of the lanes.
const LINE: usize = 16;

/// The decays of a chunk, each in a matrix with a row for each token.
#[derive(Clone, Copy)]
pub(super) struct ChannelDecays {
    /// Sums of log decays from the start of the run, each as two floats, so that differences have
    /// digits left even if decays are strong.
    sums: [Matrix; 2],
    /// The decay of each token.
    own: Matrix,
    /// For each size of halves, the factor of each token; 0 if the last token before the later half is
    /// of another run, so that not even NaN of one run reaches another.
    factors: [Matrix; HALVES.len()],
    pub from_start: Matrix,
    pub to_end: Matrix,
    /// Rows times their factors, also as columns.
    scaled: Matrix,
    columns: Matrix,
    /// Products of a block.
    products: Matrix,
}

impl ChannelDecays {
    /// Takes memory for rows of `width` floats.
    pub fn take(take: &mut Take<'_>, width: usize) -> ChannelDecays {
        let mut rows = || take(CHUNK, width);
        ChannelDecays {
            sums: [rows(), rows()],
            own: rows(),
            factors: HALVES.map(|_| rows()),
            from_start: rows(),
            to_end: rows(),
            scaled: rows(),
            products: take(CHUNK, width.max(CHUNK)),
            columns: take(width, CHUNK),
        }
    }

    /// Reads the decays of `rows` of one head. A token all of whose log decays are −∞ is a reset.
    /// The part of the state that is left after the chunk goes to `carry`.
    ///
    /// # Safety
    /// The caller guarantees that the rows are readable, and that the memory is this thread's.
    #[inline(always)]
    pub unsafe fn read<S: Simd>(
        &self,
        simd: S,
        array: &HostArray,
        (batch, head): (usize, usize),
        rows: &Range<usize>,
        carry: *mut f32,
    ) -> Runs {
        let at = |i: usize| array.row(batch, rows.start + i, head).cast::<f32>().cast_const();
        let runs = Runs::new(rows.len(), |i| {
            // SAFETY: the caller guarantees that the row is readable.
            (0..array.dim).all(|d| unsafe { *at(i).add(d) } == f32::NEG_INFINITY)
        });
        // SAFETY: the caller guarantees the rows and the memory.
        unsafe {
            for first in (0..self.own.row).step_by(LINE) {
                let mut sums = [0.0f64; LINE];
                for i in 0..rows.len() {
                    let mut logs = [0.0f32; LINE];
                    let end = array.dim.min(first + LINE);
                    for d in first..end {
                        logs[d - first] = *at(i).add(d);
                    }
                    let [high, low] = self.sums;
                    let to = [high, low, self.own].map(|m| m.at.add(i * m.row + first));
                    let begins = runs.resets(i);
                    for lane in 0..LINE {
                        let log = f64::from(logs[lane]) * std::f64::consts::LOG2_E;
                        let log = if log < LEAST { LEAST } else { log };
                        sums[lane] = if begins { 0.0 } else { sums[lane] + log };
                        let high = sums[lane] as f32;
                        *to[0].add(lane) = high;
                        *to[1].add(lane) = (sums[lane] - f64::from(high)) as f32;
                        *to[2].add(lane) = log as f32;
                    }
                }
            }
            self.powers(simd, rows.len(), carry);
        }
        runs
    }

    /// Computes the factors from the sums, but for those between tokens.
    ///
    /// # Safety
    /// The caller guarantees the memory of `count` tokens.
    #[inline(always)]
    unsafe fn powers<S: Simd>(&self, simd: S, count: usize, carry: *mut f32) {
        let (width, [high, low]) = (self.own.row, self.sums);
        let last = (count - 1) * width;
        for (i, d) in self.vectors::<S>(count) {
            let at = i * width + d;
            // SAFETY: the caller guarantees the memory.
            unsafe {
                let (h, l) = (simd.load(high.at.add(at)), simd.load(low.at.add(at)));
                let start = simd.exp2(h);
                simd.store(self.from_start.at.add(at), start);
                if i + 1 == count {
                    simd.store(carry.add(d), start);
                }
                let more = simd.sub(simd.load(high.at.add(last + d)), h);
                let left = simd.add(more, simd.sub(simd.load(low.at.add(last + d)), l));
                simd.store(self.to_end.at.add(at), simd.exp2(left));
            }
        }
    }

    /// Computes the factors between tokens.
    ///
    /// # Safety
    /// The caller guarantees the memory of the tokens.
    #[inline(always)]
    pub unsafe fn pair<S: Simd>(&self, simd: S, runs: &Runs) {
        let (count, width, [high, low]) = (runs.count(), self.own.row, self.sums);
        for (i, d) in self.vectors::<S>(count) {
            let at = i * width + d;
            // SAFETY: the caller guarantees the memory.
            unsafe {
                let own = self.own.at.add(at);
                simd.store(own, simd.exp2(simd.load(own)));
                let (h, l) = (simd.load(high.at.add(at)), simd.load(low.at.add(at)));
                for (half, factors) in HALVES.into_iter().zip(self.factors) {
                    let middle = i / (2 * half) * (2 * half) + half - 1;
                    let to = factors.at.add(at);
                    if !(runs.until(i).start..runs.since(i).end).contains(&middle) {
                        simd.store(to, simd.zero());
                        continue;
                    }
                    let from = middle * width + d;
                    let sign = simd.splat(if i > middle { 1.0 } else { -1.0 });
                    let more = simd.sub(h, simd.load(high.at.add(from)));
                    let left = simd.add(more, simd.sub(l, simd.load(low.at.add(from))));
                    simd.store(to, simd.exp2(simd.mul(left, sign)));
                }
            }
        }
    }

    /// Returns the token and the first channel of each vector of a matrix.
    fn vectors<S: Simd>(&self, count: usize) -> impl Iterator<Item = (usize, usize)> + use<S> {
        let width = self.own.row;
        (0..count).flat_map(move |i| (0..width).step_by(S::LANES).map(move |d| (i, d)))
    }

    /// Writes rows of b of each earlier half, and rows of a of each later half, times their factors.
    ///
    /// # Safety
    /// The caller guarantees that both have `count` rows.
    #[inline(always)]
    unsafe fn scale<S: Simd>(&self, simd: S, (level, count): (usize, usize), a: Matrix, b: Matrix) {
        let (factors, to) = (self.factors[level], self.scaled);
        for i in 0..count {
            let from = if i / HALVES[level] % 2 == 1 { a } else { b };
            for d in (0..to.row).step_by(S::LANES) {
                // SAFETY: the caller guarantees the rows.
                unsafe {
                    let x = simd.load(from.at.add(i * from.row + d));
                    let factor = simd.load(factors.at.add(i * factors.row + d));
                    simd.store(to.at.add(i * to.row + d), simd.mul(x, factor));
                }
            }
        }
    }

    /// Computes the products of `pairs`, and writes 0 where a token receives nothing.
    ///
    /// # Safety
    /// The caller guarantees that the matrices are this thread's and have the rows of the chunk.
    #[inline(always)]
    pub unsafe fn scores<S: Simd>(
        &self,
        simd: S,
        prefetch: &mut Prefetch,
        runs: &Runs,
        pairs: &Pairs,
    ) {
        let (count, width, temporary) = (runs.count(), self.own.row, self.products);
        let temporary = Matrix { row: CHUNK, ..temporary };
        // SAFETY: the caller guarantees the matrices.
        unsafe {
            for level in 0..HALVES.len() {
                self.scale(simd, (level, count), pairs.a, pairs.b);
                transpose(simd, self.scaled, (count, width), self.columns);
                for (early, late) in halves(level, count) {
                    let start = early.start / S::LANES * S::LANES;
                    let columns = start..early.end.next_multiple_of(S::LANES);
                    let size = (late.clone(), columns.clone(), 0..width);
                    let sides = (self.scaled.left(), self.columns);
                    product(simd, prefetch, sides, temporary, size, Write::Set);
                    for row in late {
                        for column in columns.clone().step_by(S::LANES) {
                            let from = simd.load(temporary.at.add(row * CHUNK + column));
                            let to = pairs.p.at.add(row * pairs.p.row + column);
                            let [start, end] = [early.start, early.end]
                                .map(|at| at.saturating_sub(column).min(S::LANES));
                            simd.store(to, simd.inside(start, end, from, simd.load(to)));
                        }
                    }
                }
            }
            for start in (0..count).step_by(BLOCK) {
                self.block_scores(simd, start..count.min(start + BLOCK), pairs);
            }
            mask(simd, runs, pairs, pairs.p);
        }
    }

    /// Computes the products of the pairs of a smallest block.
    ///
    /// # Safety
    /// The caller guarantees what [`ChannelDecays::scores`] asks for.
    #[inline(always)]
    unsafe fn block_scores<S: Simd>(&self, simd: S, block: Range<usize>, pairs: &Pairs) {
        let (Pairs { a, b, p, .. }, width) = (*pairs, self.own.row);
        let mut sums = [[simd.zero(); BLOCK]; BLOCK];
        // SAFETY: the caller guarantees the matrices.
        unsafe {
            for (row, sums) in block.clone().zip(&mut sums) {
                for d in (0..width).step_by(S::LANES) {
                    let mut left = simd.load(a.at.add(row * a.row + d));
                    for (other, sum) in block.clone().zip(sums.iter_mut()).rev() {
                        if other <= row {
                            let right = simd.load(b.at.add(other * b.row + d));
                            *sum = simd.mul_add(left, right, *sum);
                            left = simd.mul(left, simd.load(self.own.at.add(other * width + d)));
                        }
                    }
                }
            }
            for (row, sums) in block.clone().zip(sums) {
                let mut vectors = [simd.zero(); 16];
                vectors[..BLOCK].copy_from_slice(&sums);
                let mut totals = [0.0f32; 16];
                simd.store(totals.as_mut_ptr(), simd.sum_each(vectors));
                for (total, other) in totals.iter().zip(block.start..=row) {
                    *p.at.add(row * p.row + other) = *total;
                }
            }
        }
    }

    /// Adds the gradients of both sides of `pairs` from `dp`, the gradient of the products, and the
    /// terms of the gradients of decays.
    ///
    /// # Safety
    /// The caller guarantees what [`ChannelDecays::scores`] asks for.
    #[inline(always)]
    pub unsafe fn gradients<S: Simd>(
        &self,
        simd: S,
        prefetch: &mut Prefetch,
        runs: &Runs,
        (pairs, dp): (&Pairs, Matrix),
        [da, db]: [Matrix; 2],
        terms: &mut Terms,
    ) {
        let (count, width, by_row) = (runs.count(), self.own.row, terms.by_row);
        let (scaled, products) = (self.scaled, Matrix { row: width, ..self.products });
        // SAFETY: the caller guarantees the matrices.
        unsafe {
            mask(simd, runs, pairs, dp);
            for level in 0..HALVES.len() {
                self.scale(simd, (level, count), pairs.a, pairs.b);
                for (early, late) in halves(level, count) {
                    let before =
                        |row| runs.until(row).start.clamp(early.start, early.end)..early.end;
                    let after = |row| late.start..runs.since(row).end.clamp(late.start, late.end);
                    let (size, write) = ((late.clone(), 0..width), Write::Set);
                    let sides = (dp.left(), scaled);
                    triangular_product(simd, prefetch, sides, products, size, &before, write);
                    let size = (early.clone(), 0..width);
                    let sides = (dp.transposed(), scaled);
                    triangular_product(simd, prefetch, sides, products, size, &after, write);
                    for (row, to, sign) in
                        late.map(|row| (row, da, 1.0)).chain(early.map(|row| (row, db, -1.0)))
                    {
                        for d in (0..width).step_by(S::LANES) {
                            let at = row * width + d;
                            let (to, sum) = (to.at.add(at), by_row.at.add(at));
                            let x = simd.load(products.at.add(at));
                            let factor = simd.load(self.factors[level].at.add(at));
                            simd.store(to, simd.mul_add(x, factor, simd.load(to)));
                            let x = simd.mul(x, simd.splat(sign));
                            let scaled = simd.load(scaled.at.add(at));
                            simd.store(sum, simd.mul_add(x, scaled, simd.load(sum)));
                        }
                    }
                }
            }
            for start in (0..count).step_by(BLOCK) {
                let block = start..count.min(start + BLOCK);
                self.block_gradients(simd, block, runs, (pairs, dp), [da, db, by_row]);
            }
        }
    }

    /// Adds the gradients of the pairs of a smallest block.
    ///
    /// # Safety
    /// The caller guarantees what [`ChannelDecays::scores`] asks for.
    #[inline(always)]
    unsafe fn block_gradients<S: Simd>(
        &self,
        simd: S,
        block: Range<usize>,
        runs: &Runs,
        (pairs, dp): (&Pairs, Matrix),
        [da, db, by_row]: [Matrix; 3],
    ) {
        let (Pairs { a, b, .. }, width) = (*pairs, self.own.row);
        for row in block.clone() {
            let others = runs.until(row).start.max(block.start)..row + 1;
            for d in (0..width).step_by(S::LANES) {
                // SAFETY: the caller guarantees the matrices.
                unsafe {
                    let mut decay = simd.splat(1.0);
                    let at = |matrix: Matrix, row: usize| matrix.at.add(row * matrix.row + d);
                    for other in others.clone().rev() {
                        let dp = simd.splat(*dp.at.add(row * dp.row + other));
                        let left = simd.mul(dp, decay);
                        let (x, y) = (simd.load(at(a, row)), simd.load(at(b, other)));
                        let dx = simd.mul(left, y);
                        let (own, given) = (at(da, row), at(db, other));
                        simd.store(own, simd.add(simd.load(own), dx));
                        simd.store(given, simd.mul_add(left, x, simd.load(given)));
                        if other < row {
                            let both = simd.mul(x, dx);
                            let (own, given) = (at(by_row, row), at(by_row, other));
                            simd.store(own, simd.add(simd.load(own), both));
                            simd.store(given, simd.sub(simd.load(given), both));
                        }
                        decay = simd.mul(decay, simd.load(at(self.own, other)));
                    }
                }
            }
        }
    }
}

/// Returns the earlier and the later halves of a level, as far as there are later tokens.
fn halves(level: usize, count: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let half = HALVES[level];
    (half..count)
        .step_by(2 * half)
        .map(move |middle| (middle - half..middle, middle..count.min(middle + half)))
}

/// Multiplies products of tokens with tokens by the sign, and writes 0 where a token receives
/// nothing.
///
/// # Safety
/// The caller guarantees that `p` is this thread's and has the rows of the chunk.
#[inline(always)]
unsafe fn mask<S: Simd>(simd: S, runs: &Runs, pairs: &Pairs, p: Matrix) {
    for row in 0..runs.count() {
        for column in (0..runs.count()).step_by(S::LANES) {
            // SAFETY: the caller guarantees the row.
            unsafe {
                let at = p.at.add(row * p.row + column);
                let x = simd.mul(simd.load(at), simd.splat(pairs.sign));
                simd.store(at, runs.seen(simd, (row, column), pairs.end(row), x));
            }
        }
    }
}
