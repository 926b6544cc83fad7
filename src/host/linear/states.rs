//! States and outputs, chunk after chunk.

use std::ops::Range;

use super::chunk::{
    CHUNK, product, product_and_zeros, scale_all, store, transpose, triangular_product,
};
use super::correct::Equations;
use super::decays::{DecayScratch, Decays, Pairs, Side, Take};
use super::head_of;
use super::prefetch::Prefetch;
use super::steps::{Chunk, Slot, Steps, padded};
use crate::host::array::HostArray;
use crate::host::matmul::{Matrix, Write};
use crate::host::simd::Simd;

/// The states of a head, and its outputs if there are queries.
///
/// With P = (q kᵀ) ∘ decay, B = (k kᵀ) ∘ decay below the diagonal, S the state before a chunk, and
/// the values u = v, or with the delta rule
///
/// ```text
/// e = v − (from_start ∘ k) S − B u;   u = β ∘ e
/// ```
///
/// each chunk computes
///
/// ```text
/// o = (from_start ∘ q) S + P u;   S = carry ∘ S + (to_end ∘ k)ᵀ u
/// ```
pub(super) struct StateSteps<'a> {
    /// Queries, their scale and the outputs.
    pub outputs: Option<(&'a HostArray, f32, &'a HostArray)>,
    pub k: &'a HostArray,
    /// Factor on the keys.
    pub scale: f32,
    pub v: &'a HostArray,
    pub log_decay: &'a HostArray,
    /// β of the delta rule.
    pub beta: Option<&'a HostArray>,
    /// Batch entry and head of decays.
    pub head: (usize, usize),
    /// Columns of zeros before the values.
    pub zeros: usize,
}

#[derive(Clone, Copy)]
pub(super) struct Parts {
    decays: DecayScratch,
    /// Scaled queries, and then with the decay from the start.
    q: Matrix,
    /// Keys, and then with the decay to the end.
    k: Matrix,
    /// −from_start ∘ k.
    minus_k: Matrix,
    beta: Matrix,
    e: Matrix,
    u: Matrix,
    p: Matrix,
    /// −B.
    minus_b: Matrix,
}

#[derive(Clone, Copy)]
pub(super) struct Temporary {
    /// Keys as columns.
    columns: Matrix,
    o: Matrix,
}

impl StateSteps<'_> {
    /// Returns rows of an array, of the head that this head uses.
    fn own<'b>(&self, array: &'b HostArray) -> (&'b HostArray, (usize, usize)) {
        (array, head_of(array, self.log_decay, self.head))
    }

    /// Copies the values, behind columns of zeros.
    ///
    /// # Safety
    /// The caller guarantees that the rows are readable, and that `to` has room for them.
    #[inline(always)]
    unsafe fn pack_values<S: Simd>(&self, simd: S, rows: &Range<usize>, to: Matrix) {
        let (array, head) = self.own(self.v);
        let rows = array.head_rows(head, rows);
        // SAFETY: the caller guarantees the rows and the room.
        unsafe {
            if self.zeros == 0 {
                rows.pack(simd, to);
            } else {
                to.clear(rows.rows.len());
                rows.copy(simd, to.skip_columns(self.zeros));
            }
        }
    }
}

