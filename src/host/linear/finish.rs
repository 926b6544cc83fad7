//! The gradients of a chunk of one head, once the gradient of the state after it is known.

use super::BackwardIo;
use super::chunk::{CHUNK, product_and_zeros, scale_all, scores, store, transpose};
use super::decays::{Pairs, Side, Take, Terms};
use super::gradients::{GradientSteps, Parts};
use super::head_of;
use super::prefetch::Prefetch;
use super::steps::{Chunk, Slot};
use crate::host::matmul::Matrix;
use crate::host::pack::dot;
use crate::host::simd::Simd;

/// Memory for the gradients of a chunk, which members of a group use one after the other.
#[derive(Clone, Copy)]
pub(super) struct Sums {
    /// The state before the chunk, and the gradient of the state after it, as columns.
    states: [Matrix; 2],
    /// dq, dk and dv of one head; the first serves for other products before.
    own: [Matrix; 3],
    /// Sums of dq, dk and dv over the heads that share a head of q, k or v.
    shared: [Matrix; 3],
    /// What the state before takes from the keys.
    taken: Matrix,
    /// Sums for the gradients of decays.
    terms: [Matrix; 2],
}

impl Sums {
    /// Takes memory for `rows` rows of keys and values of two widths.
    pub fn take(take: &mut Take<'_>, rows: usize, [kw, vw]: [usize; 2]) -> Sums {
        let width = |columns: usize| if rows > 0 { columns } else { 0 };
        Sums {
            states: [take(width(vw), kw), take(width(vw), kw)],
            own: [kw, kw, vw].map(|width| take(rows, width)),
            shared: [kw, kw, vw].map(|width| take(rows, width)),
            taken: take(rows, kw),
            terms: [take(rows, 16), take(rows, 16)],
        }
    }
}

/// A chunk of a head whose corrected values and whose dv are known.
pub(super) struct Finish<'a> {
    pub steps: &'a GradientSteps<'a>,
    pub io: &'a BackwardIo,
    pub chunk: &'a Chunk,
    pub slot: &'a Slot<Parts>,
    pub sums: Sums,
    /// The state before the chunk, and the gradient of the state after it.
    pub states: [Matrix; 2],
}

