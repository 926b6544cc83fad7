//! Gradients, from the last chunk to the first: the gradient of the state, and what it needs.

use std::ops::Range;

use super::BackwardIo;
use super::chunk::{CHUNK, product, scale_all, scores, transpose, triangular_product};
use super::correct::Equations;
use super::decays::{DecayScratch, Decays, Pairs, Side, Take};
use super::finish::{Finish, Sums};
use super::head_of;
use super::prefetch::Prefetch;
use super::steps::{Chunk, Slot, States, Steps, padded};
use crate::host::array::HostArray;
use crate::host::matmul::{Matrix, Write};
use crate::host::simd::Simd;

/// The gradients of the states of a group of heads, and all other gradients if the states are there.
///
/// With q the scaled queries, P and B as in [`StateSteps`](super::states::StateSteps), D the
/// gradient of the state after a chunk, and dv = du, or with the delta rule
///
/// ```text
/// de = du − Bᵀ dv;   dv = β ∘ de
/// ```
///
/// each chunk computes
///
/// ```text
/// du = Pᵀ dout + (to_end ∘ k) D
/// D = carry ∘ D + (from_start ∘ q)ᵀ dout − (from_start ∘ k)ᵀ dv, the last term with the delta rule
/// ```
pub(super) struct GradientSteps<'a> {
    pub q: &'a HostArray,
    /// Keys, unless the gradient of the state is all that is wanted, and no rule corrects values.
    pub k: Option<&'a HostArray>,
    /// Factor on the queries.
    pub scale: f32,
    pub dout: &'a HostArray,
    pub log_decay: &'a HostArray,
    /// β of the delta rule.
    pub beta: Option<&'a HostArray>,
    /// Batch entry and heads of decays.
    pub heads: (usize, Range<usize>),
    /// All other gradients.
    pub all: Option<AllGradients<'a>>,
}

/// What the gradients of queries, keys, values and decays need.
pub(super) struct AllGradients<'a> {
    pub io: &'a BackwardIo,
    /// The states of each head before the chunks from number `first` on.
    pub states: &'a [States],
    pub first: usize,
}

#[derive(Clone, Copy)]
pub(super) struct Parts {
    decays: DecayScratch,
    pub q: Matrix,
    /// from_start ∘ q.
    pub q_faded: Matrix,
    pub k: Matrix,
    /// to_end ∘ k.
    pub k_faded: Matrix,
    /// −from_start ∘ k.
    pub minus_k: Matrix,
    pub beta: Matrix,
    pub e: Matrix,
    pub u: Matrix,
    pub dout: Matrix,
    pub p: Matrix,
    pub dp: Matrix,
    /// −B.
    pub minus_b: Matrix,
    pub de: Matrix,
    pub dv: Matrix,
}

#[derive(Clone, Copy)]
pub(super) struct Temporary {
    /// Keys and values as columns.
    columns: [Matrix; 2],
    pub sums: Sums,
}

impl<'a> GradientSteps<'a> {
    /// Returns the batch entry and the head of decays of a member.
    pub fn head(&self, member: usize) -> (usize, usize) {
        (self.heads.0, self.heads.1.start + member)
    }