impl Steps for StateSteps<'_> {
    type Parts = Parts;
    type Temporary = Temporary;

    fn members(&self) -> usize {
        1
    }

    fn state(&self) -> [usize; 2] {
        [self.k.dim, padded(self.zeros + self.v.dim)]
    }

    fn corrects(&self) -> bool {
        self.beta.is_some()
    }

    fn take_parts(&self, take: &mut Take<'_>) -> Parts {
        let (kw, vw) = (padded(self.k.dim), self.state()[1]);
        let with_queries = CHUNK * usize::from(self.outputs.is_some());
        let corrected = CHUNK * usize::from(self.beta.is_some());
        Parts {
            decays: DecayScratch::take(take, self.log_decay, kw),
            q: take(with_queries, kw),
            k: take(CHUNK, kw),
            minus_k: take(corrected, kw),
            beta: take(1, corrected),
            e: take(corrected, vw),
            u: take(CHUNK, vw),
            p: take(with_queries, CHUNK),
            minus_b: take(corrected, CHUNK),
        }
    }

    fn take_temporary(&self, take: &mut Take<'_>) -> Temporary {
        let (kw, vw) = (padded(self.k.dim), self.state()[1]);
        Temporary { columns: take(kw, CHUNK), o: take(CHUNK, vw) }
    }

    fn prefetch(&self, chunk: &Chunk) -> Prefetch {
        let queries = self.outputs.map(|(q, ..)| q);
        let arrays = [Some(self.k), Some(self.v), queries].into_iter().flatten();
        let prefetch = arrays.fold(Prefetch::none(), |prefetch, array| {
            let (array, head) = self.own(array);
            prefetch.and(&array.head_rows(head, &chunk.rows))
        });
        let products =
            1 + 2 * usize::from(queries.is_some()) + 2 * usize::from(self.beta.is_some());
        prefetch.over(products)
    }

    #[inline(always)]
    unsafe fn prepare<S: Simd>(
        &self,
        simd: S,
        prefetch: &mut Prefetch,
        Chunk { rows, .. }: &Chunk,
        slot: &mut Slot<Parts>,
        temporary: Temporary,
    ) {
        let Parts { q, k, minus_k, beta, e, u, p, minus_b, .. } = slot.parts;
        let (count, dim) = (rows.len(), self.k.dim);
        // SAFETY: the caller guarantees the memory and the rows of the arrays.
        unsafe {
            let decays = Decays::read(simd, self.log_decay, self.head, rows, &slot.parts.decays);
            let (array, head) = self.own(self.k);
            array.head_rows(head, rows).pack(simd, k);
            scale_all(simd, k, count, self.scale);
            self.pack_values(simd, rows, if self.beta.is_some() { e } else { u });
            if self.outputs.is_some() || self.beta.is_some() {
                transpose(simd, k, (count, k.row), temporary.columns);
                decays.pair(simd);
            }
            if let Some((queries, scale, _)) = self.outputs {
                let (array, head) = self.own(queries);
                array.head_rows(head, rows).pack(simd, q);
                scale_all(simd, q, count, scale);
                let pairs = Pairs { a: q, b: k, p, sign: 1.0, strict: false };
                decays.scores(simd, prefetch, &pairs, temporary.columns, dim);
                decays.fade(simd, Side::Start, (q, q), (1.0, false));
            }
            if let Some(array) = self.beta {
                array.head_rows(self.head, rows).pack_column(beta.at);
                let pairs = Pairs { a: k, b: k, p: minus_b, sign: -1.0, strict: true };
                decays.scores(simd, prefetch, &pairs, temporary.columns, dim);
                decays.fade(simd, Side::Start, (k, minus_k), (-1.0, false));
            }
            decays.fade(simd, Side::End, (k, k), (1.0, false));
            slot.decays = Some(decays);
        }
    }

    #[inline(always)]
    unsafe fn correct<S: Simd>(
        &self,
        simd: S,
        prefetch: &mut Prefetch,
        slot: &Slot<Parts>,
        state: Matrix,
        columns: Range<usize>,
    ) {
        if self.beta.is_none() {
            return;
        }
        let Parts { minus_k, beta, e, u, minus_b, .. } = slot.parts;
        let runs = &slot.decays().runs;
        // SAFETY: the caller guarantees the memory.
        unsafe {
            let size = (runs.first(), columns.clone(), 0..self.k.dim);
            product(simd, prefetch, (minus_k.left(), state), e, size, Write::Add);
            let beta = beta.at;
            Equations { runs, minus_b, beta, e, x: u, columns, backward: false }
                .solve(simd, prefetch);
        }
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(
        &self,
        simd: S,
        prefetch: &mut Prefetch,
        Chunk { rows, .. }: &Chunk,
        (slot, temporary): (&mut Slot<Parts>, Temporary),
        state: Matrix,
    ) {
        let Some((.., outputs)) = self.outputs else { return };
        let (Parts { q, u, p, .. }, Temporary { o, .. }) = (slot.parts, temporary);
        let runs = &slot.decays().runs;
        let (count, until) = (rows.len(), |row| runs.until(row));
        // SAFETY: the caller guarantees the memory and the rows of the outputs.
        unsafe {
            let size = (runs.first(), 0..self.k.dim);
            product_and_zeros(simd, prefetch, (q.left(), state), o, size, count);
            let size = (0..count, 0..o.row);
            triangular_product(simd, prefetch, (p.left(), u), o, size, &until, Write::Add);
            store(simd, &outputs.head_rows(self.head, rows), o);
        }
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
        let (Parts { k, u, .. }, decays) = (slot.parts, slot.decays());
        let (size, write) = ((0..self.k.dim, columns, decays.runs.last()), decays.onto(before));
        // SAFETY: the caller guarantees the memory.
        unsafe { product(simd, prefetch, (k.transposed(), u), after, size, write) }
    }
}