impl Finish<'_> {
    /// Computes the gradients, with S the state before the chunk, D the gradient of the state after
    /// it, dP = (dout uᵀ) ∘ decay, and with the delta rule dB = −(dv uᵀ) ∘ decay below the diagonal:
    ///
    /// ```text
    /// dq = from_start ∘ dout Sᵀ + dP k
    /// dk = to_end ∘ u Dᵀ + dPᵀ q − from_start ∘ dv Sᵀ + dB k + dBᵀ k;   dβ = de · e
    /// ```
    ///
    /// # Safety
    /// The caller guarantees what [`Steps`](super::steps::Steps) says.
    #[inline(always)]
    pub unsafe fn all<S: Simd>(&self, simd: S, prefetch: &mut Prefetch, columns: Matrix) {
        let Finish { steps, io, chunk, slot, sums, states } = self;
        let (decays, member) = (slot.decays(), chunk.member);
        let (count, v_dim) = (chunk.rows.len(), io.v.dim);
        let results = [&io.dq, &io.dk, &io.dv];
        let begins = results.map(|result| steps.begins(result, member));
        let [dq, dk] = [0, 1].map(|i| if begins[i] { sums.shared[i] } else { sums.own[i] });
        let Parts { q, q_faded, k, k_faded, u, dout, p, dp, .. } = slot.parts;
        let [by_row, by_key] = sums.terms;
        let mut terms = Terms { by_row, by_key, by_column: [0.0; CHUNK] };
        // SAFETY: the caller guarantees the memory and the rows of the arrays.
        unsafe {
            sums.terms.into_iter().for_each(|sums| sums.clear(count));
            for (state, turned) in states.iter().zip(sums.states) {
                transpose(simd, *state, (turned.row, v_dim), turned);
            }
            let [state, d] = sums.states;
            let (first, last) = (decays.runs.first(), decays.runs.last());

            let size = (first.clone(), 0..v_dim);
            product_and_zeros(simd, prefetch, (dout.left(), state), dq, size, count);
            decays.add_dots(simd, [q_faded, dq], first, by_row);
            decays.fade(simd, Side::Start, (dq, dq), (1.0, false));

            product_and_zeros(simd, prefetch, (u.left(), d), dk, (last.clone(), 0..v_dim), count);
            decays.add_dots(simd, [k_faded, dk], last, by_key);
            decays.fade(simd, Side::End, (dk, dk), (1.0, false));

            let pairs = Pairs { a: q, b: k, p, sign: 1.0, strict: false };
            decays.gradients(simd, prefetch, (&pairs, dp), [dq, dk], &mut terms);
            scale_all(simd, dq, count, steps.scale);
            if steps.beta.is_some() {
                self.through_keys(simd, prefetch, (dk, columns), &mut terms);
            }
            self.decay_gradients(simd, &terms);
            self.collect(simd, begins, [dq, dk]);
        }
    }

    /// Adds to the gradients of keys what the delta rule takes through them, and computes those of
    /// β.
    ///
    /// # Safety
    /// The caller guarantees what [`Finish::all`] asks for.
    #[inline(always)]
    unsafe fn through_keys<S: Simd>(
        &self,
        simd: S,
        prefetch: &mut Prefetch,
        (dk, columns): (Matrix, Matrix),
        terms: &mut Terms,
    ) {
        let Finish { steps, io, chunk, slot, sums, .. } = self;
        let (decays, count, v_dim) = (slot.decays(), chunk.rows.len(), io.v.dim);
        let Parts { k, minus_k, u, e, minus_b, dp, de, dv, .. } = slot.parts;
        let (taken, first) = (sums.taken, decays.runs.first());
        let (batch, head) = steps.head(chunk.member);
        // SAFETY: the caller guarantees the memory and the rows of the arrays.
        unsafe {
            let sides = (dv.left(), sums.states[0]);
            let size = (first.clone(), 0..v_dim);
            product_and_zeros(simd, prefetch, sides, taken, size, count);
            decays.add_dots(simd, [minus_k, taken], first, terms.by_row);
            decays.fade(simd, Side::Start, (taken, dk), (-1.0, true));

            transpose(simd, u, (count, u.row), columns);
            scores(simd, prefetch, (dv, columns), dp, (count, v_dim));
            let pairs = Pairs { a: k, b: k, p: minus_b, sign: -1.0, strict: true };
            decays.gradients(simd, prefetch, (&pairs, dp), [dk, dk], terms);
            if let Some(dbeta) = &io.dbeta {
                for (i, row) in chunk.rows.clone().enumerate() {
                    let (de, e) = (de.at.add(i * de.row), e.at.add(i * e.row));
                    *dbeta.row(batch, row, head).cast::<f32>() = dot(simd, de, e, u.row);
                }
            }
        }
    }

    /// Adds up the gradients of members that share a head, and stores each sum that is complete.
    ///
    /// # Safety
    /// The caller guarantees what [`Finish::all`] asks for.
    #[inline(always)]
    unsafe fn collect<S: Simd>(&self, simd: S, begins: [bool; 3], [dq, dk]: [Matrix; 2]) {
        let Finish { steps, io, chunk, slot, sums, .. } = self;
        let (member, count) = (chunk.member, chunk.rows.len());
        let results = [(&io.dq, dq), (&io.dk, dk), (&io.dv, slot.parts.dv)];
        for (i, (result, own)) in results.into_iter().enumerate() {
            let (sum, complete) = (sums.shared[i], steps.begins(result, member + 1));
            // SAFETY: the caller guarantees the memory and the rows of the results.
            unsafe {
                let mut total = sum;
                if !begins[i] {
                    add_rows(simd, sum, own, count);
                } else if complete {
                    total = own;
                } else if own.at != sum.at {
                    own.at.copy_to_nonoverlapping(sum.at, count * sum.row);
                }
                if complete {
                    let head = head_of(result, steps.log_decay, steps.head(member));
                    store(simd, &result.head_rows(head, &chunk.rows), total);
                }
            }
        }
    }

    /// Computes the gradients of the log decays.
    ///
    /// A token's log decay scales what earlier tokens and the state before the chunk give to this
    /// token and to later tokens. Its gradient is a sum, in float64, of
    ///
    /// - pairs of tokens of the chunk: the sums of P ∘ dP and B ∘ dB by rows less the sums by
    ///   columns, from the token on, without the diagonal, which no decay scales,
    /// - the state before the chunk with queries, and with keys that the delta rule takes from it,
    ///   from the token on,
    /// - keys before the token with the gradient of the state after the chunk,
    /// - the state before with the gradient of the state after.
    ///
    /// No term is a small difference of large sums, and errors do not add up over chunks.
    ///
    /// # Safety
    /// The caller guarantees what [`Finish::all`] asks for.
    #[inline(always)]
    unsafe fn decay_gradients<S: Simd>(&self, simd: S, terms: &Terms) {
        let Finish { steps, io, chunk, slot, sums, .. } = self;
        let (decays, (batch, head)) = (slot.decays(), steps.head(chunk.member));
        let (count, [state, d]) = (chunk.rows.len(), sums.states);
        let (mut rows, mut keys) = ([0.0; CHUNK], [0.0; CHUNK]);
        // SAFETY: the caller guarantees the memory, which has a vector for each row of a chunk, and
        // the rows of the arrays.
        unsafe {
            let crossing = decays.carry().map_or(0.0, |carry| {
                f64::from(*carry) * f64::from(dot(simd, state.at, d.at, io.v.dim * d.row))
            });
            add_lanes(simd, terms.by_row, count, &mut rows);
            add_lanes(simd, terms.by_key, count, &mut keys);
            let (mut before, mut sum) = ([0.0; CHUNK], crossing);
            for (before, key) in before.iter_mut().zip(&keys[..count]) {
                *before = sum;
                sum += f64::from(*key);
            }
            let mut sum = 0.0;
            for (i, row) in chunk.rows.clone().enumerate().rev() {
                sum += f64::from(rows[i]) - f64::from(terms.by_column[i]);
                let target = io.dlog_decay.row(batch, row, head).cast::<f32>();
                if decays.runs.resets(i) {
                    // Nothing passes a reset, and the sum over pairs of the run before starts anew.
                    *target = 0.0;
                    sum = 0.0;
                } else {
                    *target = (sum + before[i]) as f32;
                }
            }
        }
    }
}

