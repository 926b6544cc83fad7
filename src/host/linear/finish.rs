//! The gradients of a chunk of one head, once the gradient of the state after it is known.

use super::BackwardIo;
use super::chunk::{CHUNK, product_and_zeros, scale_all, scores, store, transpose};
use super::decay_gradients::DecayGradients;
use super::decays::{Pairs, Side, Take, Terms, by_channel};
use super::gradients::{GradientSteps, Parts};
use super::head_of;
use super::prefetch::Prefetch;
use super::steps::{Chunk, Slot, padded};
use crate::host::array::HostArray;
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
    pub fn take(
        take: &mut Take<'_>,
        log_decay: &HostArray,
        rows: usize,
        [kw, vw]: [usize; 2],
    ) -> Sums {
        let of_terms = if by_channel(log_decay) { kw } else { padded(1) };
        let width = |columns: usize| if rows > 0 { columns } else { 0 };
        Sums {
            states: [take(width(vw), kw), take(width(vw), kw)],
            own: [kw, kw, vw].map(|width| take(rows, width)),
            shared: [kw, kw, vw].map(|width| take(rows, width)),
            taken: take(rows, kw),
            terms: [take(rows, of_terms), take(rows, of_terms)],
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
            DecayGradients {
                of: (&io.log_decay, &io.dlog_decay, steps.head(member)),
                decays,
                rows: &chunk.rows,
                terms: &terms,
                columns: (sums.states, v_dim),
            }
            .compute(simd);
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