    /// Returns rows of an array, of the head that a member uses.
    fn own<'b>(&self, array: &'b HostArray, member: usize) -> (&'b HostArray, (usize, usize)) {
        (array, head_of(array, self.log_decay, self.head(member)))
    }

    /// Whether a member is the first one that uses its head of an array.
    pub fn begins(&self, array: &HostArray, member: usize) -> bool {
        self.head(member).1.is_multiple_of(self.log_decay.heads / array.heads)
    }

    /// Whether the members before a member have not read its head of an array.
    fn packs(&self, array: &HostArray, member: usize) -> bool {
        member == 0 || self.begins(array, member)
    }

    /// Returns the state before a chunk, if it is there.
    pub fn state_before(&self, chunk: &Chunk) -> Option<(&'a BackwardIo, Matrix)> {
        let AllGradients { io, states, first } = self.all.as_ref()?;
        Some((io, states[chunk.member].before(chunk.number - first)))
    }

    /// Copies keys, and values without the delta rule, if the member before left others.
    ///
    /// # Safety
    /// The caller guarantees what [`Steps`] says.
    #[inline(always)]
    unsafe fn pack_shared<S: Simd>(
        &self,
        simd: S,
        chunk: &Chunk,
        slot: &Slot<Parts>,
        columns: [Matrix; 2],
    ) {
        let Parts { k, u, .. } = slot.parts;
        let values = self.all.as_ref().filter(|_| self.beta.is_none()).map(|all| &all.io.v);
        let arrays = [(self.k, k, columns[0]), (values, u, columns[1])];
        for (array, packed, turned) in arrays {
            let Some(array) = array else { continue };
            if self.packs(array, chunk.member) {
                let (array, head) = self.own(array, chunk.member);
                // SAFETY: the caller guarantees the memory and the rows.
                unsafe {
                    array.head_rows(head, &chunk.rows).pack(simd, packed);
                    transpose(simd, packed, (chunk.rows.len(), packed.row), turned);
                }
            }
        }
    }

    /// Computes B and the corrected values.
    ///
    /// # Safety
    /// The caller guarantees what [`Steps`] says, and that keys are packed.
    #[inline(always)]
    unsafe fn correct_values<S: Simd>(
        &self,
        simd: S,
        prefetch: &mut Prefetch,
        chunk: &Chunk,
        (parts, decays): (&Parts, &Decays),
        columns: [Matrix; 2],
    ) {
        let Parts { k, minus_k, beta, e, u, minus_b, .. } = *parts;
        let (Some(betas), runs) = (self.beta, &decays.runs) else { return };
        // SAFETY: the caller guarantees the memory and the rows.
        unsafe {
            betas.head_rows(self.head(chunk.member), &chunk.rows).pack_column(beta.at);
            let pairs = Pairs { a: k, b: k, p: minus_b, sign: -1.0, strict: true };
            decays.scores(simd, prefetch, &pairs, columns[0], k.row);
            decays.fade(simd, Side::Start, (k, minus_k), (-1.0, false));
            let Some((io, state)) = self.state_before(chunk) else { return };
            let (array, head) = self.own(&io.v, chunk.member);
            array.head_rows(head, &chunk.rows).pack(simd, e);
            let size = (runs.first(), 0..e.row, 0..io.k.dim);
            product(simd, prefetch, (minus_k.left(), state), e, size, Write::Add);
            let (beta, columns_of_u) = (beta.at, 0..u.row);
            Equations { runs, minus_b, beta, e, x: u, columns: columns_of_u, backward: false }
                .solve(simd, prefetch);
            transpose(simd, u, (chunk.rows.len(), u.row), columns[1]);
        }
    }
}

