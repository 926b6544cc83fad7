//! Partial results of chunks, and their merge.

use super::DecodeIo;
use super::element::whole_loads;
use super::plan::{Plan, Query};
use crate::host::array::HostArray;
use crate::host::matmul::Matrix;
use crate::host::pack::store_row;
use crate::host::scratch::{Scratch, ScratchTask};
use crate::host::simd::Simd;
use crate::problem::Dtype;

/// The largest score m of some keys, and Σ e^(score − m).
pub(super) type State = [f32; 2];

/// The partial results of all chunks: Σ e^(score − m) v, with its [`State`].
pub(super) struct Partials {
    /// `[1, partials, heads, value_dim]`, stored by head, with rows of whole vectors.
    o: HostArray,
    /// `[1, partials, heads, 2]`, stored by head.
    state: HostArray,
}

impl Partials {
    /// Takes memory for all partial results.
    pub fn new(io: &DecodeIo<'_>, plan: &Plan) -> Partials {
        let array = |dim| HostArray::accumulator(1, 0..plan.partials, io.q.heads, dim);
        Partials { o: array(io.v.dim.next_multiple_of(16)), state: array(2) }
    }

    /// Writes the partial result of a head. `o` is one row.
    ///
    /// # Safety
    /// The caller guarantees that `o` has a row of whole vectors, and that no other thread uses this
    /// partial result.
    #[inline(always)]
    pub unsafe fn set<S: Simd>(
        &self,
        simd: S,
        (partial, head): (usize, usize),
        o: Matrix,
        state: State,
    ) {
        let to = self.o.row(0, partial, head).cast::<f32>();
        // SAFETY: the caller guarantees the row, and `new` has taken memory for the result.
        unsafe {
            for d in (0..o.row).step_by(S::LANES) {
                simd.store(to.add(d), simd.load(o.at.add(d)));
            }
            self.state.row(0, partial, head).cast::<State>().write(state);
        }
    }

    /// Returns a partial result.
    ///
    /// # Safety
    /// The caller guarantees that [`Partials::set`] has written it.
    #[inline(always)]
    unsafe fn get(&self, partial: usize, head: usize) -> (*const f32, State) {
        let state = self.state.row(0, partial, head).cast::<State>();
        // SAFETY: the caller guarantees the result.
        (self.o.row(0, partial, head).cast::<f32>().cast_const(), unsafe { state.read() })
    }
}

/// Merges the partial results of one head of one query in the order of the chunks:
///
/// ```text
/// m = max m_c;   l = Σ l_c e^(m_c − m);   o = Σ o_c e^(m_c − m) / l
/// ```
pub(super) struct MergeTask<'a> {
    io: &'a DecodeIo<'a>,
    partials: &'a Partials,
    query: &'a Query,
    head: usize,
}

impl<'a> MergeTask<'a> {
    /// Returns the task `index` of all heads of all queries with several partial results.
    pub fn new(
        io: &'a DecodeIo<'a>,
        plan: &'a Plan,
        partials: &'a Partials,
        index: usize,
    ) -> MergeTask<'a> {
        let query = &plan.queries[plan.merges[index / io.q.heads]];
        MergeTask { io, partials, query, head: index % io.q.heads }
    }
}

impl ScratchTask for MergeTask<'_> {
    /// The output.
    type Parts = Matrix;

    fn lay_out<S: Simd>(&self, scratch: &mut Scratch) -> Matrix {
        Matrix::take(scratch, (1, self.io.v.dim.next_multiple_of(S::LANES)))
    }

    #[inline(always)]
    unsafe fn work<S: Simd>(&self, simd: S, o: Matrix) {
        let MergeTask { io, partials, query, head } = *self;
        let all = query.partial..query.partial + query.chunks.len();
        // SAFETY: the tasks of all chunks have written the partial results and ended. The output is
        // scratch of this task, which alone writes the result of its query and head.
        unsafe {
            let m = largest(all.clone().map(|partial| partials.get(partial, head).1[0]));
            let mut sum = 0.0;
            o.clear(1);
            for partial in all {
                let (from, [own, l]) = partials.get(partial, head);
                let weight = weight(own, m);
                sum += weight * l;
                for d in (0..o.row).step_by(S::LANES) {
                    let (at, x) = (o.at.add(d), simd.load(from.add(d)));
                    simd.store(at, simd.mul_add(x, simd.splat(weight), simd.load(at)));
                }
            }
            write(simd, io, (query.at, head), o, [m, sum]);
        }
    }
}

/// Returns the largest of the scores of some parts, without NaN; −∞ for none.
pub(super) fn largest(scores: impl Iterator<Item = f32>) -> f32 {
    scores.fold(f32::NEG_INFINITY, f32::max)
}

/// Returns e^(own − m), the weight of a part whose largest score is `own`, where m is the largest of
/// all parts. The differences of infinities would be NaN.
pub(super) fn weight(own: f32, m: f32) -> f32 {
    match own {
        f32::NEG_INFINITY => 0.0,
        own if own == m => 1.0,
        own => (own - m).exp(),
    }
}

/// Returns 1 / l, the factor that makes a sum the output, and lse = m + ln l; 0 and −∞ without keys.
pub(super) fn finished([m, l]: State) -> (f32, f32) {
    if l == 0.0 { (0.0, f32::NEG_INFINITY) } else { (1.0 / l, m + l.ln()) }
}

/// Writes the output and lse of one head of a query: o / l and m + ln l, or 0 and −∞ without keys.
/// `o` has the order of scratch ([`whole_loads`]).
///
/// # Safety
/// The caller guarantees that `o` holds a row of the output, and that the results of this query and
/// head are this thread's.
#[inline(always)]
pub(super) unsafe fn write<S: Simd>(
    simd: S,
    io: &DecodeIo<'_>,
    ((entry, t), head): ((usize, usize), usize),
    o: Matrix,
    state: State,
) {
    let (factor, lse) = finished(state);
    let to = io.o.row(entry, t, head);
    // SAFETY: the caller guarantees both rows.
    unsafe {
        if io.k.dtype == Dtype::Bf16 && whole_loads(io, S::LANES) {
            for d in 0..io.o.dim {
                let (load, at) = (d / (2 * S::LANES), d % (2 * S::LANES));
                let from = (2 * load + at % 2) * S::LANES + at / 2;
                *to.cast::<f32>().add(d) = *o.at.add(from) * factor;
            }
        } else {
            store_row(simd, o.at, factor, to, Dtype::F32, io.o.dim);
        }
        io.lse.row(entry, t, head).cast::<f32>().write(lse);
    }
}

/// Writes the results of a query that sees nothing.
pub(super) fn write_nothing(io: &DecodeIo<'_>, (entry, t): (usize, usize)) {
    for head in 0..io.q.heads {
        // SAFETY: the caller of `partial` guarantees the memory of the results, and that this call
        // alone uses them. No task writes the results of this query.
        unsafe {
            io.o.row(entry, t, head).write_bytes(0, io.o.dim * io.o.dtype.bytes());
            io.lse.row(entry, t, head).cast::<f32>().write(f32::NEG_INFINITY);
        }
    }
}