/// Adds a += b.
///
/// # Safety
/// The caller guarantees that both have these rows, of the same number of whole vectors, are this
/// thread's and do not overlap.
#[inline(always)]
unsafe fn add_rows<S: Simd>(simd: S, a: Matrix, b: Matrix, rows: usize) {
    for row in 0..rows {
        for d in (0..a.row).step_by(S::LANES) {
            // SAFETY: the caller guarantees that both have this row of whole vectors.
            unsafe {
                let (a, b) = (a.at.add(row * a.row + d), b.at.add(row * b.row + d));
                simd.store(a, simd.add(simd.load(a), simd.load(b)));
            }
        }
    }
}

/// Writes the sum of the lanes of each row's vector.
///
/// # Safety
/// The caller guarantees that `sums` have a vector for each row of a chunk.
#[inline(always)]
unsafe fn add_lanes<S: Simd>(simd: S, sums: Matrix, count: usize, to: &mut [f32; CHUNK]) {
    let mut columns = [0.0f32; 16 * 16];
    for first in (0..count).step_by(S::LANES) {
        // SAFETY: no vector has more than 16 lanes, and a chunk is a multiple of the lanes.
        unsafe {
            simd.transpose(sums.at.add(first * sums.row), sums.row, columns.as_mut_ptr(), S::LANES);
            let mut total = simd.zero();
            for lane in 0..S::LANES {
                total = simd.add(total, simd.load(columns.as_ptr().add(lane * S::LANES)));
            }
            simd.store(to.as_mut_ptr().add(first), total);
        }
    }
}