impl Steps for GradientSteps<'_> {
    type Parts = Parts;
    type Temporary = Temporary;

    fn members(&self) -> usize {
        self.heads.1.len()
    }

    fn state(&self) -> [usize; 2] {
        [self.q.dim, padded(self.dout.dim)]
    }

    fn corrects(&self) -> bool {
        self.beta.is_some()
    }

    fn take_parts(&self, take: &mut Take<'_>) -> Parts {
        let (kw, vw) = (padded(self.q.dim), padded(self.dout.dim));
        let if_any = |condition| CHUNK * usize::from(condition);
        let with_keys = if_any(self.k.is_some());
        let (corrected, all) = (if_any(self.beta.is_some()), if_any(self.all.is_some()));
        Parts {
            decays: DecayScratch::take(take, self.log_decay, kw),
            q: take(CHUNK, kw),
            q_faded: take(CHUNK, kw),
            k: take(with_keys, kw),
            k_faded: take(with_keys, kw),
            minus_k: take(corrected, kw),
            beta: take(1, corrected),
            e: take(corrected.min(all), vw),
            u: take(all, vw),
            dout: take(CHUNK, vw),
            p: take(with_keys, CHUNK),
            dp: take(all, CHUNK),
            minus_b: take(corrected, CHUNK),
            de: take(corrected, vw),
            dv: take(with_keys, vw),
        }
    }

    fn take_temporary(&self, take: &mut Take<'_>) -> Temporary {
        let (kw, vw) = (padded(self.q.dim), padded(self.dout.dim));
        let columns = [take(kw, CHUNK), take(vw, CHUNK)];
        let rows = if self.all.is_some() { CHUNK } else { 0 };
        Temporary { columns, sums: Sums::take(take, self.log_decay, rows, [kw, vw]) }
    }

    fn prefetch(&self, chunk: &Chunk) -> Prefetch {
        let values = self.all.as_ref().map(|all| &all.io.v);
        let arrays = [Some(self.q), Some(self.dout), self.k, values].into_iter().flatten();
        let begun = arrays.filter(|array| self.packs(array, chunk.member));
        let prefetch = match self.state_before(chunk) {
            Some((io, state)) => Prefetch::none().and_scratch(state, io.k.dim),
            None => Prefetch::none(),
        };
        let products = if self.all.is_some() { 7 } else { 1 };
        let products = products * if self.beta.is_some() { 2 } else { 1 };
        begun
            .fold(prefetch, |prefetch, array| {
                let (array, head) = self.own(array, chunk.member);
                prefetch.and(&array.head_rows(head, &chunk.rows))
            })
            .over(products)
    }

    #[inline(always)]
    unsafe fn prepare<S: Simd>(
        &self,
        simd: S,
        prefetch: &mut Prefetch,
        chunk: &Chunk,
        slot: &mut Slot<Parts>,
        Temporary { columns, .. }: Temporary,
    ) {
        let Parts { q, q_faded, k, k_faded, u, dout, p, dp, de, dv, .. } = slot.parts;
        let (rows, count, head) = (&chunk.rows, chunk.rows.len(), self.head(chunk.member));
        // SAFETY: the caller guarantees the memory and the rows of the arrays.
        unsafe {
            let decays = Decays::read(simd, self.log_decay, head, rows, &slot.parts.decays);
            let (array, of_q) = self.own(self.q, chunk.member);
            array.head_rows(of_q, rows).pack(simd, q);
            scale_all(simd, q, count, self.scale);
            self.dout.head_rows(head, rows).pack(simd, dout);
            decays.fade(simd, Side::Start, (q, q_faded), (1.0, false));
            if self.k.is_some() {
                self.pack_shared(simd, chunk, slot, columns);
                decays.pair(simd);
                let pairs = Pairs { a: q, b: k, p, sign: 1.0, strict: false };
                decays.scores(simd, prefetch, &pairs, columns[0], self.q.dim);
                decays.fade(simd, Side::End, (k, k_faded), (1.0, false));
                self.correct_values(simd, prefetch, chunk, (&slot.parts, &decays), columns);
                let du = if self.beta.is_some() { de } else { dv };
                let (size, since) = ((0..count, 0..du.row), |row| decays.runs.since(row));
                let sides = (p.transposed(), dout);
                triangular_product(simd, prefetch, sides, du, size, &since, Write::Set);
            }
            if self.all.is_some() {
                let (sides, size) = ((dout, columns[1]), (count, u.row));
                scores(simd, prefetch, sides, dp, size);
            }
            slot.decays = Some(decays);
        }
    }

    #[inline(always)]
    unsafe fn correct<S: Simd>(
        &self,
        simd: S,
        prefetch: &mut Prefetch,
        slot: &Slot<Parts>,
        d: Matrix,
        columns: Range<usize>,
    ) {
        if self.k.is_none() {
            return;
        }
        let Parts { k_faded, beta, minus_b, de, dv, .. } = slot.parts;
        let (runs, corrected) = (&slot.decays().runs, self.beta.is_some());
        let du = if corrected { de } else { dv };
        // SAFETY: the caller guarantees the memory.
        unsafe {
            let size = (runs.last(), columns.clone(), 0..self.q.dim);
            product(simd, prefetch, (k_faded.left(), d), du, size, Write::Add);
            if corrected {
                let beta = beta.at;
                Equations { runs, minus_b, beta, e: de, x: dv, columns, backward: true }
                    .solve(simd, prefetch);
            }
        }
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(
        &self,
        simd: S,
        prefetch: &mut Prefetch,
        chunk: &Chunk,
        (slot, temporary): (&mut Slot<Parts>, Temporary),
        d: Matrix,
    ) {
        let Some((io, state)) = self.state_before(chunk) else { return };
        let Temporary { columns, sums } = temporary;
        let finish = Finish { steps: self, io, chunk, slot, sums, states: [state, d] };
        // SAFETY: the caller guarantees the memory and the rows of the arrays.
        unsafe { finish.all(simd, prefetch, columns[1]) }
    }

    #[inline(always)]
    unsafe fn update<S: Simd>(
        &self,
        simd: S,
        prefetch: &mut Prefetch,
        slot: &Slot<Parts>,
        (before, after): (Option<Matrix>, Matrix),
        columns: Range<usize>,
    ) {
        let Parts { q_faded, dout, minus_k, dv, .. } = slot.parts;
        let decays = slot.decays();
        let size = (0..self.q.dim, columns, decays.runs.first());
        let (sides, write) = ((q_faded.transposed(), dout), decays.onto(before));
        // SAFETY: the caller guarantees the memory.
        unsafe {
            product(simd, prefetch, sides, after, size.clone(), write);
            if self.beta.is_some() {
                let sides = (minus_k.transposed(), dv);
                product(simd, prefetch, sides, after, size, Write::Add);
            }
        }
    }
}
