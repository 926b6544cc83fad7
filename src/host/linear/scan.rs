//! The state that tokens leave.

use super::Scan;
use super::chunk::{CHUNK, product, scale_all, scale_rows, store};
use super::decays::Decays;
use super::prefetch::Prefetch;
use crate::host::array::HostArray;
use crate::host::matmul::Matrix;
use crate::host::scratch::{Scratch, ScratchTask};
use crate::host::simd::Simd;

/// The state of one head after all its tokens, from a state of zeros.
pub(super) struct ScanHead<'a> {
    pub scan: &'a Scan<'a>,
    /// Batch entry and head.
    pub head: (usize, usize),
}

impl ScratchTask for ScanHead<'_> {
    /// The left and the right side of a chunk, and the state.
    type Parts = [Matrix; 3];

    fn lay_out<S: Simd>(&self, scratch: &mut Scratch) -> [Matrix; 3] {
        let (left, right) = (self.scan.left, self.scan.right);
        let (kw, vw) = (left.dim.next_multiple_of(S::LANES), right.dim.next_multiple_of(S::LANES));
        [(CHUNK, kw), (CHUNK, vw), (left.dim, vw)].map(|size| Matrix::take(scratch, size))
    }

    #[inline(always)]
    unsafe fn work<S: Simd>(&self, simd: S, [k, v, state]: [Matrix; 3]) {
        let ScanHead { scan, head } = *self;
        let (dim, len) = (scan.left.dim, scan.left.rows.len());
        let count = len.div_ceil(CHUNK);
        let head_of = |array: &HostArray| super::head_of(array, scan.log_decay, head);
        let rows_at = |number: usize| {
            let chunk = if scan.backward { count - 1 - number } else { number };
            chunk * CHUNK..len.min((chunk + 1) * CHUNK)
        };
        // SAFETY: the matrices are scratch of this task. The caller of `scan` guarantees that the
        // inputs have these rows, and that this call alone uses the state. This task alone writes
        // its head's state.
        unsafe {
            state.clear(dim);
            for number in 0..count {
                let rows = rows_at(number);
                let decays = Decays::read(simd, scan.log_decay, head, &rows);
                scan.left.head_rows(head_of(scan.left), &rows).pack(simd, k);
                scan.right.head_rows(head_of(scan.right), &rows).pack(simd, v);
                let (factors, depth) = match scan.backward {
                    true => (&decays.from_start, decays.first()),
                    false => (&decays.to_end, decays.last()),
                };
                scale_all(simd, k, rows.len(), scan.scale);
                scale_rows(simd, k, &factors[..rows.len()]);
                let mut prefetch = Prefetch::none();
                if number + 1 < count {
                    for array in [scan.left, scan.right] {
                        let rows = array.head_rows(head_of(array), &rows_at(number + 1));
                        prefetch = prefetch.and(&rows);
                    }
                }
                let (sides, write) = ((k.transposed(), v), decays.onto(state.at));
                product(simd, &mut prefetch.over(1), sides, state, (0..dim, depth), write);
            }
            store(simd, &scan.out.head_rows(head, &(0..dim)), state);
            simd.fence();
        }
    }
}
