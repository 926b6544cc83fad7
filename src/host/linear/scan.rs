//! The state that tokens leave.

use super::Scan;
use super::ahead::Ahead;
use super::chunk::{CHUNK, Matrix, Size, product, rows_of, scale_rows, store};
use super::decays::Decays;
use crate::host::array::HostArray;
use crate::host::pack::Scratch;
use crate::host::simd::{Simd, Task};

/// The state of one head after all its tokens, from zero.
pub(super) struct ScanHead<'a> {
    pub scan: &'a Scan<'a>,
    pub batch: usize,
    pub head: usize,
}

impl Task for ScanHead<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (left, right) = (self.scan.left, self.scan.right);
        let (kw, vw) = (left.dim.next_multiple_of(S::LANES), right.dim.next_multiple_of(S::LANES));
        let sizes = [(CHUNK, kw), (CHUNK, vw), (left.dim, vw)];
        let total = sizes.iter().map(|(rows, row)| Scratch::footprint(rows * row)).sum();
        Scratch::with(total, |mut scratch| {
            let [k, v, state] =
                sizes.map(|(rows, row)| Matrix { at: scratch.take(rows * row), row });
            simd.vectorize(Walk { of: &self, k, v, state });
        });
    }
}

/// A task of its own, since what is called from a closure is compiled without the instructions.
struct Walk<'a> {
    of: &'a ScanHead<'a>,
    k: Matrix,
    v: Matrix,
    state: Matrix,
}

impl Task for Walk<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Walk { of: &ScanHead { scan, batch, head }, k, v, state } = self;
        let (dim, len) = (scan.left.dim, scan.left.rows.len());
        let count = len.div_ceil(CHUNK);
        let head_of = |array: &HostArray| (batch, head * array.heads / scan.log_decay.heads);
        let rows_at = |number: usize| {
            let chunk = if scan.backward { count - 1 - number } else { number };
            chunk * CHUNK..len.min((chunk + 1) * CHUNK)
        };
        // SAFETY: all of it is scratch, the inputs have these rows, and this task alone writes its
        // head's state.
        unsafe {
            state.at.write_bytes(0, dim * state.row);
            for number in 0..count {
                let rows = rows_at(number);
                let decays = Decays::read(simd, scan.log_decay, (batch, head), &rows);
                let arrays = [scan.left, scan.right];
                rows_of(scan.left, head_of(scan.left), &rows).pack(simd, k.at, k.row);
                rows_of(scan.right, head_of(scan.right), &rows).pack(simd, v.at, v.row);
                let (factors, depth) = match scan.backward {
                    true => (&decays.from_start, decays.first()),
                    false => (&decays.to_end, decays.last()),
                };
                scale_rows(simd, k, k.row, &factors[..rows.len()]);
                let mut ahead = Ahead::none();
                if number + 1 < count {
                    for array in arrays {
                        let rows = rows_of(array, head_of(array), &rows_at(number + 1));
                        ahead = ahead.and(&rows);
                    }
                }
                let size = Size { rows: 0..dim, columns: state.row, depth };
                let write = decays.onto(state.at);
                product(simd, &mut ahead.over(1), (k.transposed(), v), state, size, write);
            }
            store(simd, &rows_of(scan.out, (batch, head), &(0..dim)), state);
            simd.fence();
        }
    }
}
